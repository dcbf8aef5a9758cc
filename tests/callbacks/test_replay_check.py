"""`ReplayCheck` finds flipped bits and nondeterministic operations before the update, and changes nothing of a run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, attach, on
from cadenza.callbacks import Checkpoint, ClipGradients, Ema, ReplayCheck, StopOnNonFinite
from cadenza.errors import ReplayError, ScheduleError
from cadenza.testing import prove_resume, tiny_run, tiny_trainer
from tests.callbacks.flips import KINDS, Flip, Kind, network, same, state_of, trainer


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate": 3}, {"precision": "bf16"}, {"precision": "fp16", "accumulate": 2}],
    ids=["fp32", "short windows", "bf16", "fp16"],
)
def test_a_run_has_the_same_bits_with_and_without_the_check(arguments: dict[str, Any]) -> None:
    drawn: list[list[Any]] = [[], []]

    def run(extra: list[Any], numbers: list[Any]) -> dict[str, Tensor]:
        numpy.random.seed(0)

        @on(Callback.on_step_end)
        def draw(run: Run) -> None:
            numbers.append((random.random(), torch.rand(()).item(), numpy.random.rand(), float(run.loss or 0)))

        return state_of(trainer([ClipGradients(max_norm=0.5), Ema(0.9), draw, *extra], **arguments).fit())

    check = ReplayCheck(every=1)
    assert same(run([], drawn[0]), run([check], drawn[1]))
    assert drawn[0] == drawn[1]
    assert check.steps == list(range(1, len(drawn[0]) + 1))


def test_flipped_bits_of_each_kind_are_found_before_the_update_and_repaired_by_the_majority() -> None:
    clean = trainer([], max_epochs=8).fit()
    flips, check = Flip(), ReplayCheck(every=1, action="majority")
    run = trainer([flips, check], max_epochs=8).fit()
    found = [decision for decision in run.decisions if decision.what == "replay differed"]
    assert {kind for _, kind, _ in flips.done} == {*KINDS}
    assert [decision.data["step"] for decision in found] == [step for step, _, _ in flips.done] == list(range(1, 41))
    assert {decision.data["kind"] for decision in found} == {"the step itself was wrong"}
    assert same(state_of(clean), state_of(run))
    named = {"gradient": "gradient", "activation": "module", "buffer": "buffer", "weight": "weight"}
    for decision, (_, kind, name) in zip(found, flips.done, strict=True):
        assert name in decision.data["ranks"]["0"][named[kind]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_raises_before_the_update(kind: Kind) -> None:
    flips, steps = Flip([kind], [3]), list[int]()

    @on(Callback.on_after_optimizer_step)
    def updated(run: Run) -> None:
        steps.append(run.progress.step + 1)

    with pytest.raises(ReplayError, match=r"a repeat of step 3 differs in .*the machine gave a wrong number") as raised:
        trainer([flips, updated, ReplayCheck(every=1)]).fit()
    assert steps == [1, 2]
    assert flips.done[0][2] in str(raised.value)


def test_a_warning_continues_with_the_results_of_the_step_itself(caplog: pytest.LogCaptureFixture) -> None:
    with_check = trainer([Flip(["activation"], [3]), ReplayCheck(every=1, action="warn")]).fit()
    without = trainer([Flip(["activation"], [3])]).fit()
    assert same(state_of(with_check), state_of(without))
    assert "The run continues with the step" in caplog.text
    assert [one.data["used"] for one in with_check.decisions if one.what == "replay differed"] == ["the step"]


class Noise(nn.Module):
    """Draws from a generator that nothing puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn(inputs.shape, generator=self.generator)


@pytest.mark.parametrize("action", ["raise", "majority"])
def test_an_operation_that_is_not_deterministic_is_named_by_its_module(action: Any) -> None:
    model = nn.Sequential(network(), Noise(), nn.Linear(3, 3))
    with pytest.raises(ReplayError, match=r"the output of module '1' \(Noise\).*the gradient of '2.bias'; an operation is not"):
        trainer([ReplayCheck(every=4, action=action)], model=model).fit()


class Counting(nn.Module):
    """Changes its attributes, replaces a buffer, writes to its input and clamps its weight with each call."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history: list[Tensor] = []
        self.counts = {"calls": torch.zeros(())}
        self.total = torch.zeros(())
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(inputs.detach().sum())
        self.counts["calls"].add_(1)
        self.total += len(self.history) + self.counts["calls"]
        self.latest = self.total + 1
        self.seen = self.seen + inputs.detach().sum()
        self.scale.data.clamp_(-0.9, 0.9)
        inputs.add_(self.calls + self.latest / 100)
        return inputs * self.scale


def test_what_a_forward_pass_changes_is_put_back() -> None:
    def run(*callbacks: Any) -> tuple[tuple[float, ...], dict[str, Tensor]]:
        counting = Counting()
        done = trainer(callbacks, model=nn.Sequential(counting, network()), accumulate=2).fit()
        numbers = counting.calls, len(counting.history), counting.counts["calls"].item(), counting.total.item()
        return numbers, state_of(done)

    check = ReplayCheck(every=1)
    (calls, state), (others, other) = run(), run(check)
    assert calls == others == (10, 10, 10.0, 110.0)
    assert same(state, other)
    assert check.steps == [1, 2, 3, 4, 5, 6]


def test_weights_of_batches_and_parameters_of_the_loss_are_repeated() -> None:
    centre = nn.Parameter(torch.zeros(3))

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs, targets = batch
        weight = (targets > 0).sum().float()
        return {"loss": nn.functional.cross_entropy(model(inputs) - centre, targets), "weight": weight}

    model, check = network(), ReplayCheck(every=1)
    made = trainer([check], model=model, accumulate=2)
    made = Trainer(
        model,
        torch.optim.SGD([*model.parameters(), centre], 0.1, fused=False),
        made.loader,
        loss,
        max_epochs=1,
        accumulate=2,
        seed=1,
        driver="single",
        device="cpu",
        progress=False,
        callbacks=[check],
    )
    made.fit()
    assert check.steps == [1, 2, 3]


def test_only_the_steps_of_the_schedule_are_repeated() -> None:
    calls = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(1)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    check = ReplayCheck(every="4 steps")
    tiny_run(compute_loss=loss, batches=9, callbacks=[check])
    assert check.steps == [4, 8]
    assert len(calls) == 9 + 2


def test_a_resumed_run_checks_the_same_steps() -> None:
    def make(directory: Path) -> Trainer:
        return trainer([ReplayCheck(every=3), Checkpoint(every="2 steps")], directory=directory)

    prove_resume(make, at=[4], in_process=True)


def test_a_step_that_cannot_be_repeated_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    @on(Callback.on_before_backward, at=2)
    def replace(run: Run, outputs: Any) -> None:
        outputs["loss"] = outputs["loss"] * 2

    check = ReplayCheck(every=1)
    run = tiny_run(callbacks=[StopOnNonFinite("skip"), replace, check], batches=4)
    assert check.steps == [1, 3, 4]
    assert "a callback replaced the loss" in run.why("not checked")
    assert "ReplayCheck did not check step 2" in caplog.text


def test_a_step_without_an_update_leaves_no_trace() -> None:
    @on(Callback.on_batch_start, at=2)
    def skip(run: Run, batch: Any) -> None:
        run.skip_batch("for the test")

    check = ReplayCheck(every="2 steps")
    run = tiny_run(callbacks=[skip, check], batches=5)
    assert check.steps == [4]
    assert not any(module._forward_hooks for module in run.model.modules())


def test_gradients_that_a_callback_changed_are_attributed_to_it() -> None:
    @on(Callback.on_after_backward)
    def halve(run: Run, outputs: Any) -> None:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    with pytest.raises(ReplayError, match="or a callback changed gradients: halve"):
        tiny_run(callbacks=[halve, ReplayCheck(every=1)])


def test_code_of_the_user_that_computes_the_losses_cannot_be_repeated() -> None:
    with pytest.raises(ValueError, match="in a step_fn only your code computes them"):
        tiny_run(step_fn=lambda run, batch: {"loss": torch.zeros(())}, callbacks=[ReplayCheck()])
    with pytest.raises(ValueError, match="in a loop of your own only your code"):
        for _ in tiny_trainer(callbacks=[ReplayCheck()]).steps():
            pass
    model = nn.Linear(1, 1)
    loop = attach(model, torch.optim.SGD(model.parameters(), 0.1), progress=False, callbacks=[ReplayCheck()])
    with pytest.raises(ValueError, match="in a loop of your own only your code"), loop:
        pass


def test_wrong_arguments_are_errors() -> None:
    with pytest.raises(ValueError, match="action must be one of 'raise', 'warn', 'majority'; got 'stop'"):
        ReplayCheck(action="stop")  # type: ignore[arg-type]
    for every in ("1 epoch", "50 samples", lambda run: True):
        with pytest.raises(ScheduleError, match=r"so ReplayCheck\(every=...\) needs an interval in steps"):
            ReplayCheck(every=every)
