"""The common losses (``nemo.backends.pytorch.common.losses``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from cadenza.compat.neural.elements import LabelsType, LogitsType, LossType, MaskType, RegressionValuesType
from cadenza.compat.neural.modules import LossNM
from cadenza.compat.neural.ports import NeuralType
from cadenza.compat.neural.tensors import Ports


class _Loss(LossNM):
    @property
    def output_ports(self) -> Ports:
        return {"loss": NeuralType(elements_type=LossType())}


class MSELoss(_Loss):
    """The mean squared error of ``preds`` and ``labels``, both of shape (B,).

    Args:
        reduction: ``"mean"`` or ``"sum"``.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    @property
    def input_ports(self) -> Ports:
        return {"preds": NeuralType(("B",), RegressionValuesType()), "labels": NeuralType(("B",), LabelsType())}

    def _loss_function(self, preds: Tensor, labels: Tensor) -> Tensor:
        return functional.mse_loss(preds, labels, reduction=self.reduction)


class CrossEntropyLossNM(_Loss):
    """The cross-entropy of ``logits``, shape (B, ..., C), and ``labels``, integers of shape (B, ...).

    An optional ``loss_mask``, shape (B, ...), selects elements. If it selects none, the labels are the largest logits.

    Args:
        logits_ndim: The number of dimensions of ``logits``.
        weight: A weight for each class.
        reduction: ``"mean"`` or ``"sum"``.
    """

    def __init__(self, logits_ndim: int = 2, weight: Sequence[float] | None = None, reduction: str = "mean") -> None:
        super().__init__()
        self._logits_dim = logits_ndim
        self.reduction: str = reduction
        self._weight = torch.tensor(list(weight), dtype=torch.float32) if weight else None

    @property
    def input_ports(self) -> Ports:
        free = ["any"] * (self._logits_dim - 2)
        return {
            "logits": NeuralType(["B", *free, "any"], LogitsType()),
            "labels": NeuralType(["B", *free], LabelsType()),
            "loss_mask": NeuralType(["B", *free], MaskType(), optional=True),
        }

    def _loss_function(self, logits: Tensor, labels: Tensor, loss_mask: Tensor | None = None) -> Tensor:
        flat_logits, flat_labels = logits.flatten(0, -2), labels.flatten()
        if loss_mask is not None:
            selected = (loss_mask if loss_mask.dtype is torch.bool else loss_mask > 0.5).flatten()
            if selected.any():
                flat_logits, flat_labels = flat_logits[selected], flat_labels[selected]
            else:
                flat_labels = flat_logits.argmax(-1)
        weight = None if self._weight is None else self._weight.to(logits)
        return functional.cross_entropy(flat_logits, flat_labels, weight, reduction=self.reduction)


class LossAggregatorNM(_Loss):
    """The sum of the losses ``loss_1``, ``loss_2``, ...

    Args:
        num_inputs: The number of losses.
        weights: A factor for each loss.

    Raises:
        ValueError: There is another number of weights.
    """

    def __init__(self, num_inputs: int = 2, weights: Sequence[float] | None = None) -> None:
        super().__init__()
        if weights is not None and len(weights) != num_inputs:
            raise ValueError(f"weights must have one number for each of the {num_inputs} losses; got {list(weights)}")
        self._weights = [1.0] * num_inputs if weights is None else list(weights)

    @property
    def input_ports(self) -> Ports:
        return {f"loss_{index}": NeuralType(elements_type=LossType()) for index, _ in enumerate(self._weights, start=1)}

    def _loss_function(self, **losses: Tensor) -> Tensor:
        ports = list(self.input_ports)
        total = torch.zeros_like(losses[ports[0]])
        for port, weight in zip(ports, self._weights, strict=True):
            total = total.add(losses[port], alpha=weight)
        return total


class SequenceLoss(_Loss):
    """The loss of a sequence: of ``log_probs``, shape (B, T, C), and ``targets``, integers of shape (B, T).

    Args:
        pad_id: The target of padding, which has no loss.
        smoothing_coef: The weight of the mean of all classes, from 0 to 1.
        sample_wise: Divide the sum by the number of samples instead of targets.
        aux_ctc: Add the CTC loss.
        ctc_initial_coef: Its factor.
        ctc_blank_id: The class of its blank.
        eps: Added to the number of targets.

    Raises:
        ValueError: `aux_ctc` without `ctc_blank_id`.
    """

    def __init__(
        self,
        pad_id: int = 0,
        smoothing_coef: float = 0.0,
        sample_wise: bool = False,
        aux_ctc: bool = False,
        ctc_initial_coef: float = 0.1,
        ctc_blank_id: int | None = None,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        if aux_ctc and ctc_blank_id is None:
            raise ValueError("aux_ctc=True needs ctc_blank_id; got None")
        self.pad_id: int = pad_id
        self.smoothing_coef: float = smoothing_coef
        self.sample_wise: bool = sample_wise
        self.eps: float = eps
        self.aux_ctc: bool = aux_ctc
        self.ctc_coef: float = ctc_initial_coef
        self.ctc_blank_id: int | None = ctc_blank_id

    @property
    def input_ports(self) -> Ports:
        return {"log_probs": NeuralType(("B", "T", "D")), "targets": NeuralType(("B", "T"))}

    def _loss_function(self, log_probs: Tensor, targets: Tensor) -> Tensor:
        real = targets != self.pad_id
        right = log_probs.gather(2, targets.unsqueeze(2)).squeeze(2)
        smoothed = (1.0 - self.smoothing_coef) * right + self.smoothing_coef * log_probs.mean(-1)
        divisor = len(targets) if self.sample_wise else real.sum() + self.eps
        loss = -(smoothed * real).sum() / divisor
        if self.aux_ctc:
            loss = loss + self.ctc_coef * self._ctc(log_probs, targets, real.sum(-1))
        return loss

    def _ctc(self, log_probs: Tensor, targets: Tensor, lengths: Tensor) -> Tensor:
        assert self.ctc_blank_id is not None, "the constructor requires it"
        losses = functional.ctc_loss(
            log_probs.transpose(0, 1), targets, lengths, lengths, self.ctc_blank_id, reduction="none", zero_infinity=True
        )
        return losses.mean()
