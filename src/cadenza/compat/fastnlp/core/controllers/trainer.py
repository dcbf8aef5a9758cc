"""``fastNLP.core.controllers.trainer``: fastNLP's trainer, which is a native one with other arguments."""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from signal import SIGINT
from typing import Any, ClassVar, TypeVar

from torch import nn
from torch.optim import Optimizer

import cadenza
from cadenza import drivers
from cadenza.compat.fastnlp.adapted import AdaptedRun
from cadenza.compat.fastnlp.core.callbacks.callback import Callback
from cadenza.compat.fastnlp.core.callbacks.callback_event import Event
from cadenza.compat.fastnlp.core.callbacks.callback_manager import CallbackManager
from cadenza.compat.fastnlp.core.callbacks.progress_callback import with_progress_bar
from cadenza.compat.fastnlp.core.controllers import conducting, looping, registry, resuming, saving
from cadenza.compat.fastnlp.core.controllers.evaluator import Evaluator
from cadenza.compat.fastnlp.core.controllers.stepping import SteppingTrainer
from cadenza.compat.fastnlp.core.controllers.utils import arguments as given
from cadenza.compat.fastnlp.core.controllers.utils.carried import Carried
from cadenza.compat.fastnlp.core.controllers.utils.state import State, TrainerState
from cadenza.compat.fastnlp.core.controllers.view import epochs_for
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.compat.fastnlp.core.utils.utils import Mapped, Watched, loss_in, model_function
from cadenza.engine.session import session_of
from cadenza.engine.window import AccumulationWindow
from cadenza.hooks.moments import BaseCallback
from cadenza.loading import num_batches
from cadenza.loading.loaders import Limited
from cadenza.run import Run

Function = TypeVar("Function", bound=Callable[..., Any])

logger = logging.getLogger("cadenza")


class Trainer(SteppingTrainer):
    """fastNLP's trainer.

    Args:
        model: Steps are made by its ``train_step``, else by its forward pass; they return a dict or a dataclass with ``loss``.
        train_dataloader: A torch loader.
        optimizers: One, or a list.
        driver: ``"auto"``, ``"torch"`` or a native driver.
        device: ``"cpu"``, ``"cuda:1"``, the number of a GPU, a list of one; None where a launcher started this process.
        n_epochs: Epochs in all.
        evaluate_dataloaders: A loader, or a dict of them.
        batch_step_fn: ``batch_step_fn(trainer, batch)`` does the step, with `train_step`, `backward`, `step`, `zero_grad`.
        evaluate_batch_step_fn: ``evaluate_batch_step_fn(evaluator, batch)``, the same for evaluation.
        train_fn: The name of the model's method for training instead.
        evaluate_fn: The same for evaluation.
        callbacks: fastNLP's, native ones, those of other dialects: one or a list.
        metrics: By name; see `Evaluator`.
        evaluate_every: Evaluate after each n batches, or n epochs if negative; or when ``evaluate_every(trainer)`` is true,
            which is asked after each batch.
        input_mapping: What a batch goes through before it is brought to the device: a function, or new names by old ones.
        output_mapping: What the model's outputs go through.
        model_wo_auto_param_call: Hand batches over whole; else one that is a dict is handed over by the method's names.
        accumulation_steps: Batches in an update.
        fp16: Compute in float16 where torch deems it safe.
        monitor: For callbacks that watch a result and were not told which.
        larger_better: Which way is better, for `monitor`.
        n_batches: Batches in all, instead of `n_epochs`; -1: as many as these have.
        overfit_batches: Train on the first n batches only, and evaluate on them; -1: on all, as read once; 0: do not.
        marker: Functions given to ``Trainer.on(event, marker)`` with this marker are called.
        kwargs: ``progress_bar``: ``"auto"``, ``"rich"``, ``"tqdm"``, ``"raw"``, None, or a callback; ``train_input_mapping``,
            ``evaluate_input_mapping``, and so for outputs; ``check_dataloader_legality``; ``extra_show_keys``;
            ``model_use_eval_mode`` and ``separator`` as in `Evaluator`. Others are named in a warning.

    Raises:
        ValueError, TypeError, RuntimeError: An argument is wrong; the message says what was expected.
    """

    _custom_callbacks: ClassVar[registry.Waiting] = defaultdict(list)

    def __init__(  # the signature is fastNLP's
        self,
        model: nn.Module,
        train_dataloader: Any,
        optimizers: Optimizer | list[Optimizer],
        driver: str | drivers.Driver = "auto",
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
        self.input_mapping, evaluate_input = given.mappings("input_mapping", input_mapping, kwargs)
        self.output_mapping, evaluate_output = given.mappings("output_mapping", output_mapping, kwargs)
        self.model, self.optimizers = model, optimizers
        self._optimizers = given.checked_optimizers(optimizers)
        self._native = given.native_driver(driver, device)
        self.driver = Driver(self._native, model.to(self._native.device), optimizers)
        self.train_dataloader = self.dataloader = train_dataloader
        self.evaluate_dataloaders, self.metrics, self.evaluate_every = evaluate_dataloaders, metrics, evaluate_every
        self.monitor, self.larger_better, self.marker, self.kwargs = monitor, larger_better, marker, kwargs
        self.accumulation_steps, self.fp16, self.batch_step_fn = accumulation_steps, fp16, batch_step_fn
        self.trainer_state, self.state = TrainerState(n_epochs if n_batches == -1 else None, n_batches=n_batches), State()
        self._asked_batches, self.carried = n_batches, Carried()
        if overfit_batches:
            self.dataloader = given.first_batches(train_dataloader, overfit_batches)
        given.check_step(batch_step_fn)
        self._function = model_function(model, train_fn, "train_step", by_name=not model_wo_auto_param_call)
        self.group = AccumulationWindow(accumulation_steps)
        """The batches of the update under way, in a ``batch_step_fn``."""
        self.judging = {
            "driver": self._native,
            "evaluate_batch_step_fn": evaluate_batch_step_fn,
            "input_mapping": evaluate_input,
            "output_mapping": evaluate_output,
            "model_wo_auto_param_call": model_wo_auto_param_call,
            "fp16": fp16,
            "verbose": 0,
            **{name: kwargs[name] for name in given.FOR_THE_EVALUATOR if name in kwargs},
        }
        self._gather([*functions, *with_progress_bar(given.listed(callbacks), kwargs)])
        if given.wants_evaluator(metrics, evaluate_dataloaders, evaluate_every):
            self.evaluates = True
            loaders = self.dataloader if overfit_batches else evaluate_dataloaders
            self.evaluator = Evaluator(model, loaders, metrics, evaluate_fn=evaluate_fn, **self.judging)
        self.on_after_trainer_initialized(self.driver)

    def _gather(self, callbacks: list[BaseCallback]) -> None:
        self.own_callbacks = callbacks
        self._late = registry.Late()
        ours = [callback for callback in callbacks if isinstance(callback, Callback)]
        self.callback_manager = CallbackManager([*ours, self._late])

    # -- functions at events ---------------------------------------------------------------------------

    @classmethod
    def on(cls, event: Event, marker: str | None = None) -> Callable[[Function], Function]:
        """Have a function called at an event; for the trainers that are made later.

        Args:
            event: Such as ``Event.on_train_begin()``.
            marker: None: of the next trainer that is made, only. ``"all"``: of all. Else of those with this marker.

        Raises:
            AttributeError: `event` is none.
            TypeError: The function cannot take the event's arguments.
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
            ValueError: `event` is none.
        """
        if not isinstance(event, Event):
            raise ValueError(f"expected an event, such as Event.on_train_begin(); got {event!r}")
        self._late.add(event, fn)

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
            num_eval_sanity_batch: Evaluate this many batches of each loader before; 0: none, -1: all.
            resume_from: A folder of `save_checkpoint`, at which to go on.
            resume_training: Go on with all of it, and not with the weights alone.
            catch_KeyboardInterrupt: End at Ctrl-C as if the training was complete. None: yes, in a single process.

        Raises:
            FileNotFoundError: There is nothing at `resume_from`.
            TypeError: The loader does not know its length.
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
            self._native_trainer(loader, plan).fit()
        except (KeyboardInterrupt, SystemExit):
            live = self.live
            begun = live is not None and AdaptedRun.of(live).began
            # A native Checkpoint in the list takes the first Ctrl-C: the step is complete, and saved.
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
        """Go on at what `save_checkpoint` wrote, with the next `run`.

        Args:
            folder: Where it was written.
            resume_training: Take all of it, and not the weights alone.
            only_state_dict: As in `load_model`.
            model_load_fn: As in `load_model`.
            kwargs: Are not looked at.

        Raises:
            FileNotFoundError: There is no such file.
            CheckpointMismatchError: It belongs to other optimizers, or to batches of another size that do not fit.
        """
        kept = saving.read_checkpoint(folder)
        saving.read_model(self.model, folder, only_state_dict=only_state_dict, load_fn=model_load_fn)
        if resume_training:
            resuming.restore(self, kept)
            self.on_load_checkpoint(kept["callback_states"])

    def run_evaluate(self) -> dict[str, Any]:
        """Evaluate now; return the results.

        Raises:
            RuntimeError: No training is under way, or there is nothing to evaluate.
        """
        return conducting.evaluate(self.running())

    # -- parts of run ----------------------------------------------------------------------------------

    def _planned(self, loader: Iterable[Any], per_loader: int, sanity: int) -> conducting.Plan:
        per_epoch = num_batches(loader, self._native.data_shard())
        if per_epoch is None:
            raise TypeError(f"train_dataloader must know its length; a {type(loader).__name__} has no __len__")
        epochs, batches = self.n_epochs, self._asked_batches
        if batches != -1:
            epochs = epochs_for(batches, per_epoch)
        return conducting.Plan(per_epoch, epochs, per_epoch * epochs if batches == -1 else batches, per_loader, sanity)

    def _native_trainer(self, loader: Iterable[Any], plan: conducting.Plan) -> cadenza.Trainer:
        own_step = self._step if self.batch_step_fn is not None else None
        if self._loop is not None:  # natively an epoch is one step
            loader, own_step = [None], self._whole_epoch
        return cadenza.Trainer(
            self.model,
            self._optimizers,
            loader,
            None if own_step else self._compute,
            step_fn=own_step,
            max_epochs=plan.epochs,
            accumulate=1 if own_step else self.accumulation_steps,
            precision="fp16" if self.fp16 else "fp32",
            driver=self._native,
            progress=False,
            callbacks=[conducting.Opening(self, plan), *self.own_callbacks, self._late, conducting.Closing(self, plan)],
        )

    def _compute(self, model: nn.Module, batch: Any) -> Any:
        outputs = self.train_step(batch)
        loss_in(outputs)  # says what is wrong
        self._note_outputs(outputs)
        return outputs

    def _whole_epoch(self, run: Run, batch: Any) -> Any:
        assert self._loop is not None
        return looping.whole_epoch(self, self._loop)

    def _name_samples(self, error: Exception) -> None:
        """Have an error in a batch say of which samples it is, if the loader knows."""
        indices = None if self.live is None or session_of(self.live).cursor.at_boundary else AdaptedRun.of(self.live).indices
        if indices is not None:
            error.add_note(f"while training on the samples {indices}")

    def _carry_on(self) -> None:
        """Keep what a next training, or a checkpoint after this one, goes on with."""
        if self.live is not None and AdaptedRun.of(self.live).began:
            self.carried = self.carrying()
            self.carried.streams = None  # the next training takes the current RNG states
