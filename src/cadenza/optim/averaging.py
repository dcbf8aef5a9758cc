"""Running averages of the weights of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from cadenza.drivers.sharding import is_sharded, locals_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback, HeldWeights
from cadenza.optim.held_weights import holders_in
from cadenza.optim.model_state import buffers_of, fitted, plain_name, set_buffer, state_of
from cadenza.status.decisions import COMPLETE, decide
from cadenza.status.formats import counted

if TYPE_CHECKING:
    from cadenza.run import Run

_INSIDE = "module."  # torch's prefix for the names of the model's tensors


class Average(AveragedModel):
    """A running average of the parameters of a model. Buffers are not averaged: they are copies of the last ones.

    This is torch's class with another update. The update of torch copies its counter to the device each time, which waits for
    the device, and averages in the precision of the parameters: in bfloat16, a weight below 1/256 is rounded to nothing. This
    update averages parameters of half precision in float32.

    Args:
        model: The model to copy, on its device.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(nn.Module())
        sharded = any(map(is_sharded, model.parameters()))  # torch cannot copy such a module; its named tensors suffice
        self.module: nn.Module = _mirror(model, {}) if sharded else deepcopy(model, _computed_in(model))
        self.requires_grad_(False)
        for parameter in self.module.parameters():
            if parameter.dtype in (torch.float16, torch.bfloat16):
                parameter.data = parameter.data.float()
        self._pairs: _Pairs | None = None

    @property
    def n_averaged(self) -> Tensor:  # type: ignore[override]  # torch's is an attribute
        """The number of updates as a tensor. It is set when it is read, as setting it at each update would cost 3 us."""
        counter = cast("Tensor", super().__getattr__("n_averaged"))  # a buffer
        return counter if self._pairs is None else counter.fill_(self._pairs.updates)

    @property
    def updates(self) -> int:
        """The number of updates."""
        return int(self.n_averaged) if self._pairs is None else self._pairs.updates

    def update_parameters(self, model: nn.Module, weight_of_new: float = 1.0) -> None:
        """Add the weights of `model` to the average. The first update copies them; later ones have this weight."""
        if self._pairs is None or self._pairs.model is not model:
            self._pairs = _Pairs(self.module, model, self.updates)
        with torch.no_grad():
            self._pairs.update(weight_of_new)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the state of torch's class."""
        self._buffers["n_averaged"] = self.n_averaged  # sets it
        return super().state_dict(*arguments, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Restore a state that ``state_dict`` returned, also on another number of ranks."""
        self._pairs = None
        return super().load_state_dict(fitted(self, state_dict), strict, assign)

    @torch.no_grad()
    def put_into(self, model: nn.Module) -> None:
        """Copy the averaged weights and the buffers into the tensors of `model`."""
        _put(model, _tensors(self.module))

    @contextmanager
    def in_place(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which `model` has the averaged weights. It then gets its own again, also after an error.

        Weights are copied twice at the start and once at the end. Inside, memory holds them twice.
        """
        own = {name: tensor.detach().clone() for name, tensor in _tensors(model).items()}
        try:
            self.put_into(model)
            yield
        finally:
            with torch.no_grad():
                _put(model, own)


class Averaging(Callback):
    """Base of the callbacks that average the weights: they save the average, offer it by name, and use it at the end.

    Args:
        weights: The name of the averaged weights, as in ``Evaluate(weights=...)``.
        use_at_end: End with the averaged weights in the model, unless an error or a signal ended the run.
    """

    def __init__(self, weights: str, *, use_at_end: bool) -> None:
        kind = type(self).__name__
        if not isinstance(weights, str) or not weights:
            raise ValueError(f"{kind}: name must be a text such as {kind.lower()!r}; got {weights!r}")
        self.name: str = kind if weights == kind.lower() else f"{kind}({weights})"
        self.weights: str = weights
        self.use_at_end: bool = use_at_end
        self.average: Average | None = None
        """The averaged model of the current run, or of the last one."""

    def weight_of_new(self, updates: int) -> float:
        """Return the weight of the new values in the next average, after so many updates."""
        raise NotImplementedError

    def on_setup(self, run: Run) -> None:
        self.average = Average(run.model)
        holders_in(hooks_of(run))  # raises now if two have one name

    def on_fit_start(self, run: Run) -> None:
        if self.use_at_end:
            # After the last save: a checkpoint holds the weights with which the run can continue.
            run.at_end(partial(self._end, run))

    def update(self, run: Run) -> None:
        """Add the present weights of the model to the average. Every rank must call this."""
        average = self._of_run()
        average.update_parameters(run.model, self.weight_of_new(average.updates))

    @contextmanager
    def in_place(self, run: Run) -> Iterator[None]:
        """Return a context in which the model has the averaged weights. It then gets its own again, also after an error.

        Before the first update there is no average, and the model keeps its own weights.
        """
        average = self._of_run()
        if not average.updates:
            yield
            return
        with average.in_place(run.model):
            yield

    def put_in_place(self, run: Run) -> None:
        """Copy the averaged weights into the model."""
        self._of_run().put_into(run.model)

    def put_in_place_again(self, run: Run, state: Mapping[str, Any]) -> None:
        self.average = Average(run.model)
        self.load_state_dict(state)
        if self.use_at_end and self.average.updates:
            self.average.put_into(run.model)

    def _end(self, run: Run) -> None:
        if run.outcome is None or run.outcome.kind not in COMPLETE:
            return
        who, updates = hooks_of(run).name_of(self), self._of_run().updates
        if updates:
            self.put_in_place(run)
            data = {"weights": self.weights, "updates": updates}
            decide(run, "averaged weights in place", f"{self.weights!r}, the average of {updates} updates", who=who, data=data)
        else:
            run.warn(f"{who}: the run ended before the first average, so the model keeps its own weights")

    def held_weights(self) -> dict[str, HeldWeights | None]:
        """Return the name of the averaged weights, and where the state has them; None before the first update."""
        is_begun = self.average is not None and self.average.updates > 0
        return {self.weights: HeldWeights("average", _INSIDE) if is_begun else None}

    def _of_run(self) -> Average:
        if self.average is None:
            raise RuntimeError(f"{type(self).__name__} has no average yet: it is made when a run is set up")
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {} if self.average is None else {"average": state_of(self.average)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._of_run().load_state_dict(state["average"])


class _Pairs:
    """The pairs of tensors of an average and its model. They are found once: the search takes longer than the update."""

    def __init__(self, average: nn.Module, model: nn.Module, updates: int) -> None:
        averaged, current = list(average.parameters()), list(model.parameters())
        if len(averaged) != len(current):
            raise RuntimeError(
                f"the average has {counted(len(averaged), 'parameter')}, and the model {len(current)}: a hook "
                "changed the model after on_setup. Change it before the run, or in on_setup of a callback before the average."
            )
        pairs = list(zip(averaged, current, strict=True))
        self.model, self.updates = model, updates
        self._others = [pair for pair in pairs if not _can_be_averaged(pair[0])]
        self._averaged: list[Tensor] = locals_of(old for old, _ in pairs if _can_be_averaged(old))
        self._current: list[Tensor] = locals_of(new for old, new in pairs if _can_be_averaged(old))
        self._are_alike = all(old.dtype is new.dtype for old, new in zip(self._averaged, self._current, strict=True))
        # Names, not tensors: a module may replace a buffer by a new tensor.
        self._buffers = [
            (old, new, name) for old, new in zip(average.modules(), model.modules(), strict=True) for name in new._buffers
        ]

    def update(self, weight_of_new: float) -> None:
        """Update the average and the buffers."""
        if self.updates and self._averaged:
            pairing = zip(self._averaged, self._current, strict=True)
            current = self._current if self._are_alike else [new.to(old.dtype) for old, new in pairing]
            torch._foreach_lerp_(self._averaged, current, weight_of_new)
        else:
            _copy(self._averaged, self._current)
        if self._buffers or self._others:
            self._copy_others()
        self.updates += 1

    def _copy_others(self) -> None:
        """Copy buffers, and parameters of whole numbers. The shape of a buffer may change in training."""
        pairs: list[tuple[Tensor, Tensor]] = [*self._others]
        for old, new, name in self._buffers:
            source, target = new._buffers[name], old._buffers.get(name)
            if source is None:
                continue
            if target is None or target.shape != source.shape:
                set_buffer(old, name, source.detach().clone())
            else:
                pairs.append((target, source))
        _copy([old for old, _ in pairs], [new for _, new in pairs])


def _can_be_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): tensor for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def _put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into those of a module with the same names. A buffer of another shape is replaced."""
    own, buffers, pairs = _tensors(module), buffers_of(module), list[tuple[Tensor, Tensor]]()
    for name, tensor in tensors.items():
        if name in own and own[name].shape == tensor.shape:
            pairs.append((own[name], tensor))
        elif name in buffers:
            set_buffer(*buffers[name], tensor.clone())
    _copy([old for old, _ in pairs], [new for _, new in pairs])


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    alike: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}  # torch copies the tensors of a mixed list one by one
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        alike.setdefault((target.dtype, source.dtype), []).append(index)
    for some in alike.values():
        torch._foreach_copy_(locals_of(targets[tensor] for tensor in some), locals_of(sources[tensor] for tensor in some))


def _computed_in(model: nn.Module) -> dict[int, Tensor]:
    """Return copies by id of tensors with a graph that modules hold, as with the old ``weight_norm``: deepcopy refuses them."""
    held = (leaf for module in model.modules() for leaf in tree_leaves(vars(module)))
    return {id(tensor): tensor.detach().clone() for tensor in held if isinstance(tensor, Tensor) and not tensor.is_leaf}


def _mirror(module: nn.Module, made: dict[int, nn.Parameter]) -> nn.Module:
    """Return a module that holds copies of all tensors under the same names, half precision as float32.

    `made` are the copies so far, by the parameter: modules that share one share its copy.
    """
    mirror = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) not in made:
            half = parameter.dtype in (torch.float16, torch.bfloat16)
            copied = parameter.detach().float() if half else parameter.detach().clone()
            made[id(parameter)] = nn.Parameter(copied, requires_grad=False)
        mirror.register_parameter(name, made[id(parameter)])
    for name, buffer in module.named_buffers(recurse=False):
        mirror.register_buffer(name, buffer.clone(), persistent=name not in module._non_persistent_buffers_set)
    for name, child in module.named_children():
        mirror.add_module(name, _mirror(child, made))
    return mirror
