"""``fastNLP.core.drivers``."""

from cadenza.compat.fastnlp.core.drivers.driver import Driver

__all__ = ["Driver"]
