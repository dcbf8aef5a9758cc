"""``nemo.core`` of NeMo 0.11: the names of its modules."""

from cadenza.compat.nemo.core import actions as actions
from cadenza.compat.nemo.core import callbacks as callbacks
from cadenza.compat.nemo.core import neural_factory as neural_factory
from cadenza.compat.nemo.core import neural_modules as neural_modules
from cadenza.compat.nemo.core import neural_types as neural_types
from cadenza.compat.nemo.core.callbacks import *  # noqa: F403  # all of them, as in NeMo
from cadenza.compat.nemo.core.neural_factory import *  # noqa: F403
from cadenza.compat.nemo.core.neural_modules import *  # noqa: F403
from cadenza.compat.nemo.core.neural_types import *  # noqa: F403
from cadenza.compat.neural.kinds import Backend

__all__ = ["Backend"]
__all__ += callbacks.__all__
__all__ += neural_factory.__all__
__all__ += neural_modules.__all__
__all__ += neural_types.__all__
