"""Training, evaluation and inference of graphs by a factory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from cadenza.callbacks import ClipGradients
from cadenza.compat.neural import checkpoints, inference, optimizers
from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.arguments import names_of, warn_without_effect
from cadenza.compat.neural.defaults import placement_now
from cadenza.compat.neural.evaluator import EvaluatorCallback
from cadenza.compat.neural.kinds import DeviceType, Optimization, default_placement
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.loss_logger import SimpleLossLoggerCallback
from cadenza.compat.neural.modules import loader_of
from cadenza.compat.neural.policies import Policy
from cadenza.compat.neural.tensors import NeuralModule, NmTensor, tensor_list
from cadenza.compat.neural.training import (
    Alternate,
    Attach,
    DrawNumbers,
    NanGuard,
    Pair,
    SetRate,
    Together,
    in_order,
    model_of,
    pairs_of,
)
from cadenza.drivers import DdpDriver, Driver, driver_of
from cadenza.drivers.rendezvous import launched
from cadenza.hooks.moments import BaseCallback, check_settings
from cadenza.loops.foreign_callbacks import AnyCallback, adapted
from cadenza.optim.optimizers import load_state
from cadenza.trainer import Trainer

if TYPE_CHECKING:
    from cadenza.run import Run

TRAIN_WITHOUT_EFFECT = (
    "synced_batchnorm",
    "synced_batchnorm_groupsize",
    "gradient_predivide",
    "amp_max_loss_scale",
    "steps_per_nan_check",
)
"""Arguments of NeMo's ``train`` without an effect here."""


class Actions:
    """Training, evaluation and inference of graphs.

    Args:
        placement: The device; None takes the best one.
        optimization_level: The precision: an `Optimization`, or its name, such as ``"O1"``.
        random_seed: The seed of the generators, which a factory has set.
    """

    callback_classes: ClassVar[tuple[type[BaseCallback], ...]] = (ActionCallback,)
    """The classes of callbacks for `train`, besides native ones."""

    epoch_key: ClassVar[str] = "epoch"
    """The key of the epoch in the file of `save_state_to`."""

    tb_writer: Any = None
    """The SummaryWriter of the main process."""

    step: int
    epoch: int

    def __init__(
        self,
        placement: DeviceType | None = None,
        optimization_level: Optimization | str = Optimization.mxprO0,
        random_seed: int | None = None,
    ) -> None:
        if not isinstance(placement, DeviceType | None):
            raise TypeError(f"placement must be a DeviceType such as DeviceType.CPU, or None; got {placement!r}")
        self._wanted = placement or DeviceType.AllGpu
        self._driver = _joined(self._wanted)
        self.optim_level: Optimization = Optimization.of(optimization_level)
        self.random_seed = random_seed
        self._inference = inference.Inference()
        self.reset_trainer()

    def reset_trainer(self) -> None:
        """Forget the last training, so that another one can start."""
        self.run: Run | None = None
        """The native run of the last training."""
        self.optimizers: list[Optimizer] = []
        """The optimizers of `create_optimizer`, and those of the last training."""
        self.step = self.epoch = 0
        self._trained = False

    @property
    def placement(self) -> DeviceType:
        """The device: the given one, or the best one."""
        if self._wanted is not DeviceType.AllGpu or self.world_size > 1:
            return self._wanted
        return default_placement()

    @property
    def precision(self) -> str:
        """The precision of a native trainer."""
        return "fp32" if self.optim_level is Optimization.mxprO0 else "fp16"

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return 1 if self._driver is None else self._driver.world_size

    @property
    def global_rank(self) -> int | None:
        """The rank of this process; None in a run on one process."""
        return None if self._driver is None or self.world_size == 1 else self._driver.rank

    @property
    def local_rank(self) -> int | None:
        """The rank of this process on its machine; None in a run on one process."""
        return None if self._driver is None or self.world_size == 1 else self._driver.local_rank

    @property
    def epoch_num(self) -> int:
        """The number of completed epochs, as `epoch`."""
        return self.epoch

    @epoch_num.setter
    def epoch_num(self, value: int) -> None:
        self.epoch = value

    def create_optimizer(
        self,
        optimizer: str | Optimizer,
        things_to_optimize: NmTensor | NeuralModule | Sequence[NmTensor | NeuralModule],
        optimizer_params: Mapping[str, Any] | None = None,
    ) -> Optimizer:
        """Return an optimizer for the weights of modules, or of the modules on which tensors depend."""
        things = [things_to_optimize] if isinstance(things_to_optimize, NmTensor | NeuralModule) else things_to_optimize
        parameters: list[nn.Parameter] = []
        if not things or not all(isinstance(thing, NmTensor | NeuralModule) for thing in things):
            raise ValueError(f"create_optimizer needs a list of neural modules or NmTensors; got {things_to_optimize!r}")
        for thing in things:
            module = model_of([thing]) if isinstance(thing, NmTensor) else thing
            parameters += module.parameters() if isinstance(module, nn.Module) else []
        built = optimizers.built(optimizer, dict.fromkeys(parameters), optimizer_params or {})
        self.optimizers.append(built)
        return built

    def train(
        self,
        tensors_to_optimize: Sequence[Any],
        optimizer: str | Optimizer | None = None,
        optimization_params: Mapping[str, Any] | None = None,
        callbacks: Sequence[AnyCallback] | None = None,
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
        warn_without_effect("train", ignored, TRAIN_WITHOUT_EFFECT, names_of(Actions.train))
        if self._trained and not reset:
            raise ValueError("this factory has already trained. Call reset_trainer() first, or train(..., reset=True).")
        if reset:
            self.reset_trainer()
        params = optimizers.params_of(optimization_params)
        if params.get("num_epochs") is None and params.get("max_steps") is None:
            raise ValueError("optimization_params needs num_epochs or max_steps; got neither")
        given = _checked(callbacks, self.callback_classes)
        pairs = pairs_of(tensors_to_optimize)
        if batches_per_step is not None and (not isinstance(batches_per_step, int) or batches_per_step < 1):
            raise ValueError(f"batches_per_step must be a whole number of at least 1; got {batches_per_step!r}")
        if pairs and batches_per_step not in (None, 1):
            raise ValueError(f"alternating optimizers need batches_per_step=1; got {batches_per_step}")
        if not pairs:
            optimizers.check(optimizer or "sgd", params)
        if lr_policy is not None and (isinstance(lr_policy, type) or not callable(lr_policy)):
            raise TypeError(f"lr_policy must be an instance such as CosineAnnealing(total_steps=1000); got {lr_policy!r}")
        if lr_policy is not None and params.get("lr") is None:
            raise ValueError(f"lr_policy needs 'lr' in optimization_params; got {list(params)}")
        trainer = self._trainer(
            tensors_to_optimize, pairs, optimizer, params, given, lr_policy, batches_per_step, stop_on_nan_loss
        )
        self._trained = True
        trainer.model.train()  # all modules, as in NeMo
        try:
            self.run = trainer.fit()
        finally:
            if self.tb_writer is not None:
                self.tb_writer.flush()  # unwritten events are lost when the process ends
        self.optimizers = list(self.run.optimizers)
        self.step, self.epoch = self.run.progress.step, self.run.progress.epoch
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

    def infer(
        self,
        tensors: Sequence[NmTensor],
        checkpoint_dir: str | None = None,
        ckpt_pattern: str = "",
        verbose: bool = True,
        cache: bool = False,
        use_cache: bool = False,
        offload_to_cpu: bool = True,
        modules_to_restore: NeuralModule | Sequence[NeuralModule] | None = None,
    ) -> list[list[Any]] | None:
        """Return the values of tensors over all data: for each tensor a list with one value per batch.

        Modules are in evaluation mode, and there are no gradients. Every rank must call this; only the main process gets the
        values.

        Args:
            tensors: They must depend on one data layer.
            checkpoint_dir: Restore the weights from the newest files of this folder.
            ckpt_pattern: A part of the names of these files.
            verbose: Whether to log the start.
            cache: Keep all computed values for calls with `use_cache`.
            use_cache: Start from these values instead of the data layer. The tensors themselves are computed again.
            offload_to_cpu: Whether to copy the values to the host.
            modules_to_restore: The modules to restore; None for all with trainable weights.

        Raises:
            ValueError: There is no file for a module, or the cache is used in the wrong order.
        """
        tensors = tensor_list("tensors", tensors)
        if checkpoint_dir:
            inference.restore(tensors, checkpoint_dir, ckpt_pattern, modules_to_restore)
        if verbose:
            logging.info("Evaluating %s", ", ".join(tensor.name for tensor in tensors))
        driver = self._driver or self._alone()
        return self._inference(tensors, driver, self.precision, cache=cache, use_cache=use_cache, offload=offload_to_cpu)

    def clear_cache(self) -> None:
        """Delete the values that `infer` keeps."""
        self._inference.clear()

    def sync_all_processes(self, status: bool = True) -> None:
        """Synchronize the failure status of all processes. Every rank must call this.

        Args:
            status: Whether this process succeeded. If False, the caller reports its error and exits.

        Raises:
            ValueError: Another process failed.
        """
        if self._driver is not None and self._driver.any_rank(not status) and status:
            raise ValueError(f"the process with rank {self.global_rank} is well, but another process failed: see its error")

    def _alone(self) -> Driver:
        return driver_of("auto", None if self._wanted is DeviceType.AllGpu else self._wanted.value)

    def loop_callbacks(self) -> list[BaseCallback]:
        """Return native callbacks for the work of this NeMo version's loop."""
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
        losses: list[NmTensor] = [tensor for _, its in pairs for tensor in its] if pairs else list(tensors)
        model = model_of(losses)
        if self._driver is not None:
            self._driver.find_unused_parameters = bool(pairs)  # each step uses the losses of one optimizer
        before: list[BaseCallback] = [Attach(model.graph, pairs), NanGuard(stop_on_nan_loss)]
        if params.get("grad_norm_clip"):
            before.append(ClipGradients(max_norm=params["grad_norm_clip"]))
        loader = loader_of(model.graph.data_layer)
        after: list[BaseCallback] = [DrawNumbers(isinstance(loader, DataLoader))]  # after the callbacks' on_epoch_start
        after += [] if lr_policy is None else [SetRate(lr_policy, params["lr"], pairs)]  # after the callbacks' on_batch_start
        chosen = in_order(pairs, self.optimizers) or optimizers.built(optimizer or "sgd", model.parameters(), params)
        return Trainer(
            model,
            chosen,
            loader,
            None if pairs else Together(losses),
            step_fn=Alternate(pairs) if pairs else None,
            max_epochs=params.get("num_epochs"),
            max_steps=params.get("max_steps"),
            accumulate=batches_per_step or 1,
            precision=self.precision,
            driver=self._driver or self._alone(),
            callbacks=[*before, *callbacks, *after, *self.loop_callbacks()],
            progress=False,
        )

    # -- state --------------------------------------------------------------------------------------------

    def save_state_to(self, path: str | os.PathLike[str]) -> None:
        """Write step, epoch and the states of the optimizers in the format of NeMo's trainer files."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        content = {"step": self.step, self.epoch_key: self.epoch, "optimizer_state": states}
        checkpoints.Folder(Path(path).parent).write(Path(path).name, content)

    def restore_state_from(self, path: str | os.PathLike[str]) -> None:
        """Read a file of `save_state_to`, or of NeMo.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file holds pickled code, or is damaged.
        """
        content = checkpoints.Folder(Path(path).parent).read(Path(path).name)
        self.step, self.epoch = content["step"], content.get("epoch", content.get("epoch_num", 0))
        for optimizer, state in zip(self.optimizers, content["optimizer_state"], strict=False):
            load_state(optimizer, state)


class PtActions(Actions):
    """The actions of a script without a factory of its own. They use the device of the default factory.

    Args:
        local_rank: Not needed: a script under torchrun knows its ranks.
        global_rank: Not needed either.
        tb_writer: A SummaryWriter.
        optimization_level: The precision.
    """

    def __init__(
        self,
        local_rank: int | None = None,
        global_rank: int | None = None,
        tb_writer: Any = None,
        optimization_level: Optimization | str = Optimization.mxprO0,
    ) -> None:
        super().__init__(placement_now(), optimization_level)
        self.tb_writer = tb_writer


def _joined(placement: DeviceType) -> DdpDriver | None:
    """Return the driver of a multi-process run, which joins the process group now; None in a run on one process."""
    if not launched():
        return None
    return DdpDriver(None if placement is DeviceType.AllGpu else placement.value)


def _checked(callbacks: Sequence[AnyCallback] | None, classes: Sequence[type[BaseCallback]]) -> list[BaseCallback]:
    if callbacks is None:
        return []
    if isinstance(callbacks, BaseCallback | str | Mapping) or not isinstance(callbacks, Iterable):
        raise TypeError(f"callbacks must be a list; got {callbacks!r}. Write callbacks=[...].")
    given: list[Any] = list(adapted(callbacks))
    names = ", ".join(class_.__name__ for class_ in classes)
    for index, callback in enumerate(given):
        if not isinstance(callback, BaseCallback):
            raise ValueError(
                f"each callback must be an instance of {names}, of a class of another adapter, or native; got {callback!r}. "
                "Decorate a function with one of the decorators, such as @on_step_end. Do not nest lists."
            )
        check_settings(callback, f"callbacks[{index}]")
    if sum(isinstance(callback, SimpleLossLoggerCallback) for callback in given) > 1:
        raise ValueError("expected at most one SimpleLossLoggerCallback; got several. Pass all tensors to one of them.")
    return given
