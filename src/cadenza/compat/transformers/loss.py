"""The loss of a model of transformers, weighted by the number of its labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.compat.transformers.originals import original
from cadenza.errors import LossError

IGNORED = -100
"""The label that losses of transformers ignore."""


class ModelLoss:
    """Call a model of transformers, and weight its loss by the number of labels that count.

    The loss of an accumulation window, over all ranks, is then the mean over all labels, so that accumulated batches give the
    gradient of one joint batch. Labels of -100 do not count, and for a causal language model neither does the first label of
    each text, which no token predicts. The outputs are those of the model, with ``loss`` and ``weight``.

    A model that takes no ``num_items_in_batch``, and a batch without ``labels``, have no weight: the loss of a window is the
    mean over its batches.

    Args:
        model: The model, or a PEFT model around it.
        label_smoothing: Mix the labels with the uniform distribution by this factor, as ``label_smoothing_factor`` does.
        compute_loss_func: ``compute_loss_func(outputs, labels, num_items_in_batch=...)`` returns the loss. The number covers
            only this batch.

    >>> ModelLoss(nn.Linear(1, 1)).weighted
    False
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        label_smoothing: float = 0.0,
        compute_loss_func: Callable[..., Tensor] | None = None,
    ) -> None:
        inner = base_model(model)
        self.takes_count: bool = _takes_count(inner)
        self.weighted: bool = self.takes_count or compute_loss_func is not None
        self.shifts: bool = shifts_labels(inner)
        self._function = compute_loss_func
        self._smoother = _smoother(inner, label_smoothing) if label_smoothing else None
        self._smoother_shifts = bool(label_smoothing) and _is_causal(inner)

    def __repr__(self) -> str:
        return "the model's own loss" if self._function is None else f"ModelLoss({self._function!r})"

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        labels = batch.get("labels")
        count = self.count(batch) if self.weighted and labels is not None else None
        least_one = None if count is None else count.clamp(min=1)  # a batch of padding alone has the loss 0
        own = self._function is None and self._smoother is None
        given = dict(batch) if own or labels is None else {name: part for name, part in batch.items() if name != "labels"}
        if self.takes_count and least_one is not None:
            given["num_items_in_batch"] = least_one
        returned = model(**given)
        outputs = parts_of(returned)
        if self._function is not None:  # it may read outputs.logits, outputs["logits"] or outputs[0]
            outputs["loss"] = self._function(returned, labels, num_items_in_batch=least_one)
        elif self._smoother is not None and labels is not None:
            outputs["loss"] = self._smoother(
                outputs, labels, shift_labels=self._smoother_shifts, num_items_in_batch=least_one if self.takes_count else None
            )
        if "loss" not in outputs:
            raise LossError(
                f"the model returned no loss, only {[*outputs]}, for a batch with {[*batch]}. Give data with labels, "
                "label_names= of TrainingArguments, or a compute_loss_func."
            )
        return outputs if count is None else {**outputs, "weight": count}

    def predict(self, model: nn.Module, batch: Any) -> Any:
        """Return the logits of the model, or its only output."""
        outputs = parts_of(model(**batch))
        return outputs["logits"] if "logits" in outputs else next(iter(outputs.values()))

    def count(self, batch: Mapping[str, Any]) -> Tensor | None:
        """Return the number of labels that count, shape (), on the device; None if the labels are no tensor."""
        labels = batch.get("shift_labels", batch["labels"])
        if not isinstance(labels, Tensor):
            return None
        if self.shifts and "shift_labels" not in batch:
            labels = labels[..., 1:]
        return labels.ne(IGNORED).sum()


def base_model(model: nn.Module) -> nn.Module:
    """Return the model inside a PEFT model; any other model itself."""
    get = getattr(model, "get_base_model", None)
    return get() if callable(get) else model


def shifts_labels(model: nn.Module) -> bool:
    """Return whether the loss of a model predicts each label from the tokens before it."""
    function = original("loss.loss_utils.LOSS_MAPPING").get(getattr(model, "loss_type", None) or "")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return False
    return function is original("loss.loss_utils.ForCausalLMLoss")


def parts_of(outputs: Any) -> dict[str, Any]:
    """Return the outputs of a model by name. A tuple has the loss first, then the logits."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if isinstance(outputs, Tensor):
        return {"loss": outputs}
    return dict(zip(("loss", "logits"), outputs[:2], strict=False))


def _takes_count(model: nn.Module) -> bool:
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(model.forward).parameters.values())


def _is_causal(model: nn.Module) -> bool:
    return type(model).__name__ in original("models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES").values()


def _smoother(model: nn.Module, factor: float) -> Any:
    several = getattr(getattr(model, "config", None), "problem_type", None) == "multi_label_classification"
    return None if several else original("trainer_pt_utils.LabelSmoother")(epsilon=factor)


def count_tokens(batch: Any, *, padding: bool = True) -> int:
    """Return the number of input tokens of a batch on the host.

    >>> count_tokens({"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, padding=False)
    5
    """
    mask = None if padding else batch.get("attention_mask")
    tokens = batch.get("input_ids")
    return int(mask.sum()) if mask is not None else 0 if tokens is None else int(torch.as_tensor(tokens).numel())
