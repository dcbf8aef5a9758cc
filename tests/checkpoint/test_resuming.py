"""``fit(resume=...)``: the state that is restored, the checkpoints that are refused, and the messages."""

from __future__ import annotations

import json
import logging
import os
import tarfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping, Ema, Evaluate, LearningRate, Swa, TimeLimit
from cadenza.checkpoint.store import Store
from cadenza.drivers.sharding import whole
from cadenza.errors import CheckpointError, CheckpointMismatchError, DataError, DirectoryError
from cadenza.status.decisions import Outcome
from cadenza.status.encoding import first_difference
from cadenza.testing import launch, tiny_loader, tiny_trainer


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


def test_auto_starts_where_there_is_no_run_yet_or_one_that_ended_before_its_first_checkpoint(tmp_path: Path) -> None:
    assert trainer(tmp_path / "new").fit(resume="auto").progress.now() == trainer(tmp_path / "whole").fit().progress.now()
    log = on(Callback.on_step_end)(lambda run: run.log("x", 1.0))
    directory = interrupted(tmp_path / "a", 0, log)
    run = trainer(directory, log).fit(resume="auto")
    assert run.progress.origin.step == 0
    assert [step for step, _ in run.history["x"]] == list(range(1, 11))
    assert len((directory / "metrics.jsonl").read_text().splitlines()) == 10


def test_auto_continues_the_newest_and_says_so_in_run_json(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 7)
    first = json.loads((directory / "run.json").read_text())
    assert first["outcome"]["kind"] == "failed"
    run = trainer(directory).fit(resume="auto")
    assert run.progress.origin.step == 6
    assert "step-00000006" in run.why("resumed")
    facts = json.loads((directory / "run.json").read_text())
    assert (facts["id"], facts["started"]) == (first["id"], first["started"])
    assert len(facts["continued"]) == 1
    assert facts["outcome"]["kind"] == "finished"


@pytest.mark.parametrize(
    ("every", "stopped"), [("2 steps", False), ("3 steps", False), ("5 steps", False), ("1 epoch", False), ("2 steps", True)]
)
def test_auto_on_a_run_that_is_over_says_so_and_does_nothing(
    every: str, stopped: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> Trainer:
        stop = [EarlyStopping("eval/loss", mode="max", patience=1)] if stopped else []
        callbacks = [Evaluate(tiny_loader(2)), *stop, Checkpoint(every)]
        return tiny_trainer(callbacks=callbacks, directory=tmp_path / "a", epochs=9 if stopped else 2, seed=1)

    finished = make()
    first = finished.fit()
    before = contents(tmp_path / "a")
    again = make()
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = again.fit(resume="auto")
    assert "nothing to do: the run in" in caplog.text
    why = "stopped: 'eval/loss' did not get better" if stopped else "finished"
    assert f"is over ({why}" in caplog.text
    assert contents(tmp_path / "a") == before
    assert run.outcome == first.outcome
    assert run.progress.now() == first.progress.now()
    assert run.history["eval/loss"] == first.history["eval/loss"]
    assert first_difference(dict(finished.model.state_dict()), dict(again.model.state_dict())) is None


def test_a_directory_with_a_run_is_refused_without_resume_and_auto_without_a_directory(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 3)
    before = contents(directory)
    with pytest.raises(DirectoryError, match="already holds a run"):
        trainer(directory).fit()
    assert contents(directory) == before
    with pytest.raises(ValueError, match=r"Give directory=\.\.\., or leave out resume= to start a new run"):
        tiny_trainer().fit(resume="auto")


# -- damage -------------------------------------------------------------------------------------------


def test_a_damaged_newest_is_skipped_with_its_reason_and_where_all_are_damaged_nothing_is_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("newest", "all"):
        interrupted(tmp_path / name, 7)
    weights = tmp_path / "newest" / "checkpoints" / "step-00000006" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "cadenza"):
        run = trainer(tmp_path / "newest").fit(resume="auto")
    assert run.progress.origin.step == 4
    assert "step-00000006: model.safetensors has" in caplog.text

    directory = tmp_path / "all"
    for name in names(directory):
        (directory / "checkpoints" / name / "state.json").unlink()
    before = contents(directory)
    with pytest.raises(CheckpointError) as caught:
        trainer(directory).fit(resume="auto")
    for name in names(directory):  # each has its line
        assert f"\n  {name}: state.json is missing" in str(caught.value) or "middle of a step" in str(caught.value)
    assert contents(directory) == before


# -- a path -------------------------------------------------------------------------------------------


def test_a_path_that_is_not_there_lists_what_is(tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 5)
    with pytest.raises(CheckpointError, match=r"no checkpoint at '.*step-00000003'.*step-00000002.*step-00000004"):
        trainer(tmp_path / "b").fit(resume=directory / "checkpoints" / "step-00000003")
    with pytest.raises(CheckpointError, match=r"'.*nowhere' holds none\. Give the path of a checkpoint, or resume='auto'\."):
        trainer(tmp_path / "b").fit(resume=tmp_path / "nowhere" / "step-00000003")


@pytest.mark.parametrize("place", ["", "checkpoints"])
def test_the_path_of_a_run_names_its_newest_checkpoint(place: str, tmp_path: Path) -> None:
    directory = interrupted(tmp_path / "a", 5)
    newest = trainer(tmp_path / "b").fit(resume=directory / place)
    assert newest.progress.origin.step == trainer(directory).fit(resume="last").progress.origin.step


def test_a_folder_without_checkpoints_and_a_file_of_weights_are_named_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint at '(.*empty)': '\1' holds none\."):
        trainer(tmp_path / "b").fit(resume=tmp_path / "empty")
    weights = interrupted(tmp_path / "a", 5) / "checkpoints" / "last" / "model.safetensors"
    with pytest.raises(
        CheckpointError,
        match=r"'.*model.safetensors' is a file or a folder of weights, .* load the weights with load_weights\(path, model",
    ):
        trainer(tmp_path / "b").fit(resume=weights)


# -- what must be the same ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model": nn.Linear(1, 2)}, ["weight: saved [1, 1], now [2, 1]", "bias: saved [1], now [2]"]),
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


def test_settings_of_torch_that_change_bits_are_named_if_they_differ(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory, precision = interrupted(tmp_path / "a", 5), torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    try:
        with caplog.at_level(logging.WARNING, "cadenza"):
            trainer(directory).fit(resume="auto")
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(precision)
    assert "deterministic algorithms: saved False, now True" in caplog.text
    assert "float32 products: saved " in caplog.text


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


stop = on(Callback.on_step_end, at=3)(lambda run: run.stop("three are enough"))


class CutAtBoundary(BaseException):
    pass


def test_a_stop_that_was_asked_for_before_the_kill_is_still_taken(tmp_path: Path) -> None:
    def raise_it() -> None:
        raise CutAtBoundary

    @on(Callback.on_step_end, at=3)
    def kill(run: Run) -> None:
        run.save("just before the kill")
        run.after_step(raise_it)

    with pytest.raises(CutAtBoundary):
        trainer(tmp_path / "a", stop, kill).fit()
    run = trainer(tmp_path / "a", stop).fit(resume="auto")
    assert (run.progress.step, run.outcome) == (3, Outcome("stopped", "three are enough"))


@pytest.mark.parametrize("resume", ["last", "step-3", "path"])
def test_a_stopped_run_continues_at_a_named_checkpoint_as_if_it_had_not_stopped(
    resume: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory, whole = tmp_path / "a", trainer(tmp_path / "whole")
    whole.fit()
    trainer(directory, stop).fit()
    with caplog.at_level(logging.WARNING, "cadenza"):
        assert trainer(directory, stop).fit(resume="auto").progress.step == 3
    assert 'is over (stopped: three are enough). fit(resume="last") continues where it stopped' in caplog.text
    path = directory / "checkpoints" / "last"
    assert [call.step for call in trainer(directory, stop).calendar(resume="last").rows] == [4, 6, 8, 10]
    continued = trainer(directory, stop)
    run = continued.fit(resume=path if resume == "path" else resume)
    assert (run.progress.origin.step, run.progress.step) == (3, 10)
    assert first_difference(dict(whole.model.state_dict()), dict(continued.model.state_dict())) is None
    assert "rolled back" not in {one.what for one in run.decisions}
    with caplog.at_level(logging.WARNING, "cadenza"):
        assert trainer(directory).fit(resume="last").progress.step == 10
    assert "is over (finished: the limit is reached). To continue, increase max_epochs=2" in caplog.text


def test_auto_continues_after_a_time_limit_and_after_a_stop_if_a_limit_is_larger(tmp_path: Path) -> None:
    def stopped_at(name: str, *callbacks: Callback, **limits: int) -> int:
        return trainer(tmp_path / name, *callbacks, **limits).fit(resume="auto").progress.step

    assert [stopped_at("slots", TimeLimit("0.000001 s")) for _ in range(3)] == [1, 2, 3], "each start has its own time"
    assert stopped_at("slots") == 10
    assert [stopped_at("stopped", stop, epochs=epochs) for epochs in (2, 2, 1, 3, 3)] == [3, 3, 3, 15, 15]


def test_early_stopping_keeps_its_count_and_auto_does_not_continue_for_more_patience(tmp_path: Path) -> None:
    def epochs(resume: bool | str, patience: int) -> int:
        worse = EarlyStopping("eval/loss", "max", patience=patience)
        return trainer(tmp_path, Evaluate(tiny_loader()), worse, epochs=9).fit(resume=resume).progress.epoch

    assert [epochs(resume, most) for resume, most in ((False, 2), ("auto", 5), ("last", 2), ("last", 5))] == [3, 3, 4, 6]


def stopped_and_continued(directory: Path) -> list[int]:
    make = partial(trainer, driver="ddp")
    stops = on(Callback.on_step_end, at=2)(lambda run: run.stop("enough") if run.driver.rank else None)
    whole = make(directory / "whole").fit()
    stopped = make(directory / "stopped", stops).fit()
    continued = make(directory / "stopped").fit(resume="last")
    limited = [make(directory / "limited", TimeLimit("0.000001 s")).fit(resume="auto") for _ in range(2)]
    return [run.progress.step for run in (*limited, stopped, continued, whole)]


def test_on_two_ranks_a_stop_is_continued_on_both(tmp_path: Path) -> None:
    first, second = launch(partial(stopped_and_continued, tmp_path))
    assert first == second
    one, two, stopped, continued, whole = first
    assert one < two
    assert stopped < continued == whole


@pytest.mark.parametrize("saves", [[], [Checkpoint("2 steps", weights_only=True)]])
def test_last_needs_a_checkpoint_that_a_run_can_continue(saves: list[Callback], tmp_path: Path) -> None:
    tiny_trainer(callbacks=[*saves, stop], directory=tmp_path).fit()
    with pytest.raises(CheckpointError, match="has no checkpoint to continue at"):
        tiny_trainer(directory=tmp_path).fit(resume="last")


# -- inside an epoch ------------------------------------------------------------------------------------


class Epochs(Callback):
    """Keeps, for each start and end of an epoch, the completed epochs, and whether the run continues inside this one."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, bool]] = []
        self.steps: list[bool] = []

    def on_epoch_start(self, run: Run) -> None:
        self.seen.append(("start", run.progress.epoch, run.progress.resumed_in_epoch))

    def on_step_start(self, run: Run) -> None:
        self.steps.append(run.progress.resumed_in_epoch)

    def on_epoch_end(self, run: Run) -> None:
        self.seen.append(("end", run.progress.epoch, run.progress.resumed_in_epoch))


def epochs_until(steps: int, directory: Path) -> Epochs:
    """Train to a step of epochs of 5 batches; go on from where the last run in `directory` ended."""
    epochs = Epochs()
    tiny_trainer(callbacks=[epochs, Checkpoint()], directory=directory, steps=steps, batches=5).fit(resume="auto")
    return epochs


def test_the_start_of_an_epoch_fires_again_and_progress_tells_it_from_a_first_one(tmp_path: Path) -> None:
    first = epochs_until(7, tmp_path)
    assert first.seen == [("start", 0, False), ("end", 1, False), ("start", 1, False), ("end", 1, False)]
    assert not any(first.steps)

    cut_again = epochs_until(8, tmp_path)
    assert cut_again.seen == [("start", 1, True), ("end", 1, True)]

    last = epochs_until(15, tmp_path)
    assert last.seen == [("start", 1, True), ("end", 2, False), ("start", 2, False), ("end", 3, False)]
    assert last.steps == [True] * 2 + [False] * 5

    epochs_until(5, tmp_path / "between two")
    assert epochs_until(10, tmp_path / "between two").seen[-2:] == [("start", 1, False), ("end", 2, False)]


# -- a run that is over: the model gets the weights with which it ended ---------------------------------

ENDS_WITH: dict[str, Callable[[], list[Callback]]] = {
    "those of the last step": lambda: [BestWeights("eval/loss", "max", restore=False), Ema(0.5, use_at_end=False)],
    "the best": lambda: [BestWeights("eval/loss", "max")],
    "the best before a stop": lambda: [EarlyStopping("eval/loss", "max", patience=2, restore_best=True)],
    "the average": lambda: [Ema(0.5, use_at_end=True)],
    "the average of the last part": lambda: [Swa(0.5, "1 step")],
}


def fitted_twice(ends_with: str, directory: Path, driver: str = "single") -> list[tuple[dict[str, Any], Any]]:
    """Return the weights and the outcome of a run, and of the same run when it is over."""
    ends = []
    for _ in range(2):
        callbacks = [Evaluate(tiny_loader(2), "2 steps"), *ENDS_WITH[ends_with](), Checkpoint("3 steps")]
        one = tiny_trainer(
            callbacks=callbacks, directory=directory / ends_with, epochs=2, batches=8, seed=1, driver=driver, device="cpu",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        )  # fmt: skip
        outcome = one.fit(resume="auto").outcome
        ends.append(({name: whole(part).clone() for name, part in one.model.state_dict().items()}, outcome))
    return ends


@pytest.mark.parametrize("ends_with", ENDS_WITH)
def test_the_model_gets_the_weights_with_which_the_run_ended(ends_with: str, tmp_path: Path) -> None:
    first, again = fitted_twice(ends_with, tmp_path)
    assert first_difference(first, again) is None


def test_on_two_ranks_the_model_gets_the_weights_with_which_the_run_ended(tmp_path: Path) -> None:
    for runs in launch(lambda: [fitted_twice(name, tmp_path, "fsdp") for name in ("the best", "the average")]):
        for first, again in runs:
            assert first_difference(first, again) is None


def test_statistics_of_batch_norm_that_no_checkpoint_has_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fit() -> dict[str, Any]:
        torch.manual_seed(1)
        one = tiny_trainer(
            model=nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)), epochs=2, seed=1, directory=tmp_path,
            callbacks=[Swa(0.5, "1 step"), Checkpoint("1 epoch")],
        )  # fmt: skip
        one.fit(resume="auto")
        return {name: part.clone() for name, part in one.model.named_parameters()}

    with caplog.at_level(logging.WARNING, "cadenza"):
        first = fit()
        assert "BatchNorm statistics" not in caplog.text
        assert first_difference(first, fit()) is None
    assert "the BatchNorm statistics are those of the last weights" in caplog.text


# -- a checkpoint that an earlier version wrote ---------------------------------------------------------

WRITTEN = Path(__file__).parent / "data" / "38fc567.tar.xz"
WEIGHTS = [
    *(0.0090938220, 0.2469393462, -0.4426863492, -0.4075742662, -0.1872124076, 0.0831488594, -0.0626861677, 0.3637227714),
    *(-0.0217484105, 0.0849711150, -0.2135132551, -0.1275242418, -0.4175318778, -0.2714030147, -0.1519232392, 0.0118799368),
    *(0.1777724028, 0.2921202183, -0.3351433277),
]
LOSSES = [0.7296677590, 0.7179398537, 0.7055526733, 0.6953522682, 0.6879054069]
"""The losses of the averaged weights, at every third step."""


def fitted(directory: Path, *, dies_at: int = 0, resume: bool = False) -> Run:
    """Return a run of 15 steps. At step `dies_at` the process ends without a cleanup."""
    generator = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(20, 4, generator=generator), torch.randn(20, 1, generator=generator))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.3), nn.Linear(3, 1))

    @on(Callback.on_step_end)
    def total(run: Run) -> None:
        run.state["total"] = run.state.get("total", 0.0) + float(run.outputs["loss"].detach())
        run.log("train/total", run.state["total"])
        if run.progress.step == dies_at:
            os._exit(9)

    callbacks = [
        LearningRate(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 15)),
        Ema(decay=0.9),
        Evaluate(DataLoader(data, batch_size=4), every="3 steps", weights="ema"),
        Checkpoint(every="2 steps", keep_last=1, keep_best=("eval/loss", "min"), background=False),
        total,
    ]
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), 1e-2),
        DataLoader(data, batch_size=4, shuffle=True),
        supervised(nn.MSELoss()),
        max_epochs=3,
        seed=3,
        directory=directory,
        driver="single",
        progress=False,
        callbacks=callbacks,
        tokens=lambda batch: len(batch[0]),  # that version did not count them
    )
    return trainer.fit(resume="auto") if resume else trainer.fit()


def test_a_run_continues_at_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    with tarfile.open(WRITTEN) as archive:
        archive.extractall(tmp_path, filter="data")
    run = fitted(tmp_path, resume=True)
    weights = torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])
    torch.testing.assert_close(weights, torch.tensor(WEIGHTS), rtol=1e-5, atol=1e-6)  # another CPU may round differently
    assert [step for step, _ in run.history["eval/loss"]] == [3, 6, 9, 12, 15]
    assert [value for _, value in run.history["eval/loss"]] == pytest.approx(LOSSES, rel=1e-5)
    assert run.progress.tokens == 4 * (15 - 6), "those before the checkpoint read as 0"
    assert run.state == {"total": pytest.approx(10.67909936606884, rel=1e-5)}
    assert [one.why for one in run.decisions if one.what == "resumed"] == ["at step-00000006"]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [*dict.fromkeys(record["step"] for record in records)] == list(range(1, 16))
    kept = Store(tmp_path / "checkpoints")
    assert [(one.step, kept.manifest(one).get("weights")) for one in kept.saved()][-1] == (15, "ema")
