"""The settings of optimizers, schedules and the training loader, and how those in a checkpoint differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.errors import nearest
from cadenza.hooks.dispatch import Hooks
from cadenza.hooks.length import Length
from cadenza.hooks.schedule import Schedule
from cadenza.loading.settings import CLASS_NAMES, loader_settings
from cadenza.status.accumulation import Accumulation
from cadenza.status.progress import Progress
from cadenza.status.shown import brief
from cadenza.status.signatures import signature_of

_NOT_SETTINGS = ("params", "param_names", "fused", "foreach", "initial_lr")
_SEEN: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()


@dataclass(slots=True)
class Given:
    """The settings that are in effect when a run continues."""

    override: Sequence[str] = ()
    """The names of the settings that keep their present values, or get those in `values`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values that ``fit(override={...})`` gives, by the name of the setting."""
    changed: list[tuple[str, Any, Any]] = field(default_factory=list)
    """The settings that `values` changed: name, value of the trainer, value of the run."""
    kept: set[tuple[int, int, str]] = field(default_factory=set)
    """By optimizer, group and name: settings in `override` that keep their saved values, because other groups are named."""
    optimizers: list[list[dict[str, Any]]] = field(default_factory=list)
    """By optimizer and group, the arguments in effect; empty: the arguments that the optimizers were made with."""

    def note(self, name: str, before: Any, now: Any) -> None:
        """Note that `values` changed a setting."""
        if before != now:
            self.changed.append((name, before, now))


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return, by parameter group, the plain arguments that an optimizer had at the first call of this function."""
    if optimizer not in _SEEN:
        _SEEN[optimizer] = [_settings(group) for group in optimizer.param_groups]
    return _SEEN[optimizer]


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {}  # a schedule has changed "lr"
    return plain({name: value for name, value in {**group, **rate}.items() if name not in _NOT_SETTINGS})


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers, strings or lists of these. A tensor with one element becomes a number."""
    named = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, value in named.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else parts
    return value if isinstance(value, bool | int | float | str) else None


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an option of a parameter group, such as ``"lr"``.

    A tensor is filled and keeps its memory, which captured and compiled steps read. A list is stored as a tuple.
    """
    if isinstance(group.get(name), Tensor) and isinstance(value, int | float):
        with torch.no_grad():
            group[name].fill_(value)
    else:
        group[name] = tuple(value) if isinstance(value, list) else value


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Have the schedule of a parameter group start from this rate, if it has one."""
    if "initial_lr" in group:
        set_option(group, "initial_lr", rate)


@runtime_checkable
class MadeWith(Protocol):
    """A callback, such as `LearningRate`, that builds an object from arguments, which its saved state then overwrites."""

    made_with: Mapping[str, Any]
    """The arguments, by name."""

    @property
    def made_anew(self) -> bool:
        """Whether the present arguments are in effect when the run continues."""


class Compared:
    """A callback with arguments that change the training. A run that continues reports different ones, and uses the present."""

    @property
    def made_anew(self) -> bool:
        """See `MadeWith`."""
        return True

    @property
    def made_with(self) -> dict[str, Any]:
        """The arguments that the callback holds under their names, as plain data or text."""
        held = {name: getattr(self, name, None) for name in signature_of(type(self)).parameters if name in vars(self)}
        texts = {name: str(one) if isinstance(one, Accumulation | Length | Schedule) else one for name, one in held.items()}
        return {name: one if (one := _plain(value)) is not None else brief(value) for name, value in texts.items()}


class Difference(NamedTuple):
    """A setting that differs from the checkpoint."""

    name: str
    """The name of the argument."""
    where: str
    """The owner of the setting, if several owners have a setting of that name."""
    saved: Any
    now: Any
    present: bool
    """Whether the run continues with the present value."""
    samples: bool = False
    """Whether the loader gives other samples."""

    def __str__(self) -> str:
        return f"{self.name}{self.where}: saved {self.saved}, now {self.now}"


class Configured(Protocol):
    """The engine's session, as far as its settings are compared."""

    given: Given
    optimizers: list[Optimizer]
    loader: Iterable[Any]
    hooks: Hooks
    driver: Driver
    progress: Progress

    def decide(self, what: str, why: str, *, who: str | None = None, data: Mapping[str, Any] | None = None) -> object: ...
    def warn(self, text: str) -> None: ...


def given_to(run: Configured) -> dict[str, Any]:
    """Return the settings of a run, for a checkpoint."""
    settings = run.given.optimizers or [settings_of(optimizer) for optimizer in run.optimizers]
    return {
        "optimizers": settings,
        "loader": loader_settings(run.loader),
        "callbacks": _made_with(run),
        "limits": limits_of(run.progress),
    }


def limits_of(progress: Progress) -> dict[str, int | None]:
    """Return the limits of a run, by the names of the arguments."""
    return {name: getattr(progress, name) for name in ("max_epochs", "max_steps", "max_tokens")}


def _made_with(run: Configured) -> dict[str, dict[str, Any]]:
    return {name: dict(one.made_with) for name, one in run.hooks.callbacks.items() if isinstance(one, MadeWith)}


def check_override(run: Configured) -> None:
    """Raise `ValueError` if ``run.given`` has a name that no setting has, or a value for a setting that takes none."""
    now = given_to(run)
    takes = {name for groups in now["optimizers"] for group in groups for name in group} | {"accumulate"}
    takes |= {"batch_size"} & set(now["loader"])
    takes |= {name for settings in now["callbacks"].values() if "scheduler" in settings for name in settings}
    known = takes | {name for settings in (now["loader"], *now["callbacks"].values()) for name in settings}
    for name in run.given.override:
        if name not in known:
            raise ValueError(
                f"override names {name!r}, which is no setting of this run.{nearest(name, known)} Use any of {sorted(known)}."
            )
        if name in run.given.values and name not in takes:
            raise ValueError(
                f"override gives {name!r} a value, but this setting is an argument of the loader or of a callback. Give it "
                f"there, and fit(resume=..., override=({name!r},)). These take a value: {sorted(takes)}."
            )


def differences(run: Configured, saved: Mapping[str, Any]) -> list[Difference]:
    """Return the differences from the saved `given_to`; none if the checkpoint has no such part. Every rank must call this."""
    now = run.driver.broadcast(given_to(run))  # a custom loader may differ from rank to rank
    found = list(_of_optimizers(saved.get("optimizers", ()), now["optimizers"], run.given))
    for name, made_with in saved.get("callbacks", {}).items():
        callback = run.hooks.callbacks.get(name)
        if isinstance(callback, MadeWith):
            where = f" of {name}"
            both = {key: now["callbacks"][name][key] for key in made_with if key in now["callbacks"][name]}
            found += [
                Difference(key, where, made_with[key], value, callback.made_anew or key in run.given.override)
                for key, value in both.items()
                if value != made_with[key]
            ]
    before, loader = saved.get("loader", now["loader"]), now["loader"]
    for key in {**before, **loader}:
        old, new = before.get(key, "nothing"), loader.get(key, "nothing")
        if old != new:
            found.append(Difference(key, "", old, new, present=True, samples=key not in CLASS_NAMES))
    return found


def _of_optimizers(saved: Sequence[Any], now: Sequence[Any], given: Given) -> Iterable[Difference]:
    for index, (before, after) in enumerate(zip(saved, now, strict=False)):
        of = f" of optimizer {index}" if len(now) > 1 else ""
        for name in after[0] if after else ():
            pairs = [(b[name], a[name]) for b, a in zip(before, after, strict=False) if name in b and name in a]
            other = [(group, pair) for group, pair in enumerate(pairs) if pair[0] != pair[1]]
            alike = len({str(pair) for pair in pairs}) == 1
            for group, (old, new) in other[:1] if alike else other:
                where = of if alike else f"{of} of group {group}"
                yield Difference(name, where, old, new, name in given.override and (index, group, name) not in given.kept)


def take_over(run: Configured, saved: Mapping[str, Any]) -> None:
    """Set the overridden values in the loaded optimizers, and record the settings in effect."""
    now = [settings_of(optimizer) for optimizer in run.optimizers]
    run.given.optimizers = []
    for index, (optimizer, settings, before) in enumerate(zip(run.optimizers, now, saved.get("optimizers", now), strict=True)):
        taken = [
            {name: one[name] for name in run.given.override if name in one and (index, group, name) not in run.given.kept}
            for group, one in enumerate(settings)
        ]
        run.given.optimizers.append([{**one, **old, **new} for one, old, new in zip(settings, before, taken, strict=False)])
        for group, new in zip(optimizer.param_groups, taken, strict=False):
            for name, value in new.items():
                set_option(group, name, value)
                if name == "lr":
                    set_rate(group, value)
    for name, made_with in saved.get("callbacks", {}).items():
        callback = run.hooks.callbacks.get(name)
        if isinstance(callback, MadeWith) and not callback.made_anew:
            callback.made_with = {**made_with, **{k: v for k, v in callback.made_with.items() if k in run.given.override}}


def tell(run: Configured, name: str, found: Sequence[Difference], saved: Mapping[str, Any]) -> None:
    """Record each difference as a decision, and issue one warning for all that are not in `override`."""
    _tell_limits(run, saved)
    unexpected = []
    for one in found:
        which, used = ("present", one.now) if one.present else ("saved", one.saved)
        line = f"{one}; the run uses the {which} value"
        who = "override" if one.present and one.name in run.given.override else "the trainer"
        data = {"setting": f"{one.name}{one.where}", "saved": one.saved, "now": one.now, "used": used}
        run.decide("setting differs", line, who=who, data=data)
        unexpected += [] if one.name in run.given.override else [line]
    if unexpected:
        old = [one.name for one in found if not one.present]
        hint = f". fit(resume=..., override={tuple(dict.fromkeys(old))!r}) takes the present values instead" if old else ""
        run.warn(f"{name} was written with other settings: {'. '.join(unexpected)}{hint}")


def _tell_limits(run: Configured, saved: Mapping[str, Any]) -> None:
    """Record each limit that differs from the checkpoint as a decision. A larger one is the usual reason to continue a run."""
    for name, now in limits_of(run.progress).items():
        before = saved.get("limits", {}).get(name, now)
        if before != now:
            data = {"setting": name, "saved": before, "now": now, "used": now}
            run.decide("limit changed", f"{name}: saved {before}, now {now}", who="the trainer", data=data)


def tell_given(run: Configured) -> None:
    """Record the values of `override` as decisions, in a run that starts without a checkpoint."""
    for name, before, after in run.given.changed:
        data = {"setting": name, "saved": None, "now": after, "used": after}
        run.decide("setting differs", f"{name}: {before} in the trainer, now {after}", who="override", data=data)


def shown(given: Given) -> dict[str, Any]:
    """Return what `override` gives as plain data for ``run.json``: values by name, None for a name without a value."""
    return {name: _shown(given.values.get(name)) for name in given.override}


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _shown(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value]
    return value if isinstance(value, bool | int | float | str | None) else brief(value)
