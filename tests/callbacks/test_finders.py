"""FindLearningRate and FindBatchSize; that they leave no trace is shown in test_trial.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, FindBatchSize, FindLearningRate, LearningRate, Limit, StopOnNonFinite
from cadenza.callbacks.find_batch_size import is_out_of_memory
from cadenza.callbacks.find_learning_rate import suggested
from cadenza.errors import DataError
from cadenza.testing import prove_resume, tiny_model, tiny_run, tiny_trainer
from tests.callbacks.parts import two_optimizers

# -- FindLearningRate ---------------------------------------------------------------------------------


def parabola(**arguments: Any) -> Run:
    """A loss of (weight - 2)^2, for which each rate above 1 makes it worse."""

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model.get_parameter("weight") - 2).square().sum()
        return loss

    return tiny_run(compute_loss=compute_loss, **arguments)


def test_it_suggests_a_rate_with_which_the_loss_falls_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    find = FindLearningRate(start=1e-5, end=100)
    run = parabola(callbacks=[find])
    assert find.suggestion is not None
    assert 1e-3 < find.suggestion < 1
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1, "it is only a suggestion"
    assert "the run keeps its rate" in run.why("learning rate found")
    assert capsys.readouterr().out == f"FindLearningRate: {run.decisions[-1].why}\n"
    assert f"{find.suggestion:.3g}: " in run.decisions[-1].why
    # The rates grow by a factor, and the test ends when the loss does not come back.
    growth = [after / before for before, after in zip(find.rates, find.rates[1:], strict=False)]
    assert find.rates[0] == 1e-5
    assert growth == pytest.approx([(100 / 1e-5) ** (1 / 99)] * len(growth))
    assert 1 < find.rates[-1] < 100
    assert len(find.losses) == len(find.smoothed) == len(find.rates)
    assert find.smoothed[-1] > 4 * min(find.smoothed)


def test_the_plot_shows_the_smoothed_losses_and_a_last_one_that_is_lost_does_not_flatten_them() -> None:
    find = FindLearningRate(steps=40)
    tiny_run(losses=[4.0 - 0.1 * number for number in range(20)] + [1e6] * 30, callbacks=[find], steps=1)
    bottom, top = find.plot().axes[0].get_ylim()
    assert bottom < min(find.smoothed)
    assert max(find.smoothed) < top < 1e6


@pytest.mark.parametrize(
    ("losses", "steps", "tested"),
    [([1.0] * 20 + [math.nan] + [1.0] * 100, 100, 21), ([-1.0] * 40, 20, 20)],
    ids=["no number ends the test", "below zero"],
)
def test_the_test_alone_needs_a_stop(losses: list[float], steps: int, tested: int) -> None:
    find = FindLearningRate(steps=steps)
    stop = on(Callback.on_fit_start)(lambda run: run.stop("only the test"))
    run = tiny_run(losses=losses, callbacks=[find, StopOnNonFinite("raise"), stop])
    assert run.progress.step == 0
    assert len(find.losses) == tested


def test_where_no_rate_helps_there_is_no_suggestion() -> None:
    find = FindLearningRate(steps=20, apply=True)
    run = tiny_run(losses=[float(number) for number in range(1, 60)], callbacks=[find], steps=1)
    assert find.suggestion is None
    assert run.optimizers[0].param_groups[0]["lr"] == 0.1
    assert "and the loss fell with none of them; the run keeps its rate" in run.why("learning rate not found")


def test_the_suggestion_is_where_the_smoothed_loss_falls_most_or_a_tenth_of_its_lowest() -> None:
    rates = [10.0**power for power in range(-6, 2)]
    assert suggested(rates, [5.0, 5.0, 4.9, 1.0, 0.9, 0.5, 9.0, 1.0]) == pytest.approx(1e-4)
    assert suggested(rates, [5.0, 5.0, 4.9, 4.8, 4.7, 0.5, 9.0, 1.0]) == pytest.approx(1e-2)
    assert suggested(rates, [5.0, 5.0, 4.9, 4.8, 4.7, 4.6, math.nan, math.inf])
    assert suggested(rates, [1.0] * 8) is None
    assert suggested([], []) is None


def test_applied_it_is_the_rate_from_which_a_schedule_starts_and_groups_keep_their_proportion() -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": [one], "lr": rate} for one, rate in zip(parameters, (0.1, 0.01), strict=True)])

    find = FindLearningRate(start=1e-4, end=1, apply=True)
    run = parabola(callbacks=[find], optimizer=groups)
    first, second = (group["lr"] for group in run.optimizers[0].param_groups)
    assert (first, second) == (find.suggestion, pytest.approx(first / 10))
    halve = LearningRate(lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step))
    cycle = LearningRate(lambda o, total: OneCycleLR(o, o.param_groups[0]["lr"], total_steps=total, pct_start=0.5), optimizer=1)
    run = parabola(callbacks=[halve, cycle, find], optimizer=two_optimizers, steps=3)
    assert find.suggestion is not None
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(find.suggestion / 8)
    assert run.optimizers[1].param_groups[0]["initial_lr"] == pytest.approx(0.1 / 25)
    assert "the run starts with it" in run.why("learning rate found")


def test_a_scheduler_given_as_it_is_cannot_start_anew() -> None:
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = LearningRate(StepLR(optimizer, 3))
    with pytest.raises(ValueError, match=r"this StepLR has already started\. Give LearningRate a function"):
        tiny_run(model=model, optimizer=optimizer, callbacks=[schedule, FindLearningRate(apply=True)])
    tiny_run(model=model, optimizer=optimizer, callbacks=[schedule, FindLearningRate(steps=10)])


@pytest.mark.parametrize("apply", [False, True])
def test_a_run_that_continues_is_not_tested_again(apply: bool) -> None:
    finders: list[FindLearningRate] = []

    def make(directory: Path) -> Trainer:
        finders.append(FindLearningRate(start=1e-3, steps=12, apply=apply))
        schedule = LearningRate(lambda optimizer: StepLR(optimizer, 2, 0.5))
        return tiny_trainer(callbacks=[finders[-1], schedule], directory=directory, epochs=2, seed=1)

    prove_resume(make, at=[1, 4], in_process=True)
    assert len({tuple(finder.losses) for finder in finders}) == 1


def test_the_curve_is_drawn_and_logged_if_a_callback_listens_to_records() -> None:
    pictures: list[Any] = []
    take = on(Callback.on_log)(lambda run, record: pictures.extend(record.media.values()))
    find = FindLearningRate(start=1e-4, end=1)
    parabola(callbacks=[find, take])
    axes = pictures[0].figure.axes[0]
    assert [line.get_label() for line in axes.lines] == ["loss", "smoothed", f"suggestion {find.suggestion:.2g}"]
    assert axes.get_xscale() == "log"
    assert list(axes.lines[1].get_ydata()) == find.smoothed
    assert "learning_rate/range_test" not in parabola(callbacks=[FindLearningRate(steps=10)]).history


# -- FindBatchSize ------------------------------------------------------------------------------------


def samples(size: int, *, count: int = 64, **arguments: Any) -> DataLoader[Any]:
    inputs = torch.linspace(-1, 1, count).unsqueeze(1)
    return DataLoader(TensorDataset(inputs, 2 * inputs + 1), batch_size=size, **arguments)


class Greedy(nn.Module):
    """Asks, in truth, for more memory than any machine has when a batch is larger than so many samples."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.linear, self.most, self.asked = nn.Linear(1, 1), most, list[int]()

    def forward(self, inputs: Tensor) -> Tensor:
        self.asked.append(len(inputs))
        room = torch.empty(2**48 if len(inputs) > self.most else 1, dtype=torch.uint8)
        outputs: Tensor = self.linear(inputs) + 0.0 * room.ndim
        return outputs


@pytest.mark.parametrize(
    ("most", "start", "max_size", "size", "why"),
    [
        (20, 1, 64, 16, "32 is too large: out of memory (RuntimeError)"),
        (16, 4, 64, 16, "32 is too large: out of memory (RuntimeError)"),
        (100, 4, 32, 32, "max_size fits"),
        (100, 3, 20, 20, "max_size fits"),  # 3, 6, 12, and max_size itself
        (20, 8, 8, 8, "max_size fits"),
    ],
)
def test_the_largest_size_that_fits_is_used(most: int, start: int, max_size: int, size: int, why: str) -> None:
    trained: list[int] = []
    look = on(Callback.on_batch_start)(lambda run, batch: trained.append(len(batch[0])))
    find = FindBatchSize(samples, start=start, max_size=max_size)
    model = Greedy(most)
    run = tiny_run(model=model, callbacks=[look, find], loader=samples(1))
    assert find.size == size
    assert run.why("batch size found").endswith(f"{size}: {why}")
    assert set(trained[:-1]) == {size}
    assert run.progress.samples == 64
    assert model.asked == trained, "what the model counted in the trials is undone as well"


@pytest.mark.parametrize("drop_last", [False, True])
def test_more_than_the_data_set_holds_is_not_tried_for_ever(drop_last: bool) -> None:
    find = FindBatchSize(lambda size: samples(size, count=24, drop_last=drop_last), max_size=10_000)
    run = tiny_run(callbacks=[find])
    assert find.size == 16
    reason = "the loader has no such batch" if drop_last else "the largest batch has 24 samples"
    assert run.why("batch size found").endswith(f"16: 32 is too large: {reason}")


def test_not_even_the_first_size_is_an_error_that_says_so_and_another_error_stays_itself() -> None:
    with pytest.raises(RuntimeError, match=r"can't allocate memory|out of memory") as caught:
        tiny_run(model=Greedy(3), callbacks=[FindBatchSize(samples, start=4, max_size=8)])
    assert any("which does not fit. Lower it" in note for note in caught.value.__notes__)
    with pytest.raises(DataError, match=r"make_loader\(8\) returned an empty loader\. Lower start="):
        tiny_run(callbacks=[FindBatchSize(lambda size: samples(size, count=4, drop_last=True), start=8, max_size=8)])

    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        tiny_run(compute_loss=broken, callbacks=[FindBatchSize(samples, max_size=8)])


def test_what_says_that_memory_ran_out() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(RuntimeError("MPS backend out of memory"))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError("out of memory"))


def test_others_see_the_loader_that_was_found() -> None:
    totals: list[int] = []

    def fall(optimizer: torch.optim.Optimizer, total: int) -> LinearLR:
        totals.append(total)
        return LinearLR(optimizer, 1.0, 0.5, total_iters=total)

    callbacks = [LearningRate(fall), Limit(train=3), FindBatchSize(samples, start=16, max_size=16)]
    run = tiny_run(callbacks=callbacks, epochs=2, loader=samples(1))
    assert totals == [6]
    assert run.progress.step == 6


def test_a_run_that_continues_takes_the_size_of_its_first_start(tmp_path: Path) -> None:
    """Also when there is less memory now; and it tries nothing."""
    tried: list[int] = []

    def make_loader(size: int) -> Iterable[Any]:
        tried.append(size)
        return samples(size, shuffle=True)

    def trainer(most: int, epochs: int) -> Trainer:
        callbacks = [FindBatchSize(make_loader, start=2, max_size=64), Checkpoint(every="1 epoch")]
        return tiny_trainer(model=Greedy(most), callbacks=callbacks, epochs=epochs, directory=tmp_path, seed=1)

    first = trainer(20, 1).fit()
    assert tried == [2, 4, 8, 16, 32, 16]
    tried.clear()
    second = trainer(17, 2).fit(resume="auto")
    assert tried == [16]
    assert (first.progress.step, second.progress.step) == (4, 8)
    assert second.why("batch size found").endswith("16: as in the run that is continued")


def test_a_run_that_continues_has_the_same_bits() -> None:
    def make(directory: Path) -> Trainer:
        def make_loader(size: int) -> DataLoader[Any]:
            return samples(size, count=16 + int(torch.randint(8, ())), shuffle=True)  # made once when it continues

        callbacks = [FindBatchSize(make_loader, max_size=4), FindLearningRate(start=1e-3, steps=10)]
        return tiny_trainer(callbacks=callbacks, directory=directory, epochs=2, seed=3)

    prove_resume(make, at=[5], in_process=True)
