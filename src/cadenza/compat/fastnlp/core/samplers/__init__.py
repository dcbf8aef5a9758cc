"""The order of samples and of batches."""

from cadenza.compat.fastnlp.core.samplers.reproducible_batch_sampler import (
    BucketedBatchSampler,
    RandomBatchSampler,
    ReproduceBatchSampler,
    ReproducibleBatchSampler,
)
from cadenza.compat.fastnlp.core.samplers.reproducible_sampler import (
    RandomSampler,
    ReproducibleSampler,
    SequentialSampler,
    SortedSampler,
)
from cadenza.compat.fastnlp.core.samplers.unrepeated_sampler import (
    UnrepeatedRandomSampler,
    UnrepeatedSampler,
    UnrepeatedSequentialSampler,
    UnrepeatedSortedSampler,
)

__all__ = [
    "BucketedBatchSampler",
    "RandomBatchSampler",
    "RandomSampler",
    "ReproduceBatchSampler",
    "ReproducibleBatchSampler",
    "ReproducibleSampler",
    "SequentialSampler",
    "SortedSampler",
    "UnrepeatedRandomSampler",
    "UnrepeatedSampler",
    "UnrepeatedSequentialSampler",
    "UnrepeatedSortedSampler",
]
