"""Data sets by field."""

from cadenza.compat.fastnlp.core.dataset.dataset import ApplyResultException, DataSet
from cadenza.compat.fastnlp.core.dataset.field import FieldArray
from cadenza.compat.fastnlp.core.dataset.instance import Instance

__all__ = ["ApplyResultException", "DataSet", "FieldArray", "Instance"]
