"""``nemo.core.actions`` of NeMo 0.11: the ``state`` of a training that hooks get."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from cadenza.compat.neural import checkpoints
from cadenza.compat.neural.actions import Actions as _Actions
from cadenza.compat.neural.adapted import AdaptedRun, Entry
from cadenza.compat.neural.events import counters
from cadenza.compat.neural.tensors import NmTensor

if TYPE_CHECKING:
    from cadenza.run import Run


_KEY = "nemo.states"


class Actions(_Actions):
    """The actions of NeMo 0.11, with the argument `training_graph` of `train`."""

    def train(  # type: ignore[override]  # the second argument of 0.11 is not that of 0.10
        self, tensors_to_optimize: Sequence[Any] | None = None, training_graph: Any = None, *arguments: Any, **keywords: Any
    ) -> Run:
        """Train; for the other arguments see the base class. `training_graph` may be omitted, as in NeMo 0.10.

        Raises:
            NotImplementedError: `training_graph` is given.
        """
        if isinstance(training_graph, str | Optimizer):
            arguments = (training_graph, *arguments)
        elif training_graph is not None:
            raise NotImplementedError(
                f"training_graph is not available; got {training_graph!r}. Call the modules outside a NeuralGraph, and pass "
                "the losses: train(tensors_to_optimize=[loss], ...)."
            )
        return super().train(tensors_to_optimize or (), *arguments, **keywords)


class TrainingState:
    """The tensors of the current batch, computed on demand and at most once per batch."""

    def __init__(self, adapted: AdaptedRun) -> None:
        self._adapted = adapted

    def get_tensor(self, name: Entry, compute: bool = True) -> Any:
        """Return a tensor.

        Args:
            name: An NmTensor, its unique name, its name from ``rename``, or ``"loss"``; in a native run a key of the
                outputs.
            compute: Whether to compute a missing tensor; False returns None for it.

        Raises:
            KeyError: There is no such tensor, or not at this event.
            ValueError: It depends on a data layer that this training does not read, or has not read yet.
        """
        return self._adapted.value(name, compute=compute)

    def set_tensor(self, tensor: NmTensor, value: Any) -> None:
        """Set the value of a tensor for the rest of the batch."""
        self._adapted.put(tensor, value)

    def check_tensor_cached(self, unique_name: str) -> bool:
        """Return whether a tensor is already computed."""
        return self._adapted.value(unique_name, compute=False) is not None

    def tensor_list(self) -> list[str]:
        """Return the unique names of all tensors of the graph."""
        graph = self._adapted.graph
        return [] if graph is None else list(graph.tensors)

    def clear_dict(self) -> None:
        """Delete all values of the current batch."""
        self._adapted.forget()


class State(dict[str, Any]):
    """The argument of hooks: ``step``, ``epoch``, ``local_rank``, ``global_rank``, ``optimizers``, ``tensors``.

    ``step`` and ``epoch`` count from 0. They are the indices of the current step and epoch; at an end event, of the one that
    has just ended. All callbacks of one event get the same object. The next event gets a new one.
    """

    def __init__(self, adapted: AdaptedRun, event: str, tensors: TrainingState) -> None:
        self._adapted, self._event = adapted, event
        super().__init__(
            local_rank=adapted.local_rank,
            global_rank=adapted.rank,
            optimizers=list(adapted.run.optimizers),
            tensors=tensors,
        )
        self.count()

    @property
    def run(self) -> Run:
        """The native run; not an entry of the dictionary."""
        return self._adapted.run

    def count(self) -> None:
        """Read step and epoch again, because a checkpoint was restored."""
        self["step"], self["epoch"] = counters(self._adapted, self._event)

    def save_state_to(self, path: str | os.PathLike[str]) -> None:
        """Write step, epoch and the states of the optimizers in the format of NeMo's trainer files."""
        states = [optimizer.state_dict() for optimizer in self.run.optimizers]
        content = {"step": self["step"], "epoch": self["epoch"], "optimizer_state": states}
        checkpoints.Folder(Path(path).parent).write(Path(path).name, content)

    def restore_state_from(self, path: str | os.PathLike[str]) -> None:
        """Restore a file of `save_state_to`: the training continues at its step and epoch. Later callbacks see these numbers.

        Raises:
            ValueError: The file holds pickled code, or is damaged.
        """
        content = checkpoints.Folder(Path(path).parent).read(Path(path).name)
        checkpoints.go_on_at(self.run, content["step"], content.get("epoch", content.get("epoch_num", 0)), content)
        self.count()


class _States:
    """The states of a run: one for each event, and one `TrainingState` for all."""

    def __init__(self, adapted: AdaptedRun) -> None:
        self._adapted, self._tensors = adapted, TrainingState(adapted)
        self._now: tuple[object, ...] = ()
        self._state: State | None = None

    def at(self, event: str) -> State:
        run = self._adapted.run
        # Each batch has its own outputs, which distinguish two ends of batches with equal counters.
        now = (event, id(run.outputs)) if event == "on_action_start" else (event, id(run.outputs), run.progress.now())
        if self._state is None or now != self._now:
            self._now, self._state = now, State(self._adapted, event, self._tensors)
        elif event == "on_action_start":
            self._state.count()  # an earlier callback may have restored a checkpoint
        return self._state


def state_of(adapted: AdaptedRun, event: str) -> State:
    """Return the state of an event, the same for all its callbacks."""
    adapters = adapted.session.adapters
    if _KEY not in adapters:
        adapters[_KEY] = _States(adapted)
    states: _States = adapters[_KEY]
    return states.at(event)
