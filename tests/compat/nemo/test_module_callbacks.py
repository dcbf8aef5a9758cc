"""ModuleSaverCallback, UnfreezeCallback and ValueSetterCallback (spec B6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cadenza.compat.nemo as nemo
import cadenza.compat.nemo10 as nemo10
from cadenza.callbacks import Checkpoint
from cadenza.compat.nemo.core import CheckpointCallback, NeuralModuleFactory
from cadenza.compat.nemo.core.callbacks import ModuleSaverCallback, UnfreezeCallback, ValueSetterCallback
from tests.compat.nemo.graphs import SGD, Line, LineNM, line, names_in, numbers, written

Policy, Method = ValueSetterCallback.Policy, ValueSetterCallback.Method


def trained(graph: Line, callbacks: list[Any], **params: Any) -> None:
    NeuralModuleFactory().train([graph.loss], "sgd", {**SGD, **params}, callbacks)


def test_both_versions_have_the_three_callbacks() -> None:
    for name in ("ModuleSaverCallback", "UnfreezeCallback", "ValueSetterCallback"):
        assert getattr(nemo.core, name) is getattr(nemo10.core, name) is getattr(nemo.core.deprecated_callbacks, name)


class TestModuleSaver:
    def test_files_are_written_at_multiples_of_step_freq_and_at_the_end(self, tmp_path: Path) -> None:
        graph = line()
        trained(graph, [ModuleSaverCallback([graph.net], step_freq=2, folder=str(tmp_path / "new"))], max_steps=6)
        name = f"LineNM_{graph.net.unique_instance_id}"
        assert names_in(tmp_path / "new") == [f"{name}-STEP-{step}.pt" for step in (2, 4, 6)]

    def test_the_last_file_restores_the_final_weights(self, tmp_path: Path) -> None:
        graph = line()
        trained(graph, [ModuleSaverCallback([graph.net], step_freq=-1, folder=str(tmp_path))], max_steps=3)
        other = LineNM()
        other.restore_from(str(tmp_path / f"LineNM_{graph.net.unique_instance_id}-STEP-3.pt"))
        assert all(map(torch.equal, other.parameters(), graph.net.parameters()))

    def test_only_its_own_old_files_are_removed(self, tmp_path: Path) -> None:
        graph = line()
        saver = ModuleSaverCallback([graph.net], step_freq=1, folder=str(tmp_path), checkpoints_to_keep=2)
        trained(graph, [saver, CheckpointCallback(str(tmp_path), step_freq=1, checkpoints_to_keep=0)], max_steps=5)
        own = [name for name in names_in(tmp_path) if name.startswith("LineNM_")]
        assert [name.rpartition("-")[2] for name in own] == ["3.pt", "4.pt", "5.pt"]  # that of the end is extra, as in NeMo
        assert len(list(tmp_path.glob("trainer-STEP-*.pt"))) == 5

    def test_wrong_arguments_are_errors(self) -> None:
        with pytest.raises(TypeError, match="must hold neural modules; got Linear"):
            ModuleSaverCallback([nn.Linear(1, 1)])  # type: ignore[list-item]  # the mistake under test
        with pytest.raises(ValueError, match="step_freq must be a whole number"):
            ModuleSaverCallback([], step_freq=0)


def states(graph: Line) -> tuple[list[tuple[int, bool, bool]], Any]:
    """Return a list, and a callback that adds the step, whether the weight is trainable, and whether it has changed."""
    seen: list[tuple[int, bool, bool]] = []

    @nemo.core.on_step_end
    def see(state: Any) -> None:
        weight = graph.net.get_weights()["layer.weight"][0]
        seen.append((state["step"], weight.requires_grad, weight.item() != 0.5))

    return seen, see


class TestUnfreeze:
    def test_modules_are_unfrozen_and_trained_from_the_given_epoch_on(self) -> None:
        graph = line(batches=2)
        graph.net.freeze(["layer.weight"])
        seen, see = states(graph)
        trained(graph, [UnfreezeCallback([graph.net], start_epoch=1), see], num_epochs=2)
        assert seen == [(0, False, False), (1, False, False), (2, True, True), (3, True, True)]

    def test_a_resumed_training_unfreezes_them_in_a_later_epoch_too(self, tmp_path: Path) -> None:
        graph = line(batches=2)
        graph.net.freeze(["layer.weight"])
        callbacks = [CheckpointCallback(str(tmp_path), step_freq=2), UnfreezeCallback([graph.net], start_epoch=1)]
        trained(graph, callbacks, num_epochs=2)
        again = line(batches=2)
        again.net.freeze(["layer.weight"])
        seen, see = states(again)
        trained(again, [CheckpointCallback(str(tmp_path), step_freq=2), UnfreezeCallback([again.net], 1), see], num_epochs=3)
        assert seen == [(4, True, True), (5, True, True)]

    def test_a_module_that_is_frozen_again_stays_frozen_in_later_epochs(self) -> None:
        graph = line(batches=1)
        seen, see = states(graph)

        @nemo.core.on_epoch_end
        def freeze(state: Any) -> None:
            graph.net.freeze(["layer.weight"])

        trained(graph, [UnfreezeCallback([graph.net], start_epoch=0), freeze, see], num_epochs=2)
        assert [trainable for _, trainable, _ in seen] == [True, False]


class TestValueSetter:
    def test_constant_and_linear_policies_with_fractions(self, tmp_path: Path) -> None:
        graph, dropout, seen = line(), nn.Dropout(0.9), list[float]()
        factory = NeuralModuleFactory(log_dir=str(tmp_path), create_tb_writer=True)
        policies = [Policy(method=Method.Const(0.2), start=0.0, end=0.5), Policy(Method.Linear(0.2, 0.0), start=0.5, end=1.0)]
        setter = ValueSetterCallback(dropout, "p", policies, total_steps=6, tb_writer=factory.tb_writer)
        see = nemo.core.on_batch_start(lambda state: seen.append(dropout.p))
        factory.train([graph.loss], "sgd", {**SGD, "max_steps": 6}, [setter, see])
        assert seen == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.1, 0.0])
        folder = tmp_path / "tensorboard"
        assert written(folder) == [("param/Dropout.p", step) for step in range(6)]
        assert numbers(folder, "param/Dropout.p") == pytest.approx(seen)

    def test_policies_with_steps_and_a_function_of_ones_own(self) -> None:
        graph, dropout, seen = line(), nn.Dropout(0.9), list[float]()
        policies = [Policy(lambda step, steps: step / steps, 0, 2), Policy(Method.Const(1.0), 2, 3)]
        see = nemo.core.on_step_end(lambda state: seen.append(dropout.p))
        trained(graph, [ValueSetterCallback(dropout, "p", policies, 3), see], max_steps=4)
        assert seen == [0.0, 0.5, 1.0, 1.0]  # after the last step it does not change

    def test_a_resumed_training_continues_in_the_right_policy(self, tmp_path: Path) -> None:
        policies = [Policy(Method.Const(0.5), 0, 2), Policy(Method.Linear(0.4, 0.0), 2, 7)]

        def run(steps: int) -> list[tuple[int, float]]:
            graph, dropout, seen = line(), nn.Dropout(0.9), list[tuple[int, float]]()
            see = nemo.core.on_step_end(lambda state: seen.append((state["step"], round(dropout.p, 4))))
            callbacks = [CheckpointCallback(str(tmp_path), step_freq=4), ValueSetterCallback(dropout, "p", policies, 7), see]
            trained(graph, callbacks, max_steps=steps)
            return seen

        run(5)
        assert run(7) == [(5, 0.1), (6, 0.0)]

    def test_it_works_beside_native_checkpoints_in_a_native_run(self, tmp_path: Path) -> None:
        from cadenza.testing import tiny_trainer

        dropout = nn.Dropout(0.9)
        setter = ValueSetterCallback(dropout, "p", [Policy(Method.Linear(0.4, 0.0), 0, 5)], 5)
        trainer = tiny_trainer(callbacks=[setter, Checkpoint(every="2 steps")], steps=5, directory=tmp_path)
        trainer.fit(resume="auto")
        assert dropout.p == 0.0

    def test_without_policies_the_value_stays(self) -> None:
        dropout = nn.Dropout(0.9)
        trained(line(), [ValueSetterCallback(dropout, "p", total_steps=2)], max_steps=2)
        assert dropout.p == 0.9

    def test_policies_that_do_not_cover_all_steps_are_an_error(self) -> None:
        with pytest.raises(ValueError, match="must cover the steps 0 to 9 without gaps; they cover 0 to 4, 5 to 9"):
            ValueSetterCallback(nn.Dropout(), "p", [Policy(Method.Const(1), 0, 4), Policy(Method.Const(1), 5, 9)], 9)
        with pytest.raises(ValueError, match="total_steps must be the number of steps of the training; got None"):
            ValueSetterCallback(nn.Dropout(), "p")
        with pytest.raises(AttributeError, match="has no attribute 'probability'"):
            ValueSetterCallback(nn.Dropout(), "probability", total_steps=1)
