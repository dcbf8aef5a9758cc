"""which="best" | "last" | a name, and weights="model" | "ema": one rule, wherever weights of a run are read."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, export_weights, load_weights, on, supervised
from cadenza.callbacks import Checkpoint, Ema, Evaluate, OmitFrozen
from cadenza.checkpoint.catalogue import find
from cadenza.checkpoint.store import Store
from cadenza.commands.main import main
from cadenza.errors import CallbackError, CheckpointDamagedError, CheckpointError, CheckpointMismatchError
from cadenza.hooks import HeldWeights
from cadenza.loading.evaluation import Evaluation
from cadenza.records import read_records
from cadenza.sinks import Console
from cadenza.sinks.progress_bar import ProgressBar
from cadenza.status.encoding import same
from cadenza.testing import tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests import forked

WORST_FIRST: Any = ("eval/loss", "max")  # the loss falls, so the first evaluation has the highest


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def evaluated(every: str = "2 steps", **options: Any) -> Evaluate:
    return Evaluate(tiny_loader(3), every, **options)


def trained(directory: Path, steps: int = 8, keep_best: Any = WORST_FIRST, callbacks: Any = (), **options: Any) -> Trainer:
    """Return a trainer after a run with an evaluation every 2 steps, and checkpoints of the last two and the best."""
    saves = Checkpoint("3 steps", keep_last=2, keep_best=keep_best)
    arguments = {"model": network(), "callbacks": [Ema(0.5), evaluated(), saves, *callbacks], **options}
    trainer = tiny_trainer(steps=steps, directory=directory, **arguments)
    trainer.fit()
    return trainer


def state_of(trainer: Trainer) -> dict[str, Any]:
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def loaded(path: Path | str, **choice: Any) -> dict[str, Tensor]:
    """Return the weights of a model that got the chosen ones."""
    model = network()
    load_weights(path, model, **choice)
    return dict(model.state_dict())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir() if path.name.startswith("step-"))


def history_of(directory: Path, name: str) -> Iterator[float]:
    return (record.values[name] for record in read_records(directory / "metrics.jsonl") if name in record.values)


# -- which checkpoint -----------------------------------------------------------------------------------


def test_the_best_is_the_one_that_the_rule_kept_also_after_a_resume_and_the_last_the_newest(tmp_path: Path) -> None:
    trained(tmp_path)
    assert names(tmp_path) == ["step-00000002", "step-00000006", "step-00000008"]
    chosen = [find(tmp_path, which).saved.name for which in (None, "last", "best", "best:eval/loss", "step-6", "step-00000002")]
    assert chosen == ["step-00000008", "step-00000008", "step-00000002", "step-00000002", "step-00000006", "step-00000002"]
    assert str(find(tmp_path, "best")).startswith("step-00000002, the best by eval/loss (")

    saves = Checkpoint("3 steps", keep_last=1, keep_best=WORST_FIRST)
    again = tiny_trainer(model=network(), steps=11, directory=tmp_path, callbacks=[Ema(0.5), evaluated(), saves])
    run = again.fit(resume="auto")
    assert names(tmp_path) == ["step-00000002", "step-00000011"]
    assert find(tmp_path, "best").saved.name == "step-00000002"
    assert run.why("best kept").endswith("at step 2 in checkpoints/step-00000002")


def test_a_rollback_takes_back_what_was_the_best_after_it(tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        saves = Checkpoint("2 steps", keep_last=None, keep_best=("eval/loss", "min"))
        return tiny_trainer(model=network(), steps=steps, directory=tmp_path, callbacks=[evaluated(), saves])

    trainer(8).fit()
    assert find(tmp_path, "best").saved.name == "step-00000008"
    trainer(5).fit(resume=tmp_path / "checkpoints" / "step-00000004")
    assert find(tmp_path, "best").saved.name == "step-00000004"
    assert find(tmp_path, "last").saved.name == "step-00000005"
    assert Store(tmp_path / "checkpoints").files.links() == {"best": "step-00000004", "last": "step-00000005"}


def export_best(folder: Path, target: Path) -> None:
    export_weights(folder, target, which="best", weights="ema")


def test_a_copied_folder_suffices_in_another_process(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "bare")
    shutil.rmtree(tmp_path / "run")
    target = tmp_path / "out.safetensors"
    assert forked.start(export_best, tmp_path / "bare", target, output=tmp_path / "output").ended() == 0
    assert not same(loaded(target), state_of(trainer))
    assert same(loaded(target), loaded(tmp_path / "bare", which="best", weights="ema"))


def test_with_several_results_one_must_be_chosen(tmp_path: Path) -> None:
    trained(tmp_path, keep_best=[WORST_FIRST, ("far/loss", "min")], callbacks=[evaluated(name="far")])
    with pytest.raises(CheckpointError, match=r"each of 2 results.*'best:eval/loss' \(.*step-00000002\), 'best:far/loss' \("):
        find(tmp_path, "best")
    assert find(tmp_path, "best:far/loss").saved.name == "step-00000008"
    assert find(tmp_path, "best:eval/loss").saved.name == "step-00000002"
    with pytest.raises(CheckpointError, match=r"is the best by 'far/los'\. Did you mean 'far/loss'\?"):
        find(tmp_path, "best:far/los")


def test_two_checkpoints_in_one_list_both_tell_their_best(tmp_path: Path) -> None:
    saves = [Checkpoint("4 steps", keep_best=one, background=False) for one in (WORST_FIRST, ("far/loss", "min"))]
    elsewhere = Checkpoint("4 steps", keep_best=("third/loss", "max"), directory=tmp_path / "elsewhere")
    evaluations = [evaluated(), evaluated(name="far"), evaluated(name="third")]
    trainer = tiny_trainer(steps=6, directory=tmp_path / "run", callbacks=[*evaluations, *saves, elsewhere])
    run = trainer.fit()
    for monitor, pick in (("eval/loss", max), ("far/loss", min), ("third/loss", max)):
        step, value = pick(run.history[monitor], key=lambda point: point[1])
        folder = tmp_path / ("elsewhere" if monitor == "third/loss" else "run")
        assert find(folder, f"best:{monitor}").saved.step == step
        name = monitor.partition("/")[0]
        assert trainer.evaluate(tiny_loader(3), name=name, which=f"best:{monitor}") == {monitor: value}


def test_without_a_best_the_error_says_what_there_is(tmp_path: Path) -> None:
    trained(tmp_path, keep_best=())
    with pytest.raises(CheckpointError, match=r"none was kept for its result.*there is step-00000008, step-00000006"):
        find(tmp_path, "best")


def test_a_damaged_best_or_a_newer_one_that_may_be_the_best_is_an_error_and_never_another_one(tmp_path: Path) -> None:
    trained(tmp_path)
    newest = tmp_path / "checkpoints" / "step-00000008" / "manifest.json"
    whole = newest.read_text()
    newest.write_text("{")
    with pytest.raises(CheckpointError, match=r"is not known: step-00000008.*may be the best.*give which='step-00000002'"):
        find(tmp_path, "best")
    assert find(tmp_path, "last").saved.name == "step-00000006"
    newest.write_text(whole)
    weights = tmp_path / "checkpoints" / "step-00000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointDamagedError, match=r"step-00000002: model\.safetensors has"):
        load_weights(tmp_path, model, which="best")
    assert same(dict(model.state_dict()), before)
    shutil.rmtree(weights.parent)
    with pytest.raises(
        CheckpointError, match=r"step-00000002, the best by eval/loss .*no longer exists.*There is step-00000006"
    ):
        load_weights(tmp_path, model, which="best")


def test_a_name_of_a_checkpoint_or_of_weights_that_is_none_is_an_error_at_once(tmp_path: Path) -> None:
    trained(tmp_path)
    for wrong, meant in (("bset", "Did you mean 'best'"), ("latest", "Did you mean 'last'"), ("step500", "a name such as")):
        with pytest.raises(ValueError, match=meant):
            find(tmp_path, wrong)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'step-7'; there is step-00000002, step-00000006"):
        find(tmp_path, "step-7")
    with pytest.raises(CheckpointError, match=r"is one checkpoint, and which='best' chooses among those of a run"):
        find(tmp_path / "checkpoints" / "step-00000002", "best")
    with pytest.raises(TypeError, match="which must be"):
        find(tmp_path, 5)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"holds no weights 'emma'\. It holds 'model', 'ema'\. Did you mean 'ema'"):
        loaded(tmp_path, which="best", weights="emma")


# -- which weights --------------------------------------------------------------------------------------


class Largest(Callback):
    """Keeps the weights after the largest gradient. It declares them, and nothing else knows the class."""

    def __init__(self) -> None:
        self.norm, self.weights = 0.0, dict[str, Tensor]()

    def on_before_optimizer_step(self, run: Run) -> None:
        norm = float(sum(one.grad.norm() for one in run.model.parameters() if one.grad is not None))
        if norm > self.norm:
            self.norm, self.weights = norm, {name: one.clone() for name, one in run.model.state_dict().items()}

    def state_dict(self) -> dict[str, Any]:
        return {"norm": self.norm, "weights": {f"of.{name}": one for name, one in self.weights.items()}}

    def held_weights(self) -> dict[str, HeldWeights | None]:
        return {"largest": HeldWeights("weights", "of.") if self.weights else None}


def test_a_callback_of_the_user_declares_the_weights_that_it_holds(tmp_path: Path) -> None:
    own = Largest()
    trainer = trained(tmp_path, callbacks=[own])
    assert same(loaded(tmp_path, weights="largest"), own.weights)
    stored = trainer.evaluate(tiny_loader(), which="last", weights="largest")
    assert trainer.evaluate(tiny_loader(), weights="largest") == stored != trainer.evaluate(tiny_loader())


def test_two_callbacks_cannot_hold_weights_of_one_name() -> None:
    with pytest.raises(CallbackError, match="two callbacks hold weights that are called 'largest'"):
        tiny_run(callbacks=[Largest(), Largest(), Evaluate(tiny_loader(), "1 step", weights="largest")])


def test_the_averaged_weights_are_the_default_if_they_had_the_best_result(tmp_path: Path) -> None:
    averaged = evaluated(name="averaged", weights="ema")
    trainer = trained(tmp_path, keep_best=[WORST_FIRST, ("averaged/loss", "max")], callbacks=[averaged])
    averages = loaded(tmp_path, which="best:averaged/loss", weights="ema")
    assert same(loaded(tmp_path, which="best:averaged/loss"), averages)
    assert not same(loaded(tmp_path, which="best:averaged/loss", weights="model"), averages)
    best = max(trainer.evaluate(tiny_loader(3), which="best:eval/loss").values())
    assert best == max(value for value in history_of(tmp_path, "eval/loss"))


# -- the command line -----------------------------------------------------------------------------------


def test_the_commands_take_the_same_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run")
    run, target = str(tmp_path / "run"), tmp_path / "out.safetensors"
    assert main(["checkpoint", "export", run, str(target), "--which", "best", "--weights", "ema"]) == 0
    assert capsys.readouterr().out.startswith("wrote the weights 'ema' of step-00000002, the best by eval/loss (")
    assert same(loaded(target), loaded(run, which="best", weights="ema"))
    assert main(["checkpoint", "show", run, "--which", "best"]) == 0
    assert "step             2\n" in capsys.readouterr().out
    assert main(["checkpoint", "show", run]) == 0
    shown = capsys.readouterr().out
    assert "step             8\n" in shown
    assert "best             eval/loss " in shown
    assert re.search(r"time             \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n", shown)
    assert main(["checkpoint", "show", run, "--which", "bst"]) == 1
    assert "Did you mean 'best'?" in capsys.readouterr().err
    assert main(["runs", str(tmp_path), "--json"]) == 0
    [listed] = json.loads(capsys.readouterr().out)
    assert (listed["kept"]["eval/loss"]["step"], listed["kept"]["eval/loss"]["checkpoint"]) == (2, "step-00000002")
    assert listed["kept"]["eval/loss"]["value"] == listed["best"]["eval/loss"]
    assert main(["why", run, "best", "kept"]) == 0
    assert "at step 2 in checkpoints/step-00000002" in capsys.readouterr().out


def test_a_tiny_model_is_not_confused_by_files_of_these_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best").mkdir()
    tiny_run(directory="run", callbacks=[evaluated(), Checkpoint("2 steps", keep_best=WORST_FIRST)])
    load_weights("run", tiny_model(), which="best")


# -- the end of a run, and a resume ---------------------------------------------------------------------


def test_console_and_progress_bar_end_with_value_step_and_path_if_there_is_a_rule_for_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    both: Any = [WORST_FIRST, ("far/loss", "min")]
    for show in (Console(), ProgressBar("plain")):
        name = type(show).__name__
        callbacks = [evaluated(), evaluated(name="far"), Checkpoint(keep_best=both), show]
        run = tiny_run(directory=f"runs/{name}", steps=8, callbacks=callbacks)
        first, last = run.history["eval/loss"][0], run.history["far/loss"][-1]
        assert capsys.readouterr().out.splitlines()[-2:] == [
            f"best eval/loss {first[1]:.4g} at step 2: runs/{name}/checkpoints/step-00000002",
            f"best far/loss {last[1]:.4g} at step 8: runs/{name}/checkpoints/step-00000008",
        ]
    assert (tmp_path / "runs/Console/console.log").read_text().splitlines()[-1].startswith("best far/loss")
    run = tiny_run(directory=tmp_path / "none", callbacks=[evaluated(), Checkpoint(), Console()])
    assert capsys.readouterr().out.splitlines()[-1].startswith("finished")
    assert not any(one.what == "best kept" for one in run.decisions)


def test_a_run_continues_at_its_best_checkpoint_by_name(tmp_path: Path) -> None:
    def again(steps: int = 8) -> Any:
        saves = Checkpoint("3 steps", keep_last=2, keep_best=WORST_FIRST)
        return tiny_trainer(model=network(), steps=steps, directory=tmp_path, callbacks=[evaluated(), saves])

    again().fit()
    expected = loaded(tmp_path, which="best")
    trainer = again(steps=2)
    run = trainer.fit(resume="best")
    assert run.progress.origin.step == 2
    assert same(state_of(trainer), expected)
    assert again(5).fit(resume="step-2").progress.origin.step == 2
    for wrong, message in (("best:x", "is the best by 'x'"), ("step-77", "there is no checkpoint 'step-77'")):
        with pytest.raises(CheckpointError, match=message):
            again().fit(resume=wrong)
    for wrong in ("bets", "latest"):
        with pytest.raises(ValueError, match="Did you mean"):
            again().fit(resume=wrong)
    with pytest.raises(ValueError, match="resume='best' looks for checkpoints in the directory"):
        tiny_trainer().fit(resume="best")


def test_a_best_checkpoint_of_weights_only_cannot_be_continued(tmp_path: Path) -> None:
    saves = Checkpoint("2 steps", keep_best=WORST_FIRST, weights_only=True)
    trainer = tiny_trainer(model=network(), steps=6, directory=tmp_path, callbacks=[evaluated(), saves])
    trainer.fit()
    loaded(tmp_path, which="best")
    with pytest.raises(CheckpointMismatchError, match="holds weights only"):
        trainer.fit(resume="best")


# -- evaluate and predict of a trainer ------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, "eager"])
def test_the_best_is_evaluated_after_a_fit_and_the_model_is_as_before(tmp_path: Path, compiled: Any) -> None:
    options: dict[str, Any] = {"compile": {"backend": "eager"}} if compiled else {}
    trainer = trained(tmp_path, **options)
    before, live = state_of(trainer), trainer.evaluate(tiny_loader(3))
    tensors = [id(one) for one in trainer.model.parameters()]
    best = trainer.evaluate(tiny_loader(3), which="best")
    assert best["eval/loss"] == max(history_of(tmp_path, "eval/loss"))
    averaged = trainer.evaluate(tiny_loader(3), which="best", weights="ema")
    assert len({one["eval/loss"] for one in (live, best, averaged)}) == 3
    assert same(state_of(trainer), before)
    assert [id(one) for one in trainer.model.parameters()] == tensors
    assert trainer.evaluate(tiny_loader(3)) == live


def test_predictions_are_those_of_the_chosen_weights(tmp_path: Path) -> None:
    trainer = trained(tmp_path, compute_loss=supervised(nn.MSELoss()))
    before = state_of(trainer)
    model = network()
    load_weights(tmp_path, model, which="best", weights="ema")
    expected = torch.cat([model.eval()(inputs) for inputs, _ in tiny_loader()])
    assert torch.equal(trainer.predict(tiny_loader(), which="best", weights="ema"), expected)
    assert same(state_of(trainer), before)


def test_after_an_error_the_model_has_its_weights_again(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    before = state_of(trainer)

    def failing(model: nn.Module, batch: Any) -> Any:
        assert not same(dict(model.state_dict()), before)
        raise RuntimeError("in the evaluation")

    with pytest.raises(RuntimeError, match="in the evaluation"):
        trainer.evaluate(tiny_loader(), compute=failing, which="best")
    assert same(state_of(trainer), before)


def test_the_averaged_weights_in_memory_need_no_checkpoint() -> None:
    ema = Ema(0.5)
    trainer = tiny_trainer(model=network(), steps=4, callbacks=[ema])
    with pytest.raises(ValueError, match=r"evaluate\(weights='ema'\) needs averaged weights, and Ema has none yet"):
        trainer.evaluate(tiny_loader(), weights="ema")
    run = trainer.fit()
    with ema.in_place(run):
        expected = trainer.evaluate(tiny_loader())
    assert trainer.evaluate(tiny_loader(), weights="ema") == expected != trainer.evaluate(tiny_loader(), weights="model")
    with pytest.raises(
        ValueError, match=r"predict\(weights='eva'\).*no callback provides 'eva'; available: 'ema'.*Did you mean"
    ):
        trainer.predict(tiny_loader(), compute=lambda model, batch: model(batch[0]), weights="eva")


def test_hooks_learn_which_weights_are_evaluated(tmp_path: Path) -> None:
    seen = []

    @on(Callback.on_eval_start)
    def look(run: Run, evaluation: Evaluation) -> None:
        seen.append((evaluation.weights, run.why("weights in place"), [one.data for one in run.decisions]))

    trainer = trained(tmp_path, callbacks=[look])
    seen.clear()
    trainer.evaluate(tiny_loader(), which="best", weights="ema")
    [(weights, why, [data])] = seen
    assert weights == "ema"
    assert why.endswith(f"'ema' of {tmp_path}/checkpoints/step-00000002")
    assert (data["checkpoint"], data["step"], data["best"][0]["monitor"]) == ("step-00000002", 2, "eval/loss")


def test_inside_of_a_fit_the_training_does_not_notice(tmp_path: Path) -> None:
    def trainer(directory: Path, *callbacks: Any) -> Trainer:
        saves = Checkpoint("2 steps", keep_best=WORST_FIRST, background=False)
        arguments: dict[str, Any] = {
            "model": network(),
            "callbacks": [evaluated(), saves, *callbacks],
            "seed": 1,
            "precision": "bf16",
        }
        return tiny_trainer(steps=8, accumulate=2, directory=directory, **arguments)

    compare = on(Callback.on_step_end, at=6)(lambda run: results.append(watched.evaluate(tiny_loader(3), which="best")))
    results: list[dict[str, float]] = []
    plain, watched = trainer(tmp_path / "plain"), trainer(tmp_path / "watched", compare)
    plain.fit()
    watched.fit()
    assert results == [{"eval/loss": max(history_of(tmp_path / "watched", "eval/loss"))}]
    assert same(state_of(plain), state_of(watched))


def test_without_a_directory_or_a_checkpoint_the_error_comes_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"evaluate\(which='best'\) looks for checkpoints in the directory.*the trainer has none"
    ):
        tiny_trainer().evaluate(tiny_loader(), which="best")
    with pytest.raises(ValueError, match="Did you mean 'best'"):
        tiny_trainer(directory=tmp_path).evaluate(tiny_loader(), which="bets")
    with pytest.raises(CheckpointError, match="there are no weights at"):
        tiny_trainer(directory=tmp_path).evaluate(tiny_loader(), which="best")
    with pytest.raises(TypeError, match="weights must be 'model' or the name"):
        tiny_trainer(directory=tmp_path).evaluate(tiny_loader(), weights=True)  # type: ignore[arg-type]


def test_a_path_is_taken_without_a_directory_and_another_model_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    path = tmp_path / "checkpoints" / "step-00000002"
    trainer = tiny_trainer(model=network())
    assert trainer.evaluate(tiny_loader(3), which=path) == {"eval/loss": max(history_of(tmp_path, "eval/loss"))}
    assert trainer.evaluate(tiny_loader(3), which=str(tmp_path)) == trainer.evaluate(
        tiny_loader(3), which=path.with_name("step-00000008")
    )
    export_weights(tmp_path, tmp_path / "w.safetensors", which="best")
    assert trainer.evaluate(tiny_loader(3), which=tmp_path / "w.safetensors") == trainer.evaluate(tiny_loader(3), which=path)
    with pytest.raises(CheckpointMismatchError, match="does not fit the model, which is as it was"):
        tiny_trainer().evaluate(tiny_loader(), which=path)


def test_checkpoints_in_another_folder_are_found_without_a_directory(tmp_path: Path) -> None:
    saves = Checkpoint("2 steps", keep_best=WORST_FIRST, directory=tmp_path)
    trainer = tiny_trainer(model=network(), steps=6, callbacks=[evaluated(), saves])
    run = trainer.fit()
    best = max(run.history["eval/loss"], key=lambda point: point[1])[1]
    assert trainer.evaluate(tiny_loader(3), which="best") == {"eval/loss": best}


class Scaled(nn.Module):
    """A loss with a weight of its own and a buffer."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, predictions: Tensor, targets: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        return nn.functional.mse_loss(predictions * self.scale, targets) + 0.01 * self.calls


@pytest.mark.parametrize("as_function", [True, False])
def test_the_weights_of_the_loss_are_those_of_the_checkpoint(tmp_path: Path, as_function: bool) -> None:
    loss, model = Scaled(), network()

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, loss.scale], lr=0.1)

    optimizer = make if as_function else make(model.parameters())
    trainer = trained(tmp_path, model=model, optimizer=optimizer, compute_loss=supervised(loss), keep_best=("eval/loss", "min"))
    before = (loss.scale.clone(), loss.calls.clone(), state_of(trainer))
    best = trainer.evaluate(tiny_loader(3), which="best")["eval/loss"]
    assert best == min(history_of(tmp_path, "eval/loss"))
    assert same((loss.scale.detach().clone(), loss.calls.clone(), state_of(trainer)), (before[0].detach(), *before[1:]))


def test_frozen_weights_that_a_checkpoint_leaves_out_stay(tmp_path: Path) -> None:
    model = network()
    model[0].requires_grad_(False)
    trainer = trained(tmp_path, model=model, callbacks=[OmitFrozen()], optimizer=torch.optim.SGD(model[1:].parameters(), 0.1))
    before = state_of(trainer)
    assert trainer.evaluate(tiny_loader(3), which="best", weights="ema") != trainer.evaluate(tiny_loader(3))
    assert trainer.evaluate(tiny_loader(3), which="best")["eval/loss"] == max(history_of(tmp_path, "eval/loss"))
    assert same(state_of(trainer), before)
