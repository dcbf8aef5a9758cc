"""``nemo.logging``, and the loggers of NeMo 0.11 (cases 11-14 of part F2) and 0.10 (4-7 and 21 of F1).

The tests of Weights & Biases read wandb's offline file.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cadenza.compat.nemo as nemo
import cadenza.compat.nemo10 as nemo10
from cadenza.compat.nemo.core import NeuralModuleFactory, NmTensor
from cadenza.compat.nemo.core.callbacks import SimpleLogger, TensorboardLogger, WandBLogger
from cadenza.compat.nemo.utils import get_logger, logging, logging_mode
from cadenza.compat.nemo10.backends.pytorch.nm import LossNM
from cadenza.compat.nemo10.core import ActionCallback, EvaluatorCallback, SimpleLossLoggerCallback, WandbCallback
from cadenza.compat.nemo10.core import NeuralModuleFactory as OldFactory
from tests.compat.nemo.graphs import OFFLINE, line, logged, numbers, train, train_0_10, worst_of, written
from tests.sinks.wandb_file import WandbFile

# -- nemo.logging -------------------------------------------------------------------------------------


def test_it_is_the_same_logger_under_all_names() -> None:
    assert logging is nemo.logging is nemo.utils.logging is nemo10.logging is nemo10.core.callbacks.logging is get_logger("")
    assert NeuralModuleFactory().logger is logging


def test_messages_go_to_the_patched_streams_and_then_to_the_terminal_again(capsys: pytest.CaptureFixture[str]) -> None:
    with logging.patch_stdout_handler(StringIO()) as out, logging.patch_stderr_handler(StringIO()) as err:
        logging.info("one %d", 1)
        logging.warning("two")
    assert out.getvalue().endswith("] one 1\n")
    assert "[NeMo W " in err.getvalue()
    assert " test_loggers:" in out.getvalue()  # the file of the caller
    logging.info("shown")
    assert [line.rpartition("] ")[2] for line in capsys.readouterr().out.splitlines()] == ["shown"]


def test_levels_are_set_and_restored() -> None:
    with logging.patch_stdout_handler(StringIO()) as out, logging.temp_verbosity(logging.WARNING):
        logging.info("hidden")
        assert logging.get_verbosity() == logging.WARNING
    assert logging.get_verbosity() == logging.INFO
    assert out.getvalue() == ""
    logging.set_verbosity(logging.DEBUG)
    assert logging.getEffectiveLevel() == logging.DEBUG == 10
    logging.setLevel(logging.INFO)


def test_messages_appear_once_and_warnings_of_python_are_logged_if_asked() -> None:
    with warnings.catch_warnings(), logging.patch_stderr_handler(StringIO()) as err:
        for _ in range(3):
            logging.warning("only once in these tests", mode=logging_mode.ONCE)
            logging.warning("each time", mode=logging_mode.EACH)
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("careful", UserWarning, stacklevel=1)
        logging.captureWarnings(False)
    assert (err.getvalue().count("only once"), err.getvalue().count("each time")) == (1, 3)
    assert "UserWarning: careful" in err.getvalue()


def test_files_and_removed_streams(tmp_path: Path) -> None:
    logging.add_file_handler(tmp_path / "own.txt")
    handler = logging.logger.handlers[-1]
    try:
        with logging.patch_stdout_handler(StringIO()) as out:
            logging.remove_stream_handlers()
            logging.info("to the file")
            logging.reset_stream_handler()
            logging.info("to both")
    finally:
        logging.logger.removeHandler(handler)
        handler.close()
    assert [text.rpartition("] ")[2] for text in (tmp_path / "own.txt").read_text().splitlines()] == ["to the file", "to both"]
    assert out.getvalue().count("\n") == 1


# -- 11: SimpleLogger ---------------------------------------------------------------------------------


def test_11_the_loss_is_printed_at_each_step_in_one_line_or_never() -> None:
    with logging.patch_stdout_handler(StringIO()) as out:
        train(line(), SimpleLogger(step_freq=1), max_steps=4)
        train(line(), SimpleLogger(-1), max_steps=4)
    found = [text.partition("] ")[2] for text in out.getvalue().splitlines()]
    assert len(found) == 4
    assert all(text.startswith("loss: ") and float(text.removeprefix("loss: ")) > 0 for text in found)


def test_11_names_and_nmtensors_are_logged_in_their_order_with_distinct_names(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    graph = line()
    extra, second = worst_of(graph)[0], worst_of(graph)[0]
    train(graph, SimpleLogger(1, ["loss", graph.loss, extra, second]), max_steps=1)
    names = ["loss", graph.loss.unique_name, "worst_error", second.unique_name]
    graph.loss.rename("test_name")
    train(graph, SimpleLogger(step_freq=1, tensors_to_log=["test_name", extra]), max_steps=2)
    assert [text.rpartition(":")[0] for text in logged(caplog)] == [*names, *["test_name", "worst_error"] * 2]


# -- 12, 13: TensorboardLogger ------------------------------------------------------------------------


@pytest.fixture
def factory(tmp_path: Path) -> NeuralModuleFactory:
    return NeuralModuleFactory(log_dir=str(tmp_path), create_tb_writer=True)


def test_12_scalars_the_rate_and_epochs_are_written_in_this_order(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    train(line(2), TensorboardLogger(factory.tb_writer, step_freq=2), factory=factory, max_steps=4)
    ends = [("misc/epoch", 2), ("misc/epoch_time", 2), ("loss", 2), ("param/lr", 2), ("misc/epoch", 4), ("misc/epoch_time", 4)]
    assert written(tmp_path / "tensorboard") == [("loss", 0), ("param/lr", 0), *ends]
    assert numbers(tmp_path / "tensorboard", "misc/epoch") == [0, 1]
    assert numbers(tmp_path / "tensorboard", "param/lr") == pytest.approx([0.1, 0.1])


def test_12_a_custom_function_replaces_the_scalars(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph, seen = line(2), list[tuple[Any, ...]]()
    logger = TensorboardLogger(
        factory.tb_writer,
        step_freq=2,
        tensors_to_log=["loss", graph.prediction],
        custom_tb_log_func=lambda values, writer, step: seen.append(([len(v.shape) for v in values], writer, step)),
    )
    train(graph, logger, factory=factory, max_steps=4)
    assert seen == [([0, 2], factory.tb_writer, 0), ([0, 2], factory.tb_writer, 2)]
    assert ("loss", 0) not in written(tmp_path / "tensorboard")
    assert ("param/lr", 0) in written(tmp_path / "tensorboard")


def test_12_chosen_tensors_are_written_without_rate_and_epochs(factory: NeuralModuleFactory, tmp_path: Path) -> None:
    graph = line(2)  # NeMo raises a TypeError in the writer
    worst, _ = worst_of(graph)
    entries: list[str | NmTensor] = [graph.loss, worst.unique_name]
    logger = TensorboardLogger(factory.tb_writer, 2, entries, log_lr=False, log_epoch=False)
    train(graph, logger, factory=factory, max_steps=4)
    assert written(tmp_path / "tensorboard") == [(name, step) for step in (0, 2) for name in ("loss", worst.unique_name)]


def test_a_wrong_frequency_and_a_missing_writer_are_errors_in_the_constructor() -> None:
    frequency: Any
    for frequency in (0, -2, 1.5):
        with pytest.raises(ValueError, match="step_freq must be a whole number of at least 1, or -1 for never"):
            SimpleLogger(frequency)
    for frequency in (0, -1):
        with pytest.raises(ValueError, match="step_freq must be a whole number of at least 1"):
            SimpleLossLoggerCallback("loss", step_freq=frequency)
    for frequency in (0, -2):
        with pytest.raises(ValueError, match="update_freq must be a whole number of at least 1, or -1 for never"):
            WandbCallback(update_freq=frequency)
    with pytest.raises(TypeError, match=r"tb_writer must be a SummaryWriter, such as nf\.tb_writer"):
        TensorboardLogger(NeuralModuleFactory().tb_writer)


def test_13_every_100th_step_is_in_the_file_of_another_writer_after_the_training(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(tmp_path))
    train(line(), TensorboardLogger(writer, log_epoch=False, log_lr=False), max_steps=150)
    assert written(tmp_path) == [("loss", 0), ("loss", 100)]
    train(line(), TensorboardLogger(writer, step_freq=1, log_epoch=False, log_lr=False), max_steps=30)
    assert written(tmp_path)[2:] == [("loss", step) for step in range(30)]
    writer.close()


def test_a_training_by_the_name_of_an_optimizer_gives_no_hint_that_a_script_cannot_follow(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("sgd", "adam", "adamw", "adagrad"):
        train(line(), SimpleLogger(), optimizer=name, lr=0.01, max_steps=1)
    assert "fused" not in caplog.text + capfd.readouterr().err


# -- SimpleLossLoggerCallback of 0.10 -----------------------------------------------------------------


@pytest.fixture
def old_factory(tmp_path: Path) -> OldFactory:
    return OldFactory(log_dir=str(tmp_path), create_tb_writer=True)


def test_04_print_func_gets_the_tensors_in_the_given_order_and_a_single_one_needs_no_list() -> None:
    graph, seen, single = line(2), list[list[Tensor]](), list[Any]()
    logger = SimpleLossLoggerCallback([graph.prediction, graph.loss], print_func=seen.append, step_freq=2)
    train_0_10(graph, logger, max_steps=3)
    assert [[tuple(one.shape) for one in tensors] for tensors in seen] == [[(2, 1), ()], [(2, 1), ()]]
    train_0_10(graph, SimpleLossLoggerCallback(graph.loss, print_func=single.append, step_freq=2), max_steps=3)
    assert [len(tensors) for tensors in single] == [1, 1]


def test_05_all_is_written_in_this_order_and_the_writer_is_closed(old_factory: OldFactory, tmp_path: Path) -> None:
    graph = line(2)
    logger = SimpleLossLoggerCallback(
        [graph.loss], get_tb_values=lambda values: [("Train_Loss", values[0])], step_freq=2, tb_writer=old_factory.tb_writer
    )
    train_0_10(graph, logger, factory=old_factory, max_steps=3)
    of_the_loop = [("param/lr", 0), ("param/lr", 1), ("param/lr", 2)]
    found = written(tmp_path / "tensorboard")
    expected = []
    for step, end in ((0, 2), (2, 3)):
        expected += [("Train_Loss", step), ("misc/step_time", step), ("misc/epoch", end), ("misc/epoch_time", end)]
    assert [one for one in found if one not in of_the_loop] == expected
    assert [one for one in found if one[0] == "param/lr"] == of_the_loop
    assert numbers(tmp_path / "tensorboard", "misc/epoch") == [0, 1]
    assert old_factory.tb_writer.file_writer is None  # closed


def test_05_the_rate_is_written_for_each_batch_without_callbacks_too(old_factory: OldFactory, tmp_path: Path) -> None:
    train_0_10(line(4), factory=old_factory, num_epochs=1, batches_per_step=2, lr_policy=lambda lr, step, _: lr / (step + 1))
    assert written(tmp_path / "tensorboard") == [("param/lr", 0), ("param/lr", 0), ("param/lr", 1), ("param/lr", 1)]
    assert numbers(tmp_path / "tensorboard", "param/lr") == pytest.approx([0.1, 0.1, 0.05, 0.05])


def test_06_both_functions_for_the_writer_are_called_with_numbers_too(old_factory: OldFactory, tmp_path: Path) -> None:
    graph, seen = line(2), list[tuple[str, int]]()

    def values(tensors: list[Tensor]) -> list[tuple[str, Any]]:
        seen.append(("values", -1))
        return [("loss", tensors[0]), ("plain", 0.5)]  # NeMo raises an AttributeError for a plain number

    def write(writer: Any, tensors: list[Tensor], step: int) -> None:
        assert writer is old_factory.tb_writer
        seen.append(("write", step))

    logger = SimpleLossLoggerCallback(graph.loss, None, values, write, step_freq=2, tb_writer=old_factory.tb_writer)
    train_0_10(graph, logger, factory=old_factory, max_steps=3)
    assert seen == [("values", -1), ("write", 0), ("values", -1), ("write", 2)]
    assert numbers(tmp_path / "tensorboard", "plain") == [0.5, 0.5]


def test_07_a_second_loss_logger_is_an_error_before_the_training() -> None:
    graph = line(2)
    before = graph.weights
    with pytest.raises(ValueError, match="expected at most one SimpleLossLoggerCallback"):
        train_0_10(graph, SimpleLossLoggerCallback(graph.loss), SimpleLossLoggerCallback(graph.loss), max_steps=3)
    assert graph.weights == before


def test_tensors_outside_of_the_training_are_computed_at_logged_steps_only_and_before_the_update() -> None:
    graph, seen = line(5), list[list[Tensor]]()
    worst, computed = worst_of(graph)
    again = graph.net(x=graph.x)  # the trained module, used once more
    logger = SimpleLossLoggerCallback([graph.prediction, again, worst], print_func=seen.append, step_freq=2)
    train_0_10(graph, logger, max_steps=5)
    assert len(computed) == len(seen) == 3
    assert all(torch.equal(trained, logged) for trained, logged, _ in seen)


def test_a_module_may_compute_gradients_for_a_logged_tensor() -> None:
    graph, seen = line(4), list[float]()

    def slope(x: Tensor) -> Tensor:
        point = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(graph.net(point).sum(), point)
        return gradient.mean()

    penalty = LossNM.of(slope, ["x"])(x=graph.x)
    logger = SimpleLossLoggerCallback(penalty, print_func=lambda values: seen.append(values[0].item()), step_freq=1)
    train_0_10(graph, logger, max_steps=3)
    assert seen[0] == 0.5  # the weight of the line at the start
    assert len(set(seen)) == len(seen)


def test_starts_ends_and_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nemo")
    graph = line(2)
    train_0_10(graph, SimpleLossLoggerCallback(graph.loss, step_freq=2), max_steps=2)
    said = [" ".join(part for part in record.getMessage().split() if not part[0].isdigit()) for record in caplog.records]
    assert said == [
        "Starting .....",
        "Starting epoch",
        "Step:",
        "Step time: seconds",
        "Finished epoch in seconds",
        "Done in seconds",
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_at_the_end_or_an_error_all_is_on_the_disk(fails: bool, old_factory: OldFactory, tmp_path: Path) -> None:
    class Fail(ActionCallback):
        def on_iteration_end(self) -> None:
            if fails:
                raise ArithmeticError("on purpose")

    graph = line(2)
    values = {"get_tb_values": lambda values: [("Train_Loss", values[0])], "tb_writer": old_factory.tb_writer}
    logger = SimpleLossLoggerCallback(graph.loss, step_freq=2, **values)
    evaluator = EvaluatorCallback([graph.loss], lambda v, g: g.update(n=1), lambda g: g, old_factory.tb_writer, eval_step=9)
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        train_0_10(graph, logger, Fail(), evaluator, factory=old_factory, max_steps=3)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert (("Train_Loss", 0) if fails else ("n", 3)) in written(tmp_path / "tensorboard")


def test_a_missing_writer_is_a_warning_of_the_loss_logger(caplog: pytest.LogCaptureFixture) -> None:
    logger = SimpleLossLoggerCallback("loss", get_tb_values=lambda values: [("Train_Loss", values[0])])
    train_0_10(line(2), logger, max_steps=3)
    assert caplog.text.count("nothing is written to TensorBoard: tb_writer is None") == 1


# -- Weights & Biases in both versions -----------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of offline files, which wandb reads once per process. Its service is ended after the last test."""
    import wandb

    wandb.teardown()  # tests of other files in this process may have set it up
    folder = tmp_path_factory.mktemp("offline")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        patch.setenv("WANDB_DIR", str(folder))
        yield folder
        wandb.teardown()


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    yield
    wandb = sys.modules["wandb"]
    if wandb.run is not None:
        wandb.run.finish()


def finished(folder: Path) -> WandbFile:
    """End the session like the end of a script; return its records."""
    import wandb

    assert wandb.run is not None
    name = wandb.run.id
    wandb.run.finish()
    [file] = folder.glob(f"wandb/offline-run-*-{name}/run-{name}.wandb")
    return WandbFile(file)


def config_of(found: WandbFile) -> dict[str, Any]:
    """Return the configuration, with later updates."""
    added = [item for record in found.records if record.HasField("config") for item in record.config.update]
    return found.config | {item.key: json.loads(item.value_json) for item in added}


def rows_with(found: WandbFile, name: str) -> list[tuple[int, Any]]:
    return [(row["_step"], row[name]) for row in found.rows if name in row]


def names_of(found: WandbFile) -> list[set[str]]:
    """Return the names in each row, without those of wandb itself."""
    return [{name for name in row if name[0] != "_"} for row in found.rows]


def test_f1_21_training_tensors_and_the_rate_every_25_steps_and_epochs(folder: Path) -> None:
    graph = line(20)
    worst, computed = worst_of(graph)  # the training does not need it; NeMo raises a KeyError
    arguments = argparse.Namespace(width=3, data="digits")
    train(graph, WandbCallback([graph.loss, worst], wandb_name="mine", wandb_project="tests", args=arguments), max_steps=60)
    found = finished(folder)
    assert (found.run.display_name, found.run.project) == ("mine", "tests")
    assert {name: config_of(found)[name] for name in ("width", "data")} == {"width": 3, "data": "digits"}
    assert [step for step, _ in rows_with(found, "loss")] == [0, 25, 50]
    assert [step for step, _ in rows_with(found, "worst_error")] == [0, 25, 50]
    assert len(computed) == 3
    assert rows_with(found, "LR") == [(0, 0.1), (25, 0.1), (50, 0.1)]
    assert rows_with(found, "epoch") == [(20, 0), (40, 1), (60, 2)]
    assert len(rows_with(found, "epoch_time")) == 3


@pytest.mark.parametrize("kind", ["old", "new", "evaluator"])
def test_f1_21_a_training_needs_no_wandb(kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    graph = line(2)
    callbacks = {
        "old": WandbCallback([graph.loss]),
        "new": WandBLogger(),
        "evaluator": EvaluatorCallback([graph.loss], lambda v, g: None, lambda g: {"a": 1}, wandb_name="n"),
    }
    assert train(graph, callbacks[kind], max_steps=3).progress.step == 3
    assert caplog.text.count("wandb is not installed") == 1
    monkeypatch.undo()


def test_f2_14_one_row_per_logged_step_and_one_per_epoch(folder: Path) -> None:
    train(line(2), WandBLogger(step_freq=2, wandb_name="mine", wandb_project="tests", args={"width": 3}), max_steps=4)
    found = finished(folder)
    assert [row["_step"] for row in found.rows] == [0, 2, 4]  # values of one step are one row in the file
    assert names_of(found) == [{"loss", "LR"}, {"loss", "LR", "epoch", "epoch_time"}, {"epoch", "epoch_time"}]
    assert [value for _, value in rows_with(found, "epoch")] == [0, 1]
    assert config_of(found)["width"] == 3


def test_f2_14_a_session_in_progress_is_used_and_its_configuration_is_unchanged(folder: Path) -> None:
    import wandb

    wandb.init(project="own", config={"width": 1})
    graph = line(2)
    worst, _ = worst_of(graph)  # an NmTensor is sent under its name; in NeMo its key is not a string
    entries: list[str | NmTensor] = [graph.loss, worst.unique_name]
    logger = WandBLogger(2, entries, wandb_project="other", args={"width": 3}, log_epoch=False, log_lr=False)
    train(graph, logger, max_steps=4)
    found = finished(folder)
    assert (found.run.project, config_of(found)["width"]) == ("own", 1)
    assert names_of(found) == [{"loss", worst.unique_name}] * 2


@pytest.mark.parametrize("trains", [True, False])
def test_an_evaluation_in_a_training_or_without_one_sends_its_results(trains: bool, folder: Path) -> None:
    graph = line(2)  # NeMo sends nothing for a project without a name
    session = {"wandb_project": "tests"} if trains else {"wandb_name": "alone"}
    evaluator = EvaluatorCallback([graph.loss], lambda v, g: None, lambda g: {"score": 7}, eval_step=2, **session)  # type: ignore[arg-type]
    if trains:
        train(graph, evaluator, max_steps=3)
    else:
        NeuralModuleFactory().eval([evaluator])
    assert rows_with(finished(folder), "score") == ([(0, 7), (2, 7), (3, 7)] if trains else [(0, 7)])


def test_a_failing_session_is_logged_once_and_the_training_continues(caplog: pytest.LogCaptureFixture) -> None:
    import wandb

    graph = line(2)
    logger = WandBLogger(step_freq=1, wandb_project="tests")

    class Breaks(ActionCallback):
        def on_iteration_start(self) -> None:
            if self.step == 2 and wandb.run is not None:
                wandb.run.finish()  # simulates a failed service

    assert train(graph, Breaks(), logger, max_steps=5).progress.step == 5
    assert caplog.text.count("wandb failed, so nothing more is sent to it") == 1
