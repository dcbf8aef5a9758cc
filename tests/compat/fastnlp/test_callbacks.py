"""fastNLP's callbacks for rates (case 28), gradients, progress, times, more evaluations, and fitlog."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import FitlogCallback, LRSchedCallback, RawTextCallback, TorchGradClipCallback, TorchWarmupCallback
from cadenza.compat.fastnlp.core.callbacks import progress_callback
from cadenza.compat.fastnlp.core.callbacks.progress_callback import choose_progress_callback
from tests.compat.fastnlp.toy import Error, Raising, Scripted, Toy, loader, toy_trainer, trained

Shown = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("launch")

# -- learning rates --------------------------------------------------------------------------------------


class Rates(fastnlp.Callback):
    """Notes the rates after each batch."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any) -> None:
        self.seen.append(round(trainer.driver.optimizers[0].param_groups[0]["lr"], 6))


DOWN = [0.05, 0.1, 0.0875, 0.075, 0.0625, 0.05, 0.0375, 0.025, 0.0125, 0.0]


@pytest.mark.parametrize(
    ("warmup", "schedule", "options", "rates"),
    [
        (0.2, "linear", {}, DOWN),
        (2, "linear", {}, DOWN),
        (0.2, "constant", {}, [0.05, *[0.1] * 9]),
        (0.5, "constant", {"count": 16, "accumulation_steps": 2}, [0.1, 0.075, 0.075, *[0.1] * 5]),  # with each update
        (1.0, "linear", {}, [0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07, 0.08, 0.09, 0.1]),
        (-3, "linear", {}, [0.09, 0.08, 0.07, 0.06, 0.05, 0.04, 0.03, 0.02, 0.01, 0.0]),
    ],
)
def test_case_28_a_warm_up_precedes_decay_or_a_constant_rate(warmup: float, schedule: Any, options: Any, rates: Any) -> None:
    notes = Rates()
    trained(**{"count": 20, **options}, callbacks=[TorchWarmupCallback(warmup, schedule=schedule), notes], n_epochs=2)
    assert notes.seen == rates


def test_a_warm_up_scales_each_optimizer_by_its_own_initial_rates_also_after_a_resume(tmp_path: Path) -> None:
    model = Toy()
    optimizers = [torch.optim.SGD([model.linear.weight], 0.1), torch.optim.SGD([model.linear.bias], 0.4)]
    for _ in range(2):
        trained(20, TorchWarmupCallback(1.0), model=model, optimizers=optimizers, n_batches=5)
    assert [one.param_groups[0]["lr"] for one in optimizers] == [0.1, 0.4]
    whole = toy_trainer(20, TorchWarmupCallback(0.2), n_epochs=2)
    whole.add_callback_fn(fastnlp.Event.on_train_batch_end(once=6), lambda trainer: trainer.save_checkpoint(tmp_path))
    whole.run()
    notes = Rates()
    toy_trainer(20, [TorchWarmupCallback(0.2), notes], n_epochs=2).run(resume_from=tmp_path)
    assert notes.seen == [0.0375, 0.025, 0.0125, 0.0]


class Counting:
    """Something that can be stepped, and is no scheduler of torch's."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def halving(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def stepped(scheduler: str, step_on: str = "batch", count: int = 16, **arguments: Any) -> tuple[fastnlp.Trainer, Any]:
    """Return a trainer of two epochs, and the scheduler that its callback steps."""
    model = Toy()
    optimizer = optimizer_of(model)
    stepped = halving(optimizer) if scheduler == "torch's" else Counting()
    callback = LRSchedCallback(stepped, step_on)
    return toy_trainer(count, callback, model=model, optimizers=optimizer, n_epochs=2, **arguments), stepped


@pytest.mark.parametrize(("step_on", "even", "odd"), [("batch", 4, 5), ("epoch", 2, 2), ("anything else", 2, 2)])
def test_case_28_a_scheduler_is_stepped_once_an_update_or_once_an_epoch(step_on: str, even: int, odd: int) -> None:
    for count, times in ((16, even), (20, odd)):  # in two epochs of five batches, the third window is in both
        (one, mine), (other, _) = (stepped(kind, step_on, count, accumulation_steps=2) for kind in ("own", "torch's"))
        one.run()
        other.run()
        assert (mine.steps, other.driver.optimizers[0].param_groups[0]["lr"]) == (times, 0.1 * 0.5**times)


@pytest.mark.parametrize("kind", ["own", "torch's"])
def test_a_checkpoint_holds_the_schedulers_state(tmp_path: Path, kind: str) -> None:
    (first, one), (again, other) = stepped(kind), stepped(kind)
    first.run()
    first.save_checkpoint(tmp_path)
    again.run(resume_from=tmp_path)
    assert other.state_dict() == one.state_dict()


class Steep(Toy):
    """Has the gradient 3 for each of its five weights, and 4 for its bias."""

    def train_step(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]  # it needs no targets
        return {"loss": 3 * self.linear.weight.sum() + 4 * self.linear.bias.sum()}


def step_of(model: Steep, callback: Any) -> tuple[float, float]:
    """Return how far one update with a learning rate of 1 moves a weight, and the bias."""
    before = model.linear.weight[0, 0].item(), model.linear.bias.item()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    toy_trainer(4, callback, model=model, optimizers=optimizer, n_epochs=1).run()
    after = model.linear.weight[0, 0].item(), model.linear.bias.item()
    return round(before[0] - after[0], 4), round(before[1] - after[1], 4)


def test_gradients_are_clipped_together_by_norm_or_each_by_value_or_only_the_given_ones() -> None:
    norm = (5 * 3.0**2 + 4.0**2) ** 0.5
    assert step_of(Steep(), TorchGradClipCallback()) == (round(3 / norm, 4), round(4 / norm, 4))
    assert step_of(Steep(), TorchGradClipCallback(0.5, "value")) == (0.5, 0.5)
    assert step_of(Steep(), TorchGradClipCallback(100)) == (3.0, 4.0)
    model = Steep()
    assert step_of(model, TorchGradClipCallback(1, "norm", parameters=[model.linear.bias])) == (3.0, 1.0)
    assert step_of(model, TorchGradClipCallback(1, "value", parameters=model.linear.weight)) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (lambda: TorchWarmupCallback(schedule="cosine"), RuntimeError, "schedule must be 'constant' or 'linear'; got 'cosine'"),  # type: ignore[arg-type]
        (
            lambda: TorchWarmupCallback("x"),  # type: ignore[arg-type]
            TypeError,
            "warmup must be a fraction of the training, or a number of batches; got 'x'",
        ),
        (lambda: LRSchedCallback(object()), AssertionError, "must be an object with a method step"),
        (lambda: LRSchedCallback(LambdaLR), AssertionError, "got <class .*LambdaLR"),
        (lambda: TorchGradClipCallback(1, "max"), ValueError, "clip_type must be 'norm' or 'value'; got 'max'"),  # type: ignore[arg-type]
        (lambda: TorchGradClipCallback(0), ValueError, "clip_value must be a number greater than 0"),
        (lambda: TorchGradClipCallback("norm"), ValueError, "clip_value must be a number greater than 0"),  # type: ignore[arg-type]
        (lambda: TorchGradClipCallback(float("nan")), ValueError, "clip_value must be a number greater than 0"),
        (lambda: RawTextCallback(print_every=0), ValueError, "print_every"),
        (lambda: fastnlp.TimerCallback(0.5), AssertionError, "whole number"),  # type: ignore[arg-type]
        (lambda: more_of(watch_monitor="acc", evaluate_every=3), RuntimeError, "got both, with evaluate_every=3"),
        (lambda: more_of(evaluate_every=None), RuntimeError, "evaluate_every or watch_monitor; got neither"),
        (lambda: more_of(evaluate_every=0), ValueError, "evaluate_every"),
        (lambda: more_of(topk=2), RuntimeError, "topk and topk_monitor belong together"),
    ],
)
def test_wrong_arguments_are_errors_in_a_constructor(made: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        made()


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        (
            lambda mine: LRSchedCallback(halving(optimizer_of(Toy()))),
            ValueError,
            "belongs to an optimizer that this run does not have",
        ),
        (lambda mine: LRSchedCallback(ReduceLROnPlateau(mine)), ValueError, "ReduceLROnPlateau needs a result"),
        (lambda mine: TorchGradClipCallback(parameters=[*Toy().parameters()]), ValueError, "chose no parameter of the model"),
        (
            lambda mine: RawTextCallback(extra_show_keys=["cube"]),
            KeyError,
            "extra_show_keys needs 'cube' in the outputs of the model",
        ),
        (lambda mine: more_of(watch_monitor="acc"), AssertionError, "needs evaluations of the trainer"),
        (lambda mine: more_of(evaluate_fn="judge"), RuntimeError, "no method 'judge'"),
    ],
)
def test_a_part_that_the_training_does_not_have_is_an_error(
    made: Callable[[torch.optim.Optimizer], fastnlp.Callback], error: type[Exception], message: str
) -> None:
    model = Toy()
    optimizer = optimizer_of(model)
    callback = made(optimizer)
    with pytest.raises(error, match=message):
        trained(8, callback, model=model, optimizers=optimizer)


def more_of(**options: Any) -> fastnlp.MoreEvaluateCallback:
    return fastnlp.MoreEvaluateCallback(loader(4), {"f": Scripted(*[0.5] * 9)}, **options)


# -- progress --------------------------------------------------------------------------------------------


class Flat(Toy):
    """Has the loss 1 in its first batch, 2 in its second, and so on; and tells the square besides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def train_step(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # it needs no targets
        self.calls += 1
        return {"loss": self.linear.bias.sum() * 0 + self.calls, "square": torch.tensor(self.calls**2.0)}


def told(callback: Any, capsys: Shown, count: int = 8, n_epochs: int = 2, *values: float) -> str:
    trained(count, callback, {"acc": Scripted(0.0, *values)} if values else None, model=Flat(), n_epochs=n_epochs)
    return capsys.readouterr().out


def test_lines_show_epoch_batch_progress_and_the_means_of_the_loss_and_further_outputs(capsys: Shown) -> None:
    assert told(RawTextCallback(print_every=2), capsys).split("\n") == [
        "",
        "********** Epoch:0 starts **********",
        "Epoch:0/2, Batch:2, loss:1.5, finished 50.0%.",
        "",
        "********** Epoch:1 starts **********",
        "Epoch:1/2, Batch:2, loss:3.5, finished 100.0%.",
        "",
    ]

    class Largest(fastnlp.ExtraInfoStatistics):
        def get_stat(self) -> dict[str, Any]:
            return {"largest": super().get_stat()["square"] * 2}

    assert "loss:1.5, square:2.5, " in told(RawTextCallback(2, extra_show_keys="square"), capsys)
    assert "largest:5.0" in told(RawTextCallback(2, extra_show_keys=Largest("square")), capsys)


def test_evaluations_are_printed_with_a_sign_for_improvements_and_the_best_at_the_end(capsys: Shown) -> None:
    shown = told(RawTextCallback(print_every=100, monitor="acc#acc"), capsys, 8, 3, 0.5, 0.4, 0.9)
    assert [line for line in shown.splitlines() if "Eval." in line] == [
        "++++++++++ Eval. results on Epoch:0, Batch:2 ++++++++++",
        "---------- Eval. results on Epoch:1, Batch:2 ----------",
        "++++++++++ Eval. results on Epoch:2, Batch:2 ++++++++++",
    ]
    assert '{"acc#acc": 0.4}' in shown
    assert shown.endswith(
        "The best performance for monitor acc#acc:0.9 was achieved in Epoch:2, Global Batch:6. The evaluation result: \n"
        "{'acc#acc': 0.9}\n"
    )


@pytest.mark.parametrize("kind", [RawTextCallback, fastnlp.RichCallback, fastnlp.TqdmCallback])
def test_all_kinds_inherit_the_trainers_monitor_and_hide_private_results(kind: type[Any], capsys: Shown) -> None:
    bar = kind(format_json=False)
    toy_trainer(8, bar, {"acc": Scripted(0.0, 0.5), "_secret": Error()}, monitor="acc", n_epochs=1).run()
    shown = capsys.readouterr().out
    assert "+++" in shown
    assert "{'acc#acc': 0.5}\n" in shown.split("The best performance")[0]
    assert "Epoch:0, Global Batch:2" in shown


def test_the_bars_of_rich_and_tqdm_end_with_the_last_loss(capsys: Shown) -> None:
    shown = told(fastnlp.RichCallback(loss_round_ndigit=2), capsys, 12, 2, 0.5, 0.5)
    assert re.search(r"Epoch:2 .* 6/6 +100%", shown)
    assert "loss:6.0" in shown
    assert shown.count("Eval. results on Epoch:") == 2
    assert json.loads(shown[shown.index("{") : shown.index("}") + 1]) == {"acc#acc": 0.5}
    trained(8, fastnlp.TqdmCallback(), model=Flat(), n_epochs=2)
    shown = capsys.readouterr().err
    assert "Epoch:1" in shown
    assert "loss=4" in shown


def test_progress_bar_chooses_the_callback_unless_the_list_has_one(monkeypatch: pytest.MonkeyPatch, capsys: Shown) -> None:
    lines = dict.fromkeys(("raw", "auto"), RawTextCallback)  # a test has no terminal
    kinds: dict[Any, Any] = {"rich": fastnlp.RichCallback, "tqdm": fastnlp.TqdmCallback, **lines}
    assert {word: type(choose_progress_callback(word)) for word in kinds} == kinds
    monkeypatch.setattr(progress_callback, "in_notebook", lambda: True)
    assert isinstance(choose_progress_callback("auto", extra_show_keys="acc"), fastnlp.RichCallback)
    given = RawTextCallback()
    assert choose_progress_callback(given) is given
    assert choose_progress_callback(None) is None
    assert choose_progress_callback("Densify") is None  # as in fastNLP
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for callbacks, finished in (([], 2), ([RawTextCallback(print_every=2)], 1)):
        bar: Any = "auto" if callbacks else "raw"
        fastnlp.Trainer(model, loader(8), optimizer, n_epochs=1, callbacks=callbacks, progress_bar=bar).run()
        assert capsys.readouterr().out.count("finished") == finished


TIMES = ", fetch-data: S, forward: S, backward: S, optimize: S, evaluate: S, train: S, total: S"


@pytest.mark.parametrize(
    ("every", "words"),
    [
        *((-1, ["Running 1 epochs"] * 4), (-2, ["Running 2 epochs"] * 2)),
        *((3, ["Running 3 batches"] * 2), (0, ["Training finished"])),
    ],
)
def test_times_are_printed_by_epochs_batches_or_at_the_end(every: int, words: list[str], capsys: Shown) -> None:
    shown = told(fastnlp.TimerCallback(every, time_ndigit=9), capsys, 8, 4, 0.1, 0.2, 0.3, 0.4).splitlines()
    assert [line.partition(",")[0] for line in shown] == words
    if every <= 0:
        assert all(re.sub(r"[\d.e-]+s", "S", line.removeprefix(word)) == TIMES for line, word in zip(shown, words, strict=True))


def test_the_time_of_an_evaluation_is_not_that_of_the_training_and_parts_without_time_are_omitted(
    monkeypatch: pytest.MonkeyPatch, capsys: Shown
) -> None:
    now = [0.0]
    monkeypatch.setattr("cadenza.compat.fastnlp.core.callbacks.timer_callback.time.perf_counter", lambda: now[0])
    timer: Any = fastnlp.TimerCallback()
    hooks = timer.on_train_begin, timer.on_fetch_data_begin, timer.on_fetch_data_end, timer.on_evaluate_begin
    for hook, passed in zip(hooks, (1, 2, 4, 8), strict=True):
        hook(None)
        now[0] += passed
    timer.on_evaluate_end(None, {})
    now[0] += 16
    assert timer.format_timer() == ", fetch-data: 2.0s, evaluate: 8.0s, train: 23.0s, total: 31.0s"
    assert timer.format_timer() == ""
    trained(8, fastnlp.TimerCallback(0, time_ndigit=0), n_epochs=1).run()
    assert capsys.readouterr().out == "Training finished\n" * 2


# -- more evaluations ------------------------------------------------------------------------------------

EPOCHS = ["Epoch:1, Batch:5", "Epoch:2, Batch:10", "Epoch:3, Batch:15"]


@pytest.mark.parametrize(
    ("options", "at"),
    [
        ({}, EPOCHS),
        ({"evaluate_every": -2}, ["Epoch:2, Batch:10"]),
        ({"evaluate_every": 4}, ["Epoch:0, Batch:4", "Epoch:1, Batch:8", "Epoch:2, Batch:12"]),
        ({"evaluate_every": lambda trainer: trainer.global_forward_batches == 7}, ["Epoch:1, Batch:7"]),
        ({"watch_monitor": "acc#acc"}, ["Epoch:0, Batch:5", "Epoch:2, Batch:15"]),
        ({"evaluate_fn": "forward", "num_eval_sanity_batch": 0}, EPOCHS),
    ],
    ids=["epoch", "epochs", "batches", "function", "improvement of the trainer's result", "own function without a trial"],
)
def test_more_evaluations_run_by_epochs_batches_function_or_improvement(options: Any, at: list[str], capsys: Shown) -> None:
    trained(20, more_of(**options), {"acc": Scripted(0.0, 0.3, 0.2, 0.4)}, n_epochs=3)
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" on ")[2] for line in lines if line.startswith("More")] == at


def test_more_evaluations_use_the_trainers_arguments_even_if_it_evaluates_nothing_and_save_the_best(
    capsys: Shown, tmp_path: Path
) -> None:
    class Whole(Toy):
        def train_step(self, batch: Any) -> dict[str, Tensor]:  # type: ignore[override]  # it takes batches whole
            return {"loss": self.linear(batch["features"]).mean()}

        def evaluate_step(self, batch: Any) -> dict[str, Tensor]:
            half.append(torch.is_autocast_enabled("cpu"))
            return {"scores": self.linear(batch["features"])}

    half: list[bool] = []
    own: dict[str, Any] = {"model": Whole(), "model_wo_auto_param_call": True, "input_mapping": {"x": "features"}}
    own |= {"fp16": True, "evaluate_output_mapping": {"scores": "pred"}, "separator": "/"}
    trained(8, more_of(), n_epochs=2, **own)
    assert half == [True] * 3  # the trial, and two epochs
    assert capsys.readouterr().out.count('{"acc/f": 0.5}') == 2
    steps: list[Any] = []
    step = lambda evaluator, batch: steps.append(batch)  # noqa: E731  # a function of one's own
    trained(8, fastnlp.MoreEvaluateCallback(loader(4), {}), evaluate_batch_step_fn=step, n_epochs=1)
    assert len(steps) == 2  # that of the trial, and that of the epoch
    options: dict[str, Any] = {"topk": 1, "topk_monitor": "acc#f", "folder": tmp_path, "num_eval_sanity_batch": 1}
    trained(20, fastnlp.MoreEvaluateCallback(loader(4), {"f": Scripted(0.0, 0.2, 0.7, 0.1)}, **options), n_epochs=3)
    (folder,) = (tmp_path / "launch").iterdir()
    assert folder.name == "model-epoch_2-batch_10-acc#f_0.7"
    assert json.loads((folder / "fastnlp_evaluate_results.json").read_text()) == {"acc#f": 0.7}


# -- fitlog ----------------------------------------------------------------------------------------------


class StandIn(ModuleType):
    """fitlog's public functions as far as they are called; they note their calls, and take no dict, as those of 0.9.15."""

    def __init__(self) -> None:
        super().__init__("fitlog")
        self.calls: list[tuple[Any, ...]] = []

    def note(self, name: str, *values: Any) -> None:
        if any(isinstance(value, dict) for value in values):
            raise AttributeError("module 'numpy' has no attribute 'str'")
        self.calls.append((name, *values))

    def debug(self, flag: bool = True) -> None:
        self.note("debug")

    def finish(self, status: int = 0, send_to_bot: str | None = None) -> None:
        self.note("finish", status)

    def add_metric(self, value: Any, step: int, name: str | None = None, epoch: int | None = None) -> None:
        self.note("metric", value, step, name, epoch)

    def add_loss(self, value: Any, step: int, name: str | None = None, epoch: int | None = None) -> None:
        self.note("loss", value, step, name, epoch)

    def add_best_metric(self, value: Any, name: str | None = None) -> None:
        self.note("best", value, name)

    def add_other(self, value: Any, name: str | None = None) -> None:
        self.note("other", value, name)


@pytest.fixture
def fitlog(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setitem(sys.modules, "fitlog", stand_in)
    return stand_in


def test_fitlog_gets_evaluations_losses_and_the_end(fitlog: StandIn, capsys: Shown) -> None:
    told(FitlogCallback("acc", log_loss_every=2), capsys, 8, 2, 0.5, 0.4)
    assert fitlog.calls == [
        ("other", "launch", "launch_time"),
        ("loss", 1.5, 2, "loss", 0),
        ("metric", 0.5, 2, "acc#acc", 0),
        ("best", 0.5, "acc#acc"),
        ("best", 2, "step"),
        ("best", 0, "epoch"),
        ("loss", 3.5, 4, "loss", 1),
        ("metric", 0.4, 4, "acc#acc", 1),
        ("finish", 0),
    ]


@pytest.mark.parametrize(("log", "noted"), [(True, [("other", "RuntimeError('broken')", "except_info")]), (False, [])])
def test_fitlog_gets_errors_but_an_early_stop_is_a_normal_end(fitlog: StandIn, log: bool, noted: list[Any]) -> None:
    failing = Raising("on_train_batch_end", 1, RuntimeError("broken"))
    with pytest.raises(RuntimeError, match="broken"):
        toy_trainer(8, [FitlogCallback(log_exception=log), failing]).run()
    assert fitlog.calls[1:] == [*noted, ("finish", 1)]
    toy_trainer(8, [FitlogCallback(), Raising("on_train_batch_end", 1, fastnlp.EarlyStopException("enough"))]).run()
    assert fitlog.calls[-1] == ("finish", 0)


def test_a_broken_fitlog_is_an_error_that_names_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fitlog", raising=False)
    with pytest.raises(ImportError, match=r"'fitlog', which is not installed.*cadenza.sinks.*TensorBoard"):
        FitlogCallback()
    old, said = "raise AttributeError('module numpy has no attribute float')", "names that current numpy does not have"
    for text, message in ((old, f"AttributeError.*{said}"), ("import a_package_that_is_not_there", "ModuleNotFoundError")):
        target_ = tmp_path / str(len(message))
        target_.mkdir()
        (target_ / "fitlog.py").write_text(text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(target_)
            with pytest.raises(ImportError, match=rf"cannot be imported: {message}.*cadenza.sinks"):
                FitlogCallback()
    with pytest.raises(ValueError, match="log_loss_every"):
        FitlogCallback(log_loss_every=-1)
