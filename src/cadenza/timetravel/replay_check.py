"""Repeat a step before its update, and compare the bits: silent corruption and nondeterministic operations are found."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from cadenza.drivers.base import Driver
from cadenza.drivers.sharding import checksum, local
from cadenza.engine.session import Loops, Session, session_of
from cadenza.errors import ReplayError
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import BaseCallback, Callback
from cadenza.hooks.order import Relation
from cadenza.hooks.schedule import Interval, Schedule
from cadenza.hooks.subscription import in_steps
from cadenza.optim.settings import Compared
from cadenza.status.decisions import decide
from cadenza.timetravel.snapshot import Pass, StepRepeat, named

if TYPE_CHECKING:
    from cadenza.run import Run

Action = Literal["raise", "warn", "majority"]
_ACTIONS = ("raise", "warn", "majority")
_NO_MAJORITY = (
    "an operation is not deterministic, or has state that only a forward pass changes, such as a generator of its own; or the "
    "machine gives wrong numbers often. torch.use_deterministic_algorithms(True) names such operations"
)


class ReplayCheck(Callback, Compared):
    """Repeat a step from its snapshot before the update, and compare all bits: outputs of modules, gradients, buffers, weights.

    A difference means that a processor or memory gave a wrong number, or that an operation is not deterministic. A third pass
    says which: if two of three passes agree, one pass was wrong; if none agree, an operation is not deterministic. The message
    and the decision ``"replay differed"`` name the rank, the first module in the forward pass, and the first parameter in the
    backward pass. With replicas of the model on multiple ranks (DDP), the check also compares weights and gradients over the
    ranks, so it finds what went wrong on one rank in the steps before. After a check without a difference, the run continues
    with the same bits as without the check.

    A checked step computes each batch twice, and takes memory for a copy of weights, buffers and batches; on multiple ranks,
    of the gradients as well. Every rank repeats the step.

    The code of the model, of ``compute_loss`` and of hooks on modules and tensors runs again; hooks of callbacks do not. A
    callback that changes gradients in ``on_after_backward`` or ``on_batch_end``, or weights between two batches of a step,
    looks like corruption: change gradients in ``on_before_optimizer_step``, which comes after the check. A step is not checked
    if a batch of it was skipped, or if a callback replaced the loss in ``on_before_backward``.

    With multiple ranks: communicates in the steps that it checks: every rank repeats the step, and with DDP they compare
    weights and gradients. The first step of a process is not checked.

    Args:
        every: The steps to check, as an interval in steps: ``"1000 steps"``, ``At("10 steps") | Every("1000 steps")``.
        action: What a difference does. ``"raise"`` ends the run with `ReplayError` before the update; it continues from the
            last checkpoint. ``"warn"`` continues with the results of the step itself. ``"majority"`` continues with the results
            on which two of three passes agree, and gives a rank with other weights or gradients those of most ranks; without
            a majority, it raises.

    Raises:
        ScheduleError: `every` cannot be parsed, or does not count steps.
        ValueError: `action` is unknown; or, when a run starts, the losses come from a ``step_fn``, a loop of your own or the
            ``training_step`` of a ``LightningModule``.
        ReplayError: A difference was found.

    >>> from cadenza.testing import tiny_run
    >>> check = ReplayCheck(every="2 steps")
    >>> run = tiny_run(callbacks=[check], batches=6)
    >>> check.steps, run.outcome.kind
    ([2, 4, 6], 'finished')
    """

    before: Relation = (BaseCallback,)  # their hooks may change the gradients
    decides: tuple[str, ...] = ("replay differed",)

    def __init__(self, every: Interval = "1000 steps", *, action: Action = "raise") -> None:
        if action not in _ACTIONS:
            raise ValueError(f"action must be one of {', '.join(map(repr, _ACTIONS))}; got {action!r}")
        self.every: Schedule = in_steps(every, "ReplayCheck(every=...)", "a step is repeated before its update")
        self.action: Action = action
        self.steps: list[int] = []
        """The steps that this run has checked."""
        self._repeat: StepRepeat | None = None
        self._first = 0  # the first step of this process
        self._has_warned = False

    def listeners(self) -> list[Listener]:
        return [
            *super().listeners(),
            Listener(Callback.on_step_start, self._begin, self.every, "takes a snapshot"),
            Listener(Callback.on_before_optimizer_step, self._check, self.every, "repeats the step"),
        ]

    def on_setup(self, run: Run) -> None:
        session = session_of(run)
        own = "a loop of your own" if session.loop is not Loops.FIT else "a step_fn" if session.step_fn is not None else ""
        if own or getattr(inspect.unwrap(session.compute), "has_effects", False):
            why = (
                f"in {own} only your code computes them" if own else "a training_step logs and counts, which would happen twice"
            )
            raise ValueError(
                f"ReplayCheck repeats the batches of a step, and {why}. Use Trainer.fit with compute_loss, or leave out "
                "ReplayCheck."
            )
        self.steps, self._repeat, self._has_warned = [], None, False

    def on_fit_start(self, run: Run) -> None:
        self._first = run.progress.step + 1

    def on_fit_end(self, run: Run) -> None:
        self._close()

    def _close(self) -> None:
        if self._repeat is not None:
            self._repeat.close()
            self._repeat = None

    def _begin(self, run: Run) -> None:
        self._close()
        # DDP orders its buckets anew after the first backward pass: the second one may add numbers in another order.
        if not (run.driver.reduces and run.driver.world_size > 1 and run.progress.step + 1 == self._first):
            self._repeat = StepRepeat(session_of(run))

    def _check(self, run: Run) -> None:
        repeat = self._repeat
        if repeat is not None and repeat.step == run.progress.step + 1:
            try:
                self._compare(run, repeat)
            finally:
                self._close()

    def _compare(self, run: Run, repeat: StepRepeat) -> None:
        obstacle = repeat.obstacle
        if run.driver.any_rank(obstacle is not None):
            self._tell_not_checked(run, obstacle or "another rank cannot repeat it")
            return
        with repeat.repeating() as mine:
            second = repeat.again()
            found = _over_ranks(run, mine.differences(second))
            used, passes = 0, [mine, second]
            if found:
                passes.append(repeat.again())
                used = self._settle(run, passes, found)
        if used:
            repeat.use(passes[used])
        self._compare_replicas(run)
        self.steps.append(repeat.step)

    def _tell_not_checked(self, run: Run, obstacle: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            run.warn(f"ReplayCheck did not check step {run.progress.step + 1}: {obstacle}")
        decide(run, "not checked", f"step {run.progress.step + 1}: {obstacle}")

    def _settle(self, run: Run, passes: Sequence[Pass], found: Mapping[int, Mapping[str, str]]) -> int:
        """Report a difference of the first two passes. Return the index of the pass to continue with.

        Raises:
            ReplayError: The action says so, or no two passes agree.
        """
        mine, second, third = passes
        step, several = run.progress.step + 1, run.driver.world_size > 1
        first_differs, second_differs = (bool(_over_ranks(run, result.differences(third))) for result in (mine, second))
        if not first_differs:
            kind, cause = "a repeat was wrong", "the other repeat agrees with the step: the machine gave a wrong number once"
        elif not second_differs:
            kind = "the step itself was wrong"
            cause = f"the repeats agree, and the step differs from both: the machine gave a wrong number{_suspects(run)}"
        else:
            kind, cause = "no two passes agree", _NO_MAJORITY
        used = int(self.action == "majority" and first_differs and not second_differs)
        where = "; ".join(f"{f'on rank {rank} ' if several else ''}in {named(differing)}" for rank, differing in found.items())
        data = {
            "step": step,
            "kind": kind,
            "ranks": {str(rank): dict(differing) for rank, differing in found.items()},
            "used": "the repeat" if used else "the step",
        }
        solved = self.action == "majority" and not (first_differs and second_differs)
        self._report(run, f"a repeat of step {step} differs {where}; {cause}", data, solved=solved)
        return used

    def _report(self, run: Run, text: str, data: Mapping[str, Any], *, solved: bool) -> None:
        decide(run, "replay differed", text, data=data)
        if self.action == "raise" or not (solved or self.action == "warn"):
            raise ReplayError(
                f"{text}. The update was not done. Continue from the last checkpoint; if it happens again on this machine, "
                "exclude it."
            )
        run.warn(f"{text}. The run continues with {data['used']}")

    def _compare_replicas(self, run: Run) -> None:
        """Compare weights and reduced gradients over ranks. Every rank must call this."""
        driver = run.driver
        if driver.world_size == 1 or not driver.reduces or driver.shards:
            return
        held = dict(_replicated(session_of(run)))
        replicas = _Replicas.compared(driver, {name: checksum(tensor) for name, tensor in held.items()})
        if replicas is None:
            return
        solved = self.action == "majority" and replicas.has_majority
        step = run.progress.step + 1
        data = {
            "step": step,
            "kind": "ranks differ",
            "ranks": {str(rank): name for rank, name in replicas.wrong().items()},
            "used": "the values of most ranks" if solved else "the step",
        }
        text = (
            f"before the update of step {step}, {replicas}. An earlier step gave different numbers on the ranks, or memory has "
            "changed"
        )
        self._report(run, text, data, solved=solved)
        for name, tensor in held.items() if solved else ():
            right = replicas.right(name)
            if len(right) < driver.world_size:
                value = driver.gather(local(tensor).cpu() if driver.rank == right[0] else None)[right[0]]
                with torch.no_grad():
                    tensor.copy_(value.to(tensor.device))


class _Replicas:
    """Checksums of tensors that should be equal on all ranks, and are not.

    Args:
        everyone: For each rank, the checksums by name.
    """

    def __init__(self, everyone: Sequence[Mapping[str, int]]) -> None:
        self._everyone = everyone
        names = dict.fromkeys(name for rank_value in everyone for name in rank_value)
        self._usual = {name: Counter(rank_value.get(name) for rank_value in everyone).most_common(1)[0] for name in names}

    @staticmethod
    def compared(driver: Driver, sums: Mapping[str, int]) -> _Replicas | None:
        """Compare the checksums of all ranks; None if they are equal. Every rank must call this."""
        digest = hash(tuple(sums.values())) >> 1
        least, most = driver.reduce(torch.tensor([-digest, digest]), "max").tolist()
        return None if -least == most else _Replicas(driver.gather(dict(sums)))

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the ranks agree on each tensor."""
        return all(2 * count > len(self._everyone) for _, count in self._usual.values())

    def right(self, name: str) -> list[int]:
        """Return the ranks with the usual values of a tensor."""
        return [rank for rank, rank_value in enumerate(self._everyone) if rank_value.get(name) == self._usual[name][0]]

    def wrong(self) -> dict[int, str]:
        """Return the ranks with other values than most, each with the name of the first such tensor.

        Of a tensor without a majority, each rank may be the wrong one, so all are returned.
        """
        half = len(self._everyone) / 2
        firsts = {
            rank: next(
                (name for name, (usual, count) in self._usual.items() if count <= half or rank_value.get(name) != usual), None
            )
            for rank, rank_value in enumerate(self._everyone)
        }
        return {rank: name for rank, name in firsts.items() if name is not None}

    def __str__(self) -> str:
        if self.has_majority:
            return "; ".join(f"{name} on rank {rank} is not that of most ranks" for rank, name in self.wrong().items())
        first = next(name for name, (_, count) in self._usual.items() if 2 * count <= len(self._everyone))
        return f"{first} differs over the ranks, and no value has a majority"


def _over_ranks(run: Run, own: Mapping[str, str]) -> dict[int, Mapping[str, str]]:
    """Return the differences of the ranks that have any, by rank. Every rank must call this."""
    if not run.driver.any_rank(bool(own)):
        return {}
    return {rank: rank_value for rank, rank_value in enumerate(run.driver.gather(dict(own))) if rank_value}


def _suspects(run: Run) -> str:
    """Name the callbacks that may have changed gradients between the backward pass and the check."""
    moments = session_of(run).hooks.by_moment
    names = dict.fromkeys(
        listener.owner
        for moment in (Callback.on_after_backward, Callback.on_batch_end)
        for listener in moments.get(moment, ())
        if not listener.inner
    )
    return f", or a callback changed gradients: {', '.join(names)}" if names else ""


def _replicated(session: Session) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and gradients that are the same on all ranks."""
    ignored = set(getattr(session.model, "parameters_to_ignore", ()))
    for name, parameter in session.module.named_parameters():
        if name not in ignored:
            yield f"the weight {name!r}", parameter.detach()
            if parameter.requires_grad and parameter.grad is not None:
                yield f"the gradient of {name!r}", parameter.grad
    for index, extra in enumerate(session.extra_parameters.parameters):
        yield f"parameter {index} outside of the model", extra.detach()
