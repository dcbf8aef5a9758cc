"""Callbacks of your own in a native trainer: state, checkpoints, and one instance in several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza.callbacks import Checkpoint, Evaluate
from cadenza.compat.fastnlp import Callback, Event, Filter, HasMonitorCallback
from cadenza.compat.fastnlp.core.callbacks.callback import _CallbackWrapper
from cadenza.hooks.dispatch import hooks_of
from cadenza.testing import check_callback, tiny_loader, tiny_run, tiny_trainer
from tests.compat.fastnlp.toy import Scribe


class Thorough(HasMonitorCallback):
    """Has a monitor, a filter, a state of its own and one of the user's."""

    def __init__(self) -> None:
        super().__init__("eval/loss", larger_better=False)
        self.sums: list[float] = []
        self.better: list[bool] = []
        self.thirds: list[int] = []

    def on_train_begin(self, trainer: Any) -> None:
        if trainer.global_forward_batches == 0:
            self.sums, self.better, self.thirds = [], [], []
            trainer.state["count"] = 0

    def on_before_backward(self, trainer: Any, outputs: Any) -> None:
        self.sums.append(outputs["loss"].item())
        trainer.state["count"] += 1

    @Filter(every=3)
    def on_train_batch_end(self, trainer: Any) -> None:
        self.thirds.append(trainer.global_forward_batches)

    def on_evaluate_end(self, trainer: Any, results: dict[str, Any]) -> None:
        self.better.append(self.is_better_results(results))

    def on_save_checkpoint(self, trainer: Any) -> dict[str, Any]:
        return {"sums": self.sums, "better": self.better, "thirds": self.thirds, "best": self.monitor_value}

    def on_load_checkpoint(self, trainer: Any, states: dict[str, Any] | None) -> None:
        assert states is not None
        self.sums, self.better, self.thirds = states["sums"], states["better"], states["thirds"]
        self.monitor_value = states["best"]


def test_a_callback_keeps_the_contract_of_all_callbacks() -> None:
    check_callback(Thorough, reads=True)
    check_callback(Scribe)


@pytest.mark.parametrize("step", [4, 5, 7])
def test_a_native_checkpoint_holds_its_state_its_filters_and_the_users_state(tmp_path: Path, step: int) -> None:
    def parts() -> tuple[Thorough, list[Any]]:
        one = Thorough()
        return one, [Evaluate(tiny_loader()), one, Checkpoint(every=f"{step} steps", keep_last=9, directory=tmp_path)]

    whole, callbacks = parts()
    run = tiny_run(callbacks=callbacks, epochs=3, batches=5)
    rest, callbacks = parts()
    name = next(path for path in tmp_path.iterdir() if path.name.endswith(f"{step:08d}"))
    resumed = tiny_trainer(callbacks=callbacks, epochs=3, batches=5).fit(resume=name)
    assert (rest.sums, rest.better, rest.thirds) == (whole.sums, whole.better, whole.thirds)
    assert whole.thirds == [3, 6, 9, 12, 15]
    assert run.state == resumed.state == {"count": 15}
    assert torch.equal(run.model.weight, resumed.model.weight)  # type: ignore[arg-type]  # it is a Linear


def test_the_trainer_argument_in_a_native_run(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    class Look(Callback):
        def on_train_begin(self, trainer: Any) -> None:
            names = (
                "n_epochs",
                "n_batches",
                "num_batches_per_epoch",
                "cur_epoch_idx",
                "accumulation_steps",
                "monitor",
                "evaluator",
            )
            seen.update({name: getattr(trainer, name) for name in names})
            seen["optimizers"] = trainer.optimizers is trainer.live.optimizers[0]
            seen["device"] = str(trainer.model_device)
            trainer.save_model(tmp_path / "model")
            trainer.save_checkpoint(tmp_path / "all")

    tiny_run(callbacks=[Look(), scribe := Scribe("on_save_model", "on_save_checkpoint")], steps=12, batches=5, accumulate=2)
    assert seen == {
        "n_epochs": 4,
        "n_batches": 20,
        "num_batches_per_epoch": 5,
        "cur_epoch_idx": 0,
        "accumulation_steps": 2,
        "monitor": None,
        "evaluator": None,
        "optimizers": True,
        "device": "cpu",
    }
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["fastnlp_checkpoint.pkl.tar", "fastnlp_model.pkl.tar"]
    assert scribe.names == ["on_save_model", "on_save_checkpoint"]


def test_an_error_names_the_callback_like_any_other() -> None:
    class Breaks(Callback):
        def on_train_batch_end(self, trainer: Any) -> None:
            raise RuntimeError("oh")

    class Optional(Breaks):
        on_fault = "disable"

    with pytest.raises(RuntimeError) as caught:
        tiny_run(callbacks=[Breaks()])
    assert "raised in Breaks.on_step_end (callback 1 of 1)" in caught.value.__notes__[0]
    scribe = Scribe("on_train_batch_end")
    run = tiny_run(callbacks=[Optional(), scribe])
    assert [fault.callback for fault in run.faults] == ["Optional"]
    assert len(scribe.seen) == 5


def test_a_function_at_an_event_is_a_callback_with_its_name() -> None:
    def note(trainer: Any) -> None:
        """Do nothing."""

    wrapper = _CallbackWrapper(Event.on_train_begin(), note)
    assert (wrapper.callback_name, wrapper.name) == ("note", "note")
    assert list(hooks_of(tiny_run(callbacks=[wrapper], steps=1)).callbacks) == ["note"]
