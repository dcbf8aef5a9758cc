"""Other models, data and collators of transformers, its callbacks, and two ranks, in a trainer made of TrainingArguments."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Run, Trainer
from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import SavePretrained, trainer
from cadenza.drivers import FsdpDriver
from cadenza.testing import launch
from tests.compat.transformers import parts
from tests.compat.transformers.parts import Logs, Made, Reviews, Texts, arguments, bert, close, gpt2, theirs, tokenizer, weights

transformers: Any = parts.transformers

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}

QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def answers() -> Any:
    torch.manual_seed(0)
    return transformers.BertForQuestionAnswering(transformers.BertConfig(vocab_size=32, **SMALL, **QUIET))


def translator() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=32, decoder_start_token_id=0, **sizes))


def images() -> Any:
    torch.manual_seed(0)
    config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL, **QUIET)
    return transformers.ViTForImageClassification(config)


class Plain(nn.Module):
    """A module that is none of transformers: its outputs are a tuple, with the loss first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 3)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x.float())
        return nn.functional.cross_entropy(logits, labels), logits


def plain() -> Any:
    torch.manual_seed(0)
    return Plain()


def question(tokens: Tensor, index: int) -> dict[str, Any]:
    return {"input_ids": tokens, "start_positions": index % 5, "end_positions": 5 + index % 5, "id": f"question {index}"}


def pair(tokens: Tensor, index: int) -> dict[str, Any]:
    return {"input_ids": tokens[: 5 + index % 3].tolist(), "labels": tokens[: 3 + index % 4].tolist()}


def image(tokens: Tensor, index: int) -> dict[str, Any]:
    return {"pixel_values": torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index)), "labels": index % 3}


def numbers(tokens: Tensor, index: int) -> dict[str, Any]:
    return {"x": tokens, "labels": int(tokens.sum() % 3), "unused": "text"}


def described(given: Any) -> dict[str, float]:
    """Return the shapes of what `compute_metrics` received."""
    predictions = given.predictions if isinstance(given.predictions, tuple) else (given.predictions,)
    labels = given.label_ids if isinstance(given.label_ids, tuple) else (given.label_ids,)
    widths = sum(one.shape[-1] for one in (*predictions, *labels))
    return {"arrays": 10 * len(predictions) + len(labels), "widths": widths, "sum": float(sum(one.sum() for one in labels))}


@pytest.mark.parametrize(
    ("make", "sample", "given"),
    [
        pytest.param(answers, question, {}, id="two labels and two predictions"),
        pytest.param(translator, pair, {"dataloader_num_workers": 1}, id="encoder and decoder, padded, a worker"),
        pytest.param(images, image, {"dataloader_drop_last": True, "per_device_train_batch_size": 3}, id="images"),
        pytest.param(plain, numbers, {"gradient_accumulation_steps": 3}, id="a plain module, accumulated"),
        pytest.param(gpt2, lambda tokens, index: {"input_ids": tokens, "labels": tokens}, {"bf16": True}, id="bf16"),
    ],
)
def test_results_are_those_of_their_trainer(
    make: Callable[[], Any], sample: Callable[[Tensor, int], dict[str, Any]], given: dict[str, Any], tmp_path: Path
) -> None:
    args = arguments(tmp_path, optim="sgd", eval_strategy="epoch", **given)
    pads = transformers.DataCollatorForSeq2Seq(tokenizer(), label_pad_token_id=-100) if make is translator else None
    options: dict[str, Any] = {"data_collator": pads, "compute_metrics": described}
    _, run, other = parts.both(make, args, Made(sample, 12), Made(sample, 8), **options)
    tolerance = 2e-2 if "bf16" in given else 2e-5
    assert close(run, other, "train/loss", *(f"eval/{one}" for one in ("loss", "arrays", "widths", "sum")), tolerance=tolerance)


def test_samples_are_masked_by_a_collator_with_random_numbers(tmp_path: Path) -> None:
    words = tokenizer()
    words.add_special_tokens({"mask_token": "[UNK]"})
    masked = transformers.DataCollatorForLanguageModeling(words, mlm_probability=0.3)
    data = Made(lambda tokens, index: {"input_ids": tokens})

    def losses(workers: int) -> list[float]:
        torch.manual_seed(0)
        model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=32, **SMALL, **QUIET))
        args = arguments(tmp_path / str(workers), dataloader_num_workers=workers)
        return parts.values(trainer(model, args, data, data_collator=masked).fit(), "train/loss")

    assert losses(0) == losses(1)


class Events(transformers.TrainerCallback):  # type: ignore[misc]  # the package has no types here
    """The events of a run with the numbers that a callback sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.arguments: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.arguments = args
        every = state.logging_steps, state.eval_steps, state.save_steps
        self.seen.append(("begin", state.max_steps, state.num_train_epochs, *every))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        named = {name: round(value, 4) for name, value in logs.items() if not name.endswith(("runtime", "per_second", "flos"))}
        if "lr/0" not in named:  # what LogTraining adds
            self.seen.append(("log", state.global_step, round(state.epoch, 3), named))

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        self.seen.append(("evaluate", state.global_step, round(metrics["eval_loss"], 4), metrics["eval_accuracy"]))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", state.global_step, state.best_metric))


def test_their_callbacks_see_the_arguments_and_the_events_of_their_trainer(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "accuracy", "learning_rate": 0.0}
    options: dict[str, Any] = {"processing_class": tokenizer(), "compute_metrics": parts.results}

    def given(name: str) -> Any:
        return arguments(tmp_path / name, optim="sgd", num_train_epochs=8, logging_steps=4, **chosen, **best)

    one, other = Events(), Events()
    theirs(
        bert(), given("theirs"), Reviews(), eval_dataset=Reviews(10), **options,
        callbacks=[one, transformers.EarlyStoppingCallback(2)],
    )  # fmt: skip
    args = given("ours")
    made = trainer(bert(), args, Reviews(), Reviews(10), **options, callbacks=[other, transformers.EarlyStoppingCallback(2)])
    run: Run = made.fit()
    assert other.arguments is args
    assert run.progress.step == 9  # EarlyStoppingCallback ended it
    assert other.seen == one.seen


def test_their_callbacks_see_one_log_at_the_end_of_an_epoch_that_is_cut_short(tmp_path: Path) -> None:
    args = arguments(tmp_path, optim="sgd", max_steps=13, logging_strategy="epoch", max_grad_norm=0.0)
    there, seen = Logs(), Logs()
    theirs(gpt2(), args, Texts(), callbacks=[there])
    trainer(gpt2(), args, Texts(), callbacks=[seen]).fit()
    assert [(step, {*logs}) for step, logs in seen.seen] == [(step, {*logs}) for step, logs in there.seen]
    assert [step for step, logs in seen.seen if "grad_norm" in logs] == [10, 13]


def test_the_trackers_of_report_to_are_their_callbacks(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    args = arguments(tmp_path, report_to=["tensorboard"])
    run = trainer(gpt2(), args, Texts(4)).fit()
    assert run.outcome is not None
    assert list(tmp_path.rglob("events.out.tfevents*"))


# -- two ranks -------------------------------------------------------------------------------------


def new_process() -> None:
    """Forget what accelerate knew in the process that was forked."""
    torch.set_num_threads(1)
    state = import_module("accelerate.state")  # it has no types
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.PartialState._reset_state()


def classified(folder: Path) -> Trainer:
    args = arguments(folder, optim="sgd", eval_strategy="epoch", save_strategy="epoch", per_device_eval_batch_size=3)
    return trainer(bert(), args, Reviews(), Reviews(10), processing_class=tokenizer(), compute_metrics=parts.results)


def accumulated(folder: Path) -> Any:
    return arguments(folder, optim="sgd", gradient_accumulation_steps=2, max_steps=5)


def sharded(folder: Path) -> bool:
    """Return whether the folder that FSDP ranks wrote has the weights of the model."""
    one = parts.made(folder, Checkpoint("1 step"), SavePretrained(), max_epochs=2, driver=FsdpDriver("cpu"), seed=0)
    one.fit()
    whole = {name: weight.full_tensor() for name, weight in one.model.state_dict().items()}
    if not one.driver.is_main:
        return True
    found = parts.pretrained(folder / "checkpoints" / "last" / "pretrained")
    return all(torch.equal(weight, whole[name]) for name, weight in found.state_dict().items())


def test_two_ranks(tmp_path: Path) -> None:
    def work() -> dict[str, Any]:
        new_process()
        args = accumulated(tmp_path / "ours")
        other = theirs(gpt2(), accumulated(tmp_path / "theirs"), Texts())
        logs = Logs()
        own = trainer(gpt2(), args, Texts(), callbacks=[logs])
        run = own.fit()
        classes = classified(tmp_path / "classes")
        results = classes.fit()
        return {
            "ranks": run.driver.world_size,
            "losses": [value for _, value in run.history["train/loss"]],
            "theirs": list(parts.logged(other, "loss")),
            "logs": [logged["loss"] for _, logged in logs.seen if "loss" in logged],
            "weights": (weights(own.model) - weights(other.model)).abs().max().item(),
            "tokens": run.progress.tokens,
            "results": {name: results.history[f"eval/{name}"] for name in ("accuracy", "count", "labels", "loss")},
            "model": weights(classes.model),
            "continued": parts.continued(tmp_path / "continued"),
            "sharded": sharded(tmp_path / "sharded"),
        }

    ranks = launch(work)
    alone = classified(tmp_path / "alone").fit()
    for told in ranks:
        assert told["ranks"] == 2
        if told is ranks[0]:  # the others do not log there
            assert max(abs(one - other) for one, other in zip(told["losses"], told["theirs"], strict=True)) < 2e-5
            assert max(abs(one - other) for one, other in zip(told["logs"], told["theirs"], strict=True)) < 2e-5
        assert told["weights"] < 5e-6
        assert told["tokens"] == 9 * 2 * 2 * 12  # 5 batches in the first epoch, 4 in the second, on each of 2 ranks
        for name in ("count", "labels"):  # nothing of the order or the number depends on the ranks
            assert [value for _, value in told["results"][name]] == [value for _, value in alone.history[f"eval/{name}"]]
        assert told["continued"] == {"resumed": [4], "same": True}
        assert told["sharded"]
    assert ranks[0]["results"] == ranks[1]["results"]
    folder = tmp_path / "classes" / "checkpoints" / "last" / "pretrained"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert torch.equal(weights(model), ranks[0]["model"])
    assert torch.equal(ranks[1]["model"], ranks[0]["model"])
