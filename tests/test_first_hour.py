"""What a person who comes from PyTorch does in the first hour, and what is said then."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

import cadenza
from cadenza import At, Callback, Image, Loop, Run, Trainer, on, supervised
from cadenza.callbacks import (
    Checkpoint,
    ClipGradients,
    ConfusionMatrix,
    EarlyStopping,
    Evaluate,
    LearningRate,
    LogTraining,
    SampleImages,
    SavePredictions,
    Warmup,
)
from cadenza.engine.error_context import described
from cadenza.errors import CheckpointError, DataError, DirectoryError
from cadenza.sinks import JsonLines
from cadenza.testing import tiny_trainer

GENERATOR = torch.Generator().manual_seed(0)
DATA = [(torch.randn(8, 4, generator=GENERATOR), torch.randn(8, 1, generator=GENERATOR)) for _ in range(20)]


def squared(model: nn.Module, batch: Any) -> Any:
    return (model(batch[0]) - batch[1]).square().mean()


def trainer(*callbacks: Any, lr: float = 0.01, compute_loss: Any = squared, **arguments: Any) -> Trainer:
    made = {"max_epochs": 1, "seed": 1, "device": "cpu", "progress": False, **arguments}
    return Trainer(
        lambda: nn.Linear(4, 1), lambda given: torch.optim.SGD(given, lr), DATA, compute_loss, callbacks=callbacks, **made
    )


def test_the_loss_of_each_epoch_is_there_without_a_callback_and_a_log_training_logs_the_mean() -> None:
    seen: list[float] = []
    keep = on(Callback.on_step_end)(lambda run: seen.append(float(run.outputs["loss"].detach())))
    for callbacks in ([keep], [LogTraining("1 epoch"), keep]):
        seen.clear()
        run = trainer(*callbacks).fit()
        [(step, loss)] = run.history["train/loss"]
        assert step == 20
        assert loss == pytest.approx(sum(seen) / len(seen), rel=1e-12)


def test_other_outputs_are_logged_beside_the_loss_and_an_unknown_name_says_what_there_is() -> None:
    def loss_and_error(model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": squared(model, batch), "error": (model(batch[0]) - batch[1]).abs().mean()}

    run = trainer(compute_loss=loss_and_error).fit()
    assert run.history.names == ["train/loss", "train/error"]
    with pytest.raises(KeyError, match=r"Did you mean 'train/error'|train/loss"):
        run.history["train/errors"]


def test_a_changed_script_in_the_directory_of_a_finished_run_says_what_differs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(Checkpoint(), directory=tmp_path).fit(resume="auto")
    trainer(Checkpoint(), ClipGradients(0.1), directory=tmp_path, lr=1.0).fit(resume="auto")
    assert "lr" in caplog.text
    assert "ClipGradients" in caplog.text


@pytest.mark.parametrize("make", [lambda one: CosineAnnealingLR(one, T_max=6), lambda one: StepLR(one, 2)])
def test_a_schedule_in_epochs_is_questioned(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    trainer(LearningRate(make), max_epochs=6).fit()
    assert "every='1 epoch'" in caplog.text
    caplog.clear()
    run = trainer(LearningRate(make, "1 epoch"), LogTraining("1 epoch"), max_epochs=6).fit()
    assert "every='1 epoch'" not in caplog.text
    assert run.history["train/lr"][-1][1] < 0.01


def test_a_resume_says_where_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stop = on(Callback.on_step_end, at=10)(lambda run: run.stop("enough"))
    trainer(Checkpoint("5 steps"), stop, directory=tmp_path).fit()
    run = trainer(Checkpoint("5 steps"), directory=tmp_path, progress=True).fit(resume="last")
    assert "resumed at step-00000010: step 10, epoch 1; it was written" in capsys.readouterr().err
    assert run.progress.step == 20


def test_a_directory_with_a_wrong_name_is_questioned_and_a_series_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("baseline", "lr-0.1", "lr-0.2", "fold-a", "fold-b", "shake", "shape", "shakes", "shake-big", "snake"):
        trainer(Checkpoint(), directory=tmp_path / name).fit(resume="auto")
    assert "found no run" not in caplog.text
    trainer(Checkpoint(), directory=tmp_path / "basline").fit(resume="auto")
    said = f"found no run in {str(tmp_path / 'basline')!r}, and starts a new one. Did you mean {str(tmp_path / 'baseline')!r}"
    assert said in caplog.text


@pytest.mark.parametrize("name", ["last", "best", "step-10"])
def test_a_name_without_a_run_is_an_error_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"found no run: there is no '.*none'\. Give the directory= of the run, or"):
        trainer(Checkpoint(), directory=tmp_path / "none").fit(resume=name)
    assert not [*tmp_path.iterdir()]


def test_a_checkpoint_without_a_directory_is_an_error_where_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Checkpoint needs a folder"):
        trainer(Checkpoint())
    assert trainer(Checkpoint(directory=tmp_path)).fit().progress.step == 20


@pytest.mark.parametrize("make", [lambda: tiny_trainer(directory=""), lambda: Checkpoint(directory=" "), lambda: JsonLines("")])
def test_an_empty_path_is_an_error_and_not_the_current_folder(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"expected the path of a folder or a file; got '.?'\. Give its name, or '\.'"):
        make()
    assert not list(tmp_path.iterdir())


def test_an_error_before_the_first_step_is_at_the_start() -> None:
    @on(Callback.on_fit_start)
    def broken(run: Run) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        trainer(broken).fit()
    assert caught.value.__notes__[0] == "raised in broken.on_fit_start (callback 2 of 2) at the start"


def test_a_record_with_a_great_many_numbers_is_questioned_once(caplog: pytest.LogCaptureFixture) -> None:
    @on(Callback.on_step_end, every=5)
    def matrix(run: Run) -> None:
        run.log({f"confusion/{row}/{column}": 0.0 for row in range(16) for column in range(16)})

    trainer(matrix).fit()
    assert caplog.text.count("a record has 256 numbers, such as 'confusion/15/15'") == 1


def test_names_of_other_trainers_and_rooms_are_answered_in_each_package() -> None:
    for package, name, answer in (
        (cadenza, "EarlyStopping", "Write cadenza.callbacks.EarlyStopping."),
        (cadenza.callbacks, "ModelCheckpoint", "Add Checkpoint(...) to callbacks"),
        (cadenza.callbacks, "Trainer", "Write cadenza.Trainer."),
        (cadenza.callbacks, "TensorBoard", "Write cadenza.sinks.TensorBoard."),
        (cadenza.sinks, "TensorBoards", "Did you mean 'TensorBoard'?"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(package, name)
        assert answer in str(caught.value)


def test_predictions_and_targets_that_broadcast_are_a_warning_of_supervised() -> None:
    def fit(targets: Any, loss: Any = lambda predictions, targets: (predictions - targets).square().mean()) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        Trainer(
            model, optimizer, [(torch.ones(8, 4), targets)], supervised(loss), max_epochs=3, progress=False, device="cpu"
        ).fit()

    with pytest.warns(UserWarning, match=r"shape \(8, 1\) and targets \(8,\).*targets.reshape\(8, 1\)") as w:
        fit(torch.ones(8))
    assert len(w) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(torch.ones(8, 1))


@on(Callback.on_epoch_end)
def log_a_picture(run: Run) -> None:
    run.log("picture", torch.zeros(3, 8, 8))


class Hooked:
    def check(self, run: Run) -> None: ...


METHOD: Any = Hooked.check


class SummaryWriter:
    """Stands for that of torch, whose package is optional."""


class Unfinished(Evaluate):
    def __init__(self) -> None:
        self.threshold = 0.5


def several(models: Any) -> Trainer:
    return Trainer(models, lambda given: torch.optim.SGD(given, 0.1), DATA, squared, max_epochs=1)


def into(target: Callable[[Run], Any]) -> None:
    def step(run: Run, batch: Any) -> Any:
        loss = squared(run.model, batch)
        run.backward(loss, into=target(run))
        return loss

    trainer(compute_loss=None, step_fn=step).fit()


FIRST: Any = 0


def stepping(do: Callable[[Run, Any], Any]) -> None:
    def step(run: Run, batch: Any) -> Any:
        run.backward(loss := squared(run.model, batch))
        do(run, loss)

    trainer(compute_loss=None, step_fn=step).fit()


def batches() -> Any:
    yield from DATA


def fitting(loader: Any = DATA, optimizer: Any = None) -> None:
    made: Any = optimizer or (lambda given: torch.optim.SGD(given, 0.1))
    Trainer(nn.Linear(4, 1), made, loader, squared, max_epochs=1, progress=False, device="cpu").fit()


def left_at_once(*callbacks: Any) -> Loop:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with cadenza.attach(model, optimizer, progress=False, device="cpu", callbacks=callbacks) as loop:
        return loop


def keeping_late() -> None:
    loop = left_at_once()
    for _ in range(2):
        loop.keep("noise", torch.Generator())


@pytest.mark.parametrize(
    ("wrong", "answer"),
    [
        (lambda: trainer(compute_loss=DATA), r"For an evaluation, add Evaluate\(loader\) to callbacks"),
        (lambda: trainer(compute_loss=lambda model, x, y: 0), r"is called with \(model, batch\), and takes \(model, x, y\)"),
        (lambda: trainer(compute_loss=None, step_fn=lambda run: 0), r"step_fn is called with \(run, batch\)"),
        (lambda: EarlyStopping("eval/loss", 3), r"Give other arguments by name, such as patience=3"),  # type: ignore[arg-type]
        (lambda: Checkpoint("runs/first"), r"Did you mean directory='runs/first'\?"),
        (lambda: At([5, 10]), r"several are joined by \|, as in At\(5\) \| At\(10\)"),  # type: ignore[arg-type]
        (lambda: LearningRate(0.1), r"a constant rate is that of the optimizer"),  # type: ignore[arg-type]
        (lambda: trainer(log_a_picture).fit(), r"log Histogram\(tensor\) or Image\(tensor\)"),
        (lambda: trainer(device="auto"), r"Leave device= out"),
        (lambda: Warmup("10"), r'got \'10\'. Did you mean "10 steps"\?'),
        (lambda: Warmup(10), r'got 10. Did you mean "10 steps"\?'),
        (lambda: Checkpoint(save_top_k=3), r'Use keep=Best\("eval/loss", 3\)'),  # type: ignore[call-arg]
        (lambda: on("on_step_end"), r"Write Callback\.on_step_end"),  # type: ignore[arg-type]
        (lambda: on("on_train_batch_end"), r"Did you mean 'on_batch_end'\?"),  # type: ignore[arg-type]
        (lambda: on(squared), r"Name the moment above the function: @on\(Callback\.on_step_end\)"),
        (lambda: on(Callback.on_step_end)(METHOD), r"A method needs no @on"),
        (lambda: Evaluate(), r"Evaluate lacks loader\. Give the batches"),  # type: ignore[call-arg]
        (lambda: trainer().evaluate(), r"Trainer\.evaluate lacks loader\. Give the batches"),  # type: ignore[call-arg]
        (lambda: trainer([Evaluate(DATA)]), r"Give the callbacks in one list"),
        (lambda: trainer(SummaryWriter()), r"got a SummaryWriter\. Write TensorBoard\(\) of cadenza\.sinks"),
        (
            lambda: trainer(Unfinished()),
            r"no 'evaluation', which Evaluate sets .* Call super\(\).__init__\(\.\.\.\) in Unfinished",
        ),
        (
            lambda: several([nn.Linear(4, 1), nn.Linear(1, 4)]),
            r"got 2 modules\. Give nn\.ModuleList\(\.\.\.\) .*cadenza\.attach",
        ),
        (lambda: several({"generator": nn.Linear(4, 1)}), r"got 1 module\. Give nn\.ModuleDict"),
        (lambda: into(lambda run: run.model), r"expected an optimizer of the run; got Linear.* Give the one of its parameters"),
        (lambda: stepping(lambda run, loss: run.update(FIRST)), r"got 0\. Write run\.update\(run\.optimizers\[0\]\)"),
        (lambda: stepping(lambda run, loss: None), r"got 'NoneType'. End the function with `return loss`"),
        (lambda: trainer(compute_loss=lambda model, batch: 1.5).fit(), r"Return the tensor itself, not loss\.item\(\)"),
        (lambda: trainer(tokens=lambda batch: batch[0]).fit(), r"tokens=<lambda> must .* got Tensor\(8, 4\)\."),
        (lambda: fitting(loader=batches), r"got batches\. Pass a DataLoader, or the list of its batches: \[\*batches\(\)\]"),
        (lambda: Image(torch.zeros(8, 9, 3)), r"got \(8, 9, 3\)\. Write pixels\.permute\(2, 0, 1\)"),
        (
            lambda: fitting(optimizer=lambda model: torch.optim.SGD(model.head.parameters(), 0.1)),
            r"has no 'head'\. Give the list",
        ),
        (lambda: import_module("cadenza.loggers"), r"has no attribute 'loggers'\. Add a sink such as Console"),
        (
            lambda: left_at_once(LearningRate(lambda one, total: CosineAnnealingLR(one, total))),
            r"Give attach\(max_steps=\.\.\.\)",
        ),
        (lambda: keeping_late(), r"was called twice\. Call it before the loop and not in it"),
    ],
)
def test_a_mistake_of_the_first_hour_is_answered(wrong: Any, answer: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError, DataError, ImportError), match=answer):
        wrong()


def test_a_result_that_is_read_before_its_evaluation_has_a_likely_cure() -> None:
    read = on(Callback.on_epoch_end)(lambda run: run.history["eval/loss"].clear())
    with pytest.raises(KeyError, match="nothing was logged as 'eval/loss'") as caught:
        trainer(Evaluate(DATA), read).fit()
    assert "likely cure: Evaluate runs after on_epoch_end" in caught.value.__notes__[-1]
    assert "read results of 'eval' in on_eval_end(run, evaluation)" in caught.value.__notes__[-1]
    with pytest.raises(KeyError) as caught:
        trainer(read).fit()
    assert "likely cure" not in "".join(caught.value.__notes__)


def test_a_batch_of_one_tensor_is_shown_as_a_tuple() -> None:
    assert described((torch.ones(2, 4),)) == "(float32[2, 4],) on cpu"


def test_an_interval_longer_than_the_run_is_a_warning_with_its_cure(caplog: pytest.LogCaptureFixture) -> None:
    trainer(LogTraining("99 steps"), Evaluate(DATA, every="99 steps")).fit()
    cure = "the run ends after 20 steps. Give it a shorter interval, or an earlier point"
    assert f"Evaluate (every 99 steps) never fires in this run: {cure}" in caplog.text
    assert f"never fires in this run: {cure.replace('. ', '. It logs nothing, such as train/loss. ')}" in caplog.text


def test_a_run_that_left_no_checkpoint_is_started_anew_and_not_continued(tmp_path: Path) -> None:
    trainer(directory=tmp_path).fit()
    with pytest.raises(DirectoryError, match=r"It has no checkpoint to continue from: start it anew with fit\(resume='auto'\)"):
        trainer(directory=tmp_path).fit()


def test_a_limit_below_the_end_of_the_run_says_above_which(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for epochs in (3, 1):
        trainer(Checkpoint(), max_epochs=epochs, directory=tmp_path).fit(resume="auto")
    assert "To continue, increase max_epochs=1 to more than 3" in caplog.text


def test_a_loss_function_with_its_arguments_in_another_order_has_a_likely_cure() -> None:
    with pytest.raises(TypeError, match="not subscriptable") as caught:
        trainer(compute_loss=lambda batch, model: squared(model, batch)).fit()
    assert "likely cure: compute_loss gets (model, batch), in this order" in caught.value.__notes__[0]


def test_a_decorator_may_unpack_the_batch() -> None:
    def unpacked(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def compute(model: nn.Module, batch: Any) -> Any:
            return function(model, *batch)

        return compute

    @unpacked
    def loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model(inputs), targets)

    run = tiny_trainer(compute_loss=loss).fit()
    assert run.outcome is not None
    assert run.outcome.kind == "finished"


ENTROPY = supervised(nn.CrossEntropyLoss())
CLASSES = [(torch.randn(6, 4, generator=GENERATOR), torch.arange(6) % 3)]
WITH_NONE: Any = [torch.ones(4), None]


def log_wrongly(run: Run, **keywords: Any) -> None:
    run.log("x", 1, **keywords)


def stop_wrongly(run: Any) -> None:
    run.stop()


class Doubled(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        return super().forward(inputs), inputs


class Lightning(nn.Linear):
    def training_step(self, batch: Any, index: int) -> Any: ...


@pytest.mark.parametrize(
    ("fit", "cure"),
    [
        (lambda: classified([(torch.ones(2, 4), ("cat", "dog"))]), "the targets are no tensor, but a tuple"),
        (lambda: classified([(torch.ones(2, 5, 4), torch.zeros(2, 5).long())]), r"predictions\.transpose\(1, 2\)"),
        (lambda: classified(CLASSES, Evaluate(CLASSES, metrics={"acc": BinaryAccuracy()})), r"for 3 classes use a multiclass"),
        (
            lambda: classified(CLASSES, Evaluate(CLASSES, metrics={"acc": MulticlassAccuracy(7)})),
            "make the metric with num_classes=",
        ),
        (
            lambda: classified(DataLoader(WITH_NONE, batch_size=2)),
            "If it is a sample: the data set must return one",
        ),
        (
            lambda: trainer(on(Callback.on_step_end)(partial(log_wrongly, step=3))).fit(),
            "leave it out: the record of a step",
        ),
        (lambda: trainer(on(Callback.on_step_end)(partial(log_wrongly, prog_bar=True))).fit(), "is enough: sinks"),
        (lambda: trainer(on(Callback.on_step_end)(stop_wrongly)).fit(), r"as in run\.stop\('the loss is flat'\)"),
        (lambda: classified(CLASSES, model=Lightning(4, 3), compute_loss=None), r"Trainer\.from_lightning\(module, data"),
        (
            lambda: classified(CLASSES, compute_loss=steps_itself),
            r"if compute_loss calls optimizer\.step\(\), remove that line",
        ),
        (
            lambda: classified(CLASSES, model=Doubled(4, 3)),
            r"the model returned a tuple, .* as in loss_fn\(model\(inputs\)\[0\], targets\)",
        ),
        (
            lambda: classified([(torch.ones(2, 4),)], compute_loss=lambda model, batch: model(batch[:, 1])),
            r"unpack it first, .* of a single tensor \(ids,\) = batch",
        ),
    ],
)
def test_an_error_of_the_first_hour_has_a_likely_cure(fit: Any, cure: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)) as caught:
        fit()
    assert re.search(f"likely cure: .*{cure}", "\n".join(caught.value.__notes__)), caught.value.__notes__


def classified(loader: Any, *callbacks: Any, model: nn.Module | None = None, compute_loss: Any = ENTROPY) -> None:
    made = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)) if model is None else model
    arguments: Any = {"max_epochs": 1, "progress": False, "device": "cpu"}
    Trainer(made, torch.optim.SGD(made.parameters(), 0.1), loader, compute_loss, callbacks=callbacks, **arguments).fit()


def steps_itself(model: nn.Module, batch: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward(retain_graph=True)
    optimizer.step()
    return loss


def test_an_iterator_of_a_loader_is_questioned_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    samples: Any = torch.ones(8, 4)
    loader: Any = DataLoader(samples, batch_size=4)
    arguments: Any = {"compute_loss": lambda model, batch: model(batch).mean(), "progress": False, "max_epochs": 2}
    with pytest.raises(DataError, match="no batch in epoch 2"):
        Trainer(lambda: nn.Linear(4, 1), lambda given: torch.optim.SGD(given, 0.1), iter(loader), **arguments).fit()
    assert "the training loader is an iterator (_SingleProcessDataLoaderIter), which can be read once" in caplog.text


# -- a loop of one's own ---------------------------------------------------------------------------


def attached(directory: Path, steps: int, *, late: bool = False, fails_at: int | None = None) -> list[str]:
    """Train in an attached loop with two updates on each rollout; return the names of the rollouts."""
    model, names = nn.Linear(4, 1), list[str]()
    made = {"device": "cpu", "progress": True, "resume": "auto", "callbacks": [Checkpoint("2 steps")]}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with cadenza.attach(model, optimizer, max_steps=steps, directory=directory, seed=1, **made) as loop:  # type: ignore[arg-type]
        if not late:
            loop.keep("names", (names.copy, names.extend))
        while not loop.over():
            if late and not names:
                loop.keep("names", (names.copy, names.extend))
            names.append(f"rollout {loop.run.progress.step}")
            for batch in DATA[:2]:
                with loop.step():
                    loop.backward(squared(model, batch))
                    loop.update()
                if loop.run.progress.step == fails_at:
                    raise ValueError("the game is over")
    return names


def test_an_error_inside_a_rollout_speaks_of_the_loop_and_not_of_block_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match="the game is over"):
        attached(tmp_path, 6, fails_at=3)
    assert "block_saves" not in caplog.text
    assert attached(tmp_path, 6) == ["rollout 0", "rollout 2", "rollout 4"]


def test_a_resumed_loop_has_no_epochs_and_may_keep_an_object_before_its_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    attached(tmp_path, 4)
    assert attached(tmp_path, 6, late=True) == ["rollout 0", "rollout 2", "rollout 4"]
    assert "does not keep" not in caplog.text
    assert "resumed at step-00000004: step 4; it was written" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    ("callbacks", "kept", "warns"),
    [((), False, True), ((LearningRate,), False, False), ((), True, False), (None, False, False)],
)
def test_a_scheduler_that_the_loop_would_step_is_questioned(
    callbacks: Any, kept: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler: Any = None if callbacks is None else StepLR(optimizer, 5)
    drives = [callback(scheduler) for callback in callbacks or ()]
    made: Any = {"max_epochs": 1, "device": "cpu", "progress": False}
    with Trainer(model, optimizer, DATA, callbacks=drives, **made).steps() as steps:
        if kept:
            steps.keep("scheduler", scheduler)
        for step in steps:
            for batch in step:
                step.backward(squared(model, batch))
    assert ("a scheduler was made for SGD, and no callback steps it" in caplog.text) == warns


# -- what never comes is said ----------------------------------------------------------------------


def test_a_limit_of_tokens_inside_the_first_epoch_is_said_as_one_of_steps(caplog: pytest.LogCaptureFixture) -> None:
    evaluate = Evaluate(DATA[:2])
    trainer(evaluate, max_epochs=None, max_tokens=30, tokens=lambda batch: 5).fit()
    assert (
        "Evaluate (every epoch) is not expected to fire in this run: with max_tokens=30, if each step has 5 tokens as the"
        in caplog.text
    )
    assert "the run ends before the first epoch is over" in caplog.text
    caplog.clear()
    run = trainer(evaluate, max_epochs=None, max_tokens=100, tokens=lambda batch: 5).fit()
    assert "not expected" not in caplog.text
    assert "eval/loss" in run.history.names


@pytest.mark.parametrize(
    "waits",
    [
        lambda name, folder: ConfusionMatrix(evaluation=name),
        lambda name, folder: SavePredictions(folder / "rows.csv", evaluation=name),
        lambda name, folder: SampleImages(evaluation=name),
    ],
)
def test_a_callback_that_waits_for_an_evaluation_that_is_not_there_says_so(
    waits: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    alone = trainer(waits("eval", tmp_path))
    said = "it waits for the evaluation 'eval', and there is none. Add Evaluate(loader, name='eval'), or"
    assert said in str(alone.plan())
    alone.fit()
    assert f"never fires in this run: {said}" in caplog.text
    misspelled = trainer(waits("evall", tmp_path), Evaluate(DATA[:2], every="50 steps"))
    assert "evaluation 'evall', and there is 'eval'. Did you mean 'eval'?" in str(misspelled.plan())
    assert "waits for" not in str(trainer(waits("eval", tmp_path), Evaluate(DATA[:2])).plan())
