"""Which checkpoints of a run are kept: a rule names the checkpoints to keep, and those that no rule names are deleted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cadenza.checkpoint.store.link_names import BEST, best_link
from cadenza.engine.monitor import Mode, Monitor, is_pair
from cadenza.status.branches import Saved
from cadenza.status.decisions import in_json

if TYPE_CHECKING:
    from cadenza.checkpoint.store import Store

Pair = tuple[str, Mode]
"""The name of a result, and which direction is better."""


class Kept(NamedTuple):
    """The best checkpoint by a monitor: its name, None before the first, and its value."""

    name: str | None
    value: float


class Rule(Protocol):
    """Names checkpoints to keep."""

    def names(self, line: Sequence[str]) -> set[str]:
        """Return the names to keep. `line` has the last checkpoint of each step, oldest first, abandoned branches before."""


class Last:
    """Keeps the newest `count` checkpoints."""

    def __init__(self, count: int) -> None:
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"keep_last must be a whole number of at least 1, or None to keep all; got {count!r}")
        self.count = count

    def names(self, line: Sequence[str]) -> set[str]:
        return set(line[-self.count :])


class Best:
    """Keeps the best checkpoint by one monitor."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.reset()

    def reset(self) -> None:
        """Forget the best checkpoint, before another run."""
        self.monitor.reset()
        self.kept: Kept = Kept(None, self.monitor.best)
        self.pending: bool = False
        """Whether the monitor has a better value than the kept checkpoint."""
        self.weights: str | None = None
        """The name of the averaged weights that had the best value; None for the weights of the model."""
        self.chosen_at: int | None = None
        """The step after which the weights had the best value."""

    def names(self, line: Sequence[str]) -> set[str]:
        return set() if self.kept.name is None else {self.kept.name}

    def choose(self, step: int, weights: str | None) -> None:
        """Mark the weights after `step` as the best; the next checkpoint holds them."""
        self.pending, self.chosen_at, self.weights = True, step, weights

    def restore(self, kept: Kept) -> None:
        """Set the kept checkpoint. A pending value stays if it is better."""
        self.kept, value = kept, self.monitor.best
        self.monitor.best = kept.value
        self.pending = self.pending and self.monitor.gets_better(value)

    def fact(self) -> dict[str, Any] | None:
        """Return the best checkpoint as plain data, for manifests and decisions; None if there is none."""
        saved = None if self.kept.name is None else Saved.named(self.kept.name)
        if saved is None:
            return None
        told = self.monitor.best_data(value=self.kept.value, step=saved.step)
        averaged = {"weights": self.weights} if self.weights is not None and self.chosen_at == saved.step else {}
        return {**in_json(told), "checkpoint": saved.name, **averaged}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        averaged = {} if self.weights is None else {"weights": self.weights, "chosen_at": self.chosen_at}
        return {"name": self.kept.name, "best": self.kept.value, **averaged}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.kept, self.pending = Kept(state["name"], state["best"]), False
        self.monitor.best = self.kept.value
        self.weights, self.chosen_at = state.get("weights"), state.get("chosen_at")


class Retention:
    """The rules of one `Checkpoint`.

    A checkpoint contains the names of the best checkpoints, and may be one of them. So `assign` comes before the write, and
    `restore` undoes it if the write fails.

    Args:
        keep_last: The number of newest checkpoints to keep; None deletes nothing.
        keep_best: The monitors. The best checkpoint by each one is kept.
    """

    def __init__(self, keep_last: int | None, keep_best: Pair | Sequence[Pair]) -> None:
        self.best: list[Best] = [Best(Monitor(name, mode, owner="Checkpoint")) for name, mode in _pairs(keep_best)]
        self.rules: list[Rule] = [] if keep_last is None else [Last(keep_last), *self.best]

    @property
    def pending(self) -> bool:
        """Whether a monitor has a better value that no checkpoint holds."""
        return any(best.pending for best in self.best)

    @property
    def kept(self) -> list[Kept]:
        """The best checkpoint by each monitor."""
        return [best.kept for best in self.best]

    @property
    def links(self) -> dict[str, str]:
        """The links to the best checkpoints: ``best`` to that of the first monitor; of several, each has its own as well."""
        names = {best_link(one.monitor.name): one.kept.name for one in self.best} if len(self.best) > 1 else {}
        if self.best:
            names[BEST] = self.best[0].kept.name
        return {link: name for link, name in names.items() if name is not None}

    @property
    def facts(self) -> list[dict[str, Any]]:
        """The best checkpoints as plain data: monitor, mode, value, step, checkpoint, and the averaged weights that had it."""
        return [fact for best in self.best if (fact := best.fact()) is not None]

    def reset(self) -> None:
        """Forget the best checkpoints, before another run."""
        for best in self.best:
            best.reset()

    def assign(self, name: str, *, usable: bool) -> None:
        """Make the checkpoint that is about to be written the best for each pending value.

        Args:
            name: The name of the checkpoint.
            usable: False drops the pending values: the weights are not finite.
        """
        for best in self.best:
            if best.pending:
                best.kept = Kept(name, best.monitor.best) if usable else best.kept
                best.pending, best.monitor.best = False, best.kept.value

    def restore(self, kept: Iterable[Kept]) -> None:
        """Set the best checkpoints to an earlier `kept`."""
        for best, one in zip(self.best, kept, strict=True):
            best.restore(one)

    def averaged(self, step: int) -> str | None:
        """Return the name of the averaged weights that were chosen after `step`. The first monitor decides."""
        return next((best.weights for best in self.best if best.chosen_at == step), None)

    def forget_missing(self, names: Iterable[str]) -> list[str]:
        """Forget the best checkpoints that are not among `names`, and return a sentence about each."""
        there, forgotten = set(names), []
        for best in self.best:
            if best.kept.name is not None and best.kept.name not in there:
                what = f"{best.kept.name}, the best by {best.monitor.name}, no longer exists"
                forgotten.append(f"{what}: the search for the best starts again")
                best.reset()
        return forgotten

    def prune(self, store: Store, newest: Saved) -> list[str]:
        """Delete the checkpoints that no rule keeps, but not `newest`; return their names."""
        if not self.rules:
            return []
        line = list({rank[:-1]: saved.name for rank, saved in store.saved_by_run()}.values())
        return store.prune({newest.name}.union(*(rule.names(line) for rule in self.rules)))


def _pairs(keep_best: Pair | Sequence[Pair]) -> list[Pair]:
    """Return one or several pairs as a list."""
    given: Sequence[Any] = [keep_best] if keep_best and isinstance(keep_best[0], str) else keep_best
    for pair in given:
        if not is_pair(pair):
            raise ValueError(f'keep_best must be a pair such as ("eval/acc", "max"), or several; got {keep_best!r}')
    return list(given)
