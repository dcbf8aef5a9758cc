"""Recorded runs through other callbacks: they decide as real runs do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Best, Callback, Every, First, Last, Run, Trainer, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Ema, Evaluate, LogTraining, TimeLimit
from cadenza.errors import CallbackError, DirectoryError, MonitorError
from cadenza.sinks import Sink
from cadenza.testing import tiny_loader, tiny_trainer
from cadenza.timetravel import Answer, what_if

STEP = {"now": 0}


def waves(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Return a loss that falls and rises with the steps."""
    step = STEP["now"]
    return {"loss": torch.tensor(5 / (1 + step / 20) + math.sin(step * 0.9) + step / 60)}


def trainer(path: Path, callbacks: list[Any], *, every: str = "3 steps", epochs: int = 12) -> Trainer:
    def note(run: Run) -> None:
        STEP["now"] = run.progress.step

    clock = on(Callback.on_step_end)(note)
    evaluate = Evaluate(tiny_loader(1), every=every, compute=waves)
    arguments: dict[str, Any] = {"accumulate": 2, "directory": path, "seed": 1, "batches": 9, "epochs": epochs}
    return tiny_trainer(callbacks=[clock, evaluate, LogTraining("1 step"), *callbacks], **arguments)


SETTINGS: list[dict[str, Any]] = [
    *({"patience": patience, "keep": [Last(1)], "every": "7 steps"} for patience in (1, 2, 3, 4, 30)),
    *({"patience": 3, "min_delta": delta, "keep": [Last(2)], "every": "1 epoch"} for delta in (0.0, 0.2, 1.0)),
    {"patience": 2, "ignore_first": 4, "keep": [Best("eval/loss", 2, mode="min")], "every": "10 steps"},
    {"patience": 2, "threshold": 2.0, "keep": [Best("eval/loss", mode="min"), Last(1)], "every": "4 steps"},
    {"patience": 9, "diverged": 4.4, "keep": [Best("eval/loss", 3, mode="max")], "every": "5 steps"},
    {"patience": 3, "keep": [Every("20 steps")], "every": "5 steps"},
    {"patience": 5, "keep": [First(2), Last(1)], "every": "6 steps"},
    {"patience": 5, "keep": [Every("2 epochs"), Best("eval/loss", mode="min")], "every": "1 epoch"},
    {"patience": 6, "keep": [Last("10 steps")], "every": "3 steps"},
    {"patience": 30, "keep": [Every("25%")], "every": "0.5 epoch"},
    {"patience": 30, "keep": [Best("eval/loss", 4, mode="min"), Every("30 steps")], "every": "5 steps"},
    {"patience": 4, "restore_best": True, "keep": [Last(3)], "every": "2 epochs"},
    {"patience": 2, "mode": "max", "keep": [Best("eval/loss", mode="max")], "every": "1 epoch"},
    {"patience": 30, "keep": [Last(2)], "every": "60 steps"},
]


def made(settings: dict[str, Any]) -> list[Any]:
    given = dict(settings)
    keep, every, mode = given.pop("keep"), given.pop("every"), given.pop("mode", "min")
    return [EarlyStopping("eval/loss", mode, **given), Checkpoint(every, keep=keep, background=False)]


@pytest.mark.parametrize("every", ["3 steps", "1 epoch"])
def test_twenty_settings_decide_as_twenty_real_runs(tmp_path: Path, every: str) -> None:
    trainer(tmp_path / "recorded", [], every=every).fit()
    assert len(SETTINGS) == 20
    stops = set()
    for number, settings in enumerate(SETTINGS[:: 1 if every == "3 steps" else 4]):
        path = tmp_path / str(number)
        run = trainer(path, made(settings), every=every).fit()
        answer = what_if(tmp_path / "recorded", made(settings))
        stopped = [(one.who, one.why, one.when) for one in run.decisions if one.what == "stopped"]
        found = [(one.who, one.why, one.when) for one in answer.decisions if one.what == "stopped"]
        assert [(who, why, at.step, at.epoch, at.batch) for who, why, at in found] == [
            (who, why, at.step, at.epoch, at.batch) for who, why, at in stopped
        ], settings
        assert answer.step == run.progress.step
        assert [*answer.kept] == sorted(one.name for one in (path / "checkpoints").glob("step-*")), settings
        saved, asked = (
            [one.data["checkpoint"] for one in some if one.what == "saved"] for some in (run.decisions, answer.decisions)
        )
        assert asked == saved, settings
        stops.add(answer.step)
    assert len(stops) >= 3


def test_a_grid_gives_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, []).fit()
    caplog.clear()
    table = what_if(
        tmp_path,
        lambda patience, count: [EarlyStopping("eval/loss", "min", patience=patience), Checkpoint("9 steps", keep_last=count)],
        patience=[1, 40],
        count=[1, 2],
    )
    assert [settings for settings, _ in table] == [{"patience": p, "count": c} for p in (1, 40) for c in (1, 2)]
    lines = str(table).splitlines()
    assert lines[0].split("  ")[0] == "patience"
    assert len(lines) == 5
    assert lines[-1].split() == ["40", "2", "-", "54,", "60", "-"]
    assert caplog.messages == []  # nothing of the loader that stands for that of the run


class Doubles(Callback):
    """A callback of the user: it stops when a recorded loss is high, and when two results are far apart."""

    def on_eval_end(self, run: Run, evaluation: Any) -> None:
        assert evaluation.results["eval/loss"] == run.evaluations["eval"].results["eval/loss"]

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == 20:
            assert run.history["train/loss"][-1][0] == 20
            run.stop(f"{len(run.history['train/loss'])} losses")


class Reads(Callback):
    """It reads the model."""

    def on_eval_end(self, run: Run, evaluation: Any) -> None:
        run.model.state_dict()


class Counts(Callback):
    """It needs the number of samples."""

    def on_step_end(self, run: Run) -> None:
        assert run.info.arguments["seed"] == 1  # those of the recorded run
        if run.progress.samples > 20:
            run.stop("enough")


class OwnEma(Ema):
    """A native callback that needs the model, changed by the user."""


class Writes(Sink):
    """It writes elsewhere."""

    def open(self, info: Any) -> None: ...

    def write(self, records: Any) -> None: ...

    def close(self, outcome: Any) -> None: ...


class Listens(Callback):
    """It needs batches."""

    def on_batch_end(self, run: Run, batch: Any, outputs: Any) -> None: ...


def test_callbacks_of_the_user_read_records_and_those_that_need_the_model_say_so(tmp_path: Path) -> None:
    trainer(tmp_path, []).fit()
    answer = what_if(tmp_path, [Doubles()])
    assert answer.stopped is not None
    assert (answer.step, answer.stopped.why) == (20, "20 losses")
    with pytest.raises(CallbackError, match=r"cannot play Reads: it reads run\.model") as raised:
        what_if(tmp_path, [Reads()])
    assert "on_eval_end" in str(raised.value.__notes__)
    with pytest.raises(CallbackError, match="cannot play Listens: its hook on_batch_end needs the model"):
        what_if(tmp_path, [Listens()])
    with pytest.raises(CallbackError, match=r"cannot play Counts: it reads run\.progress\.samples, and no record says it"):
        what_if(tmp_path, [Counts()])
    with pytest.raises(CallbackError, match=r"cannot play OwnEma\(ema\): it needs the model"):
        what_if(tmp_path, [OwnEma(0.9)])
    for one in (Writes(), Ema(0.9), LogTraining(), TimeLimit("1 h"), Evaluate(tiny_loader())):
        with pytest.raises(CallbackError, match=f"cannot play {type(one).__name__}: it needs the model"):
            what_if(tmp_path, [one])
    with pytest.raises(CallbackError, match="cannot play Checkpoint: its schedule 'every 10 min' counts time"):
        what_if(tmp_path, [Checkpoint("10 min")])


def test_mistakes_are_named(tmp_path: Path) -> None:
    trainer(tmp_path / "run", [], epochs=2).fit()
    with pytest.raises(DirectoryError, match="is not the directory of a run"):
        what_if(tmp_path, [])
    with pytest.raises(MonitorError, match="'eval/los'") as raised:
        what_if(tmp_path / "run", [EarlyStopping("eval/los", "min")])
    assert (
        raised.value.__notes__[-1]
        == f"what_if plays the evaluations that {str(tmp_path / 'run')!r} recorded: they reported eval/loss"
    )
    tiny_trainer(epochs=1, directory=tmp_path / "none").fit()
    with pytest.raises(MonitorError, match="no evaluation will report it") as raised:
        what_if(tmp_path / "none", [EarlyStopping("eval/loss", "min")])
    assert raised.value.__notes__[-1].endswith("recorded: there are none")
    with pytest.raises(TypeError, match=r"expected a path.*; got Trainer\. The directory of a run is run\.info\.directory"):
        what_if(trainer(tmp_path / "run", []), [])  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(TypeError, match="needs the settings of the function"):
        what_if(tmp_path / "run", lambda patience: [])
    with pytest.raises(TypeError, match=r"needs a function that makes the callbacks .* lambda patience: \[\.\.\.\]"):
        what_if(tmp_path / "run", [], patience=[1])  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(CallbackError, match=r"takes a list of callbacks; got .* Write what_if\(run, \[...\]\)"):
        what_if(tmp_path / "run", EarlyStopping("eval/loss", "min"))  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(TypeError, match=r"such as patience=\[1, 2\]; got patience=3"):
        what_if(tmp_path / "run", lambda patience: [], patience=3)  # type: ignore[call-overload]  # wrong on purpose
    with pytest.raises(ValueError, match="at least one value"):
        what_if(tmp_path / "run", lambda patience: [], patience=[])


def test_checkpoints_in_two_folders_are_told_apart(tmp_path: Path) -> None:
    trainer(tmp_path, [], epochs=4).fit()
    answer = what_if(
        tmp_path, [Checkpoint("6 steps", keep=[Last(1)]), Checkpoint("5 steps", keep=[First(1)], directory=tmp_path / "other")]
    )
    other = f"{tmp_path / 'other'}/step-000000"
    assert dict(answer.kept) == {
        "checkpoints/step-00000020": ["Last(1)"],
        f"{other}05": ["First(1)"],
        f"{other}20": ["the newest"],
    }


def test_the_run_is_only_read_and_one_of_several_processes_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path, [Checkpoint("9 steps", background=False)]).fit()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(tmp_path.rglob("*"))}
    answer = what_if(tmp_path, [EarlyStopping("eval/loss", "min"), Checkpoint("3 steps", keep_last=1)])
    assert isinstance(answer, Answer)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in sorted(tmp_path.rglob("*"))} == before
