"""Models in torch."""

from cadenza.compat.fastnlp.models.torch.cnn_text_classification import CNNText

__all__ = ["CNNText"]
