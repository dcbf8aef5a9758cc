"""What each verb does to a run, at a step boundary, on every rank: it returns a sentence, or raises `RefusedError`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from cadenza.engine.boundary import change_windows
from cadenza.engine.step_state import Deferred
from cadenza.hooks.dispatch import Closer
from cadenza.loops.handle import _attach as attach_callback
from cadenza.optim.rates import SetsRates, rates_of
from cadenza.optim.settings import Group, groups_of, plain, set_option
from cadenza.status.formats import counted
from cadenza.status.progress import Accumulation, Change
from cadenza.steering.acts import Act

if TYPE_CHECKING:
    from cadenza.engine.session import Session


class RefusedError(Exception):
    """The act cannot be carried out. The message says why, and what to do."""


class Changes:
    """The acts on settings that are no part of the optimizers, which checkpoints hold: they are made again after a resume."""

    def __init__(self) -> None:
        self.factors: list[tuple[int, float]] = []
        """Factors on the rates of schedules, by the index of the optimizer."""
        self.windows: list[tuple[int, int]] = []
        """Steps, and the batches in each step from there on."""

    def make(self, session: Session) -> None:
        """Apply the changes to a run that has not begun."""
        for index, factor in self.factors:
            session.rates.factors.setdefault(index, []).append(_constant(factor))
        for step, batches in self.windows:
            session.accumulate = _with_change(session.accumulate, step, batches)

    def state_dict(self) -> dict[str, Any]:
        """Return the changes for a checkpoint."""
        return {"factors": [[*factor] for factor in self.factors], "windows": [[*window] for window in self.windows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore changes that `state_dict` returned."""
        self.factors = [(int(index), float(factor)) for index, factor in state["factors"]]
        self.windows = [(int(step), int(batches)) for step, batches in state["windows"]]


def carry_out(session: Session, act: Act, changes: Changes, *, may_attach: bool) -> str:
    """Carry out an act, except ``pause`` and ``resume``. Every rank must call this.

    Raises:
        RefusedError: It cannot be carried out.
    """
    if act.verb == "stop":
        session.run.stop(act.reason or f"told by {act.author}", data={"act": act.id, "author": act.author})
        return "the run stops at this step"
    if act.verb == "save":
        return _save(session, act)
    if act.verb == "evaluate":
        return _evaluate(session)
    if act.verb == "set":
        return _set(session, act.arguments, changes)
    if act.verb == "note":
        return str(act.arguments.get("text", ""))
    if act.verb == "attach":
        return _attach(session, str(act.arguments.get("callback", "")), may_attach=may_attach)
    raise RefusedError(f"{act.verb!r} is not a verb of this version")


def _save(session: Session, act: Act) -> str:
    if not session.savers:
        raise RefusedError("no callback writes checkpoints. Add Checkpoint(...) to callbacks.")
    for saver in session.savers:
        request = partial(saver.request, act.reason or f"told by {act.author}")
        session.hooks.carry_out([Closer(None, request)], session.run, "after_step")
    return "a checkpoint of this step is written"


def _evaluate(session: Session) -> str:
    """Run the evaluations of the callbacks in their order, and complete a record with the results."""
    listeners = [item for several in session.hooks.by_moment.values() for item in several]
    enabled = [listener for listener in reversed(listeners) if not listener.disabled]
    evaluating = {
        callback.owner: (callback, callback.function.evaluate)
        for callback in enabled
        if isinstance(callback.function, Deferred)
    }
    if not evaluating:
        raise RefusedError("no callback evaluates. Add Evaluate(...) to callbacks.")
    names = [name for name in session.hooks.callbacks if name in evaluating]
    for name in names:
        session.due.add(*evaluating[name])
    session.due.run(session)
    if session.sync.several:
        session.sync.synchronize()
    if not session.metrics.buffer.idle:
        session.metrics.deliver(session.run, session.progress.now(), wait=False)
    return f"evaluated: {', '.join(names)}"


# -- settings ---------------------------------------------------------------------------------------


def _set(session: Session, arguments: Mapping[str, Any], changes: Changes) -> str:
    values = {name: value for name, value in arguments.items() if name != "group"}
    if not values:
        raise RefusedError("set needs a name and a value, such as lr=1e-4")
    if "accumulate" in values and len(arguments) > 1:
        raise RefusedError("set accumulate= alone: the other settings are those of parameter groups")
    if "accumulate" in values:
        return _set_accumulate(session, values["accumulate"], changes)
    groups = _groups(session, arguments.get("group"))
    setters = [_setter(session, groups, name, value, changes) for name, value in values.items()]  # all are checked first
    return "; ".join(setter() for setter in setters)


def _groups(session: Session, wanted: Any) -> list[Group]:
    groups = groups_of(session.optimizers)
    found = [
        group for group in groups if wanted is None or wanted in (group.number, str(group.number), group.options.get("name"))
    ]
    if not found:
        known = ", ".join(str(group.options.get("name", group.number)) for group in groups)
        raise RefusedError(f"there is no parameter group {wanted!r}. There are: {known}")
    return found


def _setter(session: Session, groups: list[Group], name: str, value: Any, changes: Changes) -> Callable[[], str]:
    """Check a setting, and return the function that sets it."""
    holders = [group for group in groups if name in plain(group.options)]
    if not holders:
        known = sorted({key for group in groups for key in plain(group.options)} | {"accumulate"})
        raise RefusedError(f"no parameter group has a setting {name!r}. There are: {', '.join(known)}")
    before = plain(holders[0].options)[name]
    if type(before) is bool or not isinstance(before, int | float):
        raise RefusedError(f"{name} is not a number: only settings that are numbers can be set")
    if not _is_rate(value):
        raise RefusedError(f"{name} must be a finite number, at least 0; got {value!r:.60}")
    if name == "lr" and (driven := _drivers(session, holders)):
        return _scaling(session, holders, value, driven, changes)

    def set_all() -> str:
        for holder in holders:
            set_option(holder.options, name, value)
        return f"{name} {before:g} -> {value:g} in {counted(len(holders), 'parameter group')}"

    return set_all


def _is_rate(value: Any) -> bool:
    try:
        return type(value) is not bool and isinstance(value, int | float) and math.isfinite(float(value)) and value >= 0
    except OverflowError:  # a whole number of 400 digits
        return False


def _drivers(session: Session, groups: list[Group]) -> list[str]:
    """Return the names of the callbacks that set the learning rates of groups at each step."""
    optimizers = [group.optimizer for group in groups]
    callbacks = session.hooks.callbacks.items()
    return [name for name, listed in callbacks if isinstance(listed, SetsRates) and any(map(listed.drives, optimizers))]


def _scaling(session: Session, groups: list[Group], value: float, driven: list[str], changes: Changes) -> Callable[[], str]:
    """Return the function that multiplies the rates of a schedule so that the next one is `value`: the schedule goes on."""
    indices = {group.key[0] for group in groups}
    if len(indices) > 1 or len(groups) < sum(group.key[0] in indices for group in groups_of(session.optimizers)):
        raise RefusedError(f"{driven[0]} sets these rates by a schedule, which is scaled for one whole optimizer")
    if value == 0:
        raise RefusedError(f"{driven[0]} multiplies its schedule, and 0 cannot be undone. Use pause, or Freeze in callbacks.")
    index, step = indices.pop(), session.progress.step + 1
    now = float(groups[0].options["lr"]) * rates_of(session.run).factor(index, step)
    if now == 0 or not math.isfinite(value / now):
        raise RefusedError(f"the rate of the schedule of {driven[0]} is {now:g}, and cannot be scaled to {value:g}")
    factor = value / now

    def scale() -> str:
        session.rates.factors.setdefault(index, []).append(_constant(factor))
        changes.factors.append((index, factor))
        return f"lr {now:g} -> {value:g}: the schedule of {driven[0]} goes on, multiplied by {factor:g}"

    return scale


def _constant(factor: float) -> Callable[[int], float]:
    return lambda step: factor


def _set_accumulate(session: Session, batches: Any, changes: Changes) -> str:
    if type(batches) is not int or batches < 1:
        raise RefusedError(f"accumulate must be a whole number, at least 1; got {batches!r}")
    if not session.progress.has_epochs or session.step_fn is not None:
        raise RefusedError("this run has a loop or a step_fn of its own, which decides how many batches a step has")
    step, before = session.progress.step, session.step.window.size
    changes.windows.append((step, batches))
    session.accumulate = _with_change(session.accumulate, step, batches)
    change_windows(session)
    return f"from step {step + 1} on, a step has {counted(batches, 'batch')} instead of {before}"


def _with_change(accumulate: int, step: int, batches: int) -> Accumulation:
    first, changes = (accumulate.first, accumulate.changes) if isinstance(accumulate, Accumulation) else (accumulate, ())
    return Accumulation(first, [*changes, Change(step, "step", batches, f"step {step}")])


# -- callbacks --------------------------------------------------------------------------------------


def _attach(session: Session, target: str, *, may_attach: bool) -> str:
    if not may_attach:
        raise RefusedError("the run attaches no callbacks. Start it with Steering(attach=True).")
    if session.driver.world_size > 1:
        raise RefusedError("callbacks are attached in one process only")
    module, _, name = target.partition(":")
    try:
        made = getattr(import_module(module), name)
        callback = made() if isinstance(made, type) else made
        attach_callback(session, callback, who="Steering")
    except Exception as error:
        raise RefusedError(f"{target} cannot be attached: {error!r}") from error
    return f"{session.hooks.name_of(callback)} is called from now on"
