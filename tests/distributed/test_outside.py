"""Parameters outside of the model on several ranks: the same values on all, and gradients averaged over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cadenza.drivers import DdpDriver, Driver, FsdpDriver, SingleDriver
from cadenza.testing import launch
from tests.distributed.parts import Batch, loader, momentum, network, own_rank, trainer


def shifted(driver: Driver, shift: nn.Parameter, *, accumulate: int = 1) -> list[float]:
    """Train a model and a shift that is known to the loss alone; return the shift and the sum of the weights."""

    def compute_loss(model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]) + shift, batch[1])

    one = trainer(
        loader(24),
        model=network(),
        driver=driver,
        accumulate=accumulate,
        compute_loss=compute_loss,
        optimizer=lambda parameters: [momentum(parameters), torch.optim.SGD([shift], 0.1, momentum=0.9)],
    )
    one.fit()
    return [shift.item()]


def test_a_parameter_of_the_loss_trains_under_ddp_and_fsdp_as_on_one_process_that_accumulates() -> None:
    def both() -> list[float]:
        first = 0.5 + own_rank()  # the main process's counts
        drivers = DdpDriver("cpu", timeout_s=100), FsdpDriver("cpu", timeout_s=100)
        return [value for driver in drivers for value in shifted(driver, nn.Parameter(torch.tensor(first)))]

    (alone,) = shifted(SingleDriver("cpu"), nn.Parameter(torch.tensor(0.5)), accumulate=2)
    one, other = launch(both)
    assert one == other
    torch.testing.assert_close(torch.tensor(one), torch.tensor([alone, alone]), atol=1e-6, rtol=1e-5)
