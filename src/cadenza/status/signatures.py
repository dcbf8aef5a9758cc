"""The signatures of functions that users write."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

if sys.version_info >= (3, 14):
    from annotationlib import Format

    _UNREAD = {"annotation_format": Format.STRING}
else:
    _UNREAD = dict[str, Any]()


def signature_of(function: Callable[..., Any], *, follow_wrapped: bool = True) -> inspect.Signature:
    """Return ``inspect.signature(function)`` without evaluation of its annotations.

    From Python 3.14, annotations are evaluated when they are read (PEP 649), and a name that is imported below
    ``if TYPE_CHECKING:`` would be a NameError here.

    Raises:
        ValueError: A builtin has no signature.
        TypeError: `function` cannot be called.
    """
    return inspect.signature(function, follow_wrapped=follow_wrapped, **_UNREAD)
