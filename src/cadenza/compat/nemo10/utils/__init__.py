"""``nemo.utils``."""

from cadenza.compat.nemo10.utils import lr_policies as lr_policies
