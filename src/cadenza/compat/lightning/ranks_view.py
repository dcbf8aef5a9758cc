"""The processes of a run, as ``trainer`` and ``trainer.strategy`` describe them."""

from __future__ import annotations

import os

from cadenza.compat.adapter.view import View


class RanksView(View):
    """A view that says which process this is."""

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self._run.is_main

    @property
    def global_rank(self) -> int:
        """The index of this process among all."""
        return self._run.driver.rank

    @property
    def local_rank(self) -> int:
        """The index of this process on its machine."""
        return self._run.driver.local_rank

    @property
    def node_rank(self) -> int:
        """The index of this machine."""
        return self.global_rank // self._ranks_here

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._run.driver.world_size

    @property
    def _ranks_here(self) -> int:
        """The number of processes on this machine."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
