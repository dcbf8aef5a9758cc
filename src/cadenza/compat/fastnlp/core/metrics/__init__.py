"""Metrics."""

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.metrics.accuracy import Accuracy
from cadenza.compat.fastnlp.core.metrics.element import Element
from cadenza.compat.fastnlp.core.metrics.metric import Metric

__all__ = ["Accuracy", "Element", "Metric"]

advise(__name__)
