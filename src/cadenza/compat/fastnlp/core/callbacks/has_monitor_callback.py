"""``fastNLP.core.callbacks.has_monitor_callback``: monitor one value of the results of evaluations."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.callbacks.callback import Callback
from cadenza.compat.fastnlp.core.utils.utils import Watched, as_number, plain_name
from cadenza.compat.fastnlp.translation import NamedResults
from cadenza.status.reprs import signature_of

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.adapted import AdaptedRun
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView
    from cadenza.compat.fastnlp.core.drivers.driver import Driver


logger: logging.Logger = logging.getLogger("cadenza")


class ResultsMonitor:
    """Finds a value in results, and compares it with the best one.

    Args:
        monitor: The name of a result, or a function of the results. An unknown name selects the result with the longest common
            substring. None monitors nothing.
        larger_better: Whether a larger value is better.

    Raises:
        TypeError: `monitor` is neither, or the function does not accept one argument.

    >>> monitor = ResultsMonitor("acc", larger_better=True)
    >>> monitor.is_better_results({"acc#acc": 0.5, "loss#loss": 1.0}), monitor.is_better_results({"acc#acc": 0.5})
    (True, False)
    """

    def __init__(self, monitor: Watched | None, larger_better: bool = True) -> None:
        self._monitor: Watched | None = None
        self._real_monitor: Watched | None = None
        self.larger_better: bool = larger_better
        self.set_monitor(monitor, larger_better)

    def set_monitor(self, monitor: Watched | None, larger_better: bool = True) -> None:
        """Monitor this from now on, and reset the best value."""
        if monitor is not None:
            _check_watched(monitor)
            self._monitor = self._real_monitor = monitor
        self.larger_better = bool(larger_better)
        self.monitor_value: float = -math.inf if larger_better else math.inf
        """The best value so far."""

    @property
    def monitor(self) -> Watched | None:
        """The `monitor` argument."""
        return self._monitor

    @property
    def monitor_name(self) -> str:
        """The name of the result, or of the function."""
        return self._monitor if isinstance(self._monitor, str) else plain_name(self._monitor)

    @property
    def log_name(self) -> str:
        """The name of this monitor in messages."""
        return type(self).__name__

    def get_monitor_value(self, results: Mapping[str, Any]) -> Any:
        """Return the monitored value as a plain number; None without a monitor, or without a matching result."""
        if not results or self._monitor is None:
            return None
        items = results if isinstance(results, NamedResults) else self.itemize_results(results)
        if not isinstance(self._monitor, str):
            try:
                return self._monitor(items)
            except BaseException as error:
                error.add_note(f"raised in the monitor {self.monitor_name!r} of {self.log_name}")
                raise
        if isinstance(items, NamedResults) and items.lacks(self._monitor):
            return None
        if self._monitor in items:
            key: str | None = self._monitor
        elif isinstance(self._real_monitor, str) and self._real_monitor in items:
            key = self._real_monitor
        else:
            key = self._alike(items)
        self._real_monitor = key or self._real_monitor
        return None if key is None else items[key]

    def is_better_results(self, results: Mapping[str, Any], keep_if_better: bool = True) -> bool:
        """Return whether the monitored value is better than the best so far, and keep it if so."""
        value = self.get_monitor_value(results)
        return value is not None and self.is_better_monitor_value(value, keep_if_better)

    def is_better_monitor_value(self, monitor_value: float | None, keep_if_better: bool = True) -> bool:
        """Return whether a value is better than the best so far, and keep it if so. An equal one is not, nor is NaN."""
        if monitor_value is None:
            return False
        better = monitor_value > self.monitor_value if self.larger_better else monitor_value < self.monitor_value
        if better and keep_if_better:
            self.monitor_value = monitor_value
        return bool(better)

    def is_former_monitor_value_better(self, monitor_value1: float | None, monitor_value2: float | None) -> bool:
        """Return whether the first of two values is the better one. Any value is better than None."""
        if monitor_value1 is None or monitor_value2 is None:
            return monitor_value2 is None
        return monitor_value1 > monitor_value2 if self.larger_better else monitor_value1 < monitor_value2

    def itemize_results(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results with tensors of one element as plain numbers."""
        return {key: _plain(value) for key, value in results.items()}

    def _alike(self, results: Mapping[str, Any]) -> str | None:
        """Return the key with the longest substring in common with the monitored name; None if there is none."""
        watched = str(self._monitor)
        parts = {key: SequenceMatcher(None, watched, key, autojunk=False).find_longest_match().size for key in results}
        best = max(parts, key=lambda key: parts[key])
        if not parts[best]:
            logger.warning("%s: no result is similar to %r; the results are %s", self.log_name, watched, list(results))
            return None
        if best != self._real_monitor:
            logger.warning("%s: %r is not among the results %s; using %r", self.log_name, watched, list(results), best)
        return best


class HasMonitorCallback(ResultsMonitor, Callback):
    """A callback that monitors a result. Without its own monitor it uses the trainer's.

    Args:
        monitor: As in `ResultsMonitor`.
        larger_better: As in `ResultsMonitor`.
        must_have_monitor: Whether it is an error if neither it nor the trainer has a monitor.
    """

    def __init__(self, monitor: Watched | None, larger_better: bool, must_have_monitor: bool = False) -> None:
        super().__init__(monitor, larger_better)
        self.must_have_monitor = must_have_monitor

    def enter_run(self, adapted: AdaptedRun) -> None:
        super().enter_run(adapted)
        # Also for a subclass that overrides on_after_trainer_initialized without a call of super().
        self._inherit(adapted.trainer)
        if not adapted.trainer.global_forward_batches:  # otherwise the restored values stay
            self.forget()

    def forget(self) -> None:
        """Reset the best value at the start of a new training."""
        self.set_monitor(self.monitor, self.larger_better)

    def on_after_trainer_initialized(self, trainer: TrainerView, driver: Driver) -> None:
        """Use the trainer's monitor if this callback has none.

        Raises:
            RuntimeError: It needs a monitor and has none, or nothing is evaluated.
        """
        self._inherit(trainer)
        if not self.must_have_monitor:
            return
        if self.monitor is None:
            raise RuntimeError(
                f"{self.log_name} needs a monitor, the name of a result or a function of the results; got None. Pass monitor= "
                "to it or to the trainer."
            )
        if not trainer.evaluates:
            raise RuntimeError(
                f"{self.log_name} monitors {self.monitor_name!r}, but nothing is evaluated in this training. Pass "
                "evaluate_dataloaders= and metrics= to the trainer."
            )

    def on_sanity_check_end(self, trainer: TrainerView, sanity_check_res: dict[str, Any]) -> None:
        """Find the name of the monitored result. The value of the sanity check does not count."""
        if sanity_check_res and self.monitor is not None:
            self.get_monitor_value(sanity_check_res)

    def _inherit(self, trainer: TrainerView) -> None:
        if self.monitor is None and trainer.monitor is not None:
            self.set_monitor(trainer.monitor, trainer.larger_better)


class ExecuteOnceBetterMonitor(HasMonitorCallback):
    """Calls a function without arguments after each evaluation that improves on all earlier ones.

    Args:
        monitor: As in `HasMonitorCallback`.
        larger_better: As in `HasMonitorCallback`.
        execute_fn: The function.
    """

    def __init__(self, monitor: Watched | None, larger_better: bool, execute_fn: Callable[[], object]) -> None:
        super().__init__(monitor, larger_better, must_have_monitor=True)
        if not callable(execute_fn):
            raise TypeError(f"execute_fn must be a function without arguments; got {execute_fn!r}")
        self.execute_fn = execute_fn

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        if self.is_better_results(results):
            self.execute_fn()


def _check_watched(monitor: object) -> None:
    if isinstance(monitor, str):
        return
    if not callable(monitor):
        raise TypeError(f"monitor must be the name of a result, a function of the results, or None; got {monitor!r}")
    try:
        signature_of(monitor).bind({})
    except TypeError:
        raise TypeError(f"monitor must accept one argument, the results; got {monitor!r}") from None
    except ValueError:  # some builtins have no signature
        return


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return as_number(value)
