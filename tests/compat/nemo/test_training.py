"""``nf.train``: its arguments, optimizers and policies (case 20 of part F2); and the evaluations of cases 8-13 of F1."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from cadenza.compat.nemo.backends.pytorch.nm import DataLayerNM, LossNM
from cadenza.compat.nemo.core import DeviceType, NeuralModuleFactory
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo10.core import ActionCallback, EvaluatorCallback, NmTensor
from cadenza.compat.nemo10.core import NeuralModuleFactory as OldFactory
from cadenza.compat.neural import policies as lr_policies
from cadenza.compat.neural.modules import loader_of
from cadenza.compat.neural.updates import AdamW, Novograd, master_params
from cadenza.errors import CallbackError, LossError
from cadenza.testing import Recorder, tiny_loader
from tests.compat.nemo.graphs import SGD, Line, LineNM, line, noisy_net, numbers, ports, spoiled, train, train_0_10, written

# -- 20: several optimizers, and a second training ----------------------------------------------------


def pairs_of(factory: NeuralModuleFactory, graph: Line) -> tuple[list[Any], LineNM]:
    """Two modules in a row, each with its own optimizer. Both losses have gradients for the first one's weights."""
    second = LineNM()
    final = second(x=graph.prediction)
    loss = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=final, b=graph.y)
    first_optimizer = factory.create_optimizer("sgd", [graph.net], SGD)
    second_optimizer = factory.create_optimizer("sgd", [second], SGD)
    return [(first_optimizer, [graph.loss]), (second_optimizer, [loss])], second


@pytest.mark.parametrize("order", [[0, 1], [1, 0, 0]], ids=["alternating", "several steps in a row"])
def test_20_each_step_has_the_loss_and_the_gradients_of_its_optimizer_alone(order: list[int]) -> None:
    graph, factory, seen = line(1), NeuralModuleFactory(), list[float]()
    pairs, second = pairs_of(factory, graph)
    look = nemo.on_step_end(lambda state: seen.append(state["tensors"].get_tensor("loss").item()))
    run = factory.train([pairs[index] for index in order], optimization_params={"max_steps": 6}, callbacks=[look])
    assert run.optimizers == [optimizer for optimizer, _ in pairs]  # in the order of their creation, as in the files of NeMo

    own, other, losses = line(1), LineNM(), list[float]()
    x, y = loader_of(own.data)[0]  # type: ignore[index]  # it is a list
    for step in range(6):
        of_the_first = order[step % len(order)] == 0
        prediction = own.net(x)
        loss = nn.functional.mse_loss(prediction if of_the_first else other(prediction), y)
        losses.append(loss.item())
        module = own.net if of_the_first else other
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for weight, gradient in zip(module.parameters(), gradients, strict=True):
                weight.sub_(0.1 * gradient)
    assert seen == pytest.approx(losses)
    torch.testing.assert_close(graph.weights, own.weights)
    torch.testing.assert_close(list(second.parameters()), list(other.parameters()))


def test_20_alternating_optimizers_do_not_accumulate() -> None:
    factory = NeuralModuleFactory()
    pairs, _ = pairs_of(factory, line())
    with pytest.raises(ValueError, match="alternating optimizers need batches_per_step=1; got 2"):
        factory.train(pairs, optimization_params={"max_steps": 4}, batches_per_step=2)


def test_20_a_second_training_needs_a_reset_and_one_that_failed_before_its_start_does_not_count() -> None:
    factory = NeuralModuleFactory()
    with pytest.raises(ValueError, match=r"there is no optimizer 'sdg'. Did you mean 'sgd'\?"):
        train(line(), factory=factory, optimizer="sdg", max_steps=1)
    train(line(), factory=factory, max_steps=2)
    with pytest.raises(ValueError, match=r"this factory has already trained\. Call reset_trainer"):
        train(line(), factory=factory, max_steps=1)
    train(line(), factory=factory, max_steps=2, reset=True)
    factory.reset_trainer()
    assert (factory.step, factory.epoch, factory.optimizers, factory.run) == (0, 0, [], None)
    assert train(line(), factory=factory, max_steps=1).progress.step == 1


# -- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"callback": []}, r"train has no argument 'callback'. Did you mean 'callbacks'\?"),
        ({"optimizer": torch.optim.Adam}, "optimizer must be a name such as 'sgd', or an optimizer; got"),
        ({"lr_policy": lr_policies.CosineAnnealing}, "lr_policy must be an instance such as CosineAnnealing"),
        ({"lr_policy": "cosine"}, "lr_policy must be an instance"),
        ({"batches_per_step": 0}, "batches_per_step must be a whole number of at least 1; got 0"),
        ({"tensors_to_optimize": ["loss"]}, "must be a list of losses, or of pairs .* got 'loss' in it"),
        ({"tensors_to_optimize": [("sgd", [])]}, "pairs .* with an optimizer of nf.create_optimizer"),
        ({"tensors_to_optimize": []}, "tensors_to_optimize must be a list of losses"),
        ({"callbacks": "abc"}, "callbacks must be a list; got 'abc'"),
        ({"callbacks": {}}, "callbacks must be a list; got {}"),
        ({"optimization_params": [1]}, r"optimization_params must be a dict such as .*; got \[1\]"),
        ({"optimization_params": {"lr": 0.1, "num_epochs": "3"}}, "num_epochs must be a number, or None; got '3'"),
        ({"optimization_params": {"lr": "0.1", "num_epochs": 3}}, "'lr' in optimization_params must be a number; got '0.1'"),
        ({"optimization_params": {"lr": 0.1, "num_epochs": 0}}, r"num_epochs must be at least 1; got 0. .* call nf.eval"),
        ({"optimization_params": {"lr": 0.1}}, "optimization_params needs num_epochs or max_steps"),
        ({"optimization_params": {"max_steps": 1}}, "optimization_params needs 'lr'"),
        (
            {"optimization_params": {"lr": 0.1, "max_steps": 1, "momentun": 0.9}},
            r"'sgd' has no argument 'momentun'. Did you mean 'momentum'\?",
        ),
        ({"batches_per_step": "2"}, "batches_per_step must be a whole number of at least 1; got '2'"),
    ],
)
def test_wrong_arguments_are_errors_that_name_the_expected_ones(arguments: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"tensors_to_optimize": [line().loss], "optimization_params": {**SGD, "max_steps": 1}}
    with pytest.raises((TypeError, ValueError), match=said):
        NeuralModuleFactory().train(**{**given, **arguments})


def test_limits_are_rounded_up_and_end_trainings_that_never_end_in_nemo() -> None:
    assert train(line(2), num_epochs=1e1, max_steps=2.5).progress.step == 3
    # An epoch has fewer batches than a step, or all losses are NaN; and only max_steps limits the training.
    short = train(line(2), max_steps=3, batches_per_step=4)
    assert (short.progress.step, short.progress.epoch) == (3, 3)
    graph = line(loader=spoiled(1, 0))
    assert train(graph, max_steps=3).progress.step == 3
    assert graph.weights == line().weights


def test_what_is_not_a_tensor_a_device_type_or_an_attribute_of_a_callback_is_an_error_at_once() -> None:
    factory = NeuralModuleFactory(placement=DeviceType.CPU)
    with pytest.raises(TypeError, match=r"placement must be a DeviceType such as DeviceType.CPU, or None; got 'cpu'"):
        NeuralModuleFactory(placement="cpu")  # type: ignore[arg-type]  # the error to test
    assert NeuralModuleFactory.get_default_factory() is factory
    with pytest.raises(ValueError, match="create_optimizer needs a list of neural modules or NmTensors; got None"):
        factory.create_optimizer("sgd", None, SGD)
    with pytest.raises(TypeError, match=r"tensors must be a list of NmTensors, .*; got \['loss'\]"):
        factory.infer(["loss"])
    with pytest.raises(TypeError, match=r"NeuralModuleFactory has no argument 'logdir'. Did you mean 'log_dir'\?"):
        NeuralModuleFactory(logdir="work")
    with pytest.raises(TypeError, match="expected a list of NmTensors or their names; got None"):
        nemo.SimpleLossLoggerCallback(None)  # type: ignore[arg-type]  # the error to test

    timer = nemo.NeMoCallback()
    timer.before = 1.5  # type: ignore[assignment]  # the time of a start, in the user's script
    with pytest.raises(CallbackError, match=r"callbacks\[1\]\.before must be a tuple of classes and phases, .*; got 1\.5"):
        train(line(), nemo.SimpleLogger(), timer, max_steps=1)


def test_a_loss_is_one_number_and_depends_on_trainable_weights() -> None:
    graph = line()
    with pytest.raises(LossError, match=r"'y_pred' of linenm\d+ has shape \(2, 1\)"):
        train([graph.prediction], max_steps=1)
    plain = LossNM.of(lambda a, b: 1.0, ["a", "b"])(a=graph.prediction, b=graph.y)
    with pytest.raises(LossError, match=r"'loss' of lossnm\d+ is a float"):
        train([plain], max_steps=1)
    kept = LossNM.of(lambda a, b: (a - b).abs().mean(0), ["a", "b"])(a=graph.prediction, b=graph.y)
    assert train([graph.loss, kept], max_steps=1).progress.step == 1  # of shape (1,), which NeMo accepts
    graph.net.freeze()
    with pytest.raises(ValueError, match="no module has a trainable weight"):
        train(graph, max_steps=1)


def test_arguments_and_settings_without_effect_are_warnings_that_name_them(caplog: pytest.LogCaptureFixture) -> None:
    train(line(), max_steps=1, synced_batchnorm=True)
    assert "these arguments have no effect here: synced_batchnorm" in caplog.text

    params = {"lr": 0.1, "max_steps": 1, "betas": (0.5, 0.9), "luc": True, "larc": False, "amp_min_loss_scale": 1.0}
    NeuralModuleFactory().train([line().loss], "sgd", params)
    assert "no effect on sgd: betas, luc, larc, amp_min_loss_scale" in caplog.text


def test_sgd_has_momentum_by_default_and_an_optimizer_instance_is_used_unchanged() -> None:
    graph = line()
    run = NeuralModuleFactory().train([graph.loss], optimization_params={"lr": 0.1, "max_steps": 1})
    assert run.optimizers[0].defaults["momentum"] == 0.9
    own = torch.optim.Adagrad(graph.net.parameters())
    assert NeuralModuleFactory().train([graph.loss], own, {"max_steps": 1}).optimizers == [own]


# -- policies -----------------------------------------------------------------------------------------


def test_a_policy_sets_the_rate_of_each_batch_after_on_batch_start() -> None:
    asked, seen = list[tuple[float, int, int]](), list[float]()

    def policy(initial_lr: float, step: int, epoch: int) -> float:
        asked.append((initial_lr, step, epoch))
        return initial_lr / (step + 2)

    def rate(state: State) -> None:
        seen.append(round(state["optimizers"][0].param_groups[0]["lr"], 6))

    train(line(4), nemo.on_batch_start(rate), nemo.on_batch_end(rate), max_steps=3, lr_policy=policy, batches_per_step=2)
    assert asked == [(0.1, 0, 0), (0.1, 0, 0), (0.1, 1, 0), (0.1, 1, 0), (0.1, 2, 1), (0.1, 2, 1)]
    assert seen == [0.1, 0.05, 0.05, 0.05, 0.05, 0.033333, 0.033333, 0.033333, 0.033333, 0.025, 0.025, 0.025]


@pytest.mark.parametrize(
    ("policy", "expected"),  # steps 0 to 5 of 4
    [
        (lr_policies.WarmupPolicy(warmup_steps=3), [0.25, 0.5, 0.75, 1, 1, 1]),
        (lr_policies.WarmupPolicy(warmup_steps=3, total_steps=4), [0.25, 0.5, 0.75, 1, 1, 0]),
        (lr_policies.WarmupHoldPolicy(warmup_steps=1, hold_steps=2, total_steps=4), [0.5, 1, 1, 1, 1, 0]),
        (lr_policies.WarmupHoldPolicy(warmup_ratio=0.25, total_steps=4, min_lr=0.1), [0.5, 1, 1, 1, 1, 0.1]),
        (lr_policies.SquareAnnealing(4), [1, 0.5625, 0.25, 0.0625, 1e-5, 0]),
        (lr_policies.SquareRootAnnealing(4, min_lr=0.1), [1, 0.75**0.5, 0.5**0.5, 0.5, 0.1, 0]),
        (lr_policies.CosineAnnealing(4, min_lr=0.2), [1, 0.8828427, 0.6, 0.3171573, 0.2, 0]),
        (lr_policies.CosineAnnealing(4, warmup_steps=2), [1 / 3, 2 / 3, 1, 0.5, 0, 0]),
        (lr_policies.WarmupAnnealing(4, warmup_ratio=0.25), [0.5, 1, 2 / 3, 1 / 3, 0, 0]),
        (lr_policies.InverseSquareRootAnnealing(4, warmup_steps=1), [0.5, 1, (2 / 3) ** 0.5, 0.5**0.5, 0.4**0.5, 0]),
        (lr_policies.PolynomialDecayAnnealing(4, power=2.0), [1, 0.5625, 0.25, 0.0625, 0, 0]),
        (lr_policies.PolynomialDecayAnnealing(4, 0.2, warmup_steps=2, cycle=True), [1 / 3, 2 / 3, 1, 0.6, 0.2, 0]),
        (lr_policies.PolynomialHoldDecayAnnealing(4, 0.2, hold_steps=2, power=2.0), [1, 1, 1, 0.4, 0.2, 0]),
        (lr_policies.PolynomialHoldDecayAnnealing(4, warmup_steps=2), [1 / 3, 2 / 3, 0, 0, 0, 0]),  # counts from step 0
    ],
    ids=lambda value: type(value).__name__,
)
def test_policies_give_nemo_s_rates(policy: Any, expected: list[float]) -> None:
    assert [policy(1.0, step, 0) for step in range(6)] == pytest.approx(expected)


def test_a_user_s_policy_overrides_the_rate_after_the_warm_up() -> None:
    class Halving(lr_policies.WarmupPolicy):
        def _get_lr(self, initial_lr: float, step: int, epoch: int) -> float:
            return float(initial_lr / 2**epoch)

    policy = Halving(warmup_steps=1, total_steps=9)
    assert [policy(1.0, step, step // 2) for step in range(4)] == [0.5, 1, 0.5, 0.5]
    assert policy.total_steps == 9


def test_policies_by_name_and_wrong_ones() -> None:
    policy = lr_policies.get_lr_policy("CosineAnnealing", total_steps=4, min_lr=0.2)
    assert policy(1.0, 2, 0) == pytest.approx(0.6)
    assert len(lr_policies.get_all_lr_classes()) == 9
    with pytest.raises(ValueError, match=r"there is no policy 'CosineAnealing'. Did you mean 'CosineAnnealing'\?"):
        lr_policies.get_lr_policy("CosineAnealing")

    with pytest.raises(ValueError, match="expected warmup_steps or warmup_ratio; got both"):
        lr_policies.CosineAnnealing(10, warmup_steps=1, warmup_ratio=0.1)
    with pytest.raises(ValueError, match="hold_ratio needs total_steps; got None"):
        lr_policies.WarmupHoldPolicy(hold_ratio=0.1)
    with pytest.raises(ValueError, match=r"the initial learning rate 0\.1 is below min_lr=0\.2"):
        lr_policies.CosineAnnealing(10, min_lr=0.2)(0.1, 0, 0)

    graph, policy = line(), lr_policies.CosineAnnealing(4)
    own = torch.optim.SGD(graph.net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="lr_policy needs 'lr'"):
        NeuralModuleFactory().train([graph.loss], own, {"max_steps": 1}, lr_policy=policy)


# -- optimizers by their formulas ---------------------------------------------------------------------------------------

START = [0.5, -2.0, 1.5]
GRADIENTS = [[1.0, -0.5, 0.25], [-0.5, -0.5, 2.0], [0.125, 0.0, -1.0], [0.5, 1.0, 0.5]]


def moved(optimizer: torch.optim.Optimizer, weight: Tensor) -> list[float]:
    for gradient in GRADIENTS:
        weight.grad = torch.tensor(gradient, dtype=weight.dtype)
        optimizer.step()
    return list(weight.tolist())


def adam_w(lr: float, beta1: float, beta2: float, eps: float, decay: float, amsgrad: bool) -> list[float]:
    weights, *gradients = torch.tensor([START, *GRADIENTS], dtype=torch.float64)
    first, second, largest = torch.zeros(3, 3, dtype=torch.float64)
    for step, gradient in enumerate(gradients, start=1):
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        first = beta1 * first + (1 - beta1) * gradient
        second = beta2 * second + (1 - beta2) * gradient**2
        largest = torch.maximum(largest, second)
        root = (largest if amsgrad else second).sqrt()
        weights = weights - rate * (decay * weights + first / (root + eps))
    return list(weights.tolist())


def novograd(lr: float, beta1: float, beta2: float, decay: float, luc: float = math.inf, averaging: bool = False) -> Any:
    weights, *gradients = torch.tensor([START, *GRADIENTS], dtype=torch.float64)
    first, second = torch.zeros(3, dtype=torch.float64), 0.0
    for gradient in gradients:
        norm = float(gradient.square().sum())
        second = norm if second == 0 else beta2 * second + (1 - beta2) * norm
        added = gradient / (math.sqrt(second) + 1e-8) + decay * weights
        first = beta1 * first + added * (1 - beta1 if averaging else 1)
        length = float(weights.norm() / (first.norm() + 1e-8))
        weights = weights - min(luc * length, lr) * first
    return weights.tolist()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_w_has_nemo_s_formula(amsgrad: bool) -> None:
    weight = torch.tensor(START, dtype=torch.float64, requires_grad=True)
    optimizer = AdamW([weight], lr=0.1, betas=(0.8, 0.9), eps=0.01, weight_decay=0.2, amsgrad=amsgrad)
    assert moved(optimizer, weight) == pytest.approx(adam_w(0.1, 0.8, 0.9, 0.01, 0.2, amsgrad), abs=1e-12)
    assert list(master_params(optimizer)) == [weight]


def test_adam_w_continues_from_a_state_of_torch_s_adam_w() -> None:
    weight = torch.tensor(START, requires_grad=True)
    earlier = torch.optim.AdamW([weight], lr=0.1)
    moved(earlier, weight)
    optimizer = AdamW([weight], lr=0.1)
    optimizer.load_state_dict(earlier.state_dict())
    moved(optimizer, weight)
    assert optimizer.state[weight]["step"] == 2 * len(GRADIENTS)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, novograd(0.1, 0.95, 0.98, 0.0)),
        ({"betas": (0.5, 0.25), "weight_decay": 0.1}, novograd(0.1, 0.5, 0.25, 0.1)),
        ({"grad_averaging": True}, novograd(0.1, 0.95, 0.98, 0.0, averaging=True)),
        ({"luc": True, "luc_trust": 0.02}, novograd(0.1, 0.95, 0.98, 0.0, luc=0.02)),
    ],
    ids=str,
)
def test_novograd_has_nemo_s_formula(settings: dict[str, Any], expected: list[float]) -> None:
    weight = torch.tensor(START, requires_grad=True)
    assert moved(Novograd([weight], lr=0.1, **settings), weight) == pytest.approx(expected, abs=1e-6)


def test_amsgrad_of_novograd_never_lets_the_second_moment_fall() -> None:
    weight = torch.tensor(START, requires_grad=True)
    optimizer = Novograd([weight], amsgrad=True)
    moved(optimizer, weight)
    state = optimizer.state[weight]
    assert state["step"] == len(GRADIENTS)
    assert state["max_exp_avg_sq"] > state["exp_avg_sq"]


@pytest.mark.parametrize("kind", [AdamW, Novograd])
def test_optimizers_refuse_wrong_settings_and_sparse_gradients(kind: Any) -> None:
    weight = torch.zeros(3, requires_grad=True)
    with pytest.raises(ValueError, match=r"betas must be at least 0 and below 1; got \(0.9, 1.0\)"):
        kind([weight], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="lr and eps must be at least 0; got lr=-1"):
        kind([weight], lr=-1)
    weight.grad = torch.zeros(3).to_sparse()
    with pytest.raises(RuntimeError, match="needs dense gradients"):
        kind([weight]).step()


@pytest.mark.parametrize(
    ("name", "given", "kind", "settings"),
    [
        ("SGD", {}, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0}),
        ("Adam", {"weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1, "betas": (0.9, 0.999)}),
        ("adam_w", {}, AdamW, {"weight_decay": 0.0, "eps": 1e-8}),
        ("novograd", {"luc": True, "luc_eta": 0.5}, Novograd, {"betas": (0.95, 0.25)}),
        ("fused_adam", {"betas": (0.5, 0.9)}, torch.optim.AdamW, {"weight_decay": 0.0, "betas": (0.5, 0.9)}),
    ],
)
def test_names_stand_for_nemo_s_optimizers_and_defaults(name: str, given: Any, kind: Any, settings: dict[str, Any]) -> None:
    run = train(line(), optimizer=name, lr=0.1, max_steps=1, **given)
    (optimizer,) = run.optimizers
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings
    if isinstance(optimizer, Novograd):
        assert (optimizer.luc, optimizer.luc_trust) == (True, 0.5)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("fused_novograd", {}, r"'fused_novograd' is not available, because it needs NVIDIA Apex. Use 'novograd'"),
        ("fused_lamb", {}, r"'fused_lamb' is not available.* Pass a LAMB optimizer as an object"),
        ("lamb", {}, "there is no optimizer 'lamb'"),
        ("sgd", {"larc": True}, r"larc=True is not available.* Pass an optimizer with LARC as an object"),
    ],
)
def test_optimizers_of_apex_are_refused_with_what_to_use(name: str, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        train(line(), optimizer=name, lr=0.1, max_steps=1, **given)


# -- evaluation ------------------------------------------------------------------------------------


class Evaluated:
    """An evaluation of a line on three other batches, and the arguments of its functions."""

    def __init__(self, graph: Line, **arguments: Any) -> None:
        x, y = DataLayerNM.of(tiny_loader(3), ["x", "y"])()
        self.prediction: NmTensor = graph.net(x=x)
        self.loss: NmTensor = LossNM.of(nn.functional.mse_loss, ["a", "b"])(a=self.prediction, b=y)
        self.seen: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.result: Any = lambda kept: {"val_loss": torch.stack(kept["losses"]).mean()}
        self.callback = EvaluatorCallback([self.loss, self.prediction], self.gather, self.done, **arguments)

    def gather(self, values: dict[str, Any], kept: dict[str, Any]) -> None:
        self.seen.append(values)
        kept.setdefault("losses", []).append(values[self.loss.unique_name][0])

    def done(self, kept: dict[str, Any]) -> Any:
        self.kept.append(kept)
        return self.result(kept)


@pytest.fixture
def factory(tmp_path: Path) -> OldFactory:
    return OldFactory(log_dir=str(tmp_path), create_tb_writer=True)


def logged(tmp_path: Path, tag: str = "val_loss") -> list[int]:
    return [step for name, step in written(tmp_path / "tensorboard") if name == tag]


@pytest.mark.parametrize(
    ("given", "max_steps", "logged_at"),
    [
        ({"eval_step": 2}, 5, [0, 2, 4, 5]),
        ({"eval_step": 2, "eval_at_start": False}, 5, [2, 4, 5]),
        ({"eval_step": None, "eval_epoch": 2}, 9, [4, 8, 9]),  # NeMo ignores it and fails with eval_step=None
    ],
)
def test_08_every_second_step_or_epoch_and_at_the_end(
    given: dict[str, Any], max_steps: int, logged_at: list[int], factory: OldFactory, tmp_path: Path
) -> None:
    graph = line(2)
    evaluated = Evaluated(graph, tb_writer=factory.tb_writer, **given)
    train_0_10(graph, evaluated.callback, factory=factory, max_steps=max_steps)
    assert (len(evaluated.seen), len(evaluated.kept)) == (3 * len(logged_at), len(logged_at))
    assert logged(tmp_path) == logged_at
    last = sum(nn.functional.mse_loss(graph.net(x), y).item() for x, y in tiny_loader(3)) / 3
    assert numbers(tmp_path / "tensorboard", "val_loss")[-1] == pytest.approx(last)


def test_09_values_are_lists_of_one_tensor_under_unique_names_and_found_by_name_too() -> None:
    graph = line(2)
    evaluated = Evaluated(graph, eval_step=2)
    evaluated.loss.rename("evaluated")
    train_0_10(graph, evaluated.callback, max_steps=5)
    values = evaluated.seen[0]
    assert list(values) == [evaluated.loss.unique_name, evaluated.prediction.unique_name, "IS_FROM_DIST_EVAL"]
    assert values["IS_FROM_DIST_EVAL"] is False
    assert [len(values[tensor.unique_name]) for tensor in (evaluated.loss, evaluated.prediction)] == [1, 1]
    # The document promises plain names; NeMo itself has unique ones only.
    assert values["evaluated"] is values[evaluated.loss.unique_name] is values.get("evaluated")
    assert "y_pred" in values
    assert values.get("nothing", 3) == 3
    with pytest.raises(KeyError, match="no tensor 'nothing' is evaluated"):
        values["nothing"]
    assert [len(kept["losses"]) for kept in evaluated.kept] == [3, 3, 3, 3]  # each evaluation has its own dict


def test_10_none_logs_nothing_and_a_custom_function_writes_all(factory: OldFactory, tmp_path: Path) -> None:
    graph, seen = line(2), list[tuple[Any, ...]]()
    silent = Evaluated(graph, tb_writer=factory.tb_writer, eval_step=2)
    silent.result = lambda kept: None
    custom = Evaluated(
        graph,
        tb_writer=factory.tb_writer,
        tb_writer_func=lambda writer, result, step: seen.append((writer, result, step)),
        eval_step=3,
    )
    custom.result = lambda kept: ["anything"]  # NeMo's own type is a dict
    train_0_10(graph, silent.callback, custom.callback, factory=factory, max_steps=5)
    assert seen == [(factory.tb_writer, ["anything"], step) for step in (0, 3, 5)]
    assert {tag for tag, _ in written(tmp_path / "tensorboard")} == {"param/lr"}


def test_12_eval_evaluates_once_and_logs_at_step_0(factory: OldFactory, tmp_path: Path) -> None:
    graph = line(2)
    evaluated = Evaluated(graph, tb_writer=factory.tb_writer)
    before = graph.weights
    factory.eval([evaluated.callback])
    assert (len(evaluated.seen), len(evaluated.kept), logged(tmp_path)) == (3, 1, [0])
    assert graph.weights == before
    untrained = sum(nn.functional.mse_loss(0.5 * x, y).item() for x, y in tiny_loader(3)) / 3
    assert numbers(tmp_path / "tensorboard", "val_loss") == pytest.approx([untrained])


def test_wrong_arguments_functions_and_results_are_errors() -> None:
    arguments: dict[str, Any]
    for arguments in ({"eval_step": 0}, {"eval_step": None}, {"eval_epoch": 0}, {"eval_step": -1}):
        with pytest.raises(ValueError, match=r"eval_(step|epoch) must be at least 1|expected eval_step or eval_epoch"):
            Evaluated(line(), **arguments)
    factory = OldFactory()
    with pytest.raises(TypeError, match="eval accepts only EvaluatorCallbacks"):
        factory.eval([ActionCallback()])  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(ValueError, match="at least one EvaluatorCallback"):
        factory.eval([])
    with pytest.raises(TypeError, match=r"callbacks must be a list; got .* Write callbacks=\[\.\.\.\]"):
        factory.eval(Evaluated(line()).callback)  # type: ignore[arg-type]  # the mistake under test

    graph = line(2)
    with pytest.raises(TypeError, match="user_epochs_done_callback must be a function; got None"):
        EvaluatorCallback([graph.loss], print, None)  # type: ignore[arg-type]  # the mistake under test
    with pytest.raises(TypeError, match=r"eval_tensors must be a list of NmTensors, .*; got \['loss'\]"):
        EvaluatorCallback(["loss"], print, print)  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(TypeError, match="must return a dict of numbers, or None; got 3"):
        OldFactory().eval([EvaluatorCallback([graph.loss], lambda v, g: None, lambda g: 3)])  # type: ignore[arg-type,return-value]


def test_13_modules_are_in_evaluation_mode_and_no_event_is_called() -> None:
    graph, events = line(2), list[str]()
    evaluated = Evaluated(graph, eval_step=2)

    class Ear(ActionCallback):
        def on_iteration_start(self) -> None:
            events.append("start")

        def on_iteration_end(self) -> None:
            events.append("end")

    native = Recorder()
    train_0_10(graph, Ear(), evaluated.callback, native, max_steps=3)
    assert graph.net.modes == [True, *[False] * 3, True, True, *[False] * 6]
    assert events == ["start", "end"] * 3
    assert native.names.count("on_eval_start") == 3  # native callbacks have this moment


def test_13_modules_that_the_training_does_not_use_are_in_evaluation_mode_too() -> None:
    graph, judge = line(2), LineNM()
    x, _ = DataLayerNM.of(tiny_loader(3), ["x", "y"])()
    evaluated: NmTensor = judge(x=x)
    callback = EvaluatorCallback([evaluated], lambda v, g: None, lambda g: None, eval_step=9, eval_at_start=False)
    train_0_10(graph, callback, max_steps=1)
    assert judge.modes == [False] * 3
    assert judge.training


def test_two_evaluators_have_separate_results_which_reach_the_history_of_the_run() -> None:
    graph = line(2)
    one, other = Evaluated(graph, eval_step=2), Evaluated(graph, eval_step=3)
    other.callback.name = "other"
    other.result = lambda kept: {"score": np.float32(0.5)}
    run = train_0_10(graph, one.callback, other.callback, max_steps=5)
    assert [len(evaluated.kept) for evaluated in (one, other)] == [4, 3]  # after steps 0, 2, 4 and 0, 3; and at the end
    assert [step for step, _ in run.history["EvaluatorCallback/val_loss"]] == [1, 3, 5, 5]
    assert [value for _, value in run.history["other/score"]] == [0.5] * 3


def test_evaluations_do_not_change_the_bits_of_the_training() -> None:
    def trained(evaluate: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        graph = line(3, net=noisy_net())
        callbacks = [Evaluated(graph, eval_step=2).callback] if evaluate else []
        train_0_10(graph, *callbacks, factory=OldFactory(random_seed=1), max_steps=5)
        return list(graph.net.state_dict().values())

    assert all(map(torch.equal, trained(evaluate=True), trained(evaluate=False)))


class Streamed(DataLayerNM):
    """A data layer with a new iterator for each evaluation. It uses names that the base class could use, too."""

    loader, execute, defaults, type = [(torch.ones(2, 1), torch.ones(2, 1))] * 3, 1, 2, "mine"

    output_ports = ports(x=None, y=None)

    @property
    def data_iterator(self) -> Any:
        return iter(self.loader)


def test_each_evaluation_reads_the_data_iterator_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "nemo")
    graph, counts = line(2), list[int]()
    x, _ = Streamed()()
    evaluation = EvaluatorCallback(
        [graph.net(x=x)],
        lambda values, kept: kept.update(batches=kept.get("batches", 0) + 1),
        lambda kept: counts.append(kept["batches"]),
    )
    train_0_10(graph, evaluation, max_steps=2)
    assert counts == [3, 3, 3]
    assert [text.split()[0] for text in caplog.messages if "Evaluation ..." in text] == ["Doing", "Doing", "Final"]


def test_an_evaluation_that_fails_shows_its_error_and_logs_nothing(factory: OldFactory, tmp_path: Path) -> None:
    graph = line(2)
    evaluated = Evaluated(graph)

    def fail(values: dict[str, Any], kept: dict[str, Any]) -> None:
        evaluated.gather(values, kept)
        if len(kept["losses"]) == 2:
            raise ArithmeticError("on purpose")

    callback = EvaluatorCallback([evaluated.loss], fail, evaluated.done, factory.tb_writer)
    with pytest.raises(ArithmeticError, match="on purpose"):
        train_0_10(graph, callback, factory=factory, max_steps=5)
    assert logged(tmp_path) == []
    assert evaluated.kept == []
    assert graph.net.training
