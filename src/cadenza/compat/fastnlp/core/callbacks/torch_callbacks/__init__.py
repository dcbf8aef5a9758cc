"""Callbacks for torch."""

from cadenza.compat.fastnlp.core.callbacks.torch_callbacks.torch_grad_clip_callback import TorchGradClipCallback
from cadenza.compat.fastnlp.core.callbacks.torch_callbacks.torch_lr_sched_callback import TorchWarmupCallback

__all__ = ["TorchGradClipCallback", "TorchWarmupCallback"]
