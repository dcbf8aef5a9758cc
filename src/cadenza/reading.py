"""Deprecated: `cadenza.records` holds these functions. This module is removed in 0.3."""

import warnings

from cadenza.records.reading import read_decisions as read_decisions
from cadenza.records.reading import read_records as read_records

warnings.warn(
    "cadenza.reading is deprecated and is removed in 0.3. Import read_records and read_decisions from cadenza.records.",
    DeprecationWarning,
    stacklevel=2,
)
