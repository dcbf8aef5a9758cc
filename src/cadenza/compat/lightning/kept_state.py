"""What a checkpoint saves of callbacks of Lightning besides their ``state_dict``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from cadenza.compat.lightning.library import is_lightning

KEPT: Mapping[str, tuple[str, ...]] = {
    "ModelCheckpoint": ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation"),
    "WeightAveraging": ("_latest_update_epoch",),
}
"""Attributes that Lightning loses when it resumes, by class."""


def kept_of(callback: Any) -> dict[str, Any]:
    """Return the state of a callback that its own ``state_dict`` lacks."""
    names = [name for kind, kept in KEPT.items() if is_lightning(callback, kind) for name in kept]
    state = {name: getattr(callback, name) for name in names if hasattr(callback, name)}
    if is_lightning(callback, "ModelPruning") and callback._original_layers:
        state["layers"] = [one["data"].state_dict() for one in callback._original_layers.values()]
        pairs = enumerate(_copies(callback))
        state["shared"] = [index for index, (copied, present) in pairs if copied.data_ptr() == present.data_ptr()]
    return state


def put_kept(callback: Any, state: Mapping[str, Any]) -> None:
    """Restore what `kept_of` returned."""
    for name, value in state.items():
        if name not in ("layers", "shared"):
            setattr(callback, name, value)
    if "layers" in state and callback._original_layers:
        for layer, weights in zip(callback._original_layers.values(), state["layers"], strict=True):
            layer["data"].load_state_dict(weights)
        for index, (copied, present) in enumerate(_copies(callback)):
            if index in state["shared"]:  # the lottery ticket of Lightning makes them share their memory
                copied.data = present.data


def _copies(callback: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each first value that ``ModelPruning`` keeps, and the parameter that it puts it back into."""
    for layer in callback._original_layers.values():
        for index, name in layer["names"]:
            module = callback._parameters_to_prune[index][0]
            yield getattr(layer["data"], name), getattr(module, f"{name}_orig", getattr(module, name))


_SAME = "same as state_dict"


def added(before: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries that ``on_save_checkpoint`` changed. Weights that the checkpoint of the run holds are left out."""
    changed = {name: value for name, value in checkpoint.items() if name not in before or value is not before[name]}
    weights = before["state_dict"]
    same = [name for name, value in changed.items() if value is weights]
    return {**{name: value for name, value in changed.items() if value is not weights}, **({_SAME: same} if same else {})}


def put_together(checkpoint: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint that ``on_save_checkpoint`` made, for ``on_load_checkpoint``."""
    whole = {**checkpoint, **entries}
    return whole | dict.fromkeys(whole.pop(_SAME, ()), checkpoint["state_dict"])
