"""The trainer: the checked arguments of a run. One trainer can start several runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, Self, TypeVar

import torch
from torch import nn

from cadenza.checkpoint.catalogue import Which
from cadenza.checkpoint.resumption import beginning
from cadenza.checkpoint.weights import Choice
from cadenza.drivers import Driver, driver_of
from cadenza.engine import arguments as checks
from cadenza.engine import evaluation as evaluating
from cadenza.engine.arguments import Accumulate
from cadenza.engine.dry_run import Beginning, Calendar, calendar_of
from cadenza.engine.evaluation import Prediction, predict
from cadenza.engine.loop import Training, fit
from cadenza.engine.module_state import Compile, options_of
from cadenza.engine.monitor import check_monitors
from cadenza.engine.objective import ModelsOwnLoss, no_loss
from cadenza.engine.plan import Plan
from cadenza.engine.session import Loops, Session
from cadenza.engine.start_checks import run_directory
from cadenza.engine.training_log import with_epoch_means
from cadenza.files.new_directory import NewDirectory
from cadenza.hooks.dispatch import Hooks
from cadenza.lazy import imported
from cadenza.loading.batches import batch_sizes
from cadenza.loading.evaluation import Evaluation, Metrics
from cadenza.loops.foreign_callbacks import AnyCallback, adapted, before_trainer
from cadenza.loops.handle import Handle
from cadenza.loops.run_segment import RunSegment, TrainerArguments, collect, external_folders
from cadenza.loops.steps import Steps
from cadenza.optim.optimizers import Optimizers, made
from cadenza.optim.parameters import ModelParameters
from cadenza.optim.rates import check_one_each
from cadenza.run import Run
from cadenza.text.hints import advised, answered

T = TypeVar("T")


@advised("trainer-attributes", refused="should_stop stop_training terminate")
class Trainer(TrainerArguments):
    """Train a model.

    Args:
        model: An ``nn.Module``, or a function without arguments that makes one: it is called now, under the seed.
        optimizer: An optimizer, a list of them, or a function that builds them from the list of the model's parameters. Its
            ``parameters.split(lambda name, parameter: ...)`` returns those that fit and the others, for two groups. Cadenza
            builds the optimizers of a function fused where that is faster, unless the function sets ``fused`` or ``foreach``.
        loader: An iterable of batches. Each epoch reads it once.
        compute_loss: ``compute_loss(model, batch)`` returns the loss, shape (), or a mapping with ``loss`` and, for weighted
            means, ``weight``; ``samples`` and ``tokens``, whole numbers on the host, are added to these counters. See
            `supervised` for ``(inputs, targets)``. None: the model returns its loss.
        max_epochs: End after this many epochs.
        max_steps: End after this many updates; with several limits, whichever comes first.
        max_tokens: End after the update with which this many tokens, over all ranks, are reached.
        tokens: ``tokens(batch)`` returns the number of tokens of a batch, if `compute_loss` does not. It is called with the
            batch as the loader yields it, before it is on the device.
        accumulate: Batches per update: a number, or numbers by points of the run, such as ``{0: 1, "2000 steps": 4}``. A point
            is a number of steps, or a text in steps, batches, epochs, samples, tokens or ``"50%"`` of the limit to
            which the run is nearest. A change holds from the next step on.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``.
        seed: Seeds every generator when a run starts. With None the generators keep their state, and ``torch.manual_seed``
            fixes the order of the data: unless the loader is a list, one number is drawn from torch's global generator. The
            weights of a model that exists before the trainer are not covered: give a function that makes it, or call
            ``torch.manual_seed`` before.
        directory: The local directory of the run, relative to the current working directory, or a `new_directory`. None
            writes nothing.
        callbacks: Called in this order; see `Callback` and `on`. Those of Hugging Face, Lightning and Keras may be in it.
            Without a `LogTraining` or one of those, the mean loss of each epoch is logged as ``train/loss``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"``, or a ``torch.device``. None takes the best device that exists.
            A model that has parts on several devices is not moved.
        driver: ``"auto"``, ``"single"``, ``"ddp"``, ``"fsdp"``, or a `Driver`: how tensors and processes are run.
        progress: Show a progress bar on stderr, or plain lines without a terminal. A callback such as `Console` replaces it.
        step_fn: Instead of `compute_loss`: ``step_fn(run, batch)`` does the whole step with ``run.backward`` and
            ``run.update``, and returns the loss to report, or a mapping with it.
        compile: Compile the model, in place, for training and evaluation: True, a mode such as ``"reduce-overhead"`` (CUDA
            graphs), or a dict of arguments of ``torch.compile``. With ``"regions": [Block]`` in it, only these modules, each
            alone. Graph breaks are reported after the first step. ``"step"`` compiles the whole step, with the update, instead.
        debug_ranks: Compare each collective over the ranks before it runs, and name in an error, within 10 seconds, the ranks
            that call another one or none; and in a warning one that is slow. A number gives the seconds. Steps get slower.

    Raises:
        ValueError, TypeError: An argument is wrong; the message says what was expected.
        CallbackError, OrderError: An element of `callbacks` is not a callback, or their orders contradict each other.

    >>> from cadenza import supervised
    >>> model, batches = nn.Linear(1, 1), [(torch.ones(2, 1), torch.ones(2, 1))]
    >>> Trainer(model, torch.optim.SGD(model.parameters(), 0.1), batches, supervised(nn.MSELoss()), max_steps=1).fit().outcome
    Outcome(kind='finished', reason='the limit is reached')
    """

    _handle: Handle | None = None  # of its last run in the background

    @answered("trainer")
    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: Optimizers,
        loader: Iterable[Any],
        compute_loss: Callable[[nn.Module, Any], Any] | None = None,
        *,
        max_epochs: int | None = None,
        max_steps: int | None = None,
        max_tokens: int | None = None,
        tokens: Callable[[Any], int] | None = None,
        accumulate: Accumulate = 1,
        precision: str = "fp32",
        seed: int | None = None,
        directory: str | PathLike[str] | NewDirectory | None = None,
        callbacks: Iterable[AnyCallback] = (),
        device: str | torch.device | None = None,
        driver: str | Driver = "auto",
        progress: bool = True,
        step_fn: Callable[[Run, Any], Any] | None = None,
        compile: Compile = False,
        debug_ranks: bool | float = False,
    ) -> None:
        checks.check_recipe(precision, seed, device)
        notes = [*checks.unseeded(model, seed)]
        module = checks.made_model(model, seed)
        checks.check_parts(module, optimizer, loader, compute_loss, step_fn)
        ends_itself = not getattr(loader, "has_epochs", True)  # the data of cadenza.attach
        limits = checks.checked_lengths(
            ends_itself=ends_itself, max_epochs=max_epochs, max_steps=max_steps, max_tokens=max_tokens
        )
        given = with_epoch_means(checks.listed(adapted(callbacks), directory), loader)
        if directory is not None and os.environ.get("CADENZA_STEERING") in ("1", "true"):
            imported("cadenza.steering.steering", needed_by="CADENZA_STEERING=1").add_steering(given)
        if progress:
            from cadenza.sinks.progress_bar import add_progress_bar  # imported here: a trainer needs no sink

            notes += add_progress_bar(given)
        chosen = driver_of(driver, device)
        super().__init__(
            model=module,
            optimizer=optimizer,
            loader=loader,
            compute_loss=compute_loss or (ModelsOwnLoss(module) if step_fn is None else no_loss),
            **limits,
            tokens=checks.checked_tokens(tokens),
            accumulate=checks.checked_accumulate(before_trainer(given, accumulate=accumulate)["accumulate"], step_fn),
            precision=precision,
            seed=seed,
            step_fn=step_fn,
            directory=run_directory(directory, chosen),
            callbacks=given,
            driver=chosen,
            debug_ranks=debug_ranks,
            compile=options_of(compile),
            notes=notes,
        )
        self._is_new = isinstance(directory, NewDirectory)
        self.driver.check(optimizer=optimizer, precision=precision)
        self.driver.check_model(module)
        hooks = Hooks(self.callbacks)  # raises now if a callback is wrong
        check_monitors(hooks, self.compute_loss)
        check_one_each(hooks.callbacks, None if callable(optimizer) else self._checked(optimizer))

    @property
    def run(self) -> Run:
        """The run that began last."""
        if self._run is None:
            raise AttributeError(
                "trainer.run is the run that began last, and none has begun. Call fit(...), begin the loop over "
                "steps(...), or enter `with attach(...) as loop:`."
            )
        return self._run

    @classmethod
    def from_lightning(cls, module: Any, datamodule_or_loaders: Any = None, *more: Any, **arguments: Any) -> Self:
        """Return a trainer of a LightningModule; ``prepare_data``, ``setup`` and ``configure_model`` are called now.

        Args:
            module: A LightningModule.
            datamodule_or_loaders: A LightningDataModule, a loader, or ``(training, validation)``; None: those of the module.
            more: Nothing: an error says how several loaders are given.
            arguments: Those of `Trainer` that the module does not provide, such as ``max_epochs``; ``evaluate_every``, the
                interval of ``validation_step``, and ``sanity_batches``, as in `Evaluate`.
        """
        if more:
            raise TypeError(
                f"Trainer.from_lightning takes at most 2 positional arguments; got {2 + len(more)}. Give several loaders as "
                "the second one: (train, val)."
            )
        assembling = imported("cadenza.compat.lightning.module.assembling", needed_by="Trainer.from_lightning")
        trainer: Self = assembling.assembled(cls, module, datamodule_or_loaders, arguments)
        return trainer

    def plan(self, since: str | PathLike[str] | None = None) -> Plan:
        """Return the tree of moments with the listeners of each, in order. Print it. No run is started.

        If `optimizer` is a function, it is called once for the plan.

        Args:
            since: The directory of a run. The plan ends with its differences from the plan of that run. None takes the
                directory of this trainer, if it holds a run.

        Raises:
            DirectoryError: `since` holds no plan.
        """
        make = self.optimizer
        optimizers = self._checked(make(ModelParameters(self.model)) if callable(make) else make)
        return self._compared(self._plan(optimizers, self._hooks()), since)

    def calendar(self, until: str | int | None = None, *, resume: bool | str | PathLike[str] = False) -> Calendar:
        """Return when each listener with a schedule is called, without training. Print it, or see `Calendar.rows`.

        Hooks that depend on time, tokens, functions, or moments such as ``on_eval_end``, are named as not known beforehand.
        Nothing is restored, written or locked. Each rank may call it alone, where it can read the checkpoint.

        Args:
            until: The point of the run up to which to list, such as ``"2 epochs"``, ``"500 steps"`` or ``"10%"``; None for the
                whole run.
            resume: List what ``fit(resume=...)`` calls: after the checkpoint, with the limits, the loader, the ``accumulate``
                and the number of ranks of this trainer. Without a checkpoint, ``"auto"`` lists the whole run, and nothing if
                the run is over.

        Raises:
            ScheduleError: `until` is no such length; or it is None, and the run has no known end; or a schedule does not work
                with this run.
            CheckpointError: No checkpoint can be used; or the loader has another number of batches than the run had.
            DataError: The run cannot continue inside the epoch on this number of ranks.

        >>> from cadenza.callbacks import LogTraining
        >>> from cadenza.testing import tiny_trainer
        >>> print(tiny_trainer(epochs=2, callbacks=[LogTraining("3 steps")]).calendar())
        calendar of 2 epochs, 10 steps
        on_step_end  LogTraining  every 3 steps  3 times: steps 3, 6, 9
        called each time, by moment: on_setup 1, on_fit_start 1, on_load 1
        """
        checks.check_resume(resume)
        hooks, progress, several = self._hooks(), self._limits(self.loader), self.driver.world_size > 1
        given = resume, self.directory, external_folders(self.callbacks), hooks, progress, self.loader, self.driver.data_shard()
        begins = beginning(*given) if resume else Beginning()
        sizes = partial(batch_sizes, None if several else self.loader)
        return calendar_of(hooks, progress, self.accumulate, sizes, until, begins)

    @answered("fit")
    def fit(
        self,
        resume: bool | str | PathLike[str] = False,
        *,
        strict: bool = False,
        replay: bool = False,
        override: Sequence[str] | Mapping[str, Any] = (),
    ) -> Run:
        """Train, and return the run; its ``outcome`` says how it ended. Every rank must call this.

        Args:
            resume: ``"auto"`` continues from the newest checkpoint of the directory that verifies, and reports each one that it
                skips. It starts a new run if there is none, and does nothing if a limit is reached or a callback stopped the
                run, unless that was `TimeLimit` or a limit is larger now. ``"last"`` continues from the same checkpoint after
                any stop. So does a path, or a name as in `load_weights`: ``"best"``, ``"best:eval/acc"``, ``"step-500"``.
            strict: Refuse a checkpoint if the callbacks with a state are not exactly those in `callbacks`.
            replay: If the loader cannot start at a given batch, read and drop the batches before it.
            override: Settings that replace those of the checkpoint. ``{"lr": 1e-4, "batch_size": 64, "accumulate": 4}`` gives
                their values, also if there is no checkpoint yet; ``("lr", "weight_decay")`` takes those of the trainer. For
                parameter groups: a list with one value each, or ``{"lr": {1: 1e-4}}``, by index or ``name``. A schedule is
                made again and continues at its position, and ``{"scheduler": function}`` replaces it. Each change is a
                decision.

        Raises:
            TypeError, ValueError: `override` names no setting, a value is wrong, or `resume` is false.
            DirectoryError: `directory` cannot be written, is in use, or already holds a run and `resume` is false.
            DataError: The loader is empty, or cannot continue inside an epoch.
            CheckpointError: No checkpoint can be used; the message has a line for each.
            SystemExit: A signal ended the run, and everything is saved. The exit code is 128 + the signal's number. After
                Ctrl-C in IPython or a notebook, the run is returned instead.
        """
        return self._train(self._part(resume, override, strict=strict, replay=replay))

    def steps(
        self,
        resume: bool | str | PathLike[str] = False,
        *,
        strict: bool = False,
        replay: bool = False,
        override: Sequence[str] | Mapping[str, Any] = (),
    ) -> Steps:
        """Return the steps of a run, for a loop of your own; see `Steps`. Every rank must call this.

        The arguments and the errors are those of `fit`. The run begins with the first step. If it ends because the loop is left
        with ``break``, an error of a hook at its end is raised inside of ``with trainer.steps() as steps:`` alone.

        Raises:
            TypeError: The trainer has a ``step_fn``.
            RuntimeError: At the first step: another run of this trainer is not over.

        >>> from cadenza.testing import tiny_trainer
        >>> trainer = tiny_trainer(epochs=1, accumulate=2)
        >>> for step in trainer.steps():
        ...     for inputs, targets in step:
        ...         step.backward(nn.functional.mse_loss(trainer.model(inputs), targets))
        >>> trainer.run.outcome.kind
        'finished'
        """
        if self.step_fn is not None:
            raise TypeError("trainer.steps() takes no step_fn=: the loop does what a step_fn does. Remove it, or call fit().")
        if self._step_compiler is not None:
            raise TypeError("trainer.steps() computes no compiled step: the loop does it. Use compile=True, or call fit().")
        part = self._part(resume, override, strict=strict, replay=replay, loop=Loops.STEPS)
        return Steps(part, self.callbacks, strict=strict)

    def start(
        self,
        resume: bool | str | PathLike[str] = False,
        *,
        strict: bool = False,
        replay: bool = False,
        override: Sequence[str] | Mapping[str, Any] = (),
    ) -> Handle:
        """Train in a background thread, for notebooks. Return the handle of the run; see `Handle`. Every rank must call this.

        The arguments are those of `fit`.

        Raises:
            RuntimeError: A run of this trainer goes on in the background already.
            TypeError, ValueError: As `fit`. Other errors are raised by ``handle.run`` and `Handle.join`.

        >>> from cadenza.testing import tiny_trainer
        >>> handle = tiny_trainer(steps=20).start()
        >>> handle.join().progress.step
        20
        """
        part = self._part(resume, override, strict=strict, replay=replay)
        self._handle = handle = Handle()
        handle.train(partial(self._train, part, begun=handle.begin))
        return handle

    @answered("evaluate")
    def evaluate(
        self,
        loader: Iterable[Any],
        *,
        metrics: Metrics | None = None,
        name: str = "eval",
        compute: Callable[[nn.Module, Any], Any] | None = None,
        limit: int | None = None,
        which: Which | None = None,
        weights: str | None = None,
    ) -> dict[str, float]:
        """Evaluate the model; return results such as ``{"eval/loss": 0.3, "eval/acc": 0.93}``. Every rank must call this.

        The other arguments are those of `Evaluation`. Only the moments ``on_eval_*`` fire, and nothing is written. Afterwards
        the model has its present weights again, to the bit.

        Args:
            metrics: As in `Evaluate`. With neither `metrics` nor `compute`, those of the `Evaluate` of this name are taken, if
                the trainer has one.
            which: Evaluate the weights of a checkpoint: ``"best"``, ``"last"``, or another one, as in `load_weights`. None: the
                weights in memory.
            weights: ``"model"``, or the name of averaged weights such as ``"ema"``. None: those of the model; of a checkpoint,
                as `load_weights` chooses.

        Raises:
            CheckpointError, CheckpointMismatchError: There is no such checkpoint, or its weights cannot be used.
            ValueError: The trainer has no directory, or no callback holds such averaged weights.
        """
        if metrics is None and compute is None and (same := Evaluation.among(self.callbacks, name)) is not None:
            metrics, compute = same.given_metrics, same.compute
        evaluation = Evaluation(loader, metrics=metrics, name=name, compute=compute, limit=limit)
        return self._alone(evaluating.evaluate, evaluation, which, weights)

    @answered("evaluate")
    def predict(
        self,
        loader: Iterable[Any],
        *,
        compute: Callable[[nn.Module, Any], Any] | None = None,
        limit: int | None = None,
        to: str | PathLike[str] | None = None,
        which: Which | None = None,
        weights: str | None = None,
        everywhere: bool = False,
    ) -> Any:
        """Return the model's predictions for every batch, on the host, joined along the first dimension.

        Only the moments ``on_eval_*`` fire, with an evaluation named ``"predict"``. Every rank must call this. On multiple
        ranks, the main process gets the predictions of all, and the others None.

        Args:
            loader: An iterable of batches.
            compute: ``compute(model, batch)`` returns the predictions. None: the prediction of `supervised` or of the model.
            limit: The largest number of batches.
            to: Write a row for each sample to this file, ``.parquet``, ``.csv`` or ``.jsonl``, and return its path instead. The
                rows are in the order of the loader. Memory holds a few batches. The file appears whole, or not at all, and
                replaces an existing one.
            which: Predict with the weights of a checkpoint, as in `evaluate`.
            weights: Predict with averaged weights, as in `evaluate`.
            everywhere: Return the predictions on every rank, with the memory for all of them on each.

        Raises:
            TypeError: `compute` is missing, and `compute_loss` is a function that only returns a loss.
            ValueError: `to` has another suffix.
            DataError: The predictions cannot be written as columns.
            DirectoryError: The folder of `to` cannot be written.
            MissingExtraError: `to` is a Parquet file, and pyarrow is not installed.
        """
        evaluation = Prediction(loader, compute, self.compute_loss, limit=limit, to=to, everywhere=everywhere)
        return self._alone(predict, evaluation, which, weights)

    def _part(
        self,
        resume: bool | str | PathLike[str],
        override: object,
        *,
        strict: bool = False,
        replay: bool = False,
        loop: Loops = Loops.FIT,
    ) -> RunSegment:
        """Return a run that may begin.

        Raises:
            TypeError, ValueError: An argument is wrong.
            RuntimeError: The trainer trains in the background.
        """
        checks.check_resume(resume, new=self._is_new)
        if self._handle is not None and not self._handle.done:
            raise RuntimeError(
                "this trainer trains in the background already. Call stop(...) and join() of the handle that start() returned."
            )
        return RunSegment(self, resume, checks.given_by(override, resume), strict, replay, loop)

    def _train(self, part: RunSegment, begun: Callable[[Session], object] = lambda session: None) -> Run:
        """Carry out a run. `begun` is called with its session.

        A run that goes back to a checkpoint has another part, with a session of its own.
        """
        while True:
            with part as training:
                begun(training.session)
                self._do_steps(training)
            if (back := training.session.sync.requests.back) is None:
                return self.run
            part = replace(part, resume=back)

    def _do_steps(self, training: Training) -> None:
        """Do the steps of a run."""
        fit(training)

    def _alone(
        self, act: Callable[[Session, Evaluation], T], evaluation: Evaluation, which: Which | None, weights: str | None
    ) -> T:
        """Return the result of `evaluate` or `predict` outside of a fit, with the weights that were chosen."""
        choice = Choice(act.__name__, which, weights, self.directory, external_folders(self.callbacks))
        with self.driver.entering(f"in {act.__name__}"):
            if which is not None:
                collect(self.callbacks, self.driver)
            session = self._make_session()
            own_step, parameters = self.step_fn is not None, ModelParameters(session.model)
            optimizers = partial(made, self.optimizer, session.model, parameters, own_step=own_step)
            return evaluating.alone(choice.during(act, optimizers), session, evaluation)
