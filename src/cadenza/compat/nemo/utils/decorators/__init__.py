"""``nemo.utils.decorators``."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo.utils.decorators.deprecated import deprecated
from cadenza.compat.nemo.utils.decorators.port_docs import add_port_docs

__all__ = ["add_port_docs", "deprecated"]

advise(__name__)
