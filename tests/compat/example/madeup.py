"""A trainer of somebody else, made up: its callbacks get the number of the step and the loss as a float."""

from __future__ import annotations

from collections.abc import Mapping


class Callback:
    def on_begin(self, limit: int | None) -> None: ...

    def on_step_done(self, number: int, loss: float) -> None: ...

    def on_checked(self, results: Mapping[str, float]) -> None: ...

    def on_pause(self) -> None: ...


class LossSum(Callback):
    """A callback with a memory."""

    def __init__(self) -> None:
        self.total = 0.0
        self.results: list[float] = []

    def on_begin(self, limit: int | None) -> None:
        self.total, self.results = 0.0, []

    def on_step_done(self, number: int, loss: float) -> None:
        self.total += loss

    def on_checked(self, results: Mapping[str, float]) -> None:
        self.results.append(results["eval/loss"])


class Breaks(Callback):
    def on_step_done(self, number: int, loss: float) -> None:
        if number == 2:
            raise ValueError("the disk is full")


class Misspelled(Callback):
    def on_step_dome(self, number: int, loss: float) -> None: ...
