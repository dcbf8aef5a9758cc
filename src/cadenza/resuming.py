"""Which checkpoint a run continues at, and how."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike, fspath
from typing import Any

from cadenza import snapshot
from cadenza.decisions import Outcome
from cadenza.directory import RunDirectory
from cadenza.errors import CheckpointError
from cadenza.history import History
from cadenza.progress import Counters, Progress
from cadenza.run import Run, logger
from cadenza.store import Loaded, Saved, Store


def chosen(
    resume: bool | str | PathLike[str], directory: RunDirectory | None, elsewhere: Iterable[str | PathLike[str]] = ()
) -> Loaded | None:
    """Return the checkpoint to continue at; None to start anew. `elsewhere` are places that the run saves to as well.

    Raises:
        ValueError: ``"auto"`` without a directory.
        CheckpointError: The run has checkpoints, and none of them can be used; or the one at a path cannot.
    """
    if resume is False:
        return None
    if resume is True or resume == "auto":
        if directory is None:
            raise ValueError("fit(resume='auto') looks for checkpoints in the run's directory; give Trainer(directory=...)")
        return _newest([Store(place) for place in (directory.checkpoints, *elsewhere)], directory)
    place, _, name = fspath(resume).rstrip("/").rpartition("/")
    store = Store(place or ".")
    saved = store.named(name)
    if saved is None:
        raise CheckpointError(
            f"there is no checkpoint {name!r} in {place or '.'!r}; there is {[s.name for s in store.saved()]}"
        )
    return store.read(saved, lazily=True)


def _newest(stores: list[Store], directory: RunDirectory) -> Loaded | None:
    found: list[tuple[Saved, Store]] = []
    skipped: list[str] = []
    for store in stores:
        newest, passed_over = store.latest()
        skipped += passed_over
        found += [] if newest is None else [(newest, store)]
    for reason in skipped:
        logger.warning("skipped a checkpoint: %s", reason)
    if found:
        saved, store = max(found, key=lambda pair: pair[0])
        return store.read(saved, lazily=True)
    if skipped:
        lines = "\n  ".join(skipped)
        places = ", ".join(str(store.files) for store in stores)
        raise CheckpointError(
            f"none of the checkpoints in {places} can be used, and starting anew would waste them:\n  {lines}\n"
            "Repair or remove them, name one that is not exact with fit(resume=PATH), or give another directory=."
        )
    directory.cut({})  # a run that was killed before its first checkpoint starts anew
    return None


def is_over(directory: RunDirectory | None, limits: Progress, loaded: Loaded) -> bool:
    """Return whether the run ended by itself, and its limits were not raised since."""
    outcome = (directory.former or {}).get("outcome") if directory is not None else None
    if not outcome or outcome["kind"] not in ("finished", "stopped"):
        return False
    limits.begin(Counters(**loaded.state["progress"]), limits.batches_per_epoch)
    return outcome["kind"] == "stopped" or limits.finished


def as_it_ended(run: Run, directory: RunDirectory | None, loaded: Loaded) -> Run:
    """Return the run as it ended, with the model's weights, without doing anything."""
    outcome: Any = run.driver.broadcast((directory.former or {}).get("outcome") if directory is not None else None)
    snapshot.load_model(run, loaded)
    run.history = History.from_state(loaded.state["history"], run.history.limit)
    run.state.update(snapshot.placed(run, loaded.state["state"]))
    run.progress.begin(Counters(**loaded.state["progress"]), run.progress.batches_per_epoch)
    run.outcome = Outcome(outcome["kind"], outcome["reason"])
    if run.is_main:
        logger.warning("nothing to do: the run in %s is over (%s: %s)", run.directory, outcome["kind"], outcome["reason"])
    return run


def restored(run: Run, directory: RunDirectory | None, loaded: Loaded, *, strict: bool) -> None:
    """Put the checkpoint's state into the run, and its files back to that length."""
    snapshot.restore(run, loaded, strict=strict)
    if directory is not None:
        directory.cut(loaded.state["offsets"])
    run.decide("resumed", f"at {loaded.name}", who="the trainer")
