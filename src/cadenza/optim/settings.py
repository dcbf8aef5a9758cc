"""The settings of a run: what its optimizers, schedules, callbacks and loader were made with. Checkpoints hold them.

=================  ================================================  ==========================  =======================
settings of        which are                                         a resumed run uses          ``override`` takes
=================  ================================================  ==========================  =======================
a parameter group  its plain options, such as ``lr``                 the saved, or `override`    names, values
a schedule         the arguments of the scheduler of `LearningRate`  the saved, or `override`    names, values
another callback   its arguments, such as the length of `Warmup`     the present                 names
the loader         its arguments, and the number of samples          the present                 names, ``batch_size=``
the run            ``max_epochs``, ``max_steps``, ``max_tokens``     the present
=================  ================================================  ==========================  =======================
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.errors import nearest
from cadenza.hooks.counters import Length
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.schedule import Schedule
from cadenza.loading.settings import CLASS_NAMES, loader_settings
from cadenza.status.decisions import decide
from cadenza.status.formats import counted, mapped
from cadenza.status.progress import Accumulation, Progress
from cadenza.status.reprs import brief, signature_of

if TYPE_CHECKING:
    from cadenza.run import Run

_NOT_SETTINGS = ("params", "param_names", "fused", "foreach", "initial_lr")
_SEEN: WeakKeyDictionary[Optimizer, list[dict[str, Any]]] = WeakKeyDictionary()

# -- parameter groups -------------------------------------------------------------------------------


class Group(NamedTuple):
    """A parameter group of an optimizer of the run."""

    number: int
    """Its index over all optimizers."""
    key: tuple[int, int]
    """The index of the optimizer, and the index of the group in it."""
    optimizer: Optimizer
    options: dict[str, Any]
    settings: dict[str, Any]
    """The plain arguments; see `settings_of`."""

    def set(self, name: str, value: Any) -> None:
        """Set an option. The schedule of the group, if there is one, starts from a new rate."""
        set_option(self.options, name, value)
        if name == "lr" and "initial_lr" in self.options:
            set_option(self.options, "initial_lr", value)


def groups_of(optimizers: Sequence[Optimizer]) -> list[Group]:
    """Return the parameter groups of all optimizers, in order."""
    found: list[Group] = []
    for index, optimizer in enumerate(optimizers):
        for inner, settings in enumerate(settings_of(optimizer)):
            found.append(Group(len(found), (index, inner), optimizer, optimizer.param_groups[inner], settings))
    return found


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return, by parameter group, the plain arguments that the group had when this function first saw it."""
    seen = _SEEN.setdefault(optimizer, [])
    seen += map(_settings, optimizer.param_groups[len(seen) :])
    return seen


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in group.items() if name not in _NOT_SETTINGS}
    if "initial_lr" in group:  # a schedule has changed "lr"
        options["lr"] = group["initial_lr"]
    return plain(options)


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are numbers, strings or lists of these. A tensor with one element becomes a number."""
    named = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, value in named.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, Counter):  # the milestones of a schedule
        return sorted(value.elements())
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else parts
    return value if isinstance(value, int | float | str) else None


def set_option(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an option of a parameter group, such as ``"lr"``.

    A tensor is filled and keeps its memory, which captured and compiled steps read. A list is stored as a tuple.
    """
    held = group.get(name)
    if isinstance(held, Tensor) and isinstance(value, int | float | Tensor):
        with torch.no_grad():
            held.copy_(value) if isinstance(value, Tensor) else held.fill_(value)
    else:
        group[name] = tuple(value) if isinstance(value, list) else value


def first_rates(optimizer: Optimizer) -> list[float]:
    """Return the rate of each parameter group from which its schedule started."""
    return [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]


def set_rates(optimizer: Optimizer, rates: Iterable[Any]) -> None:
    """Set the rate of each parameter group."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_option(group, "lr", rate)


class Compared:
    """A callback with arguments that change the training. A run that continues reports different ones, and uses the present.

    `LearningRate` differs: it builds an object from arguments, which its saved state then overwrites.
    """

    made_anew: bool = True
    """Whether the present arguments are in effect when the run continues."""

    @property
    def made_with(self) -> Mapping[str, Any]:
        """The arguments that the callback holds under their names, as plain data or text."""
        held = vars(self)
        return {name: _told(held[name]) for name in signature_of(type(self)).parameters if name in held}


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

    @property
    def data(self) -> dict[str, Any]:
        """The data of the decision about it."""
        used = self.now if self.present else self.saved
        return {"setting": f"{self.name}{self.where}", "saved": self.saved, "now": self.now, "used": used}


def limits_of(progress: Progress) -> dict[str, Any]:
    """Return the limits of a run, by the names of the arguments."""
    return {name: getattr(progress, name) for name in ("max_epochs", "max_steps", "max_tokens")}


def _told(value: Any) -> Any:
    """Return an argument of a callback as plain data or text."""
    if isinstance(value, Accumulation | Length | Schedule):
        return str(value)
    known = _plain(value)
    return brief(value) if known is None else known


# -- the settings of a run ------------------------------------------------------------------------


@dataclass(slots=True)
class Settings:
    """The settings that are in effect when a run continues."""

    override: Sequence[str] = ()
    """The names of the settings that keep their present values, or get those in `values`."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """The values that ``fit(override={...})`` gives, by the name of the setting."""
    changed: list[tuple[str, Any, Any]] = field(default_factory=list)
    """The settings that `values` changed: name, value of the trainer, value of the run."""
    groups: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """By setting, the keys of the groups that a mapping in `values` names. The other groups keep their saved values."""
    optimizers: list[list[dict[str, Any]]] = field(default_factory=list)
    """By optimizer and group, the arguments in effect; empty: the arguments that the optimizers were made with."""
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By callback, the arguments in effect, if they may differ from those it was made with."""

    def note(self, name: str, before: Any, now: Any) -> None:
        """Note that `values` changed a setting."""
        if before != now:
            self.changed.append((name, before, now))

    def overrides(self, name: str, group: tuple[int, int]) -> bool:
        """Return whether a parameter group continues with the present value of a setting. `group` is its key."""
        return name in self.override and group in self.groups.get(name, (group,))

    def give_to(self, optimizers: Sequence[Optimizer]) -> None:
        """Set the given values in the optimizers, before a schedule or a checkpoint reads them. Other names are left alone.

        Raises:
            TypeError: A value has another type than the present one.
            ValueError: A value is out of range, there is a wrong number of values, or a group does not exist.
        """
        groups = groups_of(optimizers)
        for name, setting in self.values.items():
            value = _listed(setting)
            spread = _spread(name, value, [group for group in groups if name in group.settings])
            for group, of_group in spread:
                before = group.settings[name]
                _check(name, of_group, before, group.optimizer)
                group.set(name, of_group)
                group.settings[name] = plain({name: of_group})[name]
                self.note(f"{name} of group {group.number}" if len(groups) > 1 else name, before, group.settings[name])
                if of_group is value and name in group.optimizer.defaults:  # for parameters that are added later
                    group.optimizer.defaults[name] = group.options[name]
            if isinstance(value, Mapping):
                self.groups[name] = {group.key for group, _ in spread}

    def table(self, run: Run) -> dict[str, Any]:
        """Return the settings of a run, for a checkpoint."""
        made_with = {
            name: dict(callback.made_with)
            for name, callback in hooks_of(run).callbacks.items()
            if isinstance(callback, Compared)
        }
        return {
            "optimizers": self.optimizers or [settings_of(optimizer) for optimizer in run.optimizers],
            "loader": loader_settings(run.loader),
            "callbacks": {**made_with, **self.callbacks},
            "limits": limits_of(run.progress),
        }

    def check(self, run: Run) -> None:
        """Raise `ValueError` if `override` names no setting of the run, or gives a value to a setting that takes none."""
        now = self.table(run)
        groups = [group for groups in now["optimizers"] for group in groups]
        schedules = [settings for settings in now["callbacks"].values() if "scheduler" in settings]
        takes = {"accumulate"}.union(*groups, *schedules)
        if "batch_size" in now["loader"]:
            takes.add("batch_size")
        known = takes.union(now["loader"], *now["callbacks"].values())
        for name in self.override:
            if name not in known:
                raise ValueError(
                    f"override names {name!r}, which is no setting of this run.{nearest(name, known)} Use any of "
                    f"{sorted(known)}."
                )
            if name in self.values and name not in takes:
                raise ValueError(
                    f"override gives {name!r} a value, but this setting is an argument of the loader or of a callback. Give it "
                    f"there, and fit(resume=..., override=({name!r},)). These take a value: {sorted(takes)}."
                )

    def differences(self, run: Run, saved: Mapping[str, Any]) -> list[Difference]:
        """Return the differences from a saved `table`; none if the checkpoint has none. Every rank must call this."""
        now = run.driver.broadcast(self.table(run))  # a custom loader may differ from rank to rank
        found = [*self._of_optimizers(saved.get("optimizers", ()), now["optimizers"])]
        for name, before in saved.get("callbacks", {}).items():
            callback = hooks_of(run).callbacks.get(name)
            if isinstance(callback, Compared):
                for key, new in now["callbacks"][name].items():
                    if before.get(key, new) != new:
                        present = callback.made_anew or key in self.override
                        found.append(Difference(key, f" of {name}", before[key], new, present))
        loader = now["loader"]
        before = saved.get("loader", loader)
        for key in {**before, **loader}:
            old, new = before.get(key, "nothing"), loader.get(key, "nothing")
            if old != new:
                found.append(Difference(key, "", old, new, present=True, samples=key not in CLASS_NAMES))
        return found

    def _of_optimizers(self, saved: Sequence[Any], now: Sequence[Any]) -> Iterator[Difference]:
        for index, (before, after) in enumerate(zip(saved, now, strict=False)):
            of = f" of optimizer {index}" if len(now) > 1 else ""
            groups = [*zip(before, after, strict=False)]
            for name in after[0] if after else ():
                pairs = [(old[name], new[name]) for old, new in groups if name in old and name in new]
                other = [(group, pair) for group, pair in enumerate(pairs) if pair[0] != pair[1]]
                alike = len({str(pair) for pair in pairs}) == 1
                for group, (old, new) in other[:1] if alike else other:
                    where = of if alike else f"{of} of group {group}"
                    yield Difference(name, where, old, new, self.overrides(name, (index, group)))

    def take_over(self, run: Run, saved: Mapping[str, Any]) -> None:
        """Set the overridden values in the loaded optimizers, and record the settings in effect."""
        before = saved.get("optimizers", [()] * len(run.optimizers))
        self.optimizers = [[] for _ in run.optimizers]
        for group in groups_of(run.optimizers):
            index, inner = group.key
            old = before[index][inner] if inner < len(before[index]) else {}
            present = {name: value for name, value in group.settings.items() if self.overrides(name, group.key)}
            self.optimizers[index].append({**group.settings, **old, **present})
            for name, value in present.items():
                group.set(name, value)
        for name, made_with in saved.get("callbacks", {}).items():
            callback = hooks_of(run).callbacks.get(name)
            if isinstance(callback, Compared) and not callback.made_anew:
                present = {key: value for key, value in callback.made_with.items() if key in self.override}
                self.callbacks[name] = {**made_with, **present}

    def tell(self, run: Run, name: str, found: Sequence[Difference], saved: Mapping[str, Any]) -> None:
        """Record each difference as a decision, and issue one warning for all that are not in `override`."""
        limits = limits_of(run.progress)
        before = limits | saved.get("limits", {})
        for limit, now in limits.items():  # a larger one is the usual reason to continue a run
            changed = Difference(limit, "", before[limit], now, present=True)
            if before[limit] != now:
                decide(run, "limit changed", str(changed), who="the trainer", data=changed.data)
        if found:
            self._tell_found(run, name, found)

    def _tell_found(self, run: Run, name: str, found: Sequence[Difference]) -> None:
        unexpected = []
        for difference in found:
            line = f"{difference}; the run uses the {'present' if difference.present else 'saved'} value"
            declared = difference.name in self.override
            who = "override" if declared and difference.present else "the trainer"
            decide(run, "setting differs", line, who=who, data=difference.data)
            if not declared:
                unexpected.append(line)
        if unexpected:
            old = [difference.name for difference in found if not difference.present]
            hint = f". fit(resume=..., override={tuple(dict.fromkeys(old))!r}) takes the present values instead" if old else ""
            run.warn(f"{name} was written with other settings: {'. '.join(unexpected)}{hint}")

    def tell_values(self, run: Run) -> None:
        """Record the values of `override` as decisions, in a run that starts without a checkpoint."""
        for name, before, after in self.changed:
            why = f"{name}: {before} in the trainer, now {after}"
            data = Difference(name, "", None, after, present=True).data
            decide(run, "setting differs", why, who="override", data=data)

    def shown(self) -> dict[str, Any]:
        """Return what `override` gives as plain data for ``run.json``: values by name, None for a name without a value."""
        plain = (int, float, str, type(None))
        given = {name: self.values.get(name) for name in self.override}
        return dict(mapped(given, lambda value: value if isinstance(value, plain) else brief(value)))


def _listed(value: Any) -> Any:
    """Return a value with lists for the sequences of a configuration library, such as Hydra's ``ListConfig``."""
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    foreign = isinstance(value, Sequence) and not isinstance(value, str | list | tuple)
    return [*map(_listed, value)] if foreign else value


def _spread(name: str, value: Any, holders: Sequence[Group]) -> list[tuple[Group, Any]]:
    """Return the value for each parameter group: one for all, one for each, or those of the groups that a mapping names."""
    if not holders:
        return []
    if isinstance(value, Mapping):
        return [(_group(name, key, holders), item) for key, item in value.items()]
    each = isinstance(value, list | tuple)
    if isinstance(holders[0].settings[name], list):  # such as betas: only a list of lists has one for each group
        each = each and bool(value) and all(isinstance(item, list | tuple) for item in value)
    if not each:
        return [(group, value) for group in holders]
    if len(value) != len(holders):
        raise ValueError(
            f"override gives {name} {counted(len(value), 'value')}, but {counted(len(holders), 'parameter group')} of the "
            f"optimizers have it. Give one for all of them, {len(holders)} in a list, or a mapping of groups to values."
        )
    return [*zip(holders, value, strict=True)]


def _group(name: str, key: object, holders: Sequence[Group]) -> Group:
    """Return the group that `key` names: an index over all optimizers, or the option ``name`` of a group."""
    for group in holders:
        if key == group.options.get("name") or (type(key) is int and key == group.number):
            return group
    known = [group.options.get("name", group.number) for group in holders]
    meant = nearest(key, [str(item) for item in known]) if isinstance(key, str) else ""
    raise ValueError(f"override gives {name} to the parameter group {key!r}, which does not exist.{meant} Use any of {known}.")


def _check(name: str, value: Any, before: Any, optimizer: Optimizer) -> None:
    """Raise `TypeError` or `ValueError` for a value that the optimizer cannot have."""
    if isinstance(before, list):
        fits = isinstance(value, list | tuple) and len(value) == len(before) and all(map(_is_number, value))
        expected = f"{counted(len(before), 'number')}, such as {tuple(before)}"
    elif isinstance(before, bool | str):
        fits, expected = type(value) is type(before), f"a {type(before).__name__}, such as {before!r}"
    else:
        fits, expected = _is_number(value), f"a finite number, such as {before!r}"
    if not fits:
        raise TypeError(f"override: {name} must be {expected}; got {value!r}")
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        options: dict[str, Any] = {"lr": 1e-3, name: tuple(value) if isinstance(value, list) else value}
        try:
            kind([nn.Parameter(torch.zeros(1))], **options)
        except ValueError as error:
            raise ValueError(f"override: {kind.__name__} does not take {name}={value!r}: {error}") from None
        except TypeError:  # an option of a group that the class does not take
            return


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
