"""A ``step_fn`` calls the user's own module and updates some optimizers: the gradients are still those of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import SGD, Optimizer

from cadenza import Run
from cadenza.drivers import FsdpDriver
from cadenza.testing import launch
from tests.distributed.parts import Batch, driver, fsdp, loader, rank, trainer, vector
from tests.distributed.standing import on_ranks

RARE = 4  # samples in a batch: of every two batches the second uses `rare`


class Judge(nn.Module):
    """Judges samples. In one process, half of each batch uses `rare`; of two ranks, only the second one uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rare = nn.Linear(3, 1), nn.Linear(3, 1)
        self.register_buffer("last", torch.tensor(-1))

    def forward(self, points: Tensor, numbers: Tensor) -> Tensor:
        self.last = numbers.max()
        judged: Tensor = self.layer(points)
        if (rare := numbers // RARE % 2 == 1).any():
            judged = judged + self.rare(points).tanh() * rare.unsqueeze(1)
        return judged


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.maker, self.judge = nn.Linear(3, 3), Judge()


def both(model: nn.Module) -> list[Optimizer]:
    assert isinstance(model, Gan)
    return [SGD(model.judge.parameters(), lr=0.05, momentum=0.9), SGD(model.maker.parameters(), lr=0.05)]


def play(run: Run, batch: Batch) -> Tensor:
    """Update the judge in each step and the maker in every second one. The maker's loss leaves gradients in the judge."""
    points, _, numbers = batch
    model: Any = run.model
    made = model.maker(points)
    loss: Tensor = (model.judge(points, numbers) - 1).pow(2).mean() + model.judge(made.detach(), numbers).pow(2).mean()
    run.backward(loss)
    run.update(run.optimizers[0])
    run.backward((model.judge(made, numbers) - 1).pow(2).mean())
    if run.progress.step % 2:
        run.update(run.optimizers[1])
    return loss.detach()


def trained(make: Callable[[], Any], batch_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the weights, the gradients that the last step left, and the buffer of the judge as each step found it."""
    found: list[int] = []

    def step(run: Run, batch: Batch) -> Tensor:
        found.append(int(run.model.judge.last))  # type: ignore[arg-type,union-attr]
        return play(run, batch)

    model = Gan()
    data = loader(24, batch_size, shuffle=False)
    optimizer = (lambda parameters: both(model)) if rank() is not None else both(model)
    one = trainer(data, model=model, optimizer=optimizer, driver=make(), compute_loss=None, step_fn=step, max_epochs=1)
    one.fit()
    parameters = list(model.parameters())
    return vector(parameters), vector(one.grad for one in parameters if one.grad is not None), found


def in_parts(*shard: str) -> FsdpDriver:
    return fsdp(shard=shard or ("maker", "judge"))


@pytest.mark.parametrize("make", [driver, in_parts], ids=["ddp", "fsdp"])
def test_two_optimizers_update_as_in_one_process_on_the_whole_batch(make: Callable[[], Any]) -> None:
    weights, gradients, _ = trained(driver, 2 * RARE)
    first, second = on_ranks(lambda: trained(make, RARE))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert torch.allclose(first[0], weights, atol=1e-6)
    assert torch.allclose(first[1], gradients, atol=1e-6)
    if make is driver:
        assert first[2] == second[2]  # buffers are those of the main process


def test_with_fsdp_a_part_of_the_model_that_is_called_alone_must_be_sharded_by_name() -> None:
    def failing() -> list[str]:
        with pytest.raises(RuntimeError) as caught:
            trained(lambda: in_parts("judge"), RARE)
        return caught.value.__notes__

    for notes in launch(failing):
        assert "likely cure: with FSDP" in notes[0]
        assert "in shard=" in notes[0]


def test_gradients_of_one_dtype_are_averaged_in_one_exchange() -> None:
    def averaged() -> tuple[list[int], list[list[float] | None]]:
        sizes: list[int] = []
        reduce = dist.all_reduce

        def count(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            sizes.append(tensor.numel())
            return reduce(tensor, *arguments, **options)

        own = rank() or 0
        parameters = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float32, torch.float64) for _ in range(4)]
        for parameter in parameters[1::4] + parameters[2::4] * own:  # the third of each dtype only on rank 1
            parameter.grad = torch.full_like(parameter, 2.0 * own)
        parameters[1].requires_grad_(False)  # its optimizer updates it all the same
        parameters[3].grad = torch.eye(2)[own].to_sparse() if own else None
        made = driver()
        with patch.object(dist, "all_reduce", count):
            made.average_gradients(parameters)
        return sizes, [None if one.grad is None else one.grad.to_dense().tolist() for one in parameters]

    first, second = on_ranks(averaged)
    assert first == second
    assert first[0][:1] + first[0][2:] == [8, 4, 4]  # which have a gradient, then one exchange per dtype
    assert first[1] == [None, [1.0, 1.0], [1.0, 1.0], [0.0, 0.5], None, [1.0, 1.0], [1.0, 1.0], None]
