"""For how many steps the ranks of a run exchange nothing."""

from __future__ import annotations

from collections.abc import Sequence

STEPS = (2, 8, 32, 128)
"""The numbers of steps for which ranks that expect different calls may agree to exchange nothing."""

LONGEST_S = 0.25
"""The longest time without an exchange, in seconds: a signal waits for so long."""

_MOST = 1 << 16  # of the steps that a rank says it expects without a call: the sum of their squares stays small


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
    def votes(quiet: float) -> list[int]:
        """Return what a rank sends that expects `quiet` steps without a call: their number, its square, the `STEPS` within."""
        expected = int(max(0, min(quiet, _MOST)))
        return [expected, expected * expected, *(expected >= steps for steps in STEPS)]

    def measure(self, step: int, elapsed_s: float) -> None:
        """Note the seconds since the fit began, by the clock of all ranks, at a number of complete steps."""
        if self._measured is None or step > self._measured[0]:
            before, then_s = self._measured or (step - 1, 0.0)
            self._pace_s = (elapsed_s - then_s) / (step - before)  # since the last exchange: a pause is soon forgotten
            self._measured = step, elapsed_s

    def agree(self, votes: Sequence[float], ranks: int, first: int) -> None:
        """Start the longest quiet window that all ranks voted for and that is short enough at the pace of the last steps.

        Ranks that expect the same number of steps get a window of this length. Others get one of `STEPS`.

        Args:
            votes: The sums of the votes of all ranks.
            ranks: The number of ranks.
            first: The number of complete steps at which the window starts.
        """
        total, squares, *each = votes
        if total * total == squares * ranks:  # only if all numbers are equal
            agreed = total // ranks
        else:
            agreed = max((steps for steps, sure in zip(STEPS, each, strict=True) if sure == ranks), default=0)
        steps = int(min(agreed, LONGEST_S / self._pace_s if self._pace_s else agreed))
        self._until = first + steps if steps else 0
