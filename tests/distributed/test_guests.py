"""The four guests with two processes: each in its own trainer, and all of their callbacks side by side in a native one."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Run
from cadenza.callbacks import EarlyStopping, Evaluate
from cadenza.compat import fastnlp as fast
from cadenza.compat.accelerated import callbacks as accelerated
from cadenza.compat.fastnlp.envs import FASTNLP_LAUNCH_TIME
from cadenza.compat.nemo import core as nemo
from cadenza.compat.nemo.core import callbacks as nemo_callbacks
from cadenza.compat.nemo10 import core as nemo10
from cadenza.compat.nemo10.core import callbacks as nemo10_callbacks
from cadenza.compat.neural.logs import logging
from cadenza.testing import launch
from tests.compat.fastnlp.toy import Error, Scripted, Toy, rows, toy_trainer
from tests.compat.nemo.graphs import SGD, line, names_in, written
from tests.distributed.parts import judged, loader, rank, trainer, vector, weights_of
from tests.distributed.standing import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of TensorBoard's own parts


# -- NeMo ------------------------------------------------------------------------------------------------


def numbered(count: int) -> DataLoader[Any]:
    x = torch.linspace(-1, 1, count).unsqueeze(1)
    return DataLoader(TensorDataset(x, 2 * x + 1), 2)


class Judge:
    """What a NeMo user gives an EvaluatorCallback: the mean absolute error, and how many workers each call had."""

    def __init__(self) -> None:
        self.workers: list[int] = []
        self.shared: set[bool] = set()

    def each(self, graph: Any, values: Any, seen: dict[str, Any]) -> None:
        predictions, targets = values[graph.prediction.unique_name], values[graph.y.unique_name]
        self.workers.append(len(predictions))
        self.shared.add(values["IS_FROM_DIST_EVAL"])
        for prediction, target in zip(predictions, targets, strict=True):
            seen.setdefault("errors", []).extend((prediction - target).abs().flatten().tolist())

    def done(self, seen: dict[str, Any]) -> dict[str, float]:
        return {"mae": sum(seen["errors"]) / len(seen["errors"]), "samples": len(seen["errors"])}


def evaluator(kind: Any, graph: Any, judge: Judge, **more: Any) -> Any:
    return kind([graph.prediction, graph.y], lambda values, seen: judge.each(graph, values, seen), judge.done, **more)


def nemo_training(core: Any, callbacks: Any, folder: Path, resumed: bool = False) -> dict[str, Any]:
    """Train a line with all built-in callbacks of a version; return what can be seen of it."""
    nf = core.NeuralModuleFactory(
        log_dir=str(folder), create_tb_writer=True, random_seed=1, placement=core.DeviceType.CPU, add_time_to_log_dir=False
    )
    graph, judge = line(loader=numbered(20)), Judge()
    evaluated = line(loader=numbered(9), net=graph.net)
    judging = evaluator(callbacks.EvaluatorCallback, evaluated, judge, eval_step=4, tb_writer=nf.tb_writer)
    files = callbacks.CheckpointCallback(nf.checkpoint_dir, step_freq=2)
    stopping = EarlyStopping("EvaluatorCallback/mae", mode="max", patience=1, ignore_first=1)
    shared = [judging, files, stopping]
    if core is nemo10:
        own = [
            callbacks.SimpleLossLoggerCallback(
                [graph.loss],
                print_func=lambda values: logging.info(f"loss {float(values[0].detach()):.3f}"),
                get_tb_values=lambda values: [("loss", values[0].detach())],
                step_freq=1,
                tb_writer=nf.tb_writer,
            ),
            callbacks.WandbCallback(update_freq=-1),
        ]
    else:
        own = [callbacks.SimpleLogger(step_freq=1), callbacks.TensorboardLogger(nf.tb_writer, step_freq=1)]
    run: Run = nf.train(
        [graph.loss],
        optimizer="sgd",
        callbacks=[*own, *shared],
        optimization_params={**SGD, "num_epochs": 4},
        batches_per_step=1 if rank() is not None else 2,
    )
    assert run.outcome is not None
    return {
        "weights": vector(graph.weights),
        "workers": judge.workers,
        "shared": judge.shared,
        "mae": dict(run.history["EvaluatorCallback/mae"]),
        "ended": (run.outcome.kind, run.progress.step),
        "world": (nf.world_size, nf.global_rank, nf.tb_writer is not None),
    }


@pytest.fixture
def without_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have wandb send nothing, and forget it: it reads its settings once a process."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    yield
    if (wandb := sys.modules.get("wandb")) is not None:
        wandb.finish()
        wandb.teardown()


@pytest.mark.parametrize("core", [nemo, nemo10], ids=["0.11", "0.10"])
def test_nemo_trains_judges_and_writes_on_two_processes_as_on_one(
    core: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str], without_wandb: None
) -> None:
    pytest.importorskip("tensorboard")
    callbacks = nemo_callbacks if core is nemo else nemo10_callbacks
    alone = nemo_training(core, callbacks, tmp_path / "alone")
    said = capfd.readouterr().out.count
    first, second = launch(lambda: nemo_training(core, callbacks, tmp_path / "two"))
    shown = capfd.readouterr().out.count
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], alone["weights"], atol=1e-6)
    assert first["mae"] == second["mae"] == pytest.approx(alone["mae"])
    assert first["ended"] == second["ended"] == alone["ended"]
    assert first["workers"][:3] == [2, 2, 1]  # 5 batches, and the values of the main process's and the other's each time
    assert (first["shared"], second["workers"]) == ({True}, [])
    assert (first["world"], second["world"]) == ((2, 0, True), (2, 1, False))
    for text in ("Doing Evaluation", "Saved checkpoint", "loss"):
        assert shown(text) == said(text) > 0
    for name in ("checkpoints", "tensorboard"):
        assert len(names_in(tmp_path / "two" / name)) == len(names_in(tmp_path / "alone" / name))
    two, one = (
        [entry for entry in written(tmp_path / where / "tensorboard") if entry[0] != "param/lr"]  # one a batch
        for where in ("two", "alone")
    )
    assert two == one
    logs = [name for name in names_in(tmp_path / "two") if name.startswith("log_")]
    assert logs == ["log_globalrank-0_localrank-0.txt", "log_globalrank-1_localrank-1.txt"]


def nemo_modules(folder: Path) -> dict[str, Any]:
    """Train with the callbacks that act on modules, then infer; return what can be seen of it."""
    nf = nemo.NeuralModuleFactory(random_seed=1, placement=nemo.DeviceType.CPU)
    graph, scale = line(loader=numbered(20)), nn.Dropout(0.0)
    graph.net.freeze(["layer.weight"])
    policy = nemo.ValueSetterCallback.Policy(nemo.ValueSetterCallback.Method.Linear(0.0, 0.9), 0.0, 1.0)
    callbacks = [
        nemo.UnfreezeCallback([graph.net], start_epoch=1),
        nemo.ModuleSaverCallback([graph.net], step_freq=4, folder=str(folder), checkpoints_to_keep=1),
        nemo.ValueSetterCallback(scale, "p", [policy], total_steps=10),
    ]
    accumulate = 1 if rank() is not None else 2
    run = nf.train([graph.loss], None, "sgd", {**SGD, "num_epochs": 2}, callbacks, batches_per_step=accumulate)
    inferred = nf.infer([graph.x])
    failures = []
    for failing in (None, 1):
        try:
            nf.sync_all_processes(status=rank() is None or rank() != failing)
        except ValueError as error:
            failures.append(str(error))
    return {
        "weights": vector(graph.weights),
        "steps": run.progress.step,
        "p": scale.p,
        "files": [name.rpartition("-")[2] for name in names_in(folder)],
        "inferred": None if inferred is None else sorted(vector(inferred[0]).tolist()),
        "failures": failures,
    }


def test_callbacks_on_modules_and_inference_of_nemo_do_on_two_processes_what_they_do_on_one(tmp_path: Path) -> None:
    alone = nemo_modules(tmp_path / "alone")
    first, second = on_ranks(lambda: nemo_modules(tmp_path / "two"))
    assert torch.equal(first["weights"], second["weights"])  # a weight that is unfrozen later is synchronized, too
    assert torch.allclose(first["weights"], alone["weights"], atol=1e-6)
    assert alone["weights"][0] != 0.5
    assert first["steps"] == second["steps"] == alone["steps"] == 10
    assert first["p"] == second["p"] == alone["p"] == pytest.approx(0.9)
    assert first["files"] == alone["files"] == ["10.pt", "8.pt"]
    assert first["inferred"] == alone["inferred"] == pytest.approx(torch.linspace(-1, 1, 20).tolist())
    assert second["inferred"] is None  # as in NeMo: the main process has the values
    assert first["failures"] == ["the process with rank 0 is well, but another process failed: see its error"]
    assert second["failures"] == alone["failures"] == []


# -- fastNLP ---------------------------------------------------------------------------------------------


class Normed(Toy):
    """Has a method of its own for training, and one for evaluation."""

    def train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self(x)["pred"], y)}


def fast_loader(count: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(rows(count), options.pop("batch_size", 4), **options)  # type: ignore[arg-type]  # a list is one


def fast_training(folder: Path) -> dict[str, Any]:
    os.environ.pop(FASTNLP_LAUNCH_TIME, None)  # as in processes that a launcher started
    files = fast.CheckpointCallback(folder / "all", every_n_epochs=1, last=True, topk=1, save_object="trainer")
    best = fast.LoadBestModelCallback(save_folder=folder / "best", delete_after_train=False)
    more = fast.MoreEvaluateCallback(fast_loader(9), {"more": Error()}, evaluate_every=-1)
    torch.manual_seed(3 + (rank() or 0))
    one = toy_trainer(
        callbacks=[more, files, best, fast.LoadBestModelCallback(), fast.EarlyStopCallback(patience=2)],
        model=Normed(),
        train_dataloader=fast_loader(24, shuffle=True),
        evaluate_dataloaders=fast_loader(13),
        metrics={"error": Error()},
        monitor="error",
        larger_better=False,
        n_epochs=3,
        accumulation_steps=1 if rank() is not None else 2,
    )
    results: list[float] = []
    one.add_callback_fn(fast.Event.on_evaluate_end(), lambda trainer, found: results.append(found["error"]))
    with redirect_stdout(io.StringIO()) as told:
        one.run()
    assert one.live is not None
    return {
        "weights": vector(one.model.parameters()),
        "results": results,
        "samples": one.live.progress.samples,
        "steps": (one.cur_epoch_idx, one.global_forward_batches),
        "told": told.getvalue().count("More evaluate results"),
    }


def test_fastnlp_trains_judges_and_saves_on_two_processes_as_on_one(tmp_path: Path) -> None:
    alone = fast_training(tmp_path / "alone")
    first, second = on_ranks(lambda: fast_training(tmp_path))
    assert torch.equal(first["weights"], second["weights"])
    assert torch.allclose(first["weights"], alone["weights"], atol=1e-6)
    assert first["results"] == second["results"] == pytest.approx(alone["results"], rel=1e-5)
    assert first["samples"] == second["samples"] == alone["samples"]
    assert first["steps"] == second["steps"] == (3, 9)
    assert (first["told"], second["told"]) == (3, 0)
    [launched] = (tmp_path / "all").iterdir()  # one launch, whoever asked the clock
    assert {"trainer-epoch_1", "trainer-epoch_3", "trainer-last"} < {path.name for path in launched.iterdir()}
    [launched] = (tmp_path / "best").iterdir()
    assert [path.name for path in launched.iterdir()] == ["best_so_far"]


@pytest.mark.parametrize(
    "event", ["on_train_batch_begin", "on_before_optimizers_step", "on_train_batch_end", "on_fetch_data_end"]
)
def test_an_early_stop_of_fastnlp_on_one_process_is_taken_by_all(event: str, tmp_path: Path) -> None:
    class Stop(fast.Callback):
        pass

    def stop(self: fast.Callback, trainer: Any, *_: Any) -> None:
        if rank() == 1 and trainer.global_forward_batches >= 2:
            raise fast.EarlyStopException("enough")

    setattr(Stop, event, stop)

    def stopped(native: bool) -> tuple[Tensor, int]:
        if native:
            saving = fast.CheckpointCallback(tmp_path, last=True, every_n_batches=2)
            one = trainer(max_epochs=4, callbacks=[Stop(), saving])
            step = one.fit().progress.step
            return weights_of(one), step
        facade = toy_trainer(24, [Stop()], {"acc": Scripted(*range(20))}, evaluate_every=1)
        facade.run()
        assert facade.live is not None
        return vector(facade.model.parameters()), facade.live.progress.step

    for native in (False, True):
        first, second = on_ranks(lambda native=native: stopped(native))  # type: ignore[misc]  # mypy does not infer it
        assert first[1] == second[1] < 12
        assert torch.equal(first[0], second[0])


# -- pytorch-accelerated ---------------------------------------------------------------------------------


class GatheringAtTheEnd(accelerated.TrainerCallback):
    """Talks to the other process at the end of each epoch."""

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.gather(torch.ones(1))

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        trainer.gather(torch.ones(1))


@pytest.mark.parametrize(
    "event", ["on_train_step_end", "on_train_epoch_end", "on_eval_step_end", "on_eval_epoch_end", "on_training_run_epoch_end"]
)
def test_a_stop_of_pytorch_accelerated_on_one_process_is_taken_by_all_in_a_native_run(event: str, tmp_path: Path) -> None:
    class Stop(accelerated.TrainerCallback):
        pass

    def stop(self: Any, one: Any, *_: Any, **__: Any) -> None:
        if rank() == 1 and one.native_run.progress.step >= 3 - (event == "on_train_step_end"):
            raise accelerated.StopTrainingError("enough")

    setattr(Stop, event, stop)

    def stopped() -> tuple[Tensor, int, int, str | None]:
        best = accelerated.SaveBestModelCallback(tmp_path / "best.pt")  # in which all wait for each other
        listed = [Stop(), Evaluate(loader(9)), accelerated.LogMetricsCallback(), best, GatheringAtTheEnd()]
        one = trainer(max_epochs=4, callbacks=listed)
        run = one.fit()
        assert run.outcome is not None
        return weights_of(one), run.progress.step, run.progress.epoch, run.outcome.kind

    first, second = on_ranks(stopped)
    assert first[1:] == second[1:] == (3, 1, "stopped")
    assert torch.equal(first[0], second[0])


# -- all of them -----------------------------------------------------------------------------------------


def everyone(folder: Path) -> list[Any]:
    """Return callbacks of all four, with native ones between them."""
    return [
        nemo_callbacks.SimpleLogger(step_freq=2),
        nemo_callbacks.CheckpointCallback(str(folder / "nemo"), step_freq=2),
        Evaluate(loader(9), compute=judged, every="1 epoch"),
        fast.CheckpointCallback(folder / "fast", every_n_epochs=1),
        fast.LoadBestModelCallback("eval/loss", larger_better=False),
        accelerated.PrintProgressCallback(),
        accelerated.SaveBestModelCallback(folder / "best.pt", watch_metric="eval_loss_epoch"),
        accelerated.EarlyStoppingCallback(9, watch_metric="eval_loss_epoch"),
        nemo10_callbacks.SimpleLossLoggerCallback(["loss"], print_func=lambda values: logging.info("ten"), step_freq=3),
        fast.EarlyStopCallback("eval/loss", larger_better=False, patience=9),
        EarlyStopping("eval/loss", mode="min", patience=9),
    ]


def test_callbacks_of_all_four_stand_side_by_side_in_a_native_list(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def side_by_side() -> tuple[Tensor, dict[str, Any], list[str]]:
        os.environ.pop(FASTNLP_LAUNCH_TIME, None)
        one = trainer(callbacks=everyone(tmp_path), max_epochs=2)
        run = one.fit()
        return weights_of(one), {name: run.history[name] for name in run.history.names}, [str(one) for one in run.faults]

    first, second = launch(side_by_side)
    said = capfd.readouterr().out
    assert torch.equal(first[0], second[0])
    assert first[1:] == second[1:]
    assert first[2] == []
    assert said.count("ten") == 2  # steps 0 and 3
    assert said.count("loss: ") >= 3
    assert "trainer-STEP-2.pt" in names_in(tmp_path / "nemo")
    [launched] = (tmp_path / "fast").iterdir()
    assert names_in(launched) == ["model-epoch_1", "model-epoch_2"]
    assert (tmp_path / "best.pt").is_file()
