"""What LogTraining logs for an interval: the weighted mean over its batches and all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, attach, on
from cadenza.callbacks import Checkpoint, Derive, LogTraining
from cadenza.testing import launch, tiny_loader, tiny_run, tiny_trainer
from tests.distributed.parts import driver

NAN = math.nan
LOSSES = [3.0, 1.5, 7.0, 2.25, 0.5, 4.0, 9.0]
WEIGHTS = [1, 3, 0, 2, 5, 4, 1]


def mean(losses: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Return the mean that a plain loop computes."""
    weights = [1.0] * len(losses) if weights is None else weights
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight) / sum(weights)


def scripted(
    losses: Sequence[float], weights: Sequence[float] | None = None, **more: Sequence[float]
) -> Callable[[nn.Module, Any], dict[str, Any]]:
    """Return a function that computes these losses; a batch holds its index as its first input."""

    def compute(model: nn.Module, batch: Any) -> dict[str, Any]:
        index = int(batch[0].item())
        outputs = {"loss": model(torch.zeros(1, 1)).sum() * 0.0 + losses[index], "index": index}
        outputs |= {} if weights is None else {"weight": weights[index]}
        return outputs | {name: torch.tensor(values[index]) for name, values in more.items()}

    return compute


def numbered(batches: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor([[float(index)]]), torch.zeros(1, 1)) for index in range(batches)]


def trained(
    log: LogTraining,
    losses: Sequence[float] = LOSSES,
    weights: Sequence[float] | None = None,
    *callbacks: Callback,
    **rest: Any,
) -> Run:
    more = rest.pop("more", {})
    arguments = {"loader": numbered(len(losses)), "compute_loss": scripted(losses, weights, **more), **rest}
    return tiny_run(callbacks=[log, *callbacks], **arguments)


def test_an_interval_has_the_mean_of_its_steps_and_the_next_one_begins_anew() -> None:
    run = trained(LogTraining("3 steps"), epochs=2)
    twice = LOSSES * 2
    assert run.history["train/loss"] == [(last, mean(twice[last - 3 : last])) for last in (3, 6, 9, 12)]
    assert trained(LogTraining("1 epoch")).history["train/loss"] == [(7, mean(LOSSES))]
    assert trained(LogTraining("1 step")).history["train/loss"] == [*enumerate(LOSSES, 1)]


def test_batches_of_a_step_count_by_their_weights_and_a_weight_of_0_does_not_count_even_with_nan() -> None:
    losses = [loss if weight else NAN for loss, weight in zip(LOSSES, WEIGHTS, strict=True)]
    for accumulate in (1, 2, 3):
        run = trained(LogTraining("1 epoch"), losses, WEIGHTS, accumulate=accumulate)
        [(_, value)] = run.history["train/loss"]
        assert value == pytest.approx(mean(LOSSES, WEIGHTS), rel=1e-15)
    tensors = [torch.tensor(float(weight)) for weight in WEIGHTS]
    run = trained(LogTraining("1 epoch"), losses, tensors, accumulate=2)  # type: ignore[arg-type]
    assert run.history["train/loss"] == [(4, value)]


@pytest.mark.filterwarnings("ignore:.*")
def test_an_interval_of_which_the_last_step_has_weight_0_has_a_mean_and_one_without_any_weight_has_none() -> None:
    run = trained(LogTraining("2 steps", throughput=False, lr=False), [1.0, 5.0, 7.0, 9.0], [1, 0, 0, 0])
    assert run.history["train/loss"] == [(2, 1.0)]
    run = trained(LogTraining("2 steps", throughput=False, outputs=("index",)), [1.0, 5.0, 7.0, 9.0], [1, 0, 0, 0])
    assert run.history["train/index"] == [(2, 0.0)]
    assert run.history["train/lr"] == [(2, 0.1), (4, 0.1)], "only the mean is left out"


def test_skipped_batches_do_not_count_and_steps_of_skipped_batches_have_no_value() -> None:
    @on(Callback.on_batch_start)
    def skip(run: Run, batch: Any) -> None:
        if batch[0].item() in (1, 4, 5):
            run.skip_batch("a test")

    run = trained(LogTraining("3 steps", outputs=("loss", "index")), LOSSES, None, skip)
    assert run.history["train/loss"] == [(3, mean([3.0, 7.0])), (6, 2.25)]
    assert run.history["train/index"] == [(3, 1.0), (6, 3.0)]
    run = trained(LogTraining("1 step", outputs=("loss", "index")), LOSSES, None, skip)
    assert [step for step, _ in run.history["train/loss"]] == [1, 3, 4, 7] == [step for step, _ in run.history["train/index"]]


def test_other_outputs_are_means_over_the_same_batches_with_the_same_weights() -> None:
    correct = [0.5, 0.25, NAN, 1.0, 0.75, 0.0, 0.5]
    run = trained(LogTraining("1 epoch", outputs=("correct", "loss")), LOSSES, WEIGHTS, more={"correct": correct}, accumulate=2)
    assert run.history["train/correct"] == [(4, mean(correct, WEIGHTS))]
    double = Derive(double=lambda run: run.outputs["loss"] * 2)
    run = trained(LogTraining("7 steps", outputs=("double",)), LOSSES, None, double)
    assert run.history["train/double"] == [(7, 2 * mean(LOSSES))]


def test_an_output_that_is_no_number_is_an_error_that_names_it() -> None:
    with pytest.raises(TypeError, match=r"outputs\['targets'\]"):
        tiny_run(callbacks=[LogTraining(outputs=("targets",))], compute_loss=lambda model, batch: {
            "loss": model(batch[0]).sum(), "targets": batch[1]
        })  # fmt: skip


def test_a_number_that_a_hook_logs_with_the_same_name_replaces_the_mean() -> None:
    for options in ({}, {"reduce": "mean"}):

        def log(run: Run, options: Any = options) -> None:
            run.log("train/loss", -1.0, **options)

        for order in (slice(None), slice(None, None, -1)):
            callbacks = [LogTraining("1 step"), on(Callback.on_step_end)(log)]
            assert tiny_run(callbacks=callbacks[order], steps=2).history["train/loss"] == [(1, -1.0), (2, -1.0)]


def test_a_long_interval_has_the_mean_of_all_steps_whenever_their_losses_reach_the_host() -> None:
    losses = [float(index * index % 1013) for index in range(350)]
    for every in ("350 steps", "175 steps", "70 steps"):
        count = int(every.split()[0])
        run = trained(LogTraining(every, throughput=False, outputs=("loss", "index")), losses)
        assert run.history["train/loss"] == [(last, mean(losses[last - count : last])) for last in range(count, 351, count)]
        assert run.history["train/index"][0] == (count, (count - 1) / 2)


@pytest.mark.parametrize("weights", [None, [1.0, 3.0, 0.0, 2.0]])
def test_numbers_that_stay_on_a_device_give_the_same_means(weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    losses, count = [float(index % 17) for index in range(480)], 480
    factors = None if weights is None else weights * (count // 4)
    more = {"correct": [float(index % 5) for index in range(count)]}

    def fit(every: str) -> Any:
        log = LogTraining(every, outputs=("loss", "correct"), throughput=False, lr=False)
        history = trained(log, losses, factors, accumulate=2, more=more).history
        return history["train/loss"], history["train/correct"]

    everys = ("240 steps", "70 steps", "3 steps")
    alike = [fit(every) for every in everys]
    monkeypatch.setattr("cadenza.engine.training_log.host_number", lambda value: value)  # as for one that is not on the host
    assert [fit(every) for every in everys] == alike
    assert alike[0] == ([(240, mean(losses, factors))], [(240, mean(more["correct"], factors))])


# -- ranks --------------------------------------------------------------------------------------------


def of_ranks(weights: bool = False, accumulate: int = 1, **arguments: Any) -> Run:
    """Train on the losses on two ranks: the batches are dealt in turn."""
    log = LogTraining("1 epoch", outputs=("loss", "index"), throughput=False)
    return trained(log, LOSSES[:6], WEIGHTS[:6] if weights else None, driver=driver(), accumulate=accumulate, **arguments)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_mean_is_that_of_all_ranks(weights: bool, accumulate: int) -> None:
    def work() -> Any:
        run = of_ranks(weights, accumulate)
        return run.history["train/loss"], run.history["train/index"]

    alone = mean(LOSSES[:6], WEIGHTS[:6] if weights else None)
    index = mean(range(6), WEIGHTS[:6] if weights else None)
    for losses, indices in launch(work):
        [(_, loss)], [(_, value)] = losses, indices
        assert (loss, value) == (pytest.approx(alone, rel=1e-15), pytest.approx(index, rel=1e-15))


def test_a_rank_without_a_batch_that_counts_leaves_the_mean_to_the_others() -> None:
    def work() -> Any:
        log = LogTraining("1 epoch", throughput=False)
        return trained(log, [1.0, 5.0, 3.0, 7.0], [1, 0, 3, 0], driver=driver()).history["train/loss"]

    assert launch(work) == [[(2, 2.5)]] * 2


def test_a_number_that_one_rank_logs_replaces_the_mean_of_all() -> None:
    def work() -> Any:
        @on(Callback.on_step_end)
        def log(run: Run) -> None:
            if run.is_main:
                run.log("train/loss", -1.0)

        means = LogTraining("1 step", lr=False, throughput=False)
        return trained(means, LOSSES[:4], None, log, driver=driver()).history["train/loss"]

    assert launch(work) == [[(1, -1.0), (2, -1.0)]] * 2


# -- a resume -----------------------------------------------------------------------------------------


def cut(tmp_path: Path, at: int, ranks: tuple[int, int] = (1, 1), **arguments: Any) -> Any:
    """Train to the end of an epoch, with a cut inside of it; return the history of all results."""

    def fit(steps: int | None) -> Any:
        log = LogTraining("1 epoch", outputs=("loss", "index"), throughput=False)
        several: dict[str, Any] = {"driver": driver()} if max(ranks) > 1 else {}
        trainer = tiny_trainer(
            callbacks=[log, Checkpoint("1 step")],
            loader=numbered(6),
            compute_loss=scripted(LOSSES[:6], WEIGHTS[:6]),
            directory=tmp_path,
            epochs=1,
            steps=steps,
            **several,
            **arguments,
        )
        history = trainer.fit(resume="auto").history
        return {name: history[name] for name in history.names}

    if max(ranks) == 1:
        fit(at)
        return fit(None)
    for number, steps in zip(ranks, (at, None), strict=True):
        first, *_ = launch(lambda steps=steps: fit(steps), number)  # type: ignore[misc]
    return first


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_run_that_resumes_inside_an_interval_has_the_same_bits(at: int, tmp_path: Path) -> None:
    whole = cut(tmp_path / "whole", 6)
    assert cut(tmp_path / "cut", at) == whole
    assert whole["train/loss"] == [(6, mean(LOSSES[:6], WEIGHTS[:6]))]


@pytest.mark.parametrize("ranks", [(2, 2), (2, 1), (1, 2)])
def test_a_resume_on_another_number_of_ranks_keeps_the_sums_of_all(ranks: tuple[int, int], tmp_path: Path) -> None:
    history = cut(tmp_path, {(2, 2): 1, (2, 1): 1, (1, 2): 2}[ranks], ranks)
    [(_, loss)], [(_, index)] = history["train/loss"], history["train/index"]
    assert loss == pytest.approx(mean(LOSSES[:6], WEIGHTS[:6]), rel=1e-15)
    assert index == pytest.approx(mean(range(6), WEIGHTS[:6]), rel=1e-15)


# -- loops of one's own -------------------------------------------------------------------------------


@pytest.mark.parametrize("says", [True, False], ids=["with loop.batch", "without"])
def test_a_loop_of_ones_own_has_means_with_and_without_batches(says: bool) -> None:
    model = nn.Linear(1, 1)
    log = LogTraining("2 steps", outputs=("loss", "size"), throughput=False, lr=False)
    with attach(
        model, torch.optim.SGD(model.parameters(), 0.0), max_steps=4, callbacks=[log], progress=False, device="cpu"
    ) as loop:
        for index, batch in enumerate(tiny_loader(4)):
            with loop.step():
                outputs = {"loss": model(batch[0]).sum() * 0.0 + LOSSES[index], "size": index}
                if says:
                    with loop.batch(batch):
                        loop.backward(outputs)
                else:
                    loop.backward(outputs)
                loop.update()
    assert loop.run.history["train/loss"] == [(2, mean(LOSSES[:2])), (4, mean(LOSSES[2:4]))]
    assert loop.run.history["train/size"] == [(2, 0.5), (4, 2.5)]


def test_a_loop_over_steps_has_the_mean_of_the_batches_that_had_a_backward_pass() -> None:
    trainer = tiny_trainer(callbacks=[LogTraining("1 epoch", throughput=False)], loader=numbered(6), accumulate=2)
    for step in trainer.steps():
        for batch in step:
            index = int(batch[0].item())
            if index != 3:
                step.backward({"loss": trainer.model(batch[0]).sum() * 0.0 + LOSSES[index], "weight": WEIGHTS[index]})
    kept = [0, 1, 2, 4, 5]
    expected = mean([LOSSES[index] for index in kept], [WEIGHTS[index] for index in kept])
    assert trainer.run.history["train/loss"] == [(3, expected)]
