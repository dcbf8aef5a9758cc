"""``nemo.utils.decorators.port_docs``."""

from cadenza.compat.absent import advise
from cadenza.compat.neural.decorators import add_port_docs

__all__ = ["add_port_docs"]

advise(__name__)
