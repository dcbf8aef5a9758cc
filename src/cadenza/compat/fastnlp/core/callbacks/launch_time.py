"""The launch time of this process and its child processes."""

from __future__ import annotations

import os
from datetime import datetime

from cadenza.compat.fastnlp.envs import FASTNLP_LAUNCH_TIME


def launch_time() -> str:
    """Return the name of the folder for all savers of one launch, such as ``2026-11-21-09_30_00_123456``."""
    return os.environ.setdefault(FASTNLP_LAUNCH_TIME, datetime.now().strftime("%Y-%m-%d-%H_%M_%S_%f"))
