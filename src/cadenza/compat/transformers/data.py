"""Loaders for the data sets of a trainer of transformers: their columns, collators and samplers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from cadenza.compat.transformers.loss import base_model
from cadenza.compat.transformers.originals import original
from cadenza.errors import AdapterError, DataError, add_note

Collator = Callable[[Any], Any]


class Data:
    """The data sets of a trainer as loaders.

    Args:
        arguments: The ``TrainingArguments``.
        model: The model. Its ``forward`` determines the kept columns.
        collator: The collator; None takes transformers' default.
        processing_class: The tokenizer or processor.
    """

    def __init__(self, arguments: Any, model: nn.Module, collator: Callable[[Any], Any] | None, processing_class: Any) -> None:
        self.arguments: Any = arguments
        self.processing_class: Any = processing_class
        self.label_names: list[str] = label_names(arguments, model)
        self.collator: Callable[[Any], Any] = collator or _default_collator(processing_class)
        names = [*inspect.signature(base_model(model).forward).parameters, "label", "label_ids", *self.label_names]
        self.columns: list[str] = list(dict.fromkeys(names))
        self._model_name = type(model).__name__

    def training(self, dataset: Any) -> DataLoader[Any]:
        """Return the training loader. Its order depends on ``data_seed``, or else on ``seed``."""
        given, size = self.arguments, self.arguments.per_device_train_batch_size
        return self._loader(dataset, size, self._training_sampler(dataset, size * given.gradient_accumulation_steps))

    def evaluation(self, dataset: Any) -> DataLoader[Any]:
        """Return the loader of an evaluation, in the order of the data set."""
        sampler = None if _is_stream(dataset) else SequentialSampler(dataset)
        return self._loader(dataset, self.arguments.per_device_eval_batch_size, sampler)

    def _loader(self, dataset: Any, batch_size: int, sampler: Any) -> DataLoader[Any]:
        given, workers = self.arguments, self.arguments.dataloader_num_workers
        dataset, collator = self._without_unused_columns(dataset)
        options: dict[str, Any] = {} if _is_stream(dataset) else {"sampler": sampler, "drop_last": given.dataloader_drop_last}
        if workers:
            options |= {"prefetch_factor": given.dataloader_prefetch_factor, "in_order": given.dataloader_in_order}
            options |= {"persistent_workers": given.dataloader_persistent_workers}
            options |= {"multiprocessing_context": given.dataloader_multiprocessing_context}
        return DataLoader(
            dataset,
            batch_size,
            collate_fn=collator,
            num_workers=workers,
            pin_memory=given.dataloader_pin_memory and torch.cuda.is_available(),
            **options,
        )

    def _training_sampler(self, dataset: Any, group: int) -> Any:
        given = self.arguments
        strategy = given.train_sampling_strategy
        if strategy not in ("random", "sequential", "group_by_length"):
            raise AdapterError(
                f"TrainingArguments(train_sampling_strategy={strategy!r}) cannot be used: its sampler deals batches to ranks "
                "itself. Use 'random', 'sequential' or 'group_by_length'."
            )
        if _is_stream(dataset):
            return None
        if strategy == "sequential":
            return SequentialSampler(dataset)
        generator = torch.Generator().manual_seed(given.seed if given.data_seed is None else given.data_seed)
        if strategy == "random":
            return RandomSampler(dataset, generator=generator)
        named = getattr(dataset, "column_names", None) or ()
        lengths = dataset[given.length_column_name] if given.length_column_name in named else None
        first = None if self.processing_class is None else self.processing_class.model_input_names[0]
        kept = None if lengths is None else [*lengths]
        sampler = original("trainer_pt_utils.LengthGroupedSampler")
        return sampler(group, dataset=dataset, lengths=kept, model_input_name=first, generator=generator)

    def _without_unused_columns(self, dataset: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return a data set without columns unknown to the model, and its collator."""
        if not self.arguments.remove_unused_columns:
            return dataset, self.collator
        named = getattr(dataset, "column_names", None)
        if isinstance(named, list) and hasattr(dataset, "remove_columns"):  # of the package datasets
            kept = [column for column in named if column in self.columns]
            if not kept:
                raise no_columns(self._model_name, self.columns, named)
            return dataset.remove_columns([column for column in named if column not in kept]), self.collator
        return dataset, UsedColumns(self.collator, self.columns, self._model_name)


class UsedColumns:
    """A collator that drops entries unknown to the model."""

    def __init__(self, collator: Callable[[Any], Any], columns: Iterable[str], model: str = "the model") -> None:
        self.collator: Callable[[Any], Any] = collator
        self.columns: dict[str, None] = dict.fromkeys(columns)
        self.model: str = model

    def __call__(self, samples: list[Any]) -> Any:
        return self.collator([self._used(sample) for sample in samples])

    def _used(self, sample: Any) -> Any:
        if not isinstance(sample, Mapping):
            return sample
        used = {name: value for name, value in sample.items() if name in self.columns}
        if sample and not used:
            raise no_columns(self.model, self.columns, sample)
        return used


class Stacked:
    """transformers' collator without a tokenizer, with an error that explains how to pad samples."""

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return original("default_data_collator")(samples)
        except (RuntimeError, ValueError) as error:
            add_note(
                error,
                "The samples of a batch are stacked, and have different shapes, or values that are no numbers. Give "
                "trainer(...) a processing_class, which pads inputs, or a data_collator that pads, such as "
                "DataCollatorForLanguageModeling.",
            )
            raise


def no_columns(model: str, expected: Iterable[str], got: Iterable[str]) -> DataError:
    """Return the error for data without any column that the model accepts."""
    return DataError(
        f"no column of the data set is an argument of {model}.forward: expected some of {[*expected]}; got {[*got]}. Rename "
        "the columns, or give TrainingArguments(remove_unused_columns=False)."
    )


def label_names(arguments: Any, model: nn.Module) -> list[str]:
    """Return the names of the labels in a batch: those of the arguments, or of the model's ``forward``."""
    given: list[str] | None = arguments.label_names
    return list(original("utils.find_labels")(type(base_model(model)))) if given is None else given


def _default_collator(processing_class: Any) -> Collator:
    padded = (
        original("tokenization_utils_base.PreTrainedTokenizerBase"),
        original("feature_extraction_sequence_utils.SequenceFeatureExtractor"),
    )
    if isinstance(processing_class, padded):
        return cast("Collator", original("DataCollatorWithPadding")(processing_class))
    return Stacked()


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
