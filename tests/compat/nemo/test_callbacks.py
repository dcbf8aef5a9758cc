"""Callbacks that save, unfreeze and set modules (spec B6); and native callbacks and those of both versions in one list."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cadenza import Callback, Derive, Run, on
from cadenza.callbacks import Checkpoint, EarlyStopping, Evaluate
from cadenza.compat.nemo.core import NeuralModuleFactory
from cadenza.compat.nemo.core import callbacks as nemo
from cadenza.compat.nemo.core.actions import State
from cadenza.compat.nemo.core.callbacks import ModuleSaverCallback, UnfreezeCallback, ValueSetterCallback
from cadenza.compat.nemo10.core import ActionCallback, EvaluatorCallback, SimpleLossLoggerCallback
from cadenza.compat.nemo10.core import CheckpointCallback as OldCheckpoint
from cadenza.testing import check_callback, launch, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.compat.nemo.graphs import Line, LineNM, line, names_in, numbers, train, written

Policy, Method = ValueSetterCallback.Policy, ValueSetterCallback.Method


# -- ModuleSaverCallback ------------------------------------------------------------------------------


def test_files_are_written_at_multiples_of_step_freq_and_at_the_end_with_the_final_weights(tmp_path: Path) -> None:
    graph = line()
    train(graph, ModuleSaverCallback([graph.net], step_freq=2, folder=str(tmp_path / "new")), max_steps=5)
    name = f"LineNM_{graph.net.unique_instance_id}"
    assert names_in(tmp_path / "new") == [f"{name}-STEP-{step}.pt" for step in (2, 4, 5)]
    train(graph, ModuleSaverCallback([graph.net], step_freq=-1, folder=str(tmp_path / "end")), max_steps=3)
    assert names_in(tmp_path / "end") == [f"{name}-STEP-3.pt"]
    other = LineNM()
    other.restore_from(str(tmp_path / "end" / f"{name}-STEP-3.pt"))
    assert all(map(torch.equal, other.parameters(), graph.net.parameters()))


def test_only_its_own_old_files_are_removed(tmp_path: Path) -> None:
    graph = line()
    saver = ModuleSaverCallback([graph.net], step_freq=1, folder=str(tmp_path), checkpoints_to_keep=2)
    train(graph, saver, nemo.CheckpointCallback(str(tmp_path), step_freq=1, checkpoints_to_keep=0), max_steps=5)
    own = [name for name in names_in(tmp_path) if name.startswith("LineNM_")]
    assert [name.rpartition("-")[2] for name in own] == ["3.pt", "4.pt", "5.pt"]  # that of the end is extra, as in NeMo
    assert len(list(tmp_path.glob("trainer-STEP-*.pt"))) == 5


def test_wrong_arguments_of_these_callbacks_are_errors() -> None:
    with pytest.raises(TypeError, match="must hold neural modules; got Linear"):
        ModuleSaverCallback([nn.Linear(1, 1)])  # type: ignore[list-item]  # the mistake under test
    with pytest.raises(ValueError, match="step_freq must be a whole number"):
        ModuleSaverCallback([], step_freq=0)

    with pytest.raises(ValueError, match="must cover the steps 0 to 9 without gaps; they cover 0 to 4, 5 to 9"):
        ValueSetterCallback(nn.Dropout(), "p", [Policy(Method.Const(1), 0, 4), Policy(Method.Const(1), 5, 9)], 9)
    with pytest.raises(ValueError, match="total_steps must be the number of steps of the training; got None"):
        ValueSetterCallback(nn.Dropout(), "p")
    with pytest.raises(AttributeError, match="has no attribute 'probability'"):
        ValueSetterCallback(nn.Dropout(), "probability", total_steps=1)


# -- UnfreezeCallback ---------------------------------------------------------------------------------


def states(graph: Line) -> tuple[list[tuple[int, bool, bool]], Any]:
    """Freeze a weight; return a list, and a callback that adds the step, whether it is trainable and whether it has changed."""
    graph.net.freeze(["layer.weight"])
    seen: list[tuple[int, bool, bool]] = []

    @nemo.on_step_end
    def see(state: Any) -> None:
        weight = graph.net.get_weights()["layer.weight"][0]
        seen.append((state["step"], weight.requires_grad, weight.item() != 0.5))

    return seen, see


def test_modules_are_unfrozen_and_trained_from_the_start_epoch_on_and_in_a_resumed_training_too(tmp_path: Path) -> None:
    graph = line(batches=2)
    seen, see = states(graph)
    keep: dict[str, Any] = {"folder": str(tmp_path), "step_freq": 2}
    train(graph, nemo.CheckpointCallback(**keep), UnfreezeCallback([graph.net], start_epoch=1), see, num_epochs=2)
    assert seen == [(0, False, False), (1, False, False), (2, True, True), (3, True, True)]
    again = line(batches=2)
    seen, see = states(again)
    train(again, nemo.CheckpointCallback(**keep), UnfreezeCallback([again.net], 1), see, num_epochs=3)
    assert seen == [(4, True, True), (5, True, True)]


def test_a_module_that_is_frozen_again_stays_frozen_in_later_epochs() -> None:
    graph, seen = line(batches=1), list[bool]()
    see = nemo.on_step_end(lambda state: seen.append(graph.net.get_weights()["layer.weight"][0].requires_grad))
    freeze = nemo.on_epoch_end(lambda state: graph.net.freeze(["layer.weight"]))
    train(graph, UnfreezeCallback([graph.net], start_epoch=0), freeze, see, num_epochs=2)
    assert seen == [True, False]


# -- ValueSetterCallback ------------------------------------------------------------------------------


def test_constant_and_linear_policies_with_fractions(tmp_path: Path) -> None:
    graph, dropout, seen = line(), nn.Dropout(0.9), list[float]()
    factory = NeuralModuleFactory(log_dir=str(tmp_path), create_tb_writer=True)
    policies = [Policy(method=Method.Const(0.2), start=0.0, end=0.5), Policy(Method.Linear(0.2, 0.0), start=0.5, end=1.0)]
    setter = ValueSetterCallback(dropout, "p", policies, total_steps=6, tb_writer=factory.tb_writer)
    see = nemo.on_batch_start(lambda state: seen.append(dropout.p))
    train(graph, setter, see, factory=factory, max_steps=6)
    assert seen == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.1, 0.0])
    folder = tmp_path / "tensorboard"
    assert written(folder) == [("param/Dropout.p", step) for step in range(6)]
    assert numbers(folder, "param/Dropout.p") == pytest.approx(seen)


@pytest.mark.parametrize(
    ("policies", "values"),
    [
        # after the last step it does not change
        ([Policy(lambda step, steps: step / steps, 0, 2), Policy(Method.Const(1.0), 2, 3)], [0.0, 0.5, 1.0, 1.0]),
        (None, [0.9] * 4),
    ],
    ids=["steps and a function of one's own", "no policies"],
)
def test_policies_of_steps_set_the_value_of_each_step(policies: Any, values: list[float]) -> None:
    dropout, seen = nn.Dropout(0.9), list[float]()
    see = nemo.on_step_end(lambda state: seen.append(dropout.p))
    train(line(), ValueSetterCallback(dropout, "p", policies, total_steps=3), see, max_steps=4)
    assert seen == values


def test_a_resumed_training_continues_in_the_right_policy(tmp_path: Path) -> None:
    policies = [Policy(Method.Const(0.5), 0, 2), Policy(Method.Linear(0.4, 0.0), 2, 7)]
    for steps in (5, 7):
        dropout, seen = nn.Dropout(0.9), list[tuple[int, float]]()
        see = nemo.on_step_end(lambda state: seen.append((state["step"], round(dropout.p, 4))))  # noqa: B023
        keep = nemo.CheckpointCallback(str(tmp_path), step_freq=4)
        train(line(), keep, ValueSetterCallback(dropout, "p", policies, 7), see, max_steps=steps)
    assert seen == [(5, 0.1), (6, 0.0)]


def test_it_works_beside_native_checkpoints_in_a_native_run(tmp_path: Path) -> None:
    dropout = nn.Dropout(0.9)
    setter = ValueSetterCallback(dropout, "p", [Policy(Method.Linear(0.4, 0.0), 0, 5)], 5)
    tiny_trainer(callbacks=[setter, Checkpoint(every="2 steps")], steps=5, directory=tmp_path).fit(resume="auto")
    assert dropout.p == 0.0


# -- native callbacks and those of NeMo in one list: in a native trainer, and in nf.train ----------


Said = list[str]


class Native(Callback):
    def __init__(self, said: Said) -> None:
        self.said = said

    def on_fit_start(self, run: Run) -> None:
        self.said.append("native start")

    def on_step_end(self, run: Run) -> None:
        self.said.append(f"native step {run.progress.step}")

    def on_fit_end(self, run: Run) -> None:
        self.said.append("native end")


class Old(ActionCallback):
    def __init__(self, said: Said) -> None:
        super().__init__()
        self.said = said

    def on_action_start(self) -> None:
        self.said.append("0.10 start")

    def on_iteration_end(self) -> None:
        self.said.append(f"0.10 step {self.step}")

    def on_action_end(self) -> None:
        self.said.append("0.10 end")


class New(nemo.NeMoCallback):
    def __init__(self, said: Said) -> None:
        self.said = said

    def on_action_start(self, state: State) -> None:
        self.said.append("0.11 start")

    def on_step_end(self, state: State) -> None:
        self.said.append(f"0.11 step {state['step']}")

    def on_action_end(self, state: State) -> None:
        self.said.append("0.11 end")


@pytest.mark.parametrize("where", ["native", "nemo"])
@pytest.mark.parametrize("order", [(Native, Old, New), (New, Native, Old), (Old, New, Native)])
def test_callbacks_of_each_event_run_in_the_order_of_the_list(where: str, order: tuple[Any, ...]) -> None:
    said: Said = []
    callbacks = [kind(said) for kind in order]
    if where == "native":
        tiny_run(callbacks=callbacks, steps=2)
    else:
        train(line(), *callbacks, max_steps=2)
    name = {Native: "native", Old: "0.10", New: "0.11"}
    expected = [f"{name[kind]} start" for kind in order]
    for step in (0, 1):
        expected += [f"{name[kind]} step {step + (kind is Native)}" for kind in order]  # native counters count completed work
    assert said == [*expected, *(f"{name[kind]} end" for kind in order)]


def test_in_a_native_run_outputs_and_derived_outputs_are_found_by_name() -> None:
    def objective(model: nn.Module, batch: Any) -> dict[str, Any]:
        guess = model(batch[0])
        return {"loss": nn.functional.mse_loss(guess, batch[1]), "guess": guess}

    seen: list[Any] = []

    @nemo.on_step_end
    def look(state: State) -> None:
        get = state["tensors"].get_tensor
        assert get("twice", compute=False) is None
        assert torch.equal(get("twice"), 2 * get("guess"))
        with pytest.raises(KeyError, match=r"there is no tensor 'gues'. Did you mean 'guess'\?"):
            get("gues")
        seen.append((get("loss").item(), tuple(get("guess").shape), state["step"], state["epoch"]))

    class Register(ActionCallback):
        def on_iteration_end(self) -> None:
            seen.append((sorted(self.registered_tensors), self.learning_rate, self.local_rank))

    derived = Derive(twice=lambda run: 2 * run.outputs["guess"])
    run = tiny_run(callbacks=[derived, look, Register()], steps=1, compute_loss=objective)
    assert run.loss is not None
    assert seen == [(run.loss.item(), (2, 1), 0, 0), (["guess", "loss", "twice"], 0.1, None)]


def test_loggers_of_both_versions_accept_names_in_a_native_run(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[float] = []
    old = SimpleLossLoggerCallback("loss", print_func=lambda tensors: seen.append(tensors[0].item()), step_freq=2)
    run = tiny_run(callbacks=[old, nemo.SimpleLogger(2)], steps=3)
    assert seen[-1] == pytest.approx(float(run.loss)) if run.loss is not None else False
    assert len(seen) == 2
    assert capsys.readouterr().out.count("] loss: ") == 2


@pytest.mark.parametrize("version", ["0.10", "0.11"])
def test_a_native_run_resumed_from_nemo_s_checkpoints_is_bit_identical(version: str, tmp_path: Path) -> None:
    kind: Any = OldCheckpoint if version == "0.10" else nemo.CheckpointCallback
    whole = tiny_run(steps=9)
    tiny_run(callbacks=[kind(str(tmp_path), step_freq=2)], steps=5)
    assert names_in(tmp_path) == sorted(f"{name}-STEP-{n}.pt" for name in ("Linear", "trainer") for n in (2, 4, 5))
    continued = tiny_run(callbacks=[kind(str(tmp_path), step_freq=2)], steps=9)
    assert continued.progress.now() == whole.progress.now()
    assert all(map(torch.equal, whole.model.parameters(), continued.model.parameters()))


def test_native_checkpoints_restore_callbacks_of_nf_train(tmp_path: Path) -> None:
    for steps in (4, 5):
        said: Said = []
        callbacks = [New(said), Old(said), Checkpoint(every="2 steps")]
        tiny_trainer(callbacks=callbacks, steps=steps, directory=tmp_path).fit(resume="auto")
    assert said == ["0.11 start", "0.10 start", "0.11 step 4", "0.10 step 4", "0.11 end", "0.10 end"]


def test_a_native_evaluation_and_early_stopping_work_in_nf_train() -> None:
    graph, seen = line(2), list[float]()

    def judge(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": nn.functional.mse_loss(graph.net(batch[0]), batch[1])}

    judging = Evaluate(tiny_loader(2), every="1 epoch", compute=judge)
    stop = EarlyStopping("eval/loss", mode="min", patience=1)
    worse = on(Callback.on_epoch_start)(lambda run: graph.net.layer.weight.data.add_(3))
    ended = nemo.on_action_end(lambda state: seen.append(state["epoch"]))
    run = train(graph, worse, judging, stop, ended, lr=1e-6, num_epochs=9)
    assert seen == [2]
    assert run.outcome.kind == "stopped"


def test_a_native_callback_can_monitor_results_of_an_evaluatorcallback() -> None:
    graph = line(2)

    def gather(values: dict[str, Any], kept: dict[str, Any]) -> None:
        kept.setdefault("losses", []).append(values[graph.loss.unique_name][0].item())

    evaluator = EvaluatorCallback([graph.loss], gather, lambda kept: {"loss": sum(kept["losses"])}, eval_step=2)
    stop = EarlyStopping("EvaluatorCallback/loss", mode="min", threshold=1e9)
    run = train(graph, evaluator, stop, max_steps=9)
    assert run.outcome.kind == "stopped"
    assert run.history["EvaluatorCallback/loss"][0][0] == 1
    assert run.evaluations["EvaluatorCallback"].results.keys() == {"EvaluatorCallback/loss"}


@pytest.mark.parametrize("kind", [Old, New])
def test_each_callback_keeps_the_contract_of_all_callbacks(kind: Any) -> None:
    check_callback(lambda: kind([]))


def test_no_end_event_is_called_after_an_error_in_a_native_callback() -> None:
    said: Said = []

    @on(Callback.on_step_end, at=2)
    def fail(run: Run) -> None:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError, match="on purpose"):
        tiny_run(callbacks=[fail, New(said), Old(said)], steps=3)
    # All callbacks of the failing event are called, so that native starts have their ends. Later events are not.
    assert said[:4] == ["0.11 start", "0.10 start", "0.11 step 0", "0.10 step 0"]
    assert not [one for one in said if one.endswith("end")]


def test_other_processes_write_nothing_and_know_their_rank(tmp_path: Path) -> None:
    def trained() -> tuple[list[Any], list[Any]]:
        rank = tmp_path / os.environ["RANK"]
        factory = NeuralModuleFactory(tensorboard_dir=str(rank / "tb"), create_tb_writer=True)
        seen, logged = list[Any](), list[Any]()
        callbacks = [
            nemo.on_step_end(lambda state: seen.append((state["local_rank"], state["global_rank"]))),
            SimpleLossLoggerCallback("loss", logged.append, lambda values: [("a", values[0])], tb_writer=factory.tb_writer),
            nemo.TensorboardLogger(factory.tb_writer, 1),
            nemo.CheckpointCallback(str(rank / "files"), step_freq=1),
        ]
        tiny_run(callbacks=callbacks, steps=2, driver="ddp")
        if factory.tb_writer is not None:
            factory.tb_writer.flush()
        return seen, logged

    (main, logged), (other, nothing) = launch(trained, 2)
    assert (main, other) == ([(0, 0), (0, 0)], [(1, 1), (1, 1)])
    assert written(tmp_path / "0" / "tb") != []
    assert written(tmp_path / "1" / "tb") == []
    assert (tmp_path / "0" / "files").exists()
    assert not (tmp_path / "1" / "files").exists()
    assert (len(logged), nothing) == (1, []), "the first of every 25 steps"


def test_batches_of_a_step_fn_have_one_end() -> None:
    def step(run: Run, batch: Any) -> Any:
        for _ in range(2):
            loss = nn.functional.mse_loss(run.model(batch[0]), batch[1])
            run.backward(loss)
            run.update()
        return loss

    ends: list[int] = []
    end = nemo.on_batch_end(lambda state: ends.append(state["step"]))
    tiny_run(callbacks=[end], steps=3, step_fn=step, model=tiny_model())
    assert ends == [0, 1, 2]
