"""Measure the parts of a training."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from cadenza.compat.fastnlp.core.callbacks.callback import Callback

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView


PARTS = ("fetch-data", "forward", "backward", "optimize", "evaluate", "train", "total")


class TimerCallback(Callback):
    """Print the seconds that fetching, forward pass, backward pass, updates and evaluations took in this process.

    The times do not include GPU work that runs asynchronously. The native `Profile` waits for it.

    Args:
        print_every: ``-n``: every n epochs; 0: at the end; ``n``: every n batches. Each print resets the clocks.
        time_ndigit: The number of decimals. Parts that round to 0 are omitted.
    """

    def __init__(self, print_every: int = -1, time_ndigit: int = 3) -> None:
        if not isinstance(print_every, int):
            raise AssertionError(f"print_every must be a whole number; got {print_every!r}")
        self.print_every: int = print_every
        self.time_ndigit: int = time_ndigit
        self.clocks: dict[str, Clock] = {name: Clock() for name in PARTS}

    def on_train_begin(self, trainer: TrainerView) -> None:
        self.clocks = {name: Clock() for name in PARTS}
        self.clocks["total"].start()
        self.clocks["train"].start()

    def on_fetch_data_begin(self, trainer: TrainerView) -> None:
        self.clocks["fetch-data"].start()

    def on_fetch_data_end(self, trainer: TrainerView) -> None:
        self.clocks["fetch-data"].stop()

    def on_train_batch_begin(self, trainer: TrainerView, batch: Any, indices: list[int] | None) -> None:
        self.clocks["forward"].start()

    def on_before_backward(self, trainer: TrainerView, outputs: Any) -> None:
        self.clocks["forward"].stop()
        self.clocks["backward"].start()

    def on_after_backward(self, trainer: TrainerView) -> None:
        self.clocks["backward"].stop()

    def on_before_optimizers_step(self, trainer: TrainerView, optimizers: Any) -> None:
        self.clocks["optimize"].start()

    def on_after_optimizers_step(self, trainer: TrainerView, optimizers: Any) -> None:
        self.clocks["optimize"].stop()

    def on_evaluate_begin(self, trainer: TrainerView) -> None:
        self.clocks["train"].stop()
        self.clocks["evaluate"].start()

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        self.clocks["evaluate"].stop()
        self.clocks["train"].start()

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        if self.print_every > 0 and trainer.global_forward_batches % self.print_every == 0:
            self._print(f"Running {self.print_every} batches")

    def on_train_epoch_end(self, trainer: TrainerView) -> None:
        if self.print_every < 0 and trainer.cur_epoch_idx % -self.print_every == 0:
            self._print(f"Running {-self.print_every} epochs")

    def on_train_end(self, trainer: TrainerView) -> None:
        if self.print_every == 0:
            self._print("Training finished")

    def format_timer(self, reset: bool = True) -> str:
        """Return the times, such as ``, forward: 0.31s, train: 1.2s``; with `reset`, reset the clocks."""
        spent = {name: round(clock.elapsed(reset=reset), self.time_ndigit) for name, clock in self.clocks.items()}
        return "".join(f", {name}: {seconds}s" for name, seconds in spent.items() if seconds)

    def _print(self, text: str) -> None:
        if self._adapted is not None:
            self._adapted.run.print(text + self.format_timer())


class Clock:
    """The total time between start and stop."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._since: float | None = None

    def start(self) -> None:
        """Start. An earlier start without a stop, such as the forward pass of a dropped batch, does not count."""
        self._since = time.perf_counter()

    def stop(self) -> None:
        """Stop."""
        if self._since is not None:
            self._spent_s += time.perf_counter() - self._since
            self._since = None

    def elapsed(self, *, reset: bool) -> float:
        """Return the seconds so far. A running clock continues."""
        runs = self._since is not None
        self.stop()
        spent = self._spent_s
        if reset:
            self._spent_s = 0.0
        if runs:
            self.start()
        return spent
