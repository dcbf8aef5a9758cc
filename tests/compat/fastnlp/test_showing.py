"""fastNLP's callbacks that show and tell: progress, times, more evaluations, fitlog."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from cadenza.compat.fastnlp import (
    EarlyStopException,
    ExtraInfoStatistics,
    FitlogCallback,
    MoreEvaluateCallback,
    RawTextCallback,
    RichCallback,
    TimerCallback,
    TqdmCallback,
    Trainer,
)
from cadenza.compat.fastnlp.core.callbacks import progress_callback
from cadenza.compat.fastnlp.core.callbacks.progress_callback import choose_progress_callback
from tests.compat.fastnlp.toy import Error, Raising, Scripted, Toy, loader, toy_trainer

Shown = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTNLP_LAUNCH_TIME", "launch")


class Flat(Toy):
    """Has the loss 1 in its first batch, 2 in its second, and so on; and tells the square besides."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def train_step(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]  # it needs no targets
        self.calls += 1
        return {"loss": self.linear.bias.sum() * 0 + self.calls, "square": torch.tensor(self.calls**2.0)}


def told(callback: Any, capsys: Shown, count: int = 8, n_epochs: int = 2, *values: float, **arguments: Any) -> str:
    metrics = {"acc": Scripted(0.0, *values)} if values else None
    toy_trainer(count, callback, metrics, model=Flat(), n_epochs=n_epochs, **arguments).run()
    return capsys.readouterr().out


# -- progress --------------------------------------------------------------------------------------------


def test_lines_show_epoch_batch_mean_loss_and_progress(capsys: Shown) -> None:
    assert told(RawTextCallback(print_every=2), capsys).split("\n") == [
        "",
        "********** Epoch:0 starts **********",
        "Epoch:0/2, Batch:2, loss:1.5, finished 50.0%.",
        "",
        "********** Epoch:1 starts **********",
        "Epoch:1/2, Batch:2, loss:3.5, finished 100.0%.",
        "",
    ]


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


@pytest.mark.parametrize("kind", [RawTextCallback, RichCallback, TqdmCallback])
def test_all_kinds_inherit_the_trainers_monitor_and_hide_private_results(kind: type[Any], capsys: Shown) -> None:
    bar = kind(format_json=False)
    toy_trainer(8, bar, {"acc": Scripted(0.0, 0.5), "_secret": Error()}, monitor="acc", n_epochs=1).run()
    shown = capsys.readouterr().out
    assert "+++" in shown
    assert "{'acc#acc': 0.5}\n" in shown.split("The best performance")[0]
    assert "Epoch:0, Global Batch:2" in shown


def test_further_outputs_of_the_model_are_shown_as_means(capsys: Shown) -> None:
    assert "loss:1.5, square:2.5, " in told(RawTextCallback(2, extra_show_keys="square"), capsys)

    class Largest(ExtraInfoStatistics):
        def get_stat(self) -> dict[str, Any]:
            return {"largest": super().get_stat()["square"] * 2}

    assert "largest:5.0" in told(RawTextCallback(2, extra_show_keys=Largest("square")), capsys)
    with pytest.raises(KeyError, match="extra_show_keys needs 'cube' in the outputs of the model"):
        told(RawTextCallback(extra_show_keys=["cube"]), capsys)


def test_the_rich_bar_ends_with_the_last_loss(capsys: Shown) -> None:
    shown = told(RichCallback(loss_round_ndigit=2), capsys, 12, 2, 0.5, 0.5)
    assert re.search(r"Epoch:2 .* 6/6 +100%", shown)
    assert "loss:6.0" in shown
    assert shown.count("Eval. results on Epoch:") == 2
    assert json.loads(shown[shown.index("{") : shown.index("}") + 1]) == {"acc#acc": 0.5}


def test_the_bars_of_tqdm_show_the_loss(capsys: Shown) -> None:
    toy_trainer(8, TqdmCallback(), model=Flat(), n_epochs=2).run()
    shown = capsys.readouterr().err
    assert "Epoch:1" in shown
    assert "loss=4" in shown


def test_progress_bar_chooses_the_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [type(choose_progress_callback(word)) for word in ("rich", "tqdm", "raw", "auto")] == [
        RichCallback,
        TqdmCallback,
        RawTextCallback,
        RawTextCallback,  # a test has no terminal
    ]
    monkeypatch.setattr(progress_callback, "in_notebook", lambda: True)
    assert isinstance(choose_progress_callback("auto", extra_show_keys="acc"), RichCallback)
    given = RawTextCallback()
    assert choose_progress_callback(given) is given
    assert choose_progress_callback(None) is None
    with pytest.raises(ValueError, match=r"progress_bar must be .*; got 'bar'"):
        choose_progress_callback("bar")
    with pytest.raises(ValueError, match="print_every"):
        RawTextCallback(print_every=0)


def test_a_trainer_shows_itself_unless_a_callback_does(capsys: Shown) -> None:
    model = Toy()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for callbacks, lines in (([], 2), ([RawTextCallback(print_every=2)], 1)):
        Trainer(
            model, loader(8), optimizer, n_epochs=1, callbacks=callbacks, progress_bar="raw" if not callbacks else "auto"
        ).run()
        assert capsys.readouterr().out.count("finished") == lines


# -- times -----------------------------------------------------------------------------------------------

TIMES = ", fetch-data: S, forward: S, backward: S, optimize: S, evaluate: S, train: S, total: S"


@pytest.mark.parametrize(
    ("every", "words"),
    [
        (-1, ["Running 1 epochs"] * 4),
        (-2, ["Running 2 epochs"] * 2),
        (0, ["Training finished"]),
        (3, ["Running 3 batches"] * 2),
    ],
)
def test_times_are_printed_by_epochs_batches_or_at_the_end(every: int, words: list[str], capsys: Shown) -> None:
    shown = told(TimerCallback(every, time_ndigit=9), capsys, 8, 4, 0.1, 0.2, 0.3, 0.4).splitlines()
    assert [line.partition(",")[0] for line in shown] == words
    if every <= 0:
        assert all(re.sub(r"[\d.e-]+s", "S", line.removeprefix(word)) == TIMES for line, word in zip(shown, words, strict=True))


def test_the_time_of_an_evaluation_is_not_that_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("cadenza.compat.fastnlp.core.callbacks.timer_callback.time.perf_counter", lambda: now[0])
    timer: Any = TimerCallback()
    for hook, passed in (
        *((timer.on_train_begin, 1), (timer.on_fetch_data_begin, 2)),
        *((timer.on_fetch_data_end, 4), (timer.on_evaluate_begin, 8)),
    ):
        hook(None)
        now[0] += passed
    timer.on_evaluate_end(None, {})
    now[0] += 16
    assert timer.format_timer() == ", fetch-data: 2.0s, evaluate: 8.0s, train: 23.0s, total: 31.0s"
    assert timer.format_timer() == ""


def test_parts_without_time_are_omitted_and_a_second_run_works(capsys: Shown) -> None:
    trainer = toy_trainer(8, TimerCallback(0, time_ndigit=0), n_epochs=1)
    trainer.run()
    trainer.run()
    assert capsys.readouterr().out == "Training finished\n" * 2
    with pytest.raises(AssertionError, match="whole number"):
        TimerCallback(0.5)  # type: ignore[arg-type]


# -- more evaluations ------------------------------------------------------------------------------------


def more(capsys: Shown, *values: float, trainer: Any = None, **options: Any) -> list[str]:
    callback = MoreEvaluateCallback(loader(4), {"f": Scripted(*values)}, **options)
    arguments: dict[str, Any] = {"count": 20, "n_epochs": 3} | (trainer or {})
    toy_trainer(callbacks=callback, **arguments).run()
    return [line.partition(" on ")[2] for line in capsys.readouterr().out.splitlines() if line.startswith("More")]


def test_more_evaluations_run_by_epochs_batches_or_a_function(capsys: Shown) -> None:
    assert more(capsys, *[0.5] * 9) == [f"Epoch:{e}, Batch:{5 * e}" for e in (1, 2, 3)]
    assert more(capsys, *[0.5] * 9, evaluate_every=-2) == ["Epoch:2, Batch:10"]
    assert more(capsys, *[0.5] * 9, evaluate_every=4) == ["Epoch:0, Batch:4", "Epoch:1, Batch:8", "Epoch:2, Batch:12"]
    when = lambda trainer: trainer.global_forward_batches == 7  # noqa: E731  # a function of the trainer
    assert more(capsys, *[0.5] * 9, evaluate_every=when) == ["Epoch:1, Batch:7"]


def test_more_evaluations_run_when_the_trainers_result_improves(capsys: Shown) -> None:
    trainer = {"metrics": {"acc": Scripted(0.0, 0.3, 0.2, 0.4)}}
    assert more(capsys, *[0.5] * 9, watch_monitor="acc#acc", trainer=trainer) == ["Epoch:0, Batch:5", "Epoch:2, Batch:15"]


def test_the_best_of_them_are_saved(tmp_path: Path, capsys: Shown) -> None:
    options = {"topk": 1, "topk_monitor": "acc#f", "folder": tmp_path, "num_eval_sanity_batch": 1}
    more(capsys, 0.0, 0.2, 0.7, 0.1, **options)
    (folder,) = (tmp_path / "launch").iterdir()
    assert folder.name == "model-epoch_2-batch_10-acc#f_0.7"
    assert json.loads((folder / "fastnlp_evaluate_results.json").read_text()) == {"acc#f": 0.7}


def test_an_evaluate_fn_without_a_sanity_check(capsys: Shown) -> None:
    assert len(more(capsys, *[0.5] * 3, evaluate_fn="forward", num_eval_sanity_batch=0)) == 3
    with pytest.raises(RuntimeError, match="no method 'judge'"):
        more(capsys, 0.5, evaluate_fn="judge")


def test_more_evaluations_use_the_trainers_arguments_even_if_it_evaluates_nothing(capsys: Shown) -> None:
    class Whole(Toy):
        def train_step(self, batch: Any) -> dict[str, Tensor]:  # type: ignore[override]  # it takes batches whole
            return {"loss": self.linear(batch["features"]).mean()}

        def evaluate_step(self, batch: Any) -> dict[str, Tensor]:
            half.append(torch.is_autocast_enabled("cpu"))
            return {"scores": self.linear(batch["features"])}

    half: list[bool] = []
    own: dict[str, Any] = {"model": Whole(), "model_wo_auto_param_call": True, "input_mapping": {"x": "features"}}
    own |= {"fp16": True, "evaluate_output_mapping": {"scores": "pred"}, "separator": "/"}
    callback = MoreEvaluateCallback(loader(4), {"f": Scripted(*[0.5] * 3)})
    toy_trainer(callbacks=callback, n_epochs=2, **own).run()
    assert half == [True] * 3  # the trial, and two epochs
    assert capsys.readouterr().out.count('{"acc/f": 0.5}') == 2
    steps: list[Any] = []
    callback = MoreEvaluateCallback(loader(4), {})
    toy_trainer(callbacks=callback, evaluate_batch_step_fn=lambda evaluator, batch: steps.append(batch), n_epochs=1).run()
    assert len(steps) == 2  # that of the trial, and that of the epoch


def test_contradictory_arguments_are_errors() -> None:
    def made(**options: Any) -> MoreEvaluateCallback:
        return MoreEvaluateCallback(loader(4), {"f": Scripted()}, **options)

    with pytest.raises(RuntimeError, match="got both, with evaluate_every=3"):
        made(watch_monitor="acc", evaluate_every=3)
    with pytest.raises(RuntimeError, match="evaluate_every or watch_monitor; got neither"):
        made(evaluate_every=None)
    with pytest.raises(ValueError, match="evaluate_every"):
        made(evaluate_every=0)
    with pytest.raises(RuntimeError, match="topk and topk_monitor belong together"):
        made(topk=2)
    with pytest.raises(AssertionError, match="needs evaluations of the trainer"):
        toy_trainer(8, made(watch_monitor="acc"))


# -- fitlog ----------------------------------------------------------------------------------------------


class StandIn(ModuleType):
    """fitlog's public functions as far as they are called; they note their calls, and take no dict: see `_plain`."""

    def __init__(self) -> None:
        super().__init__("fitlog")
        self.calls: list[tuple[Any, ...]] = []

    def debug(self, flag: bool = True) -> None:
        self.calls.append(("debug",))

    def finish(self, status: int = 0, send_to_bot: str | None = None) -> None:
        self.calls.append(("finish", status))

    def add_metric(self, value: Any, step: int, name: str | None = None, epoch: int | None = None) -> None:
        self.calls.append(("metric", _plain(value), step, name, epoch))

    def add_loss(self, value: Any, step: int, name: str | None = None, epoch: int | None = None) -> None:
        self.calls.append(("loss", _plain(value), step, name, epoch))

    def add_best_metric(self, value: Any, name: str | None = None) -> None:
        self.calls.append(("best", _plain(value), name))

    def add_other(self, value: Any, name: str | None = None) -> None:
        self.calls.append(("other", _plain(value), name))


def _plain(value: Any) -> Any:
    """Fail as fitlog 0.9.15 does with current numpy."""
    if isinstance(value, dict):
        raise AttributeError("module 'numpy' has no attribute 'str'")
    return value


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
    toy_trainer(8, [FitlogCallback(), Raising("on_train_batch_end", 1, EarlyStopException("enough"))]).run()
    assert fitlog.calls[-1] == ("finish", 0)


def test_a_broken_fitlog_is_an_error_that_names_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fitlog", raising=False)
    with pytest.raises(ImportError, match=r"'fitlog', which is not installed.*cadenza.sinks.*TensorBoard"):
        FitlogCallback()
    for text, message in (
        (
            "raise AttributeError('module numpy has no attribute float')",
            "cannot be imported: AttributeError.*names that current numpy does not have",
        ),
        ("import a_package_that_is_not_there", "cannot be imported: ModuleNotFoundError"),
    ):
        target_ = tmp_path / str(len(message))
        target_.mkdir()
        (target_ / "fitlog.py").write_text(text)
        with monkeypatch.context() as patch:
            patch.syspath_prepend(target_)
            with pytest.raises(ImportError, match=rf"{message}.*cadenza.sinks"):
                FitlogCallback()
    with pytest.raises(ValueError, match="log_loss_every"):
        FitlogCallback(log_loss_every=-1)
