"""Move modules outside of the model to the device of the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from cadenza.engine.objective import on_host
from cadenza.hooks.moments import Callback

if TYPE_CHECKING:
    from cadenza.run import Run


class MoveModules(Callback):
    """Move modules that are not part of the model, such as a loss with buffers, to the device when a run is set up.

    The modules stay on the device after the run. Checkpoints hold their parameters and buffers, such as the learned centres of
    a loss. Their parameters are trained if an optimizer holds them. `Evaluate` moves its own
    metrics.

    With multiple ranks: all ranks start with the weights of the main process, and gradients are averaged before an
    update.

    Args:
        modules: The modules. They are moved in place, so that references to them stay valid.

    Raises:
        TypeError: An argument is not an ``nn.Module``.

    >>> import torch
    >>> from cadenza.testing import tiny_run
    >>> loss = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    >>> run = tiny_run(callbacks=[MoveModules(loss)])
    >>> loss.weight.device == run.device
    True
    """

    def __init__(self, *modules: nn.Module) -> None:
        if not modules:
            raise TypeError("MoveModules takes the modules to move, such as MoveModules(loss); got none")
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"MoveModules takes modules, which can be moved in place; got {type(module).__name__}")
        self.modules = modules

    def on_setup(self, run: Run) -> None:
        for module in self.modules:
            module.to(run.device)
            if run.driver.world_size > 1:
                module.load_state_dict(run.driver.broadcast(on_host(module.state_dict())))

    def state_dict(self) -> dict[str, Any]:
        states = {str(index): dict(state) for index, module in enumerate(self.modules) if (state := module.state_dict())}
        return {"modules": states} if states else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for index, saved in state["modules"].items():
            self.modules[int(index)].load_state_dict(saved)
