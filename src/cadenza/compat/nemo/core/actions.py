"""``nemo.core.actions`` of NeMo 0.11: what a hook is shown of a training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cadenza.compat.neural import checkpoints
from cadenza.compat.neural.adapted import AdaptedRun, Entry
from cadenza.compat.neural.events import counters
from cadenza.compat.neural.tensors import NmTensor

if TYPE_CHECKING:
    from cadenza.run import Run

_KEY = "nemo.states"


class TrainingState:
    """The tensors of the batch under way, computed when they are asked for, at most once a batch."""

    def __init__(self, adapted: AdaptedRun) -> None:
        self._adapted = adapted

    def get_tensor(self, name: Entry, compute: bool = True) -> Any:
        """Return a tensor.

        Args:
            name: An NmTensor, its unique name, the name that ``rename`` gave it, or ``"loss"``; in a native run a name of the
                outputs.
            compute: Whether to compute it if it is not there yet; else None is returned.

        Raises:
            KeyError: There is no such tensor, or not now.
            ValueError: It rests on a data layer that is not read in this training, or not yet.
        """
        return self._adapted.value(name, compute=compute)

    def set_tensor(self, tensor: NmTensor, value: Any) -> None:
        """Let a tensor have this value until the batch is gone."""
        self._adapted.put(tensor, value)

    def check_tensor_cached(self, unique_name: str) -> bool:
        """Return whether a tensor is there, so that `get_tensor` costs nothing."""
        return self._adapted.value(unique_name, compute=False) is not None

    def tensor_list(self) -> list[str]:
        """Return the unique names of all tensors of the graph."""
        graph = self._adapted.graph
        return [] if graph is None else list(graph.tensors)

    def clear_dict(self) -> None:
        """Forget all values of the batch under way."""
        self._adapted.forget()


class State(dict[str, Any]):
    """What a hook gets: ``step``, ``epoch``, ``local_rank``, ``global_rank``, ``optimizers``, ``tensors``.

    ``step`` and ``epoch`` count from 0 and name what is under way, or has just ended. All callbacks of one event get the same
    object; the next event gets a new one.
    """

    def __init__(self, adapted: AdaptedRun, event: str, tensors: TrainingState) -> None:
        self.run: Run = adapted.run
        """The run, as Cadenza knows it; no part of the dictionary."""
        self._adapted, self._event = adapted, event
        super().__init__(
            local_rank=adapted.local_rank,
            global_rank=adapted.rank,
            optimizers=list(adapted.run.optimizers),
            tensors=tensors,
        )
        self.count()

    def count(self) -> None:
        """Read step and epoch again: a checkpoint was restored."""
        self["step"], self["epoch"] = counters(self._adapted, self._event)

    def save_state_to(self, path: str | os.PathLike[str]) -> None:
        """Write step, epoch and the optimizers' states, as NeMo's trainer files hold them."""
        states = [optimizer.state_dict() for optimizer in self.run.optimizers]
        content = {"step": self["step"], "epoch": self["epoch"], "optimizer_state": states}
        checkpoints.Folder(Path(path).parent).write(Path(path).name, content)

    def restore_state_from(self, path: str | os.PathLike[str]) -> None:
        """Put back what `save_state_to` wrote: the training goes on at that step and epoch, here and for later callbacks.

        Raises:
            ValueError: The file holds something that would have to be executed, or is damaged.
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
        # A batch has outputs of its own, so two ends of batches with the same counters are told apart.
        now = (event, id(run.outputs)) if event == "on_action_start" else (event, id(run.outputs), run.progress.now())
        if self._state is None or now != self._now:
            self._now, self._state = now, State(self._adapted, event, self._tensors)
        elif event == "on_action_start":
            self._state.count()  # an earlier callback may have restored a checkpoint
        return self._state


def state_of(adapted: AdaptedRun, event: str) -> State:
    """Return the state of an event: the same for all callbacks that hear it."""
    guests = adapted.run.guests
    if _KEY not in guests:
        guests[_KEY] = _States(adapted)
    states: _States = guests[_KEY]
    return states.at(event)
