"""Parameters outside of the model, as a center loss, ArcFace or a learned temperature has them: trained, saved, continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Trainer, supervised
from cadenza.callbacks import Checkpoint, ClipGradients
from cadenza.errors import CheckpointMismatchError
from cadenza.testing import tiny_loader, tiny_model, tiny_run, tiny_trainer


class Centered(nn.Module):
    """A loss with a learned center, and a running mean of the residuals as a buffer."""

    running: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.center = nn.Parameter(torch.zeros(1))
        self.register_buffer("running", torch.zeros(1))

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        residuals = predictions - targets - self.center
        with torch.no_grad():
            self.running.lerp_(residuals.mean(0), 0.1)
        return (residuals - self.running).square().mean()


def adam_and_sgd(model: nn.Module, *outside: Tensor) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), 0.05), torch.optim.SGD(outside, 0.5, momentum=0.9)]


def center_trainer(
    directory: Path | None = None, *, steps: int = 6, way: str = "module", **arguments: Any
) -> tuple[Trainer, Centered]:
    """Return a trainer and its loss, which is known as a module or, in a function, is not."""
    loss, model = Centered(), tiny_model()
    compute: Any = supervised(loss) if way == "module" else lambda model, batch: loss(model(batch[0]), batch[1])
    arguments = {"optimizer": adam_and_sgd(model, loss.center), **arguments}
    one = tiny_trainer(model=model, compute_loss=compute, steps=steps, directory=directory, seed=1, **arguments)
    return one, loss


def by_hand(steps: int) -> tuple[nn.Module, Centered]:
    loss, model = Centered(), tiny_model()
    optimizers, batches = adam_and_sgd(model, loss.center), tiny_loader() * 9
    for inputs, targets in batches[:steps]:
        loss(model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, loss


@pytest.mark.parametrize("way", ["module", "function"])
def test_an_optimizer_of_the_parameters_of_the_loss_alone_trains_them_as_by_hand(way: str) -> None:
    one, loss = center_trainer(way=way)
    one.fit()
    model, expected = by_hand(6)
    assert torch.equal(nn.utils.parameters_to_vector(one.model.parameters()), nn.utils.parameters_to_vector(model.parameters()))
    assert loss.center.item() == expected.center.item() != 0


@pytest.mark.parametrize("one_optimizer", [False, True])
def test_what_is_outside_of_the_model_continues_to_the_same_bits(tmp_path: Path, one_optimizer: bool) -> None:
    def fit(steps: int, directory: Path | None = tmp_path) -> tuple[Trainer, Centered]:
        saving = [Checkpoint("2 steps")] if directory else []
        one, loss = center_trainer(directory, steps=steps, callbacks=saving)
        if one_optimizer:
            one.optimizer = torch.optim.Adam([*one.model.parameters(), loss.center], 0.05)
        one.fit(resume="auto" if directory else False)
        return one, loss

    fit(4)
    whole, expected = fit(7, directory=None)
    for _ in range(2):  # the second time there is nothing to do: everything is as it ended
        continued, loss = fit(7)
        assert torch.equal(loss.center, expected.center)
        assert torch.equal(loss.running, expected.running)
        assert torch.equal(continued.model.weight, whole.model.weight)  # type: ignore[arg-type]


def test_a_run_with_other_parameters_outside_of_the_model_does_not_continue(tmp_path: Path) -> None:
    center_trainer(tmp_path, callbacks=[Checkpoint("2 steps")])[0].fit()
    model = tiny_model()
    other = adam_and_sgd(model, nn.Parameter(torch.zeros(3)))
    one = tiny_trainer(model=model, optimizer=other, steps=9, directory=tmp_path, seed=1)
    with pytest.raises(CheckpointMismatchError, match=r"parameters outside of the model: saved \[\[1\]\], now \[\[3\]\]"):
        one.fit(resume="auto")


def test_the_loss_is_moved_with_the_model() -> None:
    loss = Centered()

    def two(parameters: Any) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(parameters, 0.1), torch.optim.SGD([loss.center], 0.1)]

    run = tiny_run(device="meta", compute_loss=supervised(loss), optimizer=two)
    assert run.device.type == loss.center.device.type == loss.running.device.type == "meta"  # a device without numbers


def test_parameters_on_another_device_or_of_no_part_of_the_model_are_refused() -> None:
    model, center = tiny_model(), nn.Parameter(torch.zeros(2, device="meta"))
    message = r"parameter of shape \(2,\) that is outside of the model and on meta; expected it on cpu"
    with pytest.raises(ValueError, match=message):
        tiny_run(model=model, optimizer=adam_and_sgd(model, center))
    others = [torch.optim.SGD(tiny_model().parameters(), 0.1), torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1)]
    with pytest.raises(ValueError, match="the optimizers hold none of the model's parameters"):
        tiny_trainer(optimizer=others)


def test_parameters_that_no_optimizer_holds_or_that_the_loss_does_not_use_are_named(caplog: pytest.LogCaptureFixture) -> None:
    tiny_run(compute_loss=supervised(Centered()))
    assert "the loss has 1 parameter that no optimizer holds, so they are not trained: center" in caplog.text
    model = tiny_model()
    tiny_run(model=model, optimizer=adam_and_sgd(model, *tiny_model().parameters()), steps=3)
    assert caplog.text.count("holds 2 parameters outside of the model, such as one of shape (1, 1), that have no gradient") == 1


def test_clipping_and_accumulation_reach_parameters_outside_of_the_model() -> None:
    one, loss = center_trainer(steps=1, callbacks=[ClipGradients(max_norm=1e-3)], accumulate=2)
    one.fit()
    assert 0 < abs(loss.center.item()) <= 0.5 * 1e-3
