"""What callbacks of Lightning change together in a run: parameter groups, ``requires_grad``, masks, the length of windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.nn.utils import prune

from cadenza.compat.adapter.parameter_groups import Trainable, groups_of, regroup, signature
from cadenza.compat.adapter.view import OfRun
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.run import Run


class Changes(OfRun):
    """The state of one run that its callbacks of Lightning change together. One per run.

    Args:
        run: The run, before any hook of Lightning.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._groups = signature(run.optimizers)
        self._trainable = Trainable(run.model)
        self._window: int | None = None

    def resize(self, batches: int) -> None:
        """Change the batches in a step from the next step on, as a callback asks with ``trainer.accumulate_grad_batches``."""
        session = self.session
        before, self._window = session.step.window.size, batches
        if batches != before:
            session.step.resize(batches)
            why = f"from step {self.run.progress.step + 1} on, a step has {counted(batches, 'batch')} instead of {before}"
            session.decide("accumulation changed", why, data={"before": before, "batches": batches})

    def renew(self) -> None:
        """Adapt the driver to changes of ``requires_grad``. Every rank must call this, between two steps."""
        self._trainable.renew(self.run)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs besides the states of callbacks: added parameter groups, and pruned parameters."""
        state: dict[str, Any] = {}
        if signature(self.run.optimizers) != self._groups:
            state["groups"] = groups_of(self.run)
        if pruned := pruned_in(self.run):
            state["pruned"] = pruned
        if self._window is not None:
            state["window"] = self._window
        return state

    def expect(self, state: Mapping[str, Any]) -> None:
        """Bring model and optimizers into the form that they had when `state` was saved, before their states are restored."""
        if "groups" in state:
            regroup(self.run, state["groups"])
        modules = dict(self.run.model.named_modules())
        for name, tensor, _ in state.get("pruned", ()):
            if name in modules and not hasattr(modules[name], f"{tensor}_mask"):
                prune.identity(modules[name], tensor)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the pruned weights of the last forward pass, which the next pruning reads, and the length of windows."""
        if "window" in state:
            self._window = state["window"]
            self.session.step.resize(state["window"])
        modules = dict(self.run.model.named_modules())
        for name, tensor, weight in state.get("pruned", ()):
            if name in modules:
                setattr(modules[name], tensor, weight.to(getattr(modules[name], tensor).device))


def pruned_in(run: Run) -> list[list[Any]]:
    """Return, for each mask of torch's pruning, the names of module and parameter, and the weight of the last forward pass."""
    return [
        [name, hook._tensor_name, getattr(module, hook._tensor_name).detach()]
        for name, module in run.model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, prune.BasePruningMethod)
    ]
