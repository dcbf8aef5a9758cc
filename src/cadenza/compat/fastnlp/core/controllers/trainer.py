"""``fastNLP.core.controllers.trainer``: fastNLP's trainer, which configures a native one."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from os import PathLike
from signal import SIGINT
from typing import Any, ClassVar, TypeVar
from weakref import ref

from torch import nn
from torch.optim import Optimizer

import cadenza
from cadenza import drivers
from cadenza.callbacks.evaluate import Evaluate
from cadenza.compat.fastnlp import api_of_0_5, saving
from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.callbacks.callback import Callback
from cadenza.compat.fastnlp.core.callbacks.callback_event import Event
from cadenza.compat.fastnlp.core.callbacks.callback_manager import CallbackManager
from cadenza.compat.fastnlp.core.callbacks.progress_callback import with_progress_bar
from cadenza.compat.fastnlp.core.controllers import first_and_last, looping, registry, resuming
from cadenza.compat.fastnlp.core.controllers.evaluator import Evaluator
from cadenza.compat.fastnlp.core.controllers.loops import TrainBatchLoop
from cadenza.compat.fastnlp.core.controllers.stepping import SteppingTrainer
from cadenza.compat.fastnlp.core.controllers.utils import arguments as given
from cadenza.compat.fastnlp.core.controllers.utils.carried import Carried
from cadenza.compat.fastnlp.core.controllers.utils.state import State, TrainerState
from cadenza.compat.fastnlp.core.controllers.view import epochs_for
from cadenza.compat.fastnlp.core.drivers.choose_driver import choose_driver
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.compat.fastnlp.core.utils.utils import Mapped, Watched, loss_in, model_function
from cadenza.engine.session import session_of, weakly
from cadenza.hooks.moments import BaseCallback
from cadenza.loading import num_batches
from cadenza.loading.loaders import Limited

Function = TypeVar("Function", bound=Callable[..., Any])

logger: logging.Logger = logging.getLogger("cadenza")


class Trainer(SteppingTrainer):
    """fastNLP's trainer.

    Args:
        model: The model. Steps call its ``train_step``, or its forward pass, which return a dict or a dataclass with ``loss``.
        train_dataloader: A torch loader.
        optimizers: An optimizer, or a list of them.
        driver: ``"auto"``, ``"torch"``, or a driver; see `choose_driver`.
        device: ``"cpu"``, ``"cuda:1"``, the index of a GPU, a list of one; None leaves the model where it is.
        n_epochs: The number of epochs.
        evaluate_dataloaders: A loader, or a dict of them.
        batch_step_fn: ``batch_step_fn(trainer, batch)`` does the step, with `train_step`, `backward`, `step`, `zero_grad`.
        evaluate_batch_step_fn: ``evaluate_batch_step_fn(evaluator, batch)``, the same for evaluation.
        train_fn: The name of the model's method for training instead.
        evaluate_fn: The same for evaluation.
        callbacks: A callback or a list of them: fastNLP's, native ones, or those of other adapters.
        metrics: By name; see `Evaluator`.
        evaluate_every: Evaluate after each n batches, or n epochs if negative; or when ``evaluate_every(trainer)`` is true,
            which is called after each batch.
        input_mapping: Applied to a batch before it is moved to the device: a function, or a dict of old and new names.
        output_mapping: Applied to the outputs of the model.
        model_wo_auto_param_call: Pass batches unchanged; False passes the entries of a dict by the names of arguments.
        accumulation_steps: The number of batches in an update.
        fp16: Use float16 autocast.
        monitor: The default monitor of callbacks.
        larger_better: Whether a larger value is better, for `monitor`.
        n_batches: The total number of batches, instead of `n_epochs`; -1: use `n_epochs`.
        overfit_batches: Train and evaluate on the first n batches only; -1: on all batches, read once; 0: off.
        marker: Functions of ``Trainer.on(event, marker)`` with this marker are called.
        kwargs: ``progress_bar``: ``"auto"``, ``"rich"``, ``"tqdm"``, ``"raw"``, None, or a callback; ``train_input_mapping``,
            ``evaluate_input_mapping``, and so for outputs; ``check_dataloader_legality``; ``extra_show_keys``;
            ``model_use_eval_mode`` and ``separator`` as in `Evaluator`. Others are named in a warning.

    Raises:
        ValueError, TypeError, RuntimeError: An argument is wrong.
    """

    _custom_callbacks: ClassVar[registry.Waiting] = defaultdict(list)

    input_mapping: Mapped | None
    output_mapping: Mapped | None
    model: nn.Module
    optimizers: Optimizer | list[Optimizer]
    dataloader: Any
    evaluate_dataloaders: Any
    metrics: Mapping[str, Any] | None
    evaluate_every: int | Callable[[Trainer], bool]
    monitor: Watched | None
    larger_better: bool
    marker: str | None
    kwargs: dict[str, Any]
    fp16: bool
    evaluator: Evaluator | None
    batch_step_fn: Callable[[Trainer, Any], object] | None
    trainer_state: TrainerState
    state: State
    carried: Carried
    train_fn: str | None
    evaluate_fn: str | None
    overfit_batches: int
    device: Any

    live: None

    @api_of_0_5.refusing
    def __init__(  # the signature is fastNLP's
        self,
        model: nn.Module,
        train_dataloader: Any,
        optimizers: Optimizer | list[Optimizer],
        driver: str | Driver | drivers.Driver = "auto",
        device: Any = "cpu",
        n_epochs: int = 20,
        evaluate_dataloaders: Any = None,
        batch_step_fn: Callable[[Trainer, Any], object] | None = None,
        evaluate_batch_step_fn: Callable[[Evaluator, Any], object] | None = None,
        train_fn: str | None = None,
        evaluate_fn: str | None = None,
        callbacks: BaseCallback | list[Any] | tuple[Any, ...] | None = None,
        metrics: Mapping[str, Any] | None = None,
        evaluate_every: int | Callable[[Trainer], bool] = -1,
        input_mapping: Mapped | None = None,
        output_mapping: Mapped | None = None,
        model_wo_auto_param_call: bool = False,
        accumulation_steps: int = 1,
        fp16: bool = False,
        monitor: Watched | None = None,
        larger_better: bool = True,
        n_batches: int = -1,
        overfit_batches: int = 0,
        marker: str | None = None,
        **kwargs: Any,
    ) -> None:
        functions = registry.taken(self._custom_callbacks, marker)
        given.check_keywords(Trainer, kwargs, given.TRAINER, given.IDLE)
        given.check_loader(train_dataloader, check_kind=kwargs.get("check_dataloader_legality", True))
        given.check_counts(n_epochs, accumulation_steps, n_batches, overfit_batches)
        given.check_step(batch_step_fn)
        self.input_mapping, evaluate_input = given.mappings("input_mapping", input_mapping, kwargs)
        self.output_mapping, evaluate_output = given.mappings("output_mapping", output_mapping, kwargs)
        self.model, self.optimizers = model, optimizers
        self._optimizers = given.checked_optimizers(optimizers)
        settings = given.of_the_driver(kwargs, fp16, model_wo_auto_param_call)
        self.driver: Driver = choose_driver(model, driver, device, optimizers, **settings)
        self._native, self._driver_name = self.driver.native, driver if isinstance(driver, str) else ""
        self.train_dataloader = self.dataloader = train_dataloader
        self.evaluate_dataloaders, self.metrics, self.evaluate_every = evaluate_dataloaders, metrics, evaluate_every
        self.monitor, self.larger_better, self.marker, self.kwargs = monitor, larger_better, marker, kwargs
        self.accumulation_steps, self.fp16, self.batch_step_fn = accumulation_steps, self.driver.fp16, batch_step_fn
        self.trainer_state, self.state = TrainerState(n_epochs if n_batches == -1 else None, n_batches=n_batches), State()
        self._requested_batches, self.carried = n_batches, Carried()
        if overfit_batches:
            self.dataloader = given.first_batches(train_dataloader, overfit_batches)
        self.train_fn, self.evaluate_fn, self.overfit_batches, self.device = train_fn, evaluate_fn, overfit_batches, device
        self._loop = TrainBatchLoop(batch_step_fn)
        self._function = model_function(model, train_fn, "train_step", by_name=not model_wo_auto_param_call)
        self.evaluator_arguments: dict[str, Any] = {
            "driver": self.driver,
            "evaluate_batch_step_fn": evaluate_batch_step_fn,
            "input_mapping": evaluate_input,
            "output_mapping": evaluate_output,
            "model_wo_auto_param_call": model_wo_auto_param_call,
            "fp16": self.fp16,
            "verbose": 0,
            **{name: kwargs[name] for name in given.FOR_THE_EVALUATOR if name in kwargs},
        }
        self._gather([*functions, *with_progress_bar(given.listed(callbacks), kwargs)])
        if given.wants_evaluator(metrics, evaluate_dataloaders, evaluate_every):
            self.evaluates: bool = True
            loaders = self.dataloader if overfit_batches else evaluate_dataloaders
            self.evaluator = Evaluator(model, loaders, metrics, evaluate_fn=evaluate_fn, **self.evaluator_arguments)
        self.on_after_trainer_initialized(self.driver)

    def _gather(self, callbacks: list[BaseCallback]) -> None:
        self.own_callbacks = callbacks
        self._added = registry.AddedFunctions()
        self.evaluates = any(isinstance(callback, Evaluate) for callback in callbacks)
        ours = [callback for callback in callbacks if isinstance(callback, Callback)]
        self.callback_manager: CallbackManager = CallbackManager([*ours, self._added])

    # -- functions at events ---------------------------------------------------------------------------

    @classmethod
    def on(cls, event: Event, marker: str | None = None) -> Callable[[Function], Function]:
        """Call a function at an event in later trainers.

        Args:
            event: Such as ``Event.on_train_begin()``.
            marker: None: only in the next trainer. ``"all"``: in all. Otherwise in trainers with this marker.

        Raises:
            AttributeError: `event` is not an event.
            TypeError: The function does not accept the arguments of the event.
        """
        registry.check_event(event)

        def subscribe(function: Function) -> Function:
            registry.check_arguments(event, function)
            cls._custom_callbacks[marker].append((event, function))
            return function

        return subscribe

    def add_callback_fn(self, event: Event, fn: Callable[..., Any]) -> None:
        """Call a function at an event from now on, after all callbacks.

        Raises:
            ValueError: `event` is not an event.
        """
        if not isinstance(event, Event):
            raise ValueError(f"expected an event, such as Event.on_train_begin(); got {event!r}")
        self._added.add(event, fn)

    # -- training --------------------------------------------------------------------------------------

    def run(
        self,
        num_train_batch_per_epoch: int = -1,
        num_eval_batch_per_dl: int = -1,
        num_eval_sanity_batch: int = 2,
        resume_from: str | PathLike[str] | None = None,
        resume_training: bool = True,
        catch_KeyboardInterrupt: bool | None = None,  # noqa: N803  # fastNLP's name
    ) -> None:
        """Train.

        Args:
            num_train_batch_per_epoch: At most this many batches in an epoch; -1: all.
            num_eval_batch_per_dl: At most this many batches of each loader in an evaluation; -1: all.
            num_eval_sanity_batch: The number of batches of each loader in the sanity check; 0: none, -1: all.
            resume_from: A folder of `save_checkpoint` to resume from.
            resume_training: Restore the whole state; False restores only the weights.
            catch_KeyboardInterrupt: End the training normally at Ctrl-C. None: yes, in a single process.

        Raises:
            FileNotFoundError: `resume_from` holds no checkpoint.
            TypeError: The loader has no length.
        """
        for limit in (num_train_batch_per_epoch, num_eval_batch_per_dl):
            assert limit == -1 or limit > 0, f"a number of batches must be -1 or more than 0; got {limit}"
        assert num_eval_sanity_batch >= -1, f"num_eval_sanity_batch must be -1, 0 or more; got {num_eval_sanity_batch}"
        if resume_from is not None:
            self.load_checkpoint(resume_from, resume_training=resume_training)
        loader = self.dataloader if num_train_batch_per_epoch == -1 else Limited(self.dataloader, num_train_batch_per_epoch)
        plan = self._planned(loader, num_eval_batch_per_dl, num_eval_sanity_batch)
        single, self._training, self.live = not self.driver.is_distributed(), True, None
        if catch_KeyboardInterrupt and not single:
            logger.warning("catch_KeyboardInterrupt works in a single process only")
        try:
            native = self._native_trainer(loader, plan)
            native.model.train()  # all modules, as in fastNLP
            native.fit()
        except (KeyboardInterrupt, SystemExit):
            live = self.live
            begun = live is not None and AdaptedRun.of(live).began
            # A native Checkpoint handles the first Ctrl-C: it completes and saves the step.
            by_key = isinstance(sys.exception(), KeyboardInterrupt) or (
                live is not None and session_of(live).sync.requests.signal == SIGINT
            )
            if not (begun and single and by_key and catch_KeyboardInterrupt is not False):
                raise
        except Exception as error:
            self._name_samples(error)
            raise
        finally:
            self._training = False
            self._carry_on()

    def load_checkpoint(
        self,
        folder: str | PathLike[str],
        resume_training: bool = True,
        only_state_dict: bool = True,
        model_load_fn: Callable[[str], object] | None = None,
        **kwargs: Any,
    ) -> None:
        """Restore a checkpoint of `save_checkpoint`. The next `run` continues from it.

        Args:
            folder: The folder of the checkpoint.
            resume_training: Restore the whole state; False restores only the weights.
            only_state_dict: As in `load_model`.
            model_load_fn: As in `load_model`.
            kwargs: Ignored.

        Raises:
            FileNotFoundError: The folder holds no checkpoint.
            CheckpointMismatchError: The checkpoint has other optimizers, or batches of another size that do not fit.
        """
        kept = saving.read_checkpoint(folder)
        saving.read_model(self.model, folder, only_state_dict=only_state_dict, load_fn=model_load_fn)
        if resume_training:
            resuming.restore(self, kept)
            self.on_load_checkpoint(kept["callback_states"])

    def run_evaluate(self) -> dict[str, Any]:
        """Evaluate now; return the results.

        Raises:
            RuntimeError: No training is in progress, or there is nothing to evaluate.
        """
        return first_and_last.evaluate(self.running())

    # -- parts of run ----------------------------------------------------------------------------------

    def _planned(self, loader: Iterable[Any], per_loader: int, sanity: int) -> first_and_last.Plan:
        per_epoch = num_batches(loader, self._native.data_shard())
        if per_epoch is None:
            raise TypeError(f"train_dataloader must have a length; a {type(loader).__name__} has no __len__")
        epochs, batches = self.n_epochs, self._requested_batches
        if batches != -1:
            epochs = epochs_for(batches, per_epoch)
        return first_and_last.Plan(per_epoch, epochs, per_epoch * epochs if batches == -1 else batches, per_loader, sanity)

    def _native_trainer(self, loader: Iterable[Any], plan: first_and_last.Plan) -> cadenza.Trainer:
        # A window that continues in the next epoch is more than one step of a native run, in which it ends with its epoch.
        own = self.runs_own_steps or self.overrides_steps or plan.per_epoch % self.accumulation_steps
        own_step = weakly(self._step) if own else None  # the run keeps it, and the trainer the run
        if self.runs_own_epochs:  # in the native run an epoch is one step
            loader, own_step = [None], partial(looping.whole_epoch, ref(self), loader, plan)
        return cadenza.Trainer(
            self.model,
            self._optimizers,
            loader,
            None if own_step else weakly(self._compute),
            step_fn=own_step,
            max_epochs=max(plan.epochs, 1),
            accumulate=1 if own_step else self.accumulation_steps,
            precision="fp16" if self.fp16 else "fp32",
            driver=self._native,
            progress=False,
            callbacks=[
                first_and_last.FirstCallback(self, plan),
                *self.own_callbacks,
                self._added,
                first_and_last.LastCallback(self, plan),
            ],
        )

    def _compute(self, model: nn.Module, batch: Any) -> Any:
        outputs = self.train_step(batch)
        loss_in(outputs)  # raises if there is no loss
        self._note_outputs(outputs)
        return outputs

    def _name_samples(self, error: Exception) -> None:
        """Add the indices of the samples to an error in a batch, if the loader provides them."""
        indices = None if self.live is None or session_of(self.live).cursor.at_boundary else AdaptedRun.of(self.live).indices
        if indices is not None:
            error.add_note(f"while training on the samples {indices}")

    def _carry_on(self) -> None:
        """Keep the state for the next training or a later checkpoint."""
        if self.live is not None and AdaptedRun.of(self.live).began:
            self.carried = self.carrying()
            self.carried.streams = None  # the next training takes the current RNG states
