"""The order of samples."""

from cadenza.compat.fastnlp.core.samplers.reproducible_sampler import RandomSampler

__all__ = ["RandomSampler"]
