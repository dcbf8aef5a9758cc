"""What each class takes: fastNLP's arguments, in fastNLP's order, with fastNLP's defaults."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cadenza.compat import fastnlp
from cadenza.compat.fastnlp import EarlyStopException

SAVED = {"only_state_dict": True, "model_save_fn": None}
PROGRESS = {"print_every": 1, "loss_round_ndigit": 6, "monitor": None, "larger_better": True, "format_json": True}
MONITOR = {"monitor": None, "larger_better": True}
NEEDED = inspect.Parameter.empty

WANTED: dict[str, dict[str, Any]] = {
    "CheckpointCallback": {
        "folder": None,
        "every_n_epochs": None,
        "every_n_batches": None,
        "last": False,
        "topk": 0,
        "on_exceptions": EarlyStopException,
        **MONITOR,
        **SAVED,
        "save_object": "model",
        "save_evaluate_results": True,
    },
    "TopkSaver": {"topk": 0, **MONITOR, "folder": None, "save_object": "model", **SAVED, "save_evaluate_results": True},
    "ProgressCallback": {**PROGRESS, "extra_show_keys": None},
    "RawTextCallback": {**PROGRESS, "extra_show_keys": None},
    "LRSchedCallback": {"scheduler": NEEDED, "step_on": "batch"},
    "LoadBestModelCallback": {
        **MONITOR,
        "only_state_dict": True,
        "save_folder": None,
        "model_save_fn": None,
        "model_load_fn": None,
        "delete_after_train": True,
    },
    "EarlyStopCallback": {**MONITOR, "patience": 10},
    "MoreEvaluateCallback": {
        "dataloaders": NEEDED,
        "metrics": NEEDED,
        "evaluate_every": -1,
        "watch_monitor": None,
        "watch_monitor_larger_better": True,
        "evaluate_fn": None,
        "num_eval_sanity_batch": 2,
        "topk": 0,
        "topk_monitor": None,
        "topk_larger_better": True,
        "folder": None,
        "only_state_dict": True,
        "save_object": "model",
        "model_save_fn": None,
        "save_evaluate_results": True,
        "save_kwargs": None,
    },
    "FitlogCallback": {**MONITOR, "log_exception": True, "log_loss_every": 0},
    "TimerCallback": {"print_every": -1, "time_ndigit": 3},
    "TorchWarmupCallback": {"warmup": 0.1, "schedule": "linear"},
    "TorchGradClipCallback": {"clip_value": 1, "clip_type": "norm", "parameters": None},
    "ResultsMonitor": {"monitor": NEEDED, "larger_better": True},
    "HasMonitorCallback": {"monitor": NEEDED, "larger_better": NEEDED, "must_have_monitor": False},
    "ExecuteOnceBetterMonitor": {"monitor": NEEDED, "larger_better": NEEDED, "execute_fn": NEEDED},
    "Trainer": {
        "model": NEEDED,
        "train_dataloader": NEEDED,
        "optimizers": NEEDED,
        "driver": "auto",
        "device": "cpu",
        "n_epochs": 20,
        "evaluate_dataloaders": None,
        "batch_step_fn": None,
        "evaluate_batch_step_fn": None,
        "train_fn": None,
        "evaluate_fn": None,
        "callbacks": None,
        "metrics": None,
        "evaluate_every": -1,
        "input_mapping": None,
        "output_mapping": None,
        "model_wo_auto_param_call": False,
        "accumulation_steps": 1,
        "fp16": False,
        **MONITOR,
        "n_batches": -1,
        "overfit_batches": 0,
        "marker": None,
    },
    "Evaluator": {
        "model": NEEDED,
        "dataloaders": None,
        "metrics": None,
        "driver": "auto",
        "device": None,
        "evaluate_batch_step_fn": None,
        "evaluate_fn": None,
        "input_mapping": None,
        "output_mapping": None,
        "model_wo_auto_param_call": False,
        "fp16": False,
        "verbose": 1,
    },
    "Trainer.run": {
        "num_train_batch_per_epoch": -1,
        "num_eval_batch_per_dl": -1,
        "num_eval_sanity_batch": 2,
        "resume_from": None,
        "resume_training": True,
        "catch_KeyboardInterrupt": None,
    },
    "Trainer.save_model": {"folder": NEEDED, "only_state_dict": False, "model_save_fn": None},
    "Trainer.load_model": {"folder": NEEDED, "only_state_dict": True, "model_load_fn": None, "strict": True},
    "Trainer.save_checkpoint": {"folder": NEEDED, **SAVED},
    "Trainer.load_checkpoint": {"folder": NEEDED, "resume_training": True, "only_state_dict": True, "model_load_fn": None},
}


@pytest.mark.parametrize("name", WANTED)
def test_a_class_has_the_signature_of_fastnlp(name: str) -> None:
    taken: Any = fastnlp
    for part in name.split("."):
        taken = getattr(taken, part)
    parameters = inspect.signature(taken).parameters
    named = [one for one in parameters.values() if one.name != "self" and one.kind is one.POSITIONAL_OR_KEYWORD]
    assert [(one.name, one.default) for one in named] == list(WANTED[name].items())


@pytest.mark.parametrize("name", ["RichCallback", "TqdmCallback"])
def test_all_progress_callbacks_have_the_same_signature(name: str) -> None:
    bar = getattr(fastnlp, name)(2, 3, "acc", False, False, "extra")
    assert (bar.print_every, bar.loss_round_ndigit, bar.monitor, bar.larger_better, bar.format_json) == (
        2,
        3,
        "acc",
        False,
        False,
    )
    assert bar.extra.keys == ["extra"]
