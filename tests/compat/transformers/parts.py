"""What the tests of transformers train: models, data and arguments without a download."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from cadenza import Callback, Run, Trainer, on
from cadenza.compat.transformers import trainer
from cadenza.loading import TensorBatches

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")


def gpt2(**options: Any) -> Any:
    """Return a GPT-2 of 2 layers, the same each time."""
    torch.manual_seed(0)
    given = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**given, **quiet, **options}))


def bert(**options: Any) -> Any:
    """Return a BERT of 1 layer for 2 classes, the same each time."""
    torch.manual_seed(0)
    given = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 2}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**{**given, **quiet, **options}))


class Texts(Dataset[dict[str, Any]]):
    """Texts of 12 tokens for a causal model. From a position on that differs, the labels are -100."""

    def __init__(self, count: int = 20) -> None:
        self.tokens = torch.randint(3, 32, (count, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        labels = self.tokens[index].clone()
        labels[3 + index % 9 :] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Made(Texts):
    """Samples that a function makes of the tokens and the index."""

    def __init__(self, make: Callable[[Tensor, int], dict[str, Any]], count: int = 20) -> None:
        super().__init__(count)
        self.make = make

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.make(self.tokens[index], index)


class Reviews(Dataset[dict[str, Any]]):
    """Token ids of 6 to 9 tokens and a class, as lists."""

    def __init__(self, count: int = 20) -> None:
        self.tokens = torch.randint(3, 32, (count, 9), generator=torch.Generator().manual_seed(1)).tolist()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.tokens[index][: 6 + index % 4]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "label": int(sum(ids) % 2)}


def tokenizer() -> Any:
    """Return a tokenizer of 32 words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, "[UNK]": 3, **{f"w{index}": index for index in range(4, 32)}}
    words_only = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    words_only.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words_only, pad_token="[PAD]", unk_token="[UNK]")


def arguments(folder: Path | str, **options: Any) -> Any:
    """Return TrainingArguments for the CPU: the order of the data set, one record a step, nothing saved."""
    given = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "optim": "adamw_torch",
        "lr_scheduler_type": "constant",
        "disable_tqdm": True,
        "seed": 1,
    }
    return transformers.TrainingArguments(**{**given, **options})


def made(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    """Return a trainer of 3 steps."""
    tokens = torch.randint(3, 32, (12, 8), generator=torch.Generator().manual_seed(1))
    batches = TensorBatches({"input_ids": tokens, "labels": tokens}, batch_size=4)
    given: dict[str, Any] = {"max_epochs": 1, "progress": False, **options}
    return Trainer(gpt2(), partial(torch.optim.SGD, lr=0.1), batches, directory=folder, callbacks=callbacks, **given)


def pretrained(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def results(given: Any) -> dict[str, float]:
    """Return an accuracy and the sums of what `compute_metrics` received."""
    hits = (given.predictions.argmax(-1) == given.label_ids).mean()
    weighted = given.label_ids * range(len(given.label_ids))
    return {"accuracy": float(hits), "count": len(given.label_ids), "labels": float(weighted.sum())}


def shuffled(folder: Path, **options: Any) -> Trainer:
    """Return a trainer with dropout, a shuffled order, accumulation, saves and a schedule, for 3 epochs."""
    order = {"train_sampling_strategy": "random", "gradient_accumulation_steps": 2, "num_train_epochs": 3}
    rates = {"lr_scheduler_type": "linear", "warmup_steps": 3, "optim": "adamw_torch_fused"}
    args = arguments(folder, save_strategy="steps", save_steps=4, **order, **rates)
    return trainer(gpt2(resid_pdrop=0.1), args, Texts(), **options)


@on(Callback.on_step_end, at=7)
def fail(run: Run) -> None:
    raise ZeroDivisionError("on purpose")


def continued(folder: Path) -> dict[str, Any]:
    """Return whether a run that failed ends with the weights of one that did not."""
    whole = shuffled(folder / "whole")
    whole.fit()
    with pytest.raises(ZeroDivisionError):
        shuffled(folder / "cut", callbacks=[fail]).fit()
    again = shuffled(folder / "cut")
    run = again.fit(resume="auto")
    resumed = [one.when.step for one in run.decisions if one.what == "resumed"]
    return {"resumed": resumed, "same": torch.equal(weights(again.model), weights(whole.model))}


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights of a model in one tensor."""
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def theirs(model: Any, args: Any, data: Any, **options: Any) -> Any:
    """Train with the trainer of transformers, and return it."""
    trainer = transformers.Trainer(model, args, train_dataset=data, **options)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return trainer


class Logs(transformers.TrainerCallback):  # type: ignore[misc]  # the package has no types here
    """Records what ``on_log`` is given, with the step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
        self.seen.append((state.global_step, dict(logs)))


def both(make: Callable[[], Any], args: Any, data: Any, evaluated: Any = None, **options: Any) -> tuple[Trainer, Run, Any]:
    """Train the same with a native trainer and with theirs; return the native one, its run, and theirs."""
    other = theirs(make(), args, data, eval_dataset=evaluated, **options)
    made = trainer(make(), args, data, evaluated, **options)
    return made, made.fit(), other


def values(run: Run, name: str) -> list[float]:
    return [value for _, value in run.history[name]]


def close(run: Run, other: Any, *names: str, tolerance: float = 2e-5) -> bool:
    """Return whether the values of a run are those that the trainer of transformers logged: "eval/loss" as "eval_loss"."""
    for name in names:
        ours, others = values(run, name), logged(other, name.removeprefix("train/").replace("/", "_"))
        if ours != pytest.approx(others, abs=tolerance, rel=0):
            return False
    return True


def logged(trainer: Any, name: str) -> Sequence[float]:
    """Return the values that the trainer of transformers logged under a name."""
    return [one[name] for one in trainer.state.log_history if name in one]
