"""A native run with the names of ``TrainingArguments``."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from cadenza.callbacks.best_weights import BestWeights
from cadenza.callbacks.checkpoint import Checkpoint
from cadenza.callbacks.clip_gradients import ClipGradients
from cadenza.callbacks.early_stopping import EarlyStopping
from cadenza.callbacks.evaluate import Evaluate
from cadenza.callbacks.log_training import LogTraining
from cadenza.compat.adapter.foreign import callbacks_of
from cadenza.compat.adapter.view import View, refuse
from cadenza.compat.transformers.logs import evaluation_prefix
from cadenza.engine.monitor import monitors_in
from cadenza.engine.session import session_of
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.schedule import Every, Schedule

if TYPE_CHECKING:
    from cadenza.run import Run

_OFF: Mapping[str, Any] = {
    **dict.fromkeys(("push_to_hub", "hub_always_push", "auto_find_batch_size", "full_determinism", "eval_on_start"), False),
    **dict.fromkeys(("logging_first_step", "logging_nan_inf_filter", "save_only_model", "ignore_data_skip"), False),
    **dict.fromkeys(("hub_token", "hub_private_repo", "hub_model_id", "hub_revision", "deepspeed", "fsdp"), None),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id", "save_total_limit"), None),
    **dict.fromkeys(("neftune_noise_alpha", "label_names", "resume_from_checkpoint", "lr_scheduler_kwargs"), None),
    "gradient_checkpointing_kwargs": None,
    **dict.fromkeys(("disable_tqdm", "remove_unused_columns", "do_predict", "eval_on_start"), False),
    **dict.fromkeys(("do_train", "restore_callback_states_from_checkpoint"), True),
    "local_rank": -1,
    "include_num_input_tokens_seen": "no",
    "project": "huggingface",
    "hub_strategy": "every_save",
    "report_to": [],
    "debug": [],
    "eval_delay": 0,
    "log_level": "passive",
}
"""Fields with a constant value in native runs, which lack the feature or provide it through callbacks."""


class argument(property):  # noqa: N801  # used as `property` is
    """A field of the view, which a value of `Arguments` overrides."""

    def __get__(self, view: Any, kind: type | None = None, /) -> Any:
        name = getattr(self.fget, "__name__", "")
        return view._values[name] if view is not None and name in view._values else super().__get__(view, kind)


class ArgumentsView(View):
    """The ``args`` of a run without ``TrainingArguments``.

    Args:
        run: The run.
        values: Values of fields that replace those of the run.
    """

    title: ClassVar[str] = "args"
    absent: ClassVar[Mapping[str, str]] = {
        "output_dir": "Give Trainer(directory=...), or Arguments(output_dir=...) of cadenza.compat.transformers.",
        "logging_dir": "Give the callback its own folder, or Arguments(logging_dir=...) of cadenza.compat.transformers.",
        "optim": "The optimizer is in the keyword `optimizer`.",
        "lr_scheduler_type": "The scheduler is in the keyword `lr_scheduler`.",
        "warmup_steps": "The scheduler is in the keyword `lr_scheduler`.",
        "data_collator": "The loader is in the keyword `train_dataloader`.",
    }

    def __init__(self, run: Run, values: Mapping[str, Any]) -> None:
        super().__init__(run)
        self._values: dict[str, Any] = dict(values)

    @classmethod
    def _provides(cls, name: str) -> bool:
        return name in _OFF or hasattr(cls, name)

    @classmethod
    def _advice(cls, name: str) -> str:
        return f"Give Arguments({name}=...) of cadenza.compat.transformers."

    def __getattr__(self, name: str) -> Any:  # noqa: RET503  # `refuse` raises
        values = self.__dict__.get("_values", {})
        if name in values or name in _OFF:
            return values[name] if name in values else _OFF[name]
        refuse(self._run, self, name, "reads", advice=self._advice(name))

    # -- directory and limits ------------------------------------------------------------------------

    @argument
    def output_dir(self) -> str:
        """The directory of the run."""
        directory = self._run.info.directory
        if directory is None:
            refuse(self._run, self, "output_dir", "reads")
        return str(directory)

    @argument
    def run_name(self) -> str | None:
        """The name of the directory of the run."""
        return self._run.info.name or None

    @run_name.setter  # type: ignore[no-redef]  # mypy knows only `property`
    def run_name(self, value: str | None) -> None:
        self._values["run_name"] = value

    @argument
    def max_steps(self) -> int:
        """The limit of steps; -1 without one."""
        return self._run.progress.max_steps or -1

    @argument
    def num_train_epochs(self) -> float:
        """The limit of epochs or, without one, the epochs that the limit of steps needs."""
        run = self._run
        epochs = run.progress.max_epochs or run.progress.begun("epoch")
        return float(sys.maxsize if epochs is None else epochs)

    @argument
    def seed(self) -> int:
        """The seed of the run, or of its data if it has none."""
        session = session_of(self._run)
        seed = session.arguments.get("seed")
        return session.data_seed if seed is None else int(seed)

    # -- the batches and the optimizer -------------------------------------------------------------

    @argument
    def per_device_train_batch_size(self) -> int | None:
        """The batch size of the training loader; None if it has none."""
        size: int | None = getattr(self._run.loader, "batch_size", None)
        return size

    @argument
    def per_device_eval_batch_size(self) -> int | None:
        """The batch size of the first `Evaluate`; None if it has none."""
        first = self._first(Evaluate)
        size: int | None = None if first is None else getattr(first.evaluation.loader, "batch_size", None)
        return size

    @property
    def train_batch_size(self) -> int | None:
        """The same as ``per_device_train_batch_size``."""
        size: int | None = self.per_device_train_batch_size
        return size

    @property
    def eval_batch_size(self) -> int | None:
        """The same as ``per_device_eval_batch_size``."""
        size: int | None = self.per_device_eval_batch_size
        return size

    @argument
    def dataloader_num_workers(self) -> int:
        """The workers of the training loader."""
        return int(getattr(self._run.loader, "num_workers", 0))

    @argument
    def gradient_accumulation_steps(self) -> int:
        """The batches of a step, at the start of the run."""
        return session_of(self._run).step.window.size

    @argument
    def learning_rate(self) -> float:
        """The first learning rate of the first parameter group."""
        group = self._group
        return float(group.get("initial_lr", group.get("lr", 0.0)))

    @argument
    def weight_decay(self) -> float:
        """The weight decay of the first parameter group."""
        return float(self._group.get("weight_decay", 0.0))

    @argument
    def max_grad_norm(self) -> float:
        """The norm of `ClipGradients`; 0 without one."""
        found = [clip.max_norm for clip in callbacks_of(self._run, ClipGradients) if clip.max_norm is not None]
        return found[0] if found else 0.0

    @argument
    def bf16(self) -> bool:
        """Whether the run has ``precision="bf16"``."""
        return session_of(self._run).precision.name == "bf16"

    @argument
    def fp16(self) -> bool:
        """Whether the run has ``precision="fp16"``."""
        return session_of(self._run).precision.name == "fp16"

    # -- logs, evaluations and saves ---------------------------------------------------------------

    @argument
    def logging_strategy(self) -> Any:
        """``epoch`` if `LogTraining` logs at the end of each epoch, else ``steps``."""
        return _strategy(_cadence(self._schedule(LogTraining))[0] or "steps")

    @argument
    def logging_steps(self) -> int:
        """The steps between two calls of ``on_log``: those of `LogTraining`, or 500."""
        return _cadence(self._schedule(LogTraining))[1] or 500

    @argument
    def eval_strategy(self) -> Any:
        """``epoch`` or ``steps``, by the first `Evaluate`; ``no`` without one."""
        return _strategy(_cadence(self._schedule(Evaluate))[0] or "no")

    @argument
    def eval_steps(self) -> int | None:
        """The steps between two evaluations; None if they follow epochs."""
        return _cadence(self._schedule(Evaluate))[1]

    @argument
    def do_eval(self) -> bool:
        """Whether the list has an `Evaluate`."""
        return self._first(Evaluate) is not None

    @argument
    def save_strategy(self) -> Any:
        """``epoch`` or ``steps``, by the first `Checkpoint`; ``no`` without one."""
        return _save_strategy(_cadence(self._schedule(Checkpoint))[0] or "no")

    @argument
    def save_steps(self) -> int:
        """The steps between two checkpoints; 500 if they follow epochs."""
        return _cadence(self._schedule(Checkpoint))[1] or 500

    @argument
    def metric_for_best_model(self) -> str | None:
        """The result that the first `Checkpoint`, `EarlyStopping` or `BestWeights` watches; None if none does."""
        best = self._best
        return None if best is None else _result(best["monitor"], self._run)

    @argument
    def greater_is_better(self) -> bool | None:
        """Whether larger values of this result are better; by default, unless it is a loss."""
        watched, best = self.metric_for_best_model, self._best
        if "metric_for_best_model" in self._values or best is None:
            return None if watched is None else not watched.endswith("loss")
        return best["mode"] == "max"

    @argument
    def load_best_model_at_end(self) -> bool:
        """Whether `BestWeights` or `EarlyStopping` loads the best weights at the end."""
        stopping = any(callback.best is not None for callback in callbacks_of(self._run, EarlyStopping))
        return stopping or any(callback.restore for callback in callbacks_of(self._run, BestWeights))

    # -- processes ---------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return self._run.driver.world_size

    @property
    def process_index(self) -> int:
        """The rank of this process."""
        return self._run.driver.rank

    @property
    def local_process_index(self) -> int:
        """The rank of this process on its machine."""
        return local_rank(self._run)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self._run.device

    @property
    def n_gpu(self) -> int:
        """1 on a GPU, else 0."""
        return int(self._run.device.type == "cuda")

    @property
    def should_log(self) -> bool:
        """Whether this is the main process."""
        return self._run.is_main

    @property
    def should_save(self) -> bool:
        """Whether this is the main process."""
        return self._run.is_main

    @property
    def parallel_mode(self) -> Any:
        """``distributed`` on several processes."""
        from transformers.training_args import ParallelMode

        several, gpu = self.world_size > 1, self.n_gpu
        return ParallelMode.DISTRIBUTED if several else ParallelMode.NOT_PARALLEL if gpu else ParallelMode.NOT_DISTRIBUTED

    # -- all of them -------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the fields with plain values. ``output_dir`` is None without a directory."""
        names = [name for name, attribute in vars(ArgumentsView).items() if isinstance(attribute, argument)]
        here = self._run.info.directory is not None or "output_dir" in self._values
        values = {name: getattr(self, name) if here or name != "output_dir" else None for name in names}
        merged = {**_OFF, **values, **self._values}
        return {name: value.value if isinstance(value, Enum) else value for name, value in merged.items()}

    def to_sanitized_dict(self) -> dict[str, Any]:
        """Return the same for trackers: numbers and texts."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        kinds = (bool, int, float, str, torch.Tensor)
        return {name: value if type(value) in kinds else str(value) for name, value in values.items()}

    def to_json_string(self) -> str:
        """Return them as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str)

    @property
    def __dataclass_fields__(self) -> dict[str, Any]:
        """The fields of ``TrainingArguments`` that the view has, for ``dataclasses.fields(args)`` and ``asdict``."""
        from transformers import TrainingArguments

        fields: dict[str, Any] = TrainingArguments.__dataclass_fields__
        return {name: fields[name] for name in self.to_dict() if name in fields}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a ``TrainingArguments``: trackers that save the model make a trainer of transformers with a copy."""
        from transformers import TrainingArguments

        names = ("run_name", "max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size")
        numbers = ("learning_rate", "seed", "logging_steps", "max_grad_norm")
        given = {name: value for name in (*names, *numbers) if (value := getattr(self, name)) is not None}
        return TrainingArguments(output_dir=self.output_dir, report_to="none", use_cpu=self.device.type == "cpu", **given)

    # -- sources ----------------------------------------------------------------------

    @property
    def _group(self) -> Mapping[str, Any]:
        return self._run.optimizers[0].param_groups[0] if self._run.optimizers else {}

    @property
    def _best(self) -> Mapping[str, str] | None:
        return next(iter(monitors_in(hooks_of(self._run))), None)

    def _first(self, kind: type[Any]) -> Any:
        return next(iter(callbacks_of(self._run, kind)), None)

    def _schedule(self, kind: type[Any]) -> Schedule | None:
        return getattr(self._first(kind), "every", None)


def local_rank(run: Run) -> int:
    """Return the rank of this process on its machine, as set by torchrun."""
    import os

    return int(os.environ.get("LOCAL_RANK", "0")) if run.driver.world_size > 1 else 0


def _cadence(schedule: Schedule | None) -> tuple[str, int | None]:
    """Return the strategy of transformers for a schedule, and its steps. Other schedules are reported as never due."""
    if schedule is None:
        return "", None
    if isinstance(schedule, Every) and schedule.unit == "step":
        return "steps", int(schedule.count)
    return ("epoch", None) if isinstance(schedule, Every) and schedule.length.whole_epochs else ("steps", sys.maxsize)


def _strategy(name: str) -> Any:
    from transformers.trainer_utils import IntervalStrategy

    return IntervalStrategy(name)


def _save_strategy(name: str) -> Any:
    from transformers.trainer_utils import SaveStrategy

    return SaveStrategy(name)


def _result(name: str, run: Run) -> str:
    """Return the name of a native result in transformers."""
    evaluation, _, rest = name.partition("/")
    return f"{evaluation_prefix(evaluation, run.evaluations.keys())}_{rest.replace('/', '_')}"
