"""``fit(resume=...)``: the state that is restored, the checkpoints that are refused, and the messages."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Ema, Evaluate
from cadenza.errors import CheckpointError, CheckpointMismatchError, DataError, DirectoryError
from cadenza.status.plain import first_difference
from cadenza.testing import tiny_loader, tiny_trainer


def trainer(directory: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    given = {"epochs": 2, "seed": 1, **arguments}
    return tiny_trainer(callbacks=[Checkpoint("2 steps", keep_last=None), *callbacks], directory=directory, **given)


def failing_at(step: int) -> Callback:
    def fail(run: Run, batch: Any) -> None:
        if run.progress.step == step:
            raise KeyboardInterrupt

    return on(Callback.on_batch_start)(fail)


def interrupted(directory: Path, step: int, *callbacks: Callback, **arguments: Any) -> Path:
    """Let a run be interrupted in the step after `step`; return its directory."""
    with pytest.raises(KeyboardInterrupt):
        trainer(directory, *callbacks, failing_at(step), **arguments).fit()
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").glob("step-*"))


def contents(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file() and path.name != "run.lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


# -- auto ---------------------------------------------------------------------------------------------


def test_auto_starts_where_there_is_no_run_yet(tmp_path: Path) -> None:
    run = trainer(tmp_path / "new").fit(resume="auto")
    assert run.progress.origin.step == 0
    assert run.progress.step == 10


def test_auto_starts_anew_after_a_run_that_ended_before_its_first_checkpoint(tmp_path: Path) -> None:
    def log(run: Run) -> None:
        run.log("x", 1.0)

    directory = interrupted(tmp_path / "a", 0, on(Callback.on_step_end)(log))
    run = trainer(directory, on(Callback.on_step_end)(log)).fit(resume="auto")
    assert run.progress.origin.step == 0
    assert [step for step, _ in run.history["x"]] == list(range(1, 11))
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 10


def test_auto_continues_the_newest(tmp_path: Path) -> None:
    run = trainer(interrupted(tmp_path / "a", 7)).fit(resume="auto")
    assert run.progress.origin.step == 6
    assert "step-00000006" in run.why("resumed")
    assert run.outcome is not None
    assert run.outcome.kind == "finished"


@pytest.mark.parametrize("every", ["2 steps", "3 steps", "5 steps", "1 epoch"])
def test_auto_on_a_finished_run_says_so_and_does_nothing(every: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Trainer:
        callbacks = [Evaluate(tiny_loader(2)), Checkpoint(every)]
        return tiny_trainer(callbacks=callbacks, directory=tmp_path / "a", epochs=2, seed=1)

    finished = make()
    first = finished.fit()
    before = contents(tmp_path / "a")
    again = make()
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = again.fit(resume="auto")
    assert "nothing to do: the run in" in caplog.text
    assert "is over (finished" in caplog.text
    assert contents(tmp_path / "a") == before
    assert run.outcome == first.outcome
    assert run.progress.now() == first.progress.now()
    assert run.history["eval/loss"] == first.history["eval/loss"]
    assert first_difference(dict(finished.model.state_dict()), dict(again.model.state_dict())) is None


def test_auto_on_a_run_that_was_stopped_by_a_callback_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def make() -> list[Callback]:
        return [Evaluate(tiny_loader(2)), EarlyStopping("eval/loss", mode="max", patience=1)]

    trainer(tmp_path / "a", *make(), epochs=9).fit()
    before = contents(tmp_path / "a")
    with caplog.at_level(logging.WARNING, "cadenza"):
        trainer(tmp_path / "a", *make(), epochs=9).fit(resume="auto")
    assert "is over (stopped: 'eval/loss' did not get better" in caplog.text
    assert contents(tmp_path / "a") == before


def test_auto_looks_where_the_run_saves_to_as_well(tmp_path: Path) -> None:
    def saving_elsewhere() -> Trainer:
        elsewhere = Checkpoint("2 steps", directory=tmp_path / "elsewhere")
        return tiny_trainer(callbacks=[elsewhere, failing_at(5)], directory=tmp_path / "run", epochs=2, seed=1)

    with pytest.raises(KeyboardInterrupt):
        saving_elsewhere().fit()
    again = saving_elsewhere()
    again.callbacks.pop()
    assert again.fit(resume="auto").progress.origin.step == 4


def test_without_resume_a_directory_with_a_run_is_refused(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 3)
    before = contents(directory)
    with pytest.raises(DirectoryError, match="already holds a run"):
        trainer(directory).fit()
    assert contents(directory) == before


def test_auto_without_a_directory_says_what_to_give() -> None:
    with pytest.raises(ValueError, match=r"Give directory=\.\.\., or leave out resume= to start a new run"):
        tiny_trainer().fit(resume="auto")


# -- damage -------------------------------------------------------------------------------------------


def test_a_damaged_newest_is_skipped_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = interrupted(tmp_path / "a", 7)
    newest = directory / "checkpoints" / "step-00000006" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = trainer(directory).fit(resume="auto")
    assert run.progress.origin.step == 4
    assert "step-00000006: model.safetensors has" in caplog.text


def test_where_all_are_damaged_nothing_is_started_and_each_has_its_line(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 7)
    for name in names(directory):
        (directory / "checkpoints" / name / "state.json").unlink()
    before = contents(directory)
    with pytest.raises(CheckpointError) as caught:
        trainer(directory).fit(resume="auto")
    for name in names(directory):
        assert f"\n  {name}: state.json is missing" in str(caught.value) or "middle of a step" in str(caught.value)
    assert contents(directory) == before


# -- a path -------------------------------------------------------------------------------------------


def test_a_path_continues_at_that_checkpoint_into_another_directory(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.fit()
    directory = interrupted(tmp_path / "a", 7)
    branch = trainer(tmp_path / "b")
    run = branch.fit(resume=directory / "checkpoints" / "step-00000004")
    assert run.progress.origin.step == 4
    assert first_difference(dict(whole.model.state_dict()), dict(branch.model.state_dict())) is None


def test_a_path_that_is_not_there_lists_what_is(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint at '.*step-00000003'.*step-00000002.*step-00000004"):
        trainer(tmp_path / "b").fit(resume=directory / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match=r"'.*nowhere' holds none\. Give the path of a checkpoint, or resume='auto'\."):
        trainer(tmp_path / "b").fit(resume=tmp_path / "nowhere" / "step-00000003")


# -- what must be the same ----------------------------------------------------------------------------


def _wider() -> nn.Module:
    return nn.Linear(1, 2)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": _wider()}, ["weight: saved [1, 1], now [2, 1]", "bias: saved [1], now [2]"]),
        ({"optimizer": torch.optim.AdamW}, ["optimizers: saved ['SGD'], now ['AdamW']"]),
        ({"accumulate": 2}, ["accumulate: saved 1, now 2"]),
        ({"batches": 6}, ["batches an epoch: saved 5, now 6"]),
        ({"seed": 2}, ["seed: saved 1, now 2"]),
        ({"precision": "bf16"}, ["precision: saved fp32, now bf16"]),
        ({"accumulate": 2, "seed": 3, "batches": 7}, ["accumulate", "batches an epoch", "seed", "It differs in 3"]),
    ],
    ids=["model", "optimizer", "accumulate", "loader", "seed", "precision", "several"],
)
def test_a_run_with_other_parts_is_refused_with_all_differences(
    changed: dict[str, Any], said: list[str], tmp_path: Path
) -> None:
    directory = interrupted(tmp_path / "a", 5)
    before = names(directory), (directory / "metrics.jsonl").exists()
    other = trainer(directory, **changed)
    weights = {name: value.clone() for name, value in other.model.state_dict().items()}
    with pytest.raises(CheckpointMismatchError) as caught:
        other.fit(resume="auto")
    for text in said:
        assert text in str(caught.value)
    assert first_difference(weights, dict(other.model.state_dict())) is None
    assert (names(directory), (directory / "metrics.jsonl").exists()) == before
    assert trainer(directory).fit(resume="auto").progress.origin.step == 4, "it can still be continued"


def test_another_environment_is_named_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = interrupted(tmp_path / "a", 5)
    torch.set_num_threads(2)
    try:
        with caplog.at_level(logging.WARNING, "cadenza"):
            trainer(directory).fit(resume="auto")
    finally:
        torch.set_num_threads(1)
    assert "threads: saved 1, now 2" in caplog.text
    assert "the result may not be bit-identical" in caplog.text


# -- callbacks ----------------------------------------------------------------------------------------


class Keeping(Callback):
    """Counts steps, and saves the count."""

    def __init__(self, name: str | None = None) -> None:
        self.name, self.steps = name, 0

    def on_step_end(self, run: Run) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ([], ["Keeping"], "in the list but not saved ['Keeping']"),
        (["Keeping"], [], "saved but not in the list ['Keeping']"),
        (["old"], ["new"], "saved but not in the list ['old']; in the list but not saved ['new']"),
    ],
    ids=["added", "removed", "renamed"],
)
def test_states_that_do_not_fit_are_named_and_refused_only_if_strict(
    before: list[str], after: list[str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = interrupted(tmp_path / "a", 5, *map(Keeping, before))
    with pytest.raises(CheckpointMismatchError) as caught:
        trainer(directory, *map(Keeping, after)).fit(resume="auto", strict=True)
    assert said in str(caught.value)
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = trainer(directory, *map(Keeping, after)).fit(resume="auto")
    assert said in caplog.text
    assert run.progress.step == 10


def test_two_of_one_class_get_each_its_own_state(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 5, Keeping(), Keeping())
    first, second = Keeping(), Keeping()
    second.steps = 100
    trainer(directory, first, second).fit(resume="auto")
    assert (first.steps, second.steps) == (10, 10)


def test_an_average_of_the_weights_comes_back(tmp_path: Path) -> None:
    def final(directory: Path, ema: Ema, resume: bool) -> dict[str, Tensor]:
        trainer(directory, ema).fit(resume="auto" if resume else False)
        assert ema.average is not None
        return dict(ema.average.state_dict())

    whole = final(tmp_path / "whole", Ema(0.5), resume=False)
    continued = final(interrupted(tmp_path / "a", 7, Ema(0.5)), Ema(0.5), resume=True)
    assert first_difference(whole, continued) is None


# -- loaders ------------------------------------------------------------------------------------------


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Starts at the beginning, whatever happens."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x in range(10):
            yield torch.tensor([float(x)]) / 10 + torch.rand(1), torch.tensor([1.0])


def test_a_loader_without_position_needs_replay_inside_an_epoch_and_nothing_between_two(tmp_path: Path) -> None:
    def make(directory: Path) -> Trainer:
        return trainer(directory, loader=DataLoader(Stream(), 2))

    whole = make(tmp_path / "whole")
    whole.fit()
    inside = interrupted(tmp_path / "inside", 3, loader=DataLoader(Stream(), 2))
    with pytest.raises(DataError, match=r"StatefulDataLoader.*fit\(resume=\.\.\., replay=True\)"):
        make(inside).fit(resume="auto")
    replayed = make(inside)
    assert replayed.fit(resume="auto", replay=True).progress.origin.step == 2
    assert first_difference(dict(whole.model.state_dict()), dict(replayed.model.state_dict())) is None

    def by_epoch(*callbacks: Callback) -> Trainer:
        given: dict[str, Any] = {"epochs": 2, "seed": 1, "loader": DataLoader(Stream(), 2)}
        return tiny_trainer(callbacks=[Checkpoint("1 epoch"), *callbacks], directory=tmp_path / "between", **given)

    with pytest.raises(KeyboardInterrupt):
        by_epoch(failing_at(8)).fit()
    between = by_epoch()
    assert between.fit(resume="auto").progress.origin.epoch == 1
    assert first_difference(dict(whole.model.state_dict()), dict(between.model.state_dict())) is None


def test_a_run_without_seed_keeps_the_order_of_its_data(tmp_path: Path) -> None:
    seen: list[list[float]] = []

    def note(run: Run, batch: Any) -> None:
        seen.append(batch[0].flatten().tolist())

    def make() -> DataLoader[Any]:
        inputs = torch.arange(10.0).unsqueeze(1)
        return DataLoader(TensorDataset(inputs / 10, inputs), 2, shuffle=True)

    interrupted(tmp_path / "a", 3, on(Callback.on_batch_start)(note), loader=make(), seed=None, epochs=1)
    trainer(tmp_path / "a", on(Callback.on_batch_start)(note), loader=make(), seed=None, epochs=1).fit(resume="auto")
    first, rest = seen[:2], seen[4:]
    assert sorted(round(10 * x) for batch in first + rest for x in batch) == list(range(10))


def test_what_was_continued_stands_in_run_json(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 5)
    first = json.loads((directory / "run.json").read_text())
    assert first["outcome"]["kind"] == "failed"
    trainer(directory).fit(resume="auto")
    facts = json.loads((directory / "run.json").read_text())
    assert (facts["id"], facts["started"]) == (first["id"], first["started"])
    assert len(facts["continued"]) == 1
    assert facts["outcome"]["kind"] == "finished"


def _stop_at_3(run: Run) -> None:
    if run.progress.step == 3:
        run.stop("three are enough")


class CutAtBoundary(BaseException):
    pass


def _cut() -> None:
    raise CutAtBoundary


@pytest.mark.parametrize("make", [lambda: on(Callback.on_step_end)(_stop_at_3)])
def test_a_stop_that_was_asked_for_before_the_kill_is_still_taken(make: Callable[[], Callback], tmp_path: Path) -> None:
    def kill(run: Run) -> None:
        if run.progress.step == 3:
            run.save("just before the kill")
            run.after_step(_cut)

    killed = trainer(tmp_path / "a", make(), on(Callback.on_step_end)(kill))
    with pytest.raises(CutAtBoundary):
        killed.fit()
    run = trainer(tmp_path / "a", make()).fit(resume="auto")
    assert run.progress.step == 3
    assert run.outcome is not None
    assert (run.outcome.kind, run.outcome.reason) == ("stopped", "three are enough")
