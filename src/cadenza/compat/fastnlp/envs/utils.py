"""``fastNLP.envs.utils``."""

from __future__ import annotations

import os
import time

import torch

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.envs.env import FASTNLP_GLOBAL_SEED

advise(__name__)


def get_gpu_count() -> int:
    """Return the number of GPUs; -1 without one."""
    return torch.cuda.device_count() or -1


def get_global_seed() -> int:
    """Return the seed of all processes. The first call chooses it, from the clock, and puts it in the environment."""
    return int(os.environ.setdefault(FASTNLP_GLOBAL_SEED, str(time.time_ns() // 1000 % 1_000_000)))
