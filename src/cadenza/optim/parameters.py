"""The parameters of optimizers: their gradients, and those that are not part of the model, such as a learned temperature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.drivers.sharding import laid_out
from cadenza.errors import CheckpointMismatchError
from cadenza.optim.model_state import Walk, plain_name
from cadenza.status.formats import counted, few

if TYPE_CHECKING:
    from cadenza.run import Run


def parameters_of(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """Yield every parameter that the optimizers update."""
    return (parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"])


def distinct_gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Return the gradients of all parameters of the optimizers, without duplicates in the same memory.

    Two optimizers may hold one parameter, and two parameters may share one gradient.
    """
    found: dict[Any, Tensor] = {}
    for parameter in parameters_of(optimizers):
        gradient = parameter.grad
        if gradient is not None:
            dense = type(gradient) is Tensor and gradient.layout is torch.strided
            found[(gradient.data_ptr(), gradient.shape) if dense else id(gradient)] = gradient
    return list(found.values())


class ModelParameters(list[nn.Parameter]):
    """The parameters of a model, in the order of ``model.parameters()``, with their names.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    >>> matrices, others = ModelParameters(model).split(lambda name, parameter: parameter.ndim >= 2)
    >>> len(matrices), len(others), ModelParameters(model).names
    (1, 3, ['0.weight', '0.bias', '1.weight', '1.bias'])
    """

    def __init__(self, model: nn.Module) -> None:
        named = Walk(model).parameters
        super().__init__(named.values())
        self.names: list[str] = [plain_name(name) for name in named]
        """The name of each parameter, as in ``model.named_parameters()``."""

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"the function of the optimizer gets the list of the model's parameters, which has no {name!r}. Give the list "
                "to the optimizer, choose parameters with its split(...), or make the optimizer before the trainer.",
                name=name,
                obj=self,
            )

    def split(self, condition: Callable[[str, nn.Parameter], bool]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters for which ``condition(name, parameter)`` is true, and the others."""
        chosen: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in zip(self.names, self, strict=True):
            (chosen if condition(name, parameter) else others).append(parameter)
        return chosen, others


class ExtraParameters:
    """The parameters that the optimizers of a run hold and the model does not, and the modules of the loss.

    On multiple ranks, this class gives these parameters the values of the main process and averages their gradients before each
    update; the driver does both for the model only. Checkpoints hold their values and the buffers of the modules.
    """

    def __init__(self, compute: Callable[..., Any]) -> None:
        self.modules: list[nn.Module] = modules_of(compute)
        self.parameters: list[Tensor] = []
        """In the order of the optimizers, without duplicates. Empty until `begin`."""
        self._unchecked: set[int] = set()

    def begin(self, run: Run, walk: Walk | None = None) -> None:
        """Find the parameters, and give all ranks the same values. Every rank must call this. `walk` is one over the model."""
        own = {*map(id, (walk or Walk(run.driver.unwrap(run.model))).parameters.values())}
        self.parameters = list(
            {id(parameter): parameter for parameter in parameters_of(run.optimizers) if id(parameter) not in own}.values()
        )
        self._unchecked = {id(parameter) for parameter in self.parameters}
        buffers = [buffer for module in self.modules for buffer in module.buffers()]
        run.driver.share_tensors([*(parameter.detach() for parameter in self.parameters), *buffers])

    def check_devices(self, run: Run) -> None:
        """Raise `ValueError` if a parameter is on another device than the run. Call it after the hooks that move modules."""
        for parameter in self.parameters:
            if parameter.device != run.device:
                raise ValueError(
                    f"an optimizer holds a parameter of shape {tuple(parameter.shape)} that is outside of the model and on "
                    f"{parameter.device}; expected it on {run.device}, as the run. Create it there, or make it part of "
                    "a module that is moved: supervised(loss_module) or MoveModules(module)."
                )

    def before_update(self, run: Run, optimizers: Sequence[Optimizer]) -> None:
        """Average the gradients over all ranks. Warn once about parameters without gradient. Every rank must call this."""
        held = {id(parameter) for parameter in parameters_of(optimizers)}
        updated = [parameter for parameter in self.parameters if id(parameter) in held]
        if run.driver.reduces:
            run.driver.average_gradients(updated)
        if not self._unchecked:
            return
        without = [new for new in updated if id(new) in self._unchecked and new.requires_grad and new.grad is None]
        self._unchecked -= held
        if without:
            run.warn(
                f"an optimizer holds {counted(len(without), 'parameter')} outside of the model, such as one of shape "
                f"{tuple(without[0].shape)}, that have no gradient in their first update. If the loss does not use them, make "
                "the optimizer of the parameters that it uses."
            )

    def doubts(self, held: set[int], of_model: Iterable[nn.Parameter]) -> Iterator[str]:
        """Yield a warning if no optimizer holds a parameter of the loss. `held` has the ids of the held parameters."""
        named = [pair for module in self.modules for pair in module.named_parameters()]
        known = {*held, *map(id, of_model)} if named else held
        left = [name for name, parameter in named if parameter.requires_grad and id(parameter) not in known]
        if left:
            yield (
                f"the loss has {counted(len(left), 'parameter')} that no optimizer holds, so they are not trained: "
                f"{few(left)}. Give them to an optimizer, or set requires_grad_(False)."
            )

    def shapes(self) -> list[list[int]]:
        """Return the shapes of the parameters. A run that continues must have the same."""
        return [list(parameter.shape) for parameter in self.parameters]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint; empty if there are no such parameters or buffers."""
        buffers = [_buffers_of(module) for module in self.modules]
        if not self.parameters and not any(buffers):
            return {}
        return {"parameters": [parameter.detach() for parameter in self.parameters], "buffers": buffers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned. An empty state changes nothing. Every rank must call this.

        Raises:
            CheckpointMismatchError: A name or a shape differs. Nothing is changed.
        """
        if not state:
            return
        if (before := [list(value.shape) for value in state["parameters"]]) != (now := self.shapes()):
            raise CheckpointMismatchError(
                f"parameters outside of the model: saved {before}, now {now}. Give the same optimizers."
            )
        pairs = list(zip(self.parameters, state["parameters"], strict=True))
        for own, saved in zip([_buffers_of(module) for module in self.modules], state["buffers"], strict=False):
            if (theirs := _shapes(saved)) != (ours := _shapes(own)):
                raise CheckpointMismatchError(
                    f"the buffers of the loss differ: saved {theirs}, now {ours}. Give the same loss."
                )
            pairs += [(own[name], value) for name, value in saved.items()]
        with torch.no_grad():
            for tensor, value in pairs:
                tensor.copy_(laid_out(value, tensor))


def modules_of(compute: object) -> list[nn.Module]:
    """Return the known modules of a loss function: the function itself, or the loss in `supervised`."""
    return [function for function in (compute, getattr(compute, "loss_fn", None)) if isinstance(function, nn.Module)]


def _buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers in the ``state_dict`` of a module, by name."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}
