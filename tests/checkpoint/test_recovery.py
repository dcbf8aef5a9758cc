"""What a run recovers from: errors before its first save, rollbacks, shared folders, lost checkpoints and rows."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza import Callback, Run, Text, Trainer, load_weights, on
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.checkpoint.store import Store
from cadenza.commands.main import main
from cadenza.errors import CheckpointError
from cadenza.records.history import History
from cadenza.report import story_at
from cadenza.report.pictures import media_of
from cadenza.sinks import Csv
from cadenza.status.encoding import same
from cadenza.testing import tiny_loader, tiny_model, tiny_run, tiny_trainer


class TransientError(OSError):
    """An error that does not come again."""


def failing(step: int, error: type[BaseException] = TransientError) -> Callback:
    """Return a callback that raises in the middle of the step after `step`."""

    def fail(run: Run, batch: Any) -> None:
        if run.progress.step == step:
            raise error

    return on(Callback.on_batch_start)(fail)


def trainer(directory: Path, *callbacks: Callback, steps: int = 14, **arguments: Any) -> Trainer:
    every = Checkpoint("2 steps", keep_last=None, on_exception=False)
    given = (every, LogTraining(every="1 step", throughput=False))
    return tiny_trainer(callbacks=[*given, *callbacks], directory=directory, steps=steps, seed=1, **arguments)


def killed(directory: Path, step: int, resume: Any = "auto", **arguments: Any) -> None:
    """End a run in the middle of the step after `step`, without a checkpoint."""
    with pytest.raises(KeyboardInterrupt):
        trainer(directory, failing(step, KeyboardInterrupt), **arguments).fit(resume=resume)


def at(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"step-{step:08d}"


@cache
def weights_after(steps: int) -> dict[str, Tensor]:
    return dict(tiny_run(steps=steps, seed=1).model.state_dict())


def loaded(path: Path) -> dict[str, Tensor]:
    model = tiny_model()
    load_weights(path, model)
    return dict(model.state_dict())


def rows(directory: Path, name: str = "metrics.jsonl") -> list[int]:
    return [json.loads(line)["step"] for line in (directory / name).read_text().splitlines()]


def facts(directory: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((directory / "run.json").read_text())
    return told


# -- an error before the first regular save -----------------------------------------------------------


def test_a_loop_of_restarts_recovers_from_errors_before_the_first_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start(*callbacks: Callback) -> Run:
        given = [Checkpoint("6 steps"), LogTraining(every="1 step"), *callbacks]
        return tiny_trainer(callbacks=given, directory=tmp_path, epochs=2, seed=1).fit(resume="auto")

    for step in (3, 1, 4):
        with pytest.raises(TransientError):
            start(failing(step))
    run = start()
    assert same(dict(run.model.state_dict()), weights_after(10))
    assert "started anew by the trainer" in run.why("started anew")
    assert "step-00000004: written in the middle of a step (an error: TransientError())" in run.why("started anew")
    assert "starts anew, as no checkpoint can be continued: step-00000003: written in the middle" in caplog.text
    assert [rows(tmp_path, f"metrics.branch-{n}.jsonl") for n in range(3)] == [[1, 2, 3], [1], [1, 2, 3, 4]]
    assert rows(tmp_path) == list(range(1, 11))


def test_the_emergency_checkpoint_of_an_earlier_attempt_is_not_the_newest(tmp_path: Path) -> None:
    with pytest.raises(TransientError):
        tiny_trainer(callbacks=[Checkpoint("6 steps"), failing(3)], directory=tmp_path, seed=1, steps=9).fit()
    assert same(loaded(tmp_path), weights_after(3))
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path, failing(2, KeyboardInterrupt)).fit(resume="auto")
    assert same(loaded(tmp_path), weights_after(2))


def test_a_first_save_that_a_kill_cut_short_behind_fsspec_does_not_lock_the_run_out(tmp_path: Path) -> None:
    folder = f"memory://{tmp_path}"
    killed(tmp_path, 0)
    Store(folder).files.write("step-00000002/model.safetensors", b"cut")
    run = tiny_trainer(callbacks=[Checkpoint("2 steps", directory=folder)], directory=tmp_path, steps=4, seed=1).fit(
        resume="auto"
    )
    assert run.progress.step == 4
    assert same(dict(run.model.state_dict()), weights_after(4))


# -- a finished run without checkpoints ---------------------------------------------------------------


@pytest.mark.parametrize("ending", ["finished", "stopped"])
def test_a_finished_run_without_its_checkpoints_is_left_alone(
    tmp_path: Path, ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    stop = [on(Callback.on_step_end, at=5)(lambda run: run.stop("enough"))] if ending == "stopped" else []
    first = trainer(tmp_path, *stop, steps=5 if ending == "finished" else 9).fit()
    shutil.rmtree(tmp_path / "checkpoints")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != "run.lock"}
    run = trainer(tmp_path, *stop, steps=5 if ending == "finished" else 9).fit(resume="auto")
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.name != "run.lock"} == before
    assert run.outcome == first.outcome
    assert run.progress.now() == first.progress.now()
    assert run.history["train/loss"] == first.history["train/loss"]
    assert "nothing to do" in caplog.text
    assert "so the model does not have its weights" in caplog.text


def test_a_finished_run_that_never_saved_is_left_alone_and_not_extended_in_silence(tmp_path: Path) -> None:
    def make(steps: int) -> Trainer:
        return tiny_trainer(callbacks=[LogTraining(every="1 step")], directory=tmp_path, steps=steps, seed=1)

    make(5).fit()
    assert make(5).fit(resume="auto").progress.step == 5
    with pytest.raises(CheckpointError, match=r"finished at epoch 1, step 5.* asks for more, but it has no checkpoint"):
        make(9).fit(resume="auto")
    assert rows(tmp_path) == [1, 2, 3, 4, 5]
    assert make(5).fit(resume="auto").progress.step == 5


def test_an_attempt_that_restores_nothing_leaves_the_outcome_of_a_finished_run(tmp_path: Path) -> None:
    def make(seed: int, name: str, *callbacks: Callback) -> Trainer:
        given = [LogTraining(every="1 step"), *callbacks]
        return tiny_trainer(callbacks=given, directory=tmp_path / name, steps=5, seed=seed)

    make(2, "other", Checkpoint("2 steps")).fit()
    make(1, "run").fit()
    with pytest.raises(CheckpointError, match="does not fit this trainer"):
        make(1, "run").fit(resume=at(tmp_path / "other", 5))
    assert make(1, "run").fit(resume="auto").progress.origin.step == 5
    assert facts(tmp_path / "run")["outcome"]["kind"] == "finished"


def test_a_finished_run_with_weights_alone_gets_them_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Trainer:
        return tiny_trainer(callbacks=[Checkpoint(weights_only=True)], directory=tmp_path, steps=5, seed=1)

    make().fit()
    run = make().fit(resume="auto")
    assert run.progress.step == 5
    assert same(dict(run.model.state_dict()), weights_after(5))
    assert "the model has the weights of step-00000005, which holds weights only" in caplog.text


def test_rows_without_a_run_json_are_kept_in_a_copy(tmp_path: Path) -> None:
    killed(tmp_path, 1)
    (tmp_path / "run.json").unlink()
    trainer(tmp_path, steps=2).fit(resume="auto")
    assert (rows(tmp_path), rows(tmp_path, "metrics.branch-0.jsonl")) == ([1, 2], [1])


def test_starts_that_end_before_they_can_save_leave_the_copies_of_the_last_three(tmp_path: Path) -> None:
    for _ in range(6):
        killed(tmp_path, 1, resume="auto")
    kept = {f"{name}.branch-{number}.jsonl" for number in (2, 3, 4) for name in ("metrics", "decisions")}
    assert {one.name for one in tmp_path.glob("*.branch-*")} <= kept
    assert rows(tmp_path, "metrics.branch-4.jsonl") == rows(tmp_path) == [1]


# -- rolling back -------------------------------------------------------------------------------------


def test_after_a_rollback_of_a_stopped_run_auto_continues_the_new_branch(tmp_path: Path) -> None:
    trainer(tmp_path, on(Callback.on_step_end, at=9)(lambda run: run.stop("enough"))).fit()
    killed(tmp_path, 7, resume=at(tmp_path, 4))
    run = trainer(tmp_path).fit(resume="auto")
    assert run.progress.origin.step == 6
    assert same(dict(run.model.state_dict()), weights_after(14))
    assert (rows(tmp_path), rows(tmp_path, "metrics.branch-0.jsonl")) == ([*range(1, 15)], [*range(1, 10)])


def test_a_rollback_holds_before_the_new_branch_has_saved_anything(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    killed(tmp_path, 4, resume=at(tmp_path, 4))
    assert same(loaded(tmp_path), weights_after(4))
    killed(tmp_path, 5)
    assert trainer(tmp_path, steps=8).fit(resume="auto").progress.origin.step == 4
    assert same(loaded(tmp_path), weights_after(8))
    assert same(loaded(tmp_path / "checkpoints"), weights_after(8))


def test_what_a_rolled_back_run_ended_with_is_its_newest_also_without_run_json(tmp_path: Path) -> None:
    trainer(tmp_path).fit()
    trainer(tmp_path, steps=10).fit(resume=at(tmp_path, 6))
    assert same(loaded(tmp_path), weights_after(10))
    assert trainer(tmp_path, steps=10).fit(resume="auto").progress.now().step == 10
    (tmp_path / "run.json").unlink()
    assert same(loaded(tmp_path), weights_after(10))
    assert trainer(tmp_path, steps=12).fit(resume="auto").progress.origin.step == 10


def test_one_can_go_back_to_an_abandoned_branch_and_its_rows_come_back(tmp_path: Path) -> None:
    trainer(tmp_path, steps=8).fit()
    trainer(tmp_path, steps=6).fit(resume=at(tmp_path, 2))
    killed(tmp_path, 8, resume=at(tmp_path, 8))
    assert rows(tmp_path) == list(range(1, 9))
    run = trainer(tmp_path, steps=9).fit(resume="auto")
    assert run.progress.origin.step == 8
    assert rows(tmp_path) == list(range(1, 10))
    assert rows(tmp_path, "metrics.branch-1.jsonl") == list(range(1, 7))
    assert [Store(tmp_path / "checkpoints").manifest(one)["branch"] for one in Store(tmp_path / "checkpoints").saved()][-1] == 2


def test_media_follow_the_branch(tmp_path: Path) -> None:
    def noting(text: str, every: int) -> Callback:
        return on(Callback.on_step_end, every=every)(lambda run: run.log("note", Text(text)))

    def notes(folder: str = "media") -> dict[int, str]:
        return {int(path.stem): path.read_text() for path in (tmp_path / folder / "note").iterdir()}

    trainer(tmp_path, noting("first", 1), steps=8).fit()
    trainer(tmp_path, noting("second", 5), steps=10).fit(resume=at(tmp_path, 4))
    now = {1: "first", 2: "first", 3: "first", 4: "first", 5: "second", 10: "second"}
    assert notes() == now
    assert notes("media.branch-0") == dict.fromkeys(range(1, 9), "first")
    assert {medium.step for medium in media_of([story_at(tmp_path)])["note"][0]} == now.keys()
    killed(tmp_path, 11, resume=at(tmp_path, 8))
    assert notes() == dict.fromkeys(range(1, 9), "first")
    (tmp_path / "media" / "note" / "0000000011.txt").write_text("of a killed attempt")
    trainer(tmp_path, noting("third", 6), steps=12).fit(resume="auto")
    assert notes() == {**dict.fromkeys(range(1, 9), "first"), 12: "third"}
    assert notes("media.branch-1") == now


def test_a_checkpoint_that_does_not_fit_rolls_nothing_back(tmp_path: Path) -> None:
    trainer(tmp_path, steps=6).fit()
    with pytest.raises(CheckpointError, match="optimizers: saved"):
        trainer(tmp_path, steps=6, optimizer=torch.optim.AdamW).fit(resume=at(tmp_path, 2))
    assert same(loaded(tmp_path), weights_after(6))
    assert rows(tmp_path) == list(range(1, 7))
    assert trainer(tmp_path, steps=8).fit(resume="auto").progress.origin.step == 6


def test_the_newest_by_its_path_is_no_rollback(tmp_path: Path) -> None:
    killed(tmp_path, 5)
    trainer(tmp_path, steps=6).fit(resume=at(tmp_path, 4))
    assert facts(tmp_path)["branch"]["branch"] == 0
    assert not list(tmp_path.glob("*.branch-*"))


def test_abandoned_checkpoints_are_listed_as_such_and_pruned_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def make(steps: int, keep_last: int | None = 2) -> Trainer:
        return tiny_trainer(callbacks=[Checkpoint("2 steps", keep_last=keep_last)], directory=tmp_path, steps=steps, seed=1)

    make(10, keep_last=None).fit()
    make(6, keep_last=None).fit(resume=at(tmp_path, 4))
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    states = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert {name for name, line in states.items() if "abandoned" in line} == {
        "step-00000006", "step-00000008", "step-00000010",
    }  # fmt: skip
    manifests = {one.name: Store(tmp_path / "checkpoints").manifest(one) for one in Store(tmp_path / "checkpoints").saved()}
    assert manifests["step-00000006-2"]["parent"] == "step-00000004"
    assert manifests["step-00000004"]["parent"] == "step-00000002"
    assert main(["checkpoint", "prune", str(tmp_path), "--keep-last", "3"]) == 0
    assert {one.name for one in Store(tmp_path / "checkpoints").saved()} == {
        "step-00000002", "step-00000004", "step-00000006-2",
    }  # fmt: skip
    make(8).fit(resume="auto")
    assert [one.name for one in Store(tmp_path / "checkpoints").saved()] == ["step-00000006-2", "step-00000008"]


# -- a folder that several runs share -----------------------------------------------------------------


def sharing(tmp_path: Path, name: str, *callbacks: Callback, steps: int) -> Trainer:
    given = [Checkpoint("2 steps", directory=tmp_path / "shared"), *callbacks]
    return tiny_trainer(callbacks=given, directory=tmp_path / name, steps=steps, seed=1)


def test_in_a_shared_folder_a_run_takes_its_own_checkpoints_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sharing(tmp_path, "a", steps=9).fit()
    with pytest.raises(KeyboardInterrupt):
        sharing(tmp_path, "b", failing(5, KeyboardInterrupt), steps=8).fit(resume="auto")
    run = sharing(tmp_path, "b", steps=8).fit(resume="auto")
    assert run.progress.origin.step in (4, 5)
    own = [
        one.parent for one in (tmp_path / "shared").glob("*/manifest.json") if facts(tmp_path / "b")["id"] in one.read_text()
    ]
    assert same(loaded(max(own)), weights_after(8))
    with pytest.raises(CheckpointError, match="holds checkpoints of 2 runs"):
        loaded(tmp_path / "shared")
    assert main(["checkpoint", "list", str(tmp_path / "shared")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["name", "run"]
    assert {line.split()[1] for line in lines[1:]} == {facts(tmp_path / name)["id"][:12] for name in ("a", "b")}
    assert main(["checkpoint", "show", str(tmp_path / "shared"), "--run", facts(tmp_path / "a")["id"][:8]]) == 0
    assert "step             9" in capsys.readouterr().out
    assert main(["checkpoint", "prune", str(tmp_path / "shared"), "--run", facts(tmp_path / "a")["id"][:8]]) == 0
    assert "deleted 1: step-00000008\n" in capsys.readouterr().out


def test_a_run_that_descends_from_another_one_says_so_and_continues_there_after_a_kill(tmp_path: Path) -> None:
    trainer(tmp_path / "a", steps=8).fit()
    killed(tmp_path / "b", 5, resume=at(tmp_path / "a", 4))
    parent = {"run": facts(tmp_path / "a")["id"], "step": 4, "checkpoint": "step-00000004"}
    assert facts(tmp_path / "b")["parent"] == parent
    run = trainer(tmp_path / "b", steps=7).fit(resume="auto")
    assert run.progress.origin.step == 4
    assert facts(tmp_path / "b")["parent"] == parent
    assert same(loaded(tmp_path / "b"), weights_after(7))
    killed(tmp_path / "c", 4, resume=at(tmp_path / "a", 4))
    shutil.rmtree(at(tmp_path / "a", 4))
    with pytest.raises(CheckpointError, match="saved nothing itself, but that checkpoint can no longer be used"):
        trainer(tmp_path / "c").fit(resume="auto")


def test_runs_without_a_directory_that_continue_each_other_have_one_newest(tmp_path: Path) -> None:
    def make(steps: int) -> Trainer:
        keep = Checkpoint("2 steps", keep_last=None, directory=tmp_path)
        return tiny_trainer(callbacks=[keep], steps=steps, seed=1)

    make(8).fit()
    make(6).fit(resume=tmp_path / "step-00000002")
    assert same(loaded(tmp_path), weights_after(6))


# -- rows that a power cut took -------------------------------------------------------------------------


def evaluated(directory: Path, steps: int) -> Trainer:
    callbacks = [Evaluate(tiny_loader(1)), LogTraining("1 step", throughput=False), Csv(), Checkpoint("2 steps")]
    return tiny_trainer(callbacks=callbacks, steps=steps, batches=4, directory=directory, seed=0)


def records(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]


def test_records_are_flushed_before_a_checkpoint_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def appear(self: Path, target: Path) -> Path:
        flushed.append(f"-> {Path(target).name}")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Path, "rename", appear)
    evaluated(tmp_path, 3).fit()
    first = flushed[: flushed.index("-> step-00000002")]
    assert {"metrics.jsonl", "decisions.jsonl", tmp_path.name} <= {*first} | {"decisions.jsonl"}
    second = flushed[flushed.index("-> step-00000002") + 1 : flushed.index("-> step-00000003")]
    assert {"metrics.jsonl", "decisions.jsonl", tmp_path.name} <= {*second}


LOSSES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_text(""),
    "gone": lambda path: path.unlink(),
    "cut in a line": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_rows_that_a_power_cut_took_are_written_again(tmp_path: Path, lose: Callable[[Path], object]) -> None:
    evaluated(tmp_path / "whole", 7).fit()
    path = tmp_path / "run" / "metrics.jsonl"
    evaluated(tmp_path / "run", 5).fit()
    before = path.read_text().splitlines()
    lose(path)
    run: Run = evaluated(tmp_path / "run", 7).fit(resume="auto")
    assert records(path) == records(tmp_path / "whole" / "metrics.jsonl")
    assert [json.loads(line) for line in path.read_text().splitlines()][: len(before)] == [json.loads(one) for one in before]
    assert len((tmp_path / "run" / "metrics.csv").read_text().splitlines()) == 1 + len(records(path))
    told = [decision.why for decision in run.decisions if decision.what == "records restored"]
    assert len(told) == (lose is not LOSSES["nothing"])


def test_rows_are_written_again_twice_from_the_same_checkpoint(tmp_path: Path) -> None:
    evaluated(tmp_path / "whole", 9).fit()
    evaluated(tmp_path / "run", 5).fit()
    path = tmp_path / "run" / "metrics.jsonl"
    for steps in (7, 9):
        path.write_text("")
        evaluated(tmp_path / "run", steps).fit(resume="auto")
    assert records(path) == records(tmp_path / "whole" / "metrics.jsonl")


def test_of_a_thinned_history_what_it_keeps_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(History.__init__, "__defaults__", (8,))
    evaluated(tmp_path, 20).fit()
    (tmp_path / "metrics.jsonl").write_text("")
    evaluated(tmp_path, 21).fit(resume="auto")
    steps = [row["step"] for row in records(tmp_path / "metrics.jsonl")]
    assert steps[0] == 1
    assert steps[-2:] == [20, 21]
    assert steps == sorted(steps)
