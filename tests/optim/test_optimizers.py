"""Optimizers: fused where that is faster, and also of parameters outside of the model, which are trained, saved, continued."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, ClipGradients
from cadenza.errors import CheckpointMismatchError
from cadenza.optim.model_state import Walk
from cadenza.optim.optimizers import fused
from cadenza.testing import prove_resume, tiny_loader, tiny_model, tiny_run, tiny_trainer

Make = Callable[[Any], Optimizer]

FASTER: list[Make] = [
    lambda parameters: Adam(parameters, 0.01, amsgrad=True),
    lambda parameters: AdamW(parameters, 0.01, weight_decay=0.1),
    partial(AdamW, lr=0.01),
    lambda parameters: SGD(parameters, 0.05, momentum=0.9, nesterov=True),
    lambda parameters: SGD(parameters, 0.05, weight_decay=0.1),
    lambda parameters: Adagrad(parameters, 0.1),
]


def layers() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def images() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(6, 2, 4, 4, generator=generator), torch.randn(6, 3, generator=generator)) for _ in range(4)]


def problem() -> dict[str, Any]:
    return {"model": layers(), "loader": images(), "compute_loss": supervised(nn.MSELoss())}


def trained(optimizer: Any, epochs: int = 5, **arguments: Any) -> Run:
    return tiny_run(**problem(), optimizer=optimizer, epochs=epochs, **arguments)


def weights_of(run: Run) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in run.model.parameters()])


def not_fused(make: Make, parameters: Iterable[Tensor]) -> Optimizer:
    """Make an optimizer as its maker would have: torch takes a loop or foreach then."""
    optimizer = make(parameters)
    for group in optimizer.param_groups:
        group["fused"] = False
    return optimizer


@pytest.mark.parametrize("make", FASTER)
def test_what_a_function_makes_is_fused_and_learns_the_same_with_scaled_gradients_too(make: Make) -> None:
    run, plain = trained(make), trained(partial(not_fused, make))
    assert [fused(one) for one in (*run.optimizers, *plain.optimizers)] == [True, False]
    torch.testing.assert_close(weights_of(run), weights_of(plain), rtol=1e-4, atol=1e-5)
    assert not torch.equal(weights_of(run), weights_of(trained(make, epochs=1)))  # it did learn all the way
    run, plain = trained(make, precision="fp16"), trained(partial(not_fused, make), precision="fp16")
    torch.testing.assert_close(weights_of(run), weights_of(plain), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("chosen", [{"fused": False}, {"foreach": True}, {"foreach": False}])
def test_what_its_maker_chose_stays(chosen: dict[str, Any]) -> None:
    make: Any = partial(AdamW, lr=0.01, **chosen)
    before = [make([nn.Parameter(torch.zeros(1))]).param_groups[0][name] for name in ("fused", "foreach")]
    (optimizer,) = trained(make).optimizers
    assert [optimizer.param_groups[0][name] for name in ("fused", "foreach")] == before


def test_plain_sgd_gains_nothing_so_its_bits_stay_those_of_the_loop_by_hand() -> None:
    run = tiny_run(optimizer=lambda parameters: SGD(parameters, 0.1))
    model, (optimizer,) = tiny_model(), run.optimizers
    by_hand = SGD(model.parameters(), 0.1)
    for inputs, targets in tiny_loader():
        by_hand.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        by_hand.step()
    assert not fused(optimizer)
    assert torch.equal(weights_of(run), torch.cat([one.detach().flatten() for one in model.parameters()]))


def test_a_class_of_ones_own_is_left_alone() -> None:
    class Own(AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    (optimizer,) = tiny_run(optimizer=Own).optimizers
    assert optimizer.param_groups[0]["fused"] is None


def test_groups_keep_their_own_settings() -> None:
    def make(parameters: list[nn.Parameter]) -> Optimizer:
        return AdamW([{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:], "weight_decay": 0.5}], lr=0.01)

    (optimizer,) = trained(make).optimizers
    settings = [(group["lr"], group["weight_decay"], group["fused"]) for group in optimizer.param_groups]
    assert settings == [(0.1, 0.01, True), (0.01, 0.5, True)]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert fused(optimizer)


FUSED = (
    "optimizer: AdamW, built fused, which is faster and rounds differently. To change that, pass AdamW(..., fused=False) "
    "or an optimizer instance."
)


def lines(optimizer: Any, **arguments: Any) -> list[str]:
    """Return what the plan says of the optimizer."""
    plan = str(tiny_trainer(optimizer=optimizer, **arguments).plan()).splitlines()
    return [line for line in plan if line.startswith(("optimizer: ", "! "))]


def not_contiguous() -> nn.Linear:
    model = tiny_model()
    model.weight = nn.Parameter(torch.randn(4, 4)[:, ::4])
    return model


@pytest.mark.parametrize(
    ("optimizer", "model", "told"),
    [
        (AdamW, tiny_model, FUSED.removeprefix("optimizer: ")),
        (partial(AdamW, fused=True), tiny_model, "AdamW, fused"),
        (partial(AdamW, foreach=True), tiny_model, "AdamW, not fused: foreach=True was given"),
        (partial(AdamW, capturable=True), tiny_model, "AdamW, not fused: capturable=True was given"),
        (partial(AdamW, differentiable=True), tiny_model, "AdamW, not fused: differentiable=True was given"),
        (AdamW, lambda: nn.Linear(1, 1, dtype=torch.complex64), "AdamW, not fused: a parameter is of torch.complex64"),
        (AdamW, not_contiguous, "AdamW, not fused: a parameter is not contiguous in memory"),
        (partial(SGD, lr=0.1, momentum=0.9), not_contiguous, "SGD, not fused: a parameter is not contiguous in memory"),
        (Adagrad, lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "Adagrad, not fused: the model has sparse gradients"),
        (partial(SGD, lr=0.1, momentum=0.9, dampening=0.1), tiny_model, "SGD, not fused: dampening is not 0"),
    ],
)
def test_the_plan_says_what_is_fused_and_what_is_not_and_why(optimizer: Any, model: Callable[[], nn.Module], told: str) -> None:
    assert lines(optimizer, model=model()) == [f"optimizer: {told}"]


def test_the_plan_says_nothing_of_what_gains_nothing_and_of_an_instance_what_to_pass() -> None:
    assert lines(RMSprop) == lines(partial(SGD, lr=0.1)) == []
    model = tiny_model()
    (doubt,) = lines([AdamW([model.weight]), AdamW([model.bias])], model=model)
    assert doubt.startswith("! AdamW could be fused, which is faster: pass a function of the parameters")
    assert lines(AdamW(model.parameters(), foreach=True), model=model) == []
    assert lines(SGD(model.parameters(), 0.1), model=model) == []


@pytest.mark.parametrize("make", FASTER)
def test_gradients_in_another_order_than_their_weights_are_read_rightly(make: Make) -> None:
    """torch's kernels for CPU read them as they lie in memory, and do not look: half of a weight would be wrong."""

    def turn(run: Run) -> None:
        for parameter in run.model.parameters():
            if parameter.ndim == 4:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.contiguous(memory_format=torch.channels_last)

    turned = trained(make, callbacks=[on(Callback.on_before_optimizer_step)(turn)])
    torch.testing.assert_close(weights_of(turned), weights_of(trained(make)), rtol=1e-5, atol=1e-6)


def test_sparse_gradients_that_nobody_could_foresee_end_the_fusing_and_not_the_run() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.ones(4, 1))

        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.embedding((inputs[:, 0] > 0).long(), self.table, sparse=True)

    model = Words()
    (optimizer,) = tiny_run(model=model, optimizer=lambda parameters: SGD(parameters, 0.1, momentum=0.9)).optimizers
    assert not fused(optimizer)
    assert not torch.equal(model.table[:2], torch.ones(2, 1))


def test_weights_that_are_trained_later_than_others_begin_as_without_fusing() -> None:
    def late(run: Run) -> None:
        if run.progress.step < 3:
            for parameter in run.model.get_submodule("3").parameters():
                parameter.grad = None

    def make(parameters: Any) -> Optimizer:
        return SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1)

    callbacks = [on(Callback.on_before_optimizer_step)(late)]
    run, plain = trained(make, callbacks=callbacks), trained(partial(not_fused, make), callbacks=callbacks)
    assert fused(run.optimizers[0])
    torch.testing.assert_close(weights_of(run), weights_of(plain), rtol=1e-4, atol=1e-5)


def resumable(directory: Path, optimizer: Make, **arguments: Any) -> Any:
    saving: dict[str, Any] = {"directory": directory, "seed": 1, "callbacks": [Checkpoint(every="3 steps")]}
    return tiny_trainer(**problem(), optimizer=optimizer, **saving, **arguments)


@pytest.mark.parametrize("make", FASTER)
def test_a_fused_run_that_is_continued_ends_with_the_same_bits(make: Make, tmp_path: Path) -> None:
    whole = resumable(tmp_path / "whole", make, steps=8).fit()
    resumable(tmp_path / "cut", make, steps=3).fit()
    continued = resumable(tmp_path / "cut", make, steps=8).fit(resume="auto")
    assert continued.progress.step == 8
    assert fused(continued.optimizers[0])
    assert torch.equal(weights_of(continued), weights_of(whole))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("make", FASTER)
def test_a_run_that_was_not_fused_goes_on_as_it_was(
    make: Make, precision: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = partial(not_fused, make)
    whole = resumable(tmp_path / "whole", plain, steps=8, precision=precision).fit()
    resumable(tmp_path / "cut", plain, steps=3, precision=precision).fit()
    continued = resumable(tmp_path / "cut", make, steps=8, precision=precision).fit(resume="auto")
    assert torch.equal(weights_of(continued), weights_of(whole))
    assert "continues not fused, as in the checkpoint, for the same bits" in caplog.text


def test_it_keeps_the_contract_of_resuming() -> None:
    prove_resume(lambda directory: resumable(directory, AdamW, steps=6), at=[3, 4], in_process=True)


# -- closures -----------------------------------------------------------------------------------------


lbfgs = partial(torch.optim.LBFGS, lr=0.5, max_iter=3)


def test_an_optimizer_that_needs_a_closure_is_refused_with_the_lines_that_give_one() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=r"LBFGS.step needs a closure") as refused:
        tiny_trainer(optimizer=lbfgs(model.parameters()), model=model)
    for started in (tiny_trainer(optimizer=lbfgs).plan, tiny_trainer(optimizer=lbfgs).fit):
        with pytest.raises(ValueError, match=r"LBFGS.step needs a closure"):
            started()

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    names: dict[str, Any] = {"compute_loss": compute_loss}
    exec(str(refused.value).partition("\n\n")[2], names)
    by_hand = tiny_model()
    optimizer = lbfgs(by_hand.parameters())
    for _ in range(2):
        for batch in tiny_loader():
            optimizer.zero_grad()

            def closure(batch: Any = batch) -> Tensor:
                optimizer.zero_grad()
                loss = compute_loss(by_hand, batch)
                loss.backward()
                return loss

            optimizer.step(closure)
    run = tiny_run(optimizer=lbfgs, step_fn=names["step"], epochs=2)
    assert torch.equal(run.model.weight, by_hand.weight)  # type: ignore[arg-type]
    assert run.loss is not None


# -- parameters outside of the model, as a center loss or a learned temperature has them -------------


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


def test_an_optimizer_that_got_a_group_after_a_run_trains_again() -> None:
    trainer, loss = tiny_trainer(steps=1), Centered()
    optimizer = trainer.fit().optimizers[0]
    again = tiny_trainer(model=trainer.model, optimizer=optimizer, steps=1, compute_loss=supervised(loss))
    optimizer.add_param_group({"params": [loss.center], "lr": 0.5})
    assert [group["lr"] for group in again.fit().optimizers[0].param_groups] == [0.1, 0.5]
    assert loss.center.item() != 0


def test_clipping_and_accumulation_reach_parameters_outside_of_the_model() -> None:
    one, loss = center_trainer(steps=1, callbacks=[ClipGradients(max_norm=1e-3)], accumulate=2)
    one.fit()
    assert 0 < abs(loss.center.item()) <= 0.5 * 1e-3


def test_a_model_with_its_own_named_parameters_decides_also_if_only_this_instance_has_them() -> None:
    class Headless(nn.Sequential):
        def named_parameters(self, *arguments: Any, **options: Any) -> Any:
            return (pair for pair in super().named_parameters(*arguments, **options) if pair[0].startswith("0"))

    one, other = Headless(nn.Linear(1, 1), nn.Linear(1, 1)), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    other.named_parameters = partial(Headless.named_parameters, one)  # type: ignore[method-assign]
    for model in (one, other):
        assert [*Walk(model).parameters.values()] == [*one[0].parameters()]


def test_the_function_may_split_the_parameters_by_name_and_shape() -> None:
    def make(parameters: Any) -> Optimizer:
        assert parameters.names == [name for name, _ in model.named_parameters()]
        head, rest = parameters.split(lambda name, parameter: name.startswith("2."))
        matrices, others = type(parameters)(model).split(lambda name, parameter: parameter.ndim >= 2)
        assert (len(head), len(rest), len(matrices), len(others)) == (2, 4, 2, 4)
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}])

    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    (optimizer,) = tiny_trainer(model=model, optimizer=make, loader=[(torch.ones(4, 2), torch.ones(4, 1))]).fit().optimizers
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
