"""Flags that hooks may change in a model: ``requires_grad`` of parameters and the training mode of modules."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.engine.rank_sync import Decide
from cadenza.optim.model_state import plain_name
from cadenza.optim.parameters import parameters_of
from cadenza.status.formats import counted


class ModuleFlags:
    """Finds the flags that changed since the start of a run, for the checkpoint.

    A callback that restores flags itself when a run continues, such as `Freeze`, calls `expect`.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._expected: dict[tuple[str, str], bool] = {}
        self.saved: Mapping[str, Mapping[str, bool]] = {}
        """The result of `changed` in the checkpoint at which this run continues."""
        self.keeps_modes: bool = False
        """Whether a model in evaluation mode is trained in this mode, as in Lightning."""

    def begin(self, driver: Driver, model: nn.Module, decide: Decide) -> None:
        """Set the modes, record the present flags as those of the start, then set the flags of the checkpoint.

        A model in evaluation mode is put into training mode. In a model in training mode, each module keeps its mode. Every
        rank must call this.
        """
        if not self.keeps_modes:
            kept = [one for one in self._model.modules() if not one.training] if self._model.training else []
            model.train()  # also if it is in training mode: its class may define what this does
            for module in kept:
                module.training = False
        self._expected = {(flag, name): getattr(part, flag) for flag, name, part in self._parts()}
        if self.saved and (lines := list(self._restored())):
            decide("flags restored", "; ".join(lines), who="the trainer")
            driver.renew(model)

    def expect(self, parts: Iterable[Tensor | nn.Module], on: bool) -> None:
        """Expect the flags of `parts` to be `on`. Checkpoints leave them out, as the callback sets them again."""
        own = {id(part) for part in parts}
        self._expected |= {(flag, name): on for flag, name, part in self._parts() if id(part) in own}

    def rewind(self) -> None:
        """Set the flags of the start again: the run continues at a checkpoint before the changes."""
        for flag, name, part in self._parts():
            setattr(part, flag, self._expected.get((flag, name), getattr(part, flag)))

    def doubts(self, trained: Container[int]) -> Iterator[str]:
        """Yield a warning if parameters in modules in evaluation mode are trained. `trained` are the ids of parameters."""
        if self._model.training or self.keeps_modes:
            modules = in_evaluation_mode(self._model, trained)
            if names := [name or "the model" for name, trains in modules.items() if trains]:
                yield (
                    f"{counted(len(names), 'module')} with parameters that are trained, in evaluation mode: "
                    f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}. Their dropout is off, and their BatchNorm "
                    "statistics do not change. Call model.train() before the run, unless this is on purpose."
                )

    @contextmanager
    def held(self, decide: Decide, who: str) -> Iterator[None]:
        """Undo changes of flags inside of the ``with`` block: hooks at the start of a run that continues are called again.

        Args:
            decide: Records the changes that were undone.
            who: The author of the decision.
        """
        before = [(flag, name, part, getattr(part, flag)) for flag, name, part in self._parts()]
        yield
        lines = list[str]()
        for flag, name, part, value in before:
            if getattr(part, flag) is not value:
                setattr(part, flag, value)
                lines.append(f"{flag} of {name or 'the model'} is {value}")
        if lines:
            decide("flags restored", "; ".join(lines), who=who)

    def changed(self) -> dict[str, dict[str, bool]]:
        """Return, by flag and name, the flags that differ from the expected ones."""
        changed: dict[str, dict[str, bool]] = {}
        for flag, name, part in self._parts():
            present = getattr(part, flag)
            if present is not self._expected.get((flag, name), present):
                changed.setdefault(flag, {})[name] = present
        return changed

    def _restored(self) -> Iterator[str]:
        """Set the saved flags; yield a line for each one that changes."""
        for flag, name, part in self._parts():
            saved = self.saved.get(flag, {}).get(name)
            if saved is None:
                continue
            self._expected[flag, name] = not saved  # so that the next checkpoint holds it, too
            if getattr(part, flag) is not saved:
                setattr(part, flag, saved)
                yield f"{flag} of {name or 'the model'} is {saved}"

    def _parts(self) -> Iterator[tuple[str, str, Any]]:
        """Yield each flag with the name and the object that holds it."""
        modules, known = [(plain_name(path), module) for path, module in self._model.named_modules()], set[int]()
        for path, module in modules:  # as named_parameters does, in one walk with that over the modules
            for name, parameter in module._parameters.items():
                if parameter is not None and id(parameter) not in known:
                    known.add(id(parameter))
                    yield "requires_grad", f"{path}.{name}" if path else name, parameter
        for index, tensor in enumerate(parameters_of(self._optimizers)):
            if id(tensor) not in known:  # such as one of a loss
                yield "requires_grad", f"parameter {index} of the optimizers", tensor
        for path, module in modules:
            yield "training", path, module


def in_evaluation_mode(model: nn.Module, trained: Container[int]) -> dict[str, bool]:
    """Return the outermost modules in evaluation mode by name, and whether parameters in it, in this mode, are trained.

    Args:
        model: The model.
        trained: The ids of parameters that an optimizer holds.
    """
    found: dict[str, bool] = {}
    for path, module in model.named_modules():
        if not module.training:
            outermost = next((one for one in found if not one or path.startswith(f"{one}.")), path)
            own = [one for one in module._parameters.values() if one is not None]
            found[outermost] = found.get(outermost, False) or any(one.requires_grad and id(one) in trained for one in own)
    return found
