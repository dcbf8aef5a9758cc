"""A native trainer made of TrainingArguments does what the trainer of transformers does."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint, ClipGradients, Evaluate, LogTraining
from cadenza.compat.transformers import trainer
from cadenza.compat.transformers.fields import FIELDS, check_fields
from cadenza.errors import AdapterError
from tests.compat.transformers.parts import (
    Reviews,
    Texts,
    arguments,
    bert,
    gpt2,
    logged,
    theirs,
    tokenizer,
    transformers,
    weights,
)


def values(run: Run, name: str) -> list[float]:
    return [value for _, value in run.history[name]]


def steps(run: Run, name: str) -> list[float]:
    return [step for step, _ in run.history[name]]


def close(ours: Sequence[float], others: Sequence[float], tolerance: float = 2e-5) -> bool:
    return len(ours) == len(others) and max(map(lambda one, other: abs(one - other), ours, others), default=0.0) < tolerance


# -- the table of fields ------------------------------------------------------------------------------------------------


def test_the_table_has_every_field_of_the_installed_arguments() -> None:
    named = [field.name for field in dataclasses.fields(transformers.TrainingArguments)]
    assert [name for name in named if name not in FIELDS] == []
    assert [name for name in FIELDS if name not in named] == []


def test_a_field_that_would_change_the_results_is_an_error_that_names_it(tmp_path: Path) -> None:
    args = arguments(tmp_path, auto_find_batch_size=True, push_to_hub=True, accelerator_config={"split_batches": True})
    with pytest.raises(AdapterError) as raised:
        trainer(gpt2(), args, Texts())
    said = str(raised.value)
    assert "auto_find_batch_size=True) has no effect. Add FindBatchSize" in said
    assert "push_to_hub=True" in said
    assert "accelerator_config=AcceleratorConfig(split_batches=True" in said


@pytest.mark.parametrize(
    "given",
    [
        {"optim": "adalomo"},
        {"lr_scheduler_type": "greedy", "eval_strategy": "epoch"},
        {"train_sampling_strategy": "batch_rebalance"},
    ],
)
def test_a_value_that_cannot_be_used_is_an_error(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=f"{next(iter(given))}='{next(iter(given.values()))}'.* cannot be used"):
        trainer(gpt2(), arguments(tmp_path, **given), Texts(), Texts())


def told_by(args: Any) -> str:
    """Return the warnings of `trainer`. Those of packages that transformers imports meanwhile are among them."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(gpt2(), args, Texts())
    return "\n".join(str(one.message) for one in told)


def test_a_field_that_changes_no_result_is_a_warning(tmp_path: Path) -> None:
    assert "TrainingArguments(skip_memory_metrics=False) has no effect." in told_by(
        arguments(tmp_path, skip_memory_metrics=False)
    )
    assert "has no effect" not in told_by(arguments(tmp_path))


def test_arguments_of_an_earlier_version_are_an_error_that_names_the_fields() -> None:
    @dataclasses.dataclass
    class Earlier:
        output_dir: str = "out"
        group_by_length: bool = False

    with pytest.raises(
        AdapterError, match=r"of transformers 5\.23; those of the installed version have no .*train_sampling_strategy"
    ):
        check_fields(Earlier())


def test_fields_of_a_subclass_are_named(tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path), "use_cpu": True, "generation_num_beams": 2}
    told = told_by(transformers.Seq2SeqTrainingArguments(**given))
    assert "generation_num_beams=2) has no effect. Seq2SeqTrainingArguments has this field" in told


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
    args = arguments(tmp_path, **given)
    other = theirs(gpt2(), args, Texts())
    own = trainer(gpt2(), args, Texts())
    run = own.fit()

    noisy = "neftune_noise_alpha" in given  # drawn from another position of the generator
    assert close(values(run, "train/loss"), logged(other, "loss"), 0.2 if noisy else 2e-5)
    assert noisy or close(values(run, "train/grad_norm"), logged(other, "grad_norm"), 1e-3)
    assert close(values(run, "train/lr/0")[:-1], logged(other, "learning_rate")[1:], 1e-9)  # ours is that of the next step
    if given.get("optim") == "sgd" and not noisy:  # the others divide by the roots of small gradients
        assert torch.allclose(weights(own.model), weights(other.model), atol=5e-6)


def test_a_classifier_pads_its_batches_and_reports_the_results_of_compute_metrics(tmp_path: Path) -> None:
    def accuracy(given: Any) -> dict[str, float]:
        return {"accuracy": (given.predictions.argmax(-1) == given.label_ids).mean(), "seen": len(given.label_ids)}

    args = arguments(tmp_path, optim="sgd", eval_strategy="steps", eval_steps=4, eval_delay=8, num_train_epochs=1)
    options: dict[str, Any] = {"processing_class": tokenizer(), "compute_metrics": accuracy}
    other = theirs(bert(), args, Reviews(), eval_dataset=Reviews(10), **options)
    own = trainer(bert(), args, Reviews(), Reviews(10), **options)
    run = own.fit()

    assert steps(run, "eval/accuracy") == [one["step"] for one in other.state.log_history if "eval_accuracy" in one] == [8, 10]
    assert values(run, "eval/accuracy") == logged(other, "eval_accuracy")
    assert values(run, "eval/seen") == [10, 10]
    assert close(values(run, "eval/loss"), logged(other, "eval_loss"))
    assert close(values(run, "train/loss"), logged(other, "loss"))


def test_accumulated_batches_give_the_gradient_of_the_joint_batch(tmp_path: Path) -> None:
    one = trainer(gpt2(), arguments(tmp_path / "a", optim="sgd", per_device_train_batch_size=20), Texts())
    several = trainer(gpt2(), arguments(tmp_path / "b", optim="sgd", gradient_accumulation_steps=10), Texts())
    joint, accumulated = one.fit(), several.fit()

    assert torch.allclose(weights(one.model), weights(several.model), atol=1e-7)
    assert close(values(joint, "train/loss"), values(accumulated, "train/loss"), 1e-6)
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
    other = theirs(gpt2(), args, Texts(), eval_dataset={"a": Uneven(), "b": Texts(8)}, **options)
    run = trainer(gpt2(), args, Texts(), {"a": Uneven(), "b": Texts(8)}, **options).fit()

    for name in ("width", "padded", "inputs"):
        assert values(run, f"eval_a/{name}") == logged(other, f"eval_a_{name}")
    assert close(values(run, "eval_a/loss"), logged(other, "eval_a_loss"))
    assert close(values(run, "eval_b/loss"), logged(other, "eval_b_loss"))


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
    assert torch.equal(weights(transformers.AutoModelForCausalLM.from_pretrained(folder)), weights(made.model))


def test_an_epoch_that_is_cut_short_is_evaluated_as_theirs(tmp_path: Path) -> None:
    args = arguments(tmp_path, num_train_epochs=1.5, eval_strategy="epoch", eval_on_start=True)
    other = theirs(gpt2(), args, Texts(), eval_dataset=Texts(4))
    run = trainer(gpt2(), args, Texts(), Texts(4)).fit()

    assert [one["step"] for one in other.state.log_history if "eval_loss" in one] == [0, 10, 15]
    assert steps(run, "eval/loss") == [1, 10, 15]  # the first one is in the record of the first step
    assert close(values(run, "eval/loss"), logged(other, "eval_loss"))


def test_the_best_weights_are_in_the_model_after_the_run(tmp_path: Path) -> None:
    def rising(given: Any) -> dict[str, float]:
        return {"score": next(scores)}

    scores = iter([1.0, 3.0, 2.0] * 2)
    chosen: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    args = arguments(tmp_path, num_train_epochs=3, metric_for_best_model="score", save_total_limit=1, **chosen)
    made = trainer(gpt2(), args, Texts(), Texts(4), compute_metrics=rising)
    made.fit()

    best = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "best" / "pretrained")
    assert (tmp_path / "checkpoints" / "best").resolve().name == "step-00000020"
    assert torch.equal(weights(best), weights(made.model))


@pytest.mark.parametrize(
    "given",
    [
        {"eval_strategy": "epoch", "eval_delay": 2, "num_train_epochs": 4},
        {"eval_strategy": "epoch", "eval_delay": 1.5, "num_train_epochs": 2.5, "logging_strategy": "epoch"},
        {"eval_strategy": "steps", "eval_steps": 4, "eval_delay": 9, "max_steps": 15, "logging_steps": 0.3},
    ],
)
def test_evaluations_and_records_are_at_the_steps_of_their_trainer(given: dict[str, Any], tmp_path: Path) -> None:
    args = arguments(tmp_path, **given)
    other = theirs(gpt2(), args, Texts(), eval_dataset=Texts(4))
    run = trainer(gpt2(), args, Texts(), Texts(4)).fit()

    for ours, name in (("eval/loss", "eval_loss"), ("train/loss", "loss")):
        assert steps(run, ours) == [one["step"] for one in other.state.log_history if name in one]


def test_the_best_of_several_data_sets_is_kept(tmp_path: Path) -> None:
    def score(given: Any) -> dict[str, float]:
        return {"score": next(scores)}

    scores = iter([3.0, 9.0, 1.0, 9.0, 2.0, 9.0])  # of "a", of "b", ...
    chosen: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "best", "metric_for_best_model": "eval_a_score"}
    args = arguments(tmp_path, num_train_epochs=3, greater_is_better=False, save_only_model=True, **chosen)
    run = trainer(gpt2(), args, Texts(), {"a": Texts(4), "b": Texts(4)}, compute_metrics=score).fit()

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


def test_a_schedule_by_results_steps_at_evaluations(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "reduce_lr_on_plateau"}
    args = arguments(tmp_path, optim="sgd", learning_rate=5.0, lr_scheduler_kwargs={"patience": 0}, **chosen)
    other = theirs(gpt2(), args, Texts(), eval_dataset=Texts(4))
    run = trainer(gpt2(), args, Texts(), Texts(4)).fit()

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

    assert close(values(run, "train/loss"), logged(other, "loss"))
    assert torch.allclose(weights(model), weights(other_model), atol=1e-6)
    with pytest.raises(ValueError, match="expected either model or model_init; got both"):
        trainer(model, args, Texts(), model_init=gpt2)


def test_a_data_set_of_the_package_datasets_loses_the_columns_that_the_model_does_not_take(tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [{**Reviews()[index], "text": f"review {index}"} for index in range(20)]
    args = arguments(tmp_path, optim="sgd")
    options: dict[str, Any] = {"processing_class": tokenizer()}
    other = theirs(bert(), args, datasets.Dataset.from_list(rows), **options)
    run = trainer(bert(), args, datasets.Dataset.from_list(rows), **options).fit()
    assert close(values(run, "train/loss"), logged(other, "loss"))

    with pytest.raises(Exception, match=r"no column of the data set is an argument of BertForSequenceClassification\.forward"):
        trainer(bert(), args, datasets.Dataset.from_dict({"text": ["a"]}), **options)


def test_lengths_are_grouped_and_a_stream_needs_max_steps(tmp_path: Path) -> None:
    args = arguments(tmp_path / "a", train_sampling_strategy="group_by_length", per_device_train_batch_size=5)
    made = trainer(bert(), args, Reviews(80), processing_class=tokenizer())
    widths = [batch["input_ids"].shape[1] for batch in made.loader]
    assert sorted(set(widths)) == [6, 7, 8, 9]

    class Stream(torch.utils.data.IterableDataset[dict[str, Any]]):
        def __iter__(self) -> Any:
            return (Texts()[index] for index in range(20))

    with pytest.raises(AdapterError, match="the training data has no length"):
        trainer(gpt2(), arguments(tmp_path / "b"), Stream())
    run = trainer(gpt2(), arguments(tmp_path / "c", max_steps=12), Stream()).fit()
    assert run.progress.step == 12


# -- callbacks, resume, adapters -------------------------------------------------------------------------------------------


def shuffled(folder: Path, **options: Any) -> Trainer:
    """Return a trainer with dropout, a shuffled order, accumulation and a schedule, for 3 epochs of 5 steps."""
    chosen: dict[str, Any] = {"train_sampling_strategy": "random", "gradient_accumulation_steps": 2, "save_strategy": "steps"}
    given = {
        "num_train_epochs": 3,
        "save_steps": 4,
        "lr_scheduler_type": "linear",
        "warmup_steps": 3,
        "optim": "adamw_torch_fused",
    }
    return trainer(gpt2(resid_pdrop=0.1), arguments(folder, **chosen, **given), Texts(), **options)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = shuffled(tmp_path / "whole")
    whole.fit()

    @on(Callback.on_step_end, at=7)
    def fail(run: Run) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        shuffled(tmp_path / "cut", callbacks=[fail]).fit()
    continued = shuffled(tmp_path / "cut")
    run = continued.fit(resume="auto")
    assert [one.when.step for one in run.decisions if one.what == "resumed"]
    assert torch.equal(weights(continued.model), weights(whole.model))


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

    assert close(values(run, "train/loss"), logged(other, "loss"))
    folder = tmp_path / "checkpoints" / "last" / "pretrained"
    again = peft.PeftModel.from_pretrained(gpt2(), folder)
    assert torch.equal(weights(again), weights(made.model))
    assert all("lora" in name for name in load_file(folder.parent / "model.safetensors"))  # the base is left out
