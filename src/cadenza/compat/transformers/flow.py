"""State shared by the transformers callbacks in a list: event arguments, and the trainer's work around events."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.callbacks.evaluate import Evaluate
from cadenza.compat.adapter.foreign import ForeignCallback, callbacks_of
from cadenza.compat.adapter.requests import evaluate_now
from cadenza.compat.adapter.view import OfRun
from cadenza.compat.transformers.arguments import arguments_of
from cadenza.compat.transformers.arguments_view import ArgumentsView, local_rank
from cadenza.compat.transformers.best import note_best
from cadenza.compat.transformers.events import OWN, POSITION, Events
from cadenza.compat.transformers.fixed_arguments import fixed_arguments_of
from cadenza.compat.transformers.flags import COLLECTIVE, FLAGS, of_other_ranks
from cadenza.compat.transformers.logs import MOST_PENDING, NO_INPUT, SPEEDS, TrainingLogs, as_logs, prefix_of
from cadenza.compat.transformers.saves import Saves
from cadenza.engine.evaluation import Prediction
from cadenza.engine.session import Session
from cadenza.engine.step_state import StepState
from cadenza.errors import AdapterError, nearest
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.listener import Listener, nothing
from cadenza.hooks.moments import Callback, Moment
from cadenza.optim.rates import SetsRates
from cadenza.status.decisions import COMPLETE

if TYPE_CHECKING:
    from cadenza.hooks.fan_out import DispatchState
    from cadenza.loading.evaluation import Evaluation
    from cadenza.records.record import Record
    from cadenza.run import Run


KEY = "transformers"
"""The key of the flow of a run in ``Session.adapters``."""


class Flow(OfRun):
    """The event arguments and the work of transformers' trainer around events: logs, best result, requests.

    One per trainer, opened for each run.
    """

    held: Callable[[], Session | None] = staticmethod(lambda: None)
    args: Any
    state: Any
    control: Any
    keywords: dict[str, Any]
    scene: DispatchState
    rates: Mapping[str, Any]

    def __init__(self) -> None:
        self._members: Sequence[Callable[[], ForeignCallback | None]] = ()
        self.asks: bool = True
        """Whether a callback may set flags of ``control`` in a step."""
        self.may_differ: bool = True
        """Whether a callback may set a flag with a collective effect on only some ranks."""
        self.logs_epochs: bool = False
        """Whether the training is logged at the end of each epoch."""
        self.reads: bool = True
        """Whether a callback may read the flags of evaluations and saves."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Flow, ()  # copies and unpickled objects are empty until a trainer fills them

    @property
    def members(self) -> list[ForeignCallback]:
        """The transformers callbacks in the list. Each references the flow."""
        return [callback for member in self._members if (callback := member()) is not None]

    @members.setter
    def members(self, members: Sequence[ForeignCallback]) -> None:
        self._members = [ref(member) for member in members]

    @property
    def opened(self) -> bool:
        """Whether it was opened for a run."""
        return hasattr(self, "state")

    # -- the arguments of events -----------------------------------------------------------------------------------

    def open(self, run: Run, *, alone: bool = False) -> None:
        """Create the arguments for a run. With `alone`, the run only evaluates, and the state of the last fit is kept."""
        from transformers.trainer_callback import TrainerControl, TrainerState  # from the callbacks' package

        fresh = not (alone and self.opened)
        super().__init__(run)
        self.session.adapters[KEY] = self
        self.step: StepState = self.session.step
        self.scene = self.session.hooks.scene
        self.trained: bool = not alone
        self.ended: bool = False
        self.several: bool = self.may_differ and run.driver.world_size > 1
        self.authors: dict[str, Listener] = {}
        self.scheduled: set[str] = set()
        self.reported: set[str] = set()
        self.evaluating_since: float = 0.0
        self._stops = self._ends_epoch = self._warned = False
        if fresh:
            self.control = TrainerControl()
            world, here = run.driver.rank == 0, local_rank(run) == 0
            exported = [member.callback for member in self.members if exports(member.callback)]
            self.state = TrainerState(
                is_world_process_zero=world, is_local_process_zero=here, stateful_callbacks=[*exported, self.control]
            )
            self.logs: TrainingLogs = TrainingLogs(run)
            self.saves: Saves = Saves(run)
            self.rate: Any = None
        self.args = arguments_of(run)
        self.keywords = keywords_of(run, alone=True)
        self.rates = run.optimizers[0].param_groups[0] if run.optimizers else {"lr": 0.0}
        self.seen: dict[str, Any] = dict(self.control.__dict__)
        self._every = 0
        self._listeners = {id(member): _listener_of(self.session.hooks.name_of(member)) for member in self.members}
        self.session.hooks.fired.update(OWN)  # they are not expected in each run

    def begin(self, run: Run) -> None:
        """Start the training, after a checkpoint is restored."""
        state, args, progress = self.state, self.args, run.progress
        self.keywords.update(keywords_of(run))
        self.rates = run.optimizers[0].param_groups[0]
        self.rate = self.rates["lr"]
        accumulate = run.info.accumulate
        steps = progress.total("step", accumulate) or progress.at_most("step", accumulate) or sys.maxsize
        state.compute_steps(args, steps)
        state.max_steps = self._last_step = steps
        state.num_train_epochs = progress.begun("epoch", accumulate) or progress.max_epochs or sys.maxsize
        state.train_batch_size = getattr(run.loader, "batch_size", None)
        state.global_step = progress.step
        state.epoch = state.epoch or 0  # None before the training with transformers 4
        self.control.should_training_stop = False
        self.seen = dict(self.control.__dict__)
        self.logs.begin(run)
        self._begin_logging(args)
        if not self.logs.by_batch:
            self.session.hooks.remove(Callback.on_batch_end, self.count_tokens)
        if any("on_save" in member.overridden() for member in self.members):
            self.saves.wait()
        self.session.metrics.readers.append(self.read)

    def _begin_logging(self, args: Any) -> None:
        classes = {base.__name__ for member in self.members for base in type(member.callback).__mro__}
        default = "DefaultFlowCallback" in classes
        strategy = "no" if default else str(getattr(args.logging_strategy, "value", args.logging_strategy))
        self._every = self.state.logging_steps if strategy == "steps" else 0
        self._first = not default and bool(args.logging_first_step)
        self.logs_epochs = strategy == "epoch"

    def begin_epoch(self, run: Run) -> None:
        """Reset the state of an epoch."""
        self.rate = self.rates["lr"]
        self.control.should_epoch_stop = self._ends_epoch = False
        self.seen = dict(self.control.__dict__)

    def count_tokens(self, run: Run, *_: Any) -> None:
        """Count the tokens of a batch for ``total_flos`` if a step has multiple batches."""
        logs = self.logs
        try:
            logs.shapes[self.step.batch[logs.main_input].shape] += 1
        except NO_INPUT:
            logs.main_input = None

    def end_step(self, run: Run) -> None:
        """Count the step and store its loss. Runs in each step, so it makes no calls."""
        if self.scene.unwinding is not None:
            return
        state, logs = self.state, self.logs
        epoch, step, batch, batches = POSITION(run.progress)
        state.global_step = step
        state.epoch = epoch + batch / (batches or state.max_steps * self.step.last_window.size)
        window = self.step.last_window
        logs.losses += ((window.losses, window.weights),)
        if logs.main_input is not None and not logs.by_batch:  # as in `count_tokens`, without a call
            try:
                logs.shapes[self.step.batch[logs.main_input].shape] += 1
            except NO_INPUT:
                logs.main_input = None
        if step % MOST_PENDING == 0:
            logs.add_up()
        if (self._every and step % self._every == 0) or (self._first and step == 1):
            self.control.should_log = True
        if step >= state.max_steps:
            self.control.should_training_stop = True
        if self.reads:
            self.show_scheduled(Callback.on_step_end)

    def goes_on(self) -> bool:
        """Return whether the run ends without an error or a signal."""
        outcome = self.session.outcome
        return self.scene.unwinding is None and (outcome is None or outcome.kind in COMPLETE)

    # -- flags -----------------------------------------------------------------------------------------------------

    def show_scheduled(self, moment: Moment) -> None:
        """Set the flags of work due by native schedules after the callbacks of this hook, like ``DefaultFlowCallback``."""
        hooks, progress = self.session.hooks, self.run.progress
        at_end = progress.step >= self.state.max_steps  # a run ends with a checkpoint
        flags = {Evaluate: "should_evaluate", Checkpoint: "should_save"}
        for listener in hooks.by_moment.get(moment, ()):
            flag = next((flag for kind, flag in flags.items() if isinstance(hooks.callbacks[listener.owner], kind)), None)
            if flag is None or listener.trigger is None or listener.disabled or getattr(self.control, flag):
                continue
            if hooks.is_due(listener) or (at_end and flag == "should_save"):
                self.scheduled.add(flag)
                setattr(self.control, flag, True)
        self.seen = dict(self.control.__dict__)

    def note_flags(self, adapter: ForeignCallback) -> None:
        """Record the callback that set a flag. Warn about an unknown attribute with a name close to a flag's."""
        now, author = dict(self.control.__dict__), self._listeners[id(adapter)]
        for flag in FLAGS:
            if now[flag] and not self.seen.get(flag):
                self.authors[flag] = author
        if any(not now[flag] for flag in self.scheduled) and not self._warned:
            self._warned = True
            self.run.warn(
                f"{author.owner} resets a flag of control at step {self.state.global_step}, where a schedule is due. "
                "This has no effect: schedules hold. Give Evaluate or Checkpoint another every="
            )
        for name in now.keys() - self.seen.keys():
            if meant := nearest(name, FLAGS):
                self.run.warn(f"{author.owner} sets control.{name}, which has no effect.{meant}")
        self.seen = now

    def replace_control(self, adapter: ForeignCallback, control: Any) -> None:
        """Accept the control returned by an event.

        Raises:
            AdapterError: It is not a control.
        """
        if not all(hasattr(control, flag) for flag in FLAGS):
            who = self._listeners[id(adapter)].owner
            raise AdapterError(f"{who} returned {control!r} from an event; expected control or None. Return control.")
        self.control = control

    def agree(self) -> None:
        """Set the flags that need all ranks as soon as one rank has set them. Every rank must call this."""
        if self.trained and self.session.sync.together:
            own = [flag for flag in COLLECTIVE if getattr(self.control, flag) and flag not in self.scheduled]
            authors = {flag: author.owner for flag, author in self.authors.items()}
            for flag, author in of_other_ranks(self.session.driver, own, authors).items():
                setattr(self.control, flag, True)
                self.scheduled.discard(flag)
                self.authors[flag] = _listener_of(author)

    def carry_out(self) -> None:
        """Turn the set flags into requests. Called again if a signal interrupts the evaluation."""
        run, control = self.run, self.control
        if control.should_log:
            self.log_training()
        if control.should_evaluate and "should_evaluate" not in self.scheduled:
            self._as_author("should_evaluate", lambda: self._evaluate(run))
            control.should_evaluate = False
        if control.should_save and "should_save" not in self.scheduled:
            self._as_author("should_save", lambda: run.save("control.should_save is set"))
        self._end_early()
        self.session.acts.after_step(self._reset_flags)

    def _end_early(self) -> None:
        """Turn a flag that ends the epoch or the run into a request."""
        run, control = self.run, self.control
        if control.should_epoch_stop and not self._ends_epoch:
            self._ends_epoch = True
            self._as_author("should_epoch_stop", lambda: run.end_epoch("control.should_epoch_stop is set"))
        if control.should_training_stop and not self._stops and self.state.global_step < self._last_step:
            self._stops = True
            self._as_author("should_training_stop", lambda: run.stop("control.should_training_stop is set"))

    def _evaluate(self, run: Run) -> None:
        if not evaluate_now(run):
            who = self.session.hooks.current_owner()
            raise AdapterError(
                f"{who} sets control.should_evaluate, but the list has no Evaluate(...). Add one, or an eval_dataset."
            )

    def _reset_flags(self) -> None:
        control = self.control
        control.should_log = control.should_evaluate = control.should_save = False
        self.scheduled.clear()
        self.seen = dict(control.__dict__)

    def _done(self, flag: str) -> None:
        """Reset the flag of a completed request, before the event that reports it."""
        setattr(self.control, flag, False)
        self.scheduled.discard(flag)
        self.seen[flag] = False

    def _as_author(self, flag: str, act: Any) -> None:
        """Make the callback that set a flag the author of the decisions in `act`."""
        author = self.authors.pop(flag, None)
        scene, outer = self.scene, self.scene.listener
        if author is not None:
            scene.listener = author
        try:
            act()
        finally:
            scene.listener = outer

    # -- logs ------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, Any]) -> None:
        """Add values to ``log_history``, and call ``on_log``."""
        state = self.state
        logs["epoch"] = state.epoch
        if str(getattr(self.args, "include_num_input_tokens_seen", "no")) != "no":
            logs["num_input_tokens_seen"] = state.num_input_tokens_seen = self.run.progress.tokens
        state.log_history.append({**logs, "step": state.global_step})
        self._done("should_log")
        self.session.hooks.fire(Events.on_logs, self.run, logs)

    def log_training(self) -> None:
        """Log the mean loss since the last log, the gradient norm if known, and the learning rate."""
        state, logs = self.state, self.logs
        if self.trained and state.global_step > logs.logged_at:
            values = logs.take(state.global_step)
            if (norm := gradient_norm(self.run)) is not None:
                values["grad_norm"] = norm
            values["learning_rate"] = float(self.rate)
            state.total_flos = logs.flos(state.total_flos)
            self.log(values)

    def read(self, run: Run, record: Record) -> None:
        """Pass a native record to ``on_log``, without values that the callbacks have already received."""
        given = set(self.reported)
        made = not isinstance(self.args, ArgumentsView)  # set by TrainingArguments, which determine when the training is logged
        if made or record.at.step == self.logs.logged_at:
            given |= {name for name in record.values if name in self.logs.names or name.startswith("train/lr/")}
        if made:
            given |= SPEEDS
        logs = as_logs(record.values, given)
        if logs and not self.ended:
            state, now = self.state, self.state.global_step
            state.global_step = record.at.step  # a record with numbers from a device comes later
            try:
                self.log(logs)
            finally:
                state.global_step = now
        self.reported -= record.values.keys()

    # -- evaluations -----------------------------------------------------------------------------------------------

    def end_evaluation(self, evaluation: Evaluation) -> None:
        """Log the results under transformers' names, call ``on_evaluate``, and record the best result."""
        run, hooks = self.run, self.session.hooks
        prefix = prefix_of(evaluation, run.evaluations.keys())
        metrics: dict[str, Any] = {f"{prefix}_{_rest(name)}": value for name, value in evaluation.results.items()}
        samples, began = _samples_of(evaluation.loader), self.evaluating_since
        batches = evaluation.batches or evaluation.batch
        metrics.update(_speed(prefix, began, num_samples=samples, num_steps=batches))
        if isinstance(evaluation, Prediction):
            hooks.fire(Events.on_predicted, run, metrics)
            return
        self.reported |= evaluation.results.keys()
        self.log(metrics)
        self._done("should_evaluate")
        hooks.fire(Events.on_evaluated, run, metrics)
        if self.trained:
            note_best(self.state, self.args, metrics, prefix, run.evaluations.keys())

    # -- saves and the end -----------------------------------------------------------------------------------------

    def save(self, run: Run, _: Any) -> None:
        """Prepare the state for a checkpoint, and ``on_save`` after it is written."""
        states = self.state.stateful_callbacks
        exported = [member.callback for member in self.members if exports(member.callback)]
        states.update({callback.__class__.__name__: callback.state() for callback in exported})
        states["TrainerControl"] = self.control.state()
        if self.goes_on() and self.session.sync.together:
            self.logs.average()
            self.state.total_flos = self.logs.flos(self.state.total_flos)
        if self.goes_on():
            self.saves.pending = self.state.global_step
            self.session.acts.after_step(self._after_save)

    def _after_save(self) -> None:
        """Call ``on_save``.

        As in transformers, a stop requested in it takes effect at this step, and its other flags are ignored.

        Every rank must call this.
        """
        self.saved()
        if not self.session.cursor.in_epoch:
            self.control.should_epoch_stop = False  # this epoch is over
        self._end_early()
        self._reset_flags()
        sync = self.session.sync
        if sync.together and self.session.driver.any_rank(sync.requests.leave):
            sync.take_requests()

    def saved(self) -> None:
        """Call ``on_save`` if the checkpoint is written."""
        wanted = any("on_save" in member.overridden() for member in self.members)
        if self.saves.written(getattr(self.args, "output_dir", None) if wanted else None, self.state):
            self._done("should_save")
            self.session.hooks.fire(Events.on_saved, self.run)

    def end(self) -> None:
        """Log the summary of the training, and call ``on_train_end``."""
        run, state, logs = self.run, self.state, self.logs
        self.saved()
        self.saves.note_best(state)
        progress, steps = run.progress, state.global_step - run.progress.origin.step
        samples = progress.samples - progress.origin.samples
        metrics = _speed("train", time.time() - progress.elapsed_s, num_samples=samples, num_steps=steps)
        state.total_flos = metrics["total_flos"] = logs.flos(state.total_flos)
        metrics["train_loss"] = logs.mean_of_all(state.global_step)  # for the whole run, including before a resume
        self.log(metrics)
        self.session.hooks.fire(Events.on_trained, run)
        self.ended = True

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            "state": self.saves.within(dataclasses.asdict(self.state)),
            "control": self.control.state()["args"],
            "logs": self.logs.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of `state_dict`."""
        here = ("is_world_process_zero", "is_local_process_zero")
        for name, value in self.saves.placed(state["state"]).items():
            if hasattr(self.state, name) and name not in here:
                setattr(self.state, name, value)
        for name, value in state["control"].items():
            setattr(self.control, name, value)
        self.seen = dict(self.control.__dict__)
        self.logs.load_state_dict(state["logs"])


def exports(callback: object) -> bool:
    """Return whether a callback is an ``ExportableState``, which defines its state in checkpoints."""
    return any(base.__name__ == "ExportableState" for base in type(callback).__mro__)


def _listener_of(owner: str) -> Listener:
    listener = Listener(Callback.on_step_end, nothing)
    listener.begin(owner)
    return listener


def _rest(name: str) -> str:
    return name.partition("/")[2].replace("/", "_")


def _samples_of(loader: Any) -> int | None:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError):
        return None


def _speed(split: str, began: float, *, num_samples: int | None, num_steps: int) -> dict[str, Any]:
    from transformers import trainer_utils

    own: Any = trainer_utils.speed_metrics
    return dict(own(split, began, num_samples=num_samples, num_steps=num_steps))


def keywords_of(run: Run, *, alone: bool = False) -> dict[str, Any]:
    """Return the keyword arguments of each event. With `alone`, nothing is trained yet."""
    keywords = {
        "model": run.model,
        "processing_class": _processing_class(run),
        "optimizer": None,
        "lr_scheduler": None,
        "train_dataloader": None,
        "eval_dataloader": None,
    }
    if alone:
        return keywords
    optimizer = run.optimizers[0]
    callbacks = hooks_of(run).callbacks.values()
    schedulers = [setter for setter in callbacks if isinstance(setter, SetsRates) and setter.drives(optimizer)]
    keywords.update(
        optimizer=optimizer,
        lr_scheduler=getattr(schedulers[0], "scheduler", None) if schedulers else None,
        train_dataloader=run.loader,
    )
    return keywords


def gradient_norm(run: Run) -> float | None:
    """Return the norm of the gradients in the last step before they were clipped; None if no `ClipGradients` knows it."""
    norms = [clip.norm for clip in callbacks_of(run, ClipGradients) if clip.norm is not None]
    return float(norms[0]) if norms else None


def _processing_class(run: Run) -> Any:
    given = fixed_arguments_of(run)
    own = None if given is None else given.processing_class
    return getattr(getattr(run.loader, "collate_fn", None), "tokenizer", None) if own is None else own
