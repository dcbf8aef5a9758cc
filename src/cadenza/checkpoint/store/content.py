"""The content of a checkpoint, copied to the host."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from cadenza.checkpoint.store.manifest import is_other
from cadenza.checkpoint.store.shards import Shard
from cadenza.drivers.sharding import is_sharded
from cadenza.errors import StateError
from cadenza.optim.finite import all_finite
from cadenza.status.plain import encode, host_copy


class JoinedFiles(dict[str, Path]):
    """Local files that join a checkpoint, by their paths in it, such as ``"pretrained/config.json"``.

    They appear with the checkpoint, and are verified and deleted with it. They must not change until it is written.
    """

    def __setitem__(self, name: str, source: Path) -> None:
        if not is_other(name):
            raise StateError(
                f"the path of a file that joins a checkpoint must be in a folder of it, with '/' between its parts; got "
                f"{name!r}. Give a path such as 'pretrained/config.json'."
            )
        super().__setitem__(name, source)

    def take_folder(self, name: str, folder: Path) -> None:
        """Add all files in a local folder, as the folder `name`. The local folder is deleted once the checkpoint is written."""
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        for source in sorted(folder.rglob("*")):
            if source.is_file():
                self[f"{name}/{source.relative_to(folder).as_posix()}"] = source


@dataclass(slots=True)
class Content:
    """The content of a checkpoint, copied to the host, so that it does not change during the write."""

    model: dict[str, Tensor]
    """The model's ``state_dict``, tensors only; a file of its own, readable by every tool that knows safetensors."""
    plain: Any
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    """The facts for the manifest: step, epoch, reason, and whether the checkpoint is exact."""
    model_shards: dict[str, Shard] = field(default_factory=dict)
    """The shards of the model on this rank."""
    shards: dict[str, Shard] = field(default_factory=dict)
    """The shards of other tensors on this rank."""
    own: tuple[Any, dict[str, Tensor]] | None = None
    """The state that only this rank has, as plain values and tensors. That of the main process is in `plain`."""
    files: JoinedFiles = field(default_factory=lambda: JoinedFiles())
    """Local files that join the checkpoint, by their paths in it. Each is in a folder there, such as ``pretrained/``."""

    finite: bool | None = None
    """Whether all weights of this rank are finite; None until `is_finite` has looked."""

    @property
    def nbytes(self) -> int:
        """The size of the tensors that are not in shards, in bytes."""
        return sum(tensor.nbytes for tensors in (self.model, self.tensors) for tensor in tensors.values())

    @staticmethod
    def of(
        model: Mapping[str, Tensor],
        state: Any,
        facts: Mapping[str, Any],
        *,
        own: Any = None,
        whole: bool = True,
        copy: Callable[[Tensor], Tensor] = host_copy,
    ) -> Content:
        """Copy model and state to the host, each tensor once.

        Args:
            model: The weights by name.
            state: Nested plain values and tensors.
            facts: Facts for the manifest.
            own: The state that only this rank has, if it is not the main process.
            whole: Copy the tensors that are not in shards: the main process writes them.
            copy: Copies a tensor; `HostBuffers` may leave the copy on the device. With `host_view`, the content must be
                written, or `mapped` with `host_copy`, before it changes.

        Raises:
            StateError: A value in `state` or `own` cannot be saved.
        """

        def copied(tensor: Tensor) -> Tensor | Shard | None:
            return Shard.of(tensor, copy) if is_sharded(tensor) else copy(tensor) if whole else None

        plain, others = encode(state, copied)
        both = ({name: copied(tensor) for name, tensor in model.items()}, others)
        tensors, other_tensors = ({name: one for name, one in some.items() if isinstance(one, Tensor)} for some in both)
        shards, other_shards = ({name: one for name, one in some.items() if isinstance(one, Shard)} for some in both)
        mine = None if own is None else encode(own)
        return Content(tensors, plain, other_tensors, dict(facts), shards, other_shards, mine)

    def is_finite(self) -> bool:
        """Return whether all weights of this rank are finite. They are read once, by the first call."""
        if self.finite is None:
            self.finite = all_finite([*self.model.values(), *(one.part for one in self.model_shards.values())])
        return self.finite

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Content:
        """Return it with each tensor replaced. With `host_copy`, it may be written later."""
        shards, other = (
            {name: replace(one, part=change(one.part)) for name, one in some.items()}
            for some in (self.model_shards, self.shards)
        )
        model, tensors = ({name: change(one) for name, one in some.items()} for some in (self.model, self.tensors))
        return replace(self, model=model, tensors=tensors, model_shards=shards, shards=other)

    def emptied(self) -> list[Tensor]:
        """Return its tensors and keep none, so that nothing reads them from here any more."""
        parts = [one.part for some in (self.model_shards, self.shards) for one in some.values()]
        found = [*self.model.values(), *self.tensors.values(), *parts]
        self.model, self.tensors, self.model_shards, self.shards = {}, {}, {}, {}
        return found
