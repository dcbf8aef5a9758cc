"""Callbacks that touch weights and gradients do with shards what they do with whole ones, or say that they cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cadenza import Callback, Run, load_weights, on, save_weights
from cadenza.callbacks import (
    BestWeights,
    ClipGradients,
    ConvertSyncBatchNorm,
    EarlyStopping,
    Ema,
    Evaluate,
    FindLearningRate,
    Freeze,
    Histograms,
    StopOnNonFinite,
    Summary,
    Swa,
)
from cadenza.records.record import Histogram
from cadenza.testing import launch
from tests.distributed.parts import blocks, loader, refusal, sharded, single, trainer, vector, weights_of
from tests.distributed.standing import on_ranks

Seen = tuple[Tensor, dict[str, list[tuple[int, float]]], dict[str, Tensor]]


def run_with(callbacks: Sequence[Any], driver: Callable[[], Any] = single, **arguments: Any) -> Seen:
    """Return the weights at the end, the history, and the histograms that were logged, by name."""
    media: dict[str, Tensor] = {}

    @on(Callback.on_log)
    def keep(run: Run, record: Any) -> None:
        media.update({name: one.values for name, one in record.media.items() if isinstance(one, Histogram)})

    one = trainer(loader(48), model=blocks(), driver=driver(), callbacks=[*callbacks, keep], **arguments)
    run = one.fit()
    return weights_of(one), {name: run.history[name] for name in run.history.names}, media


def check_as_one_process(make: Callable[[], Sequence[Any]], **arguments: Any) -> list[Seen]:
    """Check that two ranks with shards end with the weights and results of one process; return what the ranks saw."""
    weights, history, _ = run_with(make(), accumulate=2, **arguments)
    ranks = on_ranks(lambda: run_with(make(), sharded, **arguments))
    for got, logged, _ in ranks:
        assert torch.allclose(got, weights, atol=1e-6)
        for name in history:
            assert dict(logged[name]) == pytest.approx(dict(history[name]), rel=1e-4), name
    return ranks


def averaged() -> list[Any]:
    judge = Evaluate(loader(37, shuffle=False), every="4 steps", weights="ema")
    return [Ema(0.6, use_at_end=True), Swa(0.5, "2 steps", use_at_end=False), judge]


@on(Callback.on_step_start)
def spoil_rate(run: Run) -> None:
    if run.progress.step == 7:
        for group in run.optimizers[0].param_groups:
            group["lr"] = 1.0


def best() -> list[Any]:
    stop = EarlyStopping("eval/loss", mode="min", patience=9, restore_best=True)
    return [Evaluate(loader(37, shuffle=False), every="3 steps"), BestWeights("eval/loss", "min"), stop, spoil_rate]


def clipped(**bound: Any) -> list[Any]:
    return [ClipGradients(**bound, log="norm", log_every="1 step")]


SOME = {"parameters": ["2.*", "4.*"]}
CALLBACKS: dict[str, Callable[[], list[Any]]] = {
    "values clipped": lambda: clipped(max_value=0.02, **SOME),
    "largest value clipped": lambda: clipped(max_norm=0.3, norm_type=float("inf"), **SOME),
    "norm of some clipped": lambda: clipped(max_norm=0.3, **SOME),
    "norm of all clipped": lambda: clipped(max_norm=0.5),
    "averages that judge and stay at the end": averaged,
    "the best weights come back at the end": best,
    "frozen layers": lambda: [Freeze(["0", "2"], until="4 steps")],
    "a learning rate is found": lambda: [FindLearningRate(start=1e-4, end=1.0, steps=12, apply=True)],
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_do_what_they_do_in_one_process(name: str) -> None:
    check_as_one_process(CALLBACKS[name])


def test_histograms_show_whole_weights_and_gradients_on_the_main_process_alone() -> None:
    (_, _, main), (_, _, other) = check_as_one_process(lambda: [Histograms("2 steps", gradients=True)])
    _, _, expected = run_with([Histograms("2 steps", gradients=True)], accumulate=2)
    assert not other
    assert main.keys() == expected.keys()
    assert all(torch.allclose(main[name].flatten(), values.flatten(), atol=1e-6) for name, values in expected.items())


def test_a_gradient_that_is_not_finite_in_one_shard_is_dropped_on_all_ranks_and_named_with_its_index() -> None:
    @on(Callback.on_before_optimizer_step, at=3)
    def spoil(run: Run) -> None:
        gradient = dict(run.model.named_parameters())["2.inner.weight"].grad
        if isinstance(gradient, DTensor):
            if run.driver.rank == 1:  # which holds rows 4 to 7
                gradient.to_local()[2, 1] = float("nan")
        elif gradient is not None:
            gradient[6, 1] = float("nan")

    why: list[str] = []

    @on(Callback.on_fit_end)
    def note(run: Run) -> None:
        why.append(run.why("step skipped"))

    def told(driver: Callable[[], Any] = sharded, accumulate: int = 1) -> tuple[Tensor, str]:
        callbacks = [spoil, StopOnNonFinite(action="skip", gradients=True), note]
        weights, *_ = run_with(callbacks, driver, accumulate=accumulate)
        return weights, why[-1]

    expected, of_one = told(single, accumulate=2)
    (first, of_main), (_, of_other) = launch(told)
    assert torch.allclose(first, expected, atol=1e-6)
    assert "a gradient of another rank is not finite" in of_main
    assert "the gradient of '2.inner.weight' is nan, first at index (6, 1)" in of_other
    assert "first at index (6, 1)" in of_one


def test_a_summary_shows_the_users_classes(capfd: pytest.CaptureFixture[str]) -> None:
    launch(lambda: run_with([Summary()], sharded, max_epochs=1))
    told = capfd.readouterr().out
    assert "Sequential" in told
    assert "FSDP" not in told


def test_layers_cannot_be_replaced_when_they_are_sharded() -> None:
    def replacing() -> str:
        one = trainer(model=nn.Sequential(blocks(), nn.BatchNorm1d(1)), driver=sharded(), callbacks=[ConvertSyncBatchNorm()])
        return refusal(one.fit)

    assert all("convert_sync_batchnorm(model) before" in told for told in on_ranks(replacing))


def test_batch_norm_trains_and_its_statistics_are_those_of_the_main_process_in_an_evaluation() -> None:
    def judged() -> dict[str, float]:
        model = nn.Sequential(nn.BatchNorm1d(3), blocks())
        one = trainer(loader(48), model=model, driver=sharded())
        one.fit()
        return one.evaluate(loader(37, shuffle=False))

    first, second = on_ranks(judged)
    assert first == second


def test_weights_of_a_sharded_model_are_saved_whole_and_loaded_in_parts(tmp_path: Path) -> None:
    def there_and_back() -> tuple[Tensor, Tensor]:
        one = trainer(loader(48), model=blocks(), driver=sharded(), max_epochs=1)
        one.fit()
        save_weights(one.model, tmp_path / "weights.safetensors")
        one.driver.barrier()
        another = sharded().prepare(blocks(0.1))
        load_weights(tmp_path / "weights.safetensors", another)
        return weights_of(one), vector(another.parameters())

    for saved, loaded in on_ranks(there_and_back, 3):
        assert torch.equal(saved, loaded)


def test_guests_that_write_whole_weights_from_one_process_say_that_they_cannot(tmp_path: Path) -> None:
    from cadenza.compat.fastnlp.saving import write_model
    from cadenza.compat.nemo.core import CheckpointCallback

    def refusals() -> list[str]:
        one = trainer(loader(48), model=blocks(), driver=sharded(), callbacks=[CheckpointCallback(str(tmp_path), step_freq=2)])
        told = []
        for act in (one.fit, lambda: write_model(one.model, tmp_path / "model", only_state_dict=True, save_fn=None)):
            try:
                act()
            except Exception as error:
                told.append(str(error))
        return told

    for told in launch(refusals):
        assert len(told) == 2
        assert "writes whole weights from one process" in told[0]
        assert "writes whole weights from one process" in told[1]


def test_a_hook_between_the_passes_sees_shards() -> None:
    def seen() -> set[bool]:
        kinds: set[bool] = set()

        def look(run: Run, _: Any) -> None:
            kinds.update(isinstance(parameter, DTensor) for parameter in run.model.parameters())

        run_with([on(moment)(look) for moment in (Callback.on_before_backward, Callback.on_batch_start)], sharded, max_epochs=1)
        return kinds

    assert on_ranks(seen) == [{True}, {True}]
