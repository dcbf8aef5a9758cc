"""Model preparation by transformers' trainer before the training, and callbacks for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.callbacks import ClipGradients, Evaluate
from cadenza.compat.adapter.requests import evaluate_now
from cadenza.compat.transformers.originals import original
from cadenza.drivers import Driver, driver_of
from cadenza.drivers.ddp import DdpDriver
from cadenza.drivers.rendezvous import launched
from cadenza.engine.session import session_of
from cadenza.errors import AdapterError
from cadenza.hooks.listener import Listener, inner
from cadenza.hooks.moments import Callback
from cadenza.hooks.order import Phase, Relation
from cadenza.hooks.schedule import Every
from cadenza.optim.parameters import parameters_of
from cadenza.run import Run


def seeded(arguments: Any) -> None:
    """Seed all generators and set transformers' verbosity, as its trainer does first."""
    original("enable_full_determinism" if arguments.full_determinism else "set_seed")(arguments.seed)
    original("utils.logging.set_verbosity")(arguments.get_process_log_level())


def model_of(model: nn.Module | None, model_init: Callable[[], nn.Module] | None, arguments: Any, processing_class: Any) -> Any:
    """Return the model, prepared for the training.

    Raises:
        ValueError: Both `model` and `model_init` are given, or none.
        TypeError: The model is not a module.
    """
    if (model is None) == (model_init is None):
        raise ValueError(f"expected either model or model_init; got {'both' if model is not None else 'none'}")
    found: Any = model if model_init is None else model_init()
    if not isinstance(found, nn.Module):
        loads = f"AutoModelForCausalLM.from_pretrained({found!r})" if isinstance(found, str) else "an instance"
        raise TypeError(f"model must be a torch.nn.Module; got {found!r}. Give {loads}.")
    if (config := getattr(found, "config", None)) is not None:
        config.use_cache = arguments.use_cache
    if arguments.activation_checkpointing:
        _checkpoint_activations(found, arguments)
    _align_tokens(found, processing_class)
    if any(getattr(option, "value", option) == "underflow_overflow" for option in arguments.debug):
        original("debug_utils.DebugUnderflowOverflow")(found)
    return found


def _checkpoint_activations(model: Any, arguments: Any) -> None:
    options = dict(arguments.activation_checkpointing_kwargs or {})
    own = {"every_n_layers": options.pop("every_n_layers", 1), "offload": options.pop("offload", False)}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options or None, **own)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None)


def _align_tokens(model: Any, processing_class: Any) -> None:
    with_tokens = original("tokenization_utils_base.PreTrainedTokenizerBase"), original("processing_utils.ProcessorMixin")
    if isinstance(processing_class, with_tokens) and hasattr(model, "config"):
        original("trainer_utils.align_special_tokens")(model, processing_class)


def driver_for(arguments: Any, given: str | Driver, device: Any, model: nn.Module) -> Driver:
    """Return the driver of the run: the given one, or the equivalent of transformers' choice.

    Raises:
        AdapterError: On multiple ranks, the arguments request a separate mean for each.
    """
    device = "cpu" if device is None and arguments.use_cpu else device
    if given in ("auto", "ddp") and launched():
        unused = arguments.ddp_find_unused_parameters
        unused = not arguments.activation_checkpointing if unused is None else unused
        driver: Driver = DdpDriver(
            device,
            find_unused_parameters=unused,
            static_graph=bool(arguments.ddp_static_graph),
            bucket_cap_mb=arguments.ddp_bucket_cap_mb,
            broadcast_buffers=arguments.ddp_broadcast_buffers is not False,
            timeout_s=arguments.ddp_timeout,
        )
    else:
        driver = driver_of(given, device)
    if driver.world_size > 1 and not arguments.average_tokens_across_devices:
        raise AdapterError(
            "TrainingArguments(average_tokens_across_devices=False) cannot be used on multiple ranks: the loss is the mean "
            "over the labels of all ranks. Leave it out."
        )
    return driver


class EvaluateOnRequest(Evaluate):
    """Evaluate only if a callback sets ``control.should_evaluate``, since ``eval_strategy`` is ``no``."""

    def __init__(self, loader: Iterable[Any], **options: Any) -> None:
        super().__init__(loader, ~Every("1 epoch"), **options)

    def listeners(self) -> list[Listener]:
        return [listener for listener in super().listeners() if listener.schedule is None]


class EvaluateOnStart(Callback):
    """Evaluate before the first step."""

    after: Relation = (Phase.EVALUATE, Phase.SAVE)

    def on_fit_start(self, run: Run) -> None:
        if not run.progress.step:
            evaluate_now(run)


class Modes(Callback):
    """Set module modes like transformers' trainer: training, and evaluation mode after a final evaluation."""

    def __init__(self) -> None:
        self._evaluated: int | None = None  # the step of the last evaluation

    def on_setup(self, run: Run) -> None:
        self._evaluated = None
        run.model.train()

    def on_fit_start(self, run: Run) -> None:
        run.at_end(partial(self._end, run))

    def on_eval_end(self, run: Run, evaluation: object) -> None:
        self._evaluated = run.progress.step

    def _end(self, run: Run) -> None:
        if self._evaluated == run.progress.step:
            run.model.eval()


class ClipModelGradients(ClipGradients):
    """Clip by the norm of all gradients of the model, like transformers' trainer.

    A callback may unfreeze parameters that the optimizer does not have. Their gradients are part of the norm, and each update
    drops them.
    """

    name: str | None = "ClipGradients"

    def listeners(self) -> list[Listener]:
        return [*super().listeners(), *inner([Listener(Callback.on_before_zero_grad, self._drop, silent=True)])]

    def on_fit_start(self, run: Run) -> None:
        super().on_fit_start(run)
        held = set(map(id, parameters_of(run.optimizers)))
        self._others = [parameter for parameter in run.model.parameters() if id(parameter) not in held]

    def on_before_optimizer_step(self, run: Run) -> None:
        window = session_of(run).step.window
        if not window.complete and (gradients := [other.grad for other in self._others if other.grad is not None]):
            torch._foreach_mul_(gradients, window.correction(run.driver.data_world_size))  # as those of the optimizer
        super().on_before_optimizer_step(run)

    def _clipped(self, run: Run) -> Iterable[Tensor]:
        return [*super()._clipped(run), *self._others]

    def _drop(self, run: Run) -> None:
        for other in self._others:
            other.grad = None


class Neftune(Callback):
    """Add noise to the embeddings during training (Jain et al. 2023), like ``neftune_noise_alpha``.

    Args:
        alpha: The size of the noise.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha: float = alpha

    def listeners(self) -> list[Listener]:
        return [Listener(Callback.on_fit_start, self._begin)]

    def _begin(self, run: Run) -> None:
        handle = original("integrations.neftune.activate_neftune")(run.model, self.alpha)
        run.at_end(handle.remove)
