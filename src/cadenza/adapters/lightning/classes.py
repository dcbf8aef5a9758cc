"""Classes of Lightning by name, without importing Lightning."""

from __future__ import annotations

PACKAGES = ("lightning", "pytorch_lightning")


def is_lightning(callback: object, name: str) -> bool:
    """Return whether `callback` is an instance of Lightning's class of this name, or of a subclass.

    >>> is_lightning({}, "ModelPruning")
    False
    """
    return any(one.__name__ == name and one.__module__.partition(".")[0] in PACKAGES for one in type(callback).__mro__)
