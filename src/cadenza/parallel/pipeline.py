"""The layers of a model in stages on different ranks: torch's ``torch.distributed.pipelining``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist

from cadenza.drivers.name_patterns import Choice, check_choice, named_matches
from cadenza.drivers.sharding import is_elsewhere, local
from cadenza.errors import DataError, LossError
from cadenza.status.formats import counted, few
from cadenza.status.reprs import brief

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SCHEDULES = {"1F1B": "Schedule1F1B", "GPipe": "ScheduleGPipe"}
"""By name, the schedules of torch with one stage on each rank."""


class Pipeline:
    """The stages of a model, and a ``compute_loss`` that runs batches through them; for `Parallel` and `Trainer`.

    The modules of a stage compute on its ranks. On the other ranks, they return their first argument unchanged, and their
    weights take no memory: so the model may be any chain of modules, each called once, with one tensor as input and output.
    Other code, such as ``torch.tanh(hidden)``, would compute on each rank, unnoticed: make it a module, ``nn.Tanh()``.
    Torch's schedule splits a batch ``(inputs, targets)`` into microbatches, sends activations and gradients between the stages,
    and adds the gradients. Without a pipeline dimension, such as in one process, the model computes the whole batch.

    Args:
        stages: The modules of each stage, in order, each chosen like ``shard=``: ``[["embedding", "blocks.0"], ["blocks.1",
            "head"]]``. Together they have all modules of the model.
        loss_fn: Called on the last stage as ``loss_fn(predictions, targets)``; returns a mean over samples, of shape ().
        microbatches: The number of parts of a training batch. It divides the size of each of them, also of the last one of an
            epoch. An evaluation does not split its batches.
        schedule: ``"1F1B"``, ``"GPipe"``, or another class of ``torch.distributed.pipelining`` for one stage on each rank.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: There are fewer than two stages, `microbatches` is less than 1, or no such schedule is known. When a run
            starts: a pattern matches no module, a module or a weight belongs to no stage or to two, layers have running
            statistics, or a stage after the first has persistent buffers, which checkpoints would lack.

    >>> pipeline = Pipeline(["0", "1"], nn.functional.mse_loss, microbatches=2)
    >>> pipeline(nn.Sequential(nn.Identity(), nn.Identity()), (torch.ones(4), torch.zeros(4)))["loss"]
    tensor(1.)
    """

    def __init__(
        self,
        stages: Sequence[Choice[nn.Module]],
        loss_fn: Callable[[Any, Any], Tensor],
        *,
        microbatches: int,
        schedule: str | type = "1F1B",
    ) -> None:
        if isinstance(stages, str) or not isinstance(stages, Sequence) or len(stages) < 2:
            raise ValueError(f"stages must be a sequence of at least two choices of modules; got {stages!r}")
        for number, stage in enumerate(stages):
            check_choice(stage, f"stages[{number}]")
        if not callable(loss_fn):
            raise TypeError(f"loss_fn must be a function (predictions, targets) -> loss; got {loss_fn!r}")
        if isinstance(microbatches, bool) or not isinstance(microbatches, int) or microbatches < 1:
            raise ValueError(f"microbatches must be at least 1; got {microbatches!r}")
        if isinstance(schedule, str) and schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, or a class of torch; got {schedule!r}")
        self.stages: Sequence[Choice[nn.Module]] = stages
        self.loss_fn: Callable[[Any, Any], Tensor] = loss_fn
        self.microbatches: int = microbatches
        self.schedule: str | type = schedule
        self._ranks: DeviceMesh | None = None  # one of each stage
        self._runs = False  # whether a batch is in the stages
        self._shapes: list[_Shape] | None = None  # what each stage receives, and what the last one returns
        self._schedules: dict[tuple[Any, ...], Any] = {}

    def __repr__(self) -> str:
        name = self.schedule if isinstance(self.schedule, str) else self.schedule.__name__
        return f"Pipeline({counted(len(self.stages), 'stage')}, {counted(self.microbatches, 'microbatch')}, {name})"

    # -- the loss of a batch ------------------------------------------------------------------------

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        """Return the loss of a batch ``(inputs, targets)``: the same on all stages. Every rank must call this.

        Without gradients, as in evaluations, also predictions and targets.
        """
        inputs, targets = _pair(batch)
        if self._ranks is None:
            predictions = model(inputs)
            return {"loss": self.loss_fn(predictions, targets), "predictions": predictions, "targets": targets}
        if not torch.is_grad_enabled():
            predictions = self._forward(model, inputs)
            return {"loss": self.loss_fn(predictions, targets), "predictions": predictions, "targets": targets}
        return {"loss": self._trained(model, inputs, targets)}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return what the last stage makes of ``(inputs, targets)``, or of inputs alone. Every rank must call this."""
        inputs = batch[0] if isinstance(batch, list | tuple) else batch
        if self._ranks is None:
            return model(inputs)
        with torch.no_grad():
            return self._forward(model, inputs)

    def _trained(self, model: nn.Module, inputs: Tensor, targets: Any) -> Tensor:
        """Return the loss. Its backward pass adds the gradients, which the schedule has computed already."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        elsewhere = [parameter for parameter in trained if is_elsewhere(parameter)]
        parameters = [parameter for parameter in trained if not is_elsewhere(parameter)]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        losses: list[Tensor] = []
        try:
            self._run(model, inputs, training=True, target=targets, losses=losses)
        finally:
            gradients = [parameter.grad for parameter in parameters]
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        loss = torch.stack(losses).mean().detach().float() if losses else torch.zeros((), device=inputs.device)
        dist.broadcast(loss, *self._last())
        return _Computed.apply(loss, elsewhere, gradients, *parameters)  # type: ignore[no-any-return,no-untyped-call]

    def _forward(self, model: nn.Module, inputs: Tensor) -> Any:
        """Return the output of the last stage, on all of them."""
        outputs = [self._run(model, inputs, training=False)]
        dist.broadcast_object_list(outputs, *self._last(), device=torch.device("cpu"))
        return outputs[0].to(inputs.device)

    def _last(self) -> tuple[int, Any]:
        """Return the rank of the last stage, and the group of the stages."""
        group = self._stage_ranks().get_group()
        return dist.get_global_rank(group, len(self.stages) - 1), group

    # -- torch's schedules ---------------------------------------------------------------------------

    def assign(self, model: nn.Module, ranks: DeviceMesh) -> dict[str, int]:
        """Let the modules of other stages pass their input on; return the stage of each weight, by name.

        Args:
            model: The model of the user, not yet sharded.
            ranks: One rank of each stage, with this rank.

        Raises:
            ValueError: The stages do not suit the model or the ranks; see the class.
        """
        if len(self.stages) != ranks.size():
            raise ValueError(f"Pipeline has {counted(len(self.stages), 'stage')}, and the mesh has pipeline={ranks.size()}")
        if self.schedule != "GPipe" and self.microbatches < ranks.size():
            raise ValueError(
                f"schedule={self.schedule!r} needs at least as many microbatches as stages, {ranks.size()}; got "
                f"{self.microbatches}. Use more, or 'GPipe'."
            )
        self._ranks, self._shapes, self._schedules = ranks, None, {}

        def check_call(*_: object) -> None:
            if not self._runs:
                raise LossError(
                    "the model has stages on other ranks, and was called on this one alone. Give the Pipeline to Trainer as "
                    "compute_loss, and call it, or its predict, in a compute= of your own."
                )

        model.register_forward_pre_hook(check_call)
        named, names = dict(model.named_modules()), _names(model)
        stage_of: dict[str, int] = {}
        stages: list[dict[str, nn.Module]] = []
        for number, choice in enumerate(self.stages):
            stages.append(named_matches(choice, named, argument=f"stages[{number}]", kind="module"))
            for path, module in stages[-1].items():
                _check_buffers(module, path, number)
                for name in [name for parameter in module.parameters() for name in names[parameter]]:
                    if stage_of.setdefault(name, number) != number:
                        raise ValueError(
                            f"{name} belongs to stages {stage_of[name]} and {number}. A weight must be in one stage."
                        )
                if number != ranks.get_local_rank():
                    module.forward = MethodType(_passed_on, module)
        if left := [name for same in names.values() for name in same if name not in stage_of]:
            raise ValueError(f"no stage of the pipeline has {few(left)}. Add the modules to one of the stages.")
        _check_modules(named, stages)
        return stage_of

    def _run(self, model: nn.Module, inputs: Tensor, *, training: bool, **options: Any) -> Any:
        ranks, size = self._stage_ranks(), len(inputs)
        # Ranks with different batches gather weights for each part, so they must have equally many.
        parts = self.microbatches if training else 1
        if size % parts:
            raise DataError(
                f"a batch has {counted(size, 'sample')}, which {parts} microbatches do not divide. Use another batch_size with "
                "drop_last=True, or another number of microbatches=."
            )
        self._runs = True
        try:
            if self._shapes is None:
                self._shapes = self._tried(model, inputs[: size // parts])
            key = (training, parts, inputs.shape, inputs.dtype, id(model))
            if key not in self._schedules:
                self._schedules[key] = self._schedule(model, inputs, parts, training=training)
            if ranks.get_local_rank() != ranks.size() - 1:
                options.pop("target", None)
            return self._schedules[key].step(*((inputs,) if ranks.get_local_rank() == 0 else ()), **options)
        finally:
            self._runs = False

    def _tried(self, model: nn.Module, part: Tensor) -> list[_Shape]:
        """Return what each stage receives, and what the last one returns, of one microbatch. Every rank must call this."""
        ranks = self._stage_ranks()
        shapes: list[Any] = [_Shape(part.shape[1:], part.dtype)]
        for stage in range(ranks.size()):
            shape: list[Any] = [None]
            if stage == ranks.get_local_rank():
                received = torch.zeros((len(part), *shapes[-1].sizes), dtype=shapes[-1].dtype, device=part.device)
                devices = [part.device] if part.device.type != "cpu" else []
                with torch.no_grad(), torch.random.fork_rng(devices):
                    output = model(received)
                known = isinstance(output, Tensor) and output.ndim and len(output) == len(part)
                shape = [_Shape(output.shape[1:], output.dtype) if known else type(output).__name__]
            source = dist.get_global_rank(ranks.get_group(), stage)
            dist.broadcast_object_list(shape, source, group=ranks.get_group(), device=torch.device("cpu"))
            if isinstance(shape[0], str):
                raise DataError(
                    f"stage {stage} must return one tensor, with the samples along its first dimension; got {shape[0]}"
                )
            shapes += shape
        return shapes

    def _schedule(self, model: nn.Module, inputs: Tensor, parts: int, *, training: bool) -> Any:
        from torch.distributed import pipelining

        ranks, size = self._stage_ranks(), len(inputs) // parts
        assert self._shapes is not None
        if _Shape(inputs.shape[1:], inputs.dtype) != self._shapes[0]:
            raise DataError(
                f"a batch of the shape {tuple(inputs.shape)} of {inputs.dtype} reached the pipeline, and the first one had "
                f"{tuple(self._shapes[0].sizes)} of {self._shapes[0].dtype} for each sample. Pad samples to one shape."
            )
        stage = ranks.get_local_rank()
        ends = [
            torch.empty((size, *shape.sizes), dtype=shape.dtype, device="meta", requires_grad=training and shape.has_gradient)
            for shape in self._shapes[stage : stage + 2]
        ]
        made = pipelining.PipelineStage(
            model, stage, ranks.size(), inputs.device, input_args=ends[0], output_args=ends[1], group=ranks.get_group()
        )
        given: Any = self.schedule if training else "GPipe"
        kind = getattr(pipelining, SCHEDULES[given]) if isinstance(given, str) else given
        return kind(made, parts, loss_fn=self.loss_fn if training else None)

    def _stage_ranks(self) -> DeviceMesh:
        if self._ranks is None:
            raise RuntimeError("this Pipeline has no ranks: give it to Parallel(mesh, pipeline=...) and to Trainer")
        return self._ranks


class _Shape(NamedTuple):
    """The shape of one sample, and its number format."""

    sizes: torch.Size
    dtype: torch.dtype

    @property
    def has_gradient(self) -> bool:
        return self.dtype.is_floating_point


class _Computed(torch.autograd.Function):
    """A loss of which the gradients are known."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, elsewhere: list[Tensor], gradients: list[Tensor | None], *parameters: Tensor) -> Tensor:
        ctx.elsewhere, ctx.gradients = elsewhere, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Any:
        for gradient in ctx.gradients:
            if gradient is not None:
                local(gradient).mul_(grad_outputs[0])
        for parameter in ctx.elsewhere:  # empty ones: so the optimizers of all ranks have the same states
            parameter.grad = torch.zeros_like(parameter)
        return None, None, None, *ctx.gradients


def _passed_on(module: nn.Module, given: Any, *others: Any, **named: Any) -> Any:
    return given


def _check_modules(named: dict[str, nn.Module], stages: list[dict[str, nn.Module]]) -> None:
    """Raise `ValueError` for modules that all ranks would compute, or that none of two stages would."""
    insides = [{each for module in chosen.values() for each in module.modules()} for chosen in stages]
    for path, module in ((path, module) for chosen in stages for path, module in chosen.items()):
        if len(numbers := [str(number) for number, inside in enumerate(insides) if module in inside]) > 1:
            raise ValueError(f"{path} belongs to stages {' and '.join(numbers)}. A module must be in one stage.")
    called = {path: each for path, each in named.items() if type(each).forward is not nn.Module.forward}  # lists are not
    if alone := [
        path for path, each in called.items() if not any(each in inside for inside in insides) and not [*each.children()]
    ]:
        raise ValueError(f"no stage of the pipeline has {few(alone)}: each rank would compute it. Add it to one of the stages.")


def _check_buffers(stage_module: nn.Module, path: str, stage: int) -> None:
    """Raise `ValueError` for what a module of a stage computes from microbatches, or what checkpoints would lack."""
    for name, module in stage_module.named_modules(prefix=path):
        if getattr(module, "track_running_stats", False):
            raise ValueError(f"{name} keeps running statistics, and a stage sees microbatches. Use LayerNorm, for example.")
    held = stage_module.state_dict(prefix=f"{path}.").keys()
    if stage and (kept := [name for name, _ in stage_module.named_buffers(prefix=path) if name in held]):
        raise ValueError(
            f"stage {stage} has {few(kept)}, and checkpoints have the buffers of stage 0 alone. Register constants with "
            "persistent=False, and keep what changes as attributes of a callback, or put the module into stage 0."
        )


def _names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _pair(batch: Any) -> tuple[Tensor, Any]:
    if isinstance(batch, list | tuple) and len(batch) == 2 and isinstance(batch[0], Tensor):
        return batch[0], batch[1]
    raise DataError(f"Pipeline expects batches (inputs, targets), of which inputs are a tensor; got {brief(batch)}")
