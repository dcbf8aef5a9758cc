"""What hooks may switch on and off in a model: ``requires_grad`` of its parameters and the training mode of its modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from cadenza.batching import parameters_of

if TYPE_CHECKING:
    from cadenza.run import Run


class Switches:
    """Notes which flags differ from those with which a run begins, so that a checkpoint can hold them.

    A callback that sets flags again when a run continues, as `Freeze` does, calls `expect`: these flags are its own.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._expected: dict[tuple[str, str], bool] = {}
        self.saved: Mapping[str, Mapping[str, bool]] = {}
        """What `changed` returned in the run that wrote the checkpoint at which this one continues."""

    def begin(self, run: Run) -> None:
        """Take the present flags as those with which the run begins, then set those of the checkpoint.

        Every rank must call this.
        """
        self._expected = {(flag, name): getattr(part, flag) for flag, name, part in self._parts()}
        if lines := list(self._restored()):
            run.decide("flags restored", "; ".join(lines), who="the trainer")
            run.driver.renew(run.model)

    def expect(self, parts: Iterable[Tensor | nn.Module], on: bool) -> None:
        """Leave out of checkpoints that the flags of `parts` are `on`: the callback that set them sets them again."""
        own = {id(part) for part in parts}
        self._expected |= {(flag, name): on for flag, name, part in self._parts() if id(part) in own}

    def changed(self) -> dict[str, dict[str, bool]]:
        """Return, by flag and name, the flags that are not as expected."""
        changed: dict[str, dict[str, bool]] = {}
        for flag, name, part in self._parts():
            present = getattr(part, flag)
            if present is not self._expected.get((flag, name), present):
                changed.setdefault(flag, {})[name] = present
        return changed

    def _restored(self) -> Iterator[str]:
        """Set the flags that are saved; yield a line for each that moves."""
        for flag, name, part in self._parts():
            saved = self.saved.get(flag, {}).get(name)
            if saved is None:
                continue
            self._expected[flag, name] = not saved  # the next checkpoint holds it as well
            if getattr(part, flag) is not saved:
                setattr(part, flag, saved)
                yield f"{flag} of {name or 'the model'} is {saved}"

    def _parts(self) -> Iterator[tuple[str, str, Any]]:
        """Yield each flag with the name and the object that has it."""
        known: set[int] = set()
        for name, parameter in self._model.named_parameters():
            known.add(id(parameter))
            yield "requires_grad", name, parameter
        for index, tensor in enumerate(parameters_of(self._optimizers)):
            if id(tensor) not in known:  # of a loss, say
                yield "requires_grad", f"parameter {index} of the optimizers", tensor
        for name, module in self._model.named_modules():
            yield "training", name, module
