"""A native trainer made of TrainingArguments does what the trainer of transformers does."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader

from cadenza import Run, Trainer
from cadenza.callbacks import Checkpoint, ClipGradients, Evaluate, LogTraining
from cadenza.compat.transformers import trainer
from cadenza.compat.transformers.fields import FIELDS, check_fields
from cadenza.errors import AdapterError, CallbackError, DataError
from tests.compat.transformers import parts
from tests.compat.transformers.parts import Reviews, Texts, arguments, bert, both, close, gpt2, logged, theirs, values, weights

transformers: Any = parts.transformers


def steps(run: Run, name: str) -> list[float]:
    return [step for step, _ in run.history[name]]


# -- the table of fields, and mistakes ----------------------------------------------------------------------------------


def test_the_table_has_every_field_of_the_installed_arguments_and_an_earlier_version_is_an_error() -> None:
    named = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert [name for name in named if name not in FIELDS] == []
    assert [name for name in FIELDS if name not in named] == []

    @dataclasses.dataclass
    class Earlier:
        output_dir: str = "out"
        group_by_length: bool = False

    with pytest.raises(
        AdapterError, match=r"of transformers 5\.23; those of the installed version have no .*train_sampling_strategy"
    ):
        check_fields(Earlier())


MISTAKES: list[tuple[type[Exception], str, dict[str, Any]]] = [  # "args" has the fields of TrainingArguments
    (
        TypeError,
        r"model must be a torch.nn.Module; got 'gpt2'. Give AutoModelForCausalLM.from_pretrained\('gpt2'\)",
        {"model": "gpt2"},
    ),
    (TypeError, "train_dataset must be a data set; got a DataL", {"train_dataset": DataLoader(Texts(4))}),
    (TypeError, "no argument 'compute_loss'. Give compute_loss_func", {"compute_loss": max}),
    (TypeError, "no argument 'tokenizer'. Give it as processing_class=", {"tokenizer": max}),
    (CallbackError, r"callbacks\[0\] is not a callback: .*'EarlyStopping'", {"callbacks": ["EarlyStopping"]}),
    (ValueError, "expected either model or model_init; got both", {"model_init": gpt2}),
    (
        TypeError,
        "got both. Leave one out",
        {
            "optimizers": (torch.optim.SGD(gpt2().parameters()), None),
            "optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1}),
        },
    ),
    (
        TypeError,
        "save_strategy='best'.* needs metric_for_best_model",
        {"args": {"save_strategy": "best", "eval_strategy": "epoch"}},
    ),
    (
        TypeError,
        r"compute_metrics\(prediction, compute_result\); got compute_metrics\(given\)",
        {"compute_metrics": lambda given: {}, "args": {"eval_strategy": "epoch", "batch_eval_metrics": True}},
    ),
    (
        AdapterError,
        r"(?s)auto_find_batch_size=True\) has no effect. Add FindBatchSize.*push_to_hub=True"
        r".*accelerator_config=AcceleratorConfig\(split_batches=True",
        {"args": {"auto_find_batch_size": True, "push_to_hub": True, "accelerator_config": {"split_batches": True}}},
    ),
    (AdapterError, "optim='adalomo'.* cannot be used", {"args": {"optim": "adalomo"}}),
    (
        AdapterError,
        "lr_scheduler_type='greedy'.* cannot be used",
        {"args": {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"}},
    ),
    (
        AdapterError,
        "train_sampling_strategy='batch_rebalance'.* cannot be used",
        {"args": {"train_sampling_strategy": "batch_rebalance"}},
    ),
]


@pytest.mark.parametrize(("kind", "message", "given"), MISTAKES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_mistake_is_an_error_when_the_trainer_is_made(kind: Any, message: str, given: Any, tmp_path: Path) -> None:
    made = {"model": gpt2(), "train_dataset": Texts(4), "eval_dataset": Texts(4), **given}
    made["args"] = arguments(tmp_path, **given.get("args", {}))
    with pytest.raises(kind, match=message):
        trainer(**made)


def told_by(args: Any) -> str:
    """Return the warnings of `trainer`. Those of packages that transformers imports meanwhile are among them."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(gpt2(), args, Texts())
    return "\n".join(str(one.message) for one in told)


def test_a_field_that_changes_no_result_is_a_warning_and_so_are_those_of_a_subclass(tmp_path: Path) -> None:
    assert "has no effect" not in told_by(arguments(tmp_path))
    told = told_by(arguments(tmp_path, skip_memory_metrics=False))
    assert "TrainingArguments(skip_memory_metrics=False) has no effect." in told
    given = {"output_dir": str(tmp_path), "use_cpu": True}
    told = told_by(transformers.Seq2SeqTrainingArguments(generation_num_beams=2, **given))
    assert "generation_num_beams=2) has no effect. Seq2SeqTrainingArguments has this field" in told
    with pytest.raises(AdapterError, match=r"predict_with_generate=True\) has no effect. Evaluations compute logits"):
        trainer(gpt2(), transformers.Seq2SeqTrainingArguments(predict_with_generate=True, **given), Texts(4))


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda tokens, index: {"text": "a", "id": index}, DataError, r"no column .* of GPT2LMHeadModel.*got \['text', 'id'\]"),
        (lambda tokens, index: {"input_ids": tokens[: 3 + index]}, RuntimeError, "equal size"),
    ],
)
def test_data_that_the_model_cannot_take_is_an_error_with_advice(make: Any, kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=message) as error:
        trainer(gpt2(), arguments(tmp_path), parts.Made(make)).fit()
    notes = "".join(getattr(error.value, "__notes__", []))
    assert kind is DataError or "a data_collator that pads, such as DataCollatorForLanguageModeling" in notes


def test_results_that_are_no_numbers_are_named_and_left_out(tmp_path: Path) -> None:
    def fit(results: Any) -> Any:
        args = arguments(tmp_path / type(results).__name__, eval_strategy="steps", eval_steps=1)
        return trainer(gpt2(), args, Texts(4), Texts(2), compute_metrics=lambda given: results).fit()

    with pytest.warns(UserWarning, match="compute_metrics returned 'table', a list: only numbers are results") as told:
        run = fit({"eval_half": torch.tensor(0.5), "table": [1, 2]})
    assert run.history["eval/half"] == [(1, 0.5), (2, 0.5)]
    assert len([one for one in told if "'table'" in str(one.message)]) == 1
    with pytest.raises(TypeError, match="expected a mapping of names to numbers from compute_metrics; got None"):
        fit(None)


# -- the same numbers as their trainer -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"num_train_epochs": 2}, id="adamw"),
        pytest.param({"optim": "sgd", "max_grad_norm": 0.0}, id="not clipped"),
        pytest.param({"optim": "sgd", "lr_scheduler_type": "linear", "warmup_steps": 0.3, "max_grad_norm": 0.05}, id="sgd"),
        pytest.param({"gradient_accumulation_steps": 4, "num_train_epochs": 1.4, "optim": "sgd"}, id="accumulated"),
        pytest.param({"optim": "adafactor", "lr_scheduler_type": "cosine", "max_steps": 7}, id="adafactor"),
        pytest.param({"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2, "optim": "sgd"}, id="smoothed"),
        pytest.param({"neftune_noise_alpha": 5.0, "optim": "sgd", "activation_checkpointing": True}, id="neftune"),
    ],
)
def test_losses_rates_and_norms_are_those_of_their_trainer(given: dict[str, Any], tmp_path: Path) -> None:
    own, run, other = both(gpt2, arguments(tmp_path, **given), Texts())
    noisy = "neftune_noise_alpha" in given  # drawn from another position of the generator
    assert close(run, other, "train/loss", tolerance=0.2 if noisy else 2e-5)
    assert noisy or close(run, other, "train/grad_norm", tolerance=1e-3)
    rates = pytest.approx(logged(other, "learning_rate")[1:], abs=1e-9, rel=0)
    assert values(run, "train/lr/0")[:-1] == rates  # ours is that of the next step
    if given.get("optim") == "sgd" and not noisy:  # the others divide by the roots of small gradients
        assert torch.allclose(weights(own.model), weights(other.model), atol=5e-6)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_without_an_optimizer_are_dropped_and_part_of_the_norm(accumulate: int, tmp_path: Path) -> None:
    class Unfreeze(transformers.TrainerCallback):  # type: ignore[misc]  # the package has no types here
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **keywords: Any) -> None:
            model.transformer.h[0].requires_grad_(state.global_step > 0)

    def frozen() -> Any:
        model = gpt2()
        model.transformer.h[0].requires_grad_(False)
        return model

    steps = {"gradient_accumulation_steps": accumulate, "num_train_epochs": 2}
    args = arguments(tmp_path, optim="sgd", learning_rate=0.3, max_grad_norm=0.05, **steps)
    own, run, other = both(frozen, args, Texts(), callbacks=[Unfreeze()])
    assert close(run, other, "train/grad_norm", tolerance=1e-3)
    assert torch.allclose(weights(own.model), weights(other.model), atol=5e-6)


@pytest.mark.parametrize("package", [False, True], ids=["a data set", "of the package datasets"])
def test_a_classifier_pads_its_batches_and_reports_the_results_of_compute_metrics(package: bool, tmp_path: Path) -> None:
    data: Any = Reviews()
    if package:  # it loses the columns that the model does not take
        datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")
        data = datasets.Dataset.from_list([{**Reviews()[index], "text": f"review {index}"} for index in range(20)])
    args = arguments(tmp_path, optim="sgd", eval_strategy="steps", eval_steps=4, eval_delay=8)
    options: dict[str, Any] = {"processing_class": parts.tokenizer(), "compute_metrics": parts.results}
    _, run, other = both(bert, args, data, Reviews(10), **options)

    assert steps(run, "eval/accuracy") == [one["step"] for one in other.state.log_history if "eval_accuracy" in one] == [8, 10]
    assert values(run, "eval/accuracy") == logged(other, "eval_accuracy")
    assert values(run, "eval/count") == [10, 10]
    assert close(run, other, "eval/loss", "train/loss")
    if package:
        with pytest.raises(
            Exception, match=r"no column of the data set is an argument of BertForSequenceClassification\.forward"
        ):
            trainer(bert(), args, datasets.Dataset.from_dict({"text": ["a"]}), Reviews(10), **options)


def test_accumulated_batches_give_the_gradient_of_the_joint_batch(tmp_path: Path) -> None:
    one = trainer(gpt2(), arguments(tmp_path / "a", optim="sgd", per_device_train_batch_size=20), Texts())
    several = trainer(gpt2(), arguments(tmp_path / "b", optim="sgd", gradient_accumulation_steps=10), Texts())
    joint, accumulated = one.fit(), several.fit()

    assert torch.allclose(weights(one.model), weights(several.model), atol=1e-7)
    assert values(joint, "train/loss") == pytest.approx(values(accumulated, "train/loss"), abs=1e-6, rel=0)
    assert accumulated.progress.tokens == 20 * 12


def test_predictions_of_other_lengths_are_padded_as_theirs(tmp_path: Path) -> None:
    def shapes(given: Any) -> dict[str, float]:
        texts = given.predictions.shape[1]
        return {"width": texts, "padded": float((given.label_ids == -100).sum()), "inputs": given.inputs.shape[1]}

    class Uneven(Texts):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {name: one[: 8 + index // 4] for name, one in super().__getitem__(index).items()}

    chosen: dict[str, Any] = {"include_for_metrics": ["inputs"], "eval_accumulation_steps": 2}
    args = arguments(tmp_path, eval_strategy="epoch", **chosen)
    options: dict[str, Any] = {
        "compute_metrics": shapes,
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
    }
    _, run, other = both(gpt2, args, Texts(4), {"a": Uneven(), "b": Texts(8)}, **options)
    for name in ("width", "padded", "inputs"):
        assert values(run, f"eval_a/{name}") == logged(other, f"eval_a_{name}")
    assert close(run, other, "eval_a/loss", "eval_b/loss")


@pytest.mark.parametrize(
    "given",
    [
        {"eval_strategy": "epoch", "eval_delay": 2, "num_train_epochs": 4},
        {"eval_strategy": "epoch", "eval_delay": 1.5, "num_train_epochs": 2.5, "logging_strategy": "epoch"},
        {"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 9, "max_steps": 15, "logging_steps": 0.3},
        {"eval_strategy": "epoch", "eval_on_start": True, "num_train_epochs": 1.5},
    ],
)
def test_evaluations_and_records_are_at_the_steps_of_their_trainer(given: dict[str, Any], tmp_path: Path) -> None:
    _, run, other = both(gpt2, arguments(tmp_path, **given), Texts(), Texts(4))
    for ours, name in (("eval/loss", "eval_loss"), ("train/loss", "loss")):
        at = [one["step"] for one in other.state.log_history if name in one]
        assert at[0] > 0 or "eval_on_start" in given
        assert steps(run, ours) == [max(1, step) for step in at]  # the one at the start is in the record of the first step
    assert close(run, other, "eval/loss")


def test_a_schedule_by_results_steps_at_evaluations(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"}
    args = arguments(tmp_path, optim="sgd", learning_rate=5.0, lr_scheduler_kwargs={"patience": 0}, **chosen)
    _, run, other = both(gpt2, args, Texts(), Texts(4))
    rates = [group["lr"] for group in run.optimizers[0].param_groups]
    assert rates[0] == other.optimizer.param_groups[0]["lr"] < 5.0


def test_given_optimizers_model_init_and_loss_are_used(tmp_path: Path) -> None:
    def halved(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        assert outputs.logits is outputs["logits"]  # the outputs are the model's own
        logits = outputs.logits[:, :-1].flatten(0, 1)
        total = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
        return total / (2 * num_items_in_batch)

    args = arguments(tmp_path, gradient_accumulation_steps=2)
    other_model, model = gpt2(), gpt2()
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (other_model, model)]
    other = theirs(other_model, args, Texts(), optimizers=(optimizers[0], None), compute_loss_func=halved)
    made = trainer(
        args=args, train_dataset=Texts(), model_init=lambda: model, optimizers=(optimizers[1], None), compute_loss_func=halved
    )
    run = made.fit()

    assert close(run, other, "train/loss")
    assert torch.allclose(weights(model), weights(other_model), atol=1e-6)


@pytest.mark.parametrize("every", [0, 2])
def test_modes_are_those_of_their_trainer(every: int, tmp_path: Path) -> None:
    """They train all modules, and leave the mode of an evaluation that follows the last step."""
    given = {"eval_strategy": "steps", "eval_steps": every} if every else {}
    models, modes = (gpt2(), gpt2()), list[bool]()
    for model in models:
        model.transformer.drop.eval()
        model.transformer.drop.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    both(partial(next, iter(models)), arguments(tmp_path, max_steps=3, **given), Texts(), Texts(4) if every else None)
    assert modes[: len(modes) // 2] == modes[len(modes) // 2 :]
    assert modes[0]
    assert [one.training for one in models] == [not every] * 2


# -- what becomes of the arguments ---------------------------------------------------------------------------------------


def found(made: Trainer, kind: type[Any]) -> Any:
    return next(one for one in made.callbacks if isinstance(one, kind))


def test_strategies_are_schedules(tmp_path: Path) -> None:
    given: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 0.25, "save_strategy": "steps", "save_steps": 6}
    args = arguments(tmp_path, logging_steps=5, logging_first_step=True, max_grad_norm=0.5, save_total_limit=2, **given)
    made = trainer(gpt2(), args, Texts(), Texts(4))

    assert str(found(made, LogTraining).every) == "every 5 steps or at step 1"
    assert str(found(made, Evaluate).every) == "every 3 steps or at step 10"
    assert str(found(made, Checkpoint).every) == "every 6 steps"
    assert found(made, ClipGradients).max_norm == 0.5
    run = made.fit()
    assert steps(run, "train/loss") == [1, 5, 10]
    assert steps(run, "eval/loss") == [3, 6, 9, 10]
    saved = [one.data["step"] for one in run.decisions if one.what == "saved"]
    assert saved == [6, 10]
    folder = tmp_path / "checkpoints" / "last" / "pretrained"
    assert torch.equal(weights(parts.pretrained(folder)), weights(made.model))


def test_the_best_weights_are_in_the_model_after_the_run(tmp_path: Path) -> None:
    scores = iter([1.0, 3.0, 2.0] * 2)
    chosen: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    args = arguments(tmp_path, num_train_epochs=3, metric_for_best_model="score", save_total_limit=1, **chosen)
    made = trainer(gpt2(), args, Texts(), Texts(4), compute_metrics=lambda given: {"score": next(scores)})
    made.fit()

    best = parts.pretrained(tmp_path / "checkpoints" / "best" / "pretrained")
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000020"
    assert torch.equal(weights(best), weights(made.model))


def test_the_best_of_several_data_sets_is_kept(tmp_path: Path) -> None:
    scores = iter([3.0, 9.0, 1.0, 9.0, 2.0, 9.0])  # of "a", of "b", ...
    chosen: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "eval_a_score"}
    args = arguments(tmp_path, num_train_epochs=3, greater_is_better=False, save_only_model=True, **chosen)
    evaluated = {"a": Texts(4), "b": Texts(4)}
    run = trainer(gpt2(), args, Texts(), evaluated, compute_metrics=lambda given: {"score": next(scores)}).fit()

    assert values(run, "eval_a/score") == [3.0, 1.0, 2.0]
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000020"
    assert not (tmp_path / "checkpoints" / "best" / "state.json").read_text().count("optimizers")


def test_native_arguments_replace_those_of_the_trainer(tmp_path: Path) -> None:
    args = arguments(tmp_path / "unused", torch_compile=True, torch_compile_backend="eager")
    made = trainer(gpt2(), args, Texts(), max_steps=3, directory=tmp_path / "used", accumulate=2, compile=False)
    run = made.fit()
    assert (run.progress.step, run.progress.batch) == (3, 6)
    assert (tmp_path / "used" / "run.json").exists()
    assert not (tmp_path / "unused").exists()


def test_lengths_are_grouped_and_a_stream_needs_max_steps(tmp_path: Path) -> None:
    args = arguments(tmp_path / "a", train_sampling_strategy="group_by_length", per_device_train_batch_size=5)
    made = trainer(bert(), args, Reviews(80), processing_class=parts.tokenizer())
    widths = [batch["input_ids"].shape[1] for batch in made.loader]
    assert sorted(set(widths)) == [6, 7, 8, 9]

    class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Any:
            return (Texts()[index] for index in range(20))

    with pytest.raises(AdapterError, match="the training data has no length"):
        trainer(gpt2(), arguments(tmp_path / "b"), Stream())
    run = trainer(gpt2(), arguments(tmp_path / "c", max_steps=12), Stream()).fit()
    assert run.progress.step == 12


class EvaluatesAt(transformers.TrainerCallback):  # type: ignore[misc]
    """Requests evaluations, whatever the ``eval_strategy`` is."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        control.should_evaluate = state.global_step == 3

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **keywords: Any) -> None:
        self.seen.append((state.global_step, pytest.approx(metrics["eval_loss"], abs=1e-5)))


def test_a_callback_may_request_an_evaluation_that_no_strategy_asks_for(tmp_path: Path) -> None:
    args, home, here = arguments(tmp_path, eval_on_start=True), EvaluatesAt(), EvaluatesAt()
    theirs(gpt2(), args, Texts(10), eval_dataset=Texts(4), callbacks=[home])
    made = trainer(gpt2(), args, Texts(10), Texts(4), callbacks=[here])
    run = made.fit()
    assert [step for step, _ in here.seen] == [0, 3]
    assert here.seen == [(step, loss.expected) for step, loss in home.seen]
    assert [step for step, _ in run.history["eval/loss"]] == [1, 3]


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    assert parts.continued(tmp_path) == {"resumed": [4], "same": True}


def test_a_peft_model_trains_and_its_checkpoints_have_the_adapter(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")

    def lora() -> Any:
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return peft.get_peft_model(gpt2(), config)

    args = arguments(tmp_path, optim="sgd", gradient_accumulation_steps=2, save_strategy="steps", save_steps=2)
    other = theirs(lora(), arguments(tmp_path / "theirs", optim="sgd", gradient_accumulation_steps=2), Texts())
    trainer(lora(), args, Texts(), max_steps=2).fit()
    made = trainer(lora(), args, Texts())
    run = made.fit(resume="auto")

    assert close(run, other, "train/loss")
    folder = tmp_path / "checkpoints" / "last" / "pretrained"
    assert {one.name for one in folder.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    assert not (folder / "model.safetensors").exists()
    again = peft.PeftModel.from_pretrained(gpt2(), folder)
    assert torch.equal(weights(again), weights(made.model))
    assert all("lora" in name for name in load_file(folder.parent / "model.safetensors"))  # the base is left out
