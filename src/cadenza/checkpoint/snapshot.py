"""Everything that a run needs to continue to the same bits: taken at the border of a step, and put back."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.checkpoint.other_ranks import Written, data_of
from cadenza.checkpoint.store import Content, Loaded, Stored
from cadenza.checkpoint.store.content import all_finite
from cadenza.drivers.sharding import all_laid_out, laid_out, local, optimizer_laid_out
from cadenza.engine import agreement, lengths
from cadenza.errors import CheckpointMismatchError
from cadenza.loading.batches import parameters_of
from cadenza.loading.seeding import Streams
from cadenza.optim import settings
from cadenza.optim.averaging import averages_of
from cadenza.optim.optimizers import changed_by_loading, loadable
from cadenza.records.history import History
from cadenza.status.plain import encode

if TYPE_CHECKING:
    from cadenza.run import Run


@dataclass(slots=True)
class Snapshot:
    """What is about to be saved; callbacks see it in ``on_save`` and may add to `extra`."""

    reason: str
    model: dict[str, Tensor]
    state: dict[str, Any]
    extra: dict[str, Any]

    exact: bool
    """Whether a run could continue from here to the same bits."""

    def content(self, *, weights_only: bool = False, averaged: str | None = None) -> Content:
        """Copy it to the host.

        Args:
            weights_only: Leave out all but the weights of the model and of `averaged`.
            averaged: The name of the averaged weights for which the checkpoint is kept as the best. `load_weights` loads them.

        Raises:
            StateError: A value cannot be saved; the message names its path.
        """
        facts = {"reason": self.reason, "exact": self.exact, "weights_only": weights_only, **self.state["progress"]}
        facts |= {} if averaged is None else {"weights": averaged}
        return Content.of(self.model, self._averages(averaged) if weights_only else {**self.state, "extra": self.extra}, facts)

    def _averages(self, averaged: str | None) -> dict[str, Any]:
        """Return the part of the state that holds the averaged weights of this name; nothing for None."""
        if averaged is None:
            return {}
        name = self.state["weight_sets"][averaged]
        state = {"average": self.state["callbacks"][name]["average"]}
        return {"callbacks": {name: state}, "weight_sets": {averaged: name}}


def check_states(run: Run) -> None:
    """Raise `StateError`, naming callback and place, if the state of a callback cannot be saved."""
    for name, callback in run.hooks.callbacks.items():
        encode({name: callback.state_dict()}, copy=type)  # nothing is copied


def fixed_facts(run: Run) -> dict[str, Any]:
    """Return the part of a snapshot that does not change during a run: its settings and its environment."""
    return {"given": settings.given_to(run), "environment": environment_of(run)}


def take(run: Run, reason: str, fixed: Mapping[str, Any] | None = None) -> Snapshot:
    """Collect the state of a run at a step boundary, and fire ``on_save``. Every rank must call this.

    Args:
        run: The run.
        reason: The reason for the checkpoint.
        fixed: The result of `fixed_facts`, if it is known.
    """
    own = {"streams": Streams.capture().to_plain(), "loader": run.source.state_dict(), "suspended": run.requests.suspended}
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
        **(fixed or fixed_facts(run)),
        "model_extra": {name: value for name, value in weights.items() if name not in tensors},
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "outside": run.outside.state_dict(),
        "precision": run.precision.state_dict(),
        "switched": run.switches.changed(),
        "loader": own["loader"],
        "data_seed": run.data_seed,
        **data_of(run),
        "state": dict(run.state),
        "history": run.history.state_dict(),
        "rows": run.history.rows_state(),
        "offsets": run.offsets(),
        "batches_found": lengths.found(run),
        "callbacks": {name: state for name, callback in run.hooks.callbacks.items() if (state := callback.state_dict())},
        "weight_sets": {weights: name for weights, (name, _) in averages_of(run).items()},
        "streams": own["streams"],
        "suspended": own["suspended"],
        "ranks": ranks,
    }
    exact = run.at_border and (run.driver.world_size == 1 or agreement.together(run))
    snapshot = Snapshot(reason, tensors, state, {}, exact)
    run.hooks.on_save(run, snapshot)
    return snapshot


def is_finite(run: Run) -> bool:
    """Return whether all of the model's weights are finite. Waits for the device. Of shards every rank must ask."""
    weights = run.driver.unwrap(run.model).state_dict().values()
    finite = all_finite(local(weight) for weight in (*weights, *run.outside.parameters) if isinstance(weight, Tensor))
    return not run.driver.any_rank(not finite) if run.driver.shards else finite


def restore(run: Run, loaded: Loaded, *, strict: bool = False) -> None:
    """Put a checkpoint's state into a run that is set up, and fire ``on_load``; random streams come last, with the first step.

    It may have been written on another number of ranks. Gradients that a ``step_fn`` had left are means over ranks, and stay.
    A callback's state that has no callback any more is named, and with `strict` an error.

    Raises:
        CheckpointMismatchError: It belongs to another model, optimizer or accumulation; nothing is changed then.
        DataError: It lies inside an epoch that this number of ranks cannot go on with; nothing is changed then.
    """
    state = loaded.state
    if "config" not in state:
        raise CheckpointMismatchError(
            f"{loaded.name} holds weights only, and a run cannot continue there: use load_weights, or a checkpoint that was "
            "written without weights_only=True."
        )
    written = Written.read(loaded.name, state)
    found = settings.differences(run, state.get("given", {}))
    samples = [str(one) for one in found if one.samples]
    _check_schedules(loaded.name, found)
    _check_config(loaded.name, *written.must_agree(run, state["config"], config_of(run)), samples)
    written.check_place(run)
    if samples and written.inside:
        why = "The loader must not change inside an epoch. It may change at a checkpoint from the end of an epoch."
        raise CheckpointMismatchError(f"{_mismatch(loaded.name, samples)} {why}")
    load_model(run, loaded)
    _load_optimizers(run, state)
    run.outside.load_state_dict(state.get("outside", {}))
    run.precision.load_state_dict(state["precision"])
    run.data_seed, run.switches.saved = state["data_seed"], state.get("switched", {})
    run.state.update(placed(run, state["state"]))
    run.history = History.from_state(state["history"], run.history.limit, state.get("rows"))
    run.in_epoch, run.exhausted = state["in_epoch"], state["exhausted"]
    written.go_on(run)
    if state.get("batches_found") and written.ranks == run.driver.world_size:
        run.progress.correct(state["batches_found"])
    run.requests.load_state_dict(state["requests"])
    parameters = list(parameters_of(run.optimizers))
    gradients = ((parameters[i], gradient) for i, gradient in state["gradients"].items())
    run.gradients = [(one, laid_out(gradient, one).to(one.device)) for one, gradient in gradients]
    own = written.taken_over(run, state.get("ranks") or [state])
    run.source.load_state_dict(own["loader"])
    run.requests.suspended = placed(run, own.get("suspended"))
    _restore_callbacks(run, placed(run, state["callbacks"]), strict)
    for difference in _differences(state["environment"], {**environment_of(run), "ranks": written.ranks}):
        run.warn(f"{loaded.name} was written elsewhere, so the same bits are not certain: {difference}")
    settings.tell(run, loaded.name, found)
    written.warn(run)
    run.streams = Streams.from_plain(own["streams"])
    run.hooks.on_load(run, loaded)


def load_model(run: Run, loaded: Loaded) -> None:
    """Give the model the weights of a checkpoint, in the layout that they have in the run. Every rank must call this.

    Raises:
        CheckpointMismatchError: It belongs to another model; nothing is changed then.
    """
    saved = {name: list(weight.shape) for name, weight in loaded.model.items()}
    whole, own = "model_extra" in loaded.state, config_of(run)["model"]  # else it holds weights only, perhaps not of all
    if differences := _differences(saved, own if whole else {name: own.get(name, "nothing") for name in saved}):
        raise CheckpointMismatchError(_mismatch(loaded.name, differences))
    model = run.driver.unwrap(run.model)
    extra = placed(run, loaded.state["model_extra"]) if whole else {}
    model.load_state_dict({**all_laid_out(loaded.model, model.state_dict()), **extra}, strict=whole)


def _load_optimizers(run: Run, state: Mapping[str, Any]) -> None:
    for optimizer, stored in zip(run.optimizers, state["optimizers"], strict=True):
        saved = loadable(optimizer, stored)
        if change := changed_by_loading(optimizer, saved):
            run.warn(change)
        optimizer.load_state_dict(optimizer_laid_out(saved, list(parameters_of([optimizer]))))
    settings.take_over(run, state.get("given", {}))


def placed(run: Run, tree: Any) -> Any:
    """Return a part of a checkpoint's state with every tensor that is stored in parts read, as the driver shares it out."""
    if isinstance(tree, Stored):
        return run.driver.placed(tree)
    if isinstance(tree, dict):
        return {key: placed(run, part) for key, part in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(placed(run, part) for part in tree)
    return tree


def config_of(run: Run) -> dict[str, Any]:
    """Return what must be the same in a run that continues another."""
    weights = run.driver.unwrap(run.model).state_dict()
    return {
        "model": {name: list(value.shape) for name, value in weights.items() if isinstance(value, Tensor)},
        "optimizers": [type(optimizer).__name__ for optimizer in run.optimizers],
        "parameter groups": [[len(group["params"]) for group in optimizer.param_groups] for optimizer in run.optimizers],
        "accumulate": run.accumulate,
        "precision": run.precision.name,
        "batches an epoch": run.progress.batches_said,
        "seed": run.seed,
        **({"parameters outside of the model": shapes} if (shapes := run.outside.shapes()) else {}),
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


def _check_config(name: str, saved: Mapping[str, Any], current: Mapping[str, Any], samples: Sequence[str]) -> None:
    differences = [*_differences(saved.pop("model"), current["model"])] if isinstance(saved, dict) else []
    differences += _differences(saved, {key: value for key, value in current.items() if key != "model"})
    if differences:
        raise CheckpointMismatchError(_mismatch(name, [*differences, *samples]))


def _check_schedules(name: str, found: Sequence[settings.Difference]) -> None:
    """Refuse a schedule of another class: the saved one cannot continue in it."""
    if classes := [str(one) for one in found if one.name == "scheduler" and not one.present]:
        raise CheckpointMismatchError(
            f'{_mismatch(name, classes)} fit(resume=..., override=("scheduler",)) makes the present schedule and steps it to '
            "the step of the checkpoint."
        )


def _mismatch(name: str, differences: Sequence[str]) -> str:
    return (
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
