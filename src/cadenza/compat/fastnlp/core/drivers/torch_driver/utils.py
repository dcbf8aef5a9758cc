"""``fastNLP.core.drivers.torch_driver.utils``: seeds, and the device of an optimizer's state."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cadenza.drivers.rendezvous import rendezvous_of


def torch_seed_everything(seed: int | None = None, add_global_rank_to_seed: bool = True) -> int:
    """Seed the random generators of ``random``, numpy and torch; return the seed of this process.

    The seed without the rank is in the environment variable ``FASTNLP_GLOBAL_SEED``.

    Args:
        seed: None: the seed of that variable, or else a random one; 42 in a process of a launcher.
        add_global_rank_to_seed: Add the rank, so that each process has its own seed.
    """
    meeting = rendezvous_of()
    if seed is None:
        drawn = int.from_bytes(os.urandom(4), "little") if meeting is None else 42
        seed = int(os.environ.get("FASTNLP_GLOBAL_SEED", drawn))
    seed = int(seed) % 2**32
    os.environ["FASTNLP_GLOBAL_SEED"] = str(seed)
    if add_global_rank_to_seed and meeting is not None:
        seed = (seed + meeting.rank) % 2**32
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def optimizer_state_to_device(state: Mapping[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Return a copy of an optimizer's ``state_dict`` with its tensors on a device."""
    return {name: _on(part, device) for name, part in state.items()}


def _on(part: Any, device: torch.device | str) -> Any:
    if isinstance(part, Tensor):
        return part.detach().to(device, copy=True)
    return optimizer_state_to_device(part, device) if isinstance(part, Mapping) else part
