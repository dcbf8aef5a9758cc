"""Several loaders that are read as one, and streams that consist of shards."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.sources.mixture import Mixture as Mixture

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
