"""``pytorch_accelerated.run_config``: the settings of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cadenza.errors import nearest


@dataclass(frozen=True)
class TrainerRunConfig:
    """The settings of one run of `Trainer.train` or `Trainer.evaluate`. Read them as attributes or by name.

    A setting that does not apply, such as the training loader in an evaluation, is None.
    """

    num_epochs: int | None
    train_per_device_batch_size: int | None
    train_dl_kwargs: Mapping[str, Any] | None
    eval_per_device_batch_size: int | None
    eval_dl_kwargs: Mapping[str, Any] | None
    gradient_accumulation_steps: int
    gradient_clip_value: float | None
    train_total_batch_size: int | None
    eval_total_batch_size: int | None
    num_update_steps_per_epoch: int | None
    num_local_update_steps_per_epoch: int | None
    max_num_train_steps: int | None
    is_local_process_zero: bool
    is_world_process_zero: bool
    is_distributed: bool
    mixed_precision: str
    num_processes: int

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name. Mappings are copied shallowly: a sampler in one is the same object."""
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in self._items()}

    def __getitem__(self, name: str) -> Any:
        names = [field.name for field in fields(self)]
        if name not in names:
            raise KeyError(f"run_config has no {name!r}.{nearest(name, names)}")
        return getattr(self, name)

    def _items(self) -> Iterator[tuple[str, Any]]:
        for field in fields(self):
            yield field.name, getattr(self, field.name)
