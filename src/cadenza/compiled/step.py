"""`Trainer(compile="step")`: forward and backward pass, clipping and update of a step as one compiled function.

A `CompiledStep` is called in place of ``compute_loss``. In the last batch of a step it updates the weights at once, and the
backward pass and the update that follow have nothing left to do. In the other batches it computes the gradients, and the
backward pass adds them. The state stays in the parameters, the buffers, ``parameter.grad`` and ``optimizer.state``, so each
step may run compiled or not.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, NamedTuple, TypeVar
from weakref import proxy

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from torch.utils import _pytree as pytree

from cadenza.callbacks.clip_gradients import Clip
from cadenza.drivers.base import Driver
from cadenza.engine.session import Session
from cadenza.hooks.dispatch import Closer, Hooks
from cadenza.hooks.listener import Listener
from cadenza.hooks.moments import Callback
from cadenza.optim import fast_step
from cadenza.optim.parameters import parameters_of
from cadenza.optim.precision import BackwardPass, Precision
from cadenza.status.formats import counted, duration
from cadenza.status.outputs import parts_of, scalar
from cadenza.status.progress import Progress

T = TypeVar("T")

INSIDE = (
    Callback.on_before_backward,
    Callback.on_after_backward,
    Callback.on_batch_end,
    Callback.on_before_optimizer_step,
    Callback.on_before_zero_grad,
)
"""The moments at which gradients, or weights before the update, can be read. A listener to them splits the step."""

MOST_VARIANTS = 4
"""The number of variants of the Python values, such as settings and attributes of the model, for which a run compiles steps."""

_STATE: dict[type[Optimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    Adam: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    AdamW: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
_SETTINGS = ("betas", "momentum", "dampening", "weight_decay", "eps", "nesterov", "amsgrad", "maximize")
_INSTEAD = "compile=True compiles the model alone."


class Group(NamedTuple):
    """A parameter group, as the compiled function takes it."""

    decoupled: bool | None
    """Whether weight decay is that of AdamW; None for SGD."""
    parameters: list[Tensor]
    unused: list[Tensor]
    """The parameters that have no gradient, and so no state."""
    state: list[list[Tensor]]
    """By name, for each of `parameters`; empty without a state."""
    rate: Tensor
    """The learning rate, shape (), so a schedule compiles nothing."""
    settings: dict[str, Any]


# -- the argument of a trainer ---------------------------------------------------------------------


class StepCompiler:
    """Compiles the steps of the runs of a trainer.

    Args:
        options: Arguments of ``torch.compile``.
        driver: The driver of the trainer.
        precision: Its precision.
        own_step: Whether a ``step_fn`` or the loop of `attach` does the step.

    Raises:
        ValueError: With one of the arguments no step can be compiled as a whole.
    """

    def __init__(self, options: Mapping[str, Any], driver: Driver, precision: str, *, own_step: bool) -> None:
        import torch._dynamo  # here, as it takes seconds

        self._options = options
        reason = None
        if own_step:
            reason = "a step_fn, and the loop of cadenza.attach, do the step themselves"
        elif precision == "fp16":
            reason = "precision='fp16' looks at the gradients between backward pass and update. Use 'bf16' or 'fp32'"
        elif driver.world_size > 1 or driver.reduces:
            reason = f"it works in one process without a wrapper of the model; got {driver!r}"
        elif not hasattr(torch._dynamo.config, "trace_autograd_ops"):
            reason = f"torch {torch.__version__} cannot compile torch.autograd.grad. Expected 2.13 or later"
        if reason is not None:
            raise ValueError(f"compile='step' compiles the whole step of fit(), but {reason}. {_INSTEAD}")

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Raise `ValueError` for an optimizer that cannot be part of the compiled function."""
        for optimizer in optimizers:
            name = type(optimizer).__name__
            if type(optimizer) not in _STATE:
                raise ValueError(f"compile='step' compiles the updates of SGD, Adam and AdamW; got {name}. {_INSTEAD}")
            for group in optimizer.param_groups:
                tensors = [
                    key for key in _SETTINGS if any(isinstance(part, Tensor) for part in pytree.tree_leaves(group.get(key)))
                ]
                if group.get("differentiable") or tensors:
                    given = "differentiable=True" if not tensors else f"{tensors[0]} as a tensor"
                    raise ValueError(f"compile='step' does not support {name} with {given}. {_INSTEAD}")

    def notes(self, hooks: Hooks) -> Iterator[str]:
        """Yield the lines of a plan: the parts of the graph, and the listeners that split steps."""
        yield (
            "compile: forward pass, backward pass, clipping and update are one graph, which rounds differently (about 1e-6) "
            "than uncompiled steps"
        )
        for listener in _splitting(hooks):
            listens = f"compile: {listener.owner} listens to {listener.moment.__name__}"
            if listener.schedule is None:
                yield f"! {listens} in each step, so every step runs uncompiled. Remove it, or give it a schedule"
            else:
                yield (
                    f"{listens} {listener.schedule}: such a step runs uncompiled, at its full cost. Without this callback, "
                    "results differ by rounding"
                )

    def install(self, session: Session) -> None:
        """Compile the steps of a run that is set up."""
        self.check_optimizers(session.optimizers)
        own = session.compute = CompiledStep(session, self._options)
        precision = session.precision
        precision.backward_pass, precision.take_step = own, own.step
        session.acts.closers.append(Closer(None, partial(_put_back, precision)))


def _splitting(hooks: Hooks) -> Iterator[Listener]:
    """Yield the listeners that are called inside of a step and are no part of the graph."""
    for moment in INSIDE:
        yield from (item for item in hooks.by_moment.get(moment, ()) if item.splits and not item.disabled)


# -- the step --------------------------------------------------------------------------------------


class CompiledStep(BackwardPass):
    """The forward pass of a run, and with it the rest of the step wherever nothing is called between.

    It computes without compilation what it is given outside of the training loop, such as batches of an evaluation. The first
    step of a run is not compiled: it finds errors of ``compute_loss``, and makes the state of the optimizers.

    Args:
        session: The session of the run, which is set up.
        options: Arguments of ``torch.compile``.
    """

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        super().__init__()
        self._session: Session = proxy(session)  # which holds this
        self.plain: Callable[[nn.Module, Any], Any] = session.compute
        self.__wrapped__: Callable[..., Any] = session.compute  # for `inspect.unwrap`
        self._on_cuda = session.driver.device.type == "cuda"
        self._options = options
        self._graphs: dict[Any, tuple[Callable[..., Any], list[str]]] = {}  # by their inputs; with their values
        self._variants: set[int] = set()  # the values that were compiled
        self._off: str | None = None  # why no further step is compiled
        self._said: set[str] = set()
        self._groups: list[Group] = []
        self._seen: list[tuple[Any, Any, Any]] = []  # a mapping, a key, and the value for which the groups hold
        self._flags: list[bool] = []  # whether each parameter of the optimizers is trained
        self._parameters: list[Tensor] = []  # of the groups: first those that have gradients
        self._structure: Any = None  # of the groups
        self._rates: list[float] = []  # the numbers in the groups
        self._layout: Any = None
        self._settings = ""
        self._loss: Tensor | None = None  # of the batch of which the gradients are known
        self._gradients: list[tuple[Tensor, Tensor]] = []
        self._is_updated = False
        self._shape: str | None = None  # of the batches that are compiled
        self._unused: list[int] = []  # the parameters without a gradient, by their index

    def __call__(self, *arguments: Any) -> Any:
        """Compute a batch of the model; or, with a loss, add its gradients."""
        if isinstance(arguments[0], Tensor):
            return self._backward(*arguments)
        return self._compute(*arguments)

    def _compute(self, model: nn.Module, batch: Any) -> Any:
        session = self._session
        if session.step.counted or session.hooks.scene.listener is not None or not torch.is_grad_enabled():
            return self.plain(model, batch)
        self._loss, self._gradients, self._is_updated = None, [], False
        if session.progress.step == 0 or self._is_split():
            return self.plain(model, batch)
        if (why := self._why_not(batch)) is not None:
            if why:
                self._say(why)
            return self.plain(model, batch)
        return self._computed(model, batch)

    def _computed(self, model: nn.Module, batch: Any) -> Any:
        """Return the outputs of a batch, by the compiled function."""
        window = self._session.step.window
        size = window.size
        whole = window.seen == size and len(window.losses) == size - 1 and not window.weights
        parameters = self._parameters
        before = [parameter.grad for parameter in parameters] if whole and size > 1 else None
        clips = self._clips() if whole else []
        kinds = [(clip.function, clip.norm_type, self._chosen(clip)) for clip in clips]
        norms = [_number(clip.max_norm, parameters[0].device) for clip in clips]
        has = None if before is None else tuple(gradient is not None for gradient in before)
        key = self._structure, whole, size, has, *kinds
        others = list(zip(kinds, norms, strict=True)), before, 1.0 / size, whole, self._on_cuda
        result = self._called(key, (self.plain, model, batch, self._groups, others))
        if result is None:
            return self.plain(model, batch)
        outputs, gradients, norms = result
        if self._on_cuda:  # the next call of a CUDA graph takes this memory back
            outputs, gradients, norms = pytree.tree_map_only(Tensor, Tensor.clone, (outputs, gradients, norms))
        self._loss = outputs["loss"].requires_grad_()  # that gradients flow, as uncompiled
        self._is_updated = gradients is None
        if gradients is not None:
            pairs = zip(parameters, gradients, strict=True)
            self._gradients = [(parameter, gradient) for parameter, gradient in pairs if gradient is not None]
            return outputs
        for parameter in parameters if before is not None else ():
            parameter.grad = None
        for clip, norm in zip(clips, norms, strict=True):
            clip.note(self._session.run, norm)
        return outputs

    def _chosen(self, clip: Clip) -> tuple[bool, ...] | None:
        return None if clip.chosen is None else tuple(id(parameter) in clip.chosen for parameter in self._parameters)

    def _called(self, key: Any, given: tuple[Any, ...]) -> Any:
        """Return the results of the compiled function; None if it cannot be compiled. Nothing is computed then."""
        failures = torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit
        if (known := self._graphs.get(key)) is not None:
            try:
                return known[0](*given)
            except failures:  # another graph is needed, such as after a change of the model
                pass
        graph, values = known or _new_graph(self._options, self._on_cuda)
        session, began = self._session, time.perf_counter()
        session.print(f"compile: step {session.progress.step + 1} is compiled now, which takes seconds to minutes")
        settings = {"trace_autograd_ops": True, "skip_nnmodule_hook_guards": False, "automatic_dynamic_shapes": False}
        try:
            with torch._dynamo.config.patch(settings):
                result = graph(*given)
        except failures as error:
            reason = error.__cause__ if isinstance(error, failures[1]) else error  # the cause names the limit
            self._off = f"the step cannot be compiled: {' '.join(str(reason).splitlines()[:2])}"
            self._say(self._off)
            return None
        self._graphs[key] = graph, values
        session.print(f"compile: it took {duration(time.perf_counter() - began)}")
        if given[-1][3]:  # the last batch of its step
            self._variants.add(zlib.crc32("\n".join([self._settings, *values]).encode()))
        if len(self._variants) > MOST_VARIANTS:
            self._off = (
                f"Python values that it reads, such as attributes of the model, have changed {counted(MOST_VARIANTS, 'time')}, "
                "and each change compiles it again. Keep a value that changes in a tensor"
            )
        return result

    # -- what the loop calls after it --------------------------------------------------------------

    def _backward(self, loss: Tensor, scale: float | Tensor = 1.0) -> None:
        if loss is not self._loss:
            super().__call__(loss, scale)
            return
        pairs, self._gradients = self._gradients, []
        if not pairs:
            return
        # In new memory: two parameters may have one gradient, and updates write into it.
        scaled = torch._foreach_mul([gradient for _, gradient in pairs], scale)
        for (parameter, _), gradient in zip(pairs, scaled, strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)

    def updated(self) -> list[Optimizer]:
        """Return the optimizers that the compiled function has updated in the last batch."""
        used = set(map(id, _parameters_of(self._groups))) if self._is_updated else set()
        return [optimizer for optimizer in self._session.optimizers if not used.isdisjoint(map(id, parameters_of([optimizer])))]

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step, unless the compiled function has done it."""
        if self._is_updated:
            fast_step.note_call(optimizer)
            return
        held = parameters_of(self._session.optimizers)
        self._unused = [index for index, own in enumerate(held) if own.requires_grad and own.grad is None]
        self._groups = []  # of other parameters, perhaps
        fast_step.step(optimizer)

    # -- whether a step is compiled ----------------------------------------------------------------

    def _is_split(self) -> bool:
        """Return whether a listener is called inside of the step."""
        hooks = self._session.hooks
        progress = self._session.progress
        splitting = [*_splitting(hooks)]
        if progress.max_tokens is not None:  # a warm-up may count tokens, which the end of the batch counts
            inside = hooks.by_moment.get(Callback.on_before_optimizer_step, ())
            splitting += [item for item in inside if not hasattr(hooks.callbacks[item.owner], "in_graph")]
        return any(_is_near(listener, progress) for listener in splitting)

    def _why_not(self, batch: Any) -> str | None:
        """Return why a step that no listener splits is not compiled; None if it is. Empty: there is no state to update yet."""
        session = self._session
        if self._off is not None:
            return self._off
        layout = _layout_of(batch)
        if layout != self._layout:
            text = repr(layout)
            if self._shape not in (None, text):
                return "batches of another shape than the first are not compiled"
            self._layout, self._shape = layout, text
        for optimizer in session.optimizers:
            if not fast_step.is_bare(optimizer):
                return f"{type(optimizer).__name__} has hooks, or a step of another class"
        if session.extra_parameters.parameters:
            return "an optimizer holds parameters outside of the model"
        if not self._are_current() and not self._gather():
            return ""
        if any(held._backward_hooks or held._post_accumulate_grad_hooks for held in self._parameters):
            return "a parameter has a hook"
        self._set_rates()
        return None

    def _are_current(self) -> bool:
        """Return whether the groups hold what the optimizers hold."""
        for holder, key, value in self._seen:
            if holder.get(key) is not value:
                return False
        flags = [held.requires_grad for held in parameters_of(self._session.optimizers)]  # a group may have been added
        return bool(self._groups) and flags == self._flags

    def _gather(self) -> bool:
        """Take the groups from the optimizers. Return whether each parameter that is used has its state."""
        self._groups, self._seen, start = [], [], 0
        self._flags = [held.requires_grad for held in parameters_of(self._session.optimizers)]
        of_groups: list[dict[str, Any]] = []
        for optimizer in self._session.optimizers:
            self._see(vars(optimizer), "state", "param_groups")
            for group in optimizer.param_groups:
                settings = {name: group[name] for name in _SETTINGS if name in group}
                of_groups.append(settings)
                self._see(group, "params", *settings)
                numbered = [pair for pair in enumerate(group["params"], start) if pair[1].requires_grad]
                start += len(group["params"])
                names = _names_of(optimizer, settings)
                used = [held for number, held in numbered if not names or number not in self._unused]
                unused = [held for number, held in numbered if names and number in self._unused]
                states = [optimizer.state.get(held) or {} for held in used]
                if any(state.get(name) is None for state in states for name in names):
                    self._groups = []
                    return False
                for held, state in zip(used, states, strict=True):
                    self._see(optimizer.state, *([held] if names else ()))
                    self._see(state, *names)
                if numbered:
                    rate = _new_number(0.0, numbered[0][1].device)
                    state_by_name = [[state[name] for state in states] for name in names]
                    self._groups.append(Group(_decoupled(optimizer, group), used, unused, state_by_name, rate, settings))
        self._settings = str(of_groups)
        self._rates = []
        self._parameters = [*_parameters_of(self._groups), *_unused_in(self._groups)]
        shapes = [(group.decoupled, len(group.parameters), len(group.unused), len(group.state)) for group in self._groups]
        self._structure = str((shapes, self._settings, self._flags))
        return bool(self._groups)

    def _see(self, holder: Mapping[Any, Any], *keys: Any) -> None:
        self._seen += [(holder, key, holder.get(key)) for key in keys]

    def _set_rates(self) -> None:
        """Set the rates for the update."""
        session = self._session
        rates: list[Any] = []
        for index, optimizer in enumerate(session.optimizers):
            factor = session.rates.factor(index, session.progress.step + 1)
            rates += [
                group["lr"] * factor for group in optimizer.param_groups if any(held.requires_grad for held in group["params"])
            ]
        if rates != self._rates or any(isinstance(rate, Tensor) for rate in rates):
            self._rates = rates
            for group, rate in zip(self._groups, rates, strict=True):
                group.rate.fill_(rate)

    def _clips(self) -> list[Clip]:
        hooks = self._session.hooks
        listeners = hooks.by_moment.get(Callback.on_before_optimizer_step, ())
        parts = [getattr(hooks.callbacks[item.owner], "in_graph", None) for item in listeners if not item.disabled]
        return [clip() for clip in parts if clip is not None]

    # -- what it says and keeps --------------------------------------------------------------------

    def _say(self, why: str) -> None:
        if why not in self._said:
            self._said.add(why)
            self._session.warn(f"compile='step': {why}. These steps run uncompiled")

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: with it, the same steps are compiled after a resume."""
        return {"shape": self._shape, "variants": sorted(self._variants), "unused": self._unused, "off": self._off}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._shape = state["shape"]
        self._variants = set(state["variants"])
        self._unused = list(state["unused"])
        self._off = state["off"]


def _is_near(listener: Listener, progress: Progress) -> bool:
    """Return whether a listener may be called in the step that goes on."""
    return listener.trigger is None or listener.trigger.next_step(progress) <= progress.step


def _names_of(optimizer: Optimizer, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in the state of each parameter."""
    names = _STATE[type(optimizer)]
    if type(optimizer) is SGD:
        return names if settings["momentum"] else ()
    return names if settings["amsgrad"] else names[:3]


def _decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool | None:
    if type(optimizer) is SGD:
        return None
    return bool(group.get("decoupled_weight_decay", type(optimizer) is AdamW))


def _layout_of(batch: Any) -> Any:
    """Return what tensors of a batch have: a graph is compiled for it."""
    if isinstance(batch, Tensor):
        return batch.dtype, batch.shape, batch.stride() if batch.layout is torch.strided else batch.layout
    if isinstance(batch, Mapping):
        return [(name, _layout_of(part)) for name, part in batch.items()]
    if isinstance(batch, list | tuple):
        return [_layout_of(part) for part in batch]
    return batch if batch is None or isinstance(batch, bool | int | float | str) else type(batch).__qualname__


def _split(values: Sequence[T], chosen: Sequence[bool]) -> tuple[list[T], list[T]]:
    """Return the values that are chosen, and the others."""
    pairs = list(zip(values, chosen, strict=True))
    return [value for value, is_chosen in pairs if is_chosen], [value for value, is_chosen in pairs if not is_chosen]


def _parameters_of(groups: Sequence[Group]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group.parameters]


def _unused_in(groups: Sequence[Group]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group.unused]


def _put_back(precision: Precision) -> None:
    """Let go of the compiled step: with bf16 it refers to the precision, and no garbage collection is needed to free a run."""
    precision.backward_pass = BackwardPass()
    precision.take_step = fast_step.step


def _new_number(value: float, device: torch.device) -> Tensor:
    return torch.full((), value, dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)


_number = lru_cache(8)(_new_number)  # the same tensor in each step


def _new_graph(options: Mapping[str, Any], on_cuda: bool) -> tuple[Callable[..., Any], list[str]]:
    """Return the function, which its first call compiles, and the values that its graph holds, which that call notes."""
    values: list[str] = []
    chosen: dict[str, Any] = {"guard_filter_fn": partial(_note_values, values)}
    if options.get("backend", "inductor") == "inductor":  # with CUDA graphs, and fewer checks in each call
        chosen |= {"size_asserts": False, "triton.cudagraphs": on_cuda}
    if "mode" not in options:
        options = {**options, "options": {**chosen, **options.get("options", {})}}
    # A copy of the code, by which torch finds graphs: of other runs and keys, too.
    own = FunctionType(_step.__code__.replace(), _step.__globals__)
    return torch.compile(own, fullgraph=True, **options), values


def _note_values(values: list[str], guards: Sequence[Any]) -> list[bool]:
    """Note what guards of the model, the forward pass and the batch compare: the same in a resumed run. Keep all guards."""
    known = [guard for guard in guards if guard.name.startswith(("model", "compute", "batch"))]
    known += [guard for guard in guards if guard.guard_type in ("CONSTANT_MATCH", "EQUALS_MATCH") and guard.is_global]
    texts = (repr(guard.value) if isinstance(guard.value, bool | int | float | str) else "" for guard in known)
    values[:] = sorted({f"{guard.guard_type} {guard.name} {text}" for guard, text in zip(known, texts, strict=True)})
    return [True] * len(guards)


# -- the compiled function -------------------------------------------------------------------------


def _step(compute: Any, model: nn.Module, batch: Any, groups: Sequence[Group], others: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """Compute a batch. If it is the last one of its step, clip the gradients and update the weights.

    Args:
        compute: The forward pass.
        model: The model.
        batch: The batch.
        groups: The parameter groups.
        others: For each clipping the function, the order of the norm and the parameters, and the norm; the gradients of the
            other batches of the step, or None if it has one batch; the loss scale of the batch; whether it is the last one;
            and whether the update takes all tensors at once.

    Returns:
        The outputs; the gradients, or None if the weights are updated; and the norms of the clippings.
    """
    clips, before, scale, whole, foreach = others
    result = compute(model, batch)
    outputs = {"loss": result} if isinstance(result, Tensor) else dict(parts_of(result))
    loss = scalar(outputs["loss"])
    known = _parameters_of(groups)
    unused = _unused_in(groups)
    gradients = torch.autograd.grad(loss, [*known, *unused], allow_unused=True)
    with torch.no_grad():
        outputs = pytree.tree_map_only(Tensor, _detached, {**outputs, "loss": loss})
        is_complete = all(gradient is None for gradient in gradients[len(known) :])
        if not whole or not is_complete or outputs.get("weight") is not None:
            return outputs, gradients, []
        summed = [_sum(*pair, scale) for pair in zip(gradients[: len(known)], before or [None] * len(known), strict=False)]
        return outputs, None, _update(groups, clips, summed, foreach)


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _sum(gradient: Tensor | None, before: Tensor | None, scale: float) -> Tensor | None:
    if gradient is None:
        return before
    scaled = gradient if scale == 1.0 else gradient * scale
    return scaled if before is None else before + scaled


def _update(groups: Sequence[Group], clips: Sequence[Any], gradients: list[Any], foreach: bool) -> list[Tensor]:
    """Clip the gradients, and update the weights with torch's own functions. Return the norms."""
    norms = []
    start = 0
    for (function, norm_type, chosen), max_norm in clips:
        takes = [gradient is not None and (chosen is None or chosen[index]) for index, gradient in enumerate(gradients)]
        norm, factor = function(_split(gradients, takes)[0], max_norm, norm_type)
        factor = factor.to(norm.dtype)  # it has the dtype of `max_norm`
        gradients = [gradient * factor if is_taken else gradient for gradient, is_taken in zip(gradients, takes, strict=True)]
        norms.append(norm)
    for group in groups:
        own = gradients[start : start + len(group.parameters)]
        start += len(own)
        has = [gradient is not None for gradient in own]
        parameters, own, *state = (_split(values, has)[0] for values in (group.parameters, own, *group.state))
        settings = dict(group.settings)
        if not group.decoupled and settings["weight_decay"]:
            # Not by torch's function: inductor of 2.13 makes addmm of `mm.add(parameter, alpha=decay)`, without the factor.
            decay = settings["weight_decay"] * (-1 if settings["maximize"] else 1)
            own = [gradient + parameter * decay for parameter, gradient in zip(parameters, own, strict=True)]
            settings["weight_decay"] = 0.0
        if group.decoupled is None:
            # With foreach: the other function reads the rate on the host.
            settings |= {"foreach": True, "lr": group.rate}
            sgd(parameters, own, state[0] if state else [None] * len(own), **settings)
        else:
            _update_adam(group, settings, parameters, own, *state, foreach=foreach)
    return norms


def _update_adam(
    group: Group, settings: dict[str, Any], parameters: Any, gradients: Any, steps: Any, *state: Any, foreach: bool
) -> None:
    in_double = [step.double() for step in steps]  # 1 - beta ** step has few digits in float32
    averages, squares, largest = state if settings["amsgrad"] else (*state, [])
    settings["beta1"], settings["beta2"] = settings.pop("betas")
    settings |= {"capturable": True, "decoupled_weight_decay": group.decoupled}  # capturable: steps and rate stay tensors
    adam(parameters, gradients, averages, squares, largest, in_double, foreach=foreach, lr=group.rate, **settings)
    for step in steps:
        step.add_(1)
