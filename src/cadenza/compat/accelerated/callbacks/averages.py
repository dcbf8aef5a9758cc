"""Averaged weights, evaluated in addition to the model's weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cadenza.compat.accelerated.callbacks.saving import SaveBestModelCallback
from cadenza.compat.accelerated.handler import CallbackHandler
from cadenza.compat.accelerated.utils import ModelEma
from cadenza.hooks.moments import BaseCallback, HeldWeights


class ModelEmaCallback(SaveBestModelCallback):
    """Keep an exponential moving average of the weights, evaluate it after each evaluation, and save the best one.

    The average starts as a copy of the model and is updated after the steps of each epoch. In its evaluation all metrics have
    the prefix ``ema_model_``. That evaluation calls the hooks of the trainer, but not its other callbacks. Callbacks that log
    metrics must come after this one.

    Args:
        decay: The weight of the old average in each update.
        evaluate_during_training: Evaluate the average and save the best; False saves it after each epoch.
        save_path: The file; see `SaveBestModelCallback`.
        watch_metric: The name of the metric in the run history.
        greater_is_better: Whether a larger value is better.
        model_ema: `ModelEma` or a subclass.
        callbacks: Called in these evaluations by the adapter's `Trainer`. A native trainer calls the callbacks in its list.
    """

    _track_prefix = "ema_model_"

    def __init__(
        self,
        decay: float = 0.99,
        evaluate_during_training: bool = True,
        save_path: str | os.PathLike[str] = "ema_model.pt",
        watch_metric: str = "ema_model_eval_loss_epoch",
        greater_is_better: bool = False,
        model_ema: type[ModelEma] = ModelEma,
        callbacks: tuple[BaseCallback | type[BaseCallback], ...] = (),
    ) -> None:
        super().__init__(
            save_path,
            watch_metric,
            greater_is_better,
            reset_on_train=False,
            save_optimizer=False,
            load_saved_checkpoint=False,
        )
        if not callable(model_ema) or (isinstance(model_ema, type) and not issubclass(model_ema, ModelEma)):
            raise TypeError(
                f"model_ema must be ModelEma or a subclass; got {model_ema!r}. Derive your class from "
                "cadenza.compat.accelerated.utils.ModelEma"
            )
        self.decay: float = decay
        self.evaluate_during_training: bool = evaluate_during_training
        self.model_ema_cls: type[ModelEma] = model_ema
        self.ema_model: ModelEma | None = None
        """The average of the current or the last training."""
        self.callback_handler: CallbackHandler = CallbackHandler(callbacks)
        """The callbacks of the average's evaluations."""
        self._loaded: Mapping[str, Any] | None = None

    def on_training_run_start(self, trainer: Any, **kwargs: Any) -> None:
        super().on_training_run_start(trainer, **kwargs)
        self.ema_model = self.model_ema_cls(trainer.get_model(), decay=self.decay)
        if self._loaded is not None:
            self.ema_model.load_state_dict(self._loaded)
            self._loaded = None

    def on_train_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        assert self.ema_model is not None, "created in on_training_run_start"
        self.ema_model.update(trainer.get_model())

    def on_eval_epoch_end(self, trainer: Any, is_intermediate: bool = False, **kwargs: Any) -> None:
        if self.ema_model is None or not self.evaluate_during_training or is_intermediate:
            return
        trainer.print("Running evaluation on EMA model")
        outer, prefix = trainer.callback_handler, trainer.run_history.metric_name_prefix
        trainer.callback_handler = self.callback_handler
        trainer.run_history.set_metric_name_prefix(self._track_prefix)
        try:
            with self.ema_model.in_place(trainer.get_model()):
                trainer._run_eval_epoch(trainer._eval_dataloader, is_training=bool(trainer.native_run.optimizers))
        finally:
            trainer.callback_handler = outer
            trainer.run_history.set_metric_name_prefix(prefix)

    def on_training_run_epoch_end(self, trainer: Any, **kwargs: Any) -> None:
        assert self.ema_model is not None, "created in on_training_run_start"
        evaluated = self.evaluate_during_training and trainer._eval_dataloader is not None
        with self.ema_model.in_place(trainer.get_model()):
            if evaluated:
                super().on_training_run_epoch_end(trainer, **kwargs)
            else:
                trainer.save_checkpoint(self.save_path, save_optimizer=False)

    def on_training_run_end(self, trainer: Any, **kwargs: Any) -> None:
        if self.best_metric_epoch is not None:
            super().on_training_run_end(trainer, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        ema = self.ema_model.state_dict() if self._loaded is None and self.ema_model is not None else self._loaded
        return {**super().state_dict(), **({} if ema is None else {"ema": dict(ema)})}

    def held_weights(self) -> dict[str, HeldWeights | None]:
        """Return the location of the average in the state; `load_weights` calls it ``"ema_model"``."""
        return {"ema_model": None if self.ema_model is None else HeldWeights("ema", "module.")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._loaded = state.get("ema")
