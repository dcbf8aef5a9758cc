"""Log the confusion matrix of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from cadenza.engine.objective import predictions_in, targets_in
from cadenza.errors import DataError, MissingExtraError
from cadenza.hooks.moments import Callback
from cadenza.hooks.numbers import at_least_or_none
from cadenza.records.record import Figure
from cadenza.status.formats import counted
from cadenza.text.hints import renamed

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

    from cadenza.loading.evaluation import Evaluation
    from cadenza.run import Run

Normalize = Literal["true", "pred", "all"]
_SUMMED: dict[Normalize, tuple[int, ...]] = {"true": (1,), "pred": (0,), "all": (0, 1)}
_WRITTEN_OUT = 20  # with more classes the numbers in the cells are too small to read


class ConfusionMatrix(Callback):
    """Log a figure of the confusion matrix at the end of an evaluation, and keep its counts.

    Predictions have shape (N, C, ...) and targets shape (N, ...): the predicted class is ``argmax`` over dimension 1. Integer
    predictions of the shape of the targets are class indices. The counts stay on the device until the evaluation ends.

    With multiple ranks: communicates at the end of the evaluation: each rank gets the counts of all. The main process logs the
    figure.

    Args:
        labels: The name of each class, for the axes.
        classes: The number of classes. None takes the number of labels, or the size of dimension 1 of the predictions.
        normalize: Show fractions instead of counts, as in scikit-learn: of each row (``"true"``), of each column (``"pred"``)
            or of all samples (``"all"``). None shows counts.
        ignore_index: Samples with this target are not counted.
        evaluation: The name of the evaluation.
        log: The figure is logged as ``{evaluation}/{log}``.

    Raises:
        MissingExtraError: matplotlib is not installed.
        DataError: An evaluation has no predictions or targets, their shapes do not match, or a class is out of range.

    >>> import torch
    >>> from cadenza.testing import tiny_trainer
    >>> matrix = ConfusionMatrix(labels=["cat", "dog"])
    >>> batch = {"predictions": torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]), "targets": torch.tensor([0, 1, 1])}
    >>> results = tiny_trainer(callbacks=[matrix]).evaluate([batch], compute=lambda model, batch: batch)
    >>> matrix.counts
    tensor([[1, 0],
            [1, 1]])
    """

    @renamed(name="log")
    def __init__(
        self,
        labels: Sequence[str] | None = None,
        *,
        classes: int | None = None,
        normalize: Normalize | None = None,
        ignore_index: int | None = None,
        evaluation: str = "eval",
        log: str = "confusion",
    ) -> None:
        if isinstance(labels, str | int):
            text = f"the text {labels!r}" if isinstance(labels, str) else labels
            number = f". For a number of classes write ConfusionMatrix(classes={labels!r})" if isinstance(labels, int) else ""
            raise TypeError(f"labels must be a sequence of names, one for each class; got {text}{number}")
        if normalize is not None and normalize not in _SUMMED:
            raise ValueError(f"normalize must be None or one of {', '.join(map(repr, _SUMMED))}; got {normalize!r}")
        if labels is not None and classes not in (None, len(labels)):
            raise ValueError(f"labels must have a name for each class; got {len(labels)} for classes={classes}")
        count = at_least_or_none(2, "the number of classes", classes if labels is None else len(labels))
        if find_spec("matplotlib") is None:
            raise MissingExtraError("matplotlib", needed_by="ConfusionMatrix", extra="figures")
        self.labels: list[str] | None = None if labels is None else [str(label) for label in labels]
        self.classes: int | None = count
        self.normalize = normalize
        self.ignore_index: int | None = ignore_index
        self.evaluation: str = evaluation
        self.logged_as: str = f"{evaluation}/{log}"
        self.counts: Tensor | None = None
        """Shape (C, C), int64, on the host: rows are targets, columns predictions. None before an evaluation is complete."""
        self._tally: Tensor | None = None

    def on_eval_start(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.name == self.evaluation:
            self.counts = self._tally = None

    def on_eval_batch_end(self, run: Run, evaluation: Evaluation, batch: Any, outputs: Mapping[str, Any]) -> None:
        if evaluation.name == self.evaluation and outputs:  # empty after an error
            added = self._counted(predictions_in(outputs), targets_in(batch, outputs))
            if self._tally is not None and self._tally.shape != added.shape:
                raise DataError("two batches differ in their number of classes. Give ConfusionMatrix(classes=...).")
            self._tally = added if self._tally is None else self._tally + added

    def on_eval_end(self, run: Run, evaluation: Evaluation) -> None:
        if evaluation.name != self.evaluation:
            return
        tally, self._tally = self._tally, None
        if tally is None or not evaluation.complete:
            return
        *counts, _, outside = run.driver.reduce(tally, "sum").tolist()  # the only transfer to the host
        classes = int(len(counts) ** 0.5)
        if outside:
            has = "has" if outside == 1 else "have"
            raise DataError(
                f"{counted(outside, 'sample')} of {self.evaluation!r} {has} a class out of range: "
                f"expected 0 to {classes - 1} in targets and predictions. "
                "Give ConfusionMatrix(ignore_index=...) to leave out a target, or correct classes=."
            )
        self.counts = torch.tensor(counts).reshape(classes, classes)
        if run.is_main:
            run.log(self.logged_as, Figure(self.figure()))

    def figure(self) -> Drawing:
        """Return a new figure of the counts.

        Raises:
            RuntimeError: No evaluation is complete yet.
        """
        if self.counts is None:
            raise RuntimeError(f"there are no counts yet: no evaluation {self.evaluation!r} is complete. Evaluate first.")
        return _drawn(self.counts, self.labels, self.normalize)

    def _counted(self, predictions: Any, targets: Any) -> Tensor:
        """Return the counts of a batch, shape (C * C + 2,): the matrix, the ignored samples, those out of range."""
        if not isinstance(predictions, Tensor) or not isinstance(targets, Tensor):
            raise DataError(
                f"ConfusionMatrix needs tensors 'predictions' and 'targets' in the outputs of {self.evaluation!r}; got "
                f"{type(predictions).__name__} and {type(targets).__name__}. Return both from compute, or train with "
                "supervised(loss_fn)."
            )
        classes = self._number_of_classes(predictions)
        actual, predicted = targets.reshape(-1).long(), _chosen(predictions, targets).reshape(-1).long()
        inside = (actual >= 0) & (actual < classes) & (predicted >= 0) & (predicted < classes)
        # Two more cells: selecting samples by a mask would wait for the device.
        cell = torch.where(inside, actual * classes + predicted, classes * classes + 1)
        if self.ignore_index is not None:
            cell = torch.where(actual == self.ignore_index, classes * classes, cell)
        return torch.bincount(cell, minlength=classes * classes + 2)

    def _number_of_classes(self, predictions: Tensor) -> int:
        if self.classes is not None:
            return self.classes
        if not predictions.is_floating_point() or predictions.ndim < 2:
            raise DataError(
                f"predictions of shape {tuple(predictions.shape)} and {predictions.dtype} do not say how many classes there "
                "are. Give ConfusionMatrix(classes=...) or labels=."
            )
        return predictions.shape[1]


def _chosen(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the predicted class of each target."""
    whole = not targets.is_floating_point()
    if whole and predictions.ndim == targets.ndim + 1 and predictions[:, :1].squeeze(1).shape == targets.shape:
        if predictions.shape[1] > 1:
            return predictions.argmax(1)
    elif whole and predictions.shape == targets.shape and not predictions.is_floating_point():
        return predictions
    raise DataError(
        "ConfusionMatrix expects predictions of shape (N, C, ...), C at least 2, with classes as targets of shape (N, ...), or "
        f"classes of the same shape in both; got {tuple(predictions.shape)} of {predictions.dtype} and {tuple(targets.shape)} "
        f"of {targets.dtype}. Return such from compute; for one number per sample, such as (p > 0.5).long()."
    )


def _drawn(counts: Tensor, labels: Sequence[str] | None, normalize: Normalize | None) -> Drawing:
    from matplotlib.figure import Figure as Drawing  # pyplot would keep the figure in memory

    classes = len(counts)
    shown = counts.double()
    if normalize is not None:
        shown = shown / shown.sum(_SUMMED[normalize], keepdim=True).clamp(min=1)
    side = min(max(3.5, 0.5 * classes + 2), 16)  # inches
    drawing = Drawing(figsize=(side + 1, side), layout="constrained")
    axes = drawing.subplots()
    picture = axes.imshow(shown.tolist(), cmap="Blues", vmin=0, vmax=float(shown.max()) or 1)
    drawing.colorbar(picture, ax=axes, shrink=0.8)
    axes.set(xlabel="predicted", ylabel="true")
    if labels is not None:
        # parse_math=False: a label with two $ is not a formula
        axes.set_xticks(range(classes), labels, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
        axes.set_yticks(range(classes), labels, parse_math=False)
    elif classes <= _WRITTEN_OUT:
        axes.set_xticks(range(classes))
        axes.set_yticks(range(classes))
    if classes <= _WRITTEN_OUT:
        _write_cells(axes, shown, "{:.2f}" if normalize else "{:.0f}")
    return drawing


def _write_cells(axes: Any, shown: Tensor, form: str) -> None:
    half = float(shown.max()) / 2
    for row, values in enumerate(shown.tolist()):
        for column, value in enumerate(values):
            ink = "white" if value > half else "black"
            axes.text(column, row, form.format(value), ha="center", va="center", color=ink, fontsize="small")
