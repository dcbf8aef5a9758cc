"""The learning rate policies and the optimizers of NeMo, compared with their formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza.compat.nemo.backends.pytorch.optimizers import AdamW, Novograd, master_params
from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.utils import lr_policies
from tests.compat.nemo.graphs import line

# -- policies -----------------------------------------------------------------------------------------


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


def test_policies_by_name() -> None:
    policy = lr_policies.get_lr_policy("CosineAnnealing", total_steps=4, min_lr=0.2)
    assert policy(1.0, 2, 0) == pytest.approx(0.6)
    assert len(lr_policies.get_all_lr_classes()) == 9
    with pytest.raises(ValueError, match=r"there is no policy 'CosineAnealing'. Did you mean 'CosineAnnealing'\?"):
        lr_policies.get_lr_policy("CosineAnealing")


def test_wrong_policies_are_errors() -> None:
    with pytest.raises(ValueError, match="expected warmup_steps or warmup_ratio; got both"):
        lr_policies.CosineAnnealing(10, warmup_steps=1, warmup_ratio=0.1)
    with pytest.raises(ValueError, match="hold_ratio needs total_steps; got None"):
        lr_policies.WarmupHoldPolicy(hold_ratio=0.1)
    with pytest.raises(ValueError, match=r"the initial learning rate 0\.1 is below min_lr=0\.2"):
        lr_policies.CosineAnnealing(10, min_lr=0.2)(0.1, 0, 0)


# -- optimizers ---------------------------------------------------------------------------------------

START = [0.5, -2.0, 1.5]
GRADIENTS = [[1.0, -0.5, 0.25], [-0.5, -0.5, 2.0], [0.125, 0.0, -1.0], [0.5, 1.0, 0.5]]


def moved(optimizer: torch.optim.Optimizer, weight: Tensor) -> list[float]:
    for gradient in GRADIENTS:
        weight.grad = torch.tensor(gradient, dtype=weight.dtype)
        optimizer.step()
    return list(weight.tolist())


def adam_w(lr: float, beta1: float, beta2: float, eps: float, decay: float, amsgrad: bool) -> list[float]:
    weights, first, second, largest = list(START), [0.0] * 3, [0.0] * 3, [0.0] * 3
    for step, gradient in enumerate(GRADIENTS, start=1):
        rate = lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        for i, g in enumerate(gradient):
            first[i] = beta1 * first[i] + (1 - beta1) * g
            second[i] = beta2 * second[i] + (1 - beta2) * g * g
            largest[i] = max(largest[i], second[i])
            root = math.sqrt(largest[i] if amsgrad else second[i])
            weights[i] -= rate * (decay * weights[i] + first[i] / (root + eps))
    return weights


def novograd(
    lr: float, beta1: float, beta2: float, decay: float, luc: float | None = None, averaging: bool = False
) -> list[float]:
    weights, first, second = list(START), [0.0] * 3, 0.0
    for gradient in GRADIENTS:
        norm = sum(g * g for g in gradient)
        second = norm if second == 0 else beta2 * second + (1 - beta2) * norm
        for i, g in enumerate(gradient):
            first[i] = beta1 * first[i] + (g / (math.sqrt(second) + 1e-8) + decay * weights[i]) * (
                1 - beta1 if averaging else 1
            )
        length = math.sqrt(sum(w * w for w in weights)) / (math.sqrt(sum(m * m for m in first)) + 1e-8)
        rate = lr if luc is None else min(luc * length, lr)
        weights = [w - rate * m for w, m in zip(weights, first, strict=True)]
    return weights


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
def test_names_stand_for_nemo_s_optimizers_and_defaults(
    name: str, given: dict[str, Any], kind: type[Any], settings: dict[str, Any]
) -> None:
    run = NeuralModuleFactory().train([line().loss], name, {"lr": 0.1, "max_steps": 1, **given})
    (optimizer,) = run.optimizers
    assert type(optimizer) is kind
    assert {key: optimizer.param_groups[0][key] for key in settings} == settings
    if isinstance(optimizer, Novograd):
        assert (optimizer.luc, optimizer.luc_trust) == (True, 0.5)


def test_settings_of_other_optimizers_have_no_effect_and_a_warning_names_them(caplog: pytest.LogCaptureFixture) -> None:
    params = {"lr": 0.1, "max_steps": 1, "betas": (0.5, 0.9), "luc": True, "larc": False, "amp_min_loss_scale": 1.0}
    NeuralModuleFactory().train([line().loss], "sgd", params)
    assert "no effect on sgd: betas, luc, larc, amp_min_loss_scale" in caplog.text


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
        NeuralModuleFactory().train([line().loss], name, {"lr": 0.1, "max_steps": 1, **given})
