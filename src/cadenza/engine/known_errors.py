"""Likely cures of frequent torch errors, one line each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.errors import CadenzaError
from cadenza.loading.batches import tensors_in
from cadenza.status.counting import counted


@dataclass(slots=True)
class Scene:
    """The objects that were in use when an error was raised."""

    device: torch.device
    module: nn.Module | None = None
    """The innermost module that was running."""
    batch: Any = None
    predictions: Any = None
    targets: Any = None
    together: int = 1
    """The number of ranks that compute each layer together, with tensor parallelism."""


def cure_of(error: Exception, scene: Scene) -> str | None:
    """Return the likely cure of an error; None if the message is unknown.

    >>> cure_of(RuntimeError("expected target dtype to be Long or Byte, but got Float"), Scene(torch.device("cpu")))
    'cross_entropy takes class indices of dtype int64: convert the targets with .long().'
    """
    if isinstance(error, CadenzaError):  # the message already says what to do
        return None
    text = f"{type(error).__name__}: {error}"
    if scene.together > 1 and re.search(_OF_SHAPES, text):
        return _parts(scene.together)
    for pattern, cure in _CURES:
        if found := re.search(pattern, text):
            return cure(found, scene) if callable(cure) else cure
    return None


Cure = str | Callable[["re.Match[str]", Scene], str]


def _parts(ranks: int) -> str:
    return (
        f"{counted(ranks, 'rank')} compute together, and each has a part of a split layer. Numbers that are split, such as "
        f"features and heads, must be divisible by {ranks}. A view(...) of a part must have -1 in place of this number. A "
        "layer of which the whole output is needed, such as the last one, takes ColwiseParallel(output_layouts=Replicate())."
    )


def _dtypes(found: re.Match[str], scene: Scene) -> str:
    return (
        f"the input is {found[1].lower()} and the weights are {found[2].lower()}: convert the input, for example with .float() "
        "in the data set or in compute_loss. Data from numpy is float64, images are often uint8."
    )


def _devices(found: re.Match[str], scene: Scene) -> str:
    return (
        f"the model and each batch are on {scene.device}, and another tensor is not: make it with device=inputs.device, keep "
        "constants with register_buffer, and move a loss or metric that holds tensors with .to(run.device)."
    )


def _labels(found: re.Match[str], scene: Scene) -> str:
    classes = scene.predictions.shape[1] if isinstance(scene.predictions, Tensor) and scene.predictions.ndim > 1 else None
    known = "the number of classes, which is dimension 1 of the predictions" if classes is None else f"{classes - 1}"
    upto = f"less than {known}" if classes is None else f"at most {known}, as the predictions have {counted(classes, 'class')}"
    return (
        f"labels must be at least 0 and {upto}{_range(_labels_in(scene))}. Raise the number of the model's outputs, count "
        "labels from 0, or name the label of padding with ignore_index."
    )


def _indices(found: re.Match[str], scene: Scene) -> str:
    those = _range(scene.batch if scene.targets is None else scene.targets)
    if isinstance(scene.module, nn.Embedding):
        count = scene.module.num_embeddings
        return (
            f"the Embedding has num_embeddings={count}, so indices must be 0 to {count - 1}{those}. Raise "
            "num_embeddings to the size of the vocabulary."
        )
    return f"an index is negative or too large for the dimension that it selects from{those}."


def _features(found: re.Match[str], scene: Scene) -> str:
    got, expected = found[1], found[2]
    return (
        f"the layer takes {expected} features and the input has {got}: flatten the input with nn.Flatten(), or make the layer "
        f"with in_features={got}."
    )


def _channels(found: re.Match[str], scene: Scene) -> str:
    shape = [int(size) for size in found[1].split(",")]
    if len(shape) > 2 and shape[-1] == int(found[2]):
        axes = ", ".join(map(str, (0, len(shape) - 1, *range(1, len(shape) - 1))))
        return f"channels come second, and here they are last: inputs.permute({axes})."
    return (
        f"the layer takes {found[2]} channels in dimension 1 and the input has {found[3]}: make it with in_channels={found[3]}."
    )


def _memory(found: re.Match[str], scene: Scene) -> str:
    return (
        "use smaller batches with Trainer(accumulate=...), which keeps the gradient of the large one; precision='bf16'; or let "
        "FindBatchSize try. An evaluation has a batch size of its own."
    )


def _labels_in(scene: Scene) -> Any:
    """Return what holds labels, and no other integers such as tokens; None if that is not known."""
    if scene.targets is not None:
        return scene.targets
    if isinstance(scene.batch, Mapping):
        named = [value for key, value in scene.batch.items() if re.search("label|target", str(key), re.IGNORECASE)]
        return named or None
    return scene.batch if len([*_integers(scene.batch)]) == 1 else None


def _range(value: Any) -> str:
    """Return the range of the integers on the host. Tensors on a device are skipped: the error may have broken the device."""
    held = [one for one in _integers(value) if one.is_cpu and one.numel()]
    if not held:
        return ""
    low, high = min(int(one.min()) for one in held), max(int(one.max()) for one in held)
    return f"; those in the batch range from {low} to {high}"


def _integers(value: Any) -> Iterator[Tensor]:
    for one in tensors_in(value):
        if not one.is_floating_point() and not one.is_complex() and one.dtype is not torch.bool:
            yield one


_OF_SHAPES = (
    r"must have same reduction dim|shapes cannot be multiplied|is invalid for input of size|is out of bounds"
    r"|must match the size|not broadcastable|Sizes of tensors must match"
)
_DTYPE = r"(\w+(?: char)?)"
_CURES: list[tuple[str, Cure]] = [
    (
        r"expected target dtype to be Long|expected scalar type Long but found|'target'.*to have.*scalar type.*Long",
        "cross_entropy takes class indices of dtype int64: convert the targets with .long().",
    ),
    (
        r"multi-target not supported",
        "class indices have shape (B,), without a dimension for the class: targets.squeeze(1).",
    ),
    (r"Target -?\d+ is out of bounds|Class values must be smaller than num_classes", _labels),
    (r"index out of range in self|index -?\d+ is out of bounds for dimension", _indices),
    (
        r"CUDA error: device-side assert|CUBLAS_STATUS_(?:EXECUTION_FAILED|ALLOC_FAILED|NOT_INITIALIZED)",
        "often a label or an index is out of range: run it with Trainer(device='cpu'), where the error says which. The device "
        "reports errors late, so an earlier line may be the cause: CUDA_LAUNCH_BLOCKING=1 names the right one.",
    ),
    (
        r"(?i)not in train mode when step is called",
        "a schedule-free optimizer needs its train() before a step, and its eval() around evaluations: the callback in "
        "docs/recipes/schedule-free.md calls both.",
    ),
    (r"OutOfMemoryError|out of memory|can't allocate memory", _memory),
    (
        r"same device|not on the expected device|(?:Input|weight) type \(torch\.cuda\.\w+\).*type \(torch\.\w+Tensor\)"
        r"|Input type \(torch\.\w+Tensor\) and weight type \(torch\.cuda",
        _devices,
    ),
    (rf"must have the same dtype, but got {_DTYPE} and {_DTYPE}", _dtypes),
    (rf"Input type \({_DTYPE}\) and (?:bias|weight) type \({_DTYPE}\) should be the same", _dtypes),
    (r"RNN input dtype \((?:torch\.)?(\w+)\) does not match weight dtype \((?:torch\.)?(\w+)\)", _dtypes),
    (r"expected scalar type \w+ but found", "convert the input to the dtype of the weights, for example with .float()."),
    (
        r"Found dtype \w+ but expected|can't be cast to the desired output type (?:Long|Int|Bool)"
        r"|not implemented for '(?:Long|Int|Bool)'",
        "the loss needs targets of the dtype of the predictions: targets.float().",
    ),
    (
        r"'indices' to have one of the following scalar types: Long",
        "an Embedding takes int64: convert the indices with .long().",
    ),
    (
        r"Target size .* must be the same as input size",
        "predictions and targets need one shape: predictions.squeeze(1), or targets.unsqueeze(1).",
    ),
    (
        r"Expected input batch_size \(\d+\) to match target batch_size",
        "the loss takes one target for each row of the predictions: for sequences flatten both, predictions.flatten(0, 1) and "
        "targets.flatten().",
    ),
    (r"mat1 and mat2 shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", _features),
    (
        r"input\.size\(-1\) must be equal to input_size",
        "make the layer with the size of the input's last dimension as input_size.",
    ),
    (r"expected input\[([\d, ]+)\] to have (\d+) channels, but got (\d+) channels", _channels),
    (
        r"[Ee]xpected \w+ \(unbatched\) or (\dD) \(batched\) input|expected (\dD)(?: or \dD)? input",
        "the layer takes a batch with a dimension for the channels, such as (B, C, H, W): add the missing one with unsqueeze.",
    ),
    (
        r"Expected more than 1 value per channel when training",
        "BatchNorm needs more than one sample in each training batch: DataLoader(drop_last=True), or another batch size.",
    ),
    (
        r"does not require grad and does not have a grad_fn",
        "the loss depends on no trainable parameter: all are frozen, or it was computed with detach(), no_grad() or item().",
    ),
    (
        r"backward through the graph a second time",
        "if your code also calls loss.backward(), remove that line. Else the graph of an earlier batch is still in use: detach "
        "tensors that pass between batches, hidden = hidden.detach().",
    ),
    (
        r"modified by an inplace operation|leaf Variable that requires grad is being used in an in-place",
        "write x = x + y for x += y, and nn.ReLU() for nn.ReLU(inplace=True); "
        "torch.autograd.set_detect_anomaly(True) finds the line.",
    ),
    (
        r"stack expects each tensor to be equal size|each element in list of batch should be of equal size",
        "the samples of a batch differ in shape: cut or pad them in the data set, or give the DataLoader a collate_fn that "
        "pads.",
    ),
    (
        r"default_collate: batch must contain",
        "the data set returned a type that torch cannot collate: return tensors or numbers, or give the DataLoader a "
        "collate_fn.",
    ),
    (
        r"DataLoader worker \(pid.*\) (?:exited unexpectedly|is killed)|insufficient shared memory",
        "a worker was killed, usually because memory ran out: use fewer workers or a larger /dev/shm (docker run "
        "--shm-size=8g). With num_workers=0 an error of the data set is shown.",
    ),
    (
        r"[Cc]an't (?:get local object|pickle)|cannot pickle|PicklingError",
        "the workers of a loader get copies of the data set and its collate_fn by pickle, which takes no lambda and no local "
        "function: define them at the top of a module, or set num_workers=0.",
    ),
    (
        r"The size of tensor a .* must match the size of tensor b",
        "two tensors differ in shape: for a loss such as mse_loss, predictions and targets need one shape.",
    ),
    (
        r"'(?:tuple|list|dict)' object has no attribute '(?:size|shape|ndim|dim|dtype|device|to|float|view|flatten)'",
        "a batch, or what the model returned, is no tensor: unpack it in compute_loss, as in model(batch[0]), or use "
        "supervised(loss_fn) for batches (inputs, targets).",
    ),
    (
        r"must be Tensor, not (\w+)",
        "the model received an object that is no tensor: unpack the batch in compute_loss, as in model(batch[0]), or use "
        "supervised(loss_fn) for batches (inputs, targets).",
    ),
    (
        r"got mixed torch\.Tensor and DTensor",
        "with FSDP, the weights of a module are whole only while the model, or a module that FsdpDriver(shard=...) names, is "
        "called: call the model, or name each module that is called alone in shard=.",
    ),
    (r"Can't call numpy\(\) on Tensor that requires grad", "detach it first: tensor.detach().cpu().numpy()."),
    (r"can't convert \S+ device type tensor to numpy", "bring it to the host first: tensor.cpu().numpy()."),
    (
        r"Expected to have finished reduction in the prior iteration",
        "some parameters got no gradient on some rank: use all of them in the loss, freeze the others, or pass "
        "driver=DdpDriver(find_unused_parameters=True).",
    ),
]
