"""What a run says before its first step, so that it does not fail after an hour, and once of a loss that is not finite."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate, FindLearningRate, LogTraining, StopOnNonFinite
from cadenza.errors import CheckpointMismatchError, DataError, MonitorError
from cadenza.loading import Mixture
from cadenza.status.decisions import Decision
from cadenza.testing import Recorder, tiny_loader, tiny_run, tiny_trainer
from tests.engine.parts import Stream

POSITION = "a checkpoint inside an epoch cannot be continued: a DataLoader over an IterableDataset can only start"


def stream() -> DataLoader[Any]:
    return DataLoader(Stream([sample for batch in tiny_loader() for sample in zip(*batch, strict=True)]), batch_size=4)


def test_a_stream_without_a_position_is_named_before_a_checkpoint_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_trainer(loader=stream(), steps=1, directory=tmp_path / "a", callbacks=[Checkpoint("1 step")]).fit()
    assert POSITION in caplog.text
    caplog.clear()
    tiny_trainer(loader=stream(), steps=1, directory=tmp_path / "b", callbacks=[Checkpoint("1 step")]).fit(replay=True)
    tiny_trainer(loader=stream(), steps=1).fit()
    assert POSITION not in caplog.text
    mixed = Mixture({"stream": stream(), "list": list(tiny_loader())}, mode="cycle")
    tiny_trainer(loader=mixed, steps=1, directory=tmp_path / "c", callbacks=[Checkpoint("1 step")]).fit()
    assert POSITION in caplog.text


def test_a_resume_that_cannot_find_its_position_changes_nothing(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        callbacks = [Checkpoint("1 step"), LogTraining("1 step")]
        return tiny_trainer(loader=stream(), steps=steps, directory=tmp_path, callbacks=callbacks)

    trainer(1).fit()
    again, loads = trainer(2), Recorder(Callback.on_load)
    again.callbacks.append(loads)
    rows = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    with pytest.raises(DataError, match="must continue at batch 2 of an epoch"):
        again.fit(resume="auto")
    assert not loads.names
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == rows
    assert trainer(2).fit(resume="auto", replay=True).progress.step == 2


def test_a_generator_for_several_epochs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    batches = list(tiny_loader())
    with pytest.raises(DataError, match="gave no batch in epoch 2"):
        tiny_trainer(loader=(one for one in batches), epochs=2).fit()
    assert "the training loader is a generator, which can be read once, and the run has 2 epochs" in caplog.text
    caplog.clear()
    tiny_trainer(loader=(one for one in batches), epochs=1).fit()
    assert "read once" not in caplog.text


def test_an_empty_evaluation_loader_is_an_error_before_the_first_step() -> None:
    steps, empty = Recorder(Callback.on_step_end), DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=4)
    with pytest.raises(DataError, match="the loader of 'eval' is empty: expected at least one batch; got a DataLoader with 0"):
        tiny_run(callbacks=[Evaluate(empty), steps], steps=2)
    assert not steps.names


@pytest.mark.parametrize(
    ("result", "shown"), [(None, "NoneType"), (3.0, "float"), ({"a": torch.ones(3)}, r"{a: float32[3]}"), ("x", "str")]
)
def test_an_evaluation_without_a_result_is_named_once_unless_a_hook_uses_its_batches(
    result: object, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate = Evaluate(tiny_loader(), "1 step", compute=lambda model, batch: result)
    tiny_run(callbacks=[evaluate], steps=3)
    (told,) = [text for text in caplog.messages if "reports no result" in text]
    assert f"got {shown}" in told
    caplog.clear()
    tiny_run(callbacks=[evaluate, on(Callback.on_eval_batch_end)(lambda run, *_: None)], steps=1)
    assert "reports no result" not in caplog.text


@pytest.mark.parametrize("sanity", [0, 1])
def test_a_monitor_of_an_evaluation_without_a_result_is_an_error(sanity: int) -> None:
    evaluate = Evaluate(tiny_loader(), "1 step", compute=lambda model, batch: None, sanity_batches=sanity)
    with pytest.raises(MonitorError, match=r"'eval' reported only \[\]"):
        tiny_run(callbacks=[evaluate, EarlyStopping("eval/loss", "min")], steps=2)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("16-mixed", "fp16"), ("bf16-mixed", "bf16"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"), (32, "fp32")],
)
def test_names_of_precisions_in_other_libraries_are_translated(given: Any, meant: str) -> None:
    with pytest.raises(ValueError, match=f"precision must be one of fp32, bf16, fp16; got .*Did you mean '{meant}'"):
        tiny_trainer(precision=given)


def test_a_mismatch_lists_ten_differences(tmp_path: Path) -> None:
    def fit(bias: bool, steps: int) -> Run:
        model = nn.Sequential(*[nn.Linear(2, 2, bias=bias) for _ in range(12)], nn.Linear(2, 1))
        options: dict[str, Any] = {"directory": tmp_path, "callbacks": [Checkpoint("1 step")], "steps": steps}
        trainer = tiny_trainer(model=model, compute_loss=lambda model, batch: model(torch.ones(1, 2)).sum(), **options)
        return trainer.fit(resume="auto")

    fit(True, 1)
    with pytest.raises(CheckpointMismatchError, match="does not fit this trainer; nothing was restored") as caught:
        fit(False, 2)
    assert str(caught.value).count("now nothing") == 10
    assert "and 3 more. Give the arguments" in str(caught.value)


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = tiny_trainer(steps=2, directory="~/run", callbacks=[Checkpoint("1 step", directory="~/saved")]).fit()
    assert run.info.directory == tmp_path / "run"
    assert json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))["checkpoints"] == [str(tmp_path / "saved")]
    assert tiny_trainer(steps=3, directory="~/b").fit(resume="~/saved/last").progress.step == 3
    assert not (tmp_path / "~").exists()


NAN = math.nan
LOG = LogTraining("1 step", throughput=False, lr=False)


def told(run: Run) -> list[Decision]:
    return [decision for decision in run.decisions if decision.what == "loss not finite"]


@pytest.mark.parametrize("last", [NAN, 1.0])
def test_the_first_that_is_logged_is_told_and_the_outcome_says_since_when(
    last: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = tiny_run(losses=[1.0, 2.0, math.inf, NAN, last], callbacks=[LOG], directory=tmp_path)
    assert [str(decision.why) for decision in told(run)] == ["train/loss is inf at step 3"]
    assert caplog.text.count("train/loss is inf at step 3, and training goes on") == 1
    assert "StopOnNonFinite()" in caplog.text
    ending = "from step 3 on" if math.isnan(last) else "at step 3"
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("finished", f"the limit is reached; train/loss was not finite {ending}")
    assert json.loads((tmp_path / "run.json").read_text())["outcome"]["reason"] == run.outcome.reason


def test_without_a_record_the_last_loss_of_each_epoch_is_looked_at() -> None:
    seen: list[int] = []
    count = on(Callback.on_epoch_end)(lambda run: seen.append(len(told(run))))
    broken: dict[str, Any] = {"compute_loss": lambda model, batch: model(batch[0]).mean() * 1e38 * 1e38}
    run = tiny_run(epochs=3, callbacks=[count], **broken)
    assert seen == [0, 1, 1]
    assert [(one.when.epoch, one.when.step) for one in told(run)] == [(1, 5)]
    assert run.outcome is not None
    assert run.outcome.reason.endswith("; the loss was not finite from step 5 on")
    inside = tiny_run(steps=3, **broken)  # no epoch is over
    assert [one.when.step for one in told(inside)] == [3]


def test_the_loss_of_an_evaluation_counts_and_its_metrics_do_not() -> None:
    run = tiny_run(callbacks=[Evaluate(tiny_loader(1), compute=lambda model, batch: {"loss": torch.tensor(NAN)})], epochs=2)
    assert [one.why for one in told(run)] == ["eval/loss is nan at step 5"]
    assert not told(tiny_run(callbacks=[on(Callback.on_step_end)(lambda run: run.log("train/score", NAN))]))


def test_what_stop_on_non_finite_says_is_not_said_twice() -> None:
    for action in ("stop", "skip"):
        run = tiny_run(losses=[1.0, NAN], callbacks=[StopOnNonFinite(cast("Any", action)), LOG])
        assert not told(run)
        assert run.outcome is not None
        assert run.outcome.reason == ("the loss is nan" if action == "stop" else "the limit is reached")


def test_a_trial_that_diverges_and_one_overflow_in_fp16_are_no_fault_and_a_lasting_one_is_mentioned_by_any_outcome() -> None:
    """In fp16 the scaler leaves out the update of an overflow."""
    assert not told(tiny_run(callbacks=[FindLearningRate(start=1.0, end=1e30, steps=30), LOG]))
    assert not told(tiny_run(losses=[1.0, math.inf, 1.0, 1.0], precision="fp16", callbacks=[LOG]))
    stop = on(Callback.on_step_end, at=3)(lambda run: run.stop("enough"))
    run = tiny_run(losses=[1.0, NAN, NAN, NAN], callbacks=[LOG, stop])
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "enough; train/loss was not finite from step 2 on")
    lasting = tiny_run(losses=[1.0, math.inf, NAN, NAN], precision="fp16", callbacks=[LOG])
    assert lasting.outcome is not None
    assert lasting.outcome.reason.endswith("; train/loss was not finite from step 2 on")
