"""which="best" | "last" | a name, and weights="model" | "ema": one rule, wherever weights of a run are read."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cadenza import Callback, Run, Trainer, load_weights
from cadenza.callbacks import Checkpoint, Ema, Evaluate
from cadenza.checkpoint.finding import find
from cadenza.commands.main import main
from cadenza.errors import CallbackError, CheckpointDamagedError, CheckpointError
from cadenza.hooks import HeldWeights
from cadenza.status.plain import same
from cadenza.testing import tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.checkpoint.chosen import WORST_FIRST, evaluated, history_of, names, network, state_of, trained

# -- which checkpoint -----------------------------------------------------------------------------------


def test_the_best_is_the_one_that_the_rule_kept_and_the_last_the_newest(tmp_path: Path) -> None:
    trained(tmp_path)
    assert names(tmp_path) == ["step-00000002", "step-00000006", "step-00000008"]
    chosen = [find(tmp_path, which).saved.name for which in (None, "last", "best", "best:eval/loss", "step-6", "step-00000002")]
    assert chosen == ["step-00000008", "step-00000008", "step-00000002", "step-00000002", "step-00000006", "step-00000002"]
    assert str(find(tmp_path, "best")).startswith("step-00000002, the best by eval/loss (")


def test_after_a_resume_the_best_is_still_the_one_from_before(tmp_path: Path) -> None:
    trained(tmp_path)
    saves = Checkpoint("3 steps", keep_last=1, keep_best=WORST_FIRST)
    tiny_trainer(model=network(), steps=11, directory=tmp_path, callbacks=[Ema(0.5), evaluated(), saves]).fit(resume="auto")
    assert names(tmp_path) == ["step-00000002", "step-00000011"]
    assert find(tmp_path, "best").saved.name == "step-00000002"


def test_a_rollback_takes_back_what_was_the_best_after_it(tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        saves = Checkpoint("2 steps", keep_last=None, keep_best=("eval/loss", "min"))
        return tiny_trainer(model=network(), steps=steps, directory=tmp_path, callbacks=[evaluated(), saves])

    trainer(8).fit()
    assert find(tmp_path, "best").saved.name == "step-00000008"
    trainer(5).fit(resume=tmp_path / "checkpoints" / "step-00000004")
    assert find(tmp_path, "best").saved.name == "step-00000004"
    assert find(tmp_path, "last").saved.name == "step-00000005"


def test_a_copied_folder_suffices_in_another_process(tmp_path: Path) -> None:
    trainer = trained(tmp_path / "run")
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "bare")
    shutil.rmtree(tmp_path / "run")
    target = tmp_path / "out.safetensors"
    script = f"import cadenza; cadenza.export_weights({str(tmp_path / 'bare')!r}, {str(target)!r}, which='best', weights='ema')"
    subprocess.run([sys.executable, "-c", script], check=True)
    model = network()
    load_weights(target, model)
    assert not same(dict(model.state_dict()), state_of(trainer))
    other = network()
    load_weights(tmp_path / "bare", other, which="best", weights="ema")
    assert same(dict(model.state_dict()), dict(other.state_dict()))


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
        found = find(tmp_path / "run", f"best:{monitor}")
        assert found.saved.step == step
        name = monitor.partition("/")[0]
        assert trainer.evaluate(tiny_loader(3), name=name, which=f"best:{monitor}") == {monitor: value}


def test_without_a_best_the_error_says_what_there_is(tmp_path: Path) -> None:
    trained(tmp_path, keep_best=())
    with pytest.raises(CheckpointError, match=r"none was kept for its result.*there is step-00000008, step-00000006"):
        find(tmp_path, "best")


def test_a_damaged_best_is_an_error_and_never_another_one(tmp_path: Path) -> None:
    trained(tmp_path)
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


def test_a_newer_one_that_cannot_be_read_may_be_the_best(tmp_path: Path) -> None:
    trained(tmp_path)
    (tmp_path / "checkpoints" / "step-00000008" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"is not known: step-00000008.*may be the best.*give which='step-00000002'"):
        find(tmp_path, "best")
    assert find(tmp_path, "last").saved.name == "step-00000006"


def test_a_name_that_is_none_is_an_error_at_once(tmp_path: Path) -> None:
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


# -- which weights --------------------------------------------------------------------------------------


def test_unknown_weights_list_what_the_checkpoint_offers(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(CheckpointError, match=r"holds no weights 'emma'\. It holds 'model', 'ema'\. Did you mean 'ema'"):
        load_weights(tmp_path, network(), which="best", weights="emma")


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
    model = network()
    load_weights(tmp_path, model, weights="largest")
    assert same(dict(model.state_dict()), own.weights)
    stored = trainer.evaluate(tiny_loader(), which="last", weights="largest")
    assert trainer.evaluate(tiny_loader(), weights="largest") == stored != trainer.evaluate(tiny_loader())


def test_two_callbacks_cannot_hold_weights_of_one_name() -> None:
    with pytest.raises(CallbackError, match="two callbacks hold weights that are called 'largest'"):
        tiny_run(callbacks=[Largest(), Largest(), Evaluate(tiny_loader(), "1 step", weights="largest")])


def test_the_averaged_weights_are_the_default_if_they_had_the_best_result(tmp_path: Path) -> None:
    averaged = evaluated(name="averaged", weights="ema")
    trainer = trained(tmp_path, keep_best=[WORST_FIRST, ("averaged/loss", "max")], callbacks=[averaged])
    ema, own = network(), network()
    load_weights(tmp_path, ema, which="best:averaged/loss")
    load_weights(tmp_path, own, which="best:eval/loss")
    expected = network()
    load_weights(tmp_path, expected, which="best:averaged/loss", weights="ema")
    assert same(dict(ema.state_dict()), dict(expected.state_dict()))
    best = max(trainer.evaluate(tiny_loader(3), which="best:eval/loss").values())
    assert best == max(value for value in history_of(tmp_path, "eval/loss"))


# -- the command line -----------------------------------------------------------------------------------


def test_the_commands_take_the_same_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run")
    run, target = str(tmp_path / "run"), tmp_path / "out.safetensors"
    assert main(["checkpoint", "export", run, str(target), "--which", "best", "--weights", "ema"]) == 0
    assert capsys.readouterr().out.startswith("wrote the weights 'ema' of step-00000002, the best by eval/loss (")
    model, expected = network(), network()
    load_weights(target, model)
    load_weights(run, expected, which="best", weights="ema")
    assert same(dict(model.state_dict()), dict(expected.state_dict()))
    assert main(["checkpoint", "show", run, "--which", "best"]) == 0
    assert "step             2\n" in capsys.readouterr().out
    assert main(["checkpoint", "show", run]) == 0
    shown = capsys.readouterr().out
    assert "step             8\n" in shown
    assert "best             eval/loss " in shown
    assert re.search(r"time             \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\n", shown)
    assert main(["checkpoint", "show", run, "--which", "bst"]) == 1
    assert "Did you mean 'best'?" in capsys.readouterr().err


def test_a_tiny_model_is_not_confused_by_files_of_these_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "best").mkdir()
    tiny_run(directory="run", callbacks=[evaluated(), Checkpoint("2 steps", keep_best=WORST_FIRST)])
    load_weights("run", tiny_model(), which="best")
