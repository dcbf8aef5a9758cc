"""A private name of another package may go with its next version: each fallback of docs/private.md, with the name removed.

`cadenza.optim.fast_step`, the backward pass and numpy's generator have tests in tests/optim and tests/loading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza.callbacks import LearningRate, LogTraining
from cadenza.callbacks import learning_rate as learning_rate
from cadenza.drivers import DdpDriver, ddp
from cadenza.loading import batches, evaluation, loaders, resumable_loader
from cadenza.optim import model_state, rates
from cadenza.testing import launch, tiny_model, tiny_run

Trained = dict[str, Tensor]


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that hides private names from ``getattr`` and ``hasattr`` of a module of Cadenza."""

    def hide(module: Any, *names: str) -> None:
        def found(value: Any, name: str, *default: Any) -> Any:
            return default[0] if name in names else getattr(value, name, *default)

        monkeypatch.setattr(module, "getattr", found, raising=False)
        monkeypatch.setattr(module, "hasattr", lambda value, name: name not in names and hasattr(value, name), raising=False)

    return hide


def same(one: Trained, other: Trained) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def trained(**arguments: Any) -> Trained:
    """Return the weights after two epochs with two workers that persist."""
    inputs = torch.linspace(-1, 1, 16).unsqueeze(1)
    dataset = TensorDataset(inputs, 2 * inputs + 1)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)
    return {**tiny_run(loader=loader, epochs=2, seed=1, **arguments).model.state_dict()}


def test_a_loader_without_the_names_of_workers_gives_the_same_batches(hide: Callable[..., None]) -> None:
    expected = trained()
    hide(loaders, "_remove_worker_pids", "_shutdown_workers", "_persistent_workers", "_workers")
    hide(batches, "_get_iterator")
    assert same(trained(), expected)
    assert batches.uses_torch_iteration(DataLoader(TensorDataset(torch.zeros(1))))


def test_the_shuffle_buffer_of_a_data_set_is_not_named(hide: Callable[..., None]) -> None:
    class BufferShuffledExamplesIterable:
        pass

    class Shuffled:
        _ex_iterable = BufferShuffledExamplesIterable()

    assert resumable_loader._has_shuffle_buffer(Shuffled())
    hide(resumable_loader, "_ex_iterable")
    assert not resumable_loader._has_shuffle_buffer(Shuffled())


def test_a_metric_without_its_number_of_updates_has_its_state_and_torchmetrics_warns() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    metric, again = torchmetrics.MeanMetric(), torchmetrics.MeanMetric()
    metric.update(torch.tensor([1.0, 4.0]))
    evaluation.load_state(again, evaluation.state_of(metric), torch.device("cpu"))
    again._update_count = 0  # what was set has another name
    with pytest.warns(UserWarning, match="before the ``update`` method"):
        assert again.compute().item() == 2.5


def test_a_compiled_module_counts_as_not_compiled(hide: Callable[..., None]) -> None:
    compiled: Any = nn.Linear(1, 1)
    compiled._compiled_call_impl = compiled._orig_mod = nn.Identity()  # as torch.compile sets them
    assert model_state.is_compiled(compiled)
    hide(model_state, "_compiled_call_impl", "_orig_mod")
    assert not model_state.is_compiled(compiled)


def test_the_operations_of_a_compiled_model_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model()
    model._compiled_call_impl = model._call_impl
    log = LogTraining("1 step", throughput=("mfu",), peak_flops=1e12)
    assert "train/mfu" in tiny_run(model=model, callbacks=[log]).history.names
    monkeypatch.delattr(nn.utils.stateless, "_reparametrize_module")
    with pytest.raises(ValueError, match=r"_reparametrize_module.* Give LogTraining"):
        tiny_run(model=model, callbacks=[log])


def scheduled(optimizer: Any, total: int) -> SequentialLR:
    return SequentialLR(optimizer, [LinearLR(optimizer, 0.5, 1.0, 2), LambdaLR(optimizer, lambda step: 0.5)], [2])


def test_a_scheduler_without_its_milestones_counts_updates_and_no_tokens(hide: Callable[..., None]) -> None:
    def rate() -> float:
        run = tiny_run(callbacks=[LearningRate(scheduled)], steps=4)
        return float(run.optimizers[0].param_groups[0]["lr"])

    expected, one = rate(), scheduled(SGD([nn.Parameter(torch.ones(1))], 0.1), 4)
    rates.check_can_go_to(one)
    hide(learning_rate, "_step_count")
    hide(rates, "_milestones")
    assert rate() == expected
    with pytest.raises(ValueError, match="a SequentialLR can only be stepped"):
        rates.check_can_go_to(one)


def test_ddp_without_the_order_of_its_buckets_trains(hide: Callable[..., None]) -> None:
    def weights() -> Trained:
        run = tiny_run(driver=DdpDriver("cpu", timeout_s=100), seed=1)
        return {**run.driver.unwrap(run.model).state_dict()}

    expected = launch(weights)[0]
    hide(ddp, "_push_all_rebuilt_params")
    assert same(launch(weights)[0], expected)
