"""Why something did not happen in a run: from schedules, requests, monitors, disabled callbacks and the end of the run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Protocol

from cadenza.engine.metric_log import MetricLog
from cadenza.engine.rank_sync import RankSync
from cadenza.errors import nearest
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.faults import Fault
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback, moments_of
from cadenza.loading.evaluation import Evaluation
from cadenza.status.decisions import Decision, Outcome, WhyNot
from cadenza.status.formats import counted
from cadenza.status.progress import Progress

_OF_THE_RUN = ("stopped", "epoch ended", "batch skipped", "saved", "evaluated")
_LOGGED = "logged "


class Asked(Protocol):
    """The part of the engine's session that this module reads."""

    hooks: Hooks
    progress: Progress
    accumulate: int
    sync: RankSync
    metrics: MetricLog
    outcome: Outcome | None
    decisions: list[Decision]
    faults: list[Fault]
    evaluations: dict[str, Evaluation]


def why_not(session: Asked, what: str) -> WhyNot:
    """Return why something did not happen. Nothing is read from the device, or exchanged with other ranks.

    Raises:
        ValueError: `what` is no decision, callback or moment of this run.
    """
    if what.startswith(_LOGGED):
        return WhyNot(what, tuple(_not_logged(session, what.removeprefix(_LOGGED).strip())))
    moments = {moment.__name__: listeners for moment, listeners in session.hooks.by_moment.items()}
    last = next((one for one in reversed(session.decisions) if what in (one.what, one.who)), None)
    if what in session.hooks.callbacks:
        reasons = _of_callback(session, what, session.hooks.callbacks[what])
    elif what in (names := {**moments_of(Callback), **moments}):
        listeners = moments.get(what, ())
        reasons = _due(session, listeners) if listeners else iter([f"no callback of this run has a hook {what}"])
    else:
        decided = {name for one in session.hooks.callbacks.values() for name in one.decides}
        kinds = [*dict.fromkeys((*_OF_THE_RUN, *sorted(decided), *(one.what for one in session.decisions)))]
        if what not in kinds:
            known = [*kinds, *session.hooks.callbacks, *names, "logged NAME"]
            raise ValueError(
                f"why_not takes a decision, a callback, a moment, or 'logged' and a name; got {what!r}.{nearest(what, known)} "
                f"Known in this run: {', '.join([*kinds, *session.hooks.callbacks, 'logged NAME'])}, and the moments."
            )
        reasons = _of_decision(session, what)
    return WhyNot(what, (*_ended(session), *dict.fromkeys(reasons)), last)


def _ended(session: Asked) -> Iterator[str]:
    if session.outcome is not None:
        yield f"the run is over ({session.outcome.kind}: {session.outcome.reason})"


def _of_decision(session: Asked, what: str) -> Iterator[str]:
    requests = session.sync.requests
    asked = {"stopped": requests.stop or requests.signalled, "epoch ended": requests.end_epoch}.get(what)
    if asked is not None and session.outcome is None:
        yield f"requested by {asked.who} ({asked.why}): it is carried out at the end of the step"
    failed = next((one for one in reversed(session.decisions) if one.what == f"not {what}"), None)
    if failed is not None:
        yield f"it failed, {failed}"
    if what == "stopped":
        yield f"no limit is reached: {session.progress}"
    deciding = {name: one for name, one in session.hooks.callbacks.items() if what in one.decides}
    for name, callback in deciding.items():
        yield from _of_callback(session, name, callback)
    if not deciding and asked is None:
        yield "no callback of this run does it on its own; a hook may request it"


def _of_callback(session: Asked, name: str, callback: BaseCallback) -> Iterator[str]:
    fault = next((one for one in session.faults if one.callback == name), None)
    listeners = [one for several in session.hooks.by_moment.values() for one in several if one.owner == name]
    if fault is not None and all(one.disabled for one in listeners):
        yield f"{fault}: it is disabled"
        return
    yield from (f"{name}: {text}" for text in callback.waits_for())
    yield from _due(session, [one for one in listeners if one.schedule is not None])
    if not any(one.schedule for one in listeners):
        names = ", ".join(dict.fromkeys(one.moment.__name__ for one in listeners))
        yield f"{name} waits for {names}" if listeners else f"{name} has no hooks"


def _due(session: Asked, listeners: Iterable[Listener]) -> Iterator[str]:
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


def _next(session: Asked, listener: Listener) -> str:
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


def _not_logged(session: Asked, name: str) -> Iterator[str]:
    history = session.metrics.history
    yield from _ended(session)
    if name in history.names:
        step, value = history[name][-1]
        yield f"it was logged: {name} is {value:g} at step {step}"
        return
    evaluation = session.evaluations.get(name.partition("/")[0])
    if evaluation is None:
        known = [*history.names, *(f"{one}/loss" for one in session.evaluations)]
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
