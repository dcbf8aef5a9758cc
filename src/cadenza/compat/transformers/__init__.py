"""Models, data and callbacks of Hugging Face's transformers in native runs. See docs/guides/from-huggingface.md."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.compat.transformers.arguments import Arguments as Arguments
    from cadenza.compat.transformers.loss import ModelLoss as ModelLoss
    from cadenza.compat.transformers.save_pretrained import SavePretrained as SavePretrained
    from cadenza.compat.transformers.trainer import trainer as trainer

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
