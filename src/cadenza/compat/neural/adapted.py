"""The state shared by NeMo's callbacks in a run: NeMo's counters, and tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.compat.adapter.view import OfRun
from cadenza.compat.neural.graph import Graph
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.tensors import LOSS, NmTensor, calls_for
from cadenza.engine.session import session_of
from cadenza.errors import nearest

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from cadenza.run import Run

Entry = str | NmTensor

_KEY = "nemo"


def entries(given: Entry | Iterable[Entry]) -> list[Entry]:
    """Return one entry, or several, as a list.

    Raises:
        TypeError: It is neither.
    """
    found = [given] if isinstance(given, str | NmTensor) else given
    if not isinstance(found, Iterable):
        raise TypeError(f"expected a list of NmTensors or their names; got {given!r}")
    return list(found)


def labelled(wanted: Iterable[Entry]) -> list[tuple[str, Entry]]:
    """Return each entry with its name in logs. If two entries have the same name, the second gets its unique name."""
    found: dict[str, Entry] = {}
    for entry in wanted:
        name = str(entry)
        if name in found and isinstance(entry, NmTensor):
            name = entry.unique_name
        found[name] = entry
    return list(found.items())


class AdaptedRun(OfRun):
    """A native run with NeMo's counters, its graph, if there is one, and the tensors of the current batch."""

    def __init__(self, run: Run, graph: Graph | None = None) -> None:
        super().__init__(run)
        self.graph: Graph | None = graph
        self.live = False
        """Whether the tensors of a batch can be read: from its start to the end of its step."""
        self.current: Optimizer | None = None
        """The optimizer of the step in progress, or of the last one; None for the only one."""
        self._ended: dict[object, int] = {}
        logging.add_stream_handlers()

    @staticmethod
    def of(run: Run) -> AdaptedRun:
        """Return the adapted run of a native run. If a native trainer started it, it has no graph."""
        adapted: AdaptedRun | None = session_of(run).adapters.get(_KEY)
        if adapted is None:
            adapted = AdaptedRun(run)
            adapted.attach()
        return adapted

    def attach(self) -> None:
        """Make this object available to the callbacks of the run."""
        self.session.adapters[_KEY] = self

    @property
    def learning_rate(self) -> float:
        """The rate of the first parameter group of the current optimizer."""
        return float((self.current or self.run.optimizers[0]).param_groups[0]["lr"])

    # -- counters, from 0 ---------------------

    def step(self, *, ending: bool = False) -> int:
        """Return the index of the current step; with `ending`, of the step that has just ended."""
        return self.run.progress.step - ending

    def epoch(self, *, ended: bool = False) -> int:
        """Return the index of the current epoch; with `ended`, the number of started epochs, all of which have ended."""
        progress = self.run.progress
        return progress.epoch + (ended and progress.batch_in_epoch > 0)

    @property
    def rank(self) -> int | None:
        """The rank of this process; None in a run on one process."""
        driver = self.run.driver
        return driver.rank if driver.world_size > 1 else None

    @property
    def local_rank(self) -> int | None:
        """The rank of this process on its machine; None in a run on one process."""
        driver = self.run.driver
        return driver.local_rank if driver.world_size > 1 else None

    def first_end(self, hook: object, *, missing: bool) -> bool:
        """Return whether `hook` was not called yet at the end of the current batch; with `missing`, of the completed one."""
        number = self.run.progress.batch + (not missing)
        called = self._ended.get(hook) == number
        self._ended[hook] = number
        return not called

    # -- tensors --------------------------------------------------------------------------------------

    def value(self, entry: Entry, *, compute: bool = True) -> Any:
        """Return a tensor of the current batch. A missing one is computed once and kept.

        Args:
            entry: An NmTensor, its unique name, its name from `rename`, ``"loss"``, or a key of the run's outputs.
            compute: Whether to compute a missing tensor; False returns None for it.

        Raises:
            KeyError: There is no such tensor, or not at this event.
            ValueError: It depends on a data layer without a batch.
        """
        values: Mapping[str, Any] = self.run.outputs if self.live else {}
        tensor = self._named(entry)
        key = str(entry) if tensor is None else tensor.unique_name
        there = _plain(values)
        if key in there:
            return there[key]
        if not compute:
            return None
        if key in values:  # an output that is derived on demand
            return values[key]
        if tensor is None or self.graph is None:
            raise KeyError(self._absent(key, values))
        found = self.graph.late(there, tensor)
        for name, value in found.items():
            self.run.outputs.setdefault(name, value)
        return found[tensor.unique_name]

    def put(self, tensor: NmTensor, value: Any) -> None:
        """Set the value of a tensor of the current batch."""
        self.run.outputs[tensor.unique_name] = value

    def forget(self) -> None:
        """Delete all tensors of the current batch."""
        self.run.outputs.clear()

    def tensors(self) -> dict[str, Tensor]:
        """Return all computed tensors of the last batch by unique name; in a native run by the keys of its outputs."""
        return {name: value for name, value in _plain(self.run.outputs).items() if isinstance(value, Tensor)}

    def _named(self, entry: Entry) -> NmTensor | None:
        if isinstance(entry, NmTensor):
            if self.graph is not None and entry.unique_name not in self.graph.tensors:
                if _depends_on(entry, self.graph):
                    raise KeyError(f"{entry.name!r} was created after the training started. Create it before nf.train(...).")
                raise ValueError(
                    f"{entry.name!r} belongs to another graph. This training does not read the data layer of that graph. "
                    "Evaluate the tensor with EvaluatorCallback."
                )
            return entry
        if self.graph is None or entry == LOSS:
            return None
        known = self.graph.tensors
        return known.get(entry) or next((parameter for parameter in known.values() if parameter.user_name == entry), None)

    def _absent(self, name: str, values: Mapping[str, Any]) -> str:
        if name == LOSS and (self.graph is not None or not self.live):
            return "'loss' is available only from the end of a batch to the end of its step"
        named = [] if self.graph is None else [tensor.user_name for tensor in self.graph.tensors.values() if tensor.user_name]
        known = [LOSS, *named] if self.graph else list(values)
        hint = " Call tensor.rename(name) first, or pass the NmTensor or its unique_name." if self.graph else ""
        return f"there is no tensor {name!r}.{nearest(name, known)} The known names are {known}.{hint}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the computed entries of an `Outputs`, without computing lazy ones."""
    return dict(dict.items(values)) if isinstance(values, dict) else dict(values)


def _depends_on(tensor: NmTensor, graph: Graph) -> bool:
    """Return whether a tensor depends on tensors of the graph."""
    return any(source.unique_name in graph.tensors for call in calls_for([tensor]) for source in call.inputs.values())
