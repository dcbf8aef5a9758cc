"""NeMo's enumerations, for both versions."""

from __future__ import annotations

from enum import Enum

import torch


class DeviceType(Enum):
    """The device of modules."""

    CPU = "cpu"
    GPU = "cuda"
    AllGpu = "auto"
    """One device per process, in a run on several processes."""


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

    @staticmethod
    def of(level: Optimization | str) -> Optimization:
        """Return the level of a name such as ``"O1"``, the form of `NemoArgParser`; return a level unchanged.

        Raises:
            ValueError: There is no such level.
        """
        if isinstance(level, Optimization):
            return level
        names = {f"O{level.value}": level for level in Optimization}
        if level not in names:
            raise ValueError(f"optimization_level must be one of {', '.join(names)}, or an Optimization; got {level!r}")
        return names[level]


class Backend(Enum):
    """The framework that executes a graph: PyTorch only."""

    PyTorch = 1
    NotSupported = 2


class OperationMode(Enum):
    """What a module is used for."""

    training = 0
    evaluation = 1
    both = 2


class ModelMode(Enum):
    """What a model is used for, in NeMo 0.10."""

    train = 0
    eval = 1


class ModuleType(Enum):
    """The kind of a neural module."""

    module = 0
    datalayer = 1
    trainable = 2
    loss = 3
    nontrainable = 4


class WeightShareTransform(Enum):
    """The transformation of a weight shared between modules."""

    SAME = 0
    TRANSPOSE = 1


def default_placement() -> DeviceType:
    """Return the device of a script on one process that does not name one."""
    return DeviceType.GPU if torch.cuda.is_available() else DeviceType.CPU


def device_of(placement: DeviceType) -> torch.device:
    """Return the device of a placement. ``AllGpu`` is the GPU of this process, or the CPU if there is no GPU."""
    if placement is DeviceType.AllGpu:
        placement = default_placement()
    return torch.device(placement.value)
