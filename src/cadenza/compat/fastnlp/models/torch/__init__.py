"""Models in torch."""

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.models.torch.cnn_text_classification import CNNText

__all__ = ["CNNText"]

advise(__name__)
