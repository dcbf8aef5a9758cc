"""Every callback that comes with Cadenza meets the requirements of `check_callback`: one instance serves many runs, for one."""

from __future__ import annotations

import pytest

from cadenza import callbacks as shipped
from cadenza.testing import Recorder, check_callback
from tests.callbacks.shipped import CALLBACKS

FACTORIES = {**{name: row.cases for name, row in CALLBACKS.items()}, "Recorder": [Recorder]}
CASES = {f"{name}-{number}": one for name, several in FACTORIES.items() for number, one in enumerate(several)}
MEASURED = ["time/*", "*_per_s", "*/mfu", "process/*", "machine/*"]  # these differ from run to run
ALIKE = {
    *("Alert-1", "BestWeights-1", "ClipGradients-1", "DeviceStats-1", "EarlyStopping-1", "Freeze-1", "LearningRate-1"),
    *("LearningRate-2", "LogTraining-1", "ScheduleValue-1", "SequenceLength-1", "Warmup-1"),
}
"""Cases of which another one of the same callback is in the usual run."""


@pytest.mark.parametrize("case", [pytest.param(one, marks=pytest.mark.long) if one in ALIKE else one for one in CASES])
def test_a_shipped_callback_meets_the_requirements(case: str) -> None:
    # StopOnNonFinite must know before the update whether the loss is finite, and Recover before a save.
    reads = isinstance(CASES[case](), shipped.Recover | shipped.StopOnNonFinite)
    check_callback(CASES[case], ignore=MEASURED, reads=reads)
