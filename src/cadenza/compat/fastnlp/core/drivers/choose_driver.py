"""``fastNLP.core.drivers.choose_driver``: the driver for ``driver=`` and ``device=``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cadenza import drivers
from cadenza.compat.fastnlp.core.drivers.driver import Driver
from cadenza.compat.fastnlp.core.drivers.torch_driver import TorchDDPDriver, TorchDriver, TorchFSDPDriver, TorchSingleDriver
from cadenza.drivers.rendezvous import launched

logger: logging.Logger = logging.getLogger("cadenza")

NAMES: Mapping[str, str] = {"auto": "auto", "torch": "auto", "single": "single", "torch_ddp": "ddp", "torch_fsdp": "fsdp"}
"""The accepted names, and the native driver of each."""

_SHARD = "Use driver=cadenza.drivers.FsdpDriver(shard=...), which shards the weights over the ranks."
_TORCH_ONLY = "Cadenza trains with PyTorch. Write the model as a torch.nn.Module, and pass driver='torch'."
REFUSED: Mapping[str, str] = {
    "deepspeed": _SHARD,
    "fairscale": _SHARD,
    "paddle": _TORCH_ONLY,
    "fleet": _TORCH_ONLY,
    "jittor": _TORCH_ONLY,
    "oneflow": _TORCH_ONLY,
}
"""The names of fastNLP's other drivers and their replacements."""

_WITHOUT_EFFECT = {
    "ddp_kwargs": "pass driver=cadenza.drivers.DdpDriver(...), which takes the arguments of DDP",
    "fsdp_kwargs": "pass driver=cadenza.drivers.FsdpDriver(shard=...)",
    "gradscaler_kwargs": "the loss scale starts with torch's defaults",
}


def choose_driver(
    model: nn.Module, driver: str | Driver | drivers.Driver, device: Any = None, optimizers: Any = None, **kwargs: Any
) -> Driver:
    """Return the driver of a model, which is moved to its device.

    Args:
        model: The model.
        driver: ``"auto"`` or ``"torch"``: one process, or DDP in a process that a launcher such as torchrun started.
            ``"single"``, ``"torch_ddp"``, ``"torch_fsdp"``. A driver of fastNLP's names, or one of `cadenza.drivers`.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, a ``torch.device``, the index of a GPU, -1 for all, a list of indices.
            None: the device of the model. It is ignored in a process of a launcher, and with a driver object.
        optimizers: The argument of the trainer.
        kwargs: The arguments of `Driver`.

    Raises:
        ValueError, TypeError: An argument is wrong.
        RuntimeError: Several processes are needed, and no launcher started this one.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {model!r}")
    if not isinstance(settings := kwargs.get("torch_kwargs") or {}, Mapping):
        raise TypeError(f"torch_kwargs must be a dict, such as {{'non_blocking': False}}; got {settings!r}")
    if isinstance(driver, Driver):
        if optimizers is not None:
            driver.set_optimizers(optimizers)
        driver.model = model
        driver.setup()
        return driver
    native = driver if isinstance(driver, drivers.Driver) else _named(model, driver, device)
    for name in _WITHOUT_EFFECT.keys() & settings.keys():
        logger.warning("torch_kwargs[%r] has no effect: %s", name, _WITHOUT_EFFECT[name])
    chosen = around(native, model, optimizers, **kwargs)
    chosen.setup()
    return chosen


def around(native: drivers.Driver, model: nn.Module, optimizers: Any = None, **kwargs: Any) -> Driver:
    """Return a native driver with fastNLP's names."""
    kinds: dict[type, type[TorchDriver]] = {
        drivers.SingleDriver: TorchSingleDriver,
        drivers.FsdpDriver: TorchFSDPDriver,
        drivers.DdpDriver: TorchDDPDriver,
    }
    kind = next((kinds[native_kind] for native_kind in kinds if isinstance(native, native_kind)), TorchDriver)
    return kind.around(native, model, optimizers, **kwargs)


def _named(model: nn.Module, driver: object, device: Any) -> drivers.Driver:
    if driver in REFUSED:
        raise ValueError(f"driver={driver!r} is not provided. {REFUSED[str(driver)]}")
    if not isinstance(driver, str) or driver not in NAMES:
        raise ValueError(f"driver must be one of {', '.join(map(repr, NAMES))}, or one of Cadenza's drivers; got {driver!r}")
    native = NAMES[driver]
    if launched() and native != "single":
        return drivers.driver_of(native)
    if native in ("ddp", "fsdp"):
        raise RuntimeError(
            f"driver={driver!r} needs processes that a launcher started: torchrun --nproc-per-node 2 script.py. For one "
            "process pass driver='torch'."
        )
    return drivers.driver_of("single", _of_the_model(model) if device is None else _one_device(device))


def _of_the_model(model: nn.Module) -> torch.device:
    """Return the device of a model; the CPU if it has no tensors."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(found) > 1:
        names = sorted(map(str, found))
        raise ValueError(f"device=None means the device of the model, but it is on several: {names}. Pass device=.")
    return found.pop() if found else torch.device("cpu")


def _one_device(device: Any) -> str | torch.device:
    count = torch.cuda.device_count()
    if device == -1 and not isinstance(device, bool):
        device = list(range(count))
        if not device:
            raise ValueError("device=-1 means all GPUs, but there is none. Pass device='cpu'.")
    if isinstance(device, Sequence) and not isinstance(device, str):
        if wrong := [index for index in device if not isinstance(index, int) or isinstance(index, bool) or index < 0]:
            raise ValueError(f"a list of devices must hold the indices of GPUs; got {wrong[0]!r} in {device!r}")
        device = sorted(set(device))
        if len(device) != 1:
            raise RuntimeError(
                f"device={device!r} needs {len(device)} processes. Start them with torchrun, and pass device=None."
            )
        device = device[0]
    if isinstance(device, int) and not isinstance(device, bool):
        if not 0 <= device < count:
            raise ValueError(f"device must be -1 or the index of a GPU, of which there are {count}; got {device}")
        device = f"cuda:{device}"
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device must be a name such as 'cpu', the index of a GPU, or a list of one; got {device!r}")
    return device
