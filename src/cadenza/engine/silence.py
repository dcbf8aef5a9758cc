"""For how many steps the ranks of a run exchange nothing."""

from __future__ import annotations

from collections.abc import Sequence

STEPS = (2, 8, 32, 128)
"""The numbers of steps for which ranks may agree to exchange nothing."""

LONGEST_S = 0.25
"""The longest time without an exchange, in seconds: a signal waits for so long."""


class Silence:
    """The quiet windows of a run: steps in which ranks exchange nothing, because no listener is due on any rank.

    All numbers are those that the ranks have exchanged, so that all ranks come to the same result.
    """

    def __init__(self) -> None:
        self._until = 0
        self._measured: tuple[int, float] | None = None
        self._pace_s = float("inf")

    def covers(self, step: int) -> bool:
        """Return whether nothing is exchanged after so many complete steps."""
        return step < self._until

    @staticmethod
    def votes(quiet: float) -> list[bool]:
        """Return what a rank says that expects `quiet` steps without a call: whether each of `STEPS` suits it."""
        return [quiet >= steps for steps in STEPS]

    def agree(self, votes: Sequence[int], ranks: int, step: int, elapsed_s: float) -> None:
        """Start the longest quiet window for which all ranks voted and which is short enough at the pace of the last steps.

        Args:
            votes: How many ranks voted for each of `STEPS`.
            ranks: The number of ranks.
            step: The number of complete steps.
            elapsed_s: The seconds since the fit began, by the clock of all ranks.
        """
        if self._measured is None or step > self._measured[0]:
            before, then_s = self._measured or (step - 1, 0.0)
            self._pace_s = (elapsed_s - then_s) / (step - before)  # since the last exchange: a pause is soon forgotten
            self._measured = step, elapsed_s
        agreed = (steps for steps, sure in zip(STEPS, votes, strict=True) if sure == ranks)
        longest = max((steps for steps in agreed if steps * self._pace_s <= LONGEST_S), default=0)
        self._until = step + 1 + longest if longest else 0
