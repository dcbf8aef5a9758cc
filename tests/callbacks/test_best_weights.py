"""BestWeights: the model ends with the weights of its best evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import BestWeights, Checkpoint
from cadenza.checkpoint.store import Store
from cadenza.errors import MonitorError
from cadenza.testing import simulate, tiny_run, tiny_trainer
from tests.callbacks.test_checkpoint import Scripted


def weights_at_each_step(seen: dict[int, float]) -> Callback:
    def look(run: Run) -> None:
        seen[run.progress.step] = run.model.get_parameter("weight").item()

    return on(Callback.on_step_end)(look)


def test_the_run_ends_with_the_weights_of_the_best_evaluation() -> None:
    seen: dict[int, float] = {}
    best = BestWeights("eval/loss", "min")
    run = tiny_run(steps=5, callbacks=[weights_at_each_step(seen), Scripted(loss=[3.0, 1.0, 2.0, 1.0, 5.0]), best])
    assert best.step == 2
    assert run.model.get_parameter("weight").item() == seen[2] != seen[5]
    assert run.why("restored").endswith("the weights of step 2: eval/loss was 1")


def test_without_restore_they_are_only_remembered() -> None:
    seen: dict[int, float] = {}
    best = BestWeights("eval/loss", "min", restore=False)
    run = tiny_run(steps=3, callbacks=[weights_at_each_step(seen), Scripted(loss=[1.0, 2.0, 3.0]), best])
    assert run.model.get_parameter("weight").item() == seen[3]
    assert best.weights is not None
    assert best.weights["weight"].item() == seen[1]


def test_buffers_belong_to_the_weights() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
    norm = model[1]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    script = Scripted(loss=[1.0, 2.0, 3.0])
    script.poisoned_at = None
    tiny_run(model=model, steps=3, callbacks=[script, BestWeights("eval/loss", "min")])
    assert norm.num_batches_tracked == 1


def test_nan_is_never_the_best() -> None:
    best = BestWeights("eval/loss", "min")
    simulate([best], metrics={"eval/loss": [float("nan"), 2.0, float("nan")]})
    assert (best.step, best.monitor.best) == (4, 2.0)


def test_an_error_leaves_the_weights_as_they_are() -> None:
    seen: dict[int, float] = {}

    @on(Callback.on_step_start, when=lambda run: run.progress.step == 3)
    def fail(run: Run) -> None:
        raise ZeroDivisionError

    trainer = tiny_trainer(
        steps=5, callbacks=[weights_at_each_step(seen), Scripted(loss=[1.0] * 5), BestWeights("eval/loss", "min"), fail]
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    assert trainer.model.get_parameter("weight").item() == seen[3]


def test_it_survives_a_resume_and_what_is_saved_last_are_the_weights_of_the_last_step(tmp_path: Path) -> None:
    seen: dict[int, float] = {}
    loss = [3.0, 1.0, 2.0, 4.0, 5.0, 6.0]

    def trainer(steps: int) -> tuple[Trainer, BestWeights]:
        best = BestWeights("eval/loss", "min")
        callbacks = [weights_at_each_step(seen), Scripted(loss=loss), best, Checkpoint("1 step")]
        return tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=callbacks), best

    first, _ = trainer(4)
    first.fit()
    assert first.model.get_parameter("weight").item() == seen[2]
    store = Store(tmp_path / "checkpoints")
    assert store.read(store.saved()[-1]).model["weight"].item() == seen[4]
    best_value = seen[2]
    second, best = trainer(6)
    second.fit(resume="auto")
    assert (best.step, best.monitor.best) == (2, 1.0)
    assert second.model.get_parameter("weight").item() == best_value


def test_the_same_callback_begins_anew_with_another_run() -> None:
    best = BestWeights("eval/loss", "min")
    for _ in range(2):
        simulate([best], metrics={"eval/loss": [3.0, 1.0]})
        assert best.step == 4
    simulate([best], metrics={"eval/loss": [7.0]})
    assert (best.step, best.monitor.best) == (2, 7.0)


def test_a_result_that_no_evaluation_reports_is_an_error_at_the_start() -> None:
    with pytest.raises(MonitorError, match="BestWeights watches 'eval/acc', but no evaluation will report it"):
        tiny_run(callbacks=[BestWeights("eval/acc", "max")])
