"""Values for the tensors of a model that was built on the device ``meta``, where tensors have shapes and no values.

Each module with such tensors is initialized alone, with its own tensors whole, and each rank keeps its shards: no rank holds
more than its shards and the tensors of one module. All ranks draw the same random numbers, so the weights do not depend on the
number of ranks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from cadenza.drivers.consensus import Meeting, decided
from cadenza.drivers.sharding import is_sharded, laid_out, local, region_of, whole
from cadenza.drivers.weight_files import tensors_in_file
from cadenza.errors import DistributedError
from cadenza.loading.rng import draw_seed, preserve_rng_state, seed_all
from cadenza.status.formats import counted, few

Init = Callable[[nn.Module], object]
"""Sets the tensors that a module holds itself, in place, as ``reset_parameters`` does."""


def empty_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers on the device ``meta``, by name; one that several modules have only once."""
    if not any(tensor.is_meta for tensor in tensors_of(model.modules())):
        return {}
    return {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta}


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers that modules hold themselves. One that several modules have occurs several times."""
    held = [values for module in modules for values in (module._parameters, module._buffers)]
    return [tensor for values in held for tensor in values.values() if tensor is not None]


def check_can_materialize(model: nn.Module, init: Init | None = None, weights: str | PathLike[str] | None = None) -> None:
    """Raise `ValueError` if a tensor is lazy, or on the device ``meta`` and would get no value; see `materialize`."""
    tensors = tensors_of(model.modules())
    if any(map(is_lazy, tensors)):
        not_made = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if is_lazy(tensor)]
        raise ValueError(
            f"model has {len(not_made)} uninitialized lazy tensors: {few(not_made, 3)}. Run the model once on a batch before "
            "you make the optimizer and the trainer."
        )
    if init is not None or not any(tensor.is_meta for tensor in tensors):
        return
    empty = empty_tensors(model)
    aliases = aliases_in(model)
    stored = set() if weights is None else set(tensors_in_file(weights, aliases))
    unset = [name for name in empty if not stored & {*aliases[name]}]
    paths = {
        name: [model.get_submodule(name.rsplit(".", depth)[0]) for depth in range(1, name.count(".") + 1)] for name in unset
    }
    if lost := [name for name in unset if not any(map(_reset_of, [model, *paths[name]]))]:
        raise ValueError(_lost(model, lost))


def materialize(
    model: nn.Module,
    device: torch.device,
    meeting: Meeting,
    *,
    parameters_on: torch.device | None = None,
    init: Init | None = None,
    weights: str | PathLike[str] | None = None,
) -> None:
    """Give a value to each parameter and buffer on the device ``meta``, in place. Every rank must call this.

    Modules are initialized one at a time, children before parents: by `init` and, if that does not set all of their own
    tensors, by ``reset_parameters()``. Then what `weights` holds is read. Tensors on other devices keep their values.

    Args:
        model: The model, which may be sharded. Its parameters stay the same objects.
        device: The device of this rank.
        meeting: The ranks. The main process draws a seed for all of them.
        parameters_on: The device of the parameters. None: `device`, where buffers always are.
        init: See `Init`.
        weights: A safetensors file, or an index of several; see `tensors_in_file`. Each rank reads its own shards.

    Raises:
        ValueError: A tensor got no value, or a shape differs. The model is on the device ``meta`` again then.
        DistributedError: This happened on another rank.
    """
    names = [*empty_tensors(model)]
    if not names or device.type == "meta":
        return
    seed = meeting.broadcast(draw_seed())
    _allocate(model, device, parameters_on or device)
    targets = {name: tensor for name, tensor in [*model.named_parameters(), *model.named_buffers()] if name in {*names}}

    def act() -> None:
        with preserve_rng_state(), torch.no_grad():
            seed_all(seed)
            _Materializing(model, targets, init, weights, tells=meeting.rank == 0).all()

    try:
        decided(
            meeting,
            act,
            lambda _: None,
            lambda rank, told: DistributedError(f"rank {rank} cannot initialize the model: {told}"),
        )
    except BaseException:
        made = {_storage(target) for target in targets.values()}
        _replace(model, lambda tensor: torch.empty_like(tensor, device="meta") if _storage(tensor) in made else tensor)
        raise


class _Materializing:
    """One pass over the modules of a model, which sets its `targets`."""

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Tensor],
        init: Init | None,
        weights: str | PathLike[str] | None,
        *,
        tells: bool,
    ) -> None:
        self._model, self._targets, self._init, self._path, self._tells = model, targets, init, weights, tells
        aliases = aliases_in(model)
        stored = {} if weights is None else tensors_in_file(weights, aliases)
        self._found = {name: stored[alias] for name in targets for alias in aliases[name] if alias in stored}
        self._extra = stored.keys() - {alias for name in targets for alias in aliases[name]}
        self._writes = _Writes({_storage(target) for target in targets.values()})
        self._needed = {_storage(target) for name, target in targets.items() if name not in self._found}

    def all(self) -> None:
        if wrong := [name for name, value in self._found.items() if value.shape != tuple(self._targets[name].shape)]:
            name = wrong[0]
            raise ValueError(
                f"{self._path} does not fit the model: {counted(len(wrong), 'tensor')} differ in shape, such as {name!r}, "
                f"which has {self._found[name].shape} there and {tuple(self._targets[name].shape)} in the model."
            )
        if self._path is not None and self._tells:
            self._warn()
        for module in _children_first(self._model, set()):
            if any(_storage(tensor) in self._needed for tensor in tensors_of(module.modules())):
                self._initialize(module)
        for name, stored in self._found.items():
            target = self._targets[name]
            local(target).copy_(local(laid_out(stored, target)))
            self._writes.kept.add(_storage(target))
        if lost := [name for name, target in self._targets.items() if _storage(target) not in self._writes.kept]:
            raise ValueError(_lost(self._model, lost))

    def _initialize(self, module: nn.Module) -> None:
        own = {name: item for name, item in _own(module) if _storage(item) in self._needed}
        if self._init is not None:
            self._call(self._init, module, own)
        left = {name: value for name, value in own.items() if _storage(value) not in self._writes.kept}
        reset = _reset_of(module)
        if reset is not None and (left or (not own and self._init is None)):
            self._call(lambda _: reset(), module, left)

    def _call(self, act: Init, module: nn.Module, own: Mapping[str, Tensor]) -> None:
        """Call `act` with the module, in which stand-ins replace its own tensors; copy the shards of what it sets."""
        with _stand_ins(module, self._writes.unset) as stand_ins:
            with self._writes.noted():
                act(module)
            now = dict(_own(module))
        for name, target in own.items():
            given = now.get(name)
            if given is stand_ins[name] and _storage(given) not in self._writes.storages:
                continue
            if given is None or given.is_meta or given.shape != target.shape or given.dtype != target.dtype:
                shown = "nothing" if given is None else f"{given.dtype} {list(given.shape)} on {given.device}"
                raise ValueError(
                    f"the initialization of {type(module).__name__} replaced {name!r} by {shown}; expected {target.dtype} "
                    f"{list(target.shape)} on {stand_ins[name].device}. Set its values in place."
                )
            local(target).copy_(given.detach()[region_of(target)] if is_sharded(target) else given.detach())
            self._writes.kept.add(_storage(target))

    def _warn(self) -> None:
        saved = self._model.state_dict().keys()
        kinds = {
            "are not in the model, and are not used": self._extra,
            "of the model are not in it, and are initialized": (self._targets.keys() - self._found.keys()) & saved,
        }
        for told, names in kinds.items():
            if names:
                warnings.warn(f"{self._path}: {counted(len(names), 'tensor')} {told}: {few(sorted(names), 3)}", stacklevel=2)


class _Writes(TorchDispatchMode):
    """Notes the storages that are written to, and draws random numbers for a sharded tensor as for the whole one."""

    def __init__(self, targets: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._all = targets
        self.storages: set[int] = set()
        """The storages that were written to in the last `noted`."""
        self.kept: set[int] = set()
        """The storages of the model's tensors that have values."""

    @property
    def unset(self) -> set[int]:
        """The storages of the model's tensors that have no values yet."""
        return self._all - self.kept

    @contextmanager
    def noted(self) -> Iterator[None]:
        self.storages.clear()  # of tensors that may be gone: others could have their addresses now
        with self:
            yield
        self.kept |= self.storages & self._all

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        random = torch.Tag.nondeterministic_seeded in function.tags and args and is_sharded(args[0])
        written = [
            argument
            for argument in function._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if random and (written or function._schema.name.endswith("_like")):
            result = _drawn(function, args, kwargs, in_place=bool(written))
        else:
            result = function(*args, **kwargs)
        given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
        for value in written:
            for tensor in given[value.name] if isinstance(given.get(value.name), list | tuple) else [given.get(value.name)]:
                if isinstance(tensor, Tensor):
                    self.storages.add(_storage(tensor))
        return result


def _drawn(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, in_place: bool) -> Tensor:
    """Draw the random numbers of the whole tensor, so that they do not depend on the ranks; keep those of the shard."""
    target = args[0]
    numbers = torch.empty(target.shape, dtype=target.dtype, device=local(target).device)
    numbers = function(numbers, *args[1:], **kwargs)
    if not in_place:
        return laid_out(numbers, target)
    local(target).copy_(numbers[region_of(target)])
    return target  # type: ignore[no-any-return]  # the first argument of a random function in place is a tensor


@contextmanager
def _stand_ins(module: nn.Module, unset: set[int]) -> Iterator[dict[str, Tensor]]:
    """Return a context in which a module holds whole tensors in place of its own, on the same devices, with their values.

    Those of which the storage is in `unset` have no values.
    """
    parameters, buffers = dict(module._parameters), dict(module._buffers)
    made: dict[str, Tensor] = {}
    for name, item in _own(module):
        values = (
            torch.empty(item.shape, dtype=item.dtype, device=local(item).device)
            if _storage(item) in unset
            else whole(item).clone()
        )
        made[name] = nn.Parameter(values, item.requires_grad) if isinstance(item, nn.Parameter) else values
    try:
        module._parameters.update({name: made[name] for name, parameter in parameters.items() if parameter is not None})  # type: ignore[misc]
        module._buffers.update({name: made[name] for name, buffer in buffers.items() if buffer is not None})
        yield made
    finally:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


def _allocate(model: nn.Module, device: torch.device, parameters_on: torch.device) -> None:
    made: dict[int, tuple[Tensor, Tensor]] = {}  # of a buffer that several modules have

    def allocated(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if id(tensor) not in made:
            on = parameters_on if isinstance(tensor, nn.Parameter) else device
            made[id(tensor)] = tensor, torch.empty_like(tensor, device=on)
        return made[id(tensor)][1]

    attributes = [(parameter, dict(parameter.__dict__)) for parameter in model.parameters() if parameter.is_meta]
    _replace(model, allocated)
    for tensor, own in attributes:
        tensor.__dict__.update(own)


def _replace(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer. Parameters stay the same objects: optimizers hold them, and modules share them."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(change)  # FSDP2 overrides it, to follow the change
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    if module not in seen:
        seen.add(module)
        for child in module.children():
            yield from _children_first(child, seen)
        yield module


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in [*module._parameters.items(), *module._buffers.items()] if value is not None]


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that sets a module's own tensors; torch has two names for it."""
    methods = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next(filter(callable, methods), None)


def aliases_in(model: nn.Module) -> dict[str, list[str]]:
    """Return, for each name of a tensor, all its names: several modules may hold it."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in tensors:
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: by_tensor[id(tensor)] for name, tensor in tensors}


def _storage(tensor: Tensor) -> int:
    number: int = local(tensor).untyped_storage()._cdata
    return number


def _lost(model: nn.Module, names: list[str]) -> str:
    modules = {name: type(model.get_submodule(name.rpartition(".")[0])).__name__ for name in names}
    shown = few([f"{name} of {modules[name]}" for name in names], 3)
    return (
        f"the model was built on the device 'meta', and nothing sets the values of {counted(len(names), 'tensor')}: {shown}. "
        f"Give {' and '.join(dict.fromkeys([*modules.values()][:3]))} a method reset_parameters() that sets them in place, as "
        "torch's layers have; or pass FsdpDriver(init=function), which is called with each module; or create these tensors "
        "with device='cpu'. Buffers that are computed in __init__ have no values on 'meta' either."
    )
