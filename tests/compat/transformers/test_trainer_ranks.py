"""On two ranks, a trainer made of TrainingArguments gives the numbers of their trainer and of one process."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Checkpoint
from cadenza.compat.transformers import SavePretrained, trainer
from cadenza.drivers import FsdpDriver
from cadenza.loading import TensorBatches
from cadenza.testing import launch
from tests.compat.transformers.parts import (
    Logs,
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


def new_process() -> None:
    """Forget what accelerate knew in the process that was forked."""
    torch.set_num_threads(1)
    state = import_module("accelerate.state")  # it has no types
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.PartialState._reset_state()


def seen(given: Any) -> dict[str, float]:
    """Return an accuracy and the sums of what `compute_metrics` received."""
    hits = (given.predictions.argmax(-1) == given.label_ids).mean()
    return {
        "accuracy": hits,
        "count": len(given.label_ids),
        "labels": float((given.label_ids * range(len(given.label_ids))).sum()),
    }


def classified(folder: Path) -> Trainer:
    args = arguments(folder, optim="sgd", eval_strategy="epoch", save_strategy="epoch", per_device_eval_batch_size=3)
    return trainer(bert(), args, Reviews(), Reviews(10), processing_class=tokenizer(), compute_metrics=seen)


def accumulated(folder: Path, **options: Any) -> Any:
    return arguments(folder, optim="sgd", gradient_accumulation_steps=2, max_steps=5, **options)


def resumable(folder: Path, *callbacks: Any) -> Trainer:
    chosen: dict[str, Any] = {"train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 2}
    return trainer(gpt2(resid_pdrop=0.1), accumulated(folder, **chosen), Texts(), callbacks=list(callbacks))


@on(Callback.on_step_end, at=3)
def fail(run: Run) -> None:
    raise ZeroDivisionError("on purpose")


def continued(folder: Path) -> dict[str, Any]:
    """Return whether a run that failed ends with the weights of one that did not."""
    whole = resumable(folder / "whole")
    whole.fit()
    with suppress(ZeroDivisionError):
        resumable(folder / "cut", fail).fit()
    again = resumable(folder / "cut")
    run = again.fit(resume="auto")
    resumed = [one.when.step for one in run.decisions if one.what == "resumed"]
    return {"resumed": resumed, "same": torch.equal(weights(again.model), weights(whole.model))}


def sharded(folder: Path) -> bool:
    """Return whether the folder that FSDP ranks wrote has the weights of the model."""
    tokens = torch.randint(3, 32, (8, 8), generator=torch.Generator().manual_seed(1))
    batches = TensorBatches({"input_ids": tokens, "labels": tokens}, batch_size=2)
    callbacks = [Checkpoint("1 step"), SavePretrained()]
    driver = FsdpDriver("cpu")
    one = Trainer(
        gpt2(), lambda parameters: torch.optim.SGD(parameters, 0.1), batches, max_steps=2, directory=folder, driver=driver,
        callbacks=callbacks, progress=False, seed=0,
    )  # fmt: skip
    one.fit()
    whole = {name: weight.full_tensor() for name, weight in one.model.state_dict().items()}
    if not one.driver.is_main:
        return True
    found = transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "last" / "pretrained")
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
            "theirs": list(logged(other, "loss")),
            "logs": [logged["loss"] for _, logged in logs.seen if "loss" in logged],
            "weights": (weights(own.model) - weights(other.model)).abs().max().item(),
            "tokens": run.progress.tokens,
            "results": {name: results.history[f"eval/{name}"] for name in ("accuracy", "count", "labels", "loss")},
            "model": weights(classes.model),
            "continued": continued(tmp_path / "continued"),
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
        assert told["continued"] == {"resumed": [2], "same": True}
        assert told["sharded"]
    assert ranks[0]["results"] == ranks[1]["results"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "classes" / "checkpoints" / "last" / "pretrained"
    )
    assert torch.equal(weights(model), ranks[0]["model"])
    assert torch.equal(ranks[1]["model"], ranks[0]["model"])
