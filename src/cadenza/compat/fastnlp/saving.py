"""fastNLP's files: ``fastnlp_model.pkl.tar`` and ``fastnlp_checkpoint.pkl.tar``."""

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
from cadenza.status.encoding import encode

PathOrStream = str | os.PathLike[str] | IO[bytes]

logger: logging.Logger = logging.getLogger("cadenza")


def write_model(
    model: nn.Module, target: PathOrStream, *, only_state_dict: bool, save_fn: Callable[[str], object] | None
) -> None:
    """Write a model to a folder or to a stream.

    Raises:
        RuntimeError: `save_fn` with a stream.
    """
    refuse_shards(model, "fastNLP's saving of a model")
    if _is_stream(target, save_fn):
        torch.save(_content(model, only_state_dict), target)
        return
    folder = Path(os.fspath(target))  # type: ignore[arg-type]  # not a stream
    folder.mkdir(parents=True, exist_ok=True)
    if save_fn is not None:
        save_fn(str(folder))
    else:
        _write(folder / FASTNLP_MODEL_FILENAME, _content(model, only_state_dict))


def write_model_file(model: nn.Module, path: Path, *, only_state_dict: bool) -> None:
    """Write a model, or only its weights, to a file."""
    refuse_shards(model, "fastNLP's saving of a model")
    _write(path, _content(model, only_state_dict))


def read_model(
    model: nn.Module,
    target: PathOrStream,
    *,
    only_state_dict: bool,
    load_fn: Callable[[str], object] | None,
    strict: bool = True,
) -> None:
    """Load weights from a folder or a stream. The file itself says whether it holds a model or weights.

    Raises:
        FileNotFoundError: There is no such file.
        RuntimeError: `load_fn` with a stream; or the weights do not fit and `strict` is true.
        CheckpointError: It holds a model with classes that this one does not have, and `only_state_dict` is true.
    """
    if _is_stream(target, load_fn):
        source: Any = target
    elif load_fn is not None:
        load_fn(os.fspath(target))  # type: ignore[arg-type]  # not a stream
        return
    else:
        source = _existing(Path(os.fspath(target)), FASTNLP_MODEL_FILENAME)  # type: ignore[arg-type]  # not a stream
    _load(model, source, target, only_state_dict=only_state_dict, strict=strict)


def read_model_file(model: nn.Module, path: Path, *, only_state_dict: bool, strict: bool = True) -> None:
    """Load weights from a file; see `read_model`.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    _load(model, path, path, only_state_dict=only_state_dict, strict=strict)


def write_checkpoint(folder: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write the state of a trainer to a folder.

    Raises:
        StateError: A value in it cannot be saved; the message names its key.
    """
    encode({name: part for name, part in content.items() if name not in ("optimizers_state_dict", "grad_scaler_state_dict")})
    _write(Path(folder) / FASTNLP_CHECKPOINT_FILENAME, dict(content))


def read_checkpoint(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the content that `write_checkpoint` wrote. No code in the file is executed.

    Raises:
        FileNotFoundError: There is no such file.
    """
    if (Path(folder) / FASTNLP_MODEL_FILENAME).exists() and not (Path(folder) / FASTNLP_CHECKPOINT_FILENAME).exists():
        logger.warning("%s holds a model only. Read it with load_model, or write a checkpoint with save_checkpoint.", folder)
    path = _existing(Path(folder), FASTNLP_CHECKPOINT_FILENAME)
    content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return content


def _is_stream(target: object, function: object) -> bool:
    if not hasattr(target, "write") and not hasattr(target, "read"):
        return False
    if function is not None:
        raise RuntimeError("model_save_fn and model_load_fn need a folder; got a stream")
    return True


def _content(model: nn.Module, only_state_dict: bool) -> Any:
    if not only_state_dict:
        return model
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in model.state_dict().items()}


def _load(model: nn.Module, source: Any, target: object, *, only_state_dict: bool, strict: bool) -> None:
    found = _read(source, model, trusted=not only_state_dict)
    if isinstance(found, nn.Module):
        if only_state_dict:
            logger.warning("%s holds a whole model; only its weights are loaded. Pass only_state_dict=False.", target)
        found = found.state_dict()
    elif not only_state_dict:
        logger.warning("%s holds weights only, not a model. Pass only_state_dict=True.", target)
    model.load_state_dict(found, strict=strict)


def _existing(folder: Path, name: str) -> Path:
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}")
    if not (folder / name).exists():
        raise FileNotFoundError(
            f"there is no {name} in {str(folder)!r}; it holds {sorted(path.name for path in folder.iterdir())}"
        )
    return folder / name


def _read(source: Any, model: nn.Module, *, trusted: bool) -> Any:
    """Read a file. Unless it is trusted, it can only create objects of the model's own classes."""
    if trusted:
        return torch.load(source, map_location="cpu", weights_only=False)
    known: list[Any] = sorted({type(module) for module in model.modules()}, key=lambda kind: kind.__qualname__)
    try:
        with torch.serialization.safe_globals(known):
            return torch.load(source, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{source} must hold weights only; reading its other content would execute code. If you trust the file, pass "
            "only_state_dict=False."
        ) from error


def _write(path: Path, content: Any) -> None:
    """Write a file atomically."""
    refuse_shards(content, "fastNLP's checkpoint")
    buffer = io.BytesIO()
    torch.save(content, buffer)
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as stream:
        stream.write(buffer.getbuffer())
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
