"""The meanings of elements that NeMo 0.11 adds (``nemo.core.neural_types``)."""

from __future__ import annotations

from cadenza.compat.neural.elements import ElementType

__all__ = [
    "ClassificationTarget",
    "ImageFeatureValue",
    "ImageValue",
    "Index",
    "IntType",
    "Length",
    "NormalizedImageValue",
    "StringLabel",
    "StringType",
    "Target",
    "TokenIndex",
]


class Index(ElementType):
    """The index of a sample."""


class Target(ElementType):
    """The target of a training."""


class ClassificationTarget(Target):
    """The identifier of a class."""


class ImageValue(ElementType):
    """A value of one channel of an image."""


class NormalizedImageValue(ImageValue):
    """A value of one channel of an image, between 0 and 1."""


class ImageFeatureValue(ImageValue):
    """A value of a feature map."""


class StringType(ElementType):
    """A string."""


class StringLabel(StringType):
    """The name of a class."""


class IntType(ElementType):
    """An integer."""


class TokenIndex(IntType):
    """The index of a token in a vocabulary."""


class Length(IntType):
    """A length."""
