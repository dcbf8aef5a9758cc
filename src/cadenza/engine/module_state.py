"""A model beside its weights: flags that hooks change, buffers that its forward pass changes, and its compilation."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_not
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from cadenza.drivers.base import Driver
from cadenza.drivers.name_patterns import check_choice, named_matches
from cadenza.drivers.sharding import same_bits
from cadenza.engine.step_state import Decide
from cadenza.optim.model_state import Walk, is_compiled, plain_name
from cadenza.optim.parameters import parameters_of
from cadenza.optim.precision import BackwardPass
from cadenza.status.formats import counted, few

if TYPE_CHECKING:
    from cadenza.run import Run


def module_flags_of(run: Run) -> ModuleFlags:
    """Return the flags of the model of a run that hooks may change."""
    return run._session.module_flags


class ModuleFlags:
    """Finds the flags that changed since the start of a run, for the checkpoint.

    A callback that restores flags itself when a run continues, such as `Freeze`, calls `expect`.
    """

    def __init__(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        self._model, self._optimizers = model, list(optimizers)
        self._expected: dict[tuple[str, str], bool] = {}
        self.saved: Mapping[str, Mapping[str, bool]] = {}
        """The result of `changed` in the checkpoint at which this run continues."""
        self.walk: Walk | None = None
        """A walk over the model since which no hook was called; None if there is none."""
        self.keeps_modes: bool = False
        """Whether a model in evaluation mode is trained in this mode, as in Lightning."""
        self.doubted: set[str] = set()
        """The warnings about the model that were given."""

    def begin(self, driver: Driver, model: nn.Module, decide: Decide) -> None:
        """Set the modes, record the present flags as those of the start, then set the flags of the checkpoint.

        A model in evaluation mode is put into training mode. In a model in training mode, each module keeps its mode. Every
        rank must call this.
        """
        walk, self.walk = self.walk or Walk(self._model), None
        modules = walk.modules.values()
        own = any(getattr(module.train, "__func__", None) is not nn.Module.train for module in [model, *modules])
        if not self.keeps_modes and (own or not (model.training and self._model.training)):  # else nothing would change
            kept = [module for module in modules if not module.training] if self._model.training else []
            model.train()
            for module in kept:
                module.training = False
        self._expected = {key: getattr(part, key[0]) for key, part in self._parts(walk).items()}
        if self.saved and (lines := list(self._restored())):
            decide("flags restored", "; ".join(lines), who="the trainer")
            driver.renew(model)

    def expect(self, parts: Iterable[Tensor | nn.Module], on: bool) -> None:
        """Expect the flags of `parts` to be `on`. Checkpoints leave them out, as the callback sets them again."""
        own = {id(part) for part in parts}
        self._expected |= {(flag, name): on for (flag, name), part in self._parts().items() if id(part) in own}

    def rewind(self) -> None:
        """Set the flags of the start again: the run continues at a checkpoint before the changes."""
        for (flag, name), part in self._parts().items():
            setattr(part, flag, self._expected.get((flag, name), getattr(part, flag)))

    def doubts(self, named: Mapping[str, nn.Module], trained: Container[int]) -> Iterator[str]:
        """Yield a warning if parameters in modules in evaluation mode are trained. `trained` are the ids of parameters."""
        if self._model.training or self.keeps_modes or self._expected:  # else `begin` sets the mode
            modules = in_evaluation_mode(named, trained)
            expected = [name for name in modules if not self._expected.get(("training", plain_name(name)), True)]
            names = [name or "the model" for name, trains in modules.items() if trains and name not in expected]
            if names:
                yield (
                    f"{counted(len(names), 'module')} with parameters that are trained, in evaluation mode: "
                    f"{few(names)}. Their dropout is off, and their BatchNorm statistics do "
                    "not change. Call model.train() before the run, and after a model.eval() in it, unless this is on purpose."
                )

    @contextmanager
    def held(self, decide: Decide, who: str) -> Iterator[None]:
        """Undo changes of flags inside of the ``with`` block: hooks at the start of a run that continues are called again.

        Args:
            decide: Records the changes that were undone.
            who: The author of the decision.
        """
        before = [(flag, name, part, getattr(part, flag)) for (flag, name), part in self._parts().items()]
        yield
        if lines := [line for flag, name, part, value in before for line in _changed(flag, name, part, value)]:
            decide("flags restored", "; ".join(lines), who=who)

    def changed(self) -> dict[str, dict[str, bool]]:
        """Return, by flag and name, the flags that differ from the expected ones."""
        changed: dict[str, dict[str, bool]] = {}
        for (flag, name), part in self._parts().items():
            present = getattr(part, flag)
            if present is not self._expected.get((flag, name), present):
                changed.setdefault(flag, {})[name] = present
        return changed

    def _restored(self) -> Iterator[str]:
        """Set the saved flags; yield a line for each one that changes."""
        for (flag, name), part in self._parts().items():
            saved = self.saved.get(flag, {}).get(name)
            if saved is None:
                continue
            self._expected[flag, name] = not saved  # so that the next checkpoint holds it, too
            yield from _changed(flag, name, part, saved)

    def _parts(self, walk: Walk | None = None) -> dict[tuple[str, str], Any]:
        """Return by flag and name the objects that hold the flags."""
        walk = walk or Walk(self._model)
        parts: dict[tuple[str, str], Any] = {
            ("requires_grad", plain_name(name)): held for name, held in walk.parameters.items()
        }
        known = {*map(id, walk.parameters.values())}
        for index, tensor in enumerate(parameters_of(self._optimizers)):
            if id(tensor) not in known:  # such as one of a loss
                parts["requires_grad", f"parameter {index} of the optimizers"] = tensor
        return parts | {("training", plain_name(path)): module for path, module in walk.modules.items()}


def _changed(flag: str, name: str, part: Any, value: bool) -> Iterator[str]:
    """Set a flag of a parameter or a module; yield a line if it had another value."""
    if getattr(part, flag) is not value:
        setattr(part, flag, value)
        yield f"{flag} of {name or 'the model'} is {value}"


def in_evaluation_mode(modules: Mapping[str, nn.Module], trained: Container[int]) -> dict[str, bool]:
    """Return the outermost modules in evaluation mode by name, and whether parameters in it, in this mode, are trained.

    Args:
        modules: The modules of a model by name, as in ``named_modules()``.
        trained: The ids of parameters that an optimizer holds.
    """
    found: dict[str, bool] = {}
    for path, module in modules.items():
        if not module.training:
            outermost = next((other for other in found if not other or path.startswith(f"{other}.")), path)
            own = [parameter for parameter in module._parameters.values() if parameter is not None]
            found[outermost] = found.get(outermost, False) or any(
                parameter.requires_grad and id(parameter) in trained for parameter in own
            )
    return found


# -- buffers, such as the statistics of normalization layers ---------------------------------------


class Statistics:
    """The buffers of a model, such as the statistics of normalization layers, and copies of them.

    A layer may replace a buffer by a new tensor. Buffers of one type on one device are copied in one call.

    Args:
        model: The model, with the layers that it keeps. Make a new object if layers are replaced.

    >>> model = nn.BatchNorm1d(2)
    >>> statistics = Statistics(model)
    >>> output = model(torch.rand(4, 2))
    >>> statistics.restore()
    >>> model.running_mean, model.num_batches_tracked
    (tensor([0., 0.]), tensor(0))
    """

    def __init__(self, model: nn.Module) -> None:
        self._held = [
            (layer._buffers, name) for layer in model.modules() for name, buffer in layer._buffers.items() if buffer is not None
        ]
        self._buffers: list[Tensor | None] = []
        self._shapes: list[torch.Size | None] = []
        self._copies: dict[int, Tensor] = {}
        self._alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
        self.keep()

    def keep(self) -> None:
        """Copy the present values."""
        now = [held.get(name) for held, name in self._held]
        shapes = [None if tensor is None or is_lazy(tensor) else tensor.shape for tensor in now]
        if shapes != self._shapes or any(map(is_not, now, self._buffers)):  # some observers resize a buffer in place
            self._buffers, self._shapes = now, shapes
            self._copies = {
                index: tensor.clone() for index, tensor in enumerate(now) if tensor is not None and _can_be_set(tensor)
            }
            self._alike = {}
            for index, copy in self._copies.items():
                copies, buffers = self._alike.setdefault((type(copy), copy.dtype, copy.device), ([], []))
                copies.append(copy)
                buffers.append(cast("Tensor", now[index]))
            return
        for copies, buffers in self._alike.values():
            torch._foreach_copy_(copies, buffers)

    @property
    def copies(self) -> dict[int, Tensor]:
        """The values at the last `keep`, or when the object was made, by the ids of the tensors that the layers hold now."""
        return {id(self._held[index][0].get(self._held[index][1])): copy for index, copy in self._copies.items()}

    def restore(self) -> None:
        """Set the buffers to the values of the last `keep`."""
        for index, copy in self._copies.items():
            held, name = self._held[index]
            held[name] = buffer = cast("Tensor", self._buffers[index])
            if not same_bits(buffer, copy):
                with torch.no_grad():
                    buffer.copy_(copy)


def _can_be_set(tensor: Tensor) -> bool:
    if is_lazy(tensor) or tensor.is_inference() or tensor.is_meta or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return False
    strides = zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ()
    return not any(size > 1 and not stride for size, stride in strides)  # several elements of an expanded tensor are one number


# -- the model compiled by torch.compile -----------------------------------------------------------


MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

Compile = bool | str | Mapping[str, Any]


def options_of(compile: Compile) -> dict[str, Any] | None:
    """Return the arguments of ``torch.compile`` that ``Trainer(compile=...)`` asks for; None if nothing is compiled.

    Raises:
        ValueError, TypeError: It is no mode, or names an argument that ``torch.compile`` does not have.
    """
    if isinstance(compile, bool):
        return {} if compile else None
    if compile == "step":
        return {"step": True}
    if isinstance(compile, str):
        if compile not in MODES:
            raise ValueError(f"compile must be True, 'step', one of the modes {', '.join(MODES)}, or a dict; got {compile!r}")
        return {"mode": compile}
    if not isinstance(compile, Mapping):
        raise TypeError(f"compile must be True, a mode, or a dict of the arguments of torch.compile; got {compile!r}")
    known = set(inspect.signature(torch.compile).parameters) - {"model"} | {"regions", "step"}
    if unknown := compile.keys() - known:
        raise ValueError(f"torch.compile has no argument {', '.join(sorted(unknown))}; it has {', '.join(sorted(known))}")
    if "regions" in compile:
        check_choice(compile["regions"], "compile['regions']")
    return dict(compile)


def compile_model(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile a model in place, or each of its outermost `regions`: it stays the same object, with the same names.

    Blocks of one class are compiled once, in a fraction of the time of the model. Compiled modules do not change.

    Raises:
        ValueError: `regions` matches no module.
    """
    chosen = {"": model}
    if "regions" in options:
        named = dict(model.named_modules())
        chosen = named_matches(options["regions"], named, argument="compile['regions']", kind="module")
    arguments = {name: value for name, value in options.items() if name != "regions"}
    for name, module in chosen.items():
        if not is_compiled(module) and not any(name.startswith(f"{outer}.") for outer in chosen):
            module.compile(**arguments)


def has_graphs(options: Mapping[str, Any]) -> bool:
    """Return whether a model compiled with these options runs in CUDA graphs, which use their memory again in each pass."""
    named = options.get("options") or {}
    return options.get("mode") in ("reduce-overhead", "max-autotune") or bool(named.get("triton.cudagraphs"))


class BackwardOfGraphs(BackwardPass):
    """A backward pass with gradients in memory of their own. A CUDA graph writes those of the next batch over its own.

    Args:
        model: The model that runs in CUDA graphs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._parameters = list(model.parameters())

    def __call__(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        new = [parameter for parameter in self._parameters if parameter.grad is None]
        super().__call__(loss, scale)
        for tensor in new:
            if tensor.grad is not None:
                tensor.grad = tensor.grad.clone()


def breaks_so_far() -> int:
    """Return how often a graph broke in this process."""
    return len(_reasons())


def breaks_since(count: int) -> list[str]:
    """Return the lines at which graphs broke after the first `count` breaks, with the reason; each line once."""
    found: dict[str, None] = {}
    for reason in _reasons()[count:]:
        if not reason.user_stack:
            continue
        line, why = reason.user_stack[-1], reason.reason.strip().splitlines()[0]
        found[f"{Path(line.filename).name}:{line.lineno} in {line.name} ({why})"] = None
    return list(found)


def _reasons() -> list[Any]:
    # torch has no public function for this: torch.compiler has none, and torch._dynamo.explain runs the model once more.
    from torch._dynamo.utils import graph_break_reasons  # here, as it takes seconds

    return graph_break_reasons
