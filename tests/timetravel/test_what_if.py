"""Questions to a recorded run: what other callbacks would have decided, and which samples a step read."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

from cadenza import Best, Callback, Every, First, Last, Run, Trainer, attach, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Ema, Evaluate, LogTraining, TimeLimit
from cadenza.errors import CallbackError, DirectoryError, MonitorError
from cadenza.loading import Mixture, TensorBatches
from cadenza.records import read_info
from cadenza.sinks import Sink
from cadenza.testing import launch, tiny_loader, tiny_trainer
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


# -- the samples of any step are named from run.json: 1000 random steps beside those that the runs read ---


Read = dict[int, list[float]]
"""The values that a rank read, by step."""


class Numbers(Dataset[Tensor]):
    """Sample i is the number `first` + i."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.first + index)])


def parts_of(batch: Any) -> list[Tensor]:
    parts = batch.values() if isinstance(batch, dict) else [batch]
    return [part[0] if isinstance(part, list | tuple) else part for part in parts]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return sum((model(part).mean() * 0.0 for part in parts_of(batch)), torch.zeros(()))


def numbers_in(batch: Any) -> list[float]:
    return [float(value) for part in parts_of(batch) for value in part.flatten()]


def run(path: Path, loader: Any, *, resume: bool = False, more: Any = (), **arguments: Any) -> Read:
    """Train, and return what this rank read."""
    read: Read = {}

    def note(run: Run, batch: Any) -> None:
        read.setdefault(run.progress.step + 1, []).extend(numbers_in(batch))

    callbacks = [on(Callback.on_batch_start)(note), Checkpoint("7 steps", background=False), *more]
    usual = {"seed": 5, "compute_loss": loss, "directory": path, "callbacks": callbacks, "loader": loader}
    override = arguments.pop("override", ())
    tiny_trainer(**{**usual, **arguments}).fit(resume="auto" if resume else False, override=override)
    return read


FIRST = {"b": 1000, "c": 2000, "n/b": 1000}
"""The number of the first sample of a source, where it is not 0."""


def check(path: Path, reads: list[Read], steps: int) -> None:
    """Compare random steps with what each rank read."""
    info, draw, done = read_info(path), random.Random(1), sorted(reads[0])
    for step in [draw.choice(done) for _ in range(steps)]:
        named = info.samples(step)
        assert named.ranks == sum(step in read for read in reads)
        for rank in range(named.ranks):
            own = [FIRST.get(one.source, 0) + i for one in named.batches if one.rank == rank for i in one.indices or ()]
            assert own == reads[rank][step], (step, rank)


def shuffled(**options: Any) -> Any:
    return DataLoader(Numbers(110), batch_size=4, shuffle=True, **options)


def by_hand(part: int) -> Any:
    """Split the data by a rank that is not that of the process, as cross-validation does."""
    sampler: Any = DistributedSampler(Numbers(23), num_replicas=2, rank=part, seed=3)
    return DataLoader(Numbers(23), batch_size=4, sampler=sampler)


def replaced() -> Any:
    drawn = RandomSampler(range(20), replacement=True, num_samples=15, generator=torch.Generator().manual_seed(8))
    return DataLoader(Numbers(20), batch_size=2, sampler=drawn)


def large() -> Any:
    """More samples than are permuted in memory."""
    return TensorBatches(torch.arange(2**20 + 7).unsqueeze(1).float(), batch_size=64, shuffle=True)


def sources() -> dict[str, Any]:
    return {
        "a": DataLoader(Numbers(30), batch_size=3, shuffle=True),
        "b": DataLoader(Numbers(11, 1000), batch_size=2),
        "c": TensorBatches(torch.arange(2000.0, 2013).unsqueeze(1), batch_size=3, shuffle=True),
    }


CHANGING: dict[str, Any] = {"epochs": 4, "accumulate": {0: 2, "20 steps": 3, "50 steps": 1}}
IN_GROUPS: dict[str, Any] = {"steps": 45, "accumulate": 2}
LOADERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "shuffled": (shuffled, CHANGING),
    "workers": (lambda: shuffled(num_workers=3), CHANGING),
    "part 0": (lambda: by_hand(0), {"epochs": 2}),
    "part 1": (lambda: by_hand(1), {"epochs": 2}),
    "replacement": (replaced, {"epochs": 4}),
    "large": (large, {"steps": 40}),
    "cycle": (lambda: Mixture(sources(), "cycle", stop="longest"), IN_GROUPS),
    "weighted": (lambda: Mixture(sources(), "weighted", weights={"a": 1, "b": 2, "c": 1}, stop="longest"), IN_GROUPS),
    "zip": (lambda: Mixture(sources(), "zip", stop="longest"), IN_GROUPS),
    "sequential": (lambda: Mixture(sources(), "sequential"), IN_GROUPS),
    "nested": (lambda: Mixture({"a": sources()["a"], "n": Mixture({"b": sources()["b"]}, "cycle")}, "cycle"), IN_GROUPS),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_samples_of_random_steps_are_those_that_were_read(tmp_path: Path, kind: str) -> None:
    make, arguments = LOADERS[kind]
    read = run(tmp_path, make(), **arguments)
    check(tmp_path, [read], 100)
    assert kind != "large" or max(read[1]) > 100_000


def test_two_ranks_then_three_then_one(tmp_path: Path) -> None:
    def make(kind: str) -> Any:
        data = DataLoader(Numbers(101), batch_size=2, shuffle=True)
        return data if kind == "data set" else Mixture({"a": data, "b": DataLoader(Numbers(40, 1000), batch_size=3)}, "cycle")

    def fits(**options: Any) -> list[Read]:
        return [run(tmp_path / kind, make(kind), **options) for kind in kinds]

    kinds, reads = ("data set", "mixture"), [[Read() for _ in range(3)] for _ in range(2)]
    for ranks, steps in ((2, 11), (3, 40), (1, 75)):
        where = {"driver": "ddp"} if ranks > 1 else {"driver": "single", "device": "cpu"}
        fit = partial(fits, resume=ranks != 2, steps=steps, **where)
        for rank, both in enumerate(launch(fit, ranks) if ranks > 1 else [fit()]):
            for of_kind, read in zip(reads, both, strict=True):
                of_kind[rank] |= read
    for kind, of_kind in zip(kinds, reads, strict=True):
        assert [len(read) for read in of_kind] == [75, 40, 29]
        check(tmp_path / kind, of_kind, 80)


def test_another_batch_size_and_another_accumulation_after_a_resume(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(Numbers(96), batch_size=4, shuffle=True)

    first = run(tmp_path, loader(), steps=10, accumulate=2)
    given = {"batch_size": 8, "accumulate": 1}
    second = run(tmp_path, loader(), resume=True, steps=40, accumulate=2, override=given)
    check(tmp_path, [first | second], 100)


def test_an_epoch_that_ends_early(tmp_path: Path) -> None:
    loader = DataLoader(Numbers(40), batch_size=4, shuffle=True)
    early = on(Callback.on_step_end, at=13)(lambda run: run.end_epoch("enough"))
    first = run(tmp_path, loader, epochs=5, more=[early])
    check(tmp_path, [first], 40)
    with pytest.raises(ValueError, match="has no step 44"):
        read_info(tmp_path).samples(44)


class Evens(Sampler[int]):
    """The even indices."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 20, 2))


class Shards(IterableDataset[Tensor]):
    """A stream of 6 shards."""

    def shards(self) -> list[int]:
        return [*range(6)]

    def read_shard(self, shard: int, start: int) -> Iterator[Tensor]:
        return (torch.tensor([shard * 10.0 + i]) for i in range(start, 8))

    def __iter__(self) -> Iterator[Tensor]:
        return (one for shard in self.shards() for one in self.read_shard(shard, 0))


class Endless(IterableDataset[Tensor]):
    """Any other stream."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(i)]) for i in range(40))


NOT_NAMED: dict[str, tuple[Callable[[], Any], str]] = {
    "sampler": (lambda: DataLoader(Numbers(20), batch_size=2, sampler=Evens()), "a Evens draws the indices"),
    "batch sampler": (
        lambda: DataLoader(Numbers(20), batch_sampler=type("Own", (BatchSampler,), {})(RandomSampler(range(20)), 2, False)),
        "a Own draws the indices",
    ),
    "stream": (lambda: DataLoader(Endless(), batch_size=4), r"a stream \(Endless\) has no indices"),
    "shards": (lambda: DataLoader(Shards(), batch_size=4), "this rank reads shards 0, 1, ..., 5"),
}


@pytest.mark.parametrize("kind", NOT_NAMED)
def test_where_no_index_is_known_the_position_is_named_and_the_reason(tmp_path: Path, kind: str) -> None:
    make, why = NOT_NAMED[kind]
    read = run(tmp_path, make(), epochs=3, accumulate=3)
    info = read_info(tmp_path)
    per_epoch = {"sampler": 5, "batch sampler": 10, "stream": 10, "shards": 12}[kind]
    sizes = [min(3, per_epoch - first) for first in range(0, per_epoch, 3)] * 3
    assert len(read) == len(sizes)
    for step, size in enumerate(sizes, 1):
        named = info.samples(step)
        assert named.epoch == (step - 1) // (len(sizes) // 3)
        first = (step - 1) % (len(sizes) // 3) * 3
        assert [one.number for one in named.batches] == [*range(first, first + size)]
        assert all(one.indices is None for one in named.batches)
        assert named.of_rank(0) is None
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(str(named))


def test_a_list_is_named_by_its_batches(tmp_path: Path) -> None:
    read = run(tmp_path, [torch.full((2, 1), float(i)) for i in range(7)], epochs=3)
    named = read_info(tmp_path).samples(12)
    assert (named.batches[0].unit, named.of_rank(0), read[12]) == ("batches", [4], [4.0, 4.0])


def test_a_run_that_goes_on_from_the_last_step_of_an_epoch_describes_its_data_as_an_undisturbed_one(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    @on(Callback.on_epoch_end)
    def kill(run: Run) -> None:
        if run.progress.origin.step == 0:
            raise Killed

    def trainer(name: str, *more: Callback) -> Any:
        return tiny_trainer(directory=tmp_path / name, epochs=2, seed=1, callbacks=[Checkpoint("1 step"), *more])

    def described(name: str) -> Any:
        return json.loads((tmp_path / name / "run.json").read_text())["data"]

    with pytest.raises(Killed):
        trainer("killed", kill).fit()
    assert trainer("killed", kill).fit(resume="auto").progress.origin.batch_in_epoch > 0  # the epoch was not counted
    trainer("whole").fit()
    assert described("killed") == described("whole")


def test_a_run_that_goes_on_names_its_steps_and_cannot_name_later_ones(tmp_path: Path) -> None:
    seen: list[Any] = []

    def note(run: Run, batch: Any) -> None:
        seen.append((run.info.samples(run.progress.step + 1).of_rank(0), numbers_in(batch)))

    loader = DataLoader(Numbers(12), batch_size=3, shuffle=True)
    ended = tiny_trainer(
        loader=loader, compute_loss=loss, seed=2, epochs=2, callbacks=[on(Callback.on_batch_start)(note)]
    ).fit()
    assert len(seen) == 8
    assert all(named == numbers for named, numbers in seen)
    with pytest.raises(ValueError, match=r"has no step 10: expected a step from 1 to 9\."):
        ended.info.samples(10)
    with pytest.raises(TypeError, match="a whole number"):
        ended.info.samples("3")  # type: ignore[arg-type]  # wrong on purpose


def test_mistakes_about_samples_are_named(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"is not the directory of a run: expected a run\.json"):
        read_info(tmp_path)
    tiny_trainer(directory=tmp_path / "none", callbacks=[on(Callback.on_fit_start)(lambda run: run.stop("at once"))]).fit()
    with pytest.raises(ValueError, match=r"has no step 1: it ended before its first step\."):
        read_info(tmp_path / "none").samples(1)
    run(tmp_path / "run", DataLoader(Numbers(12), batch_size=3), epochs=1)
    path = tmp_path / "run/run.json"
    facts = json.loads(path.read_text())
    del facts["data"]
    path.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="An earlier version wrote it"):
        read_info(tmp_path / "run").samples(2)
    path.write_text(json.dumps({**facts, "data": [{"points": 3}]}))
    with pytest.raises(DirectoryError, match=r"the part 'data' of .* cannot be read"):
        read_info(tmp_path / "run")


def test_an_attached_loop_brings_its_own_data(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with attach(model, torch.optim.SGD(model.parameters(), 0.1), max_steps=2, directory=tmp_path, progress=False) as loop:
        while not loop.over():
            with loop.step():
                loop.backward(model(torch.ones(1, 2)).mean())
                loop.update()
    for info in (loop.run.info, read_info(tmp_path)):
        with pytest.raises(ValueError, match=r"the loop of cadenza\.attach\(\.\.\.\) brings its own data"):
            info.samples(2)
