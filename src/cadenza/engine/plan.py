"""The plan of a run: the tree of moments with the listeners of each, in order. And why something did not happen in it."""

from __future__ import annotations

import math
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from cadenza.engine.arguments import plain_accumulate, useless_changes
from cadenza.engine.monitor import without_evaluation
from cadenza.engine.session import Session
from cadenza.engine.step_state import Deferred
from cadenza.errors import DirectoryError, nearest
from cadenza.files.disk import read_object
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback, Moment, moments_of
from cadenza.hooks.subscription import Subscription
from cadenza.optim.model_state import Walk
from cadenza.optim.parameters import parameters_of
from cadenza.status.decisions import WhyNot
from cadenza.status.formats import counted, few, folded
from cadenza.status.progress import Accumulation, Progress

LIMITS = ("max_epochs", "max_steps", "max_tokens")

T = TypeVar("T")

_RARE = {"on_stop", "on_exception", "on_save", "on_load", "on_sanity_start", "on_sanity_end"}  # most runs never fire these
_FACTS = {"on": "device", "in": "precision", "into": "directory"}  # in data; the headline has the short names


_ROOM = 26  # columns for the names of listeners


@dataclass(frozen=True, slots=True)
class Plan:
    """The course of a run; ``print(trainer.plan())`` shows it.

    >>> from cadenza.testing import tiny_trainer
    >>> str(tiny_trainer(epochs=2).plan()).splitlines()[0]
    'fit: 2 epochs, 5 batches an epoch, 10 steps, on cpu, in fp32'
    """

    hooks: Hooks
    """The callbacks in their order, and the listeners of each moment."""
    limits: Progress
    """The limits of the run."""
    accumulate: int
    """Batches per step."""
    facts: Mapping[str, object]
    """The device, the precision and other settings for the headline."""
    notes: Sequence[str] = ()
    """Further lines; warnings start with ``!``."""
    changes: Sequence[str] = ()
    """The differences from the plan of an earlier run: its lines with ``-``, those of this plan with ``+``."""

    def __str__(self) -> str:
        """Return the plan as text; for a terminal, without lines that are too wide for it."""
        return self.text(shutil.get_terminal_size().columns if sys.stdout is not None and sys.stdout.isatty() else None)

    def text(self, width: int | None = None) -> str:
        """Return the plan as text, in lines of at most `width` columns; None: of any length."""
        tree = list(indented(moments_of(Callback)))
        column = max(len(line) for line, _ in tree) + 3
        doubts = [note for note in self.notes if note.startswith("!")]
        rows = [self.headline(), *(note for note in self.notes if note not in doubts)]
        rows += (self._row(line, moment, column) for line, moment in tree)
        own = _own(self.hooks).values()
        rows += [self._row(f"run.fire({moment.__qualname__})", moment, column) for moment in own]
        rows += [f"! {owner} never fires: {reason}" for owner, reason in never(self.hooks, self.limits, self.accumulate)]
        rows += (f"! {reason}" for reason in useless_changes(self.accumulate, self.limits, self.hooks.callbacks.values()))
        rows += doubts
        rows += [f"order: {reason}" for reason in self._reasons()]
        rows += ["changed since the run so far:", *self.changes] if self.changes else []
        rows += [f"a fault only disables: {', '.join(ones)}" for ones in [self._with("disable")] if ones]
        rows += [f"tried again after a fault: {', '.join(ones)}" for ones in [self._with("retry")] if ones]
        return "\n".join(rows if width is None else (_fitted(row, width, column) for row in rows))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        from cadenza.status.markup import notebook_pre  # imported here: few runs are in a notebook

        return notebook_pre(self.text())

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for JSON."""
        limits = self.limits
        moments = {**moments_of(Callback), **_own(self.hooks)}
        return {
            "headline": self.headline(),
            "max_epochs": limits.max_epochs,
            "max_steps": limits.max_steps,
            "max_tokens": limits.max_tokens,
            "batches_per_epoch": limits.batches_per_epoch,
            "steps": limits.total("step", self.accumulate),
            "accumulate": plain_accumulate(self.accumulate),
            **{_FACTS.get(name, name): value if isinstance(value, int) else str(value) for name, value in self.facts.items()},
            "moments": {
                name: [
                    {"callback": item.owner, "schedule": item.schedule and str(item.schedule), "note": item.note or None}
                    for item in _shown(self.hooks, moment)
                ]
                for name, moment in moments.items()
            },
            "never": [{"listener": name, "why": reason} for name, reason in never(self.hooks, limits, self.accumulate)],
            "warnings": [note.removeprefix("! ") for note in self.notes if note.startswith("!")],
            "notes": [note for note in self.notes if not note.startswith("!")],
            "order": self._reasons(),
            "changes": list(self.changes),
            "disabled_by_a_fault": self._with("disable"),
            "tried_again_after_a_fault": self._with("retry"),
        }

    def _reasons(self) -> list[str]:
        return [*self.hooks.reasons, *_before_results(self.hooks)]

    def _with(self, on_fault: str) -> list[str]:
        return [name for name, callback in self.hooks.callbacks.items() if callback.on_fault == on_fault]

    def headline(self) -> str:
        """Return the run's length and facts in one line."""
        limits, parts = self.limits, []
        if limits.max_epochs is not None:
            parts.append(counted(limits.max_epochs, "epoch"))
        if limits.batches_per_epoch is not None:
            parts.append(f"{counted(limits.batches_per_epoch, 'batch')} an epoch")
        total = limits.total("step", self.accumulate)
        if total is not None:
            parts.append(counted(total, "step") + self._each())
        elif limits.max_steps is not None:
            parts.append(f"at most {counted(limits.max_steps, 'step')}")
        if limits.max_tokens is not None:
            parts.append(counted(limits.max_tokens, "token"))
        return "fit: " + ", ".join([*parts, *(f"{name} {value}" for name, value in self.facts.items())])

    def _each(self) -> str:
        """Return how many batches a step has."""
        if isinstance(self.accumulate, Accumulation):
            return f" of {self.accumulate}"
        return f" of {counted(self.accumulate, 'batch')}" if self.accumulate > 1 else ""

    def _row(self, line: str, moment: Moment, width: int) -> str:
        listeners = " > ".join(str(listener) for listener in _shown(self.hooks, moment))
        return f"{line:{width}}{'  ' * (len(line) >= width)}{listeners}".rstrip()


def _shown(hooks: Hooks, moment: Moment) -> list[Listener]:
    return [hook for hook in hooks.by_moment.get(moment, ()) if not hook.inner]


def _own(hooks: Hooks) -> dict[str, Moment]:
    """Return the moments that are not those of `Callback`, in the order in which their classes declare them."""
    known = moments_of(Callback).values()
    own = {moment.__qualname__: moment for moment in hooks.by_moment if moment not in known and _shown(hooks, moment)}
    holders = [*dict.fromkeys(name.rpartition(".")[0] for name in own)]
    return dict(
        sorted(own.items(), key=lambda line: (holders.index(line[0].rpartition(".")[0]), line[1].__code__.co_firstlineno))
    )


def _fitted(row: str, width: int, column: int) -> str:
    """Fold a row of the plan: the listeners go on below the first one, where there is room for them."""
    if " > " not in row[column:]:
        return folded(row, width, " " if row[:1] in "!o" or "," not in row else ", ")
    return folded(row, width, " > ", indent=" " * (column if width >= column + _ROOM else 6))


def indented(moments: Mapping[str, T]) -> Iterator[tuple[str, T]]:
    """Yield the name of each moment as a line of the tree, with its value: a start opens a level, its end closes it."""
    depth = 0
    for name, value in moments.items():
        depth -= name.endswith("_end")
        yield "  " * depth + name, value
        depth += name.endswith("_start")


def never(hooks: Hooks, limits: Progress, accumulate: int) -> list[tuple[str, str]]:
    """Return each listener that can never fire within these limits, with the reason."""
    return [*_of_fetches(hooks, limits), *without_evaluation(hooks)] + [
        (str(listener), reason)
        for listeners in hooks.by_moment.values()
        for listener in listeners
        if listener.schedule and (reason := listener.schedule.never(limits, accumulate, listener.counting))
    ]


def _of_fetches(hooks: Hooks, limits: Progress) -> Iterator[tuple[str, str]]:
    """Yield the users' listeners to the fetch of a batch in a run of `cadenza.attach`, which fetches none."""
    for moment in () if limits.has_epochs else (Callback.on_fetch_start, Callback.on_fetch_end):
        for listener in _shown(hooks, moment):
            if _is_of_user(hooks, listener):
                yield f"{listener}, {moment.__name__},", "a loop of cadenza.attach brings its own batches"


def _before_results(hooks: Hooks) -> Iterator[str]:
    """Yield the users' callbacks behind an evaluation in the list: at its moment they are called before it."""
    if not all(isinstance(callback, Callback) for callback in hooks.callbacks.values()):
        return  # those of other libraries: evaluations run inside of the moment
    for moment, listeners in hooks.by_moment.items():
        first = next((listener for listener in listeners if isinstance(listener.function, Deferred)), None)
        behind = [] if first is None else listeners[listeners.index(first) + 1 :]
        if early := ", ".join(dict.fromkeys(callback.owner for callback in behind if _is_of_user(hooks, callback))):
            yield f"{moment.__name__} calls {early} before {first and first.owner} evaluates: read results in on_eval_end"


def _is_of_user(hooks: Hooks, listener: Listener) -> bool:
    callback = hooks.callbacks[listener.owner]
    return isinstance(callback, Subscription) or type(callback).__module__.partition(".")[0] != "cadenza"


def never_fired(hooks: Hooks, progress: Progress, evaluated: bool) -> list[tuple[str, str]]:
    """Return each listener that was not called in a run that is over, with the reason."""
    rows = []
    for moment, listeners in hooks.by_moment.items():
        name = moment.__name__
        for listener in [listener for listener in listeners if not listener.inner]:
            if listener.trigger is not None and not listener.trigger.times_due and name not in _RARE:
                rows.append((f"{listener}, {name}", f"the run ended at {progress.now()}"))
            elif name.startswith("on_eval_") and not evaluated and moment not in hooks.fired:
                if getattr(hooks.callbacks[listener.owner], "shows_progress", False):
                    continue  # it shows what there is
                rows.append((f"{listener}, {name}", "no evaluation took place"))
            elif moment not in moments_of(Callback).values() and moment not in hooks.fired:
                rows.append((f"{listener}, {name}", "no run.fire(...) called it"))
    return rows


def doubts(session: Session, walk: Walk) -> Iterator[str]:
    """Yield a warning for each setting that is allowed, and is often a mistake. `walk` is one over the model."""
    batches = session.progress.batches_per_epoch
    if batches is not None and batches < session.accumulate:
        yield (
            f"accumulate={session.accumulate} is more than the {counted(batches, 'batch')} of an epoch: each step is one short "
            "accumulation window"
        )
    held = Counter(map(id, parameters_of(session.optimizers)))
    if session.step_fn is None and (shared := [name for name, value in walk.parameters.items() if held[id(value)] > 1]):
        them = "it" if len(shared) == 1 else "them"
        yield (
            f"two optimizers hold {counted(len(shared), 'parameter')}, so each step updates {them} twice: {few(shared)}. Give "
            "each parameter to one optimizer, or update the optimizers in turn in a step_fn."
        )
    left = [name for name, value in walk.parameters.items() if value.requires_grad and id(value) not in held]
    yield from session.extra_parameters.doubts({*held}, walk.parameters.values())
    yield from session.module_flags.doubts(walk.modules, held)
    if left:
        yield (
            f"no optimizer holds {counted(len(left), 'parameter')} that require a gradient, so they are not trained: "
            f"{few(left)}. Give them to an optimizer, or set requires_grad_(False)."
        )


# -- differences from an earlier plan --------------------------------------------------------------


def plan_in(directory: Path) -> str | None:
    """Return the plan of the run in `directory`; None if there is none.

    Raises:
        DirectoryError: ``run.json`` cannot be read.
    """
    try:
        info = read_object(directory / "run.json")
    except ValueError as error:
        raise DirectoryError(f"{str(directory / 'run.json')!r} cannot be read: {error}") from None
    plan = (info or {}).get("plan")
    return plan if isinstance(plan, str) else None


def plan_changes(before: str, now: str) -> list[str]:
    r"""Return the lines that differ: those of the earlier plan with ``-``, those of the present one with ``+``.

    Listeners are compared moment by moment, and the length and the settings of the run one by one. The directory may differ.

    >>> before = "fit: 2 epochs, 10 steps\non_step_end   Log (every 5 steps) > Ema\non_epoch_end  Evaluate"
    >>> now = "fit: 4 epochs, 10 steps\non_step_end   Log (every 2 steps) > Ema\non_epoch_end  Evaluate"
    >>> print(*plan_changes(before, now), sep="\n")
    - fit: 2 epochs
    + fit: 4 epochs
    - on_step_end: Log (every 5 steps)
    + on_step_end: Log (every 2 steps)
    """
    earlier, present = dict(_rows(before)), dict(_rows(now))
    lines = []
    for name in {**present, **earlier}:
        gone, new = earlier.get(name, []), present.get(name, [])
        if Counter(gone) == Counter(new):
            separator = ", " if name == "fit" else " > "
            pairs = [("-", [separator.join(gone)]), ("+", [separator.join(new)])] if gone != new else []
        else:
            pairs = [("-", [*(Counter(gone) - Counter(new)).elements()]), ("+", [*(Counter(new) - Counter(gone)).elements()])]
        lines += [f"{sign} {name}: {text}" for sign, texts in pairs for text in texts]
    return lines


def argument_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the arguments of a trainer that differ from those of an earlier run, limits left out.

    >>> before = {"optimizer": [{"name": "SGD", "lr": 0.1}], "callbacks": ["Ema"], "max_epochs": 2}
    >>> argument_changes(before, {"optimizer": [{"name": "SGD", "lr": 0.5}], "callbacks": ["Ema", "Swa"], "max_epochs": 2})
    ['callbacks + Swa', 'lr 0.1 -> 0.5']
    """
    found: dict[str, None] = {}  # two optimizers may change alike

    def compare(name: str, *pair: Any) -> None:
        old, new = (list(line) if isinstance(line, tuple) else line for line in pair)  # a file has lists
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            for line in {**old, **new}:
                compare(line, old.get(line), new.get(line))
        elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new) and any(map(_is_mapping, old)):
            for inner in zip(old, new, strict=True):
                compare(name, *inner)
        elif isinstance(old, list) and isinstance(new, list) and {*map(str, old)} != {*map(str, new)}:
            signed = [("-", line) for line in old if line not in new] + [("+", line) for line in new if line not in old]
            found[f"{name} {' '.join(f'{sign} {line}' for sign, line in signed)}"] = None
        elif old != new:
            found[f"{name} {old} -> {new}"] = None

    for name in before.keys() & now.keys() - {*LIMITS}:
        compare(name, before[name], now[name])
    return sorted(found)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)


def _rows(plan: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the entries of each row: the headline, and the listeners of each moment."""
    for line in plan.splitlines():
        name, _, rest = line.strip().partition(" ")
        if name == "fit:":
            yield "fit", [part for part in rest.split(", ") if not part.startswith("into ")]
        elif name.startswith(("on_", "run.fire(")):
            yield name, [text for text in rest.strip().split(" > ") if text]


# -- why something did not happen: from schedules, requests, monitors, disabled callbacks and the end


_OF_THE_RUN = ("stopped", "epoch ended", "batch skipped", "saved", "evaluated")
_LOGGED = "logged "


def why_not(session: Session, what: str) -> WhyNot:
    """Return why something did not happen. Nothing is read from the device, or exchanged with other ranks.

    Raises:
        ValueError: `what` is no decision, callback or moment of this run.
    """
    if what.startswith(_LOGGED):
        return WhyNot(what, tuple(_not_logged(session, what.removeprefix(_LOGGED).strip())))
    moments = {moment.__name__: listeners for moment, listeners in session.hooks.by_moment.items()}
    last = next((decision for decision in reversed(session.run.decisions) if what in (decision.what, decision.who)), None)
    if what in session.hooks.callbacks:
        reasons = _of_callback(session, what, session.hooks.callbacks[what])
    elif what in (names := {**moments_of(Callback), **moments}):
        listeners = moments.get(what, ())
        reasons = _due(session, listeners) if listeners else iter([f"no callback of this run has a hook {what}"])
    else:
        decided = {name for callback in session.hooks.callbacks.values() for name in callback.decides}
        kinds = [*dict.fromkeys((*_OF_THE_RUN, *sorted(decided), *(decision.what for decision in session.run.decisions)))]
        if what not in kinds:
            known = [*kinds, *session.hooks.callbacks, *names, "logged NAME"]
            raise ValueError(
                f"why_not takes a decision, a callback, a moment, or 'logged' and a name; got {what!r}.{nearest(what, known)} "
                f"Known in this run: {', '.join([*kinds, *session.hooks.callbacks, 'logged NAME'])}, and the moments."
            )
        reasons = _of_decision(session, what)
    return WhyNot(what, (*_ended(session), *dict.fromkeys(reasons)), last)


def _ended(session: Session) -> Iterator[str]:
    if session.outcome is not None:
        yield f"the run is over ({session.outcome.kind}: {session.outcome.reason})"


def _of_decision(session: Session, what: str) -> Iterator[str]:
    requests = session.sync.requests
    asked = {"stopped": requests.stop or requests.signalled, "epoch ended": requests.end_epoch}.get(what)
    if asked is not None and session.outcome is None:
        yield f"requested by {asked.who} ({asked.why}): it is carried out at the end of the step"
    failed = next((decision for decision in reversed(session.run.decisions) if decision.what == f"not {what}"), None)
    if failed is not None:
        yield f"it failed, {failed}"
    if what == "stopped":
        yield f"no limit is reached: {session.progress}"
    deciding = {name: callback for name, callback in session.hooks.callbacks.items() if what in callback.decides}
    for name, callback in deciding.items():
        yield from _of_callback(session, name, callback)
    if not deciding and asked is None:
        yield "no callback of this run does it on its own; a hook may request it"


def _of_callback(session: Session, name: str, callback: BaseCallback) -> Iterator[str]:
    fault = next((fault for fault in session.run.faults if fault.callback == name), None)
    listeners = [item for several in session.hooks.by_moment.values() for item in several if item.owner == name]
    if fault is not None and all(listener.disabled for listener in listeners):
        yield f"{fault}: it is disabled"
        return
    yield from (f"{name}: {text}" for text in callback.waits_for())
    yield from _due(session, [listener for listener in listeners if listener.schedule is not None])
    if not any(listener.schedule for listener in listeners):
        names = ", ".join(dict.fromkeys(listener.moment.__name__ for listener in listeners))
        yield f"{name} waits for {names}" if listeners else f"{name} has no hooks"


def _due(session: Session, listeners: Iterable[Listener]) -> Iterator[str]:
    """Yield when each listener is called next."""
    for listener in listeners:
        where = f"{listener.owner}, {listener.moment.__name__},"
        if listener.disabled:
            yield f"{where} is disabled"
        elif listener.schedule is None or listener.trigger is None:
            yield f"{where} is called each time"
        elif never := listener.schedule.never(session.progress, session.accumulate, listener.counting):
            yield f"{where} is due {listener.schedule}, which is never in this run: {never}"
        else:
            yield f"{where} is due {listener.schedule}{_next(session, listener)}"


def _next(session: Session, listener: Listener) -> str:
    trigger = listener.trigger
    if trigger is None or session.outcome is not None:
        return f"; it was due {counted(trigger.times_due if trigger is not None else 0, 'time')}"
    step, limit = trigger.next_step(session.progress), session.progress.total("step")
    if step == math.inf:
        return ", and not again in this run"
    if step <= session.progress.step or trigger.schedule.only_epochs:
        return f", now at {session.progress.now()}"
    beyond = f", after the end of the run at step {limit}" if limit is not None and step > limit else ""
    return f", next at step {step:g} at the earliest, now at step {session.progress.step}{beyond}"


def _not_logged(session: Session, name: str) -> Iterator[str]:
    history = session.metrics.history
    yield from _ended(session)
    if name in history.names:
        step, value = history[name][-1]
        yield f"it was logged: {name} is {value:g} at step {step}"
        return
    evaluation = session.run.evaluations.get(name.partition("/")[0])
    if evaluation is None:
        known = [*history.names, *(f"{evaluation}/loss" for evaluation in session.run.evaluations)]
        yield f"no record has {name!r}.{nearest(name, known)} Records have: {', '.join(history.names) or 'nothing yet'}"
        return
    if evaluation.results:
        reported = ", ".join(evaluation.results)
        yield f"the evaluation {evaluation.name!r} reports only {reported}.{nearest(name, evaluation.results)}"
    else:
        yield f"no evaluation {evaluation.name!r} is complete"
    for owner, callback in session.hooks.callbacks.items():
        if getattr(callback, "evaluation", None) is evaluation:
            yield from _of_callback(session, owner, callback)
