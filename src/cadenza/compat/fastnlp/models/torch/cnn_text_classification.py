"""A text classifier with convolutions over words (Kim 2014, https://arxiv.org/abs/1408.5882)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class CNNText(nn.Module):
    """Classify a text by convolutions of several widths over its words, each followed by its maximum over the text.

    Args:
        embed: (number of words, dimensions) of a new embedding, an ``nn.Embedding``, or its weights (V, D).
        num_classes: The number of classes.
        kernel_nums: The number of channels of each convolution.
        kernel_sizes: The width of each convolution in words; odd numbers.
        dropout: The dropout probability of the pooled features.

    Raises:
        ValueError: A width is even, or `kernel_nums` and `kernel_sizes` differ in length.
    """

    def __init__(
        self,
        embed: tuple[int, int] | nn.Embedding | Tensor,
        num_classes: int,
        kernel_nums: Sequence[int] = (30, 40, 50),
        kernel_sizes: Sequence[int] = (1, 3, 5),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.embed: nn.Embedding = _embedding(embed)
        self.conv_pool: ConvMaxpool = ConvMaxpool(self.embed.embedding_dim, kernel_nums, kernel_sizes)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.fc: nn.Linear = nn.Linear(sum(kernel_nums), num_classes)

    def forward(self, words: Tensor, seq_len: Tensor | None = None) -> dict[str, Tensor]:
        """Return ``{"pred": scores}``, shape (B, C).

        Args:
            words: Indices of words, shape (B, L).
            seq_len: The number of words without padding, shape (B,).
        """
        features = self.embed(words)
        mask = None
        if seq_len is not None:
            mask = torch.arange(words.shape[1], device=words.device) < seq_len.unsqueeze(1)
        return {"pred": self.fc(self.dropout(self.conv_pool(features, mask)))}

    def train_step(self, words: Tensor, target: Tensor, seq_len: Tensor | None = None) -> dict[str, Tensor]:
        """Return ``{"loss": cross entropy}`` of the classes `target`, shape (B,)."""
        return {"loss": functional.cross_entropy(self(words, seq_len)["pred"], target)}

    def evaluate_step(self, words: Tensor, seq_len: Tensor | None = None) -> dict[str, Tensor]:
        """Return ``{"pred": classes}``, shape (B,)."""
        return {"pred": self(words, seq_len)["pred"].argmax(-1)}


class ConvMaxpool(nn.Module):
    """Convolutions of several widths side by side, and the maximum of each channel over the text."""

    def __init__(self, in_channels: int, out_channels: Sequence[int], kernel_sizes: Sequence[int]) -> None:
        super().__init__()
        if len(out_channels) != len(kernel_sizes):
            raise ValueError(f"there must be a number of channels for each of {list(kernel_sizes)}; got {list(out_channels)}")
        if even := [size for size in kernel_sizes if size % 2 == 0]:
            raise ValueError(f"kernel_sizes must be odd, so that the text keeps its length; got {even}")
        self.convs: nn.ModuleList = nn.ModuleList(
            nn.Conv1d(in_channels, channels, size, padding=size // 2, bias=False)
            for channels, size in zip(out_channels, kernel_sizes, strict=True)
        )

    def forward(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the maxima, shape (B, sum of channels); where `mask` is false is padding."""
        found = [functional.relu(conv(features.transpose(1, 2))) for conv in self.convs]
        if mask is not None:
            found = [features.masked_fill(~mask.unsqueeze(1), float("-inf")) for features in found]
        return torch.cat([features.amax(-1) for features in found], dim=-1)


def _embedding(embed: Any) -> nn.Embedding:
    if isinstance(embed, nn.Embedding):
        return embed
    if isinstance(embed, tuple):
        words, dimensions = embed
        fresh = nn.Embedding(words, dimensions)
        bound = (3 / dimensions) ** 0.5
        nn.init.uniform_(fresh.weight, -bound, bound)
        return fresh
    given: nn.Embedding = nn.Embedding.from_pretrained(torch.as_tensor(embed, dtype=torch.float32), freeze=False)
    return given
