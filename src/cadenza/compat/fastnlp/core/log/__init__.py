"""``fastNLP.core.log``: the logger, and a print that goes through it."""

from cadenza.compat.fastnlp.core.log.logger import logger
from cadenza.compat.fastnlp.core.log.print import print

__all__ = ["logger", "print"]
