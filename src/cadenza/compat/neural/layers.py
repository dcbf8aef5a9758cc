"""Small modules of ``nemo.backends.pytorch.common``: an embedding, zeros, an attention, a classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cadenza.compat.neural.elements import ChannelType, VoidType
from cadenza.compat.neural.modules import NonTrainableNM, TrainableNM
from cadenza.compat.neural.ports import NeuralType
from cadenza.compat.neural.tensors import Ports


class SequenceEmbedding(TrainableNM):
    """The embedding of ``input_seq``, indices of shape (B, T); the output has shape (B, T, hidden_size).

    Args:
        voc_size: The number of indices.
        hidden_size: The number of features.
        dropout: The probability of dropping a feature.
    """

    def __init__(self, voc_size: int, hidden_size: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.voc_size: int = voc_size
        self.hidden_size: int = hidden_size
        self.dropout: float = dropout
        self.embedding: nn.Embedding = nn.Embedding(voc_size, hidden_size)
        self.embedding_dropout: nn.Dropout = nn.Dropout(dropout)

    @property
    def input_ports(self) -> Ports:
        return {"input_seq": NeuralType(("B", "T"))}

    @property
    def output_ports(self) -> Ports:
        return {"outputs": NeuralType(("B", "T", "C"), ChannelType())}

    def forward(self, input_seq: Tensor) -> Tensor:
        """Return the features, shape (B, T, hidden_size)."""
        features: Tensor = self.embedding_dropout(self.embedding(input_seq))
        return features


class ZerosLikeNM(NonTrainableNM):
    """Integer zeros of the shape of ``input_type_ids``, (B, T)."""

    @property
    def input_ports(self) -> Ports:
        return {"input_type_ids": NeuralType(("B", "T"), VoidType())}

    @property
    def output_ports(self) -> Ports:
        return {"input_type_ids": NeuralType(("B", "T"), ChannelType())}

    def forward(self, input_type_ids: Tensor) -> Tensor:
        """Return the zeros."""
        return torch.zeros_like(input_type_ids, dtype=torch.int64)


class Attention(nn.Module):
    """The attention of Luong et al. 2015.

    Args:
        dims: The number of features.
        method: ``"general"`` transforms the query first, ``"dot"`` does not.
        dropout: The probability of dropping a weight.

    Raises:
        ValueError: There is no such method.
    """

    def __init__(self, dims: int, method: str = "general", dropout: float = 0.0) -> None:
        super().__init__()
        if method not in ("dot", "general"):
            raise ValueError(f"method must be 'general' or 'dot'; got {method!r}")
        self.method = method
        if method == "general":
            self.linear_in: nn.Linear = nn.Linear(dims, dims, bias=False)
        self.dropout: nn.Dropout = nn.Dropout(dropout)
        self.linear_out: nn.Linear = nn.Linear(dims * 2, dims, bias=False)

    def forward(self, query: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, shape (B, Q, D), and the weights, shape (B, Q, T).

        Args:
            query: Shape (B, Q, D).
            context: Shape (B, T, D).
        """
        if self.method == "general":
            query = self.linear_in(query)
        weights = self.dropout((query @ context.transpose(1, 2)).softmax(-1))
        mixed = weights @ context
        return self.linear_out(torch.cat((mixed, query), dim=2)).tanh(), weights


class MultiLayerPerceptron(nn.Module):
    """A classifier on top of features. Its layers are ``layer0``, ``layer2``, ...; the functions between them count, too.

    Args:
        hidden_size: The number of features.
        num_classes: The number of classes.
        device: The device of the weights.
        num_layers: The number of layers.
        activation: The name of a function in `torch`, between two layers.
        log_softmax: Return logarithms of probabilities instead of scores.
    """

    def __init__(
        self,
        hidden_size: int,
        num_classes: int,
        device: torch.device | str,
        num_layers: int = 2,
        activation: str = "relu",
        log_softmax: bool = True,
    ) -> None:
        super().__init__()
        self.layers: int = 2 * num_layers - 1
        self.activation: Any = getattr(torch, activation)
        self.log_softmax: bool = log_softmax
        for index in range(0, self.layers, 2):
            width = num_classes if index == self.layers - 1 else hidden_size
            self.add_module(f"layer{index}", nn.Linear(hidden_size, width).to(device))

    @property
    def last_linear_layer(self) -> nn.Module:
        """The layer that gives the scores."""
        return self.get_submodule(f"layer{self.layers - 1}")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the scores of the features, shape (..., hidden_size) -> (..., num_classes)."""
        scores = self.get_submodule("layer0")(hidden_states)
        for index in range(2, self.layers, 2):
            scores = self.get_submodule(f"layer{index}")(self.activation(scores))
        if self.log_softmax:
            scores = scores.float().log_softmax(-1).to(hidden_states.dtype)
        result: Tensor = scores
        return result
