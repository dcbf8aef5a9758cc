"""The errors of Cadenza.

A wrong argument raises a plain ``ValueError`` or ``TypeError``. Other errors have a class each::

    CadenzaError
    ├── MomentError          also TypeError     a hook or a function does not fit the table of moments
    ├── CallbackError        also TypeError     an element of ``callbacks=`` is not a callback, or is listed twice
    │   └── OrderError                          the callbacks' ``after`` and ``before`` contradict each other
    ├── ScheduleError        also ValueError    a schedule such as "500 stps" cannot be read or met
    ├── LossError            also TypeError     the loss cannot be used for a backward pass
    ├── DataError                               a loader or a batch cannot be used
    ├── MonitorError         also KeyError      a monitored value was not reported
    ├── OutputError          also KeyError      a batch has no output of this name
    ├── StateError           also TypeError     a value cannot be saved
    ├── DirectoryError       also OSError       the run directory cannot be used
    ├── CheckpointError                         a checkpoint cannot be used
    │   ├── CheckpointDamagedError              a file of it is missing, cut or changed
    │   ├── CheckpointFormatError               it was not written by Cadenza, or by a newer version
    │   ├── CheckpointMismatchError             it belongs to another model, optimizer or run
    │   └── CheckpointLostError  also OSError   the last checkpoint of a run could not be written
    ├── DistributedError     also RuntimeError  several processes cannot work together, or another one failed
    ├── NonFiniteError       also ArithmeticError   a loss or a gradient is not finite
    ├── AdapterError         also AttributeError    a callback of another system uses what its adapter does not provide
    └── MissingExtraError    also ImportError   a package is not installed

Each message says what was expected, what came, and what to do.
"""

from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches


class CadenzaError(Exception):
    """The base class of all errors in this module.

    >>> from cadenza.testing import tiny_trainer
    >>> try:
    ...     tiny_trainer(directory="runs/first").fit(resume="missing/checkpoint")
    ... except CadenzaError as error:
    ...     type(error).__name__
    'CheckpointError'
    """

    def __str__(self) -> str:
        # KeyError would show its message in quotes, with the line breaks escaped.
        return str(self.args[0]) if self.args else ""


class MomentError(CadenzaError, TypeError):
    """A hook, or a function for a moment, does not fit the table of moments."""


class CallbackError(CadenzaError, TypeError):
    """An element of ``callbacks=`` is not a callback, or is listed twice."""


class OrderError(CallbackError):
    """The ``after`` and ``before`` of the callbacks contradict each other."""


class ScheduleError(CadenzaError, ValueError):
    """A schedule such as ``"500 stps"`` cannot be read, or this run cannot meet it."""


class LossError(CadenzaError, TypeError):
    """The loss that ``compute_loss`` returned cannot be used for a backward pass."""


class DataError(CadenzaError):
    """A loader or a batch cannot be used."""


class MonitorError(CadenzaError, KeyError):
    """A monitored value was not reported by any evaluation."""


class OutputError(CadenzaError, KeyError):
    """The current batch has no output of this name."""


class StateError(CadenzaError, TypeError):
    """A value cannot be saved in a checkpoint."""


class DirectoryError(CadenzaError, OSError):
    """The run directory cannot be used."""


class CheckpointError(CadenzaError):
    """A checkpoint cannot be used."""


class CheckpointDamagedError(CheckpointError):
    """A file of a checkpoint is missing, cut or changed."""


class CheckpointFormatError(CheckpointError):
    """A directory was not written by Cadenza as a checkpoint, or by a newer version."""


class CheckpointMismatchError(CheckpointError):
    """A checkpoint belongs to another model, optimizer or run."""


class CheckpointLostError(CheckpointError, OSError):
    """The last checkpoint of a run could not be written."""


class DistributedError(CadenzaError, RuntimeError):
    """Several processes cannot work together: one cannot be reached, differs from the others, or failed."""


class NonFiniteError(CadenzaError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class ReplayError(CadenzaError, RuntimeError):
    """A step that was repeated from the same state gave other bits."""


class AdapterError(CadenzaError, AttributeError):
    """A callback of another system uses something that its adapter does not provide."""


class MissingExtraError(CadenzaError, ImportError):
    """A package is not installed: an optional one, or, without `extra`, a dependency of Cadenza."""

    def __init__(self, package: str, *, needed_by: str, extra: str | None = None) -> None:
        wanted = package.partition(".")[0] if extra is None else f"'cadenza[{extra}]'"
        super().__init__(
            f"{needed_by} needs the package {package!r}, which is not installed. Install it with: pip install {wanted}"
        )


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'x'?"`` for the known name closest to `name`, or nothing.

    >>> nearest("on_setp_end", ["on_step_end", "on_epoch_end"])
    " Did you mean 'on_step_end'?"
    """
    match = get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return f" Did you mean {match[0]!r}?" if match else ""


def drop_tracebacks(error: BaseException) -> None:
    """Drop the tracebacks of an error and of those before it: their frames keep all variables of the run in memory."""
    error.__traceback__ = None
    for before in (error.__cause__, error.__context__):
        if before is not None and before.__traceback__ is not None:
            drop_tracebacks(before)


def add_note(error: BaseException, text: str) -> None:
    """Add a note to an error. Do nothing if its class refuses notes: a note must not replace the error."""
    with suppress(Exception):
        error.add_note(text)


def notes_of(error: BaseException) -> list[str]:
    """Return the notes of an error.

    >>> error = ValueError("wrong")
    >>> add_note(error, "in step 3")
    >>> notes_of(error)
    ['in step 3']
    """
    notes = getattr(error, "__notes__", None)
    return [note for note in notes if isinstance(note, str)] if isinstance(notes, list | tuple) else []
