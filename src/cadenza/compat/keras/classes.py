"""Classes of Keras callbacks that need special handling."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from cadenza.errors import AdapterError

MAIN_ONLY: frozenset[str] = frozenset(
    {
        *("keras.CSVLogger", "keras.ModelCheckpoint", "keras.ProgbarLogger", "keras.RemoteMonitor", "keras.TensorBoard"),
        *("keras.BackupAndRestore", "keras.OrbaxCheckpoint"),
        *("tf_keras.CSVLogger", "tf_keras.ModelCheckpoint", "tf_keras.ProgbarLogger", "tf_keras.RemoteMonitor"),
        *("tf_keras.TensorBoard", "tf_keras.BackupAndRestore"),
    }
)
"""Classes of Keras that write files, send requests or print: only the main process calls them."""

TRACKERS: frozenset[str] = frozenset(
    {"aim", "clearml", "comet_ml", "dvclive", "livelossplot", "mlflow", "neptune", "swanlab", "tqdm", "trackio", "wandb"}
)
"""Packages with callbacks that write or print: only the main process calls them."""

EVERYWHERE: Mapping[str, frozenset[str]] = {"BackupAndRestore": frozenset({"on_train_begin"})}
"""Events of `MAIN_ONLY` classes that every rank calls because they read weights."""

WRITES_WEIGHTS: frozenset[str] = frozenset({"ModelCheckpoint", "BackupAndRestore"})
"""Classes that every rank calls if the model is sharded, since each rank holds only part of the weights."""

REFUSED: Mapping[str, str] = {
    "OrbaxCheckpoint": "keras.callbacks.OrbaxCheckpoint saves the state of a compiled Keras model with its Keras optimizer; "
    "the optimizer of this run is one of torch. Add Checkpoint(...) to callbacks: it saves the whole state of the run.",
    "TensorBoard": "keras.callbacks.TensorBoard writes its files with the package tensorflow, which is not installed. Add "
    "cadenza.sinks.TensorBoard() to callbacks: it needs the package tensorboard alone.",
}
"""Unsupported classes of Keras and their replacements."""

NOT_STATE: frozenset[str] = frozenset({"_model", "params", "min_delta"})
"""Attributes that are recreated in each run. Keras flips the sign of ``min_delta`` once it knows the direction."""


def titles(callback: object) -> list[str]:
    """Return the package and the name of each class of a callback, or of a class, such as ``keras.CSVLogger``."""
    kind = callback if isinstance(callback, type) else type(callback)
    return [f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__]


def names(callback: object) -> set[str]:
    """Return the names of a callback's base classes that belong to Keras."""
    return {title.partition(".")[2] for title in titles(callback) if title.startswith(("keras.", "tf_keras."))}


def is_main_only(callback: object) -> bool:
    """Return whether only the main process calls a callback."""
    found = titles(callback)
    return not MAIN_ONLY.isdisjoint(found) or any(title.partition(".")[0] in TRACKERS for title in found)


def check(callback: object) -> None:
    """Raise `AdapterError` for a callback, or a class, that cannot run here."""
    for name in sorted(names(callback) & REFUSED.keys()):
        if name != "TensorBoard" or find_spec("tensorflow") is None:
            raise AdapterError(REFUSED[name])


def file_size(callback: Any) -> int | None:
    """Return the size of the file of a CSVLogger; None of another callback, or without an open file."""
    file = getattr(callback, "csv_file", None) if "CSVLogger" in names(callback) else None
    if file is None or file.closed:
        return None
    file.flush()
    return os.path.getsize(callback.filename)


def close_file(callback: Any) -> None:
    """Close the file of a CSVLogger, which closes it only in ``on_train_end``."""
    if file_size(callback) is not None:
        callback.csv_file.close()


@contextmanager
def continued_file(callback: Any, size: int | None) -> Iterator[None]:
    """Return a context in which a CSVLogger opens its file to append, without the rows after the checkpoint."""
    if size is None:
        yield
        return
    if os.path.exists(callback.filename):
        with open(callback.filename, "r+b") as file:
            file.truncate(min(size, os.path.getsize(callback.filename)))
    appends, callback.append = callback.append, True
    try:
        yield
    finally:
        callback.append = appends
