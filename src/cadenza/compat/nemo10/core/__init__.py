"""``nemo.core`` of NeMo 0.10: the names of its modules."""

from cadenza.compat.nemo10.core import callbacks as callbacks
from cadenza.compat.nemo10.core import neural_factory as neural_factory
from cadenza.compat.nemo10.core import neural_modules as neural_modules
from cadenza.compat.nemo10.core import neural_types as neural_types
from cadenza.compat.nemo10.core.callbacks import *  # noqa: F403  # all of them, as in NeMo
from cadenza.compat.nemo10.core.neural_factory import *  # noqa: F403
from cadenza.compat.nemo10.core.neural_modules import *  # noqa: F403
from cadenza.compat.nemo10.core.neural_types import *  # noqa: F403

__all__: list[str] = []
__all__ += callbacks.__all__
__all__ += neural_factory.__all__
__all__ += neural_modules.__all__
__all__ += neural_types.__all__
