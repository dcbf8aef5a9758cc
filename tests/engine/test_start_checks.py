"""What a run says before its first step, so that it does not fail after an hour."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cadenza import Callback, on
from cadenza.callbacks import Checkpoint, ClipGradients, EarlyStopping, Ema, Evaluate, LogTraining
from cadenza.errors import CheckpointMismatchError, DataError, MonitorError
from cadenza.loading import Mixture
from cadenza.run import Run
from cadenza.testing import tiny_loader, tiny_run, tiny_trainer

POSITION = "a checkpoint inside an epoch cannot be continued: a DataLoader over an IterableDataset can only start"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from [sample for batch in tiny_loader() for sample in zip(*batch, strict=True)]


def stream() -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=4)


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
    loads: list[int] = []

    @on(Callback.on_load)
    def loaded(run: Run, checkpoint: object) -> None:
        loads.append(run.progress.step)

    again = trainer(2)
    again.callbacks.append(loaded)
    rows = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    with pytest.raises(DataError, match="must continue at batch 2 of an epoch"):
        again.fit(resume="auto")
    assert not loads
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
    steps: list[int] = []

    @on(Callback.on_step_end)
    def note(run: Run) -> None:
        steps.append(run.progress.step)

    empty: DataLoader[Any] = DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=4)
    with pytest.raises(DataError, match="the loader of 'eval' is empty: expected at least one batch; got a DataLoader with 0"):
        tiny_run(callbacks=[Evaluate(empty), note], steps=2)
    assert not steps


@pytest.mark.parametrize(
    ("result", "shown"), [(None, "NoneType"), (3.0, "float"), ({"a": torch.ones(3)}, r"{a: float32[3]}"), ("x", "str")]
)
def test_an_evaluation_without_a_result_is_named_once(result: object, shown: str, caplog: pytest.LogCaptureFixture) -> None:
    tiny_run(callbacks=[Evaluate(tiny_loader(), "1 step", compute=lambda model, batch: result)], steps=3)
    found = [text for text in caplog.messages if "reports no result" in text]
    assert len(found) == 1
    assert f"got {shown}" in found[0]


def test_a_hook_that_uses_the_batches_needs_no_result(caplog: pytest.LogCaptureFixture) -> None:
    @on(Callback.on_eval_batch_end)
    def used(run: Run, evaluation: object, batch: object, outputs: object) -> None: ...

    tiny_run(callbacks=[Evaluate(tiny_loader(), "1 step", compute=lambda model, batch: None), used], steps=1)
    assert "reports no result" not in caplog.text


@pytest.mark.parametrize("sanity", [0, 1])
def test_a_monitor_of_an_evaluation_without_a_result_is_an_error(sanity: int) -> None:
    def nothing(model: nn.Module, batch: object) -> None: ...

    evaluate = Evaluate(tiny_loader(), "1 step", compute=nothing, sanity_batches=sanity)
    with pytest.raises(MonitorError, match=r"'eval' reported only \[\]"):
        tiny_run(callbacks=[evaluate, EarlyStopping("eval/loss", "min")], steps=2)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("16-mixed", "fp16"), ("bf16-mixed", "bf16"), (torch.bfloat16, "bf16"), (torch.float16, "fp16"), (32, "fp32")],
)
def test_names_of_precisions_in_other_libraries_are_translated(given: Any, meant: str) -> None:
    with pytest.raises(ValueError, match=f"precision must be one of fp32, bf16, fp16; got .*Did you mean '{meant}'"):
        tiny_trainer(precision=given)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda text: ClipGradients(text), "max_norm"),
        (lambda text: ClipGradients(max_value=text), "max_value"),
        (lambda text: Ema(text), "decay"),
        (lambda text: EarlyStopping("eval/loss", "min", min_delta=text), "min_delta"),
    ],
)
def test_a_number_that_is_a_text_is_named(make: Any, named: str) -> None:
    with pytest.raises(TypeError, match=f"{named} must be a number; got"):
        make("0.5")


def test_a_mismatch_lists_ten_differences(tmp_path: Path) -> None:
    def model(layers: int, bias: bool) -> nn.Module:
        return nn.Sequential(*[nn.Linear(2, 2, bias=bias) for _ in range(layers)], nn.Linear(2, 1))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value: Tensor = model(torch.ones(1, 2)).sum()
        return value

    given: dict[str, Any] = {"compute_loss": loss, "directory": tmp_path, "callbacks": [Checkpoint("1 step")]}
    tiny_trainer(model=model(12, True), steps=1, **given).fit()
    with pytest.raises(CheckpointMismatchError, match="does not fit this trainer; nothing was restored") as caught:
        tiny_trainer(model=model(12, False), steps=2, **given).fit(resume="auto")
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
