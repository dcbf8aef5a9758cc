"""Histograms: the very weights and gradients of their step. Summary: a table of the model, which disturbs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from cadenza import Callback, Histogram, Hooks, Run, on
from cadenza.callbacks import Checkpoint, ClipGradients, Evaluate, Histograms, Summary
from cadenza.callbacks.summary import Layer
from cadenza.hooks.dispatch import hooks_of
from cadenza.records.record import Record
from cadenza.sinks import TensorBoard
from cadenza.status.plain import same
from cadenza.testing import tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.callbacks.parts import two_layers, two_optimizers

Seen = dict[tuple[int, str], list[float]]


def logged(*callbacks: Callback, **arguments: Any) -> Seen:
    """Return the values of each histogram, by step and name."""
    seen: Seen = {}

    @on(Callback.on_log)
    def look(run: Run, record: Record) -> None:
        for name, value in record.media.items():
            assert isinstance(value, Histogram)
            seen[record.step, name] = value.values.flatten().tolist()

    tiny_run(callbacks=[*callbacks, look], **arguments)
    return seen


def test_parameters_are_those_after_the_step_and_gradients_those_that_the_optimizer_got_in_it() -> None:
    expected: dict[tuple[int, str], Any] = {}
    before: list[float] = []

    @on(Callback.on_step_start)
    def begin(run: Run) -> None:
        before[:] = run.model.get_parameter("weight").flatten().tolist()

    @on(Callback.on_step_end, every=3)
    def end(run: Run) -> None:
        [after] = run.model.get_parameter("weight").flatten().tolist()
        expected[run.progress.step, "gradients/weight"] = [pytest.approx((before[0] - after) / 0.1, rel=1e-4)]
        expected[run.progress.step, "parameters/weight"] = [after]

    seen = logged(begin, end, Histograms("3 steps", parameters="weight", gradients=True), steps=7)
    assert seen == expected
    assert list(seen) == [(step, f"{kind}/weight") for step in (3, 6) for kind in ("gradients", "parameters")]
    assert list(logged(Histograms(parameters="bias"), epochs=2)) == [(5, "parameters/bias"), (10, "parameters/bias")]


def test_gradients_of_a_step_of_several_batches_are_complete() -> None:
    histograms = Histograms("2 steps", gradients=True, weights=False)
    together = torch.linspace(0, 1, 8).reshape(1, 8, 1)
    seen = logged(histograms, loader=list(together[0].split(2)), accumulate=4, compute_loss=square, epochs=2)
    whole = logged(histograms, loader=list(together), compute_loss=square, epochs=2)
    assert seen == {key: pytest.approx(values, rel=1e-5) for key, values in whole.items()}
    assert list(seen) == [(2, "gradients/weight"), (2, "gradients/bias")]


def square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch) ** 2).mean()
    return loss


def test_what_clips_before_it_is_seen_and_what_clips_after_it_is_not() -> None:
    def norm(*callbacks: Callback) -> float:
        return float(torch.tensor(list(logged(*callbacks, steps=1).values())).norm())

    histograms = Histograms("1 step", gradients=True, weights=False)
    assert norm(ClipGradients(max_norm=0.1), histograms) == pytest.approx(0.1, rel=1e-4)
    assert norm(histograms, ClipGradients(max_norm=0.1)) > 0.5


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["0.weight", "0.bias", "1.weight"]),
        ("1.*", ["1.weight", "1.bias"]),
        (["0.weight", "*bias"], ["0.weight", "0.bias", "1.bias"]),
        (lambda name, parameter: parameter.ndim == 2, ["0.weight", "1.weight"]),
    ],
)
def test_the_parameters_are_chosen_by_pattern_or_function(chosen: Any, names: list[str]) -> None:
    model = two_layers()
    model.get_parameter("1.bias").requires_grad_(False)  # it has no gradient of which there could be a histogram
    seen = logged(Histograms("1 step", parameters=chosen, gradients=True), model=model, steps=1)
    expected = [f"gradients/{name}" for name in names if name != "1.bias"] + [f"parameters/{name}" for name in names]
    assert [name for _, name in seen] == expected


def test_several_updates_in_a_step_give_each_parameter_its_own_gradients() -> None:
    applied: list[float] = []

    def turns(run: Run, batch: Any) -> Tensor:
        for optimizer in run.optimizers:
            loss = square(run.model, batch[0])
            run.backward(loss)  # adds to the gradients of both
            [parameter] = optimizer.param_groups[0]["params"]
            before = parameter.item()
            run.update(optimizer)
            applied.append((before - parameter.item()) / 0.1)
        return loss.detach()

    histograms = Histograms("2 steps", gradients=True, weights=False)
    seen = logged(histograms, step_fn=turns, optimizer=two_optimizers, steps=3)
    assert list(seen) == [(2, "gradients/weight"), (2, "gradients/bias")]
    assert [value for values in seen.values() for value in values] == pytest.approx(applied[2:4], rel=1e-4)


def test_a_continued_run_has_them_at_the_same_steps(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    look = on(Callback.on_log)(lambda run, record: seen.extend((record.step, name) for name in record.media))
    for steps in (2, 4, 7):
        callbacks = [Histograms("3 steps", parameters="bias", gradients=True), Checkpoint(every="1 step"), look]
        tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")
    assert seen == [(step, f"{kind}/bias") for step in (3, 6) for kind in ("gradients", "parameters")]


def test_in_other_steps_nothing_of_it_is_called() -> None:
    hooks = Hooks([Histograms("1000 steps", gradients=True)])
    assert {moment.__name__ for moment in hooks.by_moment} == {"on_fit_start", "on_before_optimizer_step", "on_step_end"}
    run = tiny_run(callbacks=[histograms := Histograms("4 steps", gradients=True)], steps=9)
    calls = {listener.moment.__name__: listener.calls for heard in hooks_of(run).by_moment.values() for listener in heard}
    assert calls == {"on_fit_start": 0, "on_before_optimizer_step": 2, "on_step_end": 2}  # unfiltered ones are not counted
    assert histograms.gradients is not None
    assert str(histograms.gradients) == "every 4 steps"


def test_tensorboard_shows_every_value(tmp_path: Path) -> None:
    run = tiny_run(model=two_layers(), callbacks=[Histograms("2 steps", gradients=True), TensorBoard(tmp_path)], steps=2)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert len(events.Tags()["histograms"]) == 8
    [event] = events.Histograms("parameters/0.weight")
    weights = run.model.get_parameter("0.weight")
    counted = event.histogram_value
    assert (event.step, counted.num) == (2, 3)
    assert (counted.min, counted.max) == (weights.min().item(), weights.max().item())


# -- Summary: what is shown ---------------------------------------------------------------------------


Lines = pytest.CaptureFixture[str]


class Net(nn.Module):
    """Layers inside layers, one shared, one frozen, one never called, and an output of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
        self.rnn = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 1)
        self.same_head = self.head
        self.idle = nn.Linear(5, 5)
        self.body[0].requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.body(inputs).unsqueeze(1))
        output: Tensor = self.same_head(hidden[:, 0])
        return output


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def shown(capsys: Lines) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_table_has_a_row_for_each_layer(capsys: Lines) -> None:
    summary = Summary()
    tiny_run(model=net(), callbacks=[summary], steps=1, batches=1)
    assert summary.layers == [
        Layer("", "Net", ((2, 1),), 131, 123),
        Layer("body", "Sequential", ((2, 4),), 16, 8),
        Layer("body.0", "Linear", ((2, 4),), 8, 0),
        Layer("body.1", "Sequential", ((2, 4),), 8, 8),
        Layer("body.1.0", "BatchNorm1d", ((2, 4),), 8, 8),
        Layer("body.1.1", "Dropout", ((2, 4),), 0, 0),
        Layer("rnn", "GRU", ((2, 1, 3), (1, 2, 3)), 81, 81),
        Layer("head", "Linear", ((2, 1),), 4, 4),
        Layer("idle", "Linear", (), 30, 30),
    ]
    lines = shown(capsys)
    assert lines[:4] == [
        "layer    kind         output                parameters  trainable",
        "model    Net          (2, 1)                       131        123",
        "  body   Sequential   (2, 4)                        16          8",
        "    0    Linear       (2, 4)                         8          0",
    ]
    assert lines[7:9] == [
        "  rnn    GRU          (2, 1, 3), (1, 2, 3)          81         81",
        "  head   Linear       (2, 1)                         4          4",
    ]


def test_memory_is_that_of_parameters_gradients_optimizers_and_buffers(capsys: Lines) -> None:
    model = nn.Sequential(nn.Linear(1, 2**17, bias=False), nn.BatchNorm1d(2**17), nn.Linear(2**17, 1, bias=False))
    model[0].requires_grad_(False)
    tiny_run(model=model, optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.1), callbacks=[Summary()], steps=1)
    mebibyte = 2**17 * 4 / 2**20
    assert shown(capsys)[-1] == (
        f"MiB: parameters {4 * mebibyte:.2f}, gradients {3 * mebibyte:.2f}, optimizers {6 * mebibyte:.2f}, "
        f"buffers {2 * mebibyte:.2f}, together {15 * mebibyte:.2f}"
    )


def test_depth_leaves_out_rows_and_counts_what_is_in_them(capsys: Lines) -> None:
    for depth, names in [(0, [""]), (1, ["", "body", "rnn", "head", "idle"]), (None, 9)]:
        summary = Summary(depth)
        tiny_run(model=net(), callbacks=[summary], steps=1)
        assert names in ([layer.name for layer in summary.layers], len(summary.layers))
        assert summary.layers[0].parameters == 131
    assert len(shown(capsys)) == (1 + 2) + (5 + 2) + (9 + 2)


def test_it_stands_in_console_log_and_comes_once_a_run(tmp_path: Path, capsys: Lines) -> None:
    summary = Summary()
    tiny_run(callbacks=[summary], epochs=3, accumulate=2, directory=tmp_path / "run")
    lines = shown(capsys)
    assert (tmp_path / "run" / "console.log").read_text().splitlines() == lines
    assert len(lines) == 3
    tiny_run(callbacks=[summary], model=net())
    assert len(summary.layers) == 9


class OwnLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(logits := self.line(inputs), targets), "logits": logits}


def test_a_model_with_a_loss_of_its_own_and_a_step_fn_are_seen_as_well(capsys: Lines) -> None:
    def step_fn(run: Run, batch: Any) -> Tensor:
        loss: Tensor = run.model.get_submodule("line")(batch[0]).mean()
        run.backward(loss)
        run.update()
        return loss

    tiny_run(model=OwnLoss(), compute_loss=None, callbacks=[Summary()], steps=1)
    assert shown(capsys)[1] == "model   OwnLoss  (), (2, 1)           2          2"
    summary = Summary()
    tiny_run(model=OwnLoss(), step_fn=step_fn, callbacks=[summary], steps=1)
    assert [layer.shapes for layer in summary.layers] == [(), ((2, 1),)]


class Failing(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        raise MemoryError("on purpose")


def test_if_the_first_step_fails_what_is_known_is_shown(capsys: Lines) -> None:
    model = nn.Sequential(nn.Linear(1, 3), Failing())
    with pytest.raises(MemoryError, match="on purpose"):
        tiny_run(model=model, callbacks=[Summary()])
    lines = shown(capsys)
    assert lines[1:4] == [
        "model  Sequential  -                6          6",
        "  0    Linear      (2, 3)           6          6",
        "  1    Failing     -                0          0",
    ]
    assert lines[4].endswith("optimizers not known before an update, buffers 0.00, together not known")
    assert hooks_in(model) == 0


def hooks_in(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_shapes_are_those_of_the_first_training_batch_after_which_nothing_listens_in_the_model() -> None:
    counts: list[int] = []
    look = on(Callback.on_step_start)(lambda run: counts.append(hooks_in(run.model)))
    freeze = on(Callback.on_epoch_start)(lambda run: run.model.get_submodule("body").eval())  # it is seen all the same
    summary, evaluate = Summary(), Evaluate(tiny_loader(2, batch_size=7), sanity_batches=1, every="1 step")
    tiny_run(model=net(), callbacks=[summary, evaluate, freeze, look], steps=3)
    assert [layer.shapes for layer in summary.layers[:2]] == [((2, 1),), ((2, 4),)]
    assert counts == [9, 0, 0]  # the model and the layers in it, a shared one once


def test_the_run_is_the_same_with_it_and_without() -> None:
    def weights(*callbacks: Callback) -> dict[str, Tensor]:
        data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*tiny_loader(), strict=True)))
        loader = torch.utils.data.DataLoader(data, 2, shuffle=True)
        return dict(tiny_run(model=net(), seed=1, epochs=2, loader=loader, callbacks=callbacks).model.state_dict())

    assert same(weights(Summary()), weights())


def test_a_compiled_model_is_shown_without_shapes(capsys: Lines) -> None:
    wrapped = torch.compile(tiny_model(), backend="eager")
    inside = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    inside[0].compile(backend="eager")
    for model in (wrapped, inside):
        summary = Summary()
        tiny_run(model=model, callbacks=[summary], steps=1)
        assert all(layer.shapes == () for layer in summary.layers)
        assert summary.layers[0].parameters in (2, 7)
