"""The best by averaged weights: what is kept, what is loaded, and what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from cadenza import Callback, Run, export_weights, load_weights, on
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping, Ema, Evaluate, Swa
from cadenza.checkpoint.store import Store
from cadenza.commands.main import main
from cadenza.errors import CheckpointError
from cadenza.loading.evaluation import Evaluation
from cadenza.status.plain import same
from cadenza.testing import tiny_loader, tiny_model, tiny_run

SETS: list[Any] = [(lambda: Ema(0.9), "ema"), (lambda: Swa(0.2, "1 step", use_at_end=False), "swa")]


def weights(run: Run) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in run.model.state_dict().items()}


def judged_in(directory: Path, average: Callback, name: str, *more: Callback, **options: Any) -> dict[int, dict[str, Tensor]]:
    """Train for 5 steps; return by step the weights with which each evaluation was done."""
    seen: dict[int, dict[str, Tensor]] = {}

    @on(Callback.on_eval_end)
    def look(run: Run, evaluation: Evaluation) -> None:
        seen[run.progress.step] = weights(run)

    keep = Checkpoint("9 steps", keep_best=("eval/loss", "min"), **options)
    judge = Evaluate(tiny_loader(2), every="1 step", weights=name)
    tiny_run(directory=directory, steps=5, seed=1, callbacks=[average, judge, look, keep, *more])
    return seen


def loaded(path: Path, **arguments: Any) -> dict[str, Tensor]:
    model = tiny_model()
    load_weights(path, model, **arguments)
    return dict(model.state_dict())


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(("make", "name"), SETS)
def test_the_best_by_averaged_weights_loads_these(tmp_path: Path, make: Any, name: str, weights_only: bool) -> None:
    seen = judged_in(tmp_path, make(), name, weights_only=weights_only)
    own = tiny_run(steps=5, seed=1).model.state_dict()
    assert same(loaded(tmp_path), seen[5])
    assert same(loaded(tmp_path, weights=name), seen[5])
    assert same(loaded(tmp_path, weights="model"), dict(own))
    assert not same(seen[5], dict(own))
    export_weights(tmp_path, tmp_path / "averaged.safetensors")
    assert same(loaded(tmp_path / "averaged.safetensors"), seen[5])


def test_a_checkpoint_that_was_not_chosen_by_them_loads_the_models_own(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, steps=5, seed=1, callbacks=[Ema(0.9), Checkpoint()])
    assert same(loaded(tmp_path), dict(tiny_run(steps=5, seed=1).model.state_dict()))
    assert not same(loaded(tmp_path), loaded(tmp_path, weights="ema"))
    with pytest.raises(CheckpointError, match=r"holds no weights 'swa'\. It holds 'model', 'ema'"):
        loaded(tmp_path, weights="swa")
    with pytest.raises(CheckpointError, match="one file of weights, without any that are called 'ema'"):
        loaded(next((tmp_path / "checkpoints").glob("step-*/model.safetensors")), weights="ema")


def test_before_an_average_begins_the_best_is_one_by_the_models_own_weights(tmp_path: Path) -> None:
    judged_in(tmp_path, Swa("4 steps", "1 step", use_at_end=False), "swa")
    store = Store(tmp_path / "checkpoints")
    assert {store.manifest(saved).get("weights") for saved in store.saved() if saved.step == 5} == {"swa"}
    judged_in(tmp_path / "late", Swa("9 steps", "1 step", use_at_end=False), "swa")
    assert same(loaded(tmp_path / "late"), dict(tiny_run(steps=5, seed=1).model.state_dict()))


def test_show_and_export_say_which_weights_they_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged_in(tmp_path, Ema(0.9), "ema")
    assert main(["checkpoint", "show", str(tmp_path)]) == 0
    assert "weights          ema\n" in (shown := capsys.readouterr().out)
    assert "load_weights and export take these; weights='model' takes the model's own" in shown
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "a.safetensors")]) == 0
    assert "wrote the weights 'ema' of step-00000005" in capsys.readouterr().out
    assert main(["checkpoint", "export", str(tmp_path), str(tmp_path / "b.safetensors"), "--weights", "model"]) == 0
    assert same(loaded(tmp_path / "b.safetensors"), loaded(tmp_path, weights="model"))


IN_MEMORY = [BestWeights("eval/loss", "min"), EarlyStopping("eval/loss", mode="min", restore_best=True)]


@pytest.mark.parametrize("callback", IN_MEMORY, ids=["BestWeights", "EarlyStopping"])
def test_what_keeps_the_best_in_memory_keeps_the_averaged_weights(tmp_path: Path, callback: Callback) -> None:
    ends: list[dict[str, Tensor]] = []
    look = on(Callback.on_fit_end)(lambda run: ends.append(weights(run)))
    look.after = (type(callback),)
    seen = judged_in(tmp_path, Ema(0.9), "ema", callback, look)
    assert same(ends[0], seen[5])
