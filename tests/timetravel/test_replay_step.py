"""Repeating past steps: equal to the bit, without touching the run that did them."""

from __future__ import annotations

import atexit
import math
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, Ema, Evaluate, LearningRate, LogTraining, LowerRate, NonFinite, Recover, Spike
from cadenza.compat.transformers import SavePretrained
from cadenza.errors import CheckpointError, DataError, DirectoryError, DistributedError
from cadenza.records import read_records
from cadenza.sinks import Csv, JsonLines
from cadenza.testing import launch, tiny_loader, tiny_trainer
from cadenza.timetravel import replay_step
from tests.distributed.parts import rank


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with noise that is drawn anew each time: an augmentation."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        value = torch.tensor([index / 15 - 1])
        return value + 0.1 * torch.randn(1), 2 * value + 1


def trainer(directory: Path, *, steps: int = 80, saves: str = "10 steps", more: Any = (), **arguments: Any) -> Trainer:
    """Return the trainer. Two of its calls make equal runs."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    usual: dict[str, Any] = {"loader": DataLoader(Noisy(), batch_size=4, shuffle=True), "accumulate": 2, "seed": 3}
    usual |= {"device": "cpu", "driver": "single"} if "driver" not in arguments else {}
    return Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters, 0.01),
        compute_loss=supervised(nn.MSELoss()),
        max_steps=steps,
        directory=directory,
        progress=False,
        callbacks=[
            LearningRate(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 30)),
            Ema(decay=0.9),
            Evaluate(tiny_loader(), weights="ema", every="7 steps"),
            LogTraining("1 step"),
            Checkpoint(saves, keep_last=None, background=False),
            *more,
        ],
        **{**usual, **arguments},
    )


def losses_of(path: Path) -> dict[int, float]:
    return {one.step: one.values["train/loss"] for one in read_records(path / "metrics.jsonl") if "train/loss" in one.values}


def content(path: Path) -> dict[str, tuple[bytes, int]]:
    """Return the content of each file below a folder, and the time at which it was changed."""
    files = [one for one in sorted(path.rglob("*")) if one.is_file()]
    return {str(one): (one.read_bytes(), one.stat().st_mtime_ns) for one in files}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_hundred_repeated_steps_are_equal_to_the_bit(tmp_path: Path, precision: str) -> None:
    """50 of them in each precision, with augmentation, dropout, accumulation, a schedule and averaged weights."""
    trainer(tmp_path, precision=precision).fit()
    recorded, before = losses_of(tmp_path), content(tmp_path)
    repeated = 0
    for first in (11, 17, 44, 58, 71):
        with replay_step(trainer(tmp_path, precision=precision), tmp_path, first) as again:
            for step in range(first, first + 10):
                assert again.run.progress.step == step - 1
                assert again.recorded["train/loss"] == recorded[step]
                assert again.step_once() == recorded[step]
                repeated += 1
            assert again.difference is None
            assert again.compared >= 20  # the loss and the rate of each step, and evaluations
    assert repeated == 50
    assert content(tmp_path) == before


def test_the_run_stands_before_the_step_with_its_batch(tmp_path: Path) -> None:
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    @on(Callback.on_batch_start)
    def note(run: Run, batch: Any) -> None:
        seen.setdefault(run.progress.step + 1, (batch[0].clone(), run.model.get_parameter("0.weight").detach().clone()))

    trainer(tmp_path, steps=40, more=[note]).fit()
    with replay_step(trainer(tmp_path, steps=40), tmp_path, 37) as again:
        batch, weight = seen[37]
        assert again.step == 37
        assert torch.equal(again.batch[0], batch)
        assert torch.equal(again.run.model.get_parameter("0.weight"), weight)
        assert again.checkpoint.endswith("step-00000030")
        assert repr(again) == f"<Replay: before step 37, from {again.checkpoint}, 13 values equal>"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of 30 steps."""
    trainer(path := tmp_path_factory.mktemp("recorded"), steps=30).fit()
    return path


def test_the_last_step_can_be_repeated_and_no_further_one(recorded: Path) -> None:
    again = replay_step(trainer(recorded, steps=30), recorded, 30)
    assert again.step_once() == losses_of(recorded)[30]
    assert again.over
    with pytest.raises(RuntimeError, match="this replay is over"):
        again.step_once()
    again.close()


def test_the_first_difference_is_named(recorded: Path, caplog: pytest.LogCaptureFixture) -> None:
    rates = on(Callback.on_step_start, at=24)(lambda run: run.optimizers[0].param_groups[0].update(lr=0.5))
    with replay_step(trainer(recorded, steps=30, more=[rates]), recorded, 28) as again:
        found = again.difference
    assert found is not None
    assert (found.step, found.name, found.recorded, found.repeated) == (24, "train/lr", 0.01, 0.5)
    assert "The first difference is train/lr at step 24: recorded 0.01, repeated 0.5" in caplog.text


def test_a_damaged_checkpoint_is_skipped(recorded: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = shutil.copytree(recorded, tmp_path / "run")
    (run / "checkpoints/step-00000020/manifest.json").write_text("{")
    with replay_step(trainer(run, steps=30), run, 25) as again:
        assert again.checkpoint.endswith("step-00000010")
        assert again.step_once() == losses_of(run)[25]
    assert "a nearer checkpoint was skipped: step-00000020" in caplog.text


def failing(path: Path) -> Any:
    """Return a trainer of a model that fails at the 13th of 20 batches."""

    def breaks(model: nn.Module, batch: Any) -> Tensor:
        if batch[0].max() > 0.25:
            raise ValueError("the model broke")
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    saves = Checkpoint("5 steps", keep_last=None, background=False, on_exception=False)
    return tiny_trainer(compute_loss=breaks, batches=20, seed=1, directory=path, callbacks=[LogTraining("1 step"), saves])


def test_the_step_that_failed_fails_again(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the model broke"):
        failing(tmp_path).fit()
    again = replay_step(failing(tmp_path), tmp_path, 13)
    assert again.run.progress.step == 12
    with pytest.raises(ValueError, match="the model broke"):
        again.step_once()
    assert again.over
    with pytest.raises(ValueError, match=r"has no step 14: it failed after step 12\."):
        replay_step(failing(tmp_path), tmp_path, 14)


class Writes(Callback):
    """A callback of the user that writes a file elsewhere."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_step_end(self, run: Run) -> None:
        with self.path.open("a") as file:
            file.write(f"{run.progress.step}\n")


def test_sinks_and_the_callbacks_that_are_named_are_left_out(tmp_path: Path) -> None:
    run, elsewhere, own = tmp_path / "run", tmp_path / "elsewhere.csv", tmp_path / "own.txt"

    def make() -> Any:
        return trainer(run, steps=25, more=[Csv(elsewhere), JsonLines(tmp_path / "rows.jsonl"), Writes(own)])

    make().fit()
    before = content(tmp_path)
    with replay_step(make(), run, 23, leave_out=Writes) as again:
        again.step_once()
        folder = again.run.info.directory
        assert folder is not None
        assert folder.exists()
    assert content(tmp_path) == before
    assert not folder.exists()


class Requests(Callback):
    """It requests a save."""

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == 12:
            run.save("the twelfth")


class NeedsWholeEpochs(Callback):
    """It fails at the end of an epoch that is not whole."""

    def on_epoch_end(self, run: Run) -> None:
        assert run.progress.batch_in_epoch == 0, "half an epoch"


def test_an_error_of_a_callback_when_a_replay_is_closed_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Trainer:
        callbacks = [Checkpoint("2 steps", keep_last=None), NeedsWholeEpochs()]
        return tiny_trainer(directory=tmp_path, epochs=1, seed=1, callbacks=callbacks)

    make().fit()
    with replay_step(make(), tmp_path, 3) as again:
        again.step_once()
    assert again.over
    assert "an error at the end of the replay" in caplog.text
    assert "half an epoch" in caplog.text


class Exported(nn.Linear):
    def save_pretrained(self, folder: str) -> None:
        Path(folder, "exported").touch()


def test_callbacks_that_need_a_checkpoint_in_the_list_are_repeated_without_one(tmp_path: Path) -> None:
    def make() -> Trainer:
        torch.manual_seed(1)
        more = [SavePretrained(), Checkpoint("10 steps", keep_last=None, keep_best=("eval/loss", "min")), Requests()]
        return tiny_trainer(
            model=Exported(1, 1),
            directory=tmp_path,
            steps=14,
            seed=1,
            callbacks=[LogTraining("1 step"), *more, Evaluate(tiny_loader())],
        )

    make().fit()
    before = content(tmp_path)
    with replay_step(make(), tmp_path, 12) as again:
        again.step_once()
        assert again.difference is None
        assert again.step == 13
    assert content(tmp_path) == before


def test_a_step_that_a_run_in_progress_may_not_have_done_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    @on(Callback.on_step_end, at=12)
    def look(run: Run) -> None:
        for step, told in ((11, False), (18, True)):
            caplog.clear()
            with replay_step(trainer(tmp_path / "other", steps=20), tmp_path / "run", step) as again:
                assert again.step == step
            assert (f"whether the run did step {step} is not known" in caplog.text) is told

    trainer(tmp_path / "run", steps=20, saves="5 steps", more=[look]).fit()


class ReadOnce:
    """A loader that can only start at the beginning of an epoch."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


def test_mistakes_are_named(tmp_path: Path, recorded: Path) -> None:
    run = recorded
    with pytest.raises(DirectoryError, match=r"is not the directory of a run: expected a run\.json in it"):
        replay_step(trainer(run), tmp_path, 5)
    with pytest.raises(ValueError, match=r"has no step 31: it finished after step 30\."):
        replay_step(trainer(run), run, 31)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint before step 10 .* later ones: step-00000010, step-00000020, step-00000030"
    ):
        replay_step(trainer(run), run, 10)
    with pytest.raises(ValueError, match=r"ends at epoch 3, step 12.* before step 15 begins"):
        replay_step(trainer(run, steps=12), run, 15)
    with pytest.raises(ValueError, match="step must be at least 1"):
        replay_step(trainer(run), run, 0)
    stream = trainer(tmp_path / "stream", steps=12, saves="5 steps")
    stream.loader = ReadOnce(stream.loader)
    stream.fit()
    with pytest.raises(DataError) as raised:
        replay_step(stream, tmp_path / "stream", 8)
    assert "replay_step(trainer, run, step, replay=True)" in raised.value.__notes__[-1]
    with pytest.raises(TypeError, match=r"takes a cadenza\.Trainer first; got a builtins\.str"):
        replay_step("run", run, 5)  # type: ignore[arg-type]  # wrong on purpose
    one = trainer(run)
    with replay_step(one, run, 15) as again:
        with pytest.raises(RuntimeError, match="the model of this trainer is in a run or a replay that is not over"):
            replay_step(one, run, 16)
        again.step_once()
        assert again.difference is None
    with replay_step(one, run, 16) as again:
        assert again.step == 16


def on_two(path: Path) -> tuple[list[float | None], float, list[str]]:
    trainer(path, driver="ddp", steps=12, saves="5 steps").fit()
    with replay_step(trainer(path, driver="ddp", steps=12, saves="5 steps"), path, 8) as again:
        losses = [again.step_once() for _ in range(3)]
        assert again.difference is None
        assert again.compared
        step = again.run.progress.step
    return losses, step, with_mistakes(path)


def with_mistakes(path: Path) -> list[str]:
    """Return the errors of mistakes that one of two ranks makes, as this rank sees them."""
    make, first = partial(trainer, path, driver="ddp", steps=12, saves="5 steps"), rank() == 0
    told = []
    for step in (8 if first else 9, 8 if first else 0):
        with pytest.raises((ValueError, DistributedError)) as wrong:
            replay_step(make(), path, step)
        told.append(str(wrong.value))
    for fails in (False, True):
        try:
            with replay_step(make(), path, 8) as again:
                if fails and not first:
                    raise RuntimeError("an assertion of rank 1")
                if fails or first:
                    again.step_once()
        except (RuntimeError, DistributedError) as error:
            told.append(str(error))
    return told


def test_a_replay_that_nothing_refers_to_ends_in_silence(
    tmp_path: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    again = replay_step(trainer(tmp_path / "other", steps=30), recorded, 18)
    again = replay_step(trainer(tmp_path / "other", steps=30), recorded, 19)  # the first one is dropped
    assert len(list((tmp_path / "temporary").iterdir())) == 1
    assert again.step_once() is not None
    del again
    assert list((tmp_path / "temporary").iterdir()) == []
    assert caplog.messages == []


def test_a_replay_that_is_open_at_the_end_of_the_process_is_closed(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python removes the modules: an open generator would fail then."""
    at_end: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *given: at_end.append(given))
    again = replay_step(trainer(recorded, steps=30), recorded, 30)
    monkeypatch.undo()
    for function, *arguments in at_end:
        function(*arguments)
    assert again.over
    assert again.run.outcome is not None


ROLLBACKS: dict[str, Callable[[], Recover]] = {
    "guilty": lambda: Recover(when=NonFinite()),
    "since": lambda: Recover(when=NonFinite(), skip="batches of the steps since"),
    "lower": lambda: Recover(when=NonFinite(), then=LowerRate(0.5, "2 steps")),
}


@pytest.mark.parametrize("kind", ROLLBACKS)
def test_steps_after_a_rollback_leave_out_the_batches_that_the_run_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    def make() -> Trainer:
        loader = tiny_loader(12)
        for index in (3, 8):
            loader[index][0][0] = float("nan")
        callbacks = [LogTraining("1 step"), Checkpoint("2 steps", keep_last=None), ROLLBACKS[kind]()]
        return tiny_trainer(loader=loader, epochs=1, seed=1, directory=tmp_path, callbacks=callbacks)

    assert make().fit().progress.step == 12
    recorded = losses_of(tmp_path)
    assert 0 < len(recorded) < 12  # a step without batches has no loss
    caplog.clear()
    for step in (2, 3, 4, 5, 7, 8, 9, 12):
        with replay_step(make(), tmp_path, step) as again:
            assert again.step_once() == recorded.get(step), step
            assert again.difference is None
    assert all("left out" in one or "back to step" in one for one in caplog.messages)  # as the run said it


def test_batches_that_the_run_did_not_check_are_not_checked_when_their_step_is_repeated(tmp_path: Path) -> None:
    """Between two rollbacks a batch may be a spike, while the loss of its step is none."""

    def compute(model: nn.Module, batch: Any) -> Tensor:
        (values,) = batch
        loss: Tensor = values.mean() + 0 * model(values).sum()
        return loss

    def make() -> Trainer:
        loader = [(torch.full((2, 1), {5: math.nan, 40: 4.0, 56: math.nan}.get(i, 1 + i % 3 / 10)),) for i in range(60)]
        callbacks = [LogTraining("1 step"), Checkpoint("2 steps", keep_last=None), Recover(when=NonFinite() | Spike(window=20))]
        return tiny_trainer(
            loader=loader, compute_loss=compute, accumulate=2, epochs=1, seed=1, directory=tmp_path, callbacks=callbacks
        )

    assert make().fit().progress.step == 30
    with replay_step(make(), tmp_path, 21) as again:
        assert again.step_once() == losses_of(tmp_path)[21] == pytest.approx(2.55, abs=0.1)
        assert again.difference is None


def test_two_ranks_repeat_a_step_together_and_a_mistake_of_one_ends_it_on_both(tmp_path: Path) -> None:
    first, second = launch(partial(on_two, tmp_path))
    recorded = losses_of(tmp_path)
    for losses, step, _ in (first, second):
        assert losses == [recorded[8], recorded[9], recorded[10]]
        assert step == 10
    told, others = first[2], second[2]
    assert "step must be the same on all ranks; got 8 on rank 0 and 9 on rank 1" in told[0]
    assert "rank 0 cannot repeat the run" in others[0]
    assert "rank 1 cannot repeat the run, so this rank cannot: ValueError: step must be at least 1" in told[1]
    assert "rank 1 called close() of a replay, and rank 0 called step_once()" in others[2]
    assert "rank 0 called step_once() of a replay, and rank 1 called close()" in told[2]
    assert others[3] == "an assertion of rank 1"
