"""The live run: the small, read-only face of a training run that every hook receives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Concatenate, NoReturn, ParamSpec

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.engine.module_state import ModuleFlags
from cadenza.engine.plan import why_not
from cadenza.engine.session import Session, Verbs
from cadenza.hooks.dispatch import Closer, Fault
from cadenza.loading.evaluation import Evaluation
from cadenza.optim.parameters import parameters_of
from cadenza.profiling.spans import Timings
from cadenza.records.history import History
from cadenza.records.record import Loggable
from cadenza.records.scalars import Reduce
from cadenza.status.decisions import Decision, Outcome, WhyNot, why
from cadenza.status.encoding import State
from cadenza.status.formats import counted
from cadenza.status.outputs import Outputs, Window
from cadenza.status.progress import Progress
from cadenza.status.run_info import RunInfo
from cadenza.text.hints import advised, instead_of_setting

P = ParamSpec("P")


@advised("run")
class Run:
    """One execution, as hooks see it. Hooks read it, and change its course by verbs: `stop`, `end_epoch`, `skip_batch`, `log`.

    Assigning to an attribute is an error. Reading one never communicates with other ranks, never waits for the device and
    never records a decision, so a debugger may look at all of them on one rank.
    """

    __slots__ = {
        "__weakref__": None,
        "_session": None,
        "decisions": "Every stop, skip, save, evaluation and disabled callback, in order.",
        "device": "The device of this rank's tensors.",
        "driver": "How tensors and processes are run.",
        "evaluations": "The evaluations of this run, by name.",
        "faults": "The errors of callbacks that were disabled for them.",
        "is_main": "Whether this rank prints and writes.",
        "optimizers": "The optimizers.",
        "progress": "The counters of completed work, with the limits.",
        "state": "Your own values: saved in checkpoints and restored.",
    }

    decisions: list[Decision]
    device: torch.device
    driver: Driver
    evaluations: dict[str, Evaluation]
    faults: list[Fault]
    is_main: bool
    optimizers: Sequence[Optimizer]
    progress: Progress
    state: State
    _session: Session

    def __init__(self, session: Session) -> None:
        put = partial(object.__setattr__, self)
        put("_session", session)
        put("device", session.driver.device)
        put("is_main", session.driver.is_main)
        for name in ("decisions", "driver", "evaluations", "faults", "optimizers", "progress", "state"):
            put(name, getattr(session, name))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(instead_of_setting(name, dir(self)), name=name, obj=self)

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(instead_of_setting(name, dir(self)), name=name, obj=self)

    @property
    def model(self) -> nn.Module:
        """Your own module, with every driver."""
        return self._session.module

    @property
    def loader(self) -> Iterable[Any]:
        """The training loader."""
        return self._session.loader

    @property
    def batch(self) -> Any:
        """The current batch, on the device; None before the first."""
        return self._session.step.batch

    @property
    def outputs(self) -> Outputs:
        """The outputs of the current batch: the same object until the next batch starts."""
        return self._session.step.outputs

    @property
    def loss(self) -> Tensor | None:
        """The mean loss of the last step's batches on this rank, undivided, shape (), on the device; None before the first.

        It is NaN if the weights of all these batches are 0. Reading it does not wait for the device; converting it to a number
        does.
        """
        return self._session.step.last_window.mean_loss()

    @property
    def window(self) -> Window:
        """The batches of the current step, or of the last one, and what its update changes."""
        step = self._session.step
        window = step.shown
        return Window(window.seen, window.size, tuple(window.weights), window.loss_scale, tuple(step.updating))

    @property
    def history(self) -> History:
        """The numbers of every record."""
        return self._session.metrics.history

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None while it goes on."""
        return self._session.outcome

    @property
    def profile(self) -> Timings | None:
        """How long each part took; None without `Profile`."""
        return self._session.hooks.timings

    @property
    def info(self) -> RunInfo:
        """Id, directory and arguments of the run: what trackers are given.

        The id is the same when the run continues, and empty without a directory.
        """
        session, files, step = self._session, self._session.files, self.progress.step
        continued, samples = files is not None and files.previous is not None, session.cursor.course.samples
        about = session.directory, session.arguments, step, continued, session.home, session.accumulate
        return RunInfo(files.run_id if files else "", *about, samples, step + 1)

    def __repr__(self) -> str:
        return f"<Run: {self.progress}; {self.outcome or 'no outcome yet'}>"

    def _repr_html_(self) -> str:
        """Return what notebooks show of the run: without the wing of reports, one line."""
        from cadenza.status.markup import element  # imported here: few runs are in a notebook

        if find_spec("cadenza.report") is None:
            return str(element("pre", repr(self)))
        shown: str = import_module("cadenza.report.inline_view").small(self)
        return shown

    # -- verbs: requests with a reason, carried out at a fixed moment ------------------------------

    def stop(self, reason: str, *, data: Mapping[str, Any] | None = None) -> None:
        """Request the end of the run at the end of the current step; the first request counts. One rank is enough for all.

        `data` are plain values for the decision, for code to read. A request of some ranks only takes effect a step later.
        """
        session = self._session
        session.sync.requests.ask_stop(session.decide("stopped", reason, data=data))

    def end_epoch(self, reason: str) -> None:
        """Request the end of the epoch at the end of the current step, as `stop` does of the run. It counts as whole."""
        session = self._session
        session.sync.requests.ask_end_epoch(session.decide("epoch ended", reason))

    def skip_batch(self, reason: str) -> None:
        """Drop the gradient of the current batch; one rank is enough for all.

        Raises:
            RuntimeError: It is called outside of ``on_batch_start`` and ``on_before_backward``: it would come too late.
        """
        session = self._session
        if not session.step.may_skip:
            raise RuntimeError("run.skip_batch(...) must be called in on_batch_start or on_before_backward; later is too late.")
        here = session.hooks.here().listener
        if here is not None and here.silent and session.sync.several:
            raise RuntimeError(f"a listener of {here.owner} is silent, so other ranks expect no skip. Remove silent=True.")
        session.decide("batch skipped", reason)
        session.step.skip()

    def save(self, reason: str) -> None:
        """Request a checkpoint at the end of the current step, after all hooks.

        A request of one rank suffices. All ranks save at the same step: this one if all ranks requested or logged something in
        it, otherwise the next.

        Raises:
            RuntimeError: No callback writes checkpoints.
        """
        session = self._session
        if not session.savers:
            raise RuntimeError("run.save(...) needs a callback that writes checkpoints. Add Checkpoint(...) to callbacks.")
        session.sync.requests.ask_save(reason)
        if not session.sync.several:  # multiple ranks exchange the request first, so that all save in the same order
            # A save that fails is no fault of the callback that requests it.
            session.acts.next.append(Closer(None, partial(session.sync.save, session.savers)))

    def block_saves(self, reason: str = "") -> AbstractContextManager[None]:
        """Return a context in which no checkpoint is written: its state would be incomplete. A save waits until it is left.

        Then the save follows at the end of the step. Contexts may be nested, and may stay open over several moments. A context
        on one rank holds for all. If an error ends the run inside, or the run ends inside, no checkpoint is written, and a
        decision says so: the run continues at the checkpoint before.

        Args:
            reason: Why, for decisions and messages.

        >>> from cadenza import Callback
        >>> from cadenza.testing import tiny_run
        >>> class Swap(Callback):
        ...     def on_step_end(self, run):
        ...         with run.block_saves("the weights are swapped"):
        ...             run.model.eval()
        >>> tiny_run(callbacks=[Swap()]).outcome.kind
        'finished'
        """
        session = self._session
        return session.blocks.block(session.hooks.current_owner() or "the script", reason, self.progress.step)

    def log(
        self,
        name: str | Mapping[str, Loggable],
        value: Loggable | None = None,
        *,
        reduce: Reduce | None = None,
        weight: float | Tensor | None = None,
    ) -> None:
        """Add a value, or a mapping of values, to this step's record; numbers become means over the ranks that log them.

        Args:
            name: Such as ``"train/lr"``.
            value: A number, a tensor of shape () (all of them leave the device together, without a wait), or an `Image`,
                `Audio`, `Figure`, `Histogram` or `Text`.
            reduce: What a number becomes that is logged several times in a step, and by multiple ranks: the ``"mean"``,
                ``"sum"``, ``"max"`` or ``"min"`` of all these values, or the ``"last"`` value of the step on the first rank
                that logs one. NaN among the values gives NaN. None: the last value of the step on each rank, and the mean of
                these over the ranks. A name has one of them in a run.
            weight: How much the value counts in a mean, such as its number of tokens: at least 0, a number or a tensor of
                shape (). A value of weight 0 is ignored; if all weights are 0, the mean is NaN.

        Raises:
            TypeError: The value is none of these.
            ValueError: `reduce` is unknown, or another one than before for this name; `weight` is negative, or without
                ``reduce="mean"``.

        >>> from cadenza import Callback, on
        >>> from cadenza.testing import tiny_run
        >>> @on(Callback.on_batch_end)
        ... def count(run, batch, outputs):
        ...     run.log({"seen": len(batch[0])}, reduce="sum")
        >>> tiny_run(accumulate=2, batches=5, callbacks=[count]).history["seen"]
        [(1, 4), (2, 4), (3, 2)]
        """
        buffer = self._session.metrics.buffer
        for key, item in name.items() if type(name) is dict or isinstance(name, Mapping) else ((name, value),):
            if reduce is not None:
                buffer.add_reduced(key, item, reduce, weight)
            elif weight is not None:
                raise ValueError(f"weight= is for reduce='mean'; got it for {key!r} without reduce=")
            else:
                buffer.add(key, item)

    def fire(self, moment: Callable[Concatenate[Any, Run, P], None], *arguments: P.args, **keywords: P.kwargs) -> None:
        """Call a moment of your own, such as ``PruneMoments.on_prune``, on all its listeners. Every rank should call this.

        Raises:
            MomentError: `moment` is not declared in a class with ``declares=True``, or the arguments do not fit it.
        """
        self._session.hooks.fire(moment, self, *arguments, **keywords)

    def why(self, what: str) -> str:
        """Return in a sentence why something, such as ``"stopped"``, was decided last.

        >>> from cadenza.testing import tiny_run
        >>> tiny_run(steps=1).why("stopped")
        "nothing was 'stopped' in this run. Decided were: nothing"
        """
        return why(what, self.decisions)

    def why_not(self, what: str) -> WhyNot:
        """Return what did not happen, and what it waits for: schedules, requests, monitors, disabled callbacks.

        Args:
            what: A decision such as ``"saved"``, ``"stopped"`` or ``"evaluated"``; ``"logged eval/acc"``; the name of a
                callback; or a moment such as ``"on_eval_end"``.

        Raises:
            ValueError: `what` is none of these. The message lists the names of this run.

        >>> from cadenza.callbacks import EarlyStopping, Evaluate
        >>> from cadenza.testing import tiny_loader, tiny_run
        >>> stop = EarlyStopping("eval/loss", "min", patience=3)
        >>> run = tiny_run(callbacks=[Evaluate(tiny_loader()), stop])
        >>> run.why_not("stopped").reasons[2]
        "EarlyStopping: 0 of 3 evaluations without gain over 'eval/loss' = 0.460937"
        """
        return why_not(self._session, what)

    def print(self, *values: object) -> None:
        """Show the values on one line, on the main process only; each rank writes the line to its own ``console.log``."""
        self._session.print(" ".join(map(str, values)))

    def warn(self, text: str) -> None:
        """Show a warning on stderr through ``logging``, and write it to ``console.log``; other ranks only do the latter."""
        self._session.warn(text)

    def at_end(self, close: Callable[[], object]) -> None:
        """Call `close` after the last record, after ``on_fit_end``: the moment to close files and connections.

        Call it inside a hook. An error in `close` is the callback's own, and ``on_fault`` says what it does.

        Raises:
            RuntimeError: It is called outside of a hook.
        """
        listener = self._session.hooks.here().listener
        if listener is None:
            raise RuntimeError(
                "run.at_end(...) must be called inside a hook, such as on_fit_start, so that an error in it can be attributed "
                "to a callback."
            )
        self._session.acts.closers.append(Closer(listener, close))

    def after_step(self, act: Callable[[], object]) -> None:
        """Call `act` when the current step is complete, after all hooks and its record."""
        self._session.acts.after_step(act)

    def replace_model(self, model: nn.Module) -> None:
        """Train another module, in ``on_setup`` only; the driver prepares it. It must hold the parameters of the optimizers.

        Every rank must call this.

        Raises:
            RuntimeError: The run has left ``on_setup``.
            ValueError: An optimizer holds a parameter of the present model that `model` does not have.
        """
        session = self._session
        self._check_in_setup("replace_model")
        if self.driver.world_size > 1:
            raise RuntimeError(
                "run.replace_model(...) works in one process only. Change the model before Trainer(...) gets it."
            )
        held = {id(parameter) for parameter in parameters_of(self.optimizers)}
        lost = {id(parameter): name for name, parameter in self.model.named_parameters() if id(parameter) in held}
        for parameter in model.parameters():
            lost.pop(id(parameter), None)
        if lost:
            raise ValueError(
                f"run.replace_model(...): the optimizers hold {counted(len(lost), 'parameter')} of the present model "
                "that the new one "
                f"does not have: {', '.join([*lost.values()][:5])}. Keep the parameters, or give the new model to Trainer(...)."
            )
        session.model = self.driver.prepare(model)
        session.module_flags = ModuleFlags(session.module, session.optimizers)

    def replace_loader(self, loader: Iterable[Any]) -> None:
        """Train on another loader, in ``on_setup`` only. Every rank must call this.

        Raises:
            RuntimeError: The run has left ``on_setup``.
        """
        self._check_in_setup("replace_loader")
        self._session.loader = loader

    def _check_in_setup(self, verb: str) -> None:
        if hasattr(self._session.cursor, "source"):
            raise RuntimeError(f"run.{verb}(...) must be called in on_setup: later the loader and the model are in use.")

    # -- for a step_fn: the same moments as in the loop --------------------------------------------

    def backward(self, loss: Tensor, *, into: Optimizer | Sequence[Optimizer] | None = None) -> None:
        """Add the gradients of `loss`, with the moments around it. For a ``step_fn``. Every rank must call this.

        Every parameter that took part gets its gradient, also parameters of an optimizer that is not updated next: `into`
        excludes them. A warning names the first update that takes gradients from before and after another optimizer's update.

        Args:
            loss: Shape (); a callback may replace it.
            into: The optimizers of the parameters that get gradients, as ``inputs=`` of torch. None: all parameters.

        Raises:
            LossError: `loss` is not a tensor of shape () that has a gradient.
        """
        self._verbs.backward(loss, into)

    def update(self, *optimizers: Optimizer | Callable[[], Any]) -> Any:
        """Update the weights with `optimizers` (none: all), drop the gradients. For a ``step_fn``, on every rank.

        ``run.update(optimizer, closure)`` passes a closure, as LBFGS needs it, and returns what ``optimizer.step(closure)``
        returns. Loss and gradients of each call of the closure are averaged over the ranks. Moments before the update see no
        gradients, so `ClipGradients` does not clip them.

        Raises:
            LossError: There are gradients of ``loss.backward()``, which the run has not seen.
        """
        return self._verbs.update(optimizers)

    @property
    def _verbs(self) -> Verbs:
        if self._session.verbs is None:
            raise RuntimeError("run.backward(...) and run.update(...) must be called in a step_fn, or in a loop of your own.")
        return self._session.verbs
