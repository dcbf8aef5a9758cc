"""``nemo.utils``."""

from cadenza.compat.absent import advise
from cadenza.compat.nemo.utils import lr_policies as lr_policies

advise(__name__)
