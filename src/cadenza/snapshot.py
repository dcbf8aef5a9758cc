"""Everything that a run needs to continue to the same bits: taken at the border of a step, and put back."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza import agreement
from cadenza.batching import parameters_of
from cadenza.errors import CheckpointMismatchError
from cadenza.optimizers import changed_by_loading
from cadenza.progress import Counters
from cadenza.records import History
from cadenza.seeding import Streams
from cadenza.store import Content, Loaded
from cadenza.store.checkpoints import all_finite
from cadenza.store.tree import encode

if TYPE_CHECKING:
    from cadenza.run import Run


@dataclass(slots=True)
class Snapshot:
    """What is about to be saved; callbacks see it in ``on_save`` and may add to `extra`."""

    reason: str
    model: dict[str, Tensor]
    state: dict[str, Any]
    extra: dict[str, Any]

    def content(self, *, exact: bool, weights_only: bool = False) -> Content:
        """Copy it to the host; with `weights_only` the model alone.

        Raises:
            StateError: Something in it cannot be saved; the message names its place.
        """
        facts = {"reason": self.reason, "exact": exact, "weights_only": weights_only, **self.state["progress"]}
        return Content.of(self.model, {} if weights_only else {**self.state, "extra": self.extra}, facts)


def check_states(run: Run) -> None:
    """Raise `StateError`, naming callback and place, if the state of a callback cannot be saved."""
    for name, callback in run.hooks.callbacks.items():
        encode({name: callback.state_dict()})


def take(run: Run, reason: str) -> Snapshot:
    """Collect the state of a run, and fire ``on_save``. Call it at the border of a step. Every rank must call this."""
    own = {"streams": Streams.capture().to_plain(), "loader": run.source.state_dict()}
    ranks = run.driver.gather(own) if agreement.together(run) else []
    run.hand_out(wait=True)  # a record whose numbers are still on the device would be lost
    weights = run.driver.unwrap(run.model).state_dict()
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    state = {
        "progress": asdict(run.progress.now()),
        "in_epoch": run.in_epoch,
        "exhausted": run.exhausted,
        "requests": run.requests.state_dict(),
        "gradients": {i: p.grad for i, p in enumerate(parameters_of(run.optimizers)) if p.grad is not None},
        "config": config_of(run),
        "environment": environment_of(run),
        "model_extra": {name: value for name, value in weights.items() if name not in tensors},
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "precision": run.precision.state_dict(),
        "loader": own["loader"],
        "data_seed": run.data_seed,
        "state": dict(run.state),
        "history": run.history.state_dict(),
        "offsets": run.offsets(),
        "callbacks": {name: state for name, callback in run.hooks.callbacks.items() if (state := callback.state_dict())},
        "streams": own["streams"],
        "ranks": ranks,
    }
    snapshot = Snapshot(reason, tensors, state, {})
    run.hooks.on_save(run, snapshot)
    return snapshot


def is_exact(run: Run) -> bool:
    """Return whether a run could continue to the same bits at what is taken now."""
    return run.at_border and (run.driver.world_size == 1 or agreement.together(run))


def is_finite(run: Run) -> bool:
    """Return whether all of the model's weights are finite. Waits for the device."""
    weights = run.driver.unwrap(run.model).state_dict().values()
    return all_finite(weight for weight in weights if isinstance(weight, Tensor))


def restore(run: Run, loaded: Loaded, *, strict: bool = False) -> None:
    """Put a checkpoint's state into a run that is set up, and fire ``on_load``; random streams come last, with the first step.

    A callback's state that has no callback any more is named, and with `strict` an error.

    Raises:
        CheckpointMismatchError: It belongs to another model, optimizer or accumulation; nothing is changed then.
    """
    state = loaded.state
    if "config" not in state:
        raise CheckpointMismatchError(
            f"{loaded.name} holds weights only, and a run cannot continue there: use load_weights, or a checkpoint that was "
            "written without weights_only=True."
        )
    _check_config(loaded.name, state["config"], config_of(run))
    run.driver.unwrap(run.model).load_state_dict({**loaded.model, **state["model_extra"]})
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        if change := changed_by_loading(optimizer, saved):
            run.warn(change)
        optimizer.load_state_dict(saved)
    run.precision.load_state_dict(state["precision"])
    run.data_seed = state["data_seed"]
    run.state.update(state["state"])
    run.history = History.from_state(state["history"])
    run.progress.begin(Counters(**state["progress"]), run.progress.batches_per_epoch)
    run.in_epoch, run.exhausted = state["in_epoch"], state["exhausted"]
    run.requests.load_state_dict(state["requests"])
    parameters = list(parameters_of(run.optimizers))
    run.gradients = [(parameters[i], gradient.to(parameters[i].device)) for i, gradient in state["gradients"].items()]
    own = state["ranks"][run.driver.rank] if state.get("ranks") else state
    run.open_source()
    run.source.load_state_dict(own["loader"])
    _restore_callbacks(run, state["callbacks"], strict)
    for difference in _differences(state["environment"], environment_of(run)):
        run.warn(f"{loaded.name} was written elsewhere, so the same bits are not certain: {difference}")
    run.streams = Streams.from_plain(own["streams"])
    run.hooks.on_load(run, loaded)


def config_of(run: Run) -> dict[str, Any]:
    """Return what must be the same in a run that continues another."""
    weights = run.driver.unwrap(run.model).state_dict()
    return {
        "model": {name: list(value.shape) for name, value in weights.items() if isinstance(value, Tensor)},
        "optimizers": [type(optimizer).__name__ for optimizer in run.optimizers],
        "parameter groups": [[len(group["params"]) for group in optimizer.param_groups] for optimizer in run.optimizers],
        "accumulate": run.accumulate,
        "precision": run.precision.name,
        "batches an epoch": run.progress.batches_per_epoch,
        "seed": run.seed,
        **({"ranks": run.driver.world_size} if run.driver.world_size > 1 else {}),
    }


def environment_of(run: Run) -> dict[str, Any]:
    """Return what must be the same for the same bits."""
    return {
        "torch": torch.__version__,
        "device": run.device.type,
        "threads": torch.get_num_threads(),
        "ranks": run.driver.world_size,
        "machine": platform.machine(),
    }


def _check_config(name: str, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    differences = [*_differences(saved.pop("model"), current["model"])] if isinstance(saved, dict) else []
    differences += _differences(saved, {key: value for key, value in current.items() if key != "model"})
    if differences:
        raise CheckpointMismatchError(
            f"{name} belongs to another run; nothing was restored. It differs in {len(differences)}: {'; '.join(differences)}. "
            "Give the arguments it was made with, or another directory."
        )


def _differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    return [
        f"{key}: saved {saved.get(key, 'nothing')}, now {current.get(key, 'nothing')}"
        for key in {**saved, **current}
        if saved.get(key) != current.get(key)
    ]


def _restore_callbacks(run: Run, states: Mapping[str, Any], strict: bool) -> None:
    callbacks = run.hooks.callbacks
    gone = [name for name in states if name not in callbacks]
    fresh = [name for name, callback in callbacks.items() if name not in states and callback.state_dict()]
    if gone or fresh:
        text = f"state of callbacks does not fit: saved but not in the list {gone}; in the list but not saved {fresh}"
        if strict:
            raise CheckpointMismatchError(f"{text}. Give the same callbacks under the same names, or strict=False.")
        run.warn(text)
    for name, state in states.items():
        if name in callbacks:
            callbacks[name].load_state_dict(state)
