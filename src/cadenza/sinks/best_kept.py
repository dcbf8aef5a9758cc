"""The best checkpoints of a run, as the sinks show them when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.records.formats import number
from cadenza.status.run_info import working_directory

if TYPE_CHECKING:
    from cadenza.run import Run


def best_lines(run: Run) -> list[str]:
    """Return a line for each result by which a checkpoint was kept as the best: value, step and path.

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint, Evaluate
    >>> from cadenza.testing import tiny_loader, tiny_run
    >>> callbacks = [Evaluate(tiny_loader(), "2 steps"), Checkpoint(keep_best=("eval/loss", "min"))]
    >>> best_lines(tiny_run(directory=tempfile.mkdtemp(), callbacks=callbacks))  # doctest: +ELLIPSIS
    ['best eval/loss ... at step 4: ...checkpoints/step-00000004']
    """
    found = [one for decision in run.decisions if decision.what == "best kept" for one in decision.data["best"]]
    return [
        f"best {one['monitor']} {number(float(one['value']))} at step {one['step']}: {_path(run, one['path'])}" for one in found
    ]


def _path(run: Run, path: str) -> str:
    if "://" in path:
        return path
    whole, here = run.info.base / path, working_directory()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)
