"""``NeuralModuleFactory``: folders, the TensorBoard writer, and the start of a training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from cadenza.callbacks import ClipGradients
from cadenza.compat.neural import optimizers
from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.arguments import warn_without_effect
from cadenza.compat.neural.evaluator import EvaluatorCallback
from cadenza.compat.neural.logs import show_on_screen
from cadenza.compat.neural.loss_logger import SimpleLossLoggerCallback
from cadenza.compat.neural.policies import Policy
from cadenza.compat.neural.tensors import NeuralModule, NmTensor
from cadenza.compat.neural.training import Alternate, Attach, NanGuard, Pair, SetRate, Together, model_of
from cadenza.compat.neural.work import WorkDirectory
from cadenza.drivers import DdpDriver, Driver, driver_of
from cadenza.drivers.joining import launched
from cadenza.hooks.moments import BaseCallback
from cadenza.loading.rng import seed_all
from cadenza.trainer import Trainer

if TYPE_CHECKING:
    from cadenza.run import Run


class DeviceType(Enum):
    """The device of modules."""

    CPU = "cpu"
    GPU = "cuda"
    AllGpu = "auto"


class Optimization(Enum):
    """The precision."""

    mxprO0 = 0  # noqa: N815  # NeMo's name
    """float32"""
    mxprO1 = 1  # noqa: N815  # NeMo's name
    """Mixed precision."""
    mxprO2 = 2  # noqa: N815  # NeMo's name
    """Mixed precision."""
    mxprO3 = 3  # noqa: N815  # NeMo's name
    """Mixed precision."""


class Backend(Enum):
    """The framework that executes a graph: PyTorch only."""

    PyTorch = 1


FACTORY_WITHOUT_EFFECT = ("local_rank", "cudnn_benchmark", "set_default")
"""Arguments of NeMo's factory without an effect here."""

TRAIN_WITHOUT_EFFECT = (
    "synced_batchnorm",
    "synced_batchnorm_groupsize",
    "gradient_predivide",
    "amp_max_loss_scale",
    "steps_per_nan_check",
)
"""Arguments of NeMo's ``train`` without an effect here."""


class NeuralModuleFactory:
    """The entry point of NeMo scripts.

    Args:
        log_dir: The work directory; None writes nothing.
        checkpoint_dir: The folder of checkpoints; None: ``checkpoints`` in the work directory.
        tensorboard_dir: The folder of event files; None: ``tensorboard`` in the work directory.
        create_tb_writer: Create a SummaryWriter, as `tb_writer`.
        files_to_copy: Files to copy into the work directory.
        add_time_to_log_dir: Use a subfolder of `log_dir` with the time as its name.
        placement: The device; None takes the best one.
        optimization_level: The precision.
        random_seed: Seeds all generators now and at the start of a training.
        backend: PyTorch.

    Raises:
        ValueError: `create_tb_writer` without `log_dir` and `tensorboard_dir`.
    """

    callback_classes: ClassVar[tuple[type[BaseCallback], ...]] = (ActionCallback,)
    """The classes of callbacks for `train`, besides native ones."""

    def __init__(
        self,
        log_dir: str | None = None,
        checkpoint_dir: str | None = None,
        tensorboard_dir: str | None = None,
        create_tb_writer: bool = False,
        files_to_copy: Sequence[str] | None = None,
        add_time_to_log_dir: bool = False,
        placement: DeviceType | None = None,
        optimization_level: Optimization = Optimization.mxprO0,
        random_seed: int | None = None,
        backend: Backend = Backend.PyTorch,
        **ignored: Any,
    ) -> None:
        show_on_screen()
        warn_without_effect("NeuralModuleFactory", ignored, FACTORY_WITHOUT_EFFECT, _names(NeuralModuleFactory.__init__))
        if create_tb_writer and log_dir is None and tensorboard_dir is None:
            raise ValueError("create_tb_writer=True needs log_dir= or tensorboard_dir=; got neither")
        self.placement = placement or DeviceType.AllGpu
        self._driver = _joined(self.placement)
        self.work = WorkDirectory(
            log_dir, checkpoint_dir, tensorboard_dir, add_time_to_log_dir, files_to_copy or (), self._driver
        )
        self.precision = "fp32" if optimization_level is Optimization.mxprO0 else "fp16"
        self.random_seed = random_seed
        if random_seed is not None:
            seed_all(random_seed)
        self.writes = create_tb_writer
        self._writer = _writer(self.work.tensorboard) if create_tb_writer and not self.global_rank else None
        self._trained = False
        self.run: Run | None = None
        """The native run of the last training."""

    @property
    def tb_writer(self) -> Any:
        """The SummaryWriter of the main process; None without `create_tb_writer`, and on the other processes."""
        return self._writer

    @property
    def work_dir(self) -> str | None:
        """The work directory; None without `log_dir`."""
        return None if self.work.path is None else str(self.work.path)

    @property
    def checkpoint_dir(self) -> str | None:
        """The folder of checkpoints; None without one."""
        return None if self.work.checkpoints is None else str(self.work.checkpoints)

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self._driver is None else self._driver.world_size

    @property
    def global_rank(self) -> int | None:
        """The rank of this process; None in a run on one process."""
        return None if self._driver is None or self.world_size == 1 else self._driver.rank

    def create_optimizer(
        self,
        optimizer: str | Optimizer,
        things_to_optimize: Sequence[NmTensor | NeuralModule],
        optimizer_params: Mapping[str, Any],
    ) -> Optimizer:
        """Return an optimizer for the weights of modules, or of the modules on which tensors depend."""
        parameters: list[nn.Parameter] = []
        for thing in things_to_optimize:
            module = model_of([thing]) if isinstance(thing, NmTensor) else thing
            parameters += module.parameters() if isinstance(module, nn.Module) else []
        return optimizers.built(optimizer, dict.fromkeys(parameters), optimizer_params)

    def train(
        self,
        tensors_to_optimize: Sequence[Any],
        optimizer: str | Optimizer | None = None,
        optimization_params: Mapping[str, Any] | None = None,
        callbacks: Sequence[BaseCallback] | None = None,
        lr_policy: Policy | None = None,
        batches_per_step: int | None = None,
        stop_on_nan_loss: bool = False,
        reset: bool = False,
        **ignored: Any,
    ) -> Run:
        """Train until ``num_epochs`` or ``max_steps`` of `optimization_params`, whichever comes first.

        Args:
            tensors_to_optimize: Losses, which are summed; or pairs of an optimizer and its losses, which alternate.
            optimizer: A name such as ``"sgd"``, or an optimizer.
            optimization_params: ``lr``, ``num_epochs``, ``max_steps``, ``grad_norm_clip``, and arguments of the optimizer.
            callbacks: A list of callbacks: NeMo's, native ones, or those of other adapters.
            lr_policy: A function of the initial rate, the step and the epoch.
            batches_per_step: The number of batches in an update.
            stop_on_nan_loss: Whether a loss that is not finite ends the training; False skips its batch.
            reset: Allow another training with this factory.

        Raises:
            ValueError, TypeError: An argument is wrong.
        """
        warn_without_effect("train", ignored, TRAIN_WITHOUT_EFFECT, _names(NeuralModuleFactory.train))
        if self._trained and not reset:
            raise ValueError("this factory has already trained. Call reset_trainer() first, or train(..., reset=True).")
        params = dict(optimization_params or {})
        if params.get("num_epochs") is None and params.get("max_steps") is None:
            raise ValueError("optimization_params needs num_epochs or max_steps; got neither")
        given = _checked(callbacks, self.callback_classes)
        pairs = _pairs(tensors_to_optimize)
        if batches_per_step is not None and batches_per_step < 1:
            raise ValueError(f"batches_per_step must be at least 1; got {batches_per_step!r}")
        if pairs and batches_per_step not in (None, 1):
            raise ValueError(f"alternating optimizers need batches_per_step=1; got {batches_per_step}")
        if not pairs:
            optimizers.check(optimizer or "sgd", params)
        if lr_policy is not None and (isinstance(lr_policy, type) or not callable(lr_policy)):
            raise TypeError(f"lr_policy must be an instance such as CosineAnnealing(total_steps=1000); got {lr_policy!r}")
        if lr_policy is not None and "lr" not in params:
            raise ValueError(f"lr_policy needs 'lr' in optimization_params; got {list(params)}")
        trainer = self._trainer(
            tensors_to_optimize, pairs, optimizer, params, given, lr_policy, batches_per_step, stop_on_nan_loss
        )
        self._trained = True
        try:
            self.run = trainer.fit()
        finally:
            if self._writer is not None:
                self._writer.flush()  # unwritten events are lost when the process ends
        return self.run

    def eval(self, callbacks: Sequence[EvaluatorCallback]) -> None:
        """Evaluate once, without training.

        Raises:
            TypeError: A callback is not an EvaluatorCallback.
            ValueError: `callbacks` is empty.
        """
        if isinstance(callbacks, BaseCallback):
            raise TypeError(f"callbacks must be a list; got {callbacks!r}. Write callbacks=[...].")
        if not callbacks:
            raise ValueError("eval needs at least one EvaluatorCallback; got none")
        for callback in callbacks:
            if not isinstance(callback, EvaluatorCallback):
                raise TypeError(f"eval accepts only EvaluatorCallbacks; got {callback!r}")
        for callback in callbacks:
            callback.evaluate_alone(self._driver or self._alone(), self.precision)

    def _alone(self) -> Driver:
        return driver_of("auto", None if self.placement is DeviceType.AllGpu else self.placement.value)

    def reset_trainer(self) -> None:
        """Allow another training with this factory."""
        self._trained = False

    def loop_callbacks(self) -> list[BaseCallback]:
        """Return native callbacks for work that the loop of this NeMo version does."""
        return []

    def _trainer(
        self,
        tensors: Sequence[Any],
        pairs: Sequence[Pair],
        optimizer: str | Optimizer | None,
        params: Mapping[str, Any],
        callbacks: Sequence[BaseCallback],
        lr_policy: Policy | None,
        batches_per_step: int | None,
        stop_on_nan_loss: bool,
    ) -> Trainer:
        losses: list[NmTensor] = [one for _, its in pairs for one in its] if pairs else list(tensors)
        model = model_of(losses)
        if self._driver is not None:
            self._driver.find_unused_parameters = bool(pairs)  # each step uses the losses of one optimizer
        before: list[BaseCallback] = [Attach(model.graph), NanGuard(stop_on_nan_loss)]
        if params.get("grad_norm_clip"):
            before.append(ClipGradients(max_norm=params["grad_norm_clip"]))
        after = [] if lr_policy is None else [SetRate(lr_policy, params["lr"])]  # after the callbacks' on_batch_start
        chosen = [one for one, _ in pairs] or (lambda parameters: optimizers.built(optimizer or "sgd", parameters, params))
        return Trainer(
            model,
            chosen,
            model.graph.data_layer.loader(),
            None if pairs else Together(losses),
            step_fn=Alternate(pairs) if pairs else None,
            max_epochs=params.get("num_epochs"),
            max_steps=params.get("max_steps"),
            accumulate=batches_per_step or 1,
            precision=self.precision,
            seed=self.random_seed,
            driver=self._driver or self._alone(),
            callbacks=[*before, *callbacks, *after, *self.loop_callbacks()],
            progress=False,
        )


def _joined(placement: DeviceType) -> DdpDriver | None:
    """Return the driver of a multi-process run, which joins the process group now; None in a run on one process."""
    if not launched():
        return None
    return DdpDriver(None if placement is DeviceType.AllGpu else placement.value)


def _writer(folder: Path | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder))


def _checked(callbacks: Sequence[BaseCallback] | None, classes: Sequence[type[BaseCallback]]) -> list[BaseCallback]:
    if callbacks is None:
        return []
    if isinstance(callbacks, BaseCallback | str | Mapping) or not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a list; got {callbacks!r}. Write callbacks=[...].")
    callbacks = list(callbacks)
    names = ", ".join(one.__name__ for one in classes)
    for callback in callbacks:
        if not isinstance(callback, BaseCallback):
            raise ValueError(
                f"each callback must be an instance of {names}, of a class of another adapter, or native; got {callback!r}. "
                "Decorate a function with one of the decorators, such as @on_step_end. Do not nest lists."
            )
    if sum(isinstance(callback, SimpleLossLoggerCallback) for callback in callbacks) > 1:
        raise ValueError("expected at most one SimpleLossLoggerCallback; got several. Pass all tensors to one of them.")
    return callbacks


def _pairs(tensors: Sequence[Any]) -> list[Pair]:
    if isinstance(tensors, NmTensor | str) or not tensors:
        raise TypeError(f"tensors_to_optimize must be a list of losses; got {tensors!r}")
    if all(isinstance(one, NmTensor) for one in tensors):
        return []
    pairs: list[Pair] = []
    for one in tensors:
        match one:
            case (Optimizer() as optimizer, [*losses]) if losses and all(isinstance(loss, NmTensor) for loss in losses):
                pairs.append((optimizer, losses))
            case _:
                raise TypeError(
                    f"tensors_to_optimize must be a list of losses, or of pairs (optimizer, [loss, ...]) with an optimizer of "
                    f"nf.create_optimizer; got {one!r} in it"
                )
    return pairs


def _names(function: Callable[..., Any]) -> list[str]:
    """Return the names of a method's arguments."""
    return [name for name in signature(function).parameters if name not in ("self", "ignored")]
