"""`ReplayCheck`, `Capsule` and `Recover` with tensor parallelism, and with a compiled model."""

from __future__ import annotations

import logging
import math
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from cadenza import Run, Trainer
from cadenza.callbacks import Capsule, Checkpoint, Recover, ReplayCheck
from cadenza.checkpoint.capsules import capsules_in, facts_of_capsule
from cadenza.drivers.sharding import local
from cadenza.testing import launch
from cadenza.timetravel import replay_capsule
from tests.callbacks.flips import same, state_of, trainer
from tests.callbacks.test_recover import trainer_in
from tests.distributed.parts import samples, squared_error
from tests.distributed.test_tensor_parallel import network, tensor_parallel


def trained(*callbacks: Any, bad: int | None = None, directory: Path | None = None) -> Run:
    """Train for 6 steps. A sample may have a target that is NaN."""
    data = samples(24)
    if bad is not None:
        data.tensors[1][bad] = math.nan
    return Trainer(
        network(dropout=0.2),
        lambda parameters: torch.optim.AdamW(parameters, 1e-2),
        DataLoader(data, 4, shuffle=True),
        squared_error,
        max_epochs=1,
        seed=3,
        directory=directory,
        callbacks=callbacks,
        driver=tensor_parallel(),
        progress=False,
    ).fit()


def numbers(run: Run) -> list[Any]:
    return [local(one).tolist() for one in run.model.state_dict().values()]


def left_out(run: Run) -> list[Any]:
    return [one.data["samples"] for one in run.decisions if one.what == "batch left out"]


def elsewhere(told: BufferingHandler) -> list[str]:
    return [one.getMessage() for one in told.buffer if "written elsewhere" in one.getMessage()]


def test_with_tensor_parallelism_steps_are_repeated_and_a_sample_is_named_and_left_out(tmp_path: Path) -> None:
    def train() -> list[Any]:
        check = ReplayCheck(every="2 steps")
        checked, plain = trained(check), trained()
        told = BufferingHandler(1000)
        logging.getLogger("cadenza").addHandler(told)
        healed = trained(Capsule(), Recover(), Checkpoint("2 steps"), bad=5, directory=tmp_path)
        (out,) = left_out(healed)
        return [
            check.steps,
            numbers(checked) == numbers(plain),
            healed.progress.step,
            all(5 in one for one in out),
            elsewhere(told),
        ]

    assert launch(train) == [[[2, 4, 6], True, 6, True, []]] * 2
    for path in capsules_in(tmp_path):
        facts = facts_of_capsule(path)
        assert (facts["guilty_samples"], facts["module"], facts["weights_exact"]) == ([5], None, False)


def test_with_a_compiled_model_a_capsule_is_written_and_the_batch_is_left_out(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"compile": {"backend": "aot_eager"}}
    check = ReplayCheck(every="2 steps")
    assert same(state_of(trainer([check], **plain).fit()), state_of(trainer([], **plain).fit()))
    assert check.steps == [2, 4, 6, 8, 10]
    healed = trainer_in(tmp_path, {100: math.nan}, Recover(), Capsule(), epochs=1, **plain).fit()
    ((out,),) = left_out(healed)
    assert 100 in out
    facts = facts_of_capsule(capsules_in(tmp_path)[0])
    assert (facts["guilty_samples"], facts["module"], facts["weights_exact"]) == ([100], "MSELoss", True)
    again = replay_capsule(trainer_in(tmp_path / "again", {}, epochs=1, **plain), tmp_path)
    assert (again.same, again.located.rows) == (True, [facts["batches"][0]["samples"].index(100)])
