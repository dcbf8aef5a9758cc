"""Go back to a checkpoint when the loss breaks, leave out the batches that broke it, and go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor

from cadenza.checkpoint.resumption import RunSoFar
from cadenza.checkpoint.writer import CheckpointWriter
from cadenza.engine.module_state import Statistics
from cadenza.engine.session import Loops, Session, session_of
from cadenza.hooks.listener import Listener, silent
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.subscription import steps_in
from cadenza.optim.non_finite import all_finite
from cadenza.optim.parameters import parameters_of
from cadenza.optim.settings import Compared
from cadenza.records.directory import RecordedRun
from cadenza.status.decisions import GoBack, decide
from cadenza.status.formats import counted, in_json
from cadenza.status.progress import Counters
from cadenza.timetravel.loss_signs import NonFinite, Sign, Spike, Watch, checked_sign

if TYPE_CHECKING:
    from cadenza.run import Run


LAST_GOOD = "last good checkpoint"
SINCE: Literal["batches of the steps since"] = "batches of the steps since"
GUILTY: Literal["the guilty batch"] = "the guilty batch"


@dataclass(frozen=True, slots=True)
class LowerRate:
    """Multiply all learning rates by `factor` for some steps after a run went back: an argument of `Recover`.

    Raises:
        ValueError: `factor` is not between 0 and 1, or `steps` is no number of steps.
    """

    factor: float
    steps: str | int

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise ValueError(f"factor must be above 0 and below 1; got {self.factor!r}")
        _steps(self.steps, "steps")


class Recover(Callback, Compared):
    """Go back to a checkpoint when the loss breaks, leave out the batches that broke it, and go on.

    The loss of each step is checked at its end, before the step is evaluated or saved. If it shows a sign, this part of the run
    ends with the outcome ``"rolled back"``, and ``fit`` continues from a checkpoint before, on a new branch, as
    ``fit(resume=PATH)`` does: ``on_fit_end`` and ``on_setup`` are called, and the records since are moved to a file of their
    own. `Trainer.fit` returns the run that went on.

    With ``skip="the guilty batch"`` the steps are repeated up to the one with the sign, and each batch is checked before its
    gradient is added. A batch with a loss that shows a sign is left out, and so are the batches of a step with a gradient that
    is not finite, which with fp16 is left to the scaler. The first step, with no checkpoint before it, is checked likewise.
    With ``skip="batches of the steps since"``, all batches between the checkpoint and the sign are left out. The
    same is done, from an earlier checkpoint if there is one, if the sign comes again.

    A batch that is left out counts in the progress, and is not trained on. A step without batches updates nothing. On several
    ranks, the batches of all ranks in the same round are left out.

    All of this depends on losses that are equal on all ranks. Each rank does the same, and a run that is killed in the middle
    and resumed ends with the same bits. Each rollback and each batch that is left out is a decision with data.

    The check waits for the device once a step. Ranks exchange the loss during the backward pass, and do not wait for each other
    if it is on the host. With a device or a ``step_fn``, they wait for it at the end of the step.

    With multiple ranks: communicates: the mean loss of each step is reduced over the ranks, and all ranks go back together and
    leave out the same rounds.

    Args:
        when: The signs: `NonFinite`, `Spike`, or both joined by ``|``. None: ``NonFinite() | Spike()``.
        back: ``"last good checkpoint"``: the newest one before the sign with finite weights; or, such as ``"100 steps"``, the
            newest one at least so many steps before the sign.
        skip: The batches to leave out, as above; None: none, and `then` must be given.
        then: `LowerRate`, from the checkpoint to some steps after the sign; None: nothing.
        times: The most rollbacks in a run. At the next sign the run stops.

    Raises:
        TypeError, ValueError: An argument is wrong; or the run has no directory, or is a loop of your own.

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint
    >>> from cadenza.testing import tiny_loader, tiny_trainer
    >>> loader = tiny_loader(10)
    >>> loader[6][0][1] = float("nan")  # the seventh batch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = tiny_trainer(loader=loader, directory=folder, callbacks=[Checkpoint("4 steps"), Recover()]).fit()
    >>> left_out = [one.data["batch_in_epoch"] for one in run.decisions if one.what == "batch left out"]
    >>> run.outcome.kind, run.progress.step, left_out
    ('finished', 10, [6])
    """

    decides: tuple[str, ...] = ("batch left out", "went back")

    # Broken weights are neither evaluated nor saved, and a lowered rate is restored before a scheduler steps.
    before: Relation = (Phase.CLIP, Phase.SCHEDULE, Phase.EVALUATE, Phase.SAVE)

    def __init__(
        self,
        *,
        when: Sign | None = None,
        back: str = LAST_GOOD,
        skip: Literal["batches of the steps since", "the guilty batch"] | None = "the guilty batch",
        then: LowerRate | None = None,
        times: int = 3,
    ) -> None:
        if skip not in (SINCE, GUILTY, None):
            raise ValueError(f"skip must be {SINCE!r}, {GUILTY!r} or None; got {skip!r}")
        if skip is None and then is None:
            raise ValueError("skip=None repeats the same steps: give then=LowerRate(0.5, '200 steps'), or leave out batches")
        if then is not None and not isinstance(then, LowerRate):
            raise TypeError(f"then must be LowerRate(...) or None; got {then!r}")
        self.when: Sign = NonFinite() | Spike() if when is None else checked_sign(when)
        self.back: str = back
        self._steps_back = 1 if back == LAST_GOOD else _steps(back, "back")
        self.skip: str | None = skip
        self.then: LowerRate | None = then
        self.times: int = at_least(1, "times", times)
        self._watch = Watch(self.when)
        self._plan = Plan()
        self._dropped = self._begins = False
        self._step = 0  # the step that began last, from 1

    def listeners(self) -> list[Listener]:
        own = [Listener(moment, function) for moment, function in self._acting()]
        return [*super().listeners(), *silent(own)]  # requests are made in on_step_end

    def _acting(self) -> list[tuple[Callable[..., None], Callable[..., None]]]:
        """Return the moments and functions that a run needs after it went back."""
        return [
            (Callback.on_step_start, self._start_step),
            (Callback.on_batch_start, self._leave_out),
            (Callback.on_before_backward, self._check_batch),
            (Callback.on_before_optimizer_step, self._before_update),
            (Callback.on_after_optimizer_step, self._after_update),
        ]

    def factor(self, step: int) -> float:
        """Return the factor on the learning rates in a step, counted from 1."""
        done = min(step, self._step or step)  # at the end of a step, the rate of the next one is not that after a rollback
        first, last, factor = self._plan.in_force(done)[1] or (0, 0, 1.0)
        return factor if first < step <= last else 1.0

    def on_setup(self, run: Run) -> None:
        session = session_of(run)
        if run.info.directory is None:
            raise ValueError("Recover goes back to a checkpoint of the run: give Trainer(directory=...)")
        if session.loop is not Loops.FIT:
            raise ValueError("Recover works in fit(): a loop of your own cannot be taken back. Use StopOnNonFinite.")
        if session.step_fn is not None and self.skip == GUILTY:
            raise ValueError(f"with a step_fn, Recover cannot check each batch: give skip={SINCE!r}")
        self._plan, self._dropped, self._begins, self._step = Plan(), False, False, 0
        self._watch.reset()
        if self.then is not None:
            for index in range(len(run.optimizers)):
                session.rates.factors.setdefault(index, []).append(self.factor)

    def on_fit_start(self, run: Run) -> None:
        session = session_of(run)
        session.sync.expect_losses()
        if not session.savers:
            run.warn("Recover goes back to checkpoints, and no callback writes them: it can only stop. Add Checkpoint(...).")
        if session.restored.recovery is not None:  # the present branch began with it
            loaded, self._plan = self._plan, Plan.from_plain(session.restored.recovery)
            self._plan.trained = loaded.trained and loaded.count == self._plan.count
            if session.progress.step == self._plan.to:
                told = self._plan.told
                decide(run, "went back", told["why"], data=told)
                run.warn(f"{told['why']} (rollback {told['times']}, the most is {self.times})")
        self._statistics = Statistics(run.model)
        self._begins = not self._plan.count and not session.progress.step and self.skip == GUILTY
        if self._begins:
            self._plan.guard = 1  # no checkpoint is before the first step, so it is checked as a repeated one
        if self._plan.count:
            return
        if not self._begins:
            self._stand_by(session)
        if session.savers and not session.progress.step:
            run.save("the beginning, to go back to")

    def _stand_by(self, session: Session) -> None:
        """Remove the hooks of which a run that never broke needs none."""
        self._begins, self._step = False, 0
        for moment, function in self._acting():
            session.hooks.remove(moment, function)

    def on_step_end(self, run: Run) -> None:
        session = session_of(run)
        if self._begins:
            self._stand_by(session)
        mean = session.sync.mean_loss()
        if mean is None:
            return
        loss = float(mean)
        if math.isnan(loss) and session.step.last_window.is_weightless:
            return
        seen = self._watch.look(loss)
        if seen is None:
            self._plan.trained |= session.step.updated
        else:
            self._go_back(run, session, loss, seen)

    def state_dict(self) -> dict[str, Any]:
        return {"plan": self._plan.to_plain(), "when": self._watch.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._plan = Plan.from_plain(state["plan"])
        self._watch.load_state_dict(state["when"])

    def on_exception(self, run: Run, error: BaseException) -> None:
        self._put_rates_back(run)

    # -- going back --------------------------------------------------------------------------------

    def _go_back(self, run: Run, session: Session, loss: float, seen: str) -> None:
        """Request to continue from a checkpoint, or to stop if there is none. Every rank must call this."""
        plan, step, at, requests = self._plan, run.progress.step, run.progress, session.sync.requests
        requests.is_broken = True  # also if the run stops: the last good checkpoint is not replaced
        session.metrics.losses.quiet = True  # it would warn that training goes on
        if plan.count >= self.times:
            ended = f"{seen} at step {step}, after {counted(plan.count, 'rollback')}"
            run.stop(f"{ended}, the most of Recover: lower the learning rate, or look at the batches that were left out")
            return
        again, idle = plan.in_vain(step)
        found = self._point_before(session, step, plan.to if again else None)
        if isinstance(found, str):
            run.stop(f"{seen} at step {step}, and there is no {found}")
            return
        path, reached = found
        since = self.skip is not None and (again or self.skip == SINCE)
        shard = session.cursor.source.shard
        of_epoch = shard if reached.epoch == at.epoch else shard.resumed(())
        first = [reached.epoch, of_epoch.first_of_round(reached.batch_in_epoch)]
        skips = [first, [at.epoch, shard.first_of_round(at.batch_in_epoch)]]
        told: dict[str, Any] = {
            "why": f"{seen} at step {step}: back to step {reached.step}",
            "step": step,
            "loss": loss,
            "to": reached.step,
            "checkpoint": path.rpartition("/")[2],
            "skip": SINCE if since else self.skip,
            "times": plan.count + 1,
        }
        following = Plan(
            count=plan.count + 1,
            to=reached.step,
            sign=step,
            guard=step if self.skip == GUILTY else 0,
            skips=[*plan.skips, *([skips] if since else [])],
            rates=[] if self.then is None else [reached.step, step + _steps(self.then.steps, "steps"), self.then.factor],
            earlier=plan.earlier_than(reached.step),
            told=in_json(told),
            idle=0 if again else idle,
        )
        decision = decide(run, "rollback requested", told["why"], data=told)
        requests.back = GoBack(path, following.to_plain())
        requests.ask_stop(decision)

    def _point_before(self, session: Session, step: int, vain: int | None) -> tuple[str, Counters] | str:
        """Return the checkpoint to go back to, or a text that names the missing one. Every rank must call this.

        `vain` is the step of the checkpoint from which the last rollback did not help, if so.
        """
        latest = step - self._steps_back
        if vain is not None:
            latest = min(latest, vain - 1)
        found = self._checkpoint(session, latest)
        if found is None and vain is not None and self.skip is not None:
            latest = vain
            found = self._checkpoint(session, latest)
        return found or _missing(session, latest)

    def _checkpoint(self, session: Session, step: int) -> tuple[str, Counters] | None:
        """Return the newest good checkpoint with at most `step` steps. Every rank must call this."""
        whole = [saver for saver in session.savers if isinstance(saver, CheckpointWriter) and not saver.weights_only]
        for writer in whole:
            writer.finish()  # a checkpoint that is being written counts, as it does after a kill
        directory = session.directory
        assert directory is not None, "checked in on_setup"
        folders = [str(entry.store.files) for entry in whole]
        whole_epochs = session.cursor.source.obstacle is not None
        look = partial(_newest_good, RecordedRun(directory), folders, step, whole_epochs=whole_epochs)
        found: tuple[str, Counters] | None = session.driver.broadcast(look() if session.driver.is_main else None)
        return found

    # -- leaving out -------------------------------------------------------------------------------

    def _start_step(self, run: Run) -> None:
        self._step, state = run.progress.step + 1, session_of(run).step
        state.guard = max(state.guard, self._plan.in_force(self._step)[0])

    def _leave_out(self, run: Run, batch: Any) -> None:
        session, at = session_of(run), run.progress
        self._statistics.keep()
        here = [at.epoch, session.cursor.source.shard.first_of_round(at.batch_in_epoch)]
        ranges = [first for first, end in self._plan.skips if first <= here < end]
        if ranges:
            session.step.skip()
            told = self._tell(run, "it is among the batches since the checkpoint", at.batch_in_epoch)
            if here in ranges:  # one warning for all
                until = f"and all after it up to step {self._plan.sign}: they are the batches since the checkpoint"
                run.warn(f"left out {told.partition(':')[0]} {until}")

    def _check_batch(self, run: Run, outputs: MutableMapping[str, Any]) -> None:
        session = session_of(run)
        if self._step > self._plan.in_force(self._step)[0] or session.step.skipping:
            return
        loss, weight = float(outputs["loss"].detach()), outputs.get("weight")
        seen = None if weight is not None and float(weight) == 0 else self._watch.seen_in(loss)
        everyone = run.driver.gather(seen) if session.sync.several else [seen]
        if not any(everyone):
            return
        self._statistics.restore()
        session.step.skip(undone=True)
        rank = next(rank for rank, rank_value in enumerate(everyone) if rank_value)
        run.warn(f"left out {self._tell(run, f'{everyone[rank]}', run.progress.batch_in_epoch, rank)}")

    def _before_update(self, run: Run) -> None:
        session = session_of(run)
        guard, rates = self._plan.in_force(self._step)
        if self._step <= guard:
            self._check_gradients(run, session)
        if rates:
            for index, optimizer in enumerate(run.optimizers):
                if any(optimizer is updating for updating in session.step.updating):
                    session.rates.apply(index, optimizer, run.progress.step + 1)

    def _after_update(self, run: Run) -> None:
        self._put_rates_back(run)
        if self._dropped:
            self._dropped = False
            session_of(run).step.undo_update()

    def _put_rates_back(self, run: Run) -> None:
        if self.then is not None:
            for index in range(len(run.optimizers)):
                session_of(run).rates.put_back(index)

    def _check_gradients(self, run: Run, session: Session) -> None:
        """Drop the gradients of the step if one is not finite. They are reduced, so all ranks see the same.

        The scaler of fp16 skips the update in this case, and finds its scale by it: then no batch is to blame.
        """
        if getattr(session.precision, "scaler", None) is not None:
            return
        held = [parameter for parameter in parameters_of(session.step.updating) if parameter.grad is not None]
        finite = all_finite(entry.grad for entry in held if entry.grad is not None)
        if not (session.driver.any_rank(not finite) if session.driver.shards else not finite):
            return
        for parameter in held:
            parameter.grad = None
        self._dropped = True
        done = run.progress.batch_in_epoch
        for number in range(done - session.step.window.seen, done):
            run.warn(f"left out {self._tell(run, 'a gradient of its step is not finite', number)}")

    def _tell(self, run: Run, why: str, number: int, rank: int | None = None) -> str:
        """Record that a batch is left out, and return why."""
        source, epoch = session_of(run).cursor.source, run.progress.epoch
        samples = source.indices(epoch, number)
        own = None if samples is None else [*samples]
        everyone = run.driver.gather(own) if session_of(run).sync.several else [own]
        data = {"epoch": epoch, "batch_in_epoch": number, "rank": rank, "samples": everyone, "why": why}
        told = f"batch {number + 1} of epoch {epoch + 1}: {why}"
        decide(run, "batch left out", told, data=data)
        return told


def _missing(session: Session, latest: int) -> str:
    """Name the checkpoint that is missing, and what to do."""
    if not session.savers:
        return "checkpoint to go back to: add Checkpoint(...) to callbacks"
    if latest < 1:
        return "checkpoint to go back to: the first one is that of step 1. Give a smaller back=, or look at the first batches"
    missing, obstacle = f"checkpoint with finite weights at step {latest} or before", session.cursor.source.obstacle
    if obstacle is not None:
        return f"{missing} that ends an epoch: {obstacle}"
    return f"{missing}: keep more checkpoints, such as Checkpoint('100 steps', keep_last=5)"


def _steps(given: str | int, name: str) -> int:
    return steps_in(given, f"{name} must be a number of steps, such as '100 steps'")


def _newest_good(
    directory: RecordedRun, elsewhere: Iterable[str], step: int, *, whole_epochs: bool = False
) -> tuple[str, Counters] | None:
    """Return the path and the counters of the newest checkpoint with finite weights, and at most `step` complete steps.

    Only the line of the present branch counts; with `whole_epochs`, only checkpoints between two epochs. None: there is none.
    """
    for entry in RunSoFar(directory, [*elsewhere]).catalogue.line():
        if entry.saved.step > step or entry.problem() is not None:
            continue
        loaded = entry.store.read(entry.saved)
        reached = Counters(**loaded.state["progress"])
        if whole_epochs and reached.batch_in_epoch:
            continue
        if all_finite(weight for weight in loaded.model.values() if isinstance(weight, Tensor)):
            return entry.path, reached
    return None


_IDLE = 2  # two bad batches in a row need as many rollbacks to one checkpoint


@dataclass(slots=True)
class Plan:
    """What follows from the rollbacks so far, as plain data for ``run.json`` and checkpoints. Steps are counted from 1."""

    count: int = 0
    """The number of rollbacks."""
    to: int | None = None
    """The step of the checkpoint to which the last one went back."""
    sign: int = 0
    """The step with the sign."""
    guard: int = 0
    """The last step of which each batch is checked before its gradient is added."""
    skips: list[Any] = field(default_factory=list)
    """Ranges of batches that are left out: the first one, and the one after the last, each an epoch and a number in it."""
    rates: list[Any] = field(default_factory=list)
    """The step after which the rates are multiplied, the last such step, and the factor."""
    earlier: list[Any] = field(default_factory=list)
    """`to`, `guard` and `rates` of the rollbacks before, as far as they hold for steps before `to`."""
    told: dict[str, Any] = field(default_factory=dict)
    """The facts of the decision."""
    idle: int = 0
    """How many rollbacks in a row went to one checkpoint from which no step was trained."""
    trained: bool = False
    """Whether a step was trained since the last rollback."""

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the plan of a result of `to_plain`."""
        return cls(**deepcopy(dict(plain)))

    def to_plain(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)

    def in_force(self, step: int) -> tuple[int, list[Any]]:
        """Return `guard` and `rates` of the rollback after which a step was done.

        It is the last rollback, but for a repetition of past steps (`replay_step`), which may begin before it.
        """
        if self.to is None or step > self.to:
            return self.guard, self.rates
        _, guard, rates = next((item for item in reversed(self.earlier) if item[0] < step), (0, 0, []))
        return guard, rates

    def in_vain(self, step: int) -> tuple[bool, int]:
        """Return whether the last rollback did not help against a sign in `step`, and the next value of `idle`.

        It did not if other batches broke the run, or if the weights in the checkpoint are broken already.
        """
        if self.to is None:
            return False, 0
        idle = 0 if self.trained else self.idle + 1
        return step <= self.sign or idle >= _IDLE, idle

    def earlier_than(self, to: int) -> list[Any]:
        """Return `earlier` of a plan that goes back to the step `to`."""
        own = [] if self.to is None else [[self.to, self.guard, self.rates]]
        return [item for item in (*self.earlier, *own) if item[0] < to]
