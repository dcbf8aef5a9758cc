"""For users of Lightning: weights of its checkpoints, and the stages of a LightningModule."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.compat.lightning.checkpoint_file import checkpoint_facts as checkpoint_facts
    from cadenza.compat.lightning.checkpoint_file import load_weights as load_weights
    from cadenza.compat.lightning.stages import predict as predict
    from cadenza.compat.lightning.stages import test as test
    from cadenza.compat.lightning.stages import validate as validate

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
