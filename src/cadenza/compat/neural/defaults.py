"""The default factory of a script: new modules take their device from it."""

from __future__ import annotations

from typing import Protocol

from cadenza.compat.neural.kinds import DeviceType, Optimization, default_placement


class Factory(Protocol):
    """The attributes of a factory that modules read."""

    @property
    def placement(self) -> DeviceType:
        """The device of its modules."""

    optim_level: Optimization
    """The precision of its trainings."""


_default: Factory | None = None


def default_factory() -> Factory | None:
    """Return the newest factory, or the one of `set_default_factory`; None without one."""
    return _default


def set_default_factory(factory: Factory | None) -> None:
    """Make this the default factory; None removes it."""
    global _default
    _default = factory


def placement_now() -> DeviceType:
    """Return the device of new modules."""
    return default_placement() if _default is None else _default.placement
