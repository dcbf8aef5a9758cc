"""Shared changes by Lightning callbacks: parameter groups, ``requires_grad``, pruning masks and window length."""

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
    """The state changed by the Lightning callbacks of a run. One instance per run.

    Args:
        run: The run, before any hook of Lightning.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._groups = signature(run.optimizers)
        self._trainable = Trainable(run.model)
        self._window: int | None = None

    def resize(self, batches: int) -> None:
        """Change the batches per step from the next step on, for ``trainer.accumulate_grad_batches``."""
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
        """Return the additional state for a checkpoint: added parameter groups and pruned parameters."""
        state: dict[str, Any] = {}
        if signature(self.run.optimizers) != self._groups:
            state["groups"] = groups_of(self.run)
        if pruned := pruned_in(self.run):
            state["pruned"] = pruned
        if self._window is not None:
            state["window"] = self._window
        return state

    def expect(self, state: Mapping[str, Any]) -> None:
        """Restore the structure of model and optimizers from `state`, before their states are loaded."""
        if "groups" in state:
            regroup(self.run, state["groups"])
        modules = dict(self.run.model.named_modules())
        for name, tensor, _ in state.get("pruned", ()):
            if name in modules and not hasattr(modules[name], f"{tensor}_mask"):
                prune.identity(modules[name], tensor)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the window length and the pruned weights of the last forward pass, which the next pruning reads."""
        if "window" in state:
            self._window = state["window"]
            self.session.step.resize(state["window"])
        modules = dict(self.run.model.named_modules())
        for name, tensor, weight in state.get("pruned", ()):
            if name in modules:
                setattr(modules[name], tensor, weight.to(getattr(modules[name], tensor).device))


def pruned_in(run: Run) -> list[list[Any]]:
    """Return module name, parameter name and last-forward weight for each of torch's pruning masks."""
    return [
        [name, hook._tensor_name, getattr(module, hook._tensor_name).detach()]
        for name, module in run.model.named_modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, prune.BasePruningMethod)
    ]
