"""Weights alone: out of a checkpoint, or any safetensors file, into a model; and out of a model into a file."""

from __future__ import annotations

from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cadenza.checkpoint.finding import checkpoint_at, store_at
from cadenza.checkpoint.frozen import left_out_of, unchanged
from cadenza.checkpoint.store import Saved, Store
from cadenza.checkpoint.store.link_names import is_link_name
from cadenza.drivers.sharding import all_laid_out, is_sharded, whole
from cadenza.errors import CheckpointError, CheckpointFormatError, CheckpointMismatchError
from cadenza.optim.averaging import Averaging
from cadenza.status.plain import host_copy


def load_weights(path: str | PathLike[str], model: nn.Module, *, strict: bool = True, weights: str | None = None) -> list[str]:
    """Put weights into a model.

    Args:
        path: A checkpoint, a run directory or a folder of checkpoints (the newest that verifies, on the branch that the run
            is on), or a safetensors file.
        model: Gets them, on the device where it is.
        strict: Names and shapes must be the model's.
        weights: Which: ``"model"`` for the model's own, or the name of averaged ones, such as ``"ema"``. None: the averaged
            ones if the checkpoint was kept as the best by an evaluation of these, else the model's own.

    Returns:
        The names that did not fit; always empty if `strict`.

    Raises:
        CheckpointError: There is none, it is damaged, or is of a format that could run code; nothing is changed then.
        CheckpointMismatchError: Names or shapes differ, and `strict`; nothing is changed then.

    On several ranks, each rank reads the file itself, so each must call it.

    >>> import tempfile
    >>> from cadenza.testing import tiny_model
    >>> path = f"{tempfile.mkdtemp()}/model.safetensors"
    >>> save_weights(tiny_model(), path)
    >>> load_weights(path, nn.Linear(1, 1))
    []
    >>> load_weights(path, nn.Linear(2, 1), strict=False)
    ["weight has shape (1, 1), the model's (1, 2)"]
    """
    given, left_out = _weights_at(fspath(path), weights)
    own = model.state_dict()
    if strict:
        given |= unchanged({name: one for name, one in left_out.items() if name not in given}, own, fspath(path))
    wrong = [_misfit(name, given.get(name), own.get(name)) for name in {**own, **given}]
    misfits = [problem for problem in wrong if problem]
    if misfits and strict:
        raise CheckpointMismatchError(
            f"{path} does not fit the model, which is as it was. It differs in {len(misfits)}: {'; '.join(misfits[:10])}. Give "
            "the model it was made of, or strict=False to take what fits."
        )
    fitting = {name: given[name] for name, tensor in own.items() if name in given and given[name].shape == tensor.shape}
    model.load_state_dict(all_laid_out(fitting, own), strict=False)
    return misfits


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
    weights = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    sharded = any(map(is_sharded, weights.values()))
    main = not sharded or torch.distributed.get_rank() == 0
    copies = ((name, host_copy(whole(value)) if main else whole(value)) for name, value in weights.items())
    held = {name: value for name, value in copies if main}  # elsewhere one at a time
    if main:
        _write(held, path)


def export_weights(path: str | PathLike[str], target: str | PathLike[str], *, weights: str | None = None) -> None:
    """Write the model's weights in a checkpoint, also of one to which several ranks wrote, to one safetensors file.

    Args:
        path: A checkpoint, a run directory or a folder of checkpoints, as in `load_weights`.
        target: The file; its folder is made.
        weights: Which, as in `load_weights`.

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
    _write(_weights_at(fspath(path), weights)[0], target)


def _write(weights: dict[str, Tensor], path: str | PathLike[str]) -> None:
    from safetensors.torch import save_file

    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, target)


def _weights_at(path: str, wanted: str | None) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return the weights there, and the description of those that the checkpoint leaves out."""
    if Path(path).is_file() and not is_link_name(Path(path).name):
        if wanted not in (None, "model"):
            raise CheckpointError(f"{path} is one file of weights, without any that are called {wanted!r}. Give the checkpoint")
        return _weights_in_file(path), {}
    store, branch = store_at(path)
    if store.saved():
        newest, skipped = store.latest(exact=False, branch=branch)
        if newest is None:
            why = "; ".join(skipped) or "all are of branches that the run has abandoned. Give the path of one of them"
            raise CheckpointError(f"none of the checkpoints in {path} can be used: {why}")
        return _weights_of(store, newest, wanted)
    store, one = checkpoint_at(path)
    if one is None:
        raise CheckpointError(
            f"there are no weights at {path!r}: expected a checkpoint, a run directory or a .safetensors file"
        )
    return _weights_of(store, one, wanted)


def _weights_of(store: Store, saved: Saved, wanted: str | None) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    loaded = store.read(saved, lazily=True)  # the parts of the optimizers' states stay where they are
    wanted = wanted or loaded.manifest.get("weights") or "model"
    if wanted == "model":
        found = loaded.model
    else:
        sets = loaded.state.get("weight_sets", {})
        if wanted not in sets:
            raise CheckpointError(
                f"{saved.name} holds no weights {wanted!r}. It holds {', '.join(map(repr, ['model', *sets]))}."
            )
        found = Averaging.weights_in(loaded.state["callbacks"][sets[wanted]])
    weights = {name: value if isinstance(value, Tensor) else value.read() for name, value in found.items()}
    return weights, left_out_of(loaded.state)


def _weights_in_file(path: str) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointFormatError(
            f"{path} is no safetensors file ({error}). A pickle (.pt, .pth, .bin, .ckpt) could run code and is not read here: "
            "load it with torch.load(..., weights_only=True) and model.load_state_dict, if you trust it."
        ) from None


def _misfit(name: str, given: Tensor | None, own: Tensor | None) -> str | None:
    if given is None:
        return f"{name} is missing"
    if own is None:
        return f"{name} is not in the model"
    if given.shape != own.shape:
        return f"{name} has shape {tuple(given.shape)}, the model's {tuple(own.shape)}"
    return None
