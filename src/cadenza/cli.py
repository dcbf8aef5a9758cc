"""Deprecated: `cadenza.commands.main` holds this function. This module is removed in 0.3."""

import warnings

from cadenza.commands.main import main as main

warnings.warn(
    "cadenza.cli is deprecated and is removed in 0.3. Import main from cadenza.commands.main.",
    DeprecationWarning,
    stacklevel=2,
)
