"""`Trainer(compile="step")`: the step as one compiled function, and the steps that run uncompiled.

A graph takes seconds to compile with inductor, so most tests use a back end that runs torch's own operations.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import (
    Checkpoint,
    ClipGradients,
    Ema,
    Evaluate,
    LearningRate,
    LogTraining,
    ScheduleValue,
    StopOnNonFinite,
    Warmup,
)
from cadenza.compiled.step import CompiledStep
from cadenza.engine.session import session_of
from cadenza.testing import tiny_trainer

# Importing inductor warns of torch's own functions.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning"),
]

PLAIN = {"step": True, "backend": "eager"}

Batch = tuple[Tensor, Tensor]


def batches(number: int, size: int = 12, last: int | None = None) -> list[Batch]:
    """Return batches of 8 numbers and a class; the last one of another size."""
    random = torch.Generator().manual_seed(1)
    sizes = [size] * number if last is None else [size] * (number - 1) + [last]
    return [(torch.randn(n, 8, generator=random), torch.randint(0, 3, (n,), generator=random)) for n in sizes]


def network(*, norm: bool = False, dropout: float = 0.0) -> nn.Module:
    """Return a small network, always with the same weights."""
    torch.manual_seed(0)
    between = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(8, 16), between, nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def trainer(model: nn.Module | None = None, optimizer: Any = None, loader: Any = None, **arguments: Any) -> Trainer:
    """Return a trainer of the network."""
    arguments.setdefault("compute_loss", supervised(nn.CrossEntropyLoss()))
    return tiny_trainer(
        model=network() if model is None else model,
        optimizer=optimizer or (lambda held: torch.optim.AdamW(held, 1e-2)),
        loader=batches(10) if loader is None else loader,
        seed=3,
        **arguments,
    )


def difference(run: Run, other: Run) -> float:
    """Return the largest difference of a weight, a buffer, or the optimizers' state."""

    def tensors(run: Run) -> list[Tensor]:
        states = [state for optimizer in run.optimizers for state in optimizer.state_dict()["state"].values()]
        return [*run.model.state_dict().values(), *(value for state in states for value in state.values())]

    pairs = zip(tensors(run), tensors(other), strict=True)
    return max((mine.double() - theirs.double()).abs().max().item() for mine, theirs in pairs)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps, counted from 1, of which a batch is computed by the compiled function; each batch once."""
    steps: list[int] = []
    computed = CompiledStep._computed

    def counted(self: CompiledStep, model: nn.Module, batch: Any) -> Any:
        steps.append(self._session.progress.step + 1)
        return computed(self, model, batch)

    monkeypatch.setattr(CompiledStep, "_computed", counted)
    return steps


# -- the same training -----------------------------------------------------------------------------


def test_a_thousand_steps_differ_from_uncompiled_ones_by_rounding(compiled: list[int], capsys: Any) -> None:
    def run(compile: Any) -> Run:
        schedule = LearningRate(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000))
        clip = ClipGradients(0.3, log="norm", log_every=1)
        given: list[Any] = [clip, Warmup("20 steps"), schedule, Ema(decay=0.9), LogTraining("10 steps")]
        optimizer: Callable[[Any], Any] = lambda held: torch.optim.AdamW(held, 1e-3)  # noqa: E731
        return trainer(optimizer=optimizer, epochs=100, callbacks=given, compile=compile).fit()

    run_compiled, plain = run("step"), run(False)
    assert compiled == list(range(2, 1001))
    assert difference(run_compiled, plain) <= 1e-6
    for name in ("norm", "train/loss", "train/lr"):
        ours, theirs = run_compiled.history[name], plain.history[name]
        assert [step for step, _ in ours] == [step for step, _ in theirs]
        assert [value for _, value in ours] == pytest.approx([value for _, value in theirs], rel=1e-4)
    assert re.search(r"compile: step 2 is compiled now.*\n.*compile: it took \d", capsys.readouterr().out)


@pytest.mark.parametrize(
    "make",
    [
        lambda held: torch.optim.SGD(held, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-2),
        lambda held: torch.optim.Adam(held, 1e-3, weight_decay=0.1, amsgrad=True),
    ],
    ids=["SGD", "Adam"],
)
def test_inductor_decays_weights_as_torch_does(make: Callable[[Any], Any], compiled: list[int]) -> None:
    runs = [trainer(optimizer=make, epochs=4, compile=compile).fit() for compile in ("step", False)]
    assert compiled == list(range(2, 41))
    assert difference(*runs) <= 1e-6


def test_accumulation_groups_frozen_and_unused_parameters_and_running_statistics(compiled: list[int]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.left = network(norm=True), nn.Linear(2, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.used(inputs)  # type: ignore[no-any-return]

    def optimizer(held: Any) -> list[torch.optim.Optimizer]:
        first, others = held.split(lambda name, parameter: name.startswith("used.0"))
        return [
            torch.optim.SGD(
                [{"params": first, "lr": 0.1}, {"params": others[:2], "lr": 0.01, "momentum": 0.5}], 0.1, momentum=0.9
            ),
            torch.optim.AdamW(others[2:], 1e-3),
        ]

    def run(compile: Any) -> Run:
        model = Two()
        model.used.get_parameter("4.bias").requires_grad_(False)
        clip = ClipGradients(0.2, parameters="used.4*")
        loader = batches(11, last=5)
        return trainer(model, optimizer, loader, epochs=5, accumulate=3, callbacks=[clip], compile=compile).fit()

    run_compiled, plain = run(PLAIN), run(False)
    assert {step: compiled.count(step) for step in (1, 2, 3, 4, 5)} == {1: 0, 2: 3, 3: 3, 4: 1, 5: 3}  # 4: 12, then 5 samples
    assert difference(run_compiled, plain) <= 1e-6
    assert len(run_compiled.optimizers[1].state) == len(plain.optimizers[1].state) == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_outputs_weights_counts_and_skipped_batches_are_those_of_uncompiled_steps(precision: str, compiled: list[int]) -> None:
    seen: list[Any] = []

    def compute_loss(model: nn.Module, batch: Batch) -> dict[str, Any]:
        inputs, targets = batch
        predictions = model(inputs)
        loss = nn.functional.cross_entropy(predictions.float(), targets)
        return {"loss": loss, "predictions": predictions, "weight": (targets > 0).sum(), "tokens": len(targets)}

    @on(Callback.on_batch_start)
    def skip(run: Run, batch: Batch) -> None:
        if run.progress.batch % 7 == 4:
            run.skip_batch("a test")

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        window = run.window
        loss = run.outputs["loss"].item() if "loss" in run.outputs else 0.0
        numbers = [*map(float, window.weights), float(window.loss_scale), run.progress.tokens, run.outputs.get("tokens", 0)]
        seen.append([loss, window.seen, *numbers])

    def run(compile: Any) -> Run:
        arguments: dict[str, Any] = {"compute_loss": compute_loss, "precision": precision, "callbacks": [skip, look]}
        return trainer(epochs=3, accumulate=2, compile=compile, **arguments).fit()

    run_compiled = run(PLAIN)
    ours, seen = seen, []
    plain = run(False)
    assert len(compiled) > 15
    for mine, others in zip(ours, seen, strict=True):
        assert mine == pytest.approx(others, abs=1e-5 if precision == "fp32" else 1e-2)
    assert difference(run_compiled, plain) <= (1e-6 if precision == "fp32" else 2e-2)


# -- after a resume --------------------------------------------------------------------------------


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, compiled: list[int]) -> None:
    """Dropout, batches of two shapes, a listener that comes and goes, and a checkpoint between them."""

    def run(place: str, steps: int, *, resume: bool = False) -> Run:
        model = network(norm=True, dropout=0.3)
        look = on(Callback.on_before_optimizer_step, every="7 steps")(lambda run: None)
        given = {"directory": tmp_path / place, "callbacks": [Checkpoint(every="4 steps"), look], "compile": "step"}
        made = trainer(model, loader=batches(6, last=5), steps=steps, **given)
        return made.fit(resume="auto") if resume else made.fit()

    whole = run("whole", 30)
    steps = list(compiled)
    assert steps == [step for step in range(2, 31) if step % 7 and step % 6]
    run("cut", 12)
    compiled.clear()
    resumed = run("cut", 30, resume=True)
    assert compiled == [step for step in steps if step > 12]
    assert difference(resumed, whole) == 0


def test_a_checkpoint_continues_compiled_or_not(tmp_path: Path, compiled: list[int]) -> None:
    def run(steps: int, compile: Any) -> Run:
        return trainer(steps=steps, directory=tmp_path, callbacks=[Checkpoint(every="5 steps")], compile=compile).fit(
            resume="auto"
        )

    run(5, False)
    run(10, PLAIN)
    last = run(15, False)
    assert compiled == list(range(6, 11))
    assert difference(last, trainer(steps=15).fit()) <= 1e-6


# -- steps that are not compiled -------------------------------------------------------------------


def test_a_listener_on_a_schedule_sees_gradients_in_its_steps_and_no_other_step_is_split(compiled: list[int]) -> None:
    seen: list[tuple[int, bool]] = []

    @on(Callback.on_before_zero_grad, every="10 steps")
    def look(run: Run) -> None:
        seen.append((run.progress.step + 1, all(held.grad is not None for held in run.window.parameters)))

    made = trainer(epochs=4, callbacks=[look, Evaluate(batches(2), every="5 steps")], compile=PLAIN)
    assert "compile: look listens to on_before_zero_grad every 10 steps: such a step runs uncompiled" in str(made.plan())
    made.fit()
    assert seen == [(10, True), (20, True), (30, True), (40, True)]
    assert compiled == [step for step in range(2, 41) if step % 10]


def test_the_plan_warns_of_a_listener_in_each_step(compiled: list[int]) -> None:
    made = trainer(epochs=1, callbacks=[StopOnNonFinite()], compile=PLAIN)
    headline, *lines = str(made.plan()).splitlines()
    assert headline.endswith("compiled step, seed 3")
    assert any(line.startswith("! compile: StopOnNonFinite listens to on_before_backward in each step") for line in lines)
    assert made.fit().outcome is not None
    assert compiled == []


def test_a_step_that_cannot_be_compiled_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    def reads(model: nn.Module, batch: Batch) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return loss * 2 if loss.item() > 100 else loss

    def hooked() -> nn.Module:
        model = network()
        model.get_parameter("0.bias").register_hook(lambda gradient: gradient * 2)
        return model

    cases: list[tuple[str, dict[str, Any]]] = [
        ("the step cannot be compiled: ", {"compute_loss": reads}),
        ("a parameter has a hook", {"model": hooked()}),
        ("batches of another shape than the first are not compiled", {"loader": batches(4, last=3)}),
    ]
    for text, arguments in cases:
        caplog.clear()
        made = trainer(epochs=2, compile=PLAIN, **arguments)
        plain = trainer(epochs=2, **{**arguments, **({"model": hooked()} if "model" in arguments else {})})
        assert difference(made.fit(), plain.fit()) <= 1e-6
        assert [text in record.getMessage() for record in caplog.records if "compile=" in record.getMessage()] == [True]


def test_settings_that_change_compile_again_and_a_rate_does_not(compiled: list[int], capsys: Any) -> None:
    @on(Callback.on_step_end)
    def change(run: Run) -> None:
        run.optimizers[0].param_groups[0]["lr"] *= 0.9
        if run.progress.step % 4 == 0:
            run.optimizers[0].param_groups[0]["weight_decay"] *= 2

    runs = [trainer(steps=26, callbacks=[change], compile=compile).fit() for compile in (PLAIN, False)]
    assert capsys.readouterr().out.count("is compiled now") == 5
    assert compiled == list(range(2, 18))
    assert difference(*runs) <= 1e-6


class Scaled(nn.Module):
    """A network with a factor, and a count of its calls."""

    def __init__(self, *, counts: bool = False) -> None:
        super().__init__()
        self.inner, self.factor, self.calls, self.counts = network(norm=True), 1.0, 0, counts

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.counts
        return self.inner(inputs) * self.factor  # type: ignore[no-any-return]


@dataclass
class Pair:
    """A batch of a class."""

    inputs: Tensor
    targets: Tensor


CHANGES: dict[str, Callable[[Run, Any], Any]] = {
    "an attribute": lambda run, loss: setattr(run.model, "factor", 0.3),
    "the mode of a layer": lambda run, loss: run.model.get_submodule("inner.1").eval(),
    "a hook": lambda run, loss: run.model.get_submodule("inner.2").register_forward_hook(lambda layer, inputs, out: out * 3),
    "a value of a closure": lambda run, loss: loss.update(factor=-0.5),
    "an attribute of the loss": lambda run, loss: setattr(loss["module"], "label_smoothing", 0.5),
    "a buffer of the loss": lambda run, loss: setattr(loss["module"], "weight", torch.tensor([5.0, 0.1, 0.1])),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_value_that_a_hook_changes_is_the_one_that_trains(what: str, compiled: list[int]) -> None:
    def run(compile: Any) -> Run:
        loss: dict[str, Any] = {"module": nn.CrossEntropyLoss(weight=torch.ones(3)), "factor": 1.0}
        change = on(Callback.on_step_start)(lambda run: CHANGES[what](run, loss) if run.progress.step == 10 else None)

        def compute_loss(model: nn.Module, batch: Pair) -> Tensor:
            return loss["module"](model(batch.inputs), batch.targets) * loss["factor"]  # type: ignore[no-any-return]

        loader = [Pair(*batch) for batch in batches(10)]
        arguments: dict[str, Any] = {"compute_loss": compute_loss, "callbacks": [change], "compile": compile}
        return trainer(Scaled(), lambda held: torch.optim.SGD(held, 0.05), loader, steps=20, **arguments).fit()

    run_compiled, plain = run(PLAIN), run(False)
    assert compiled == list(range(2, 21))
    assert difference(run_compiled, plain) <= 1e-6


@pytest.mark.parametrize("way", ["an attribute", "a count in forward", "the limit of torch"])
def test_values_that_change_in_each_step_end_the_compilation_in_a_resumed_run_too(
    way: str, tmp_path: Path, compiled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    @on(Callback.on_step_start)
    def anneal(run: Run) -> None:
        if way != "a count in forward":
            run.model.factor = 1.0 + run.progress.step // 3 / 10  # type: ignore[assignment]

    def run(place: str, steps: int, compile: Any) -> Run:
        given = {"directory": tmp_path / place, "callbacks": [anneal, Checkpoint(every="1 steps")], "compile": compile}
        model = Scaled(counts=way == "a count in forward")
        return trainer(model, lambda held: torch.optim.SGD(held, 0.01), steps=steps, **given).fit(resume="auto")

    with torch._dynamo.config.patch(recompile_limit=2 if way == "the limit of torch" else 8):
        whole, plain = run("whole", 20, PLAIN), run("plain", 20, False)
        steps = list(compiled)
        assert [record.getMessage().count("compile='step'") for record in caplog.records].count(1) == 1
        assert steps == list(range(2, steps[-1] + 1))
        assert steps[-1] < 18
        assert difference(whole, plain) <= 1e-6
        assert whole.model.calls == plain.model.calls
        for cut in (6, 14) if way == "an attribute" else (16,):  # what torch counts begins again with each process
            run(f"cut {cut}", cut, PLAIN)
            compiled.clear()
            resumed = run(f"cut {cut}", 20, PLAIN)
            assert compiled == [step for step in steps if step > cut]
            assert difference(resumed, whole) == 0


def test_a_norm_on_a_schedule_compiles_once(compiled: list[int], capsys: Any) -> None:
    def run(compile: Any) -> Run:
        clip = ClipGradients(0.5)
        schedule = ScheduleValue(clip, "max_norm", {0: 0.5, 30: 0.1})
        return trainer(steps=12, callbacks=[clip, schedule], compile=compile).fit()

    run_compiled, plain = run(PLAIN), run(False)
    assert compiled == list(range(2, 13))
    assert capsys.readouterr().out.count("is compiled now") == 1
    assert difference(run_compiled, plain) <= 1e-6


@pytest.mark.parametrize("is_used", [True, False], ids=["zero at first", "never"])
def test_an_optimizer_without_a_gradient_is_reported_and_leaves_the_same_steps_compiled(
    is_used: bool, tmp_path: Path, compiled: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.down, self.up = network(dropout=0.3), nn.Linear(3, 2), nn.Linear(2, 3)
            nn.init.zeros_(self.up.weight)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.inner(inputs)
            return outputs + self.up(self.down(outputs)) if is_used else outputs

    def optimizers(held: Any) -> list[torch.optim.Optimizer]:
        down, others = held.split(lambda name, parameter: name.startswith("down"))
        return [torch.optim.AdamW(others, 1e-2), torch.optim.AdamW(down, 1e-2)]

    def run(place: str, steps: int) -> Run:
        given = {"directory": tmp_path / place, "callbacks": [Checkpoint(every="2 steps")], "compile": PLAIN}
        return trainer(Adapted(), optimizers, steps=steps, **given).fit(resume="auto")

    whole = run("whole", 20)
    steps = list(compiled)
    assert steps == list(range(2, 21))
    assert caplog.text.count("no update of run.optimizers[1] (AdamW) has had a gradient") == (not is_used)
    run("cut", 6)
    compiled.clear()
    assert difference(run("cut", 20), whole) == 0
    assert compiled == [step for step in steps if step > 6]


def test_evaluations_and_hooks_compute_without_compilation(compiled: list[int]) -> None:
    losses: list[float] = []

    @on(Callback.on_step_end)
    def compute(run: Run) -> None:
        compute_loss = session_of(run).compute
        losses.append(compute_loss(run.model, run.batch)["loss"].item())

    run = trainer(steps=5, callbacks=[compute, Evaluate(batches(2), every=2)], compile=PLAIN).fit()
    assert compiled == [2, 3, 4, 5]
    assert len(losses) == 5
    assert run.progress.step == 5


def test_what_is_not_supported_is_refused_when_the_trainer_is_made() -> None:
    def step(run: Run, batch: Batch) -> Tensor:
        raise NotImplementedError

    model = nn.Linear(1, 1)
    refused: list[tuple[str, dict[str, Any]]] = [
        ("a step_fn, and the loop of cadenza.attach, do the step themselves", {"step_fn": step}),
        ("precision='fp16'", {"precision": "fp16"}),
        ("got RMSprop", {"optimizer": torch.optim.RMSprop(model.parameters()), "model": model}),
    ]
    for text, arguments in refused:
        with pytest.raises(ValueError, match=f"compile='step'.*{re.escape(text)}.*compile=True compiles the model alone"):
            tiny_trainer(compile="step", **arguments)
    with pytest.raises(ValueError, match="got Adagrad"):
        tiny_trainer(compile="step", optimizer=torch.optim.Adagrad).fit()
    with pytest.raises(TypeError, match=r"trainer\.steps"):
        tiny_trainer(compile="step").steps()
    with pytest.raises(ValueError, match="compile must be True, 'step', one of the modes"):
        tiny_trainer(compile="steps")
