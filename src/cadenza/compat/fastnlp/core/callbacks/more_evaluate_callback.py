"""Evaluate on other data, with other metrics or another function, besides the trainer's evaluations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.callbacks.has_monitor_callback import HasMonitorCallback
from cadenza.compat.fastnlp.core.callbacks.topk_saver import TopkSaver
from cadenza.compat.fastnlp.core.controllers.evaluator import Evaluator
from cadenza.compat.fastnlp.core.utils.utils import Watched

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.compat.fastnlp.core.drivers.driver import Driver


Every = int | Callable[["TrainerView"], bool] | None


class MoreEvaluateCallback(HasMonitorCallback):
    """Evaluate on its own schedule, or after each evaluation of the trainer in which a result improved.

    Its results are printed. Its evaluations do not fire ``on_evaluate`` events.

    Args:
        dataloaders: As in `Evaluator`.
        metrics: As in `Evaluator`.
        evaluate_every: ``-n``: after every n epochs; ``n``: after every n batches; or a function of the trainer, called after
            each batch.
        watch_monitor: Evaluate when this result of the trainer's evaluation improves, instead.
        watch_monitor_larger_better: Whether a larger value is better, for `watch_monitor`.
        evaluate_fn: The name of the model's method; None: as in `Evaluator`.
        num_eval_sanity_batch: The number of batches of a sanity check in the trainer's constructor; 0: none, -1: all.
        topk: Save this many of the best of these evaluations; see `TopkSaver`.
        topk_monitor: The result for `topk`.
        topk_larger_better: Whether a larger value is better, for `topk_monitor`.
        folder: As in `TopkSaver`.
        only_state_dict: As in `TopkSaver`.
        save_object: As in `TopkSaver`.
        model_save_fn: As in `TopkSaver`.
        save_evaluate_results: As in `TopkSaver`.
        save_kwargs: Further arguments of the trainer's method that saves.
        **kwargs: Further arguments of the `Evaluator`. The defaults, such as mappings, are those of the trainer's evaluator.

    Raises:
        RuntimeError: Both or none of `evaluate_every` and `watch_monitor` are given, or only one of `topk` and `topk_monitor`.
        AssertionError: `watch_monitor` is given, but the trainer evaluates nothing.
    """

    def __init__(  # the signature is fastNLP's
        self,
        dataloaders: Any,
        metrics: Mapping[str, Any],
        evaluate_every: Every = -1,
        watch_monitor: Watched | None = None,
        watch_monitor_larger_better: bool = True,
        evaluate_fn: str | None = None,
        num_eval_sanity_batch: int = 2,
        topk: int | None = 0,
        topk_monitor: Watched | None = None,
        topk_larger_better: bool = True,
        folder: str | os.PathLike[str] | None = None,
        only_state_dict: bool = True,
        save_object: str = "model",
        model_save_fn: Callable[[str], object] | None = None,
        save_evaluate_results: bool = True,
        save_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(watch_monitor, watch_monitor_larger_better)
        self.evaluate_every: Every = _checked(evaluate_every, watch_monitor)
        self.watches: bool = watch_monitor is not None
        if bool(topk) != (topk_monitor is not None):
            raise RuntimeError(f"topk and topk_monitor belong together; got topk={topk!r}, topk_monitor={topk_monitor!r}")
        self.num_eval_sanity_batch = num_eval_sanity_batch
        self._arguments = {"dataloaders": dataloaders, "metrics": metrics, "evaluate_fn": evaluate_fn, **kwargs}
        self.evaluator: Evaluator | None = None
        self.topk_saver: TopkSaver | None = None
        if topk:
            options = {"model_save_fn": model_save_fn, "save_evaluate_results": save_evaluate_results, **(save_kwargs or {})}
            self.topk_saver = TopkSaver(
                topk, topk_monitor, topk_larger_better, folder, save_object, only_state_dict=only_state_dict, **options
            )

    @property
    def need_reproducible_sampler(self) -> bool:
        return self.topk_saver is not None and self.topk_saver.save_object == "trainer"

    @property
    def callback_name(self) -> str:
        watched = f"#watch_monitor-{self.monitor_name}" if self.watches else ""
        saved = "" if self.topk_saver is None else f"#{self.topk_saver}"
        return f"more_evaluate_callback#metric_name-{'#'.join(self._arguments['metrics'])}{watched}{saved}"

    def forget(self) -> None:
        super().forget()
        if self.topk_saver is not None:
            self.topk_saver.forget()

    def on_after_trainer_initialized(self, trainer: TrainerView, driver: Driver) -> None:
        super().on_after_trainer_initialized(trainer, driver)
        if self.topk_saver is not None:
            self.topk_saver.agree(driver)
        if self.watches and not trainer.evaluates:
            raise AssertionError(
                f"watch_monitor={self.monitor_name!r} needs evaluations of the trainer; it has none. Pass metrics= to it."
            )
        self.evaluator = Evaluator(trainer.model, **{**trainer.evaluator_arguments, **self._arguments})
        if self.num_eval_sanity_batch:
            results = self.evaluator.run(self.num_eval_sanity_batch)
            if self.topk_saver is not None:
                self.topk_saver.get_monitor_value(results)  # raises early for an unknown name

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        if self.watches and self.is_better_results(results):
            self._evaluate(trainer)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        every = self.evaluate_every
        if every is None or self.watches:
            return
        if every(trainer) if callable(every) else every > 0 and trainer.global_forward_batches % every == 0:
            self._evaluate(trainer)

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        every = self.evaluate_every
        if not self.watches and isinstance(every, int) and every < 0 and trainer.cur_epoch_idx % -every == 0:
            self._evaluate(trainer)

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any]:
        saver = {} if self.topk_saver is None else {"saver": self.topk_saver.state_dict()}
        return {"monitor_value": self.monitor_value, **saver}

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        if states:
            self.monitor_value: Any = states["monitor_value"]
            if self.topk_saver is not None and "saver" in states:
                self.topk_saver.load_state_dict(states["saver"])

    def _evaluate(self, trainer: TrainerView) -> None:
        assert self.evaluator is not None
        assert self._adapted is not None
        results = self.evaluator.run()
        at = f"Epoch:{trainer.cur_epoch_idx}, Batch:{trainer.global_forward_batches}"
        self._adapted.run.print(f"More evaluate results on {at}\n{json.dumps(results, default=str)}")
        if self.topk_saver is not None:
            self.topk_saver.save_topk(trainer, results)


def _checked(every: Every, watched: Watched | None) -> Every:
    if watched is not None:
        if every not in (None, -1):
            raise RuntimeError(f"expected evaluate_every or watch_monitor; got both, with evaluate_every={every!r}")
        return None
    if every is None:
        raise RuntimeError("expected evaluate_every or watch_monitor; got neither")
    if not callable(every) and (not isinstance(every, int) or not every):
        raise ValueError(f"evaluate_every must be a whole number other than 0, or a function of the trainer; got {every!r}")
    return every
