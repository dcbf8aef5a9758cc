"""Which checkpoints of a run stay: those that a keep rule of the callback that asked for them keeps. The others are deleted."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cadenza.checkpoint.keep_rules import Best, KeepRules, Kept, Known, line_of
from cadenza.checkpoint.store import Saved, Store
from cadenza.checkpoint.store.files import BEST, LAST, best_link
from cadenza.checkpoint.store.reading import check
from cadenza.engine.monitor import Monitor

if TYPE_CHECKING:
    from cadenza.status.progress import Counters, Progress

NEWEST = "the newest"
"""The reason, beside rules, why a checkpoint stays: it is the newest, or the newest at which the run can continue."""
_WRITING = threading.Lock()


@dataclass(slots=True)
class Watching:
    """A `Best` in one run: its monitor, and the last result."""

    best: Best
    monitor: Monitor
    step: int = -1
    """The step of the last result."""
    value: float = math.nan
    chosen_at: int = -1
    """The step after which the weights had a result that is to be kept."""
    weights: str | None = None
    """The averaged weights that had the last result; None for the weights of the model."""


@dataclass(slots=True, eq=False)
class Member:
    """A callback that saves, in one run."""

    name: str
    """Its name in the run."""
    keep: KeepRules
    """Its rules."""
    monitors: Sequence[Monitor]
    """The monitors of its `Best` rules."""
    saves_errors: bool
    """Whether it saves after an error."""
    rules: list[Kept] = field(default_factory=list)
    watching: list[Watching] = field(init=False)
    earlier: Mapping[str, Any] = field(default_factory=dict)
    """What a checkpoint of version 0.1 says of the best ones: by monitor, name and value."""
    pending: bool = False
    """Whether a result is to be kept that no checkpoint has."""

    def __post_init__(self) -> None:
        self.watching = [*map(Watching, self.keep.best, self.monitors)]

    def begin(self, limits: Progress, accumulate: int) -> None:
        """Read the rules for a run with these limits, in which a step has at most `accumulate` batches."""
        self.rules = self.keep.rules(limits, accumulate)


class Retention:
    """The keep rules of all callbacks that save to one folder or URL. Each callback's rules see the checkpoints it asked for.

    The rules are functions of the checkpoints that exist, so nothing has to be restored: a run that continues reads the folder.

    Args:
        store: The folder.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.members: dict[str, Member] = {}
        self.sets: frozenset[str] = frozenset({LAST, BEST})
        """The links that this sets: another retention may set the others in the same folder."""
        self.known: list[Known] = []
        """The checkpoints of these callbacks, on the main process."""
        self.under_way: Known | None = None
        """The checkpoint that is being written."""
        self.began: float = 0.0
        """The time at which the run began."""
        self._read: dict[str, Known | None] = {}
        """By name, the readable checkpoints in the folder; None for those of other runs."""
        self._notes: tuple[bytes, Notes] = b"", {}
        self._left: dict[str, list[dict[str, str]]] = {}
        """By checkpoint, the rules of callbacks that were in the list before, and are no longer."""

    # -- the checkpoints that exist -----------------------------------------------------------------------------

    def read(self, joined: Mapping[str, Collection[str]] = MappingProxyType({})) -> None:
        """Read the manifests of new checkpoints, and forget the checkpoints that are gone.

        Args:
            joined: By name of a checkpoint, the callbacks that asked for it after it was written.
        """
        there = {saved.name: saved for saved in self.store.saved()}
        self._read = {name: value for name, value in self._read.items() if name in there}
        new = [self.store.entry(saved) for name, saved in there.items() if name not in self._read]
        readable = [
            (judged, judged.manifest, judged.branch)
            for judged in new
            if judged.manifest is not None and judged.branch is not None
        ]
        began = min((time for _, facts, _ in readable if isinstance(time := facts.get("time"), int | float)), default=0.0)
        earlier = any(member.earlier for member in self.members.values())
        for entry, facts, branch in readable:
            self._read[entry.name] = None
            rank = self.store.branch.rank(entry.saved, branch)
            if rank is not None and branch.run == self.store.branch.run:  # else it belongs to a run that this one continues
                known = Known.of(entry.saved, rank, facts, began, joined.get(entry.name, ()))
                self._read[entry.name] = self._with_earlier(known) if earlier else known
        own = (known for known in self._read.values() if known is not None and known.owners & self.members.keys())
        self.known = sorted(own, key=attrgetter("rank"))

    def begin(self, names: Collection[str]) -> tuple[list[str], list[str]]:
        """Read the folder, for a run that begins or continues. Keep the checkpoints of callbacks that are not among `names`.

        Links, notes and checkpoints that a killed process left otherwise than the rules say are set right, if the run continues
        at its newest checkpoint and under the same rules.

        Returns:
            A sentence about each change of the rules and each of the callbacks that is gone, and one about each of the best
            checkpoints that is gone.
        """
        notes = noted(self.store)
        before, now, checkpoints = notes["callbacks"], self._texts(), notes["checkpoints"]
        self.read({name: note["asked_by"] for name, note in checkpoints.items()})
        line = [checkpoint for checkpoint in line_of(self.known) if not checkpoint.abandoned]
        self.began = line[-1].began if line else time.time()
        changes = [
            f"{name} keeps {', '.join(now[name])}; until now {', '.join(before[name])}"
            for name in now
            if name in before and before[name] != now[name]
        ]
        there, missing, gone = {saved.name for saved in self.store.saved()}, [], dict[str, list[str]]()
        readable = {name for name, known in self._read.items() if known is not None}
        is_settled = readable == {*checkpoints} & there and now.items() <= before.items()
        for name, note in checkpoints.items():
            bests = [by for by in note["kept_by"] if by["callback"] in self.members and by["rule"].startswith("Best(")]
            missing += [f"{name}, which {by['rule']} kept, no longer exists" for by in bests if name not in there]
            self._left[name] = [by for by in note["kept_by"] if name in there and by["callback"] not in ("", *names)]
            for by in self._left[name]:
                gone.setdefault(by["callback"], []).append(name)
        left = [
            f"{callback!r} is not in callbacks: the checkpoints that it keeps stay: {', '.join(dict.fromkeys(some))}"
            for callback, some in gone.items()
        ]
        newest = self.known[-1] if self.known else None
        if newest is not None and newest.name == self.store.branch.at and not (newest.abandoned or changes or is_settled):
            self.apply()
        return [*changes, *left], missing

    def join(self, name: str, asking: Iterable[str]) -> bool:
        """Note that callbacks ask for a checkpoint that exists; return whether that is new."""
        index = next((index for index, checkpoint in enumerate(self.known) if checkpoint.name == name), None)
        if index is None or not (new := set(asking) - self.known[index].owners):
            return False
        self.known[index] = self._read[name] = replace(self.known[index], owners=self.known[index].owners | new)
        return True

    # -- results -----------------------------------------------------------------------------------

    def enters(self, member: Member, watching: Watching) -> bool:
        """Return whether the last result is one to keep."""
        return watching.best.would_keep(self._line_of(member), watching.value)

    def facts(self, at: Counters, asking: Iterable[str], batches_per_epoch: int | None) -> dict[str, Any]:
        """Return the facts for the manifest of the checkpoint that is written after this step."""
        new = self._judging(at.step)
        values = {judged.best.name: judged.value for judged in new}
        averaged = {judged.best.name: judged.weights for judged in new if judged.weights is not None}
        known = {} if batches_per_epoch is None else {"batches_per_epoch": batches_per_epoch}
        return {"asked_by": sorted(asking), "values": values, "averaged": averaged, "began": self.began, **known}

    def judges(self, step: int) -> bool:
        """Return whether a checkpoint of a step may be among the best, if its weights are finite."""
        again = any(checkpoint.saved.step == step for checkpoint in self.known)
        return bool(self._judging(step) or (self.watching and again))

    def averaged(self, step: int) -> str | None:
        """Return the name of the averaged weights that were chosen after `step`. The first rule decides."""
        return next((tracker.weights for _, tracker in self.watching if tracker.chosen_at == step), None)

    def write(self, saved: Saved, facts: Mapping[str, Any]) -> None:
        """Note a checkpoint that is about to be written."""
        branch = self.store.branch
        if (rank := branch.rank(saved, branch)) is not None:
            self.under_way = Known.of(saved, rank, {"time": time.time(), **facts})

    def bests(self) -> list[dict[str, Any]]:
        """Return the best checkpoint by each rule as plain data: monitor, mode, value, step, checkpoint, averaged weights."""
        bests: list[dict[str, Any]] = []
        for member, watching in self.watching:
            name = watching.best.name
            for best in watching.best.keeps(self._line_of(member))[:1]:
                facts = watching.monitor.best_data(value=best.values[name], step=best.saved.step)
                averaged = {"weights": best.averaged[name]} if name in best.averaged else {}
                bests.append({**facts, "checkpoint": best.name, **averaged})
        return [best for index, best in enumerate(bests) if best not in bests[:index]]

    # -- keep and delete ------------------------------------------------------------------------------

    def kept(self) -> dict[str, list[dict[str, str]]]:
        """Return the callbacks and rules that keep each checkpoint, by its name."""
        own = {checkpoint.name for checkpoint in self.known}
        kept = {name: list(by) for name, by in self._left.items() if by and name in own}
        for member in self.members.values():
            line = (
                [checkpoint for checkpoint in self.known if member.name in checkpoint.owners]
                if member.keep.keeps_all
                else self._line_of(member)
            )
            for text, keeps in member.rules:
                for keep in keeps(line):
                    kept.setdefault(keep.name, []).append({"callback": member.name, "rule": text})
        return kept

    def apply(self, newest: Saved | None = None) -> list[str]:
        """Set the links, note which rules keep which checkpoints, delete the others; return their names.

        In this order: after a kill in between, links lead to checkpoints that exist, and the next call completes the rest.

        Args:
            newest: The checkpoint that was just written. It stays.

        Raises:
            OSError: A link cannot be set; the checkpoints are deleted nevertheless.
        """
        if newest is not None:
            self._read.pop(newest.name, None)  # an earlier checkpoint of this name was deleted by hand
        self.read()
        self.under_way = None  # not before it is known: the training thread may compare a result with it
        kept = self.kept()
        line = (checkpoint for checkpoint in reversed(self.known) if checkpoint.rank[0] and checkpoint.whole)
        resumable = next((checkpoint.saved for checkpoint in line if self.store.can_continue(checkpoint.saved)), None)
        own = {checkpoint.name for checkpoint in self.known}
        for checkpoint in (newest, resumable):
            if checkpoint is not None and checkpoint.name in own:
                kept.setdefault(checkpoint.name, [{"callback": "", "rule": NEWEST}])
        gone = [checkpoint.name for checkpoint in self.known if checkpoint.name not in kept]
        problem = None
        try:
            self.store.set_links(self.links(kept), gone)
        except OSError as error:
            problem = error
        self._note(kept, gone)
        if gone:
            self.store.delete(gone)
        self.known = [checkpoint for checkpoint in self.known if checkpoint.name in kept]
        if problem is not None:
            raise problem
        return gone

    def links(self, kept: Collection[str]) -> dict[str, str]:
        """Return the links and the checkpoints that they lead to, among those that are kept.

        ``best`` is that of the first rule; of several rules, each has its own as well.
        """
        line = [checkpoint.name for checkpoint in line_of(self.known) if checkpoint.rank[0] and checkpoint.name in kept]
        all_bests = self.bests() if self.watching else []
        bests = [(best["monitor"], best["checkpoint"]) for best in all_bests if best["checkpoint"] in kept]
        links = {best_link(monitor): name for monitor, name in reversed(bests)} if len(self.watching) > 1 else {}
        if bests and BEST in self.sets:
            links[BEST] = bests[0][1]
        return {**links, LAST: line[-1]} if line and LAST in self.sets else links

    # -- inside ------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether a result is to be kept that no checkpoint has."""
        return any(member.pending for member in self.members.values())

    @property
    def watching(self) -> list[tuple[Member, Watching]]:
        """The `Best` rules of all callbacks."""
        return [(member, tracker) for member in self.members.values() for tracker in member.watching]

    def _judging(self, step: int) -> list[Watching]:
        """Return the rules that have a finite result of a step."""
        return [tracker for _, tracker in self.watching if tracker.step == step and math.isfinite(tracker.value)]

    def _line_of(self, member: Member) -> list[Known]:
        known = self.known if self.under_way is None else [*self.known, self.under_way]
        return [checkpoint for checkpoint in line_of(known) if member.name in checkpoint.owners]

    def _with_earlier(self, known: Known) -> Known:
        earlier = [value for member in self.members.values() for value in member.earlier.items()]
        found = {monitor: checkpoint for monitor, checkpoint in earlier if checkpoint.get("name") == known.name}
        values = {monitor: match["best"] for monitor, match in found.items()}
        averaged = {monitor: match["weights"] for monitor, match in found.items() if match.get("weights")}
        return replace(known, values={**values, **known.values}, averaged={**averaged, **known.averaged})

    def _texts(self) -> dict[str, list[str]]:
        return {member.name: [rule.text for rule in member.rules] for member in self.members.values()}

    def _note(self, kept: Mapping[str, Any], gone: Collection[str]) -> None:
        """Write which rules keep which checkpoints, for other processes and for a resume."""
        with _WRITING:  # another retention of this process may write to the same folder
            facts = noted(self.store, self._notes)
            there = {*self.store.files.folders()} - {*gone}
            notes = {name: fact for name, fact in facts["checkpoints"].items() if name in there}
            for name, reasons in kept.items():
                known = self._read[name]
                notes[name] = {"asked_by": sorted(known.owners if known is not None else ()), "kept_by": reasons}
            content = {"callbacks": {**facts["callbacks"], **self._texts()}, "checkpoints": notes}
            self._notes = json.dumps(content).encode(), content
            self.store.files.put(self.store.notes, self._notes[0])


Notes = dict[str, dict[str, Any]]
_NOTES = {
    "callbacks": {str: [str]},
    "checkpoints": {str: {"asked_by": [str], "kept_by": [{"callback": str, "rule": str}]}},
}


def noted(store: Store, known: tuple[bytes, Notes] = (b"", {})) -> Notes:
    """Return which rules keep which checkpoints of the store's run, as its last save noted it.

    Args:
        store: The store.
        known: The content of the notes that the caller wrote last, and what it says.

    Returns:
        ``callbacks``: the rules of each callback. ``checkpoints``: by name, ``asked_by`` and ``kept_by``. Empty without notes.
    """
    with suppress(OSError, ValueError, RecursionError):
        written = store.files.read(store.notes)
        if written == known[0]:
            return known[1]
        content: Notes = json.loads(written)
        check(content, _NOTES, "")
        return content
    return {"callbacks": {}, "checkpoints": {}}


def kept_by(store: Store) -> dict[str, list[dict[str, str]]]:
    """Return the callbacks and rules that keep the checkpoints of the store's run, by their names; empty without notes."""
    return {name: value["kept_by"] for name, value in noted(store)["checkpoints"].items()}
