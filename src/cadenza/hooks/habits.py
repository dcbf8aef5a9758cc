"""Names of other trainers, and the names to use here instead: one table for each kind of name.

None of these names is accepted. Each entry is a part of an error message.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from cadenza.errors import nearest

P = ParamSpec("P")
T = TypeVar("T")


def _table(names: Mapping[str, str]) -> dict[str, str]:
    """Return the answer by name, from names by answer."""
    return {name: answer for answer, several in names.items() for name in several.split()}


_EVALUATE = "Add Evaluate(loader, metrics=...) to callbacks."
_CHECKPOINT = "Add Checkpoint(...) to callbacks, and give directory=."
_CLIP = "Add ClipGradients(...) to callbacks."
_RATE = "Make the optimizer with this rate; a schedule is LearningRate(scheduler) in callbacks."
_SINK = "Add a sink such as Console() or TensorBoard() to callbacks."
_BATCH = "Give the batch size to the loader: DataLoader(dataset, batch_size=...)."
_DRIVER = 'Use driver="auto", "single", "ddp" or "fsdp".'
_DEVICE = 'Use device="cpu", "cuda", "cuda:1" or "mps".'
_RESUME = "Call trainer.fit(resume=...)."

MOMENTS = _table(
    {
        "on_fit_start": "on_train_start on_train_begin before_fit before_train",
        "on_fit_end": "on_train_end after_fit after_train teardown",
        "on_setup": "on_init_end setup set_model",
        "on_epoch_start": "on_train_epoch_start on_epoch_begin before_epoch before_train_epoch",
        "on_epoch_end": "on_train_epoch_end after_epoch after_train_epoch training_epoch_end",
        "on_batch_start": (
            "on_train_batch_start on_train_batch_begin on_batch_begin on_substep_begin before_batch before_train_iter"
        ),
        "on_batch_end": "on_train_batch_end on_substep_end after_batch after_train_iter",
        "on_step_start": "on_step_begin on_train_step_start on_train_step_begin",
        "on_step_end": "on_train_step_end on_iteration_completed",
        "on_before_backward": "on_backward_start after_loss before_backward",
        "on_after_backward": "on_backward_end after_backward",
        "on_before_optimizer_step": "on_pre_optimizer_step before_step",
        "on_after_optimizer_step": "on_optimizer_step on_post_optimizer_step after_step",
        "on_eval_start": (
            "on_validation_start on_validation_epoch_start on_validation_begin on_evaluate_start on_eval_begin "
            "on_test_start on_test_epoch_start on_test_begin on_predict_start on_predict_epoch_start on_predict_begin "
            "before_validate before_val_epoch"
        ),
        "on_eval_end": (
            "on_validation_end on_validation_epoch_end on_evaluate on_evaluate_end on_test_end on_test_epoch_end "
            "on_predict on_predict_end on_predict_epoch_end after_validate after_val_epoch validation_epoch_end"
        ),
        "on_eval_batch_start": (
            "on_validation_batch_start on_test_batch_start on_test_batch_begin on_predict_batch_start on_predict_batch_begin "
            "on_eval_batch_begin"
        ),
        "on_eval_batch_end": "on_validation_batch_end on_test_batch_end on_predict_batch_end on_prediction_step",
        "on_save": "on_save_checkpoint before_save_checkpoint",
        "on_load": "on_load_checkpoint after_load_checkpoint",
        "on_sanity_start": "on_sanity_check_start on_sanity_check_begin",
        "on_sanity_end": "on_sanity_check_end",
        "on_exception": "on_keyboard_interrupt on_error",
    }
)
"""Hooks of Lightning, Hugging Face, Keras, fastai, Ignite and MMEngine, and the nearest moment here."""

PARAMETERS = _table(
    {"": "epoch logs trainer pl_module state control batch_idx batch_index dataloader_idx learn learner engine runner"}
).keys()
"""Names of parameters that only hooks of other trainers have."""

TRAINER = _table(
    {
        "Did you mean 'max_epochs'?": "epochs n_epochs num_epochs num_train_epochs nb_epoch",
        "Did you mean 'max_steps'?": "steps n_steps num_steps max_iters num_training_steps steps_limit",
        "Did you mean 'compute_loss'? For (inputs, targets): supervised(loss_fn).": "loss loss_fn loss_func criterion",
        "Did you mean 'optimizer'?": "optim optimizers opt opt_func",
        "Did you mean 'loader'?": (
            "train_loader train_dataloader train_dataloaders dataloader dataloaders data_loader dls train_data datamodule data"
        ),
        "Did you mean 'loader'? Give DataLoader(dataset, batch_size=...).": "train_dataset dataset",
        _EVALUATE: (
            "eval_dataloader eval_dataloaders eval_loader val_loader val_dataloader val_dataloaders valid_loader "
            "validation_loader test_loader eval_dataset val_dataset validation_data validation_split metrics "
            "compute_metrics eval_steps evaluation_strategy eval_strategy val_check_interval check_val_every_n_epoch "
            "num_sanity_val_steps limit_val_batches"
        ),
        "Did you mean 'accumulate'?": "accumulate_grad_batches gradient_accumulation_steps accumulation_steps grad_accum",
        'Use precision="bf16" or precision="fp16".': "amp fp16 bf16 mixed_precision use_amp",
        _CLIP: "gradient_clip_val max_grad_norm clip clip_grad grad_clip clip_norm clipnorm",
        "Add LearningRate(scheduler) to callbacks.": "scheduler schedulers lr_scheduler lr_schedulers",
        _RATE: "lr learning_rate weight_decay",
        _BATCH: "batch_size per_device_train_batch_size train_batch_size num_workers shuffle",
        _DEVICE: "devices accelerator gpus use_cpu no_cuda",
        _DRIVER: "strategy parallel distributed num_nodes fsdp ddp",
        "Did you mean 'directory'?": "output_dir default_root_dir log_dir logging_dir save_dir work_dir",
        _CHECKPOINT: "save_steps save_strategy save_total_limit enable_checkpointing checkpoint",
        _RESUME: "ckpt_path resume resume_from_checkpoint resume_from",
        _SINK: "logger loggers report_to logging_steps log_every_n_steps verbose",
        "Did you mean 'progress'?": "enable_progress_bar progress_bar disable_tqdm",
        "Did you mean 'callbacks'?": "callback cbs hooks",
        "Did you mean 'compile'?": "torch_compile compile_model",
        "Did you mean 'step_fn'?": "training_step train_step step",
        "Add Limit(...) to callbacks.": "limit_train_batches overfit_batches fast_dev_run",
        "Add TimeLimit(...) to callbacks.": "max_time",
        "Add EarlyStopping(...) to callbacks.": "patience early_stopping",
        "Call torch.use_deterministic_algorithms(True) before the run; seed= seeds it.": "deterministic benchmark",
        "The arguments are plain ones: Trainer(model, optimizer, loader, compute_loss, max_epochs=...).": "args",
    }
)
"""Arguments of a trainer."""

_PARTS = "Trainer(model, optimizer, loader, ...) has the parts already: call fit()."
FIT = _table(
    {
        _PARTS: (
            "model module optimizer loader x y data train_loader train_dataloader train_dataloaders datamodule "
            "dataloaders train_data dataset"
        ),
        "Did you mean 'resume'?": "ckpt_path resume_from_checkpoint resume_from checkpoint",
        "Give it to the trainer: Trainer(max_epochs=...).": "epochs n_epochs n_epoch max_epochs num_epochs",
        "Give it to the trainer: Trainer(max_steps=...).": "steps max_steps steps_per_epoch",
        _RATE: "lr learning_rate",
        _BATCH: "batch_size",
        "Give them to the trainer: Trainer(callbacks=[...]).": "callbacks cbs",
        _EVALUATE: "val_loader val_dataloaders val_dataloader eval_dataloader validation_data",
        _SINK: "verbose",
    }
)
"""Arguments of `Trainer.fit`."""

EVALUATE = _table(
    {
        "Did you mean 'loader'?": "dataloader dataloaders data_loader eval_loader val_loader eval_dataloader",
        "Did you mean 'loader'? Give DataLoader(dataset, batch_size=...).": "dataset eval_dataset x data",
        "Did you mean 'metrics'?": "metric compute_metrics metric_fn",
        "The trainer evaluates its own model: leave it out.": "model module",
        "Did you mean 'name'?": "prefix metric_key_prefix",
        "Did you mean 'limit'?": "max_batches limit_batches num_batches steps limit_val_batches",
        "Did you mean 'every'?": "interval frequency every_n_epochs every_n_steps",
        "Did you mean 'compute'?": "loss_fn compute_loss fn forward",
        "Did you mean 'sanity_batches'?": "num_sanity_val_steps",
        "Trainer.evaluate and Trainer.predict have which=, such as which='best'.": "ckpt_path ckpt checkpoint best",
        _BATCH: "batch_size",
    }
)
"""Arguments of `Evaluate`, `Trainer.evaluate` and `Trainer.predict`."""

CHECKPOINT = _table(
    {
        "Did you mean 'directory'?": "dirpath filepath path output_dir folder",
        "Did you mean 'keep_last'? The best: keep_best=(name, mode).": "save_top_k save_total_limit max_to_keep",
        'Use keep_best=("eval/loss", "min").': "monitor save_best_only metric_for_best_model",
        'It is the second of the pair: keep_best=("eval/loss", "min").': "mode greater_is_better",
        'Use every="500 steps".': "every_n_epochs every_n_train_steps save_freq save_steps interval",
        "Did you mean 'weights_only'?": "save_weights_only",
        "Names are given: step-00000500. Files of your own: save_weights(path, model).": "filename",
    }
)
"""Arguments of `Checkpoint`."""

STOPPING = _table(
    {
        'Use mode="max" or mode="min".': "greater_is_better",
        "Did you mean 'monitor'?": "metric metric_name",
        "Did you mean 'patience'?": "early_stopping_patience",
        "Did you mean 'min_delta'?": "early_stopping_threshold",
        "Did you mean 'restore_best'?": "restore_best_weights",
        "Did you mean 'threshold'?": "stopping_threshold",
        "Did you mean 'diverged'?": "divergence_threshold",
        "Did you mean 'ignore_first'? It counts evaluations.": "start_from_epoch",
    }
)
"""Arguments of `EarlyStopping`."""

RUN = _table(
    {
        "call run.stop(reason)": "should_stop stop_training should_training_stop should_terminate",
        "call run.end_epoch(reason)": "should_epoch_stop should_terminate_single_epoch",
        "call run.save(reason)": "should_save",
        "Evaluate(loader, every=...) in callbacks evaluates": "should_evaluate",
        "read run.progress.epoch": "current_epoch epoch",
        "read run.progress.step": "global_step step",
        "read run.progress.batch_in_epoch": "batch_idx",
        "read run.optimizers[0]": "optimizer",
        "read run.loader": "train_dataloader train_loader",
        "read run.info.accumulate; it is given to the trainer: Trainer(accumulate=...)": "accumulate",
        "read run.info.arguments['seed']; it is given to the trainer: Trainer(seed=...)": "seed",
        "read run.history.latest": "callback_metrics metrics",
        "read run.info.id": "id",
        "read run.info.directory": "directory",
        "read run.info.arguments": "arguments",
        "call run.after_step(act)": "at_next_border",
        "call run.driver.reduce(run.loss)": "loss_of_all_ranks",
        "a run's length is the trainer's: read run.progress.max_steps, call run.stop(reason)": "max_steps",
        "a run's length is the trainer's: read run.progress.max_epochs, call run.stop(reason)": "max_epochs",
        "read and set it in run.optimizers[0].param_groups, or use LearningRate": "lr",
    }
)
"""Attributes of a run, in hooks."""

INSTEAD_OF_SETTING = _table(
    {
        "call run.replace_model(model) in on_setup": "model",
        "call run.replace_loader(loader) in on_setup": "loader",
        "call run.stop(reason)": "outcome",
        "set an entry: run.state['name'] = value": "state",
        "call run.log(name, value)": "history",
        "set an entry: run.outputs['loss'] = value": "outputs loss",
        "change it in place in on_batch_start": "batch",
        "add an entry: run.evaluations['name'] = evaluation": "evaluations",
        "give Trainer(...) the optimizers": "optimizers",
        "give Trainer(driver=...)": "driver is_main",
        "give Trainer(device=...)": "device",
        "counters are written by the loop; call run.stop(reason) or run.end_epoch(reason)": "progress",
        "the run writes it": "decisions faults info profile",
    }
)
"""What to do instead of assigning to an attribute of a run."""


def instead_of_setting(name: str, known: Collection[str]) -> str:
    """Return the message for an assignment to an attribute of a run, with the nearest verb.

    >>> instead_of_setting("should_stop", ["stop"])
    "a Run has no 'should_stop': call run.stop(reason)"
    >>> instead_of_setting("model", ["model"])
    'run.model is read-only: call run.replace_model(model) in on_setup'
    """
    if name in RUN:
        return f"a Run has no {name!r}: {RUN[name]}"
    if name in INSTEAD_OF_SETTING:
        return f"run.{name} is read-only: {INSTEAD_OF_SETTING[name]}"
    if name in known:
        return f"run.{name} is read-only: call it, and keep functions of your own on the callback"
    keep = f"Keep your own values in run.state[{name!r}], which checkpoints hold, or on the callback"
    return f"a Run has no {name!r} and takes no new attributes.{nearest(name, known)} {keep}"


FLAGS = _table({"call run.stop(reason) in a hook": "should_stop stop_training terminate"})
"""Attributes that stop other trainers. Setting one is an error."""

TRAINER_ATTRIBUTES = FLAGS | _table(
    {
        "call trainer.fit()": "train fit_one_cycle",
        "call trainer.evaluate(loader); a LightningModule has validate and test of cadenza.compat.lightning": "validate test",
        "give Trainer(callbacks=[...])": "add_callback register_callback add_event_handler",
        "add Checkpoint(...) to callbacks, or call save_weights(path, model)": "save_checkpoint save_model save",
        "call fit(resume=...), or load_weights(path, model)": "load_checkpoint load_model load",
        "fit() returns the run: read run.progress and run.history": "current_epoch global_step state history callback_metrics",
        "give Trainer(compile=True)": "compile",
    }
)
"""Attributes of a trainer."""


def answered(habits: Mapping[str, str], *, too_many: str = "", missing: str = "") -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Answer an unknown keyword of a function from a table of habits, or with the nearest name.

    Args:
        habits: The answer by name.
        too_many: The answer to too many positional arguments.
        missing: The answer if positional arguments are missing.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        by_position = sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters.values())
        needed = [one.name for one in parameters.values() if one.default is one.empty and one.name != "self"]
        name = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def checked(*arguments: P.args, **keywords: P.kwargs) -> T:
            for key in keywords:
                if key not in parameters:
                    raise TypeError(f"{name} has no argument {key!r}.{answer(key, habits, parameters)}")
            if len(arguments) > by_position and too_many:
                raise TypeError(
                    f"{name} takes at most {by_position - 1} positional arguments; got {len(arguments) - 1}. {too_many}"
                )
            if missing and (lacks := [one for one in needed[len(arguments) - 1 :] if one not in keywords]):
                raise TypeError(f"{name} lacks {', '.join(lacks)}. {missing}")
            return function(*arguments, **keywords)

        return checked

    return decorate


def renamed(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept the old names of arguments, each with its new one, for one release, with a DeprecationWarning.

    >>> @renamed(limit="duration")
    ... def wait(duration): ...
    >>> import warnings
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     wait(limit="2 h")
    >>> print(caught[0].message)
    wait(limit=...) is deprecated: use duration=
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        owner = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def accepting(*arguments: P.args, **keywords: P.kwargs) -> T:
            for old in names.keys() & keywords.keys():
                new = names[old]
                if new in keywords:
                    raise TypeError(f"{owner} got {new}= and {old}=, its old name. Keep {new}=.")
                warnings.warn(f"{owner}({old}=...) is deprecated: use {new}=", DeprecationWarning, stacklevel=2)
                keywords[new] = keywords.pop(old)
            return function(*arguments, **keywords)

        return accepting

    return decorate


def answer(name: str, habits: Mapping[str, str], known: Mapping[str, Any]) -> str:
    """Return the answer to `name`, with a space before it; an empty string if no known name is near.

    >>> answer("epochs", TRAINER, {}), answer("max_epoch", {}, {"max_epochs": 1}), answer("x", {}, {})
    (" Did you mean 'max_epochs'?", " Did you mean 'max_epochs'?", '')
    """
    return f" {habits[name]}" if name in habits else nearest(name, known)


def moment_meant(name: str, known: Collection[str]) -> str:
    """Return ``" Did you mean 'on_step_end'?"`` for a hook that does not exist, by habit or by spelling; else an empty string.

    >>> moment_meant("on_train_batch_end", ["on_batch_end", "on_epoch_end"])
    " Did you mean 'on_batch_end'?"
    """
    habit = MOMENTS.get(name)
    return f" Did you mean {habit!r}?" if habit in known else nearest(name, known)


def advised(habits: Mapping[str, str], *, refused: Collection[str] = ()) -> Callable[[type[T]], type[T]]:
    """Answer a missing attribute of a class from a table of habits. Neither ``dir()`` nor a type checker sees the names.

    Args:
        habits: The answer by name.
        refused: Missing attributes that cannot be set either.
    """

    def missing(owner: object, name: str) -> Any:
        if name in habits and not hasattr(type(owner), name):
            raise AttributeError(f"a {type(owner).__name__} has no {name!r}: {habits[name]}", name=name, obj=owner)
        return object.__getattribute__(owner, name)  # raises the error of Python, or of a property, again

    def put(owner: object, name: str, value: object) -> None:
        if name in refused and not hasattr(owner, name):
            missing(owner, name)
        object.__setattr__(owner, name, value)

    def decorate(kind: type[T]) -> type[T]:
        setattr(kind, "__getattr__", missing)  # noqa: B010  # in the class, it would hide wrong names from type checkers
        if refused:
            setattr(kind, "__setattr__", put)  # noqa: B010
        return kind

    return decorate
