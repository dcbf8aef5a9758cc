"""``nemo.utils``."""

from cadenza.compat.nemo.utils import lr_policies as lr_policies
