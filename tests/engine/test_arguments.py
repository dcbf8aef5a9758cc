"""What is given by mistake or out of habit, what the error answers, and what a run says before its first step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import cadenza
from cadenza import Callback, Run, Trainer, on, supervised
from cadenza.callbacks import Checkpoint, ClipGradients, EarlyStopping, Evaluate, FindBatchSize, LogTraining
from cadenza.drivers import SingleDriver, driver_of
from cadenza.errors import CallbackError, CheckpointMismatchError, DataError, LossError, MonitorError
from cadenza.loading import Mixture
from cadenza.testing import Recorder, tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.engine.parts import Stream

DATA = TensorDataset(torch.zeros(6, 1), torch.zeros(6, 1))


def loosely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose types are not checked: each call here is wrong on purpose."""
    return function


# -- a data set is no loader ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [DATA, Subset(DATA, [0, 1]), Stream(DATA), datasets.Dataset.from_dict({"x": [1.0, 2.0]})],
    ids=["TensorDataset", "Subset", "Stream", "of Hugging Face"],
)
@pytest.mark.parametrize(
    "give",
    [
        lambda data: tiny_trainer(loader=data),
        lambda data: Evaluate(data),
        lambda data: tiny_trainer().evaluate(data),
        lambda data: tiny_trainer().predict(data, compute=lambda model, batch: batch),
    ],
    ids=["Trainer", "Evaluate", "evaluate", "predict"],
)
def test_a_data_set_as_a_loader_is_an_error_that_shows_a_data_loader(give: Callable[[Any], object], data: Any) -> None:
    with pytest.raises(TypeError, match=rf"got the data set {type(data).__name__}: .*DataLoader\(dataset, batch_size=32\)"):
        give(data)


def test_a_data_set_that_comes_in_on_setup_or_from_the_function_that_makes_loaders_is_found_as_well() -> None:
    replace = on(Callback.on_setup)(lambda run: run.replace_loader(Stream(DATA)))
    with pytest.raises(TypeError, match=r"run\.loader must be an iterable of batches; got the data set Stream"):
        tiny_run(callbacks=[replace])
    with pytest.raises(TypeError, match=r"make_loader\(1\) must be an iterable of batches; got the data set TensorDataset"):
        tiny_run(callbacks=[FindBatchSize(lambda size: DATA, max_size=4)])  # type: ignore[arg-type, return-value]


def test_loaders_of_every_kind_are_accepted_and_a_generator_once() -> None:
    for loader in (
        DataLoader(DATA, batch_size=2),
        DataLoader(DATA, batch_size=None),
        DataLoader(Stream(DATA), 2),
        list(Stream(DATA)),
    ):
        assert tiny_run(loader=loader, epochs=1).outcome is not None  # a list of samples looks as a list of batches does
    with pytest.raises(
        TypeError, match=r"loader of 'eval' is read at each evaluation; got a generator, which can be read once"
    ):
        Evaluate(batch for batch in tiny_loader())
    assert "eval/loss" in tiny_trainer().evaluate(batch for batch in tiny_loader())


@pytest.mark.parametrize(
    ("loader", "came"),
    [
        (torch.zeros(6, 1), r"got a Tensor: each row would become a batch\. Pass TensorBatches"),
        ({"train": [1]}, "got a dict"),
        ("data.csv", "got a str"),
        (None, r"got None\. Pass a DataLoader"),
        (TensorDataset, r"Pass a DataLoader"),
    ],
    ids=["tensor", "dict", "str", "None", "class"],
)
def test_what_gives_no_batches_is_an_error_that_names_the_loader(loader: Any, came: str) -> None:
    with pytest.raises(TypeError, match=f"loader.* must be an iterable of batches; .*{came}"):
        tiny_trainer(loader=tiny_loader()).evaluate(loader)
    model = tiny_model()
    with pytest.raises(TypeError, match=f"loader.* must be an iterable of batches; .*{came}"):
        Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loader, supervised(nn.MSELoss()), max_epochs=1)


# -- metrics --------------------------------------------------------------------------------------------


class Mean:
    def update(self, predictions: Tensor, targets: Tensor) -> None: ...
    def reset(self) -> None: ...
    def compute(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"m": Mean}, r"metrics\['m'\] is the class Mean; expected an instance: Mean\(\.\.\.\)"),
        (Mean, r"metrics is the class Mean; expected an instance"),
        ([Mean(), "acc"], r"metrics\[1\] must have update, compute and reset, .*; got 'acc'\. Put the function into a class"),
        ({"m": max}, r"metrics\['m'\] must have update, compute and reset.*Return the number from compute"),
        ("accuracy", r"metrics must have update, compute and reset, .*; got 'accuracy'"),
        ([Mean(), Mean()], r"two metrics have the name 'mean'. Give a mapping"),
    ],
)
def test_what_is_no_metric_is_an_error_that_says_what_one_is(metrics: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Evaluate(tiny_loader(), metrics=metrics)


# -- what stands in callbacks ---------------------------------------------------------------------------

MODEL = tiny_model()
SGD = torch.optim.SGD(MODEL.parameters(), 0.1)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        (torch.optim.lr_scheduler.StepLR(SGD, 3), r"the scheduler StepLR\. Write LearningRate\(scheduler\)"),
        (SGD, r"the optimizer SGD\. Give it to the trainer"),
        (Mean(), r"the metric Mean\. Write Evaluate\(loader, metrics="),
        (DataLoader(DATA), r"a DataLoader\. Write Evaluate\(loader\)"),
        (lambda run: None, r"a function made into one with @on"),
    ],
)
def test_what_is_no_callback_is_an_error_that_says_where_it_goes(given: Any, answer: str) -> None:
    with pytest.raises(CallbackError, match=rf"callbacks\[0\] .*{answer}"):
        tiny_trainer(callbacks=[given])


def test_a_callback_without_any_hook_is_an_error_that_names_the_nearest() -> None:
    for name, nearest in (("training_epoch_end", "on_epoch_end"), ("step_end", "on_step_end")):
        one = type("Nothing", (Callback,), {name: lambda self, run: None})()
        with pytest.raises(CallbackError, match=rf"has no hook, so it is never called\. Did you mean '{nearest}'\?"):
            tiny_trainer(callbacks=[one])
    with_state = type("State", (Callback,), {"state_dict": lambda self: {"a": 1}})()
    tiny_run(callbacks=[with_state, Recorder()])  # state or listeners of its own are enough


# -- habits of other trainers ---------------------------------------------------------------------------

TRAINER, FIT = loosely(Trainer), loosely(tiny_trainer().fit)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TRAINER(MODEL, SGD, [], epochs=3), r"Trainer has no argument 'epochs'\. Did you mean 'max_epochs'\?"),
        (lambda: TRAINER(MODEL, SGD, [], eval_dataloader=[]), r"'eval_dataloader'\. Add Evaluate\(loader"),
        (lambda: TRAINER(MODEL, SGD, [], max_epoch=3), r"'max_epoch'\. Did you mean 'max_epochs'\?"),
        (lambda: TRAINER(MODEL, SGD, [], gradient_clip_val=1), r"Add ClipGradients"),
        (lambda: TRAINER(MODEL, SGD, [], None, 3), r"takes at most 4 positional arguments; got 5"),
        (lambda: FIT(MODEL), r"resume must be False, \"auto\", .*; got Linear.*: call fit\(\)"),
        (lambda: FIT(MODEL, []), r"Trainer\.fit takes at most 1 positional argument.*: call fit\(\)"),
        (lambda: FIT(epochs=3), r"Trainer\.fit has no argument 'epochs'\..*Trainer\(max_epochs=\.\.\.\)"),
        (lambda: FIT(ckpt_path="a"), r"'ckpt_path'\. Did you mean 'resume'\?"),
        (lambda: FIT(3), r"got 3\. Set the length in the trainer"),
        (lambda: FIT(None), r"resume must be .*; got None\."),
        (lambda: loosely(tiny_trainer().evaluate)(dataloaders=[]), r"'dataloaders'\. Did you mean 'loader'\?"),
        (lambda: loosely(Evaluate)([], val_check_interval=3), r"Evaluate has no argument 'val_check_interval'"),
        (lambda: loosely(Checkpoint)(dirpath="a"), r"Checkpoint has no argument 'dirpath'\. Did you mean 'directory'\?"),
        (lambda: loosely(EarlyStopping)("eval/loss", mode="min", restore_best_weights=True), r"Did you mean 'restore_best'\?"),
        (lambda: loosely(EarlyStopping)("eval/loss", "min", min_delta="0.5"), "min_delta must be a number; got"),
        (lambda: loosely(ClipGradients)("0.5"), "max_norm must be a number; got"),
        (lambda: loosely(ClipGradients)(max_value="0.5"), "max_value must be a number; got"),
        (lambda: loosely(cadenza.callbacks.Ema)("0.5"), "decay must be a number; got"),
    ],
)
def test_an_argument_of_another_trainer_or_of_another_type_is_answered(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("resume", ["atuo", "latest", "Auto"])
def test_a_misspelled_auto_is_told_from_a_path(resume: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"got '{resume}', which does not exist\. Did you mean .auto.\?"):
        tiny_trainer(directory=tmp_path).fit(resume=resume)
    assert not any(tmp_path.iterdir())


def test_attributes_of_other_trainers_are_answered_when_they_are_read_and_when_they_are_set() -> None:
    trainer = tiny_trainer()
    with pytest.raises(AttributeError, match=r"a Trainer has no 'train': call trainer\.fit\(\)"):
        trainer.train()  # type: ignore[attr-defined]  # wrong on purpose, as are all that follow
    with pytest.raises(AttributeError, match=r"a Trainer has no 'should_stop': call run\.stop\(reason\)"):
        trainer.should_stop = True  # type: ignore[attr-defined]
    assert not hasattr(trainer, "should_stop")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("should_stop", r"call run\.stop\(reason\)"),
        ("stop_training", r"call run\.stop\(reason\)"),
        ("max_steps", r"run\.progress\.max_steps"),
        ("accumulate", r"it is given to the trainer: Trainer\(accumulate=\.\.\.\)"),
        ("seed", r"it is given to the trainer"),
    ],
)
def test_setting_what_has_no_effect_on_a_run_is_an_error_with_the_nearest_verb(name: str, answer: str) -> None:
    sets = on(Callback.on_step_end)(lambda run: setattr(run, name, 2))
    with pytest.raises(AttributeError, match=rf"'{name}'.*{answer}"):
        tiny_run(callbacks=[sets])


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (
            nn.ParameterList([nn.Parameter(torch.ones(1, device="meta"))]),
            ValueError,
            r"nothing sets the values of 1 tensor: 0 of ParameterList\. .*reset_parameters\(\)",
        ),
        (
            nn.Sequential(nn.Linear(1, 2), nn.LazyLinear(1)),
            ValueError,
            r"uninitialized lazy tensors: 1\.weight, 1\.bias\. Run the model once on a batch",
        ),
        (
            tiny_model().requires_grad_(False),
            LossError,
            r"got a loss of a model in which all parameters are frozen: call requires_grad_\(True\)",
        ),
    ],
    ids=["on the meta device", "lazy", "frozen"],
)
def test_a_model_that_cannot_train_is_an_error_that_says_why(model: nn.Module, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        tiny_run(model=model)


def test_a_finished_run_of_another_model_is_an_error_with_the_differences(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, callbacks=[Checkpoint()])
    other = nn.Sequential(nn.Linear(1, 3), nn.Linear(3, 1))
    before = {name: weight.clone() for name, weight in other.state_dict().items()}
    with pytest.raises(
        CheckpointMismatchError, match=r"does not fit this trainer; nothing was restored\. .*0\.weight: saved nothing"
    ):
        tiny_trainer(model=other, directory=tmp_path, callbacks=[Checkpoint()]).fit(resume="auto")
    assert all(torch.equal(before[name], weight) for name, weight in other.state_dict().items())


def test_a_directory_or_a_resume_without_a_checkpoint_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_trainer(directory=tmp_path / "a").fit()
    assert capsys.readouterr().err.startswith("directory= is given, and no callback writes checkpoints: a run that ends early")
    assert not caplog.messages
    tiny_trainer(directory=tmp_path / "b").fit(resume="auto")
    (said,) = caplog.messages
    assert said.startswith("resume='auto' is given, and no callback writes checkpoints: a run that ends early")
    caplog.clear()
    tiny_trainer(directory=tmp_path / "c", callbacks=[Checkpoint()]).fit(resume="auto")
    tiny_trainer().fit()
    assert not caplog.messages
    assert not capsys.readouterr().out


def test_a_second_fit_says_that_it_trains_trained_weights_as_a_new_run(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    trainer = tiny_trainer(steps=3)
    trainer.fit()
    assert not caplog.messages
    run = trainer.fit()
    assert run.progress.origin.step == 0
    (said,) = caplog.messages
    assert said.startswith("this trainer has trained 3 steps before: the weights are trained on, in a new run")
    caplog.clear()
    longer = tiny_trainer(epochs=1, directory=tmp_path, callbacks=[Checkpoint()])
    longer.fit()
    longer.max_epochs = 2
    longer.fit(resume="auto")
    assert not caplog.messages, "a run that continues is none that starts anew"


def test_whole_numbers_of_numpy_are_lengths() -> None:
    lengths: dict[str, Any] = {"epochs": numpy.int64(3), "steps": numpy.int32(4), "accumulate": numpy.int64(2)}
    trainer = tiny_trainer(**lengths)
    taken = trainer.max_epochs, trainer.max_steps, trainer.accumulate
    assert taken == (3, 4, 2)
    assert {type(one) for one in taken} == {int}  # run.json takes no others


# -- what a run says before its first step, so that it does not fail after an hour -------------------


POSITION = "a checkpoint inside an epoch cannot be continued: a DataLoader over an IterableDataset can only start"


def stream() -> DataLoader[Any]:
    return DataLoader(Stream([sample for batch in tiny_loader() for sample in zip(*batch, strict=True)]), batch_size=4)


def test_a_stream_without_a_position_is_named_before_a_checkpoint_of_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_trainer(loader=stream(), steps=1, directory=tmp_path / "a", callbacks=[Checkpoint("1 step")]).fit()
    assert POSITION in caplog.text
    caplog.clear()
    tiny_trainer(loader=stream(), steps=1, directory=tmp_path / "b", callbacks=[Checkpoint("1 step")]).fit(replay=True)
    tiny_trainer(loader=stream(), steps=1).fit()
    assert POSITION not in caplog.text
    mixed = Mixture({"stream": stream(), "list": list(tiny_loader())}, mode="cycle")
    tiny_trainer(loader=mixed, steps=1, directory=tmp_path / "c", callbacks=[Checkpoint("1 step")]).fit()
    assert POSITION in caplog.text


def test_a_resume_that_cannot_find_its_position_changes_nothing(tmp_path: Path) -> None:
    def trainer(steps: int) -> Any:
        callbacks = [Checkpoint("1 step"), LogTraining("1 step")]
        return tiny_trainer(loader=stream(), steps=steps, directory=tmp_path, callbacks=callbacks)

    trainer(1).fit()
    again, loads = trainer(2), Recorder(Callback.on_load)
    again.callbacks.append(loads)
    rows = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    with pytest.raises(DataError, match="must continue at batch 2 of an epoch"):
        again.fit(resume="auto")
    assert not loads.names
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == rows
    assert trainer(2).fit(resume="auto", replay=True).progress.step == 2


def test_a_generator_for_several_epochs_is_named(caplog: pytest.LogCaptureFixture) -> None:
    batches = list(tiny_loader())
    with pytest.raises(DataError, match="gave no batch in epoch 2"):
        tiny_trainer(loader=(one for one in batches), epochs=2).fit()
    assert "the training loader is an iterator (generator), which can be read once, and the run has 2 epochs" in caplog.text
    caplog.clear()
    tiny_trainer(loader=(one for one in batches), epochs=1).fit()
    assert "read once" not in caplog.text


def test_an_empty_evaluation_loader_is_an_error_before_the_first_step() -> None:
    steps, empty = Recorder(Callback.on_step_end), DataLoader(TensorDataset(torch.zeros(0, 2)), batch_size=4)
    with pytest.raises(DataError, match="the loader of 'eval' is empty: expected at least one batch; got a DataLoader with 0"):
        tiny_run(callbacks=[Evaluate(empty), steps], steps=2)
    assert not steps.names


@pytest.mark.parametrize(
    ("result", "shown"), [(None, "NoneType"), (3.0, "float"), ({"a": torch.ones(3)}, r"{a: float32[3]}"), ("x", "str")]
)
def test_an_evaluation_without_a_result_is_named_once_unless_a_hook_uses_its_batches(
    result: object, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    evaluate = Evaluate(tiny_loader(), "1 step", compute=lambda model, batch: result)
    tiny_run(callbacks=[evaluate], steps=3)
    (told,) = [text for text in caplog.messages if "reports no result" in text]
    assert f"got {shown}" in told
    caplog.clear()
    tiny_run(callbacks=[evaluate, on(Callback.on_eval_batch_end)(lambda run, *_: None)], steps=1)
    assert "reports no result" not in caplog.text


@pytest.mark.parametrize("sanity", [0, 1])
def test_a_monitor_of_an_evaluation_without_a_result_is_an_error(sanity: int) -> None:
    evaluate = Evaluate(tiny_loader(), "1 step", compute=lambda model, batch: None, sanity_batches=sanity)
    with pytest.raises(MonitorError, match=r"'eval' reported only \[\]"):
        tiny_run(callbacks=[evaluate, EarlyStopping("eval/loss", "min")], steps=2)


def test_a_mismatch_lists_ten_differences(tmp_path: Path) -> None:
    def fit(bias: bool, steps: int) -> Run:
        model = nn.Sequential(*[nn.Linear(2, 2, bias=bias) for _ in range(12)], nn.Linear(2, 1))
        options: dict[str, Any] = {"directory": tmp_path, "callbacks": [Checkpoint("1 step")], "steps": steps}
        trainer = tiny_trainer(model=model, compute_loss=lambda model, batch: model(torch.ones(1, 2)).sum(), **options)
        return trainer.fit(resume="auto")

    fit(True, 1)
    with pytest.raises(CheckpointMismatchError, match="does not fit this trainer; nothing was restored") as caught:
        fit(False, 2)
    assert str(caught.value).count("now nothing") == 10
    assert "and 3 more. Give the arguments" in str(caught.value)


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = tiny_trainer(steps=2, directory="~/run", callbacks=[Checkpoint("1 step", directory="~/saved")]).fit()
    assert run.info.directory == tmp_path / "run"
    assert json.loads((tmp_path / "run/run.json").read_text(encoding="utf-8"))["checkpoints"] == [str(tmp_path / "saved")]
    assert tiny_trainer(steps=3, directory="~/b").fit(resume="~/saved/last").progress.step == 3
    assert not (tmp_path / "~").exists()


# -- devices, drivers, and values of other arguments -------------------------------------------------


def test_a_device_is_a_name_or_a_torch_device_may_agree_with_the_driver_and_is_else_the_best_one() -> None:
    for device in ("cpu", torch.device("cpu")):
        run = tiny_run(device=device)
        assert run.device == torch.device("cpu")
        assert next(run.model.parameters()).device == torch.device("cpu")
    driver = SingleDriver("cpu")
    assert tiny_trainer(device="cpu", driver=driver).driver is driver
    assert driver_of().device == SingleDriver().device
    assert driver_of("single").device == SingleDriver().device


SCRIPT = """\
from cadenza import Trainer
import torch
m = torch.nn.Linear(1, 1)
Trainer(m, lambda p: torch.optim.SGD(p, 0.1), [0], lambda m, b: 0, max_epochs=1, driver='cpu')
"""


def test_a_device_as_driver_works_for_one_release_with_a_warning_and_the_name_of_a_driver_without() -> None:
    with pytest.warns(DeprecationWarning, match=r"driver='cpu' is deprecated: use device='cpu'") as caught:
        trainer = tiny_trainer(driver="cpu")
    assert trainer.driver.device == torch.device("cpu")
    assert len(caught) == 1
    with pytest.warns(DeprecationWarning, match="use device='cpu'") as caught:
        exec(compile(SCRIPT, "<string>", "exec"), {"__name__": "__main__"})
    assert [(one.filename, one.lineno) for one in caught] == [("<string>", 4)], "the user's own line"
    assert tiny_run(driver="single", device="cpu").progress.step == 5  # a warning would be an error


OTHER_PRECISIONS = {"16-mixed": "fp16", "bf16-mixed": "bf16", torch.bfloat16: "bf16", torch.float16: "fp16", 32: "fp32"}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"driver": "dpp"}, ValueError, r"driver must be one of 'auto', 'single', 'ddp', 'fsdp', or a Driver; got 'dpp'"),
        ({"device": "gpu"}, ValueError, r"device must be a name such as 'cpu', .*; got 'gpu'"),
        ({"device": 0}, TypeError, r"device must be a name such as 'cpu', .*; got 0"),
        ({"device": "ddp"}, ValueError, r"device must be .*; got 'ddp'\. Use driver='ddp'\."),
        ({"device": "cpu", "driver": "cuda"}, ValueError, r"driver must be one of 'auto', .*; got 'cuda'"),
        (
            {"device": "cuda:0", "driver": SingleDriver("cpu")},
            ValueError,
            r"device='cuda:0' contradicts driver=SingleDriver\('cpu'\), which computes on 'cpu'\. Leave device out",
        ),
        (
            {"device": "cuda:1", "driver": "ddp"},
            ValueError,
            r"device='cuda:1' names one device, but with driver='ddp' each process takes its own\. Use device='cuda'",
        ),
        *(  # the names of other libraries are translated
            ({"precision": given}, ValueError, f"precision must be one of fp32, bf16, fp16; got .*Did you mean '{meant}'")
            for given, meant in OTHER_PRECISIONS.items()
        ),
        ({"compile": "fast"}, ValueError, "compile must be True, 'step', one of the modes default, reduce-overhead"),
        ({"compile": {"fulgraph": True}}, ValueError, r"torch\.compile has no argument fulgraph; it has backend"),
        ({"compile": 3}, TypeError, "compile must be True, a mode, or a dict"),
        ({"max_tokens": 0}, ValueError, "max_tokens must be at least 1; got 0"),
        ({"max_tokens": 1.5}, TypeError, "max_tokens must be a whole number; got 1.5"),
        (
            {"tokens": 1000},
            TypeError,
            r"tokens must be a function \(batch\) -> int .*; got 1000. Set the length of the run with max_tokens=",
        ),
    ],
)
def test_an_argument_of_a_wrong_value_is_an_error_that_says_what_to_write(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny_trainer(**arguments)
