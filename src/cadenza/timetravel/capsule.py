"""Keep what the last steps need to be repeated, and write it when a step breaks."""

from __future__ import annotations

import inspect
import math
import traceback
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cadenza.drivers.collective_check import alone
from cadenza.drivers.sharding import is_sharded
from cadenza.engine.error_context import raised_by_loader
from cadenza.engine.module_state import Statistics
from cadenza.engine.session import Loops, Session, session_of
from cadenza.errors import DistributedError, NonFiniteError, notes_of
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least
from cadenza.hooks.subscription import steps_in
from cadenza.loading.batches import tensors_in
from cadenza.loading.rng import RNGState
from cadenza.optim.model_state import load_into, plain_name, state_of
from cadenza.optim.non_finite import all_finite, first_not_finite
from cadenza.optim.parameters import modules_of
from cadenza.records.scalars import Arriving, arriving
from cadenza.status.decisions import decide
from cadenza.timetravel.capsule_files import FOLDER, write_capsule
from cadenza.timetravel.loss_signs import NonFinite, Sign, Spike, Watch, checked_sign
from cadenza.timetravel.second_pass import Located, locate, located_in
from cadenza.timetravel.snapshot import undone

if TYPE_CHECKING:
    from cadenza.run import Run


class _Step:
    """One step: its number, from 1, and the number of updates before it. It is made in each step: no dataclass."""

    __slots__ = ("losses", "not_loaded", "number", "parts", "updates")

    def __init__(self, number: int, updates: int) -> None:
        self.number: int = number
        self.updates: int = updates
        self.parts: list[tuple[Any, int, int, RNGState]] = []
        """Each batch, its epoch, its number in it, from 0, on this rank, and the RNG state before its forward pass."""
        self.losses: list[float | Arriving] = []
        self.not_loaded: tuple[int, int] | None = None
        """The position of the batch with which the loader failed."""

    @property
    def batches(self) -> list[Any]:
        return [part[0] for part in self.parts]

    @property
    def positions(self) -> list[tuple[int, int]]:
        return [part[1:3] for part in self.parts]

    @property
    def rng_states(self) -> list[RNGState]:
        return [part[3] for part in self.parts]


class Capsule(Callback):
    """Write what a step needs to be repeated, when the step breaks: an exception, a loss that is not finite, or a spike.

    The capsule is a folder of safetensors and JSON in the run directory, ``capsules/step-00000120``. It holds the samples, the
    batches, the RNG states and the weights before the step, and the steps before with their RNG states. A second pass over the
    batches, with hooks on all modules, finds the first module and the first parameter with a number that is not finite, and
    the samples. ``cadenza capsule RUN`` shows it, and `replay_capsule` repeats the step.

    The weights before the step are those in memory, because the loss is checked before the update. If they are not finite
    themselves, the newest finite copy is taken of those that `weights` makes on the host. The capsule then holds the step after
    the copy. If that step is not among the `last` ones, the capsule holds the present step, and is marked as not exact.

    Each rank watches its own loss, and writes a capsule of its own: ``step-00000120-rank1``. With FSDP and tensor
    parallelism, the weights and the second pass are left out; with a ``step_fn`` or a loop of your own, the second pass. Then
    only the batches are searched for numbers that are not finite.

    The check waits for the forward pass once a step, not for the backward pass. The batches of the `last` steps stay
    in the memory of the device; with `accumulate`, a step has several.
    The RNG state is that of its ``on_batch_start``: callbacks that draw random numbers there must stand before it.

    With multiple ranks: each rank watches its own loss, and writes capsules of its own. It communicates once, at the end of the
    run.

    Args:
        last: The number of steps of which batches, positions and RNG states are kept, with the present one.
        when: The signs in the loss: `NonFinite`, `Spike`, or several joined by ``|``. None: ``NonFinite() | Spike()``.
        weights: The steps between copies of the weights on the host, such as ``"1000 steps"``; None: no copies. With
            ``"1 step"``, the weights before the last steps are known.
        most: The most capsules that each rank writes in a run.

    Raises:
        TypeError, ValueError: An argument is wrong, or the run has no directory.

    >>> import tempfile
    >>> from cadenza.timetravel import replay_capsule
    >>> from cadenza.testing import tiny_loader, tiny_trainer
    >>> loader = tiny_loader()
    >>> loader[3][0][1] = float("nan")  # the second sample of the fourth batch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer = tiny_trainer(loader=loader, directory=folder, callbacks=[Capsule()])
    ...     run = trainer.fit()
    ...     again = replay_capsule(trainer, folder)
    >>> again.step, again.located.module, again.located.rows, again.same
    (4, 'the model (Linear)', [1], True)
    """

    decides: tuple[str, ...] = ("capsule written",)
    each_rank = True

    def __init__(
        self,
        *,
        last: int = 3,
        when: Sign | None = None,
        weights: str | int | None = "1000 steps",
        most: int = 3,
    ) -> None:
        self.when: Sign = NonFinite() | Spike() if when is None else checked_sign(when)
        self.last: int = at_least(1, "last", last)
        self.weights: int | None = (
            None if weights is None else steps_in(weights, "weights must be a number of steps, such as '1000 steps', or None")
        )
        self.most: int = at_least(1, "most", most)
        self._watch = Watch(self.when)
        self._steps: deque[_Step] = deque(maxlen=self.last)
        self._seen: str | None = None
        self._losses: list[float | Arriving] = []  # those that are not judged yet
        self._written: list[dict[str, Any]] = []
        self._told: set[tuple[int, str]] = set()
        self._rolled_back = False

    def listeners(self) -> list[Listener]:
        return silent(super().listeners())

    def on_setup(self, run: Run) -> None:
        if run.info.directory is None:
            raise ValueError("Capsule writes into the directory of the run: give Trainer(directory=...)")
        self._steps.clear()
        self._step, self._seen = _Step(0, 0), None
        self._losses, self._written, self._failed, self._has_broken = [], [], 0, False
        self._copies: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=2)  # of which one may be broken already
        if not self._rolled_back:
            self._told.clear()
        self._watch.reset()

    def on_fit_start(self, run: Run) -> None:
        self._statistics = Statistics(run.model)
        self._progress, self._state_of_step = run.progress, session_of(run).step

    def on_batch_start(self, run: Run, batch: Any) -> None:
        # After a step the processor has forgotten this code and its data: each call costs a microsecond.
        progress = self._progress
        number = progress.step + 1
        step = self._step if self._step.number == number else self._begin(run, number)
        step.parts.append((batch, progress.epoch, progress.batch_in_epoch, RNGState.capture()))

    def on_before_backward(self, run: Run, outputs: MutableMapping[str, Any]) -> None:
        loss = outputs["loss"]
        if isinstance(loss, Tensor):
            number = arriving(loss)
            self._step.losses.append(number)
            values: Any = outputs  # a dict, which need not look for derived outputs
            weight = dict.get(values, "weight")
            if weight is None or float(weight) != 0:
                if self._alone and type(number) is float:
                    self._seen = self._watch.look(number)
                else:
                    self._losses.append(number)

    def on_before_optimizer_step(self, run: Run) -> None:
        self._judge(run)

    def on_exception(self, run: Run, error: BaseException) -> None:
        if not isinstance(error, Exception) or isinstance(error, DistributedError):
            return
        number, step = run.progress.step + 1, self._step
        if raised_by_loader(error):
            step = step if step.number == number else self._begin(run, number)
            step.not_loaded = run.progress.epoch, run.progress.batch_in_epoch
        elif step.number != number or step.batches[-1] is not run.batch:
            return  # between two steps, such as in an evaluation; or a hook before this one ended the step
        self._write(run, "exception", _in_one_line(error), error)

    def on_fit_end(self, run: Run) -> None:
        self._judge(run)
        session = session_of(run)
        self._rolled_back = run.outcome is not None and run.outcome.kind == "rolled back"
        if session.sync.together and run.outcome is not None and run.outcome.kind != "failed":
            for rank, written in enumerate(run.driver.gather(self._written)):
                for data in written if rank != run.driver.rank and run.is_main else ():
                    decide(
                        run, "capsule written", data["why"], who=f"{session.hooks.current_owner()} on rank {rank}", data=data
                    )
        self._steps.clear()
        self._losses = []

    def state_dict(self) -> dict[str, Any]:
        return self._watch.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._watch.load_state_dict(state)

    def _begin(self, run: Run, number: int) -> _Step:
        self._judge(run)  # if all batches of the step before were skipped, there was no update
        if self.weights is not None and (not self._steps or (number - 1) % self.weights == 0):
            self._copy_weights(run)
        self._statistics.keep()
        self._step = step = _Step(number, self._state_of_step.updates)
        self._steps.append(step)
        self._alone = self._state_of_step.window.size == 1  # its loss is that of the step
        return step

    def _copy_weights(self, run: Run) -> None:
        model = run.model
        if not any(is_sharded(parameter) for parameter in model.parameters()):
            weights = {name: value for name, value in state_of(model).items() if isinstance(value, Tensor)}
            self._copies.append(
                (run.progress.step, {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()})
            )

    def _judge(self, run: Run) -> None:
        seen, losses = self._seen, self._losses
        if losses:
            seen = self._watch.look(sum(map(float, losses)) / len(losses))
        self._seen = None
        losses.clear()
        if seen is not None:
            self._write(run, "loss", seen)

    def _write(self, run: Run, kind: str, why: str, error: Exception | None = None) -> None:
        """Write a capsule of the present step, and record it. An error of this does not end the run."""
        if len(self._written) + self._failed >= self.most or any(
            path["step"] == self._steps[-1].number for path in self._written
        ):
            return
        session = session_of(run)
        try:
            finite = all_finite(session.module.parameters())
            weights, step, exact = self._weights_before(session)
            if self._has_broken and not (exact and finite):
                return  # what broke the weights was written before
            facts = self._facts(run, step, kind, why, error) | {"weights_exact": exact}
            broken = (
                isinstance(error, NonFiniteError)
                or not all(math.isfinite(loss) for loss in facts["losses"])
                or weights is not None
            )
            located = self._located(session, step, weights, facts, known=exact or weights is not None) if broken else Located()
            if not finite and not located.found:  # the step that broke the weights is not known
                located.parameter = first_not_finite(
                    (repr(name), parameter) for name, parameter in session.module.named_parameters()
                )
            facts |= self._found(session, step, located)
            name = f"step-{step.number:08d}{f'-rank{run.driver.rank}' if run.driver.world_size > 1 else ''}"
            assert run.info.directory is not None, "checked in on_setup"
            path, facts = write_capsule(run.info.directory / FOLDER, name, facts, self._state(session, step, weights))
        except Exception as failed:
            self._failed += 1
            run.warn(f"the capsule of step {self._steps[-1].number} could not be written: {failed!r}")
            return
        names = ("step", "rank", "kind", "why", "module", "parameter", "tensor", "guilty_samples")
        data = {"path": f"{FOLDER}/{path.name}", **{name: facts.get(name) for name in names}}
        self._written.append(data)
        self._has_broken |= broken or not finite
        decide(run, "capsule written", why, data=data)
        where = f"; first not finite: {facts['module'] or facts['parameter'] or facts['tensor']}" if located.found else ""
        samples = f", samples {facts['guilty_samples']}" if facts.get("guilty_samples") else ""
        told = f"step {step.number}: {why.removesuffix('.')}{where}{samples}"
        if (step.number, why) not in self._told:  # the steps that a rollback repeats break again
            run.warn(f"{told}. Written to {path}; see: cadenza capsule {run.info.directory}")
        self._told.add((step.number, why))

    def _weights_before(self, session: Session) -> tuple[dict[str, Tensor] | None, _Step, bool]:
        """Return the weights before a step, the step, and whether they belong together.

        No weights: those in memory, or there are only shards.
        """
        model, step = session.module, self._steps[-1]
        if any(is_sharded(parameter) for parameter in model.parameters()):
            return None, step, False
        in_memory = session.step.updates == step.updates and not session.step.in_update
        if in_memory and all_finite(model.parameters()):
            return None, step, True
        for number, copy in reversed(self._copies):
            if number < step.number and all_finite(copy.values()):
                following = next((step for step in self._steps if step.number == number + 1), None)
                return copy, following or step, following is not None
        return None, step, in_memory

    def _located(
        self, session: Session, step: _Step, weights: dict[str, Tensor] | None, facts: dict[str, Any], *, known: bool
    ) -> Located:
        """Repeat the forward and backward passes of a step on the user's own module, and restore everything after it.

        If this process does not know the weights, or how the losses are computed, look at the batches alone.
        """
        if not known or session.step_fn is not None or session.loop is not Loops.FIT:
            return located_in(step.batches)
        with undone(session), alone("the second pass of a capsule"):
            if weights is not None:
                load_into(session.module, weights)
            else:
                self._statistics.restore()
            others, versions = [*modules_of(inspect.unwrap(session.compute))], _versions(step.batches)
            given = session.module, session.compute, step.batches, step.rng_states, others
            try:
                found = locate(*given, accumulates=not session.sync.several)
                if _versions(step.batches) != versions:
                    facts["second_pass"] = (
                        "it changes its batch in place, so the batch in the capsule is not that of the loader"
                    )
                    found.rows = []
                return found
            except Exception as failed:  # such as a loss function that reads something once
                facts["second_pass"] = f"{type(failed).__name__}: {failed}"
                return located_in(step.batches)

    def _state(self, session: Session, step: _Step, weights: dict[str, Tensor] | None) -> dict[str, Any]:
        if weights is None and not any(is_sharded(parameter) for parameter in session.module.parameters()):
            weights = {name: value for name, value in state_of(session.module).items() if isinstance(value, Tensor)}
            before, buffers = self._statistics.copies, session.module.state_dict(keep_vars=True)
            weights |= {plain_name(name): before[id(buffer)] for name, buffer in buffers.items() if id(buffer) in before}
        return {
            "model": weights,
            "batches": step.batches or None,
            "rng": [state.to_plain() for state in step.rng_states],
            "last": [[state.to_plain() for state in earlier.rng_states] for earlier in self._steps],
        }

    def _facts(self, run: Run, step: _Step, kind: str, why: str, error: Exception | None) -> dict[str, Any]:
        session = session_of(run)
        facts: dict[str, Any] = {
            "kind": kind,
            "why": why,
            "run": run.info.id,
            "rank": run.driver.rank,
            "ranks": run.driver.world_size,
            "step": step.number,
            "seen_at_step": self._steps[-1].number,
            "losses": [*map(float, step.losses)],
            "module": None,
            "parameter": None,
            "tensor": None,
            "guilty_samples": [],
            "batches": _positions(session, step),
            "last": [{"step": step.number, "batches": _positions(session, step)} for step in self._steps],
            "not_training": [name for name, submodule in session.module.named_modules() if not submodule.training],
            "not_loaded": None if step.not_loaded is None else _named(session, *step.not_loaded),
            "precision": session.precision.name,
            "torch": torch.__version__,
            "decisions": [decision.to_dict() for decision in session.run.decisions[-3:]],
        }
        if not step.parts:
            facts["batches_left_out"] = "the loader failed with the first batch of the step"
        if error is not None:
            lines = traceback.format_exception(error)
            facts["error"] = {"type": type(error).__name__, "notes": notes_of(error), "traceback": "".join(lines)}
        return facts

    def _found(self, session: Session, step: _Step, located: Located) -> dict[str, Any]:
        samples = _positions(session, step)[located.batch]["samples"] if located.batch is not None else None
        guilty = [samples[row] for row in located.rows if row < len(samples)] if samples else located.rows
        found = {name: getattr(located, name) for name in ("module", "parameter", "tensor", "batch", "rows")}
        return {**found, "guilty_samples": guilty}


def _in_one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    if "in DataLoader worker process" in lines[0]:  # the text is a traceback, with the error and its notes at its end
        return ([lines[0]] + [two for line, two in pairwise(lines) if line.startswith("  ") and not two.startswith(" ")])[-1]
    return f"{type(error).__name__}: {lines[0]}"


def _versions(batches: Sequence[Any]) -> list[int]:
    return [item._version for item in tensors_in(batches)]


def _positions(session: Session, step: _Step) -> list[dict[str, Any]]:
    """Return epoch, number and samples of each batch of a step."""
    return [_named(session, epoch, number) for epoch, number in step.positions]


def _named(session: Session, epoch: int, number: int) -> dict[str, Any]:
    """Return the position of a batch and its samples; they are None if the loader has no indices."""
    samples = session.cursor.source.indices(epoch, number)
    return {"epoch": epoch, "batch_in_epoch": number, "samples": None if samples is None else [*samples]}
