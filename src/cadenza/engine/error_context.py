"""Where the code of a run is: a note on an error in it, and where its thread is now.

A run without errors prepares nothing for it: all is read from a traceback or from the frames of a thread.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from traceback import walk_tb
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import cadenza
from cadenza.drivers.first_error import Post
from cadenza.drivers.thread_samples import no_collection, outwards, waits_of
from cadenza.engine.memory import is_out_of_memory, memory_held
from cadenza.engine.objective import ModelsOwnLoss
from cadenza.engine.session import Loops, Session
from cadenza.errors import CadenzaError, add_note, notes_of
from cadenza.hooks.listener import Listener
from cadenza.loading.batches import tensors_in
from cadenza.status.formats import counted
from cadenza.text.hints import data

# -- likely cures ----------------------------------------------------------------------------------


@dataclass(slots=True)
class InUse:
    """The objects that were in use when an error was raised."""

    device: torch.device
    module: nn.Module | None = None
    """The innermost module that was running."""
    batch: Any = None
    predictions: Any = None
    targets: Any = None
    together: int = 1
    """The number of ranks that compute each layer together, with tensor parallelism."""


def cure_of(error: Exception, scene: InUse) -> str | None:
    """Return the likely cure of an error; None if the message is unknown.

    >>> cure_of(RuntimeError("expected target dtype to be Long or Byte, but got Float"), InUse(torch.device("cpu")))
    'cross_entropy takes class indices of dtype int64: convert the targets with .long().'
    """
    if isinstance(error, CadenzaError):  # the message already says what to do
        return None
    text = f"{type(error).__name__}: {error}"
    if scene.together > 1 and re.search(_OF_SHAPES, text):
        return _parts(scene.together)
    for cure in data("cures.toml")["cure"]:
        for pattern in cure["error"]:
            if found := re.search(pattern, text):
                if "build" in cure:
                    return _BUILT[cure["build"]](found, scene)
                groups = (str(group).lower() for group in found.groups())
                return str(cure["text"]).format(found[0], *groups, device=scene.device)
    return None


def _parts(ranks: int) -> str:
    return (
        f"{counted(ranks, 'rank')} compute together, and each has a part of a split layer. Numbers that are split, such as "
        f"features and heads, must be divisible by {ranks}. A view(...) of a part must have -1 in place of this number. A "
        "layer of which the whole output is needed, such as the last one, takes ColwiseParallel(output_layouts=Replicate())."
    )


def _labels(found: re.Match[str], scene: InUse) -> str:
    classes = scene.predictions.shape[1] if isinstance(scene.predictions, Tensor) and scene.predictions.ndim > 1 else None
    known = "the number of classes, which is dimension 1 of the predictions" if classes is None else f"{classes - 1}"
    upto = f"less than {known}" if classes is None else f"at most {known}, as the predictions have {counted(classes, 'class')}"
    return (
        f"labels must be at least 0 and {upto}{_range(_labels_in(scene))}. Raise the number of the model's outputs, count "
        "labels from 0, or name the label of padding with ignore_index."
    )


def _indices(found: re.Match[str], scene: InUse) -> str:
    those = _range(scene.batch if scene.targets is None else scene.targets)
    if isinstance(scene.module, nn.Embedding):
        count = scene.module.num_embeddings
        return (
            f"the Embedding has num_embeddings={count}, so indices must be 0 to {count - 1}{those}. Raise "
            "num_embeddings to the size of the vocabulary."
        )
    return f"an index is negative or too large for the dimension that it selects from{those}."


def _channels(found: re.Match[str], scene: InUse) -> str:
    shape = [int(size) for size in found[1].split(",")]
    if len(shape) > 2 and shape[-1] == int(found[2]):
        axes = ", ".join(map(str, (0, len(shape) - 1, *range(1, len(shape) - 1))))
        return f"channels come second, and here they are last: inputs.permute({axes})."
    return (
        f"the layer takes {found[2]} channels in dimension 1 and the input has {found[3]}: make it with in_channels={found[3]}."
    )


def _labels_in(scene: InUse) -> Any:
    """Return what holds labels, and no other integers such as tokens; None if that is not known."""
    if scene.targets is not None:
        return scene.targets
    if isinstance(scene.batch, Mapping):
        named = [value for key, value in scene.batch.items() if re.search("label|target", str(key), re.IGNORECASE)]
        return named or None
    return scene.batch if len([*_integers(scene.batch)]) == 1 else None


def _range(value: Any) -> str:
    """Return the range of the integers on the host. Tensors on a device are skipped: the error may have broken the device."""
    held = [integer for integer in _integers(value) if integer.is_cpu and integer.numel()]
    if not held:
        return ""
    low, high = min(int(tensor.min()) for tensor in held), max(int(tensor.max()) for tensor in held)
    return f"; those in the batch range from {low} to {high}"


def _integers(value: Any) -> Iterator[Tensor]:
    for tensor in tensors_in(value):
        if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool:
            yield tensor


_OF_SHAPES = (
    r"must have same reduction dim|shapes cannot be multiplied|is invalid for input of size|is out of bounds"
    r"|must match the size|not broadcastable|Sizes of tensors must match"
)
_BUILT = {"labels": _labels, "indices": _indices, "channels": _channels}


_CONTEXT = "context: "
_SHOWN = 16  # at most so many samples, and parts of a batch, are listed
_NO_LOSS = re.compile(
    r"forward\(\) (?:takes|missing|got)|required .forward. function"
    r"|must return the loss|the loss must .*; got a tensor of shape|the loss of .* shape"
)
_IN_EVALUATION = ("cadenza.engine.evaluation", "cadenza.engine.tally", "cadenza.loading.evaluation")
_IN_LOOP = {
    ("cadenza.engine.loop", "Training.fetch"): "the training loader",
    ("cadenza.engine.loop", "Training.compute"): "compute_loss",
    ("cadenza.engine.weight_update", "backward"): "the backward pass",
    ("cadenza.engine.weight_update", "update"): "the update of the weights",
}


def explain(session: Session, error: BaseException) -> None:
    """Add a note to an error that was raised in the run, unless it has one or is no `Exception`."""
    if not isinstance(error, Exception) or any(note.startswith(_CONTEXT) for note in notes_of(error)):
        return
    try:
        lines = _Trace(session, error).lines()
    except Exception as failed:  # a description must not replace the error
        lines = [f"it could not be described: {failed!r}"]
    if lines:
        add_note(error, _CONTEXT + "\n  ".join(lines))


@contextmanager
def explained(session: Session) -> Iterator[None]:
    """Add the note of `explain` to an error that is raised inside."""
    try:
        yield
    except Exception as error:
        explain(session, error)
        raise


def raised_by_loader(error: BaseException) -> bool:
    """Return whether the code of the training loader raised an error, when the loop wanted its next batch."""
    names = [(frame.f_globals.get("__name__", ""), frame.f_code.co_qualname) for frame, _ in walk_tb(error.__traceback__)]
    fetch = "cadenza.engine.loop", "Training.fetch"
    last = max((index for index, name in enumerate(names) if name == fetch), default=len(names))
    inside = [room for room, _ in names[last + 1 :]]
    return bool(inside) and not inside[0].startswith(("cadenza.hooks.", "cadenza.drivers.", "cadenza.engine."))


class _Trace:
    """The facts in the traceback of an error, read frame by frame from the outermost."""

    def __init__(self, session: Session, error: Exception) -> None:
        self.session, self.error = session, error
        self.what = self.function = ""
        """A description of the code that raised it; and the innermost function of the engine."""
        self.evaluation: Any = None
        self.number: int | None = None
        """The batch of the running evaluation, from 1."""
        self.calls_model = isinstance(inspect.unwrap(session.compute), ModelsOwnLoss)
        """Whether the trainer has no ``compute_loss``."""
        self.models_own_loss = self.calls_model and session.loop is Loops.FIT
        self.scene = InUse(session.driver.device)
        if session.loop is not Loops.FIT and not session.step.counted:
            self.what, self.function, self.scene.batch = "the loop", "compute", session.step.batch
        self.modules: list[nn.Module] = []
        """The modules that were running, the innermost last."""
        for frame, _ in walk_tb(error.__traceback__):
            self._look_at(frame)

    def _look_at(self, frame: FrameType) -> None:
        room, function = frame.f_globals.get("__name__"), frame.f_code.co_name
        held = frame.f_locals
        if room == "cadenza.hooks.fan_out":  # an error of a callback, which has a note of its own
            self.what = self.function = ""
            self.scene, self.modules = InUse(self.session.driver.device), []
        elif phase := _IN_LOOP.get((str(room), frame.f_code.co_qualname)):
            self.function, self.what = function, phase
            if function == "compute" and self.session.step_fn is not None:
                self.what = "step_fn"
            batch = held.get("batch") if function == "fetch" else self.session.step.batch
            self.scene = InUse(self.session.driver.device, batch=batch)
        elif room in _IN_EVALUATION:
            self._look_at_evaluation(function, held)
        elif room == "cadenza.loading.batches" and function == "moved":
            self.what, self.scene.batch = f"moving a batch to {self.session.driver.device}", held.get("batch")
        elif room == "cadenza.engine.objective" and "predictions" in held and hasattr(held["self"], "loss_fn"):
            self.what, self.modules = f"loss function {_name_of(held['self'].loss_fn)}", []
            self.scene.predictions, self.scene.targets = held["predictions"], held["targets"]
        elif room == "cadenza.engine.objective" and function == "checked_loss":
            own = "the model" if self.models_own_loss else "compute_loss"
            self.what = f"the loss that {own if self.session.step_fn is None else 'step_fn'} returned"
            if self.session.loop is not Loops.FIT:
                self.what = "the loss given to backward(...)"
        if isinstance(module := held.get("self"), nn.Module):
            self.modules.append(module)

    def _look_at_evaluation(self, function: str, held: Mapping[str, Any]) -> None:
        scene = self.scene
        match function:
            case "evaluate" | "predict" | "rehearse" | "each_batch":
                self.evaluation = held.get("trial", held.get("evaluation"))
                self.what, self.number, scene.batch = "an evaluation", self.evaluation.batch + 1, held.get("batch")
            case "batches_of" | "_in_step" | "_until" | "_agreed":
                self.what, scene.batch = "the loader", None
            case "computed":
                self.what = "compute" if self.evaluation.compute else "compute_loss"
            case "add" | "update":
                self.what = self._metric(held.get("update"), "what compute returned")
                self.number = (self.number or 0) - (self.function == "each_batch")
                if len(arguments := held.get("arguments", ())) == 2:
                    scene.predictions, scene.targets = arguments
            case "results" | "add_metrics" | "update_with":
                self.what, self.number, scene.batch = "the results", None, None
                update = held.get("update", getattr(held.get("metric"), "update", None))
                self.what = self._metric(update, "the results")
            case _:
                return
        self.function = function

    def _metric(self, update: object, otherwise: str) -> str:
        """Return the name of the metric that has this `update`."""
        named = (f"metric {key!r}" for key, metric in self.evaluation.metrics.items() if metric.update == update)
        return next(named, otherwise)

    def lines(self) -> list[str]:
        """Return the lines of the note; an empty list if nothing is known."""
        self.scene.module, named = _innermost(self.session.module, self.modules)
        if named and self.what in ("compute_loss", "compute", "step_fn", "the loop", ""):
            self.what = f"the forward pass of {named}"
        lines = [f"{self.what}{self._when()}"] if self.what else []
        if self.function and self.what:
            lines += self._shapes() + self._samples()
        self.scene.together = self.session.driver.tensor_parallel
        cure = cure_of(self.error, self.scene) or self._without_compute_loss() or self._without_result()
        if is_out_of_memory(self.error):
            optimizers = {type(optimizer).__name__: optimizer for optimizer in self.session.optimizers}
            lines.append(f"memory: {memory_held(self.session.module, optimizers, self.session.hooks.callbacks)}")
        return [*lines, *([f"likely cure: {cure}"] if cure else [])]

    def _without_compute_loss(self) -> str:
        """Return the cure if the trainer has no ``compute_loss`` and the model cannot take the batch or returns no loss."""
        outermost = self.scene.module in (None, self.session.module)
        if not (self.calls_model and outermost and _NO_LOSS.search(str(self.error))):
            return ""
        if hasattr(self.session.module, "training_step"):
            return (
                "the model has a training_step, which Trainer.from_lightning(module, data, ...) calls: use it for this model."
            )
        if self.models_own_loss:
            give = "Trainer(model, optimizer, loader, compute_loss); for batches (inputs, targets) it is supervised(loss_fn)."
        elif self.evaluation is not None and self.evaluation.compute is None:
            give = "Evaluate(..., compute=function), with a function (model, batch) that returns the loss."
        else:
            return ""
        return f"the trainer has no compute_loss, so the model gets the whole batch and must return its loss. Give {give}"

    def _without_result(self) -> str:
        """Return the cure if a hook reads a result before the first evaluation of that name."""
        history, run = self.session.metrics.history, self.session.run
        found = re.search(r"nothing was logged as '(.+)/", str(self.error))
        if found is None or found[1] not in run.evaluations or any(name.startswith(f"{found[1]}/") for name in history):
            return ""
        return f"Evaluate runs after on_epoch_end and on_step_end: read results of {found[1]!r} in on_eval_end(run, evaluation)"

    def _when(self) -> str:
        progress, driver = self.session.progress, self.session.driver
        rank = f", on rank {driver.rank}" if driver.world_size > 1 else ""
        if self.evaluation is not None:
            batch = "" if self.number is None else f"batch {self.number} of "
            after = f" after step {progress.step}" if progress.step else ""
            name = self.evaluation.name
            return f", in {batch}{'predict' if name == 'predict' else f'evaluation {name!r}'}{after}{rank}"
        if not self.function:
            return rank
        batch = "" if self.function == "update" else f"batch {progress.batch_in_epoch + 1} of "
        return f", in {batch}epoch {progress.epoch + 1}, step {progress.step + 1}{rank}"

    def _shapes(self) -> list[str]:
        named = {"batch": self.scene.batch, "predictions": self.scene.predictions, "targets": self.scene.targets}
        return [f"{name}: {described(value)}" for name, value in named.items() if value is not None]

    def _samples(self) -> list[str]:
        """Return a line with the samples of the batch, if the loader knows them."""
        session, epoch = self.session, self.session.progress.epoch
        if self.function == "update" or (self.evaluation is not None and self.number is None):
            return []
        if self.evaluation is None:
            indices = session.cursor.source.indices(epoch, session.progress.batch_in_epoch)
        else:
            indices = self.evaluation.indices(session.run, (self.number or 1) - 1, session.data_seed)
        counts = session.cursor.source if self.evaluation is None else self.evaluation
        if not indices or (self.scene.batch is not None and len(indices) != counts.size_of(self.scene.batch)):
            return []
        more = f", ... ({counted(len(indices), 'sample')})" if len(indices) > _SHOWN else ""
        return [f"samples: {', '.join(map(str, indices[:_SHOWN]))}{more}"]


def described(value: Any) -> str:
    """Describe the structure of a batch: types, shapes and devices.

    >>> import torch
    >>> described({"ids": torch.zeros(2, 3, dtype=torch.int64), "label": torch.zeros(2)})
    '{ids: int64[2, 3], label: float32[2]} on cpu'
    """
    devices = {str(tensor.device) for tensor in tensors_in(value)}
    return _described(value, 0, mixed=len(devices) > 1) + (f" on {devices.pop()}" if len(devices) == 1 else "")


def _described(value: Any, depth: int, *, mixed: bool) -> str:
    if isinstance(value, Tensor):
        where = f" on {value.device}" if mixed else ""
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"
    named: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        named = [(f"{key}: ", part) for key, part in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        named = [("", part) for part in value]
    elif is_dataclass(value) and not isinstance(value, type):
        named = [(f"{field.name}: ", getattr(value, field.name)) for field in fields(value)]
    if not named or depth > 2:
        shape = getattr(value, "shape", None)  # such as a numpy array's
        return type(value).__name__ + (str(list(shape)) if isinstance(shape, tuple) else "")
    parts = [f"{name}{_described(part, depth + 1, mixed=mixed)}" for name, part in named[:_SHOWN]]
    parts += [f"... ({len(named)} in all)"] if len(named) > _SHOWN else []
    left, right = "{}" if not isinstance(value, Sequence) else "[]" if isinstance(value, list) else "()"
    right = f",{right}" if isinstance(value, tuple) and len(named) == 1 else right
    return f"{left}{', '.join(parts)}{right}"


def _innermost(model: nn.Module, called: Sequence[nn.Module]) -> tuple[nn.Module | None, str]:
    """Return the innermost module of the model and its name there; if none ran, another module, such as a loss."""
    names = {id(submodule): name for name, submodule in model.named_modules()}
    for module in reversed(called):
        if (name := names.get(id(module))) is not None:
            kind = type(module).__name__
            return module, f"{name!r} ({kind})" if name else f"the model ({kind})"
    return (called[-1], type(called[-1]).__name__) if called else (None, "")


def _name_of(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


# -- where the training thread is, read from another thread ----------------------------------------


_OURS = os.path.dirname(cadenza.__file__) + os.sep
_LIBRARIES = tuple(
    os.path.realpath(path) + os.sep
    for path in (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)), _OURS)
)
_PHASES = {
    **_IN_LOOP,
    ("cadenza.engine.boundary", "run_boundary"): "the step boundary",
    ("cadenza.engine.evaluation", "evaluate"): "an evaluation",
    ("cadenza.engine.evaluation", "predict"): "a prediction",
    ("cadenza.engine.loop", "Training.begin"): "the start of the run",
    ("cadenza.loops.run_segment", "RunSegment._set_up"): "the start of the run",
}


def whereabouts(session: Session) -> Post:
    """Return where the training thread of a run is now. May be called in any thread."""
    scene = session.hooks.scene
    with no_collection():
        frame = sys._current_frames().get(scene.thread)
        return Post(session.progress.step, named(frame, scene.listener), waits_of(frame), _busy_s(scene.thread))


def caller(session: Session) -> tuple[str, str]:
    """Return the running callback and moment, or an empty string; and the same, or the phase, with step and line."""
    listener = session.hooks.here().listener
    where = f"at step {session.progress.step} in {named(sys._getframe(1), listener)}"
    return _hook(listener) if listener is not None else "", where


def named(frame: FrameType | None, listener: Listener | None) -> str:
    """Return the callback and the moment, or the phase, and the innermost line of the user's code.

    Args:
        frame: The innermost frame of a thread.
        listener: The hook that runs in it, if any.
    """
    line = _user_line(frame)
    if listener is not None:
        what = _hook(listener)
    else:
        what = next((phase for outward in outwards(frame) if (phase := _phase(outward))), "the loop")
    return f"{what} ({line})" if line else what


def _hook(listener: Listener) -> str:
    return f"`{listener.owner}.{listener.event or listener.moment.__name__}`"


def _busy_s(thread: int) -> float:
    """Return the time that the processor worked for a thread; 0 where the system does not tell."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _phase(frame: FrameType) -> str | None:
    room = frame.f_globals.get("__name__", "")
    if room == "cadenza.engine.rank_sync":
        return "the exchange between ranks"
    return _PHASES.get((room, frame.f_code.co_qualname))


def _user_line(frame: FrameType | None) -> str:
    """Return the file and line of the innermost frame of the user's code; an empty string if the engine runs."""
    for outward in outwards(frame):
        file = outward.f_code.co_filename
        if file.startswith(_OURS) and outward.f_globals.get("__name__", "").startswith(("cadenza.hooks.", "cadenza.engine.")):
            return ""
        if not _is_library(file):
            return f"{os.path.basename(file)}:{outward.f_lineno}"
    return ""


@lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    return file.startswith("<") or os.path.realpath(file).startswith(_LIBRARIES)
