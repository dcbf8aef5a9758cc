"""The names of torchmetrics 0.9; since 0.11 its classes want to be given the task."""

from functools import partial

import torchmetrics
from torchmetrics import MetricCollection

__all__ = ["Accuracy", "MetricCollection", "Precision", "Recall"]

Accuracy = partial(torchmetrics.Accuracy, task="multiclass")
Precision = partial(torchmetrics.Precision, task="multiclass")
Recall = partial(torchmetrics.Recall, task="multiclass")
