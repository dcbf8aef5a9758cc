"""``fastNLP.core.drivers``."""

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.drivers.driver import Driver

__all__ = ["Driver"]

advise(__name__)
