"""What becomes of each field of ``TrainingArguments``: the table that `trainer` acts on and the guide shows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from cadenza.errors import AdapterError


class Field(NamedTuple):
    """What becomes of a field."""

    how: Literal["used", "no effect", "warning", "error"]
    """``used``; ``no effect``, here as there or as nothing depends on it; a warning or an error if it is not the default."""
    says: str


def _used(says: str) -> Field:
    return Field("used", says)


def _none(says: str) -> Field:
    return Field("no effect", says)


def _warns(says: str) -> Field:
    return Field("warning", says)


def _refused(says: str) -> Field:
    return Field("error", says)


_OPTIMIZER = _used("as there: the optimizer is made by their `create_optimizer`")
_HUB = _none("only with `push_to_hub`, which is an error")
_TRACKER = _used("the callback of `report_to` reads it")
_SCRIPT = _none("for scripts of transformers; their trainer does not read it either")

VERSION = "5.23"
"""The version of transformers that the table follows."""

FIELDS: Mapping[str, Field] = {
    "output_dir": _used("`Trainer(directory=...)`: the run, its records and its checkpoints"),
    "per_device_train_batch_size": _used(
        "the batch size of the loader; on several ranks, of each rank. Several GPUs need several ranks"
    ),
    "num_train_epochs": _used("`Trainer(max_epochs=...)`; a fraction of an epoch becomes `max_steps`"),
    "max_steps": _used("`Trainer(max_steps=...)`, without a limit of epochs"),
    "learning_rate": _OPTIMIZER,
    "lr_scheduler_type": _used("`LearningRate` with their `get_scheduler`. `greedy` is an error"),
    "lr_scheduler_kwargs": _used("passed to their `get_scheduler`"),
    "warmup_steps": _used("as there: steps, or below 1 a fraction of the steps"),
    "optim": _used(
        "as there, by their `create_optimizer`; not those that need their training step: LOMO, layer-wise, schedule-free"
    ),
    "optim_args": _OPTIMIZER,
    "weight_decay": _used("as there: not for biases and norms"),
    "adam_beta1": _OPTIMIZER,
    "adam_beta2": _OPTIMIZER,
    "adam_epsilon": _OPTIMIZER,
    "optim_target_modules": _OPTIMIZER,
    "gradient_accumulation_steps": _used("`Trainer(accumulate=...)`"),
    "average_tokens_across_devices": _used(
        "the loss is the mean over the labels of all ranks. `False` on several ranks is an error"
    ),
    "max_grad_norm": _used("`ClipGradients(max_norm=..., log='train/grad_norm')`; with 0 the norm is logged alone"),
    "label_smoothing_factor": _used("as there, by their `LabelSmoother`"),
    "bf16": _used('`Trainer(precision="bf16")`'),
    "fp16": _used('`Trainer(precision="fp16")`'),
    "bf16_full_eval": _warns(
        "Evaluations use the precision of the training; call `model.bfloat16()` before `Trainer.evaluate`"
    ),
    "fp16_full_eval": _warns("Evaluations use the precision of the training; call `model.half()` before `Trainer.evaluate`"),
    "tf32": _used("`TrainingArguments` itself sets it when it is made"),
    "activation_checkpointing": _used("as there: the model's `activation_checkpointing_enable`"),
    "activation_checkpointing_kwargs": _used("passed to it"),
    "gradient_checkpointing": _used("as there: the old name of `activation_checkpointing`"),
    "gradient_checkpointing_kwargs": _used("as there: the old name of `activation_checkpointing_kwargs`"),
    "torch_compile": _used("`Trainer(compile=...)`"),
    "torch_compile_backend": _used("`Trainer(compile={'backend': ...})`"),
    "torch_compile_mode": _used("`Trainer(compile={'mode': ...})`"),
    "use_liger_kernel": _warns(
        "The kernels are not applied. Call `apply_liger_kernel_to_...` of liger-kernel before the model is made"
    ),
    "liger_kernel_config": _none("only with `use_liger_kernel`"),
    "use_cache": _used("as there: `model.config.use_cache`"),
    "neftune_noise_alpha": _used("as there: noise on the embeddings while the run trains"),
    "torch_empty_cache_steps": _warns("The cache of the device is not emptied. Call `torch.cuda.empty_cache()` in a callback"),
    "auto_find_batch_size": _refused("Add `FindBatchSize` to a native trainer, or give a smaller batch size"),
    "logging_strategy": _used("`LogTraining(every=...)`"),
    "logging_steps": _used(
        "`LogTraining(every=...)`. `train/loss` is the mean since the last log, weighted by labels; the logs of their "
        "callbacks have the mean over the steps"
    ),
    "logging_first_step": _used("the first step is logged too"),
    "log_on_each_node": _warns("The main process logs"),
    "logging_nan_inf_filter": _none("losses are logged unchanged, also NaN; `StopOnNonFinite` ends such a run"),
    "include_num_input_tokens_seen": _used(
        "how tokens are counted for `max_tokens` and `train/tokens_per_s`: all, also for `no`, or those that are not padding"
    ),
    "log_level": _used("as there: the verbosity of transformers"),
    "log_level_replica": _used("as there: the verbosity of transformers on other ranks"),
    "disable_tqdm": _used("`Trainer(progress=...)`"),
    "report_to": _used("their callbacks of these trackers stand in the list"),
    "run_name": _TRACKER,
    "project": _TRACKER,
    "trackio_space_id": _TRACKER,
    "trackio_bucket_id": _TRACKER,
    "trackio_static_space_id": _TRACKER,
    "eval_strategy": _used(
        "`Evaluate(every=...)`. With `steps`, or in an epoch that is cut short, the last step is evaluated too, as there"
    ),
    "eval_steps": _used("`Evaluate(every=...)`; below 1 a fraction of the steps"),
    "eval_delay": _used("as there: no evaluation before this step or epoch"),
    "per_device_eval_batch_size": _used("the batch size of the loader of each evaluation"),
    "prediction_loss_only": _used("as there: only the loss is computed, and `compute_metrics` is not called"),
    "eval_on_start": _used("an evaluation before the first step"),
    "eval_do_concat_batches": _used("as there: `compute_metrics` receives arrays, or lists with one for each batch"),
    "eval_use_gather_object": _none("results of any kind are gathered"),
    "eval_accumulation_steps": _used("as there: after so many batches, predictions move to the host"),
    "include_for_metrics": _used("as there: `inputs` and `losses` of the `EvalPrediction`"),
    "batch_eval_metrics": _used("as there: `compute_metrics` is called with each batch"),
    "save_only_model": _used("`Checkpoint(weights_only=True)`"),
    "save_strategy": _used(
        "`Checkpoint(every=...)`, none for `no`. The end of the run, an error and a signal write one as well. `best` writes "
        "one at each evaluation, and keeps the best and the newest"
    ),
    "save_steps": _used("`Checkpoint(every=...)`; below 1 a fraction of the steps"),
    "save_on_each_node": _warns("The main process saves"),
    "save_total_limit": _used(
        "`Checkpoint(keep=Last(...))`; with `metric_for_best_model` the best one and the newest others, so that the newest is "
        "kept; with `save_strategy='best'` the number of best checkpoints, at least 1"
    ),
    "enable_jit_checkpoint": _used("`Checkpoint` saves after SIGTERM"),
    "push_to_hub": _refused("Nothing is uploaded. Call `model.push_to_hub(...)` after the run"),
    "hub_token": _HUB,
    "hub_private_repo": _HUB,
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hub_always_push": _HUB,
    "hub_revision": _HUB,
    "load_best_model_at_end": _used("`BestWeights`, and the checkpoint of the best result is kept"),
    "metric_for_best_model": _used("`accuracy` and `eval_accuracy` are `eval/accuracy`"),
    "greater_is_better": _used("the mode `max` or `min`"),
    "ignore_data_skip": _warns(
        "A run that continues goes on at the next batch of its epoch, and skipped batches are not loaded"
    ),
    "restore_callback_states_from_checkpoint": _used("checkpoints hold the states of callbacks"),
    "full_determinism": _used("as there: their `enable_full_determinism`"),
    "seed": _used("`Trainer(seed=...)`"),
    "data_seed": _used("the seed of the order of the data; `None`: `seed`. The order is not that of their trainer"),
    "use_cpu": _used('`Trainer(device="cpu")`'),
    "accelerator_config": _refused("accelerate is not used. Give its settings to a native trainer, such as a `DdpDriver(...)`"),
    "parallelism_config": _refused("Give `trainer(..., driver=...)` a driver"),
    "dataloader_drop_last": _used("of the loaders"),
    "dataloader_num_workers": _used("of the loaders"),
    "dataloader_pin_memory": _used("of the loaders, if there is a CUDA device"),
    "dataloader_persistent_workers": _used("of the loaders"),
    "dataloader_prefetch_factor": _used("of the loaders"),
    "dataloader_multiprocessing_context": _used("of the loaders"),
    "dataloader_in_order": _used("of the loaders"),
    "remove_unused_columns": _used("as there: columns that `model.forward` does not take are removed"),
    "label_names": _used("as there: the entries of a batch that are labels"),
    "train_sampling_strategy": _used(
        "`random`, `sequential`, `group_by_length` by their sampler. `batch_rebalance` is an error"
    ),
    "length_column_name": _used("the lengths for `group_by_length`"),
    "ddp_find_unused_parameters": _used(
        "`DdpDriver(find_unused_parameters=...)`; `None`: as there, unless activations are checkpointed"
    ),
    "ddp_bucket_cap_mb": _used("`DdpDriver(bucket_cap_mb=...)`"),
    "ddp_broadcast_buffers": _used("`DdpDriver(broadcast_buffers=...)`; `None`: `True`"),
    "ddp_static_graph": _used("`DdpDriver(static_graph=...)`"),
    "ddp_backend": _warns(
        "The backend is gloo between CPUs and NCCL between CUDA devices, or that of an existing process group"
    ),
    "ddp_timeout": _used("`DdpDriver(timeout_s=...)`"),
    "fsdp": _refused("Give `trainer(..., driver=FsdpDriver(...))` with the modules to shard"),
    "fsdp_config": _none("only with `fsdp`, which is an error"),
    "deepspeed": _refused("Give `trainer(..., driver=FsdpDriver(...))`, which shards as ZeRO stage 3 does"),
    "debug": _used("as there: `underflow_overflow` hooks the model; other values are for TPUs"),
    "skip_memory_metrics": _warns("Memory is not reported. Add `DeviceStats()` to callbacks"),
    "do_train": _SCRIPT,
    "do_eval": _SCRIPT,
    "do_predict": _SCRIPT,
    "resume_from_checkpoint": _warns("It does not say where to continue, as there. Call `.fit(resume='auto')`, or give a path"),
    "local_rank": _none("RANK and the other variables of torchrun say it"),
}
"""By name of the field, in the order of ``TrainingArguments``."""

OF_SUBCLASSES: Mapping[str, Field] = {
    "predict_with_generate": _refused(
        "Evaluations compute logits, not generated tokens. Leave it out, or add `Evaluate(..., compute=...)` that calls "
        "`model.generate`"
    ),
}
"""Fields of subclasses of ``TrainingArguments`` that would change the results. Others of them are warnings."""


def check_fields(arguments: Any) -> None:
    """Warn about each field that is given and not used, or raise an error if results would differ.

    Raises:
        AdapterError: A field that this trainer cannot use is not the default; the message has a line for each. Or the arguments
            are those of another version of transformers, without some fields that are used.
    """
    present = {field.name for field in dataclasses.fields(arguments)}
    if missing := [name for name, known in FIELDS.items() if known.how == "used" and name not in present]:
        raise AdapterError(
            f"trainer(...) needs the TrainingArguments of transformers {VERSION}; those of the installed version have no "
            f"{', '.join(missing)}. Install transformers {VERSION} or newer."
        )
    wrong = []
    for field in dataclasses.fields(arguments):
        known = FIELDS.get(field.name) or OF_SUBCLASSES.get(field.name)
        if known is None and not _is_default(arguments, field):
            _warn(arguments, field.name, f"{type(arguments).__name__} has this field, and `trainer` does not read it")
        elif known is not None and known.how == "warning" and not _is_default(arguments, field):
            _warn(arguments, field.name, known.says)
        elif known is not None and known.how == "error" and not _is_default(arguments, field):
            wrong.append(_sentence(arguments, field.name, known.says))
    if wrong:
        raise AdapterError("trainer(...) cannot use these TrainingArguments:\n" + "\n".join(wrong))


def _is_default(arguments: Any, field: dataclasses.Field[Any]) -> bool:
    value, default = getattr(arguments, field.name), field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if field.name == "accelerator_config":  # TrainingArguments makes one where none is given
        return value is None or value == type(value)()
    return value == default or (not value and not default)


def _warn(arguments: Any, name: str, says: str) -> None:
    warnings.warn(_sentence(arguments, name, says), stacklevel=4)


def _sentence(arguments: Any, name: str, says: str) -> str:
    value = "..." if name.endswith("token") else repr(getattr(arguments, name))
    return f"TrainingArguments({name}={value[:80]}) has no effect. {says.replace('`', '')}."
