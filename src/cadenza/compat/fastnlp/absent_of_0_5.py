"""What to use instead of the names of fastNLP 0.5, which fastNLP 1.0 removed too (see `cadenza.compat.absent`)."""

from __future__ import annotations

from collections.abc import Mapping

_HERE = "cadenza.compat.fastnlp"
_LOSS = "Compute the loss in the model: `train_step` returns a dict with `loss`, for example from `torch.nn.CrossEntropyLoss`."
_OPTIMIZER = f"Pass an optimizer such as `torch.optim.AdamW` with the model's parameters to `{_HERE}.Trainer`."
_LOADER = f"Use `{_HERE}.TorchDataLoader`."
_TESTER = f"Use `{_HERE}.Evaluator` and its `run`."
_RANKS = f"Start the script with torchrun and use `{_HERE}.Trainer`."
_FIELDS = f"Use `{_HERE}.FieldArray`; `{_HERE}.Collator` pads."
_SAMPLER = f"Use a sampler of torch, or a `batch_sampler` of `{_HERE}.TorchDataLoader`."
_NAMES = "Write the names of the fields as plain strings: the arguments of the model's `torch.nn.Module.forward` name them."
_MODEL = f"Write the model with `torch.nn`; `{_HERE}.models.torch.CNNText` is an example."
_METRIC = f"Use a metric of the package torchmetrics, or one derived from `{_HERE}.Metric`."

ABSENT_OF_0_5: Mapping[str, Mapping[str, str]] = {
    "api": {"*": "Load a model of the package transformers and use `cadenza.Trainer.predict`."},
    "automl": {"*": "Write the model with `torch.nn`."},
    "core._logger": {"*": f"Use `{_HERE}.logger`."},
    "core._parallel_utils": {"*": _RANKS},
    "core.batch": {"* BatchIter DataSetIter TorchLoaderIter": _LOADER},
    "core.callback": {
        "*": f"This is fastNLP 0.5. Derive callbacks from `{_HERE}.Callback`; its hooks have other names and arguments.",
        "CallbackException": "Raise an exception of your own, derived from `Exception`.",
        "CheckPointCallback SaveModelCallback": f"Use `{_HERE}.CheckpointCallback`.",
        "ControlC": f"Pass `catch_KeyboardInterrupt=True` to `{_HERE}.Trainer`.",
        "EarlyStopError": f"Raise `{_HERE}.EarlyStopException`.",
        "EvaluateCallback": f"Use `{_HERE}.MoreEvaluateCallback`.",
        "GradientClipCallback": f"Use `{_HERE}.TorchGradClipCallback`.",
        "LRFinder": "Use `cadenza.callbacks.FindLearningRate`.",
        "LRScheduler": f"Use `{_HERE}.LRSchedCallback`.",
        "TensorboardCallback": "Use `cadenza.sinks.TensorBoard`.",
        "WarmupCallback": f"Use `{_HERE}.TorchWarmupCallback`.",
    },
    "core.collate_fn": {"* ConcatCollateFn": f"Use `{_HERE}.Collator`."},
    "core.const": {"* Const": _NAMES},
    "core.dist_trainer": {"* DistTrainer get_local_rank": _RANKS},
    "core.field": {"* AutoPadder EngChar2DPadder": _FIELDS},
    "core.fieldarray": {"*": _FIELDS},
    "core.instance": {"*": f"Use `{_HERE}.Instance`."},
    "core.losses": {
        "* BCELoss CMRC2018Loss CrossEntropyLoss L1Loss LossBase LossFunc LossInForward MSELoss NLLLoss": _LOSS,
    },
    "core.optimizer": {"* Adam AdamW Optimizer SGD": _OPTIMIZER},
    "core.predictor": {"* Predictor": "Use `cadenza.Trainer.predict`."},
    "core.sampler": {"* BucketSampler ConstantTokenNumSampler Sampler": _SAMPLER},
    "core.tester": {"* Tester": _TESTER},
    "core.trainer": {"*": f"Use `{_HERE}.Trainer`."},
    "models.base_model": {"*": "Derive the model from `torch.nn.Module`."},
    "models.bert": {"*": "Use a model of the package transformers; it is a `torch.nn.Module`."},
    "models.biaffine_parser": {"*": _MODEL},
    "models.cnn_text_classification": {"*": f"Import `CNNText` from `{_HERE}.models.torch`."},
    "models.sequence_labeling": {"*": _MODEL},
    "models.snli": {"*": _MODEL},
    "models.star_transformer": {"*": _MODEL},
    "models.seq2seq_generator": {"*": _MODEL},
    "models.seq2seq_model": {"*": _MODEL},
    "models": {
        "BaseModel": "Derive the model from `torch.nn.Module`.",
        "CNNText": f"Import it from `{_HERE}.models.torch`.",
        "Seq2SeqModel SeqLabeling AdvSeqLabel BiaffineParser SequenceGeneratorModel": _MODEL,
    },
}

METRICS_OF_0_5: Mapping[str, str] = {
    "_get_encoding_type_from_tag_vocab _compute_f_pre_rec _bio_tag_to_spans _bioes_tag_to_spans _bmes_tag_to_spans "
    "_bmeso_tag_to_spans": f"Use `{_HERE}.SpanFPreRecMetric`.",
    "seq_len_to_mask": "Compare `torch.arange` with the lengths.",
    "AccuracyMetric": f"Use `{_HERE}.Accuracy`.",
    "CMRC2018Metric": _METRIC,
    "ConfusionMatrixMetric": "Use `cadenza.callbacks.ConfusionMatrix`.",
    "MetricBase": f"Derive the metric from `{_HERE}.Metric`, with `update`, `get_metric` and `reset`.",
}

UTILS_OF_0_5: Mapping[str, str] = {
    "_move_model_to_device": f"Pass `device=` to `{_HERE}.Trainer`, or use `torch.nn.Module.to`.",
    "_get_func_signature": "Use `inspect.signature`.",
    "_get_model_device": "Read the `torch.Tensor.device` of a parameter.",
    "_move_dict_value_to_device": f"Use `{_HERE}.core.drivers.Driver.move_data_to_device`.",
    "get_seq_len": "Call `torch.Tensor.sum` on the mask.",
}

CORE_OF_0_5: Mapping[str, str] = {"init_logger_dist": "Remove it: `cadenza.Run.is_main` says which process prints."}
