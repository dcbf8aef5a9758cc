"""Checks and warnings when a run starts, and the listeners that were never called when it is over."""

from __future__ import annotations

import inspect
import sys

from cadenza.engine import accumulating
from cadenza.engine.arguments import check_schedule, check_some_batch
from cadenza.engine.compiling import breaks_since
from cadenza.engine.objective import ModelsOwnLoss, no_loss
from cadenza.engine.plan import doubts, never, never_fired
from cadenza.engine.session import Loops, Session
from cadenza.loading.loaders import is_read_once
from cadenza.loading.settings import loader_hints
from cadenza.optim.optimizers import fused_by_choice, notes
from cadenza.status.folding import for_screen
from cadenza.status.formats import counted
from cadenza.status.progress import Progress


def check_schedules(session: Session) -> None:
    """Raise `ScheduleError` for a schedule that can never be due; warn of one that this run is too short for."""
    for listeners in session.hooks.by_moment.values():
        for listener in listeners:
            if listener.schedule is not None:
                check_schedule(listener.owner, listener.schedule, session.progress)
    accumulating.check("accumulate", session.accumulate, session.progress)
    for reason in accumulating.never(session.accumulate, session.progress):
        session.warn(reason)
    for who, reason in never(session.hooks, session.progress, session.accumulate):
        session.warn(f"{who} never fires in this run: {reason}")


def check_computes(session: Session) -> None:
    """Raise `ValueError` if an evaluation in an attached loop has no function that computes a batch."""
    without = [name for name, one in session.evaluations.items() if one.compute is None]
    if session.loop is not Loops.FIT and without and inspect.unwrap(session.compute) is no_loss:
        raise ValueError(
            f"the evaluation {without[0]!r} does not say how to compute a batch, and a loop of cadenza.attach has no "
            "compute_loss. Give Evaluate(..., compute=function), with a function (model, batch) that returns the loss, or a "
            "mapping with 'loss', 'predictions' and 'targets'."
        )


def check_computes_batch(session: Session, batch: object) -> None:
    """Raise `ValueError` if an evaluation would call the model with a whole batch, and the model cannot take this one.

    In a loop over ``trainer.steps()`` the training does not show it.
    """
    compute = inspect.unwrap(session.compute)
    without = [name for name, one in session.evaluations.items() if one.compute is None]
    if without and isinstance(compute, ModelsOwnLoss) and not compute.takes(batch):
        raise ValueError(
            f"the evaluation {without[0]!r} does not say how to compute a batch, and the trainer has no compute_loss: it would "
            "call the model with a whole batch, which this model cannot take. Give Evaluate(..., compute=function), with a "
            "function (model, batch) that returns the loss, or a mapping with 'loss', 'predictions' and 'targets'."
        )


def warn_of_doubts(session: Session, *, own_optimizer: bool) -> None:
    """Warn of parameters that no optimizer holds, of short accumulation windows, and of slow optimizers and loaders.

    If a callback shows the progress, a line names each optimizer that Cadenza built fused.

    Args:
        session: The session of the run.
        own_optimizer: Whether the user made the optimizers.
    """
    for doubt in doubts(session):
        session.warn(doubt)
    if session.is_main and session.advises:
        for note in [*notes(session.optimizers, session.module, own=own_optimizer), *loader_hints(session.loader)]:
            if note.startswith("! "):
                session.warn(note[2:])
        for note in fused_by_choice(session.optimizers):
            tell(session, note)


def tell(session: Session, text: str) -> None:
    """Show a line to a person who watches the run: on the main process, if a callback shows the progress."""
    if session.is_main and any(getattr(one, "shows_progress", False) for one in session.hooks.callbacks.values()):
        print(for_screen(text, sys.stderr), file=sys.stderr)  # noqa: T201


def warn_of_trained_weights(session: Session, before: Progress | None) -> None:
    """Warn that a new run starts from trained weights. `before` counts the previous run of the same trainer."""
    if before is not None and (steps := before.step - before.origin.step) > 0:
        session.warn(
            f"this trainer has trained {counted(steps, 'step')} before: the weights are trained on, in a new run that "
            "counts from step 0. "
            "For fresh weights make the model, the optimizer and the trainer anew."
        )


def warn_of_no_checkpoint(session: Session, resume: object) -> None:
    """Warn that the run cannot be continued, as no callback writes checkpoints."""
    if not session.is_main or session.savers or not session.advises:
        return
    missing = "no callback writes checkpoints: a run that ends early cannot be continued. Add Checkpoint(...) to callbacks."
    if resume:
        session.warn(f"resume={resume!r} is given, and {missing}")
    elif session.directory is not None:  # this is often meant, so it is no warning of the run
        print(f"directory= is given, and {missing}", file=sys.stderr)  # noqa: T201


def warn_of_loader(session: Session) -> None:
    """Warn of a loader that can be read once, and of one that cannot continue inside an epoch although the run is saved."""
    progress, loader = session.progress, session.loader
    if not session.is_main or not session.advises:
        return
    if is_read_once(loader) and progress.max_steps is None and progress.max_tokens is None and progress.max_epochs != 1:
        session.warn(
            f"the training loader is a {type(loader).__name__}, which can be read once, and the run has "
            f"{counted(progress.max_epochs or 0, 'epoch')}. Pass a list, a DataLoader, or another iterable that starts again "
            "at each iter()."
        )
    if session.savers and (obstacle := session.cursor.source.obstacle) is not None:
        session.warn(f"a checkpoint inside an epoch cannot be continued: {obstacle}")


def check_evaluation_loaders(session: Session) -> None:
    """Raise `DataError` for an evaluation with a loader that is known to be empty. A list may be filled later."""
    for name, evaluation in session.evaluations.items():
        if not isinstance(evaluation.loader, list):
            check_some_batch(evaluation.loader, f"the loader of {name!r}")


def warn_of_graph_breaks(session: Session, before: int) -> None:
    """Warn of each line at which the graph of a compiled model broke. `before` is the number of breaks before this run."""
    for line in breaks_since(before):
        session.warn(f"compile: the graph of the model breaks at {line}: it runs as parts, with Python between them")
        session.decide("graph broken", line, who="torch.compile")


def note_never_fired(session: Session) -> None:
    """Record the listeners that were not called in a run that is over."""
    evaluated = any("evaluation" in decision.data for decision in session.decisions)
    for who, reason in never_fired(session.hooks, session.progress, evaluated):
        session.decide("never fired", reason, who=who)
