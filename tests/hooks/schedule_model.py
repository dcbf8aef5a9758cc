"""A model of schedules: slow and plain, written from the documentation. It uses nothing of `cadenza.hooks`.

A schedule is a tuple of texts and numbers, such as ``("and", ("every", 2, "step"), ("first", 5, "batch"))``. `written` makes
the schedule of Cadenza from it. `Course` lists all firings of a run one by one, and `calls` says at which of them the schedule
is due.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from cadenza import At, Between, Every, First, Last, Run, When

Spec = tuple[Any, ...]

BEFORE_BATCH = {
    "on_epoch_start": "epoch",
    "on_fetch_start": "batch",
    "on_fetch_end": "batch",
    "on_step_start": "step",
    "on_batch_start": "batch",
    "on_before_backward": "batch",
    "on_after_backward": "batch",
}
"""The moments before the end of a batch, and the unit that each counts. All units are under way."""
IN_STEP = {"on_batch_end": "batch", **dict.fromkeys(("on_before_optimizer_step", "on_after_optimizer_step"), "step")}
IN_STEP |= dict.fromkeys(("on_before_zero_grad", "on_after_zero_grad"), "step")
"""Those after a batch, in its step: steps and epochs are under way."""
AFTER_STEP = {"on_step_end": "step", "on_epoch_end": "epoch", "on_eval_start": "time", "on_eval_end": "time"}
COUNTED = BEFORE_BATCH | IN_STEP | AFTER_STEP
EVERY = "every="
"""Where ``every=`` of a callback calls a hook: at the end of epochs if it counts whole epochs, else of steps, or at both."""


# -- a run ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Firing:
    """The counters when a moment fires."""

    moment: str = ""
    epoch: int = 0
    step: int = 0
    batch: int = 0
    in_epoch: int = 0
    samples: int = 0
    tokens: int = 0
    times: int = 0
    """How often the moment fired in the run, this one included."""
    exhausted: bool = False
    """Whether the loader was found empty."""
    began: int = 0
    """The step at which this fit began."""


@dataclass(frozen=True)
class Course:
    """A run: its limits, and what its batches hold on all ranks together."""

    batches: int
    epochs: int | None = None
    steps: int | None = None
    accumulate: int | Mapping[Any, int] = 1
    samples: int = 2
    tokens: int = 6
    evaluates: int = 2
    """An evaluation follows after each so many steps."""

    def ended(self, at: Firing) -> bool:
        return at.epoch >= (self.epochs or math.inf) or at.step >= (self.steps or math.inf)

    def window(self, at: Firing) -> int:
        """Return the batches in the next step. A point in percent is one of the limit that comes first."""
        if isinstance(self.accumulate, int):
            return self.accumulate
        done = [Fraction(at.step, self.steps)] if self.steps else []
        done += [Fraction(at.epoch * self.batches + at.in_epoch, self.epochs * self.batches)] if self.epochs else []
        size = 1
        for point, batches in self.accumulate.items():
            number, _, unit = str(point).partition(" ")
            if at.step >= int(number) if unit == "steps" else max(done) * 100 >= int(number.rstrip("%")):
                size = batches
        return size

    def firings(self, at: Firing | None = None, times: Mapping[str, int] | None = None) -> Iterator[Firing]:
        """Yield the firings of a run in their order; with `at`, those of one that continues after this end of a step."""
        fired = dict(times or {})

        def fire(moment: str, at: Firing) -> Firing:
            fired[moment] = fired.get(moment, 0) + 1
            return replace(at, moment=moment, times=fired[moment])

        at = at or Firing()
        inside = at.in_epoch > 0
        while inside or not self.ended(at):
            yield fire("on_epoch_start", at)
            inside = False
            while not at.exhausted and not self.ended(at):
                window, done = self.window(at), 0
                while done < window:
                    yield fire("on_fetch_start", at)
                    yield fire("on_fetch_end", at)
                    if at.in_epoch == self.batches:
                        at = replace(at, exhausted=True)
                        break
                    if done == 0:
                        yield fire("on_step_start", at)
                    for moment in ("on_batch_start", "on_before_backward", "on_after_backward"):
                        yield fire(moment, at)
                    at = replace(at, batch=at.batch + 1, in_epoch=at.in_epoch + 1)
                    at = replace(at, samples=at.samples + self.samples, tokens=at.tokens + self.tokens)
                    done += 1
                    yield fire("on_batch_end", at)
                if done:
                    for moment in [one for one in IN_STEP if one != "on_batch_end"]:
                        yield fire(moment, at)
                    at = replace(at, step=at.step + 1)
                    yield fire("on_step_end", at)
                    if at.step % self.evaluates == 0:
                        yield fire("on_eval_start", at)
                        yield fire("on_eval_end", at)
            if at.in_epoch == self.batches:
                at = replace(at, epoch=at.epoch + 1, in_epoch=0)
            at = replace(at, exhausted=False)
            yield fire("on_epoch_end", at)

    def continuation(self, step: int, epoch: int) -> tuple[list[Firing], list[Firing]]:
        """Return the firings before a save after a step, and those of a run that continues there.

        `epoch` are the complete epochs: if a step ends one, the save may come before its end is counted, or after.
        """
        firings, boundary = [*self.firings()], {"on_step_end", "on_eval_start", "on_eval_end", "on_epoch_end"}
        at_save = (
            index for index, one in enumerate(firings) if (one.step, one.epoch) == (step, epoch) and one.moment in boundary
        )
        before = max(at_save)
        times = {one.moment: one.times for one in firings[: before + 1]}
        return firings[: before + 1], [*self.firings(replace(firings[before], began=step), times)]


# -- when a schedule is due -------------------------------------------------------------------------


@dataclass
class Model:
    """A schedule at a moment of a run."""

    spec: Spec
    moment: str
    course: Course

    def __post_init__(self) -> None:
        self.asked: dict[int, int] = {}  # the step after which a function was asked
        self.clock_ran = False  # whether a firing of this fit found more steps complete than the one before
        self.last = [*self.course.firings()][-1]
        self.epochs_begun = sum(one.moment == "on_epoch_start" for one in self.course.firings())

    def calls(self, before: list[Firing], firings: list[Firing]) -> Iterator[Firing]:
        """Yield those of `firings` at which it is due; `before` are those before a resume."""
        moments = moments_of(self.spec) if self.moment == EVERY else [self.moment]
        earlier = [one for one in before if one.moment in moments]
        last, called = earlier[-1] if earlier else Firing(), -1
        if len(moments) > 1 and before:
            called = max((one.step for one in self.again().calls([], before)), default=-1)
        for one in firings:
            if one.moment in moments:
                due = self.due(self.spec, one, last) and not (len(moments) > 1 and one.step == called)
                self.clock_ran |= one.step > last.step
                last = one
                if due:
                    called = one.step
                    yield one

    def again(self) -> Model:
        return Model(self.spec, self.moment, self.course)

    def due(self, spec: Spec, now: Firing, before: Firing) -> Any:
        match spec:
            case ("or" | "and" as operator, *_):  # functions last: they are asked where they decide
                parts = sorted(alternatives(spec, operator), key=has_function)
                return (any if operator == "or" else all)(self.due(part, now, before) for part in parts)
            case ("not", part):
                return not self.due(part, now, before)
            case ("when", every, rest):
                return self.asks(spec, now) and now.step % every == rest
            case ("every", number, "s"):  # a time that each step exceeds: due when more steps are complete
                return now.step > before.step
            case ("at", number, "s"):
                return now.step > before.step and not self.clock_ran
            case ("every", number, unit):
                return self.reached(unit, number, now) // number > self.reached(unit, number, before) // number
            case ("at", number, unit):
                return self.reached(unit, number, now) >= number > self.reached(unit, number, before)
            case ("first", number, unit):
                return self.inside(unit, number, now) <= number
            case ("last", number, unit):
                return self.inside(unit, number, now) > self.total(unit, number) - number
            case ("between", start, unit, end, other):
                return self.inside(unit, start, now) > start and self.inside(other, end, now) <= end
        raise AssertionError(spec)

    def asks(self, spec: Spec, now: Firing) -> bool:
        """Return whether a function is called: at moments in steps, once after each step that was completed in this fit."""
        if self.unit == "time":
            return True
        fresh = now.step != self.asked.get(id(spec), now.began)
        self.asked[id(spec)] = now.step
        return fresh

    @property
    def unit(self) -> str:
        return COUNTED["on_step_end" if self.moment == EVERY else self.moment]

    def reached(self, unit: str, number: Any, at: Firing) -> Any:
        """Return how much is complete. The unit that the moment itself counts is, as soon as the moment fires for it."""
        unit, moment = unit or self.unit, at.moment
        under_way = moment in BEFORE_BATCH or moment in IN_STEP
        own = unit == COUNTED.get(moment) and under_way and moment != "on_batch_end"
        if unit == "epoch" and number != int(number):
            return at.epoch + Fraction(at.in_epoch, self.course.batches)
        if unit == "%":
            return Fraction(100 * at.step, self.last.step)
        return self.count(unit, at) + own

    def inside(self, unit: str, number: Any, at: Firing) -> Any:
        """Return to which step, epoch, sample and so on the moment belongs, from 1."""
        unit = unit or self.unit
        in_batch, in_step = at.moment in BEFORE_BATCH, at.moment in BEFORE_BATCH or at.moment in IN_STEP
        if unit == "epoch" and number != int(number):
            return at.epoch + Fraction(at.in_epoch + in_batch, self.course.batches)
        if unit == "epoch":
            return at.epoch + (in_step or at.in_epoch > 0)
        if unit == "%":
            return Fraction(100 * (at.step + in_step), self.last.step)
        if unit in ("s", "time"):
            return self.count(unit, at)
        return self.count(unit, at) + (in_step if unit == "step" else in_batch)

    def total(self, unit: str, number: Any) -> Any:
        if unit == "epoch" and number != int(number):
            return Fraction(self.last.batch, self.course.batches) if not self.last.in_epoch else self._fraction_of_end()
        return {"epoch": self.epochs_begun, "step": self.last.step, "batch": self.last.batch, "%": 100}[unit]

    def _fraction_of_end(self) -> Fraction:
        return self.last.epoch + Fraction(self.last.in_epoch, self.course.batches)

    @staticmethod
    def count(unit: str, at: Firing) -> int:
        counts = {"step": at.step, "batch": at.batch, "epoch": at.epoch, "sample": at.samples, "token": at.tokens}
        return {**counts, "time": at.times, "s": 0}[unit]


def alternatives(spec: Spec, operator: str) -> list[Spec]:
    """Return the parts of ``a | b | c``, or of ``a & b & c``."""
    return [one for part in spec[1:] for one in alternatives(part, operator)] if spec[0] == operator else [spec]


def leaves(spec: Spec) -> Iterator[Spec]:
    parts = [part for part in spec if isinstance(part, tuple)]
    if not parts:
        yield spec
    for part in parts:
        yield from leaves(part)


def units(spec: Spec) -> set[str]:
    return {value for leaf in leaves(spec) for value in leaf[1:] if isinstance(value, str)}


def has_function(spec: Spec) -> bool:
    return any(leaf[0] == "when" for leaf in leaves(spec))


def only_epochs(spec: Spec) -> bool:
    """Return whether a schedule can be due at the end of whole epochs only."""
    match spec:
        case ("every" | "at", number, "epoch"):
            return bool(number == int(number))
        case ("or", first, other):
            return only_epochs(first) and only_epochs(other)
        case ("and", first, other):
            return only_epochs(first) or only_epochs(other)
        case ("not", part):
            return only_epochs(part)
    return False


def moments_of(spec: Spec) -> list[str]:
    if only_epochs(spec):
        return ["on_epoch_end"]
    return ["on_step_end", "on_epoch_end"] if any(map(only_epochs, leaves(spec))) else ["on_step_end"]


# -- the same for Cadenza ---------------------------------------------------------------------------


def text(number: Any, unit: str) -> Any:
    if unit == "":
        return int(number)
    names = {"s": "s", "%": "%", "batch": "batches"}
    return f"{float(number):f}".rstrip("0").rstrip(".") + f" {names.get(unit, unit + 's')}"


def written(spec: Spec) -> Any:
    """Return the schedule of Cadenza."""
    match spec:
        case ("or", first, other):
            return written(first) | written(other)
        case ("and", first, other):
            return written(first) & written(other)
        case ("not", part):
            return ~written(part)
        case ("when", every, rest):

            def function(run: Run) -> bool:
                return bool(run.progress.step % every == rest)

            return When(function)
        case ("between", start, unit, end, other):
            return Between(text(start, unit) if start else 0, text(end, other))
    name, number, unit = spec
    kinds: dict[str, Any] = {"every": Every, "at": At, "first": First, "last": Last}
    return kinds[name](text(number, unit))


def drawn_length(draw: random.Random, units: tuple[str, ...]) -> tuple[Any, str]:
    unit = draw.choice(units)
    match unit:
        case "part of an epoch":
            return Fraction(draw.choice((20, 25, 50, 75, 150, 225)), 100), "epoch"
        case "epoch":
            return draw.randint(1, 3), unit
        case "%":
            return draw.choice((5, 10, 20, 25, 33, 50, 75, 100)), unit
        case "token":
            return draw.choice((5, 6, 18, 40, 100)), unit
    return draw.choice((1, 2, 3, 4, 5, 7, 10, 12)), unit


def drawn(draw: random.Random, units: tuple[str, ...], depth: int = 2, *, ranks: int = 1) -> Spec:
    """Return a random schedule. On multiple ranks, no points of time: when these know the clock depends on their exchanges."""
    if depth and draw.random() < 0.6:
        operator, first = draw.choice(("or", "and", "not")), drawn(draw, units, depth - 1, ranks=ranks)
        return ("not", first) if operator == "not" else (operator, first, drawn(draw, units, depth - 1, ranks=ranks))
    kind = draw.choice(("every", "every", "every", "at", "first", "last", "between", "when", "time"))
    if kind == "when":
        every = draw.randint(2, 4)
        return kind, every, draw.randrange(every)
    if kind == "time":
        points = [("every", Fraction(1, 10**6), "s"), ("at", Fraction(1, 10**6), "s")] if ranks == 1 else []
        return draw.choice([("first", 3600, "s"), *points])
    if kind == "last":
        return kind, *drawn_length(draw, tuple(one for one in units if one not in ("sample", "token", "")))
    if kind != "between":
        return kind, *drawn_length(draw, units)
    start, unit = drawn_length(draw, units)
    end, other = drawn_length(draw, ("",) if unit == "" else tuple(filter(None, units)))
    if unit == other and start >= end:
        start, end = 0, start
    return kind, start, unit, end, other
