"""Several loaders that are read as one: order, any position after a resume, any number of ranks, runs and evaluations."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointMismatchError, DataError
from cadenza.loading import Mixture, ResumableLoader, Shard, TensorBatches, current_source, num_batches, resumable
from cadenza.loading.loaders import Limited, length_of
from cadenza.testing import launch, prove_resume, tiny_loader, tiny_run, tiny_trainer
from tests.distributed.parts import loader, squared_error, trainer
from tests.loading.data import Keeping, Numbers, Stream, loader_of, rounds_by
from tests.long import seeds

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # from torchdata


def three(mode: Any, stop: Any = "shortest", **options: Any) -> Mixture:
    """Return a mixture of 2 batches a, 5 batches b and 3 batches c."""
    sizes = {"a": 2, "b": 5, "c": 3}
    return Mixture({name: [f"{name}{i}" for i in range(size)] for name, size in sizes.items()}, mode, stop=stop, **options)


ORDERS = {
    ("sequential", "shortest"): "a0 a1 b0 b1 b2 b3 b4 c0 c1 c2",
    ("cycle", "shortest"): "a0 b0 c0 a1 b1 c1",
    ("cycle", "longest"): "a0 b0 c0 a1 b1 c1 a0 b2 c2 a1 b3 c0 a0 b4 c1 a1",
    ("zip", "shortest"): "a0+b0+c0 a1+b1+c1",
    ("zip", "longest"): "a0+b0+c0 a1+b1+c1 a0+b2+c2 a1+b3+c0 a0+b4+c1",
}


@pytest.mark.parametrize(("mode", "stop"), ORDERS)
def test_the_order_of_the_batches(mode: Any, stop: Any) -> None:
    mixture = three(mode, stop)
    batches = [batch if isinstance(batch, str) else "+".join(batch[name] for name in "abc") for batch in mixture]
    assert " ".join(batches) == ORDERS[mode, stop]
    assert len(mixture) == num_batches(mixture, Shard()) == len(batches)
    assert list(resumable(mixture, 1).batches(0, 0)) == list(mixture), "lists are not shuffled"


@pytest.mark.parametrize("stop", ["shortest", "longest"])
def test_a_weighted_order_is_drawn_by_the_weights_from_seed_and_epoch(stop: Any) -> None:
    mixture = Mixture({"a": ["a"] * 3000, "b": ["b"] * 1000}, "weighted", weights={"a": 3, "b": 1}, stop=stop)
    epochs = [list(resumable(mixture, seed).batches(epoch, 0)) for seed, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))]
    assert epochs[0] == epochs[1]
    assert epochs[0][:50] != epochs[2][:50] != epochs[3][:50]
    drawn = Counter(epochs[0][:3000])
    assert drawn["a"] / drawn.total() == pytest.approx(0.75, abs=0.03)
    assert length_of(mixture) is None


def test_a_new_pass_has_another_order_and_each_loader_its_own() -> None:
    loaders = {name: TensorBatches(torch.arange(20), batch_size=1, shuffle=True) for name in "ab"}
    both = [plain_of(batch) for batch in islice(resumable(Mixture(loaders, "zip"), 1).batches(0, 0), 20)]
    assert [batch["a"] for batch in both] != [batch["b"] for batch in both]
    longest = Mixture({"a": loaders["a"], "b": [0] * 40}, "zip", stop="longest")
    passes = [batch["a"][0].item() for batch in resumable(longest, 1).batches(0, 0)]
    assert sorted(passes[:20]) == sorted(passes[20:]) == list(range(20))
    assert passes[:20] != passes[20:]


def test_set_epoch_receives_the_number_of_the_pass() -> None:
    seen: list[int] = []

    class Epochs(list[int]):
        def set_epoch(self, epoch: int) -> None:
            seen.append(epoch)

    mixture = Mixture({"a": Epochs([1]), "b": [1, 2, 3]}, "zip", stop="longest")
    assert len(list(resumable(mixture, 1).batches(7, 0))) == 3
    assert seen[:3] == [7, 7 + 2**20, 7 + 2 * 2**20]


def test_nested_mixtures_name_their_loaders_and_yield_their_very_batches() -> None:
    inner = Mixture({"en": [1, 2], "de": [10]}, "cycle", stop="longest")
    outer = Mixture({"web": inner, "code": [100, 200, 300]}, "sequential")
    assert len(outer) == len(inner) + 3
    named = [(current_source(), batch) for batch in resumable(outer, 1).batches(0, 0)]
    assert named == [
        *[("web/en", 1), ("web/de", 10), ("web/en", 2), ("web/de", 10)],
        *[("code", 100), ("code", 200), ("code", 300)],
    ]
    batch = object()
    assert next(iter(Mixture({"a": [batch]}, "cycle"))) is next(iter(Mixture({"a": [batch]}, "zip")))["a"] is batch


# -- resuming ------------------------------------------------------------------------------------------


KINDS: dict[str, Callable[[int], Iterable[Any]]] = {
    "map-style": lambda samples: loader_of(Numbers("torch", samples=samples), batch_size=2, shuffle=True),
    "in memory": lambda samples: TensorBatches(torch.arange(samples).double(), batch_size=2, shuffle=True),
    "a list": lambda samples: [torch.tensor([i]) for i in range(samples)],
    "stateful": lambda samples: StatefulDataLoader(Numbers(samples=samples), batch_size=2),
    "a stream with a position": lambda samples: loader_of(Keeping(), batch_size=3),
    "limited": lambda samples: Limited(loader_of(Numbers(samples=samples + 9), batch_size=2, shuffle=True), 3),
    "nested": lambda samples: Mixture({"x": [torch.tensor([1.0])] * 2, "y": KINDS["map-style"](samples)}, "cycle"),
}


def recipe_of(seed: int, kinds: list[str] | None = None) -> Callable[[], Mixture]:
    """Return a function that makes a random mixture: the same one each time."""

    def make() -> Mixture:
        draw = random.Random(seed)
        mode: Any = draw.choice(["zip", "cycle", "sequential", "weighted"])
        stop: Any = "shortest" if mode == "sequential" else draw.choice(["shortest", "longest"])
        names = "abc"[: draw.randint(1, 3)]
        weights = {name: draw.random() + 0.2 for name in names} if mode == "weighted" else None
        chosen = kinds or list(KINDS)
        loaders = {name: KINDS[draw.choice(chosen)](draw.randint(2, 12)) for name in names}
        return Mixture(loaders, mode, weights=weights, stop=stop)

    return make


def plain_of(batch: Any) -> Any:
    """Return a batch as plain numbers."""
    if isinstance(batch, dict):
        return {name: plain_of(part) for name, part in batch.items()}
    if isinstance(batch, tuple | list):
        return [plain_of(part) for part in batch]
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def read_all(mixture: Mixture, epoch: int) -> list[Any]:
    return [(plain_of(batch), current_source()) for batch in resumable(mixture, 1).batches(epoch, 0)]


@pytest.mark.parametrize("seed", seeds(usual=8, long=30))
def test_a_resume_at_every_position_equals_the_uninterrupted_epoch(seed: int) -> None:
    make = recipe_of(seed)
    whole = read_all(make(), 2)
    for position in range(1, len(whole) + 1):
        first = resumable(make(), 1)
        before = [plain_of(batch) for batch in islice(first.batches(2, 0), position)]
        second = resumable(make(), 1)
        second.load_state_dict(first.state_dict())
        assert current_source() == whole[position - 1][1]
        assert second.state_dict() == first.state_dict(), "also before the first batch"
        reading = second.batches(2, position)
        rest = [(plain_of(batch), current_source()) for batch in islice(reading, 1)]
        third = resumable(make(), 1)
        third.load_state_dict(second.state_dict())
        rest += [(plain_of(batch), current_source()) for batch in third.batches(2, position + 1) if len(rest)]
        list(reading)
        assert before == [batch for batch, _ in whole[:position]]
        assert rest == whole[position:]
        assert [plain_of(batch) for batch in islice(second.batches(3, 0), 4)] == [b for b, _ in read_all(make(), 3)[:4]]


@pytest.mark.parametrize("seed", seeds(usual=8, long=40))
def test_without_a_state_the_position_follows_from_the_lengths(seed: int) -> None:
    make = recipe_of(seed, ["map-style", "in memory", "a list", "limited", "nested"])
    whole = read_all(make(), 1)
    for position in {1, len(whole) // 2, len(whole) - 1} - {0}:
        assert [plain_of(batch) for batch in resumable(make(), 1).batches(1, position)] == [b for b, _ in whole[position:]]


@pytest.mark.parametrize(("mode", "persistent"), [("zip", False), ("cycle", True), ("sequential", False)])
def test_loaders_with_workers_resume(mode: Any, persistent: bool) -> None:
    def make(workers: int) -> Mixture:
        options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent and workers > 0}
        a = loader_of(Numbers("torch", samples=10), batch_size=2, shuffle=True, **options)
        return Mixture({"a": a, "b": StatefulDataLoader(Numbers(samples=14), batch_size=2, **options)}, mode)

    def first_of(source: ResumableLoader) -> Any:
        batch = plain_of(next(source.batches(0, 0)))
        return batch["a"] if mode == "zip" else batch

    source = resumable(make(1), 1)
    whole = [[plain_of(batch) for batch in source.batches(epoch, 0)] for epoch in range(2)][1]
    assert first_of(resumable(make(1), 1)) == first_of(resumable(make(0), 1))
    first = resumable(make(1), 1)
    assert [plain_of(batch) for batch in islice(first.batches(1, 0), 4)] == whole[:4]
    second = resumable(make(1), 1)
    second.load_state_dict(first.state_dict())
    assert [plain_of(batch) for batch in second.batches(1, 4)] == whole[4:]


def test_a_loader_that_cannot_continue_is_an_error_at_the_start() -> None:
    def make() -> Mixture:
        return Mixture({"a": [1, 2, 3], "b": loader_of(Stream(), batch_size=2)}, "cycle")

    first = resumable(make(), 1)
    done = [plain_of(batch) for batch in islice(first.batches(0, 0), 4)]
    for replay in (False, True):
        second = resumable(make(), 1, replay=replay)
        second.load_state_dict(first.state_dict())
        if replay:
            assert done + [plain_of(batch) for batch in second.batches(0, 4)] == [b for b, _ in read_all(make(), 0)]
        else:
            with pytest.raises(DataError, match="can only start at the beginning of an epoch"):
                second.batches(0, 4)


def test_indices_of_the_samples_in_a_batch() -> None:
    def make() -> Mixture:
        loaders = {name: loader_of(Numbers(samples=size), batch_size=2, shuffle=True) for name, size in (("a", 4), ("b", 10))}
        return Mixture(loaders, "cycle", stop="longest")

    source = resumable(make(), 1)
    for number, batch in enumerate(resumable(make(), 1).batches(3, 0)):
        assert source.indices(3, number) == [int(value) for value in batch]
    assert resumable(Mixture(make().loaders, "zip"), 1).indices(0, 0) is None


# -- multiple ranks -------------------------------------------------------------------------------------


def read_by(make: Callable[[], Mixture], chain: list[tuple[int, int]], epoch: int) -> tuple[list[Any], bool]:
    """Return what the ranks read of an epoch, with the name of the loader, and whether the last world size read any of it."""
    rounds, all_began = rounds_by(make, chain, epoch)
    assert all(len({name for _, name, _ in round_}) == 1 for round_ in rounds), "all ranks read the same loader"
    return [(plain_of(batch), name) for round_ in rounds for batch, name, alike in round_ if not alike], all_began


@pytest.mark.parametrize(
    "chain", [[(1, 0)], [(2, 0)], [(3, 0)], [(2, 2), (3, 0)], [(2, 2), (3, 2), (1, 0)], [(3, 2), (2, 2), (3, 0)]], ids=str
)
@pytest.mark.parametrize("mode", ["sequential", "zip", "cycle"])
def test_every_sample_is_read_once_on_any_number_of_ranks(chain: list[tuple[int, int]], mode: Any) -> None:
    def make() -> Mixture:
        a = TensorBatches(torch.arange(26), batch_size=2, shuffle=True)
        return Mixture({"a": a, "b": loader_of(Numbers(samples=26), batch_size=2, shuffle=True)}, mode)

    done, _ = read_by(make, chain, 1)
    for name in "ab":
        batches = [batch[name] if mode == "zip" else batch for batch, own in done if mode == "zip" or own == name]
        assert sorted(x for batch in batches for x in torch.tensor(batch).flatten().tolist()) == list(range(26)), name


@pytest.mark.parametrize("seed", seeds(usual=10, long=60))
def test_random_mixtures_read_nothing_twice_in_a_pass_on_changing_ranks(seed: int) -> None:
    draw = random.Random(1000 + seed)
    mode: Any = draw.choice(["cycle", "weighted"])
    sizes = {name: draw.randint(3, 20) for name in "ab"}

    def make() -> Mixture:
        loaders = {name: TensorBatches(torch.arange(size), batch_size=2, shuffle=True) for name, size in sizes.items()}
        return Mixture(loaders, mode, weights={"a": 1, "b": 2} if mode == "weighted" else None, stop="longest")

    chain = [(draw.randint(1, 3), draw.randint(1, 3)) for _ in range(draw.randint(0, 3))] + [(draw.randint(1, 3), 0)]
    done, all_began = read_by(make, chain, 4)
    if not all_began:
        return  # the epoch ended before the last change
    ended = 0
    for name, size in sizes.items():
        seen = [x for batch, own in done if own == name for x in batch[0]]
        passes = [seen[start : start + size] for start in range(0, len(seen), size)]
        assert all(sorted(one) == list(range(size)) for one in passes if len(one) == size), "each pass has each sample once"
        assert all(len(set(one)) == len(one) for one in passes)
        ended += len(seen) >= size
    assert ended == len(sizes), "each loader was read to its end"


def test_a_loader_that_is_sharded_already_keeps_its_own_shard() -> None:
    def make(rank: int) -> Mixture:
        data = Numbers(samples=8)
        own = loader_of(data, batch_size=2, sampler=DistributedSampler(data, 2, rank, shuffle=False))
        return Mixture({"own": own, "dealt": [torch.tensor([i]) for i in range(8)]}, "sequential")

    sources = [resumable(make(rank), 1, shard=Shard(rank, 2)) for rank in range(2)]
    assert not sources[0].shard.share_data, "the rest of an epoch cannot be split anew"
    read = [[plain_of(batch) for batch in source.batches(0, 0)] for source in sources]
    assert read == [[[0, 2], [4, 6], [0], [2], [4], [6]], [[1, 3], [5, 7], [1], [3], [5], [7]]]


# -- wrong arguments -----------------------------------------------------------------------------------


def ones() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mixture({"a": [1]}, "cycel"), "mode must be one of 'zip', 'cycle', .* Did you mean 'cycle'"),  # type: ignore[arg-type]
        (lambda: Mixture({"a": [1]}, "zip", stop="first"), "stop must be one of"),  # type: ignore[arg-type]
        (lambda: Mixture({}, "zip"), "at least one loader"),
        (lambda: Mixture([[1]], "zip"), "mapping of names"),  # type: ignore[arg-type]
        (lambda: Mixture({"a/b": [1]}, "zip"), "without '/'"),
        (lambda: Mixture({"a": [1]}, "sequential", stop="longest"), "reads each loader once"),
        (lambda: Mixture({"a": [1]}, "weighted"), "Pass weights="),
        (lambda: Mixture({"a": [1]}, "cycle", weights={"a": 1}), "Leave out weights"),
        (lambda: Mixture({"a": [1], "b": [2]}, "weighted", weights={"a": 1}), "names of the loaders"),
        (lambda: Mixture({"a": [1]}, "weighted", weights={"a": 0}), "a number above 0"),
        (lambda: Mixture({"a": ones()}, "zip", stop="longest"), "can be read once"),
        (lambda: Mixture({"a": torch.zeros(3)}, "zip"), "loader 'a' must be an iterable of batches"),
        (lambda: Mixture({"a": (same := [1]), "b": same}, "zip"), "are one object"),
    ],
)
def test_wrong_arguments_are_errors_at_once(build: Callable[[], object], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        build()


def test_a_loader_without_batches_is_an_error_that_names_it() -> None:
    with pytest.raises(DataError, match="'b' of a Mixture gave no batch"):
        list(resumable(Mixture({"a": [1], "b": []}, "cycle"), 1).batches(0, 0))
    used = Mixture({"a": [1, 2], "b": ones()}, "sequential")
    source = resumable(used, 1)
    assert list(source.batches(0, 0)) == [1, 2, 1]
    with pytest.raises(DataError, match="An iterator is used up after one pass"):
        list(source.batches(1, 0))
    with pytest.raises(DataError, match="the loader 'b' is empty"):
        tiny_run(loader=Mixture({"a": tiny_loader(), "b": []}, "sequential"))
    with pytest.raises(DataError, match="the loader 'b' of 'eval' gave no batch"):
        tiny_trainer().evaluate(Mixture({"a": tiny_loader(), "b": iter(())}, "sequential"))


# -- in runs and evaluations -------------------------------------------------------------------------


def pairs(count: int, batch_size: int = 2, *, start: float = 0.0, shuffle: bool = True) -> TensorBatches[tuple[Tensor, ...]]:
    inputs = torch.arange(count).unsqueeze(1) / 10 + start
    return TensorBatches(inputs, 2 * inputs + 1, batch_size=batch_size, shuffle=shuffle)


def zip_loss(model: nn.Module, batch: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    losses = [nn.functional.mse_loss(model(inputs), targets) for inputs, targets in batch.values()]
    return torch.stack(losses).mean()


@pytest.mark.parametrize(
    ("mode", "stop"), [("zip", "longest"), ("cycle", "longest"), ("sequential", "shortest"), ("weighted", "longest")]
)
def test_a_run_resumes_inside_an_epoch_bit_for_bit(mode: Any, stop: Any) -> None:
    def make(directory: Path) -> Any:
        weights = {"a": 2, "b": 1} if mode == "weighted" else None
        mixture = Mixture({"a": pairs(9), "b": tiny_loader(3)}, mode, weights=weights, stop=stop)

        log = on(Callback.on_step_end)(lambda run: run.log("source", "ab".find(current_source() or "c")))
        compute: dict[str, Any] = {"compute_loss": zip_loss} if mode == "zip" else {}
        return tiny_trainer(directory=directory, seed=1, epochs=2, loader=mixture, accumulate=2, callbacks=[log], **compute)

    prove_resume(make, at=[1, 4], in_process=True)


def test_hooks_and_compute_loss_know_the_loader_also_after_an_evaluation() -> None:
    seen: list[tuple[str, str | None]] = []

    def compute(model: nn.Module, batch: Any) -> Tensor:
        seen.append(("compute", current_source()))
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    note = on(Callback.on_step_end)(lambda run: seen.append(("hook", current_source())))
    after = on(Callback.on_eval_end)(lambda run, evaluation: seen.append(("after", current_source())))
    train, valid = (Mixture({name: tiny_loader(1) for name in names}, "cycle") for names in ("ab", "xy"))
    tiny_run(loader=train, compute_loss=compute, callbacks=[Evaluate(valid, every=1), note, after])
    evaluated = [("compute", "x"), ("compute", "y")]
    assert seen == [
        *(("compute", "a"), ("hook", "a"), *evaluated, ("after", "a")),
        *(("compute", "b"), ("hook", "b"), *evaluated, ("after", "b")),
    ]
    seen.clear()
    tiny_run(loader=tiny_loader(1), compute_loss=compute, callbacks=[note])
    assert seen == [("compute", None), ("hook", None)], "nothing is left of the earlier run"


def test_another_mixture_inside_an_epoch_is_refused(tmp_path: Path) -> None:
    def make(steps: int, **weights: float) -> Any:
        mixture = Mixture({name: pairs(8) for name in weights}, "weighted", weights=weights, stop="longest")
        return tiny_trainer(directory=tmp_path, seed=1, steps=steps, loader=mixture, callbacks=[Checkpoint("3 steps")])

    make(3, a=1, b=1).fit()
    with pytest.raises(CheckpointMismatchError, match=r"weights: saved \[1.0, 1.0\], now \[1.0, 2.0\]"):
        make(5, a=1, b=2).fit(resume="auto")


# -- evaluation ----------------------------------------------------------------------------------------


def judged(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    predictions = model(batch[0])
    return {"loss": nn.functional.mse_loss(predictions, batch[1]), "predictions": predictions, "targets": batch[1]}


class Largest:
    """A metric that does not reduce over ranks itself: it must see all predictions, in their order."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen: list[float] = []

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        self.seen += targets.flatten().tolist()

    def compute(self) -> float:
        return sum(value * (index + 1) for index, value in enumerate(self.seen))


def halves(**arguments: Any) -> Trainer:
    """Return a trainer of a model of which all weights are 0.5."""
    one = trainer(loader(24), model=nn.Linear(1, 1), max_steps=1, **arguments)
    with torch.no_grad():
        for weight in one.model.parameters():
            weight.fill_(0.5)
    return one


def evaluated(mode: Any, **options: Any) -> dict[str, float]:
    inner = Mixture({"c": pairs(7, start=9), "d": list(pairs(6, start=4, shuffle=False))}, "cycle")
    mixture = Mixture({"a": pairs(10), "b": pairs(13, batch_size=3, start=1), "n": inner}, mode)
    metrics = {"error": torchmetrics.MeanSquaredError(), "order": Largest()}
    return halves(compute_loss=judged).evaluate(mixture, metrics=metrics, **options)


def test_an_evaluation_has_results_for_each_loader_and_for_all() -> None:
    results = evaluated("sequential")
    names = ["a", "b", "n/c", "n/d"]
    assert list(results) == [
        *(f"eval/{name}/{result}" for name in names for result in ("loss", "error", "order")),
        *("eval/loss", "eval/error", "eval/order"),
    ]
    counts = dict(zip(names, (10, 13, 7, 6), strict=True))
    for result in ("loss", "error"):
        whole = sum(results[f"eval/{name}/{result}"] * count for name, count in counts.items()) / sum(counts.values())
        assert results[f"eval/{result}"] == pytest.approx(whole)
    assert evaluated("cycle") == results, "each loader is read once, to its end, in every mode but zip"
    limited = evaluated("cycle", limit=1)
    assert limited["eval/b/loss"] != results["eval/b/loss"]


def judge(stop: Any) -> dict[str, float]:
    mixture = Mixture({"a": pairs(10), "b": list(pairs(14, start=1, shuffle=False))}, "zip", stop=stop)
    return halves(compute_loss=zip_loss).evaluate(mixture)


def predicted() -> Tensor:
    loaders = {"a": [torch.arange(i, i + 1.0).unsqueeze(1) for i in range(3)], "b": list(torch.arange(10.0, 14).view(4, 1, 1))}
    one = trainer(loader(24), model=nn.Identity(), optimizer=lambda _: torch.optim.SGD([torch.zeros(1)], 0.1))
    mixture = Mixture(loaders, "sequential")
    predictions: Tensor = one.predict(mixture, compute=lambda model, batch: model(batch), everywhere=True)
    return predictions.flatten()


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_ranks_have_the_results_and_predictions_of_one(ranks: int) -> None:
    def results() -> list[dict[str, float]]:
        return [evaluated("cycle"), judge("shortest"), judge("longest")]

    alone = results()
    assert [list(one) for one in alone[1:]] == [["eval/loss"]] * 2, "in the mode zip, of all loaders"
    assert predicted().tolist() == [0, 1, 2, 10, 11, 12, 13]
    for found, predictions in launch(lambda: (results(), predicted()), ranks):
        assert [list(one) for one in found] == [list(one) for one in alone]
        assert found == [pytest.approx(one) for one in alone]
        assert predictions.tolist() == predicted().tolist()


def test_sanity_batches_try_each_loader() -> None:
    tried: list[str | None] = []
    note = on(Callback.on_sanity_end)(lambda run, evaluation: tried.extend(evaluation.results))
    mixture = Mixture({"a": tiny_loader(3), "b": tiny_loader(4)}, "sequential")
    tiny_run(callbacks=[Evaluate(mixture, sanity_batches=1), note], steps=1)
    assert tried == ["eval/a/loss", "eval/b/loss", "eval/loss"]


def part(directory: Path, mode: Any, steps: int | None) -> tuple[list[tuple[str, int]], int, bool]:
    """Continue the run until a step; return what this rank saw as (loader, sample), and the number of samples of the run."""
    seen: list[tuple[str, int]] = []
    lengths: set[int | None] = set()
    measure = on(Callback.on_batch_end)(lambda run, *_: lengths.add(run.progress.batches_per_epoch))

    @on(Callback.on_batch_start)
    def see(run: Run, batch: Any) -> None:
        alike = session_of(run).cursor.source.replicated_at == run.progress.batch_in_epoch and run.driver.rank > 0
        for name, one in batch.items() if mode == "zip" else [(current_source() or "", batch)]:
            seen.extend((name, number) for number in (() if alike else one[2].tolist()))

    def zipped(model: nn.Module, batch: Any) -> Any:
        return sum(squared_error(model, one) for one in batch.values())

    options: dict[str, Any] = {"max_steps": steps, "max_epochs": 1, "compute_loss": zipped if mode == "zip" else squared_error}
    mixed = Mixture({"a": loader(26, 2), "b": loader(38, 2)}, mode, stop="shortest" if mode == "sequential" else "longest")
    one = trainer(mixed, directory=directory, callbacks=[see, measure, Checkpoint("100 steps")], **options)
    run = one.fit(resume="auto")
    assert steps is not None or lengths == {run.progress.batch}, "the length of the epoch was known"
    return seen, run.progress.samples, run.progress.epoch == 1


MIXED = ("sequential", "zip", "cycle")


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what two ranks, and then three, see of an epoch in each mode."""
    folder = tmp_path_factory.mktemp("runs")
    first, second = (
        launch(lambda steps=steps: [part(folder / mode, mode, steps) for mode in MIXED], ranks)  # type: ignore[misc]
        for ranks, steps in ((2, 4), (3, None))
    )
    return {mode: ([one[index] for one in first], [one[index] for one in second]) for index, mode in enumerate(MIXED)}


@pytest.mark.parametrize("mode", MIXED)
def test_a_run_goes_from_two_ranks_to_three_inside_an_epoch(continued: dict[str, Any], mode: str) -> None:
    first, second = continued[mode]
    seen = Counter(one for own, _, _ in (*first, *second) for one in own)
    assert all(over for _, _, over in second)
    assert seen.total() == second[0][1], "progress.samples counts each once"
    assert {number for name, number in seen if name == "b"} == set(range(38))
    if mode == "sequential":
        assert set(seen.values()) == {1}
        assert {number for name, number in seen if name == "a"} == set(range(26))
    else:
        assert {count for (name, _), count in seen.items() if name == "a"} <= {1, 2, 3}
        assert {count for (name, _), count in seen.items() if name == "b"} <= {1, 2}
