"""The order of samples and of batches."""

from cadenza.compat.fastnlp.core.samplers import reproducible_batch_sampler, reproducible_sampler, unrepeated_sampler
from cadenza.compat.fastnlp.core.samplers.reproducible_batch_sampler import *  # noqa: F403  # all of them, as in fastNLP
from cadenza.compat.fastnlp.core.samplers.reproducible_sampler import *  # noqa: F403
from cadenza.compat.fastnlp.core.samplers.unrepeated_sampler import *  # noqa: F403

__all__: list[str] = []
__all__ += reproducible_batch_sampler.__all__
__all__ += reproducible_sampler.__all__
__all__ += unrepeated_sampler.__all__
