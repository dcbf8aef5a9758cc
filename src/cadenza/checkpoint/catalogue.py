"""The checkpoints of a run, in all its folders and URLs: listed, in the order of the run, verified, chosen and read."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cadenza.checkpoint.store import Branch, Entry, Loaded, Saved, Store
from cadenza.checkpoint.store.checkpoints import not_exact
from cadenza.checkpoint.store.files import BEST, LAST
from cadenza.checkpoint.store.manifest import best_text, best_value
from cadenza.drivers.weight_files import is_dcp_folder
from cadenza.errors import CheckpointDamagedError, CheckpointError, CheckpointFormatError, DistributedError, nearest
from cadenza.files.disk import read_object
from cadenza.files.paths import local_text
from cadenza.status.branches import Rank, present
from cadenza.status.formats import counted, few

if TYPE_CHECKING:
    from cadenza.drivers.base import Driver

Which = str | PathLike[str]
"""``"last"``, ``"best"``, ``"best:eval/acc"``, the name of a checkpoint such as ``"step-500"``, or a path."""

Problem = Callable[[Entry], str | None]
"""Returns a sentence on why a checkpoint cannot be used; None if it can."""

verified: Problem = partial(Entry.problem, exact=False)
"""Reads all files of a checkpoint and compares them with their checksums."""

_STEP = re.compile(r"step-0*(\d+)(?:-(\d+))?")


class Catalogue:
    """The checkpoints of a run.

    Other runs may save to the same folders. A checkpoint that is not readable counts unless its folder has some of other runs.

    Args:
        stores: The folders and URLs that the run saves to.
        branch: The present branch of the run; None: the newest one of the only run that saves in the first store in use.
        where: The path that the user gave, for messages.
    """

    def __init__(self, stores: Iterable[Store], branch: Branch | None = None, where: str = "") -> None:
        self.stores: list[Store] = [*{str(store.files): store for store in stores}.values()]
        self.where: str = where
        self.entries: list[Entry] = [entry for store in self.stores for entry in store.entries()]
        """The checkpoints of all runs."""
        self.named: Branch | None = branch
        """The present branch if it is known without the checkpoints: the caller or ``run.json`` names it."""

    @staticmethod
    def at(path: str | PathLike[str] | None, elsewhere: Sequence[str | PathLike[str]] = ()) -> Catalogue:
        """Return the checkpoints at a path. The present branch is that of ``run.json`` if it has saved there.

        Args:
            path: A run directory, its ``checkpoints``, another folder of checkpoints, or an fsspec URL; None: only
                `elsewhere`.
            elsewhere: The other folders and URLs that the caller knows. Those that ``run.json`` names are not opened: it may
                come from another person, and opening a URL sends requests, with the credentials of the reader.
        """
        if path is None:
            return Catalogue(map(Store, elsewhere), where=", ".join(fspath(folder) for folder in elsewhere))
        text = local_text(path)
        if "://" in text:
            return Catalogue([Store(text.rstrip("/"))], where=text)
        folder, facts = Path(text), _facts_at(text)
        own = folder / "checkpoints"
        catalogue = Catalogue([Store(own if own.is_dir() else folder), *map(Store, elsewhere)], where=text)
        with suppress(LookupError, TypeError, ValueError):
            branch = Branch.of(facts.get("branch") or {}, str(facts["id"]))
            if any(entry.branch.run == branch.run for entry in catalogue.entries if entry.branch):
                catalogue.named = branch
        return catalogue

    @cached_property
    def branch(self) -> Branch:
        """The present branch of the run.

        Raises:
            CheckpointError: Several runs save there, and none was given.
        """
        return self.named or self._only_branch()

    def _only_branch(self) -> Branch:
        """Return the newest branch of the only run that saves in the first store in use."""
        first = next((entry.store for entry in self.entries), None)
        found = present(entry.branch for entry in self.entries if entry.store is first and entry.branch is not None)
        if first is not None and len(found) > 1:
            raise CheckpointError(
                f"{first.files} holds checkpoints of {counted(len(found), 'run')}: "
                f"{', '.join(branch.run[:12] for branch in found)}. Give the path "
                "of one checkpoint or, to a command, the --run that is meant."
            )
        return found[0] if found else Branch()

    @cached_property
    def ranked(self) -> list[tuple[Rank, Entry]]:
        """The checkpoints on all branches with their sort keys: abandoned ones first, then the line, oldest first."""
        ranked = []
        for store in self.stores:
            entries = [entry for entry in self.entries if entry.store is store]
            alone = {entry.branch.run for entry in entries if entry.branch is not None} <= {self.branch.run}
            own = (entry for entry in entries if (alone if entry.branch is None else entry.branch.run == self.branch.run))
            ranked += [(rank, item) for item in own if (rank := self.rank(item)) is not None]
        return sorted(ranked, key=lambda pair: pair[0])

    def rank(self, entry: Entry) -> Rank | None:
        """Return the sort key of a checkpoint; None if it belongs to another run. An unreadable one is ordered by step."""
        return self.branch.rank(entry.saved, entry.branch or self.branch)

    def line(self) -> list[Entry]:
        """Return the checkpoints on the line of the present branch, newest first."""
        return [entry for rank, entry in reversed(self.ranked) if rank[0]]

    @property
    def next_number(self) -> int:
        """The number for a new branch."""
        return 1 + max([self.branch.number, *(entry.branch.number for _, entry in self.ranked if entry.branch is not None)])

    @property
    def newest_whole(self) -> Entry | None:
        """The newest checkpoint of the line at which the run can continue; None if there is none."""
        return next((entry for entry in self.line() if entry.store.can_continue(entry.saved)), None)

    def prune(self, keep: Collection[str]) -> list[str]:
        """Delete the checkpoints of the run in a folder, except `keep` and the newest at which the run can continue.

        Those of other runs, unfinished and damaged ones stay. Returns the names of the deleted checkpoints.
        """
        kept = {*keep, *([] if (newest := self.newest_whole) is None else [newest.name])}
        return self.stores[0].delete(
            entry.name for _, entry in self.ranked if entry.manifest is not None and entry.name not in kept
        )

    @property
    def not_opened(self) -> str:
        """A sentence on the folders and URLs that ``run.json`` names, and that are not in here; empty without any."""
        others, opened = _facts_at(self.where).get("checkpoints"), {str(store.files) for store in self.stores}
        names = [repr(str(other)[:200]) for other in (others if isinstance(others, list) else []) if str(other) not in opened]
        return f" Its run.json also names {few(names)}. Only a path that you give is opened: give that one." if names else ""

    def __str__(self) -> str:
        return ", ".join(str(store.files) for store in self.stores)

    # -- choose ------------------------------------------------------------------------------------

    def choose(self, which: str, problem: Problem = verified) -> Entry:
        """Return a checkpoint by its name.

        Args:
            which: See `Which`; no path.
            problem: Returns why a checkpoint cannot be used, or None, to find the last.

        Raises:
            CheckpointError: As `find`.
        """
        if not self.entries:
            raise CheckpointError(f"there are no checkpoints in {self.where}, so which={which!r} finds none.{self.not_opened}")
        if match := _STEP.fullmatch(which):
            fitting = [entry for entry in self.entries if entry.saved.step == int(match[1])]
            fitting = [entry for entry in fitting if match[2] in (None, str(entry.saved.again))]
            if not fitting:
                there = ", ".join(entry.name for entry in self.entries)
                raise CheckpointError(f"there is no checkpoint {which!r}; there is {there}")
            return max(fitting, key=lambda entry: entry.saved.again)
        if which != LAST:
            return self._best(which.removeprefix(BEST).removeprefix(":"))
        newest, skipped = first_usable(self.line(), problem)
        if newest is None:
            why = "; ".join(skipped) or "all are of branches that the run has abandoned. Give the name of one of them"
            raise CheckpointError(f"none of the checkpoints in {self.where} can be used: {why}")
        return newest

    def _best(self, monitor: str) -> Entry:
        line, remark = self.line(), self.not_opened
        best = _best_by_monitor(line)
        choices = ", ".join(
            f"'best:{name}' ({best_text(value.fact)}, {value.fact['checkpoint']})" for name, value in best.items()
        )
        if not best:
            damaged = next((str(entry.problem()) for entry in line if entry.is_damaged), "")
            names = ", ".join(entry.name for entry in line)
            raise CheckpointError(
                f"no checkpoint in {self.where} is known as the best: {damaged or 'none was kept for its result'}. Give "
                f"which='last' or a name: there is {names}. Checkpoint(keep_best=('eval/acc', 'max')) keeps the best of a "
                f"run.{remark}"
            )
        if not monitor and len(best) > 1:
            raise CheckpointError(
                f"{self.where} has a best checkpoint by each of {len(best)} results. Give one: which={choices}."
            )
        one = best.get(monitor or next(iter(best)))
        if one is None:
            raise CheckpointError(
                f"no checkpoint in {self.where} is the best by {monitor!r}.{nearest(monitor, best)} There is {choices}.{remark}"
            )
        name, value = one.fact["checkpoint"], best_text(one.fact)
        if one.doubt:
            raise CheckpointError(
                f"the best checkpoint in {self.where} is not known: {one.doubt}, and it may be the best. The best before it is "
                f"{name} ({one.fact['monitor']} {value}): give which={name!r} to take that one."
            )
        there = {entry.name: entry for entry in self.entries if entry.store is one.store}
        if name not in there:
            raise CheckpointError(
                f"{name}, the best by {one.fact['monitor']} ({value}), no longer exists in {one.store.files}. There is "
                f"{', '.join(there)}."
            )
        return there[name]._replace(best=one.fact)


def first_usable(entries: Iterable[Entry], problem: Problem) -> tuple[Entry | None, list[str]]:
    """Return the first checkpoint without a problem, and the problems of those before it."""
    skipped: list[str] = []
    for entry in entries:
        why = problem(entry)
        if why is None:
            return entry, skipped
        skipped.append(why)
    return None, skipped


class _Best(NamedTuple):
    """The best checkpoint by one monitor, as the newest checkpoint of a writer names it."""

    store: Store
    fact: Mapping[str, Any]
    doubt: str
    """The problem of a newer checkpoint that cannot be read and may say something else; empty if there is none."""


def _best_by_monitor(line: Iterable[Entry]) -> dict[str, _Best]:
    """Return the best checkpoint by each monitor. The newest checkpoint of each writer names it."""
    best: dict[str, _Best] = {}
    writers: set[tuple[str, str]] = set()
    doubt = ""
    for entry in line:
        if entry.manifest is None:
            doubt = doubt or (str(entry.problem()) if entry.is_damaged else "")
            continue
        writer = (str(entry.store.files), entry.manifest["run"])
        if writer in writers:
            continue
        writers.add(writer)
        for fact in entry.manifest.get("best", []):
            other = best.get(fact["monitor"])
            if other is None or _is_better(fact, other.fact):
                best[fact["monitor"]] = _Best(entry.store, fact, doubt)
    return best


def _is_better(fact: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    value, best = best_value(fact), best_value(other)
    return value > best if fact["mode"] == "max" else value < best


# -- by a path -------------------------------------------------------------------------------------


def find(
    path: str | PathLike[str] | None,
    which: Which | None = None,
    problem: Problem = verified,
    elsewhere: Sequence[str | PathLike[str]] = (),
) -> Entry:
    """Return a checkpoint.

    Args:
        path: A run directory, a folder of checkpoints, an fsspec URL, or one checkpoint; None: see `Catalogue.at`.
        which: See `Which`; None: the last, or the one at the path.
        problem: Returns why a checkpoint cannot be used, or None, to find the last.
        elsewhere: See `Catalogue.at`.

    Raises:
        CheckpointError: There is none; `which` is ``"best"`` and several results chose one, or none did; or `path` is one
            checkpoint already.
        ValueError: `which` is no name of a checkpoint.
    """
    check_which(which)
    if which is not None and is_path(which):
        return find(which, None, problem)
    catalogue = Catalogue.at(path, elsewhere)
    text = catalogue.where
    if catalogue.entries or path is None:
        return catalogue.choose(LAST if which is None else fspath(which), problem)
    folder, _, name = text.rstrip("/").rpartition("/")
    store, entry = checkpoint_at(text)
    if entry is None and name in (LAST, BEST) and which is None and store.saved():
        return find(folder, name)
    if entry is None:
        there = f"; {store.files} has {', '.join(entry.name for entry in store.saved())}" if store.saved() else ""
        raise CheckpointError(
            f"there are no weights at {text!r}: expected a checkpoint, a run directory or a .safetensors file{there}."
            f"{catalogue.not_opened}"
        )
    if which is not None:
        raise CheckpointError(
            f"{text} is one checkpoint, and which={which!r} chooses among those of a run. Give the directory of the run, or "
            "leave which= out."
        )
    return entry


LINK = "cadenza"
"""The name of the link to a checkpoint in a folder that shows it to callbacks of other systems, such as ``checkpoint-500``."""


def checkpoint_at(path: str) -> tuple[Store, Entry | None]:
    """Return the checkpoint at a path, and the store that holds it; None if there is no checkpoint.

    The path may be that of a link, such as ``runs/a/checkpoints/best``, or of a folder with a link `LINK` to it.

    Raises:
        CheckpointError: The checkpoint of the link is gone.
    """
    if "://" not in path and os.path.islink(os.path.join(path, LINK)):
        path = os.path.realpath(os.path.join(path, LINK))
    folder, _, name = path.rstrip("/").rpartition("/")
    store = Store(folder or ("/" if path.startswith("/") else "."))
    saved = store.named(name) or store.linked(name)
    return store, None if saved is None else store.entry(saved)


def entry_at(path: str, reader: Reader) -> Entry:
    """Return the checkpoint at a path: of a run directory, or a folder of checkpoints, the newest that can be continued.

    Raises:
        CheckpointError: There is none.
    """
    store, entry = checkpoint_at(path)
    if entry is not None:
        return entry
    if (catalogue := Catalogue.at(path)).entries:
        return catalogue.choose(LAST, partial(reader.problem, exact=True))
    is_here = "://" not in path
    if is_here and os.path.isfile(os.path.join(path, "trainer_state.json")):
        raise CheckpointError(
            f"{path!r} is a checkpoint of transformers, which holds no run to continue. Load its weights with "
            "from_pretrained, and start a new run with fit()."
        )
    if is_here and (os.path.isfile(path) or is_dcp_folder(path)):
        raise CheckpointError(
            f"{path!r} is a file or a folder of weights, which holds no run to continue. Give the checkpoint, a folder such as "
            "'step-00000500', or load the weights with load_weights(path, model) and start a new run with fit()."
        )
    found = [entry.name for entry in store.saved()]
    there = f"expected one of {found} in {str(store.files)!r}" if found else f"{str(store.files)!r} holds none"
    there = f"{path!r} holds none" if is_here and os.path.isdir(path) else there
    raise CheckpointError(f"there is no checkpoint at {path!r}: {there}. Give the path of a checkpoint, or resume='auto'.")


def _facts_at(path: str) -> dict[str, Any]:
    """Return the content of the ``run.json`` of a run directory or of its ``checkpoints``; empty if it cannot be read."""
    folder = Path(path)
    of_run = folder if (folder / "run.json").is_file() or folder.name != "checkpoints" else folder.parent
    with suppress(ValueError):  # the checkpoints can be read without it
        return read_object(of_run / "run.json") or {}
    return {}


# -- names -----------------------------------------------------------------------------------------


def check_which(which: object, name: str = "which") -> None:
    """Raise `ValueError` or `TypeError` unless `which` is one of `Which`, or None."""
    if which is None or isinstance(which, PathLike):
        return
    if not isinstance(which, str):
        raise TypeError(f"{name} must be 'last', 'best', a name such as 'step-500', or a path; got {which!r}")
    if is_name(which) or is_path(which):
        return
    meant = nearest(which, [BEST, LAST]) or (" Did you mean 'last'?" if which in ("latest", "newest", "auto") else "")
    raise ValueError(
        f"{name} must be 'last', 'best', 'best:eval/acc' (by this result), a name such as 'step-500', or a path; got "
        f"{which!r}.{meant}"
    )


def checked_name(which: str | None) -> str:
    """Return the name of a checkpoint; ``"last"`` for None.

    Raises:
        CheckpointError: It is a path, or cannot be the name of a checkpoint.
    """
    try:
        check_which(which)
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    if which is not None and is_path(which):
        raise CheckpointError(
            f"expected the name of a checkpoint; got the path {which!r}. Give it instead of the run directory."
        )
    return which or LAST


def is_name(which: str) -> bool:
    """Return whether `which` is a name of a checkpoint; a path of this name is written ``./best``."""
    return which in (LAST, BEST) or which.startswith(f"{BEST}:") or _STEP.fullmatch(which) is not None


def is_path(which: Which) -> bool:
    """Return whether `which` is a path, and no name."""
    if isinstance(which, PathLike):
        return True
    return not is_name(which) and ("/" in which or os.sep in which or Path(which).exists())


# -- the checkpoint at which a run continues, read -------------------------------------------------


T = TypeVar("T")


class Reader:
    """Reads checkpoints, and keeps the last one, so that no checkpoint is read twice while a start is chosen.

    Args:
        driver: Read on all its ranks what the main process reads, which learns the problems of all; None: on this one.
        keep: Keep the shards of this rank in memory when they are verified.
    """

    def __init__(self, driver: Driver | None = None, *, keep: bool = True) -> None:
        self._driver, self._keep = driver, keep
        self.last: tuple[str, Loaded] | None = None
        """The path of the checkpoint that was read last, and its content."""

    def read(self, entry: Entry) -> Loaded:
        """Return a checkpoint's content, verified.

        Raises:
            CheckpointError: It cannot be used, or not on all ranks.
        """
        if self.last is None or self.last[0] != entry.path:
            self.last = None  # its memory is free before the next one is read
            read = (
                entry.store.read(entry.saved, lazily=True) if self._driver is None else self._on_all_ranks(entry, self._driver)
            )
            self.last = entry.path, read
        return self.last[1]

    def problem(self, entry: Entry, *, exact: bool = False) -> str | None:
        """Return a sentence on why a checkpoint cannot be used or, if `exact`, not be continued; None if it can.

        It is read for this.
        """
        why = not_exact(entry.name, entry.manifest) if exact and entry.manifest is not None else None
        try:
            if why is None:
                self.read(entry)
        except (CheckpointDamagedError, CheckpointFormatError) as error:
            return str(error)
        return why

    def _on_all_ranks(self, entry: Entry, driver: Driver) -> Loaded:
        # The checksum of the manifest: all ranks must see the same checkpoint.
        order = str(entry.store.files), entry.saved, entry.store.manifest(entry.saved)["crc32"]
        driver.broadcast(order)
        loaded, problems = self._take_part(driver, *order)
        for rank, problem in enumerate(problems):
            if problem is not None:
                kind, message = problem
                raise kind(message if rank == 0 or kind is CheckpointError else f"{message} (rank {rank})")
        assert loaded is not None, "a rank that has no problem has read it"
        return loaded

    def follow(self, driver: Driver) -> None:
        """Read what the main process reads, until it has chosen. Every other rank must call this."""
        while (order := driver.broadcast(None)) is not None:
            self.last = None
            location, saved, _ = order
            loaded, _ = self._take_part(driver, *order)
            self.last = None if loaded is None else (f"{location}/{saved.name}", loaded)

    def _take_part(self, driver: Driver, location: str, saved: Saved, crc32: str) -> tuple[Loaded | None, list[Any]]:
        """Read this rank's part; return it, and the problems of all ranks, or the one that all have."""
        loaded: Loaded | None = None
        problem: tuple[type[CheckpointError], str] | None = None
        try:
            loaded = self._own(driver, Store(location), saved, crc32)
        except (CheckpointDamagedError, CheckpointFormatError) as error:
            problem = type(error), str(error)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            problem = CheckpointError, f"rank {driver.rank} cannot read {saved.name}: {why}"
        return loaded, driver.gather_unequal(problem)

    def _own(self, driver: Driver, store: Store, saved: Saved, crc32: str) -> Loaded:
        manifest = store.entry(saved).manifest
        if manifest is None or manifest["crc32"] != crc32:
            raise LookupError(
                f"on {platform.node()} there is {'no' if manifest is None else 'another'} checkpoint of this name in "
                f"{store.files}. Each rank reads the checkpoint itself: all machines must see the same folder under the same "
                "path. Put it on a file system that they share, or copy it to each machine"
            )
        return store.read(saved, lazily=True, rank=driver.rank, ranks=driver.world_size, keep=self._keep)


def on_all_ranks(driver: Driver, choose: Callable[[Reader], tuple[T, bool]], *, keep: bool = True) -> tuple[T, Loaded | None]:
    """Return what the main process chooses, and the checkpoint that belongs to it, read here. Every rank must call this.

    Args:
        driver: The driver of the run.
        choose: Called on the main process. Returns its choice, without content of a checkpoint, and whether the checkpoint that
            it read last belongs to it.
        keep: Keep the shards of this rank in memory when they are verified, since all of them will be read.

    Raises:
        CheckpointError: Nothing can be chosen.
        DistributedError: The main process could not choose.
    """
    reader = Reader(driver if driver.world_size > 1 else None, keep=keep)
    choice: tuple[T, bool] | None = None
    error: Exception | None = None
    if driver.is_main:
        try:
            choice = choose(reader)
        except Exception as raised:
            error = raised
        if driver.world_size > 1:
            driver.broadcast(None)  # not in the block: a rank that does not come is no error of the choice
    else:
        reader.follow(driver)
    choice, problem = driver.broadcast((choice, None if error is None else f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    if choice is None:
        raise DistributedError(f"the main process cannot begin, so rank {driver.rank} cannot: {problem}")
    value, has_read = choice
    return value, reader.last[1] if has_read and reader.last is not None else None
