"""Metrics."""

from cadenza.compat.fastnlp.core.metrics.accuracy import Accuracy, TransformersAccuracy
from cadenza.compat.fastnlp.core.metrics.bleu import BLEU
from cadenza.compat.fastnlp.core.metrics.classify_f1_pre_rec_metric import ClassifyFPreRecMetric
from cadenza.compat.fastnlp.core.metrics.element import Element
from cadenza.compat.fastnlp.core.metrics.metric import Metric
from cadenza.compat.fastnlp.core.metrics.perplexity import Perplexity
from cadenza.compat.fastnlp.core.metrics.rouge import ROUGE
from cadenza.compat.fastnlp.core.metrics.span_f1_pre_rec_metric import SpanFPreRecMetric

__all__ = [
    "BLEU",
    "ROUGE",
    "Accuracy",
    "ClassifyFPreRecMetric",
    "Element",
    "Metric",
    "Perplexity",
    "SpanFPreRecMetric",
    "TransformersAccuracy",
]
