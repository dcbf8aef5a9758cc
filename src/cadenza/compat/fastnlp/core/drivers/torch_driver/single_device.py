"""``fastNLP.core.drivers.torch_driver.single_device``: one process on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from cadenza import drivers
from cadenza.compat.fastnlp.core.drivers.torch_driver.torch_driver import TorchDriver


class TorchSingleDriver(TorchDriver):
    """One process on one device.

    Args:
        model: The model.
        device: Its device; None leaves it where it is.
        fp16: As in `Driver`.
        torch_kwargs: As in `Driver`.
        kwargs: The other arguments of `Driver`.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        fp16: bool = False,
        torch_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        here = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        super().__init__(drivers.SingleDriver(device or here), model, fp16=fp16, torch_kwargs=torch_kwargs, **kwargs)
