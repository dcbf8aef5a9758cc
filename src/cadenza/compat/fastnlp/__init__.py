"""fastNLP 1.0 on Cadenza: ``from fastNLP import Trainer`` becomes ``from cadenza.compat.fastnlp import Trainer``."""

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core import *  # noqa: F403  # its __all__ is the list
from cadenza.compat.fastnlp.envs import *  # noqa: F403  # likewise

__version__ = "1.0.1"  # the version of fastNLP that this adapter follows

advise(__name__)
