"""Save a model, or a whole training state, during a training."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.callbacks.callback import Callback
from cadenza.compat.fastnlp.core.callbacks.topk_saver import TopkSaver
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.core.utils.utils import Watched

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.adapted import AdaptedRun
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.compat.fastnlp.core.drivers.driver import Driver


Errors = type[BaseException] | Sequence[type[BaseException]] | None


class CheckpointCallback(Callback):
    """Save at the ends of epochs and batches, after the best evaluations, and after some exceptions.

    Under ``<folder>/<launch time>`` each save has its own folder: ``model-epoch_2``, ``model-epoch_0-batch_40``,
    ``model-last``, ``model-epoch_0-batch_40-acc#acc_0.9`` and ``model-epoch_1-batch_70-exception_EarlyStopException``.

    Args:
        folder: The folder; None: the current directory.
        every_n_epochs: Save after every n-th epoch.
        every_n_batches: Save after every n-th batch.
        last: Save after each epoch, and overwrite the previous one.
        topk: Keep this many of the best evaluations; -1 keeps all.
        on_exceptions: Save when one of these ends the training. Subclasses do not count.
        monitor: The result for `topk`; None: the trainer's monitor.
        larger_better: Whether a larger value is better.
        only_state_dict: Save only the weights; False saves the whole model.
        model_save_fn: ``model_save_fn(folder)`` writes the model instead.
        save_object: ``"trainer"`` saves a whole training state; ``"model"`` saves only the model.
        save_evaluate_results: With `topk`, write the results to a JSON file in the folder.
        **kwargs: As in `Saver`.

    Raises:
        ValueError, TypeError: An argument is wrong.
        RuntimeError: `topk` without a monitor here or in the trainer, or a monitor without `topk`.
    """

    def __init__(  # the signature is fastNLP's
        self,
        folder: str | os.PathLike[str] | None = None,
        every_n_epochs: int | None = None,
        every_n_batches: int | None = None,
        last: bool = False,
        topk: int | None = 0,
        on_exceptions: Errors = EarlyStopException,
        monitor: Watched | None = None,
        larger_better: bool = True,
        only_state_dict: bool = True,
        model_save_fn: Callable[[str], object] | None = None,
        save_object: str = "model",
        save_evaluate_results: bool = True,
        **kwargs: Any,
    ) -> None:
        for name, count in (("every_n_epochs", every_n_epochs), ("every_n_batches", every_n_batches)):
            if count is not None and (not isinstance(count, int) or count < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, or None; got {count!r}")
        self.every_n_epochs: int | None = every_n_epochs
        self.every_n_batches: int | None = every_n_batches
        self.last: bool = last
        self.on_exceptions: tuple[type[BaseException], ...] = _checked(on_exceptions)
        self.save_object = save_object
        options: dict[str, Any] = {"save_object": save_object, "save_evaluate_results": save_evaluate_results, **kwargs}
        self.topk_saver: TopkSaver = TopkSaver(
            topk, monitor, larger_better, folder, only_state_dict=only_state_dict, model_save_fn=model_save_fn, **options
        )

    def enter_run(self, adapted: AdaptedRun) -> None:
        super().enter_run(adapted)
        if not adapted.trainer.global_forward_batches:  # otherwise the restored values stay
            self.topk_saver.forget()

    @property
    def need_reproducible_sampler(self) -> bool:
        return self.save_object == "trainer"

    def on_after_trainer_initialized(self, trainer: TrainerView, driver: Driver) -> None:
        self.topk_saver.agree(driver)
        self.topk_saver.require_monitor(trainer)

    def on_sanity_check_end(self, trainer: TrainerView, sanity_check_res: dict[str, Any]) -> None:
        if self.topk_saver.topk:
            self.topk_saver.get_monitor_value(sanity_check_res)  # raises early for an unknown name

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        self.topk_saver.save_topk(trainer, results)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        if self.every_n_batches is not None and trainer.global_forward_batches % self.every_n_batches == 0:
            self.topk_saver.save(trainer, self._folder_name(trainer))

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if self.every_n_epochs is not None and trainer.cur_epoch_idx % self.every_n_epochs == 0:
            self.topk_saver.save(trainer, f"{self.save_object}-epoch_{trainer.cur_epoch_idx}")
        if self.last:
            self.topk_saver.save(trainer, f"{self.save_object}-last")

    def on_exception(self, trainer: TrainerView, exception: BaseException) -> None:
        if type(exception) in self.on_exceptions:
            self.topk_saver.save(trainer, f"{self._folder_name(trainer)}-exception_{type(exception).__name__}")

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any]:
        return self.topk_saver.state_dict()

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        if states:
            self.topk_saver.load_state_dict(states)

    def _folder_name(self, trainer: TrainerView) -> str:
        return f"{self.save_object}-epoch_{trainer.cur_epoch_idx}-batch_{trainer.global_forward_batches}"


def _checked(given: Any) -> tuple[type[BaseException], ...]:
    single = isinstance(given, type) or not isinstance(given, Iterable)
    classes: tuple[Any, ...] = () if given is None else (given,) if single else tuple(given)
    for class_ in classes:
        if not isinstance(class_, type) or not issubclass(class_, BaseException):
            raise TypeError(f"on_exceptions must be classes of exceptions; got {class_!r}")
    return classes
