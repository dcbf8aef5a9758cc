"""Freeze, MoveModules, ConvertSyncBatchNorm: what learns, where it is. Histograms, Summary: what a model is."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from cadenza import Callback, Histogram, Run, SingleDriver, Trainer, on
from cadenza.callbacks import Checkpoint, ClipGradients, ConvertSyncBatchNorm, Ema, Evaluate, Histograms, MoveModules, Summary
from cadenza.callbacks.freezing import Freeze, freeze, unfreeze
from cadenza.callbacks.summary import Layer
from cadenza.hooks.dispatch import hooks_of
from cadenza.loading.shards import Shard
from cadenza.records.record import Record
from cadenza.sinks import TensorBoard
from cadenza.status.encoding import same
from cadenza.testing import prove_resume, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.callbacks.parts import failing, state_of, two_layers, two_optimizers


class Network(nn.Module):
    """A backbone of two blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = {f"block{i}": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)) for i in (1, 2)}
        self.backbone = nn.Sequential()
        self.backbone.add_module("stem", nn.Linear(1, 4))
        for name, block in blocks.items():
            self.backbone.add_module(name, block)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.backbone(inputs) * self.scale)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, 0.01, weight_decay=0.5)


def changes(epochs: int, *callbacks: Callback) -> dict[int, set[str]]:
    """Return the names of the weights and statistics that changed in each epoch."""
    model, changed = Network(), dict[int, set[str]]()
    last = {name: value.clone() for name, value in model.state_dict().items()}

    @on(Callback.on_epoch_end)
    def look(run: Run) -> None:
        now = state_of(run)
        changed[run.progress.epoch] = {name for name, value in now.items() if not torch.equal(value, last[name])}
        last.update(now)

    tiny_run(model=model, optimizer=adamw, callbacks=[*callbacks, look], epochs=epochs)
    return changed


ALL = set(Network().state_dict())
BACKBONE = {name for name in ALL if name.startswith("backbone.")}
BLOCK2 = {name for name in ALL if name.startswith("backbone.block2.")}
STATISTICS = {name for name in ALL if "running" in name or "tracked" in name}
NORMS = {name for name in ALL if ".1." in name}


def linear_layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


LINEAR = {name for name in ALL if name.endswith((".0.weight", ".0.bias")) or "stem" in name or "head" in name}
LATE = BACKBONE - BLOCK2
TWO = {1: ALL - BACKBONE - {"scale"}, 2: ALL - BACKBONE, 3: ALL}
LONG, SHORT = Freeze("backbone", until="2 epochs"), Freeze(["backbone.block2", "scale"], until="1 epoch")


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ([Freeze("backbone", until="2 epochs")], {1: ALL - BACKBONE, 2: ALL - BACKBONE, 3: ALL, 4: ALL}),
        ([Freeze(["backbone", "scale"])], dict.fromkeys((1, 2), ALL - BACKBONE - {"scale"})),
        # Parts are let go one after the other, and what several name belongs to the first.
        ([Freeze({"backbone.block2": "1 epoch", "backbone.*": "3 epochs"})],
         {1: ALL - BACKBONE, 2: ALL - LATE, 3: ALL - LATE, 4: ALL}),
        ([Freeze(linear_layers)], {1: ALL - LINEAR}),
        ([Freeze(lambda model: cast("Network", model).backbone)], {1: ALL - BACKBONE}),
        ([Freeze("backbone", batch_norm=False)], {1: ALL - (BACKBONE - NORMS)}),
        # What two of them hold learns when both let it go.
        ([LONG, SHORT], TWO),
        ([SHORT, LONG], TWO),
    ],
    ids=["name", "whole run", "one by one", "function", "module", "without statistics", "longer first", "shorter first"],
)  # fmt: skip
def test_what_is_frozen_stays_as_it_is_to_the_bit_until_its_point_is_reached(
    callbacks: list[Callback], expected: dict[int, set[str]], caplog: pytest.LogCaptureFixture
) -> None:
    assert changes(len(expected), *callbacks) == expected
    assert not caplog.records  # the trainer does not miss an optimizer for what is frozen


def test_frozen_statistics_stay_in_evaluation_mode_also_after_an_evaluation_and_dropout_stays_on() -> None:
    modes: list[tuple[bool, bool]] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        norm, dropout = (run.model.get_submodule(f"backbone.block1.{index}") for index in (1, 2))
        modes.append((norm.training, dropout.training))

    evaluate = Evaluate(tiny_loader(1), every="1 step")
    tiny_run(model=Network(), callbacks=[Freeze("backbone", until="3 steps"), evaluate, look])
    assert modes == [(False, True)] * 3 + [(True, True)] * 2


def test_a_frozen_parameter_knows_no_decay_and_no_momentum_and_begins_like_a_new_one() -> None:
    kept: list[tuple[bool, bool]] = []

    @on(Callback.on_step_start)
    def look(run: Run) -> None:
        bias = run.model.get_parameter("bias")
        kept.append((bias.requires_grad, bias in run.optimizers[0].state))

    optimizer: Any = partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    tiny_run(optimizer=optimizer, callbacks=[Freeze("bias", until="3 steps"), look])
    assert kept == [(False, False)] * 3 + [(True, False), (True, True)]


@pytest.mark.parametrize("fails", [False, True])
def test_when_a_run_is_over_or_fails_all_is_as_it_was(fails: bool) -> None:
    model = Network()
    model.scale.requires_grad_(False)
    requires = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    end = failing(Callback.on_step_end, at=2 if fails else 99)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        tiny_run(model=model, callbacks=[Freeze("*scale", until="1 step"), Freeze("backbone"), end])
    assert {name: parameter.requires_grad for name, parameter in model.named_parameters()} == requires
    assert all(module.training for module in model.modules())


def test_every_change_is_a_decision_and_the_plan_shows_the_points_and_one_that_never_comes() -> None:
    run = tiny_run(model=Network(), epochs=2, callbacks=[Freeze({"backbone.stem": "1 epoch", "scale": "7 steps"})])
    assert [str(decision) for decision in run.decisions] == [
        "frozen by Freeze at the start: 'backbone.stem', 8 parameters, at epoch 1",
        "frozen by Freeze at the start: 'scale', 4 parameters, at step 7",
        "unfrozen by Freeze at epoch 1, step 5, batch 5: 'backbone.stem', 8 parameters, at epoch 1",
        "unfrozen by Freeze at epoch 2, step 7, batch 7: 'scale', 4 parameters, at step 7",
    ]
    plan = str(tiny_trainer(epochs=2, callbacks=[Freeze({"weight": "1 epoch", "bias": "3 epochs"})]).plan())
    assert "Freeze (at epoch 1) > Freeze (at epoch 3)" in plan
    assert "! Freeze (at epoch 3) never fires: the run ends after 2 epochs" in plan


def test_it_continues_to_the_same_bits_before_at_and_after_each_point() -> None:
    def make(directory: Path) -> Trainer:
        gradual = Freeze({"backbone.block2": "1 epoch", "backbone.*": "8 steps"})
        callbacks = [gradual, Freeze(["backbone.block2", "scale"], until="7 steps", batch_norm=False)]
        return tiny_trainer(model=Network(), optimizer=adamw, directory=directory, epochs=3, seed=1, callbacks=callbacks)

    prove_resume(make, at=[5, 7], in_process=True)


def test_what_is_frozen_follows_from_the_counters_when_a_run_goes_on(tmp_path: Path) -> None:
    requires: list[bool] = []
    look = on(Callback.on_step_start)(lambda run: requires.append(run.model.get_parameter("weight").requires_grad))
    for steps in (2, 4, 6):
        callbacks = [Freeze("weight", until="3 steps"), look, Checkpoint()]
        tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=callbacks).fit(resume="auto")
    assert requires == [False, False, False, True, True, True]


def test_a_name_that_fits_nothing_is_an_error_and_a_model_that_cannot_learn_is_let_go() -> None:
    message = r"no module or parameter .* matches 'backbon'\. Did you mean 'backbone'\? It has backbone \(Sequential\)"
    with pytest.raises(ValueError, match=message):
        tiny_run(model=Network(), callbacks=[Freeze("backbon")])
    trainer = tiny_trainer(callbacks=[Freeze("*")])
    with pytest.raises(ValueError, match="nothing is left to learn"):
        trainer.fit()
    assert all(parameter.requires_grad for parameter in trainer.model.parameters())


def test_freezing_by_hand_and_unfreezing_which_returns_what_an_optimizer_must_be_given() -> None:
    model = nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    assert len(freeze(*list(model.children())[:-1], batch_norm=False)) == 2
    assert [name for name, one in model.named_parameters() if not one.requires_grad] == ["0.weight", "0.bias"]
    assert model[1].training
    assert len(freeze(*list(model.children())[:-1])) == 2  # the layer with statistics as well, this time
    assert not model[1].training
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    tiny_run(model=model)
    assert [name for name, one in model.named_parameters() if not torch.equal(one, before[name])] == ["2.weight", "2.bias"]
    network = Network()
    freeze(network.backbone, network.scale)
    new = unfreeze(network.backbone.get_submodule("block2"), network.head)
    assert [id(one) for one in new] == [id(one) for one in network.backbone.get_submodule("block2").parameters()]
    assert not network.scale.requires_grad
    assert network.backbone.get_submodule("block2.1").training
    assert not network.backbone.get_submodule("block1.1").training


# -- MoveModules --------------------------------------------------------------------------------------


class Centred(nn.Module):
    """A loss that learns a centre, and counts."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(1))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Any:
        self.count += 1
        return (model(batch[0]) - batch[1] - self.centre).square().mean() * (1 + 1 / self.count)


def test_modules_beside_the_model_are_moved_to_its_device() -> None:
    loss = Centred()
    run = tiny_run(device="meta", compute_loss=loss, callbacks=[MoveModules(loss)])  # a device without numbers
    assert run.device.type == "meta"
    assert (loss.centre.device.type, loss.count.device.type) == ("meta", "meta")
    assert MoveModules(nn.MSELoss(), nn.Identity()).state_dict() == {}


def test_what_they_hold_is_trained_by_the_optimizer_that_has_it_and_continues_to_the_same_bits() -> None:
    made: list[Centred] = []

    def make(directory: Path) -> Trainer:
        made.append(loss := Centred())
        optimizer = lambda parameters: torch.optim.SGD([*parameters, loss.centre], 0.1)  # noqa: E731  # shorter to read
        callbacks = [MoveModules(nn.Identity(), loss)]
        return tiny_trainer(directory=directory, optimizer=optimizer, compute_loss=loss, epochs=2, seed=1, callbacks=callbacks)

    prove_resume(make, at=[1, 5], in_process=True)
    assert made[0].centre.item() != 0


# -- ConvertSyncBatchNorm -----------------------------------------------------------------------------


class OneOfTwo(SingleDriver):
    """A driver that reports two ranks. There is no process group, so that layers compute on this rank alone."""

    world_size = 2

    def data_shard(self) -> Shard:
        return replace(super().data_shard(), share_data=False)  # it reads all the data


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)))


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.modules() if "Norm" in type(module).__name__]


def test_on_many_ranks_batch_norm_is_converted_once_and_what_it_held_stays() -> None:
    model = network()
    held = {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())}
    trainer = tiny_trainer(model=model, driver=OneOfTwo("cpu"), callbacks=[ConvertSyncBatchNorm()])
    assert trainer.fit().why("converted").endswith("2 BatchNorm layers, to SyncBatchNorm over 2 ranks")
    assert kinds(model) == ["SyncBatchNorm", "SyncBatchNorm"]
    assert {name: id(value) for name, value in (*model.named_parameters(), *model.named_buffers())} == held
    layers = [id(module) for module in model.modules()]
    assert trainer.fit().why("converted").endswith("0 BatchNorm layers, to SyncBatchNorm over 2 ranks")
    assert [id(module) for module in model.modules()] == layers


def test_converted_layers_compute_the_same_where_there_is_no_other_rank_and_on_one_rank_the_model_is_left_alone() -> None:
    converted = tiny_run(model=network(), driver=OneOfTwo("cpu"), epochs=2, callbacks=[ConvertSyncBatchNorm(), Ema(0.9)])
    plain = tiny_run(model=network(), epochs=2, callbacks=[ConvertSyncBatchNorm()])
    assert kinds(plain.model) == ["BatchNorm1d", "BatchNorm1d"]
    assert plain.why("left alone").endswith("BatchNorm, as there is one rank")
    for name, value in plain.model.state_dict().items():
        assert torch.equal(converted.model.state_dict()[name], value), name


# -- Histograms ---------------------------------------------------------------------------------------


def logged(*callbacks: Callback, **arguments: Any) -> dict[tuple[int, str], list[float]]:
    """Return the values of each histogram, by step and name."""
    seen: dict[tuple[int, str], list[float]] = {}

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


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) ** 2).mean()  # type: ignore[no-any-return]


def test_gradients_of_a_step_of_several_batches_are_complete_as_a_callback_before_it_left_them() -> None:
    def norm(*callbacks: Callback) -> float:
        return float(torch.tensor(list(logged(*callbacks, steps=1).values())).norm())

    histograms = Histograms("1 step", gradients=True, weights=False)
    assert norm(ClipGradients(max_norm=0.1), histograms) == pytest.approx(0.1, rel=1e-4)
    assert norm(histograms, ClipGradients(max_norm=0.1)) > 0.5
    histograms = Histograms("2 steps", gradients=True, weights=False)
    together = torch.linspace(0, 1, 8).reshape(1, 8, 1)
    seen = logged(histograms, loader=list(together[0].split(2)), accumulate=4, compute_loss=square, epochs=2)
    whole = logged(histograms, loader=list(together), compute_loss=square, epochs=2)
    assert seen == {key: pytest.approx(values, rel=1e-5) for key, values in whole.items()}
    assert list(seen) == [(2, "gradients/weight"), (2, "gradients/bias")]


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
    run = tiny_run(callbacks=[histograms := Histograms("4 steps", gradients=True)], steps=9)
    heard = [listener for several in hooks_of(run).by_moment.values() for listener in several]
    due = {listener.moment.__name__: listener.trigger and listener.trigger.times_due for listener in heard}
    assert due == {"on_fit_start": None, "on_before_optimizer_step": 2, "on_step_end": 2}
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


# -- Summary ------------------------------------------------------------------------------------------


Lines = pytest.CaptureFixture[str]


class Net(nn.Module):
    """Layers inside layers, one shared, one frozen, one never called, and an output of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(1, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
        self.rnn = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 1)
        self.same_head = self.head
        self.idle = nn.Linear(5, 5)
        self.body[0].requires_grad_(False)

    def forward(self, inputs: Tensor) -> Any:
        hidden, _ = self.rnn(self.body(inputs).unsqueeze(1))
        return self.same_head(hidden[:, 0])


def shown(capsys: Lines) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_the_table_has_a_row_for_each_layer(capsys: Lines) -> None:
    summary = Summary()
    tiny_run(model=Net(), callbacks=[summary], steps=1, batches=1)
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
        tiny_run(model=Net(), callbacks=[summary], steps=1)
        assert names in ([layer.name for layer in summary.layers], len(summary.layers))
        assert summary.layers[0].parameters == 131
    assert len(shown(capsys)) == (1 + 2) + (5 + 2) + (9 + 2)


def test_it_stands_in_console_log_and_comes_once_a_run(tmp_path: Path, capsys: Lines) -> None:
    summary = Summary()
    tiny_run(callbacks=[summary], epochs=3, accumulate=2, directory=tmp_path / "run")
    lines = shown(capsys)
    assert (tmp_path / "run" / "console.log").read_text().splitlines() == lines
    assert len(lines) == 3
    tiny_run(callbacks=[summary], model=Net())
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


def hooks_in(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


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


def test_shapes_are_those_of_the_first_training_batch_after_which_nothing_listens_in_the_model() -> None:
    counts: list[int] = []
    look = on(Callback.on_step_start)(lambda run: counts.append(hooks_in(run.model)))
    freeze = on(Callback.on_epoch_start)(lambda run: run.model.get_submodule("body").eval())  # it is seen all the same
    summary, evaluate = Summary(), Evaluate(tiny_loader(2, batch_size=7), sanity_batches=1, every="1 step")
    tiny_run(model=Net(), callbacks=[summary, evaluate, freeze, look], steps=3)
    assert [layer.shapes for layer in summary.layers[:2]] == [((2, 1),), ((2, 4),)]
    assert counts == [9, 0, 0]  # the model and the layers in it, a shared one once


def test_the_run_is_the_same_with_it_and_without() -> None:
    def weights(*callbacks: Callback) -> dict[str, Tensor]:
        data = torch.utils.data.TensorDataset(*map(torch.cat, zip(*tiny_loader(), strict=True)))
        loader = torch.utils.data.DataLoader(data, 2, shuffle=True)
        return dict(tiny_run(model=Net(), seed=1, epochs=2, loader=loader, callbacks=callbacks).model.state_dict())

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
