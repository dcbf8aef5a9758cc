"""fastNLP's files: ``fastnlp_model.pkl.tar``, and beside it ``fastnlp_checkpoint.pkl.tar``."""

from __future__ import annotations

import io
import logging
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from cadenza.compat.fastnlp.envs import FASTNLP_CHECKPOINT_FILENAME, FASTNLP_MODEL_FILENAME
from cadenza.drivers.sharding import refuse_shards
from cadenza.errors import CheckpointError
from cadenza.status.plain import encode

Place = str | os.PathLike[str] | IO[bytes]

logger = logging.getLogger("cadenza")


def write_model(model: nn.Module, place: Place, *, only_state_dict: bool, save_fn: Callable[[str], object] | None) -> None:
    """Write a model into a folder, or to a stream.

    Raises:
        RuntimeError: `save_fn` with a stream.
    """
    refuse_shards(model, "fastNLP's saving of a model")
    if _is_stream(place, save_fn):
        torch.save(_content(model, only_state_dict), place)
        return
    folder = Path(os.fspath(place))  # type: ignore[arg-type]  # no stream
    folder.mkdir(parents=True, exist_ok=True)
    if save_fn is not None:
        save_fn(str(folder))
    else:
        _write(folder / FASTNLP_MODEL_FILENAME, _content(model, only_state_dict))


def read_model(
    model: nn.Module, place: Place, *, only_state_dict: bool, load_fn: Callable[[str], object] | None, strict: bool = True
) -> None:
    """Give a model the weights in a folder, or in a stream. Whether a file holds a model or weights is seen from the file.

    Raises:
        FileNotFoundError: There is no such file.
        RuntimeError: `load_fn` with a stream; or the weights do not fit, and `strict`.
        CheckpointError: It holds a model of classes that this one does not have, and `only_state_dict` is true.
    """
    if _is_stream(place, load_fn):
        source: Any = place
    elif load_fn is not None:
        load_fn(os.fspath(place))  # type: ignore[arg-type]  # no stream
        return
    else:
        source = _existing(Path(os.fspath(place)), FASTNLP_MODEL_FILENAME)  # type: ignore[arg-type]  # no stream
    found = _read(source, model, trusted=not only_state_dict)
    if isinstance(found, nn.Module):
        if only_state_dict:
            logger.warning("%s holds a whole model; only its weights are taken. Say only_state_dict=False", place)
        found = found.state_dict()
    elif not only_state_dict:
        logger.warning("%s holds weights only, and no model. Say only_state_dict=True", place)
    model.load_state_dict(found, strict=strict)


def write_checkpoint(folder: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a trainer's state into a folder.

    Raises:
        StateError: Something in it cannot be saved; the message names its place.
    """
    encode({name: part for name, part in content.items() if name not in ("optimizers_state_dict", "grad_scaler_state_dict")})
    _write(Path(folder) / FASTNLP_CHECKPOINT_FILENAME, dict(content))


def read_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `write_checkpoint` wrote; nothing in the file is executed.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if (Path(folder) / FASTNLP_MODEL_FILENAME).exists() and not (Path(folder) / FASTNLP_CHECKPOINT_FILENAME).exists():
        logger.warning("%s holds a model only: read it with load_model, or save with save_checkpoint", folder)
    path = _existing(Path(folder), FASTNLP_CHECKPOINT_FILENAME)
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def _is_stream(place: object, function: object) -> bool:
    if not hasattr(place, "write") and not hasattr(place, "read"):
        return False
    if function is not None:
        raise RuntimeError("a function that saves or loads takes a folder; with a stream give none")
    return True


def _content(model: nn.Module, only_state_dict: bool) -> Any:
    if not only_state_dict:
        return model
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in model.state_dict().items()}


def _existing(folder: Path, name: str) -> Path:
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}")
    if not (folder / name).exists():
        raise FileNotFoundError(
            f"there is no {name} in {str(folder)!r}; there is {sorted(path.name for path in folder.iterdir())}"
        )
    return folder / name


def _read(source: Any, model: nn.Module, *, trusted: bool) -> Any:
    """Read a file. Unless it is trusted, nothing in it can run but the making of objects of the model's own classes."""
    if trusted:
        return torch.load(source, map_location="cpu", weights_only=False)
    known: list[Any] = sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__)
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} holds more than weights, and reading it would run what is in it. If you trust it say "
            "only_state_dict=False."
        ) from error


def _write(path: Path, content: Any) -> None:
    """Write a file that is there whole or not at all."""
    refuse_shards(content, "fastNLP's checkpoint")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    beside = path.with_name(f".{path.name}.new")
    with beside.open("wb") as stream:
        stream.write(buffer.getbuffer())
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
