"""Import MosaicML Streaming where torchvision is not installed: its classes for pictures, which no recipe uses, ask for it."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

NAMES = {"torchvision.datasets": "VisionDataset", "torchvision.transforms.functional": "to_tensor"}


def import_streaming() -> None:
    """Import ``streaming``, with empty modules for torchvision that are gone afterwards."""
    if "streaming" in sys.modules or find_spec("torchvision") is not None:
        return
    import_module("transformers")  # it looks for torchvision, too, and must not find the empty modules
    import_module("transformers.feature_extraction_utils")
    import_module("transformers.tokenization_utils_base")
    absent = {name: ModuleType(name) for name in ("torchvision", "torchvision.transforms", *NAMES)}
    for name, attribute in NAMES.items():
        setattr(absent[name], attribute, type(attribute, (), {}))
    sys.modules.update(absent)
    try:
        import_module("streaming")
    finally:
        for name in absent:
            del sys.modules[name]
