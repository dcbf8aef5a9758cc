"""NeMo's checkpoint files: ``<Module>-STEP-<n>.pt`` for each module, and ``trainer-STEP-<n>.pt``.

All files of a mark are committed together. Each file is written under a temporary name. Then the trainer's file is renamed,
which commits the mark, then the other files. The trainer's file holds checksums of the others. If a process was killed between
the renames, the next reader completes them; a mark with wrong checksums is skipped.

Besides NeMo's keys the trainer's file has ``cadenza``: the checksums, and the state of the run for a bit-identical resume. NeMo
ignores this key. Reading a file never executes pickled code.
"""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from cadenza.checkpoint import snapshot
from cadenza.checkpoint.store import Loaded
from cadenza.compat.adapter.foreign import callbacks_of
from cadenza.compat.neural.adapted import AdaptedRun
from cadenza.compat.neural.evaluator import EvaluatorCallback
from cadenza.compat.neural.logs import logging
from cadenza.drivers.sharding import refuse_shards
from cadenza.engine.session import session_of
from cadenza.errors import CheckpointMismatchError
from cadenza.files.disk import flush
from cadenza.optim.optimizers import load_state
from cadenza.status.decisions import decide
from cadenza.status.encoding import decode, encode
from cadenza.status.progress import Counters

if TYPE_CHECKING:
    from cadenza.run import Run

Kind = Literal["STEP", "EPOCH"]
TRAINER = "trainer"
NATIVE = "cadenza"  # the key of the native state


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """The step or epoch at which files were written."""

    number: int
    kind: Kind

    def file(self, name: str) -> str:
        """Return the name of the file of a module, or of the trainer."""
        return f"{name}-{self.kind}-{self.number}.pt"


class Folder:
    """A folder of NeMo's checkpoint files."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Path = Path(path).absolute()

    def marks(self, name: str) -> list[Mark]:
        """Return the marks of the files with exactly this name, in order."""
        pattern = re.compile(re.escape(name) + r"-(STEP|EPOCH)-(\d+)\.pt")
        entries = [entry.name for entry in os.scandir(self.path)] if self.path.is_dir() else []
        found = [match for entry in entries if (match := pattern.fullmatch(entry))]
        return sorted(Mark(int(match[2]), "STEP" if match[1] == "STEP" else "EPOCH") for match in found)

    def whole(self, names: Sequence[str]) -> Mark | None:
        """Return the newest mark with consistent files of the trainer and of all these modules."""
        for mark in reversed(self.marks(TRAINER)):
            sums = self.read(mark.file(TRAINER)).get(NATIVE, {}).get("sums")
            if wrong := [name for name in names if not self._is_there(mark.file(name), sums, name)]:
                logging.warning(
                    "%s is skipped: the files of %s are missing or incomplete", self.path / mark.file(TRAINER), ", ".join(wrong)
                )
            else:
                return mark
        return None

    def _is_there(self, file: str, sums: Mapping[str, int] | None, name: str) -> bool:
        path, temporary = self.path / file, self.path / _temporary(file)
        if sums is None:  # written by NeMo
            return path.is_file()
        if path.is_file() and zlib.crc32(path.read_bytes()) == sums.get(name):
            return True
        if temporary.is_file() and zlib.crc32(temporary.read_bytes()) == sums.get(name):
            temporary.replace(path)  # the process was killed after it committed the mark
            return True
        return False

    def write(self, file: str, content: Mapping[str, Any]) -> None:
        """Write one file atomically, also with regard to a power failure."""
        self._write_together({file: _packed(content)})

    def write_mark(self, mark: Mark, trainer: Mapping[str, Any], modules: Mapping[str, Mapping[str, Any]]) -> None:
        """Write all files of a mark atomically, also with regard to a power failure."""
        packed = {name: _packed(content) for name, content in modules.items()}
        sums = {name: zlib.crc32(content) for name, content in packed.items()}
        whole = {**trainer, NATIVE: {**trainer[NATIVE], "sums": sums}}
        files = {mark.file(TRAINER): _packed(whole)} | {mark.file(name): content for name, content in packed.items()}
        self._write_together(files)
        for left in self.path.glob(".*.pt.new"):  # from a process that was killed before it committed its mark
            left.unlink(missing_ok=True)

    def _write_together(self, files: Mapping[str, bytes]) -> None:
        """Write files under temporary names, then rename them in order."""
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            for file, content in files.items():
                with (self.path / _temporary(file)).open("wb") as stream:
                    stream.write(content)
                    stream.flush()
                    os.fsync(stream.fileno())
            self._sync()
        except BaseException:
            for file in files:
                (self.path / _temporary(file)).unlink(missing_ok=True)
            raise
        for file in files:
            (self.path / _temporary(file)).replace(self.path / file)
            self._sync()  # each before the next: the first rename commits all

    def _sync(self) -> None:
        """Flush the names of the files to the disk."""
        flush(self.path)

    def read(self, file: str) -> dict[str, Any]:
        """Return a file's content.

        Raises:
            ValueError: The file holds pickled code, or is damaged.
        """
        path = self.path / file
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # a damaged file raises many kinds of errors
            raise ValueError(f"{path} is damaged, or holds pickled code that reading it would execute: {error}") from error
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds a {type(content).__name__}; expected a dict, as NeMo writes it")
        return content

    def remove(self, mark: Mark, names: Iterable[str]) -> None:
        """Delete the files of a mark, the trainer's file last: without it, the others look like a save of modules alone."""
        for name in (*names, TRAINER):
            (self.path / mark.file(name)).unlink(missing_ok=True)


def _temporary(file: str) -> str:
    return f".{file}.new"


def _packed(content: Mapping[str, Any]) -> bytes:
    refuse_shards(content, "NeMo's checkpoint")
    buffer = io.BytesIO()
    torch.save(dict(content), buffer)
    return buffer.getvalue()


def modules_of(run: Run) -> dict[str, nn.Module]:
    """Return the modules with weights by the name of their files: the class, and an index if several have the same class.

    These are the trained modules, those of the other tensors of the graph, and those of the evaluations.
    """
    graph = AdaptedRun.of(run).graph
    if graph is None:
        model = run.model
        return {type(model).__name__: model}
    evaluations = [evaluator.graph for evaluator in callbacks_of(run, EvaluatorCallback)]
    parts = dict.fromkeys(chain(graph.modules(), graph.others(), *(evaluation.modules() for evaluation in evaluations)))
    return named(parts)


def named(parts: Iterable[object]) -> dict[str, nn.Module]:
    """Return the modules with weights by the name of their files."""
    with_weights = [part for part in parts if isinstance(part, nn.Module) and part.state_dict()]
    kinds = [str(part) for part in with_weights]
    counts: Counter[str] = Counter()
    found: dict[str, nn.Module] = {}
    for kind, part in zip(kinds, with_weights, strict=True):
        found[kind if kinds.count(kind) == 1 else f"{kind}_{counts[kind]}"] = part
        counts[kind] += 1
    return found


def needed(module: nn.Module) -> bool:
    """Return whether NeMo writes a file for a module, which needs trainable weights."""
    return any(parameter.requires_grad for parameter in module.parameters())


def save(run: Run, folder: Folder, mark: Mark, counted: Mapping[str, int], reason: str) -> None:
    """Write all files of a mark on the main process. Every rank must call this, at a step boundary.

    Args:
        run: The native run.
        folder: The folder of the files.
        mark: The step or epoch.
        counted: Step and epoch with their names in the trainer's file.
        reason: The reason in ``run.decisions``.
    """
    taken = snapshot.take(session_of(run), reason)
    optimizers = taken.state.pop("optimizers")
    refuse_shards(taken.state, "NeMo's checkpoint")
    plain, tensors = encode({**taken.state, "extra": taken.extra})
    if not run.is_main:
        return
    native = {"state": json.dumps(plain), "tensors": tensors}
    trainer = {**counted, "optimizer_state": optimizers, NATIVE: native}
    folder.write_mark(mark, trainer, {name: module.state_dict() for name, module in modules_of(run).items()})
    data = {"checkpoint": mark.file(TRAINER), "reason": reason, "best": []}
    decide(run, "saved", f"{data['checkpoint']}: {reason}", data=data)


def restore_modules(run: Run, folder: Folder, mark_of: Mapping[str, Mark]) -> None:
    """Restore the weights of each module; after an error, of none.

    Raises:
        RuntimeError: Weights do not fit.
    """
    modules = modules_of(run)
    read = {name: folder.read(mark.file(name)) for name, mark in mark_of.items()}
    before = {name: {key: deepcopy(value) for key, value in modules[name].state_dict().items()} for name in read}
    try:
        for name, content in read.items():
            modules[name].load_state_dict(content)
    except BaseException:
        for name, content in before.items():
            modules[name].load_state_dict(content)
        raise


def restore_trainer(run: Run, folder: Folder, mark: Mark, epoch_key: str) -> None:
    """Restore counters and optimizers. From a file of this adapter, restore the whole state for a bit-identical resume.

    The step in the file is complete, so the training continues with the next one.
    """
    content = folder.read(mark.file(TRAINER))
    if "step" not in content or "optimizer_state" not in content:
        raise ValueError(f"{folder.path / mark.file(TRAINER)} needs 'step' and 'optimizer_state'; it holds {list(content)}")
    state = decode(json.loads(content[NATIVE]["state"]), content[NATIVE]["tensors"]) if NATIVE in content else None
    if state is not None:
        model = {name: value for name, value in run.model.state_dict().items() if isinstance(value, Tensor)}
        loaded = Loaded(mark.file(TRAINER), {}, model, {**state, "optimizers": content["optimizer_state"]})
        try:
            snapshot.restore(session_of(run), loaded)
            return
        except CheckpointMismatchError as error:  # other data or another optimizer: NeMo continues without them
            logging.warning(
                "The checkpoint is from a different training: only weights, counters and optimizers are restored: %s", error
            )
    epoch = content.get(epoch_key, content.get("epoch_num", content.get("epoch", 0)))
    done = _done(run, mark, content["step"], epoch) if state is None else _whole_epochs(state["progress"])
    _go_on(run, done, content)


def go_on_at(run: Run, step: int, epoch: int, content: Mapping[str, Any]) -> None:
    """Restore the optimizers, and continue with this step in this epoch, both counted from 0."""
    _go_on(run, Counters(epoch=epoch, step=step, batch=step * run.info.accumulate), content)


def _go_on(run: Run, done: Counters, content: Mapping[str, Any]) -> None:
    _restore_optimizers(run, content["optimizer_state"])
    run.progress.begin(done, run.progress.batches_per_epoch)


def _restore_optimizers(run: Run, states: Sequence[dict[str, Any]]) -> None:
    """Restore the state of each optimizer of the same kind."""
    for optimizer, saved in zip(run.optimizers, states, strict=False):
        known = {name for group in optimizer.param_groups for name in group}
        unknown = sorted({name for group in saved["param_groups"] for name in group} - known)
        try:
            if unknown:  # torch would accept it and fail in the first step
                raise ValueError(f"this optimizer has no {', '.join(unknown)}")
            load_state(optimizer, saved)
        except ValueError as error:
            logging.warning(
                "%s starts without a saved state, which is from another optimizer: %s", type(optimizer).__name__, error
            )


def _done(run: Run, mark: Mark, step: int, epoch: int) -> Counters:
    """Return the counters of a file that NeMo itself wrote.

    During a training the file has the index of the current step or epoch; at the end, the number of completed ones. The file
    does not indicate which. After whole epochs, the number of steps determines it.
    """
    done = step + (mark.kind == "STEP")
    batches = run.progress.batches_per_epoch
    steps_per_epoch = 0 if batches is None else batches // run.info.accumulate  # NeMo drops a short accumulation window
    if steps_per_epoch and done in (epoch * steps_per_epoch, (epoch + 1) * steps_per_epoch):
        return Counters(epoch=done // steps_per_epoch, step=done, batch=done * run.info.accumulate)
    return Counters(epoch=epoch + (mark.kind == "EPOCH"), step=done, batch=done * run.info.accumulate)


def _whole_epochs(progress: Mapping[str, int]) -> Counters:
    return Counters(epoch=progress["epoch"], step=progress["step"], batch=progress["batch"], samples=progress["samples"])
