"""What a callback of either dialect sees of a run: counters as NeMo counts them, and tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.compat.neural.graph import Graph
from cadenza.compat.neural.logs import show_on_screen
from cadenza.compat.neural.tensors import LOSS, NmTensor, calls_for
from cadenza.errors import nearest

if TYPE_CHECKING:
    from cadenza.run import Run

Entry = str | NmTensor

_KEY = "nemo"


def entries(given: Entry | Iterable[Entry]) -> list[Entry]:
    """Return what a user asked for as a list; one may stand alone."""
    return [given] if isinstance(given, str | NmTensor) else list(given)


def labelled(wanted: Iterable[Entry]) -> list[tuple[str, Entry]]:
    """Return each entry with what it is called where it is logged: its name, or its unique name where two share one."""
    found: dict[str, Entry] = {}
    for entry in wanted:
        name = str(entry)
        if name in found and isinstance(entry, NmTensor):
            name = entry.unique_name
        found[name] = entry
    return list(found.items())


class AdaptedRun:
    """One training as NeMo sees it: the graph, if there is one, and the tensors of the batch under way."""

    def __init__(self, run: Run, graph: Graph | None = None) -> None:
        self.run, self.graph = run, graph
        self.live = False
        """Whether the tensors of a batch can be asked for: from its start to the end of its step."""
        self._ended: dict[object, int] = {}
        show_on_screen()

    @staticmethod
    def of(run: Run) -> AdaptedRun:
        """Return the adapted run of a native run. If a native trainer started it, it has no graph."""
        if _KEY not in run.guests:
            run.guests[_KEY] = AdaptedRun(run)
        adapted: AdaptedRun = run.guests[_KEY]
        return adapted

    def attach(self) -> None:
        """Let callbacks of this run find it."""
        self.run.guests[_KEY] = self

    # -- counters: from 0, of what is under way; at an end, of what has just ended -------------------

    def step(self, *, ending: bool = False) -> int:
        """Return the number of the step under way; with `ending` of that which has just ended."""
        return self.run.progress.step - ending

    def epoch(self, *, ended: bool = False) -> int:
        """Return the number of the epoch under way; with `ended` how many have begun, all of which are over."""
        progress = self.run.progress
        return progress.epoch + (ended and progress.batch_in_epoch > 0)

    @property
    def rank(self) -> int | None:
        """This process among all; None alone."""
        driver = self.run.driver
        return driver.rank if driver.world_size > 1 else None

    @property
    def local_rank(self) -> int | None:
        """This process among those of this machine; None alone."""
        driver = self.run.driver
        return driver.local_rank if driver.world_size > 1 else None

    def first_end(self, hook: object, *, missing: bool) -> bool:
        """Return whether `hook` has not heard the end of the batch under way; with `missing` of that which is complete."""
        number = self.run.progress.batch + (not missing)
        heard = self._ended.get(hook) == number
        self._ended[hook] = number
        return not heard

    # -- tensors --------------------------------------------------------------------------------------

    def value(self, entry: Entry, *, compute: bool = True) -> Any:
        """Return a tensor of the batch under way; one that is not there yet is computed once, and kept.

        Args:
            entry: An NmTensor, its unique name, the name `rename` gave it, ``"loss"``, or a name in the run's outputs.
            compute: Whether to compute it if need be; else None is returned.

        Raises:
            KeyError: There is no such tensor, or not now.
            ValueError: It rests on a data layer whose batch is not there.
        """
        values: Mapping[str, Any] = self.run.outputs if self.live else {}
        tensor = self._named(entry)
        key = str(entry) if tensor is None else tensor.unique_name
        there = _plain(values)
        if key in there:
            return there[key]
        if not compute:
            return None
        if key in values:  # an output that is derived when it is asked for
            return values[key]
        if tensor is None or self.graph is None:
            raise KeyError(self._absent(key, values))
        found = self.graph.late(there, tensor)
        for name, value in found.items():
            self.run.outputs.setdefault(name, value)
        return found[tensor.unique_name]

    def put(self, tensor: NmTensor, value: Any) -> None:
        """Let a tensor of the batch under way have this value."""
        self.run.outputs[tensor.unique_name] = value

    def forget(self) -> None:
        """Forget all tensors of the batch under way."""
        self.run.outputs.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors of the last batch that were computed, by unique name; those of a native run by theirs."""
        return {name: value for name, value in _plain(self.run.outputs).items() if isinstance(value, Tensor)}

    def _named(self, entry: Entry) -> NmTensor | None:
        if isinstance(entry, NmTensor):
            if self.graph is not None and entry.unique_name not in self.graph.tensors:
                if _rests_on(entry, self.graph):
                    raise KeyError(f"{entry.name!r} was made after the training began; make it before")
                raise ValueError(
                    f"{entry.name!r} belongs to another graph, whose data layer is not read in this training. Evaluate it "
                    "with EvaluatorCallback."
                )
            return entry
        if self.graph is None or entry == LOSS:
            return None
        known = self.graph.tensors
        return known.get(entry) or next((one for one in known.values() if one.user_name == entry), None)

    def _absent(self, name: str, values: Mapping[str, Any]) -> str:
        if name == LOSS and (self.graph is not None or not self.live):
            return "'loss' is there from the end of a batch to the end of its step, and not at other moments"
        named = [] if self.graph is None else [one.user_name for one in self.graph.tensors.values() if one.user_name]
        known = [LOSS, *named] if self.graph else list(values)
        hint = " Call tensor.rename(name) first, or hand over the NmTensor or its unique_name." if self.graph else ""
        return f"no tensor is called {name!r} here.{nearest(name, known)} There is {known}.{hint}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is in an `Outputs` already, without computing what is lazy."""
    return dict(dict.items(values)) if isinstance(values, dict) else dict(values)


def _rests_on(tensor: NmTensor, graph: Graph) -> bool:
    """Return whether a tensor is made of those of the graph."""
    return any(one.unique_name in graph.tensors for call in calls_for([tensor]) for one in call.inputs.values())
