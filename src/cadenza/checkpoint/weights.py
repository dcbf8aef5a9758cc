"""Weights alone: out of a checkpoint, or any safetensors file, into a model; and out of a model into a file."""

from __future__ import annotations

from os import PathLike

import torch
from torch import Tensor, nn

from cadenza.checkpoint.catalogue import Which
from cadenza.checkpoint.chosen_weights import Chosen, chosen_at
from cadenza.drivers.sharding import is_sharded, whole
from cadenza.files.paths import local_path
from cadenza.optim.model_state import state_of
from cadenza.status.plain import host_copy


def load_weights(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    which: Which | None = None,
    strict: bool = True,
    weights: str | None = None,
) -> list[str]:
    """Put weights into a model.

    Args:
        path: A run directory, a folder of checkpoints, an fsspec URL, a checkpoint, a safetensors file, or an index of several
            files, such as ``model.safetensors.index.json``. Into a sharded model, each rank reads its shards of such files.
        model: Gets them, on the device where it is.
        which: The checkpoint of a run: ``"last"``, the newest that verifies, on the branch that the run is on; ``"best"``, or
            ``"best:eval/acc"`` if several results chose one, for which ``Checkpoint(keep_best=...)`` kept it; or a name such
            as ``"step-500"``. None: the last.
        strict: Names and shapes must be the model's.
        weights: Which: ``"model"`` for the model's own, or the name of averaged ones, such as ``"ema"``. None: the averaged
            ones if these had the best result for which the checkpoint was kept, else the model's own.

    Returns:
        The names that did not fit; always empty if `strict`.

    Raises:
        CheckpointError: There is none, it is damaged, or is of a format that could run code; or `which` is ``"best"``, and
            none was kept as the best, or several results chose one. Nothing is changed then.
        CheckpointMismatchError: Names or shapes differ, and `strict`; nothing is changed then.
        ValueError: `which` is no name of a checkpoint.

    On several ranks, each rank reads the file itself, so each must call it.

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint, Ema, Evaluate
    >>> from cadenza.testing import tiny_loader, tiny_model, tiny_run
    >>> folder, best = tempfile.mkdtemp(), Checkpoint("5 steps", keep_best=("eval/loss", "min"))
    >>> run = tiny_run(directory=folder, callbacks=[Ema(0.9), Evaluate(tiny_loader(), "2 steps"), best], steps=5)
    >>> load_weights(folder, model := tiny_model(), which="best", weights="ema")
    []
    >>> load_weights(f"{folder}/checkpoints/step-00000004", nn.Linear(2, 1), strict=False)
    ["weight has shape (1, 1), the model's (1, 2)"]
    """
    return chosen_at(path, which, weights).load_into(model, strict=strict)


def save_weights(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write a model's weights to one safetensors file, which other tools read as well.

    Call it on the main process alone; if the model is sharded, on every rank, and the main process writes.

    Args:
        model: The module with the weights, on any device.
        path: The file. An existing one is replaced; its folder is made.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> save_weights(nn.Linear(3, 2), path := f"{tempfile.mkdtemp()}/model.safetensors")
    >>> {name: tuple(weight.shape) for name, weight in sorted(load_file(path).items())}
    {'bias': (2,), 'weight': (2, 3)}
    """
    weights = {name: value for name, value in state_of(model).items() if isinstance(value, Tensor)}
    sharded = any(map(is_sharded, weights.values()))
    main = not sharded or torch.distributed.get_rank() == 0
    copies = ((name, host_copy(whole(value)) if main else whole(value)) for name, value in weights.items())
    held = {name: value for name, value in copies if main}  # elsewhere one at a time
    if main:
        _write(held, path)


def export_weights(
    path: str | PathLike[str], target: str | PathLike[str], *, which: Which | None = None, weights: str | None = None
) -> None:
    """Write the model's weights in a checkpoint, also of one to which several ranks wrote, to one safetensors file.

    Args:
        path: A checkpoint, a run directory or a folder of checkpoints, as in `load_weights`.
        target: The file; its folder is made.
        which: The checkpoint of a run, as in `load_weights`.
        weights: Which weights of it, as in `load_weights`.

    Raises:
        CheckpointError: There is none, or it is damaged; nothing is written then.

    >>> import tempfile
    >>> from cadenza.callbacks import Checkpoint
    >>> from cadenza.testing import tiny_run
    >>> folder = tempfile.mkdtemp()
    >>> run = tiny_run(directory=folder, callbacks=[Checkpoint(every="1 epoch")])
    >>> export_weights(folder, f"{folder}/model.safetensors")
    >>> load_weights(f"{folder}/model.safetensors", nn.Linear(1, 1))
    []
    """
    write_chosen(chosen_at(path, which, weights), target)


def write_chosen(chosen: Chosen, target: str | PathLike[str]) -> None:
    """Write weights to one safetensors file; its folder is made."""
    _write({name: one if isinstance(one, Tensor) else one.read() for name, one in chosen.tensors.items()}, target)


def _write(weights: dict[str, Tensor], path: str | PathLike[str]) -> None:
    from safetensors.torch import save_file

    target = local_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, target)
