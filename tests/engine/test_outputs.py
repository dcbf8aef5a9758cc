"""From a batch to a loss, values that are computed when somebody asks, watched values, and tokens that are counted."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Callback, Derive, Monitor, Outputs, Run, Trainer, attach, on, supervised
from cadenza.callbacks import Checkpoint, Evaluate, LogTraining
from cadenza.errors import DataError, LossError, MonitorError, OutputError
from cadenza.testing import tiny_loader, tiny_model, tiny_run, tiny_trainer
from tests.engine.parts import Stream


def test_supervised_gives_the_loss_the_predictions_and_the_targets() -> None:
    inputs, targets = torch.ones(3, 1), torch.zeros(3, 1)
    outputs = supervised(nn.functional.mse_loss)(tiny_model(), (inputs, targets))
    assert outputs["targets"] is targets
    assert torch.equal(outputs["loss"], nn.functional.mse_loss(outputs["predictions"], targets))


def one_element(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1]).reshape(1)


def by_step_fn(run: Run, batch: Any) -> Tensor:
    loss = one_element(run.model, batch)
    run.backward(loss)
    run.update(run.optimizers[0])
    return loss


def by_steps(trainer: Trainer) -> Run:
    for step in trainer.steps():
        for batch in step:
            step.backward({"loss": one_element(trainer.model, batch), "weight": 1.0})
    return trainer.run


def by_attach(trainer: Trainer) -> Run:
    callbacks = [*trainer.callbacks, Evaluate(tiny_loader(2), compute=one_element_named)]
    with attach(trainer.model, torch.optim.SGD(trainer.model.parameters(), 0.1), callbacks=callbacks, progress=False) as loop:
        for batch in tiny_loader():
            with loop.step():
                loop.backward(one_element(trainer.model, batch))
                loop.update()
    return loop.run


def one_element_named(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"loss": one_element(model, batch)}


@pytest.mark.parametrize(
    ("train", "arguments"),
    [
        (Trainer.fit, {"compute_loss": one_element}),
        (Trainer.fit, {"compute_loss": one_element_named, "precision": "bf16"}),
        (Trainer.fit, {"step_fn": by_step_fn}),
        (by_steps, {}),
        (by_attach, {}),
    ],
)
def test_a_loss_of_one_element_is_a_loss(train: Callable[[Trainer], Run], arguments: Any) -> None:
    """As for `Tensor.backward`. Callbacks see it with shape (), and may replace it by such a loss."""
    shapes = list[tuple[int, ...]]()

    def look(run: Run, outputs: Any) -> None:
        shapes.append(outputs["loss"].shape)
        outputs["loss"] = outputs["loss"].reshape(1, 1)

    plain = tiny_run()
    evaluate = [] if train is by_attach else [Evaluate(tiny_loader(2), compute=one_element_named)]
    callbacks = [on(Callback.on_before_backward)(look), LogTraining(every=1), *evaluate]
    run = train(tiny_trainer(callbacks=callbacks, **arguments))
    assert shapes == [()] * 5
    if "precision" not in arguments:
        assert all(torch.equal(one, other) for one, other in zip(run.model.parameters(), plain.model.parameters(), strict=True))
    assert len(run.history["train/loss"]) == 5
    assert train is by_attach or len(run.history["eval/loss"]) == 1


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ({"x": 1, "y": 2}, r"a mapping with \['x', 'y'\]"),
        (torch.zeros(2, 3), r"a tensor of shape \(2, 3\)"),
        ((1, 2, 3), "a tuple of 3"),
        ([1], "a list of 1"),
        (torch.zeros(3, 2, 2), r"a tensor of shape \(3, 2, 2\)"),
        (5, "a int"),
    ],
)
def test_other_batches_are_an_error_that_describes_them(batch: Any, got: str) -> None:
    with pytest.raises(DataError, match=rf"expects batches \(inputs, targets\); got {got}\. For other batches give a function"):
        supervised(nn.functional.mse_loss)(nn.Identity(), batch)


@pytest.mark.parametrize(
    ("batch", "precision", "what"),
    [
        ((torch.zeros(2, 1), torch.zeros(2, 1)), "fp32", "the forward pass of the model"),
        (torch.zeros(2, 1), "fp32", "the loss that the model returned"),
        (torch.zeros(2, 1), "bf16", "the loss that the model returned"),
    ],
)
def test_a_model_that_gives_no_loss_because_compute_loss_is_missing_says_so(batch: Any, precision: str, what: str) -> None:
    optimizer = partial(torch.optim.SGD, lr=0.1)
    with pytest.raises((TypeError, LossError)) as raised:
        Trainer(nn.Linear(1, 1), optimizer, [batch], max_epochs=1, precision=precision, progress=False).fit()
    note = raised.value.__notes__[0]
    assert note.startswith(f"context: {what}")
    assert "likely cure: the trainer has no compute_loss" in note


MSE = supervised(nn.functional.mse_loss)


def test_the_object_is_the_same_until_the_next_batch_starts() -> None:
    seen: list[object] = []
    keep = [
        on(Callback.on_batch_start)(lambda run, batch: seen.append(run.outputs)),
        on(Callback.on_before_backward)(lambda run, outputs: seen.append(outputs)),
        on(Callback.on_batch_end)(lambda run, batch, outputs: seen.extend([outputs, run.outputs])),
    ]
    tiny_run(callbacks=keep, batches=2)
    assert [id(one) for one in seen] == [id(seen[0])] * 4 + [id(seen[4])] * 4
    assert seen[0] is not seen[4]


def test_a_derived_value_is_computed_once_a_batch_without_gradient_and_only_if_asked_for() -> None:
    computed: list[bool] = []

    def error(run: Run) -> Tensor:
        computed.append(torch.is_grad_enabled())
        return cast("Tensor", run.outputs["predictions"] - run.outputs["targets"]).abs().max()

    ask = on(Callback.on_batch_end, every=2)(lambda run, batch, outputs: [outputs["error"], outputs["error"]])
    tiny_run(compute_loss=MSE, callbacks=[Derive(error=error), ask], batches=5)
    assert computed == [False, False]


def test_a_derived_value_may_stand_on_another_and_is_there_for_in_and_get_but_not_before_it_is_asked_for() -> None:
    facts: list[object] = []

    @on(Callback.on_step_end)
    def look(run: Run) -> None:
        facts.extend(["one" in run.outputs, "one" in list(run.outputs), run.outputs.get("one"), run.outputs.get("none", 5)])
        facts.append(run.outputs["two"])

    derive = Derive(one=lambda run: 1, two=lambda run: run.outputs["one"] + 1)
    run = tiny_run(compute_loss=MSE, callbacks=[derive, look], steps=1)
    assert facts == [True, False, 1, 5, 2]
    assert set(run.outputs) - {"one", "two"} == {"loss", "predictions", "targets"}, "what compute_loss returned"


COMPLEX = tiny_trainer(compute_loss=lambda model, batch: torch.complex(model(batch[0]).mean(), torch.tensor(0.0)))
F1, ASK = Derive(f1=lambda run: 1), on(Callback.on_step_end)(lambda run: run.outputs["los"])
ERRORS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: tiny_run(callbacks=[F1, ASK]), OutputError, r"no output 'los'; it has \['loss', 'f1'\]\. Did you mean 'loss'\?"),
    (
        lambda: tiny_run(callbacks=[F1, Derive(f1=lambda run: 2)]),
        OutputError,
        r"two Derive callbacks define 'f1'\. Give one of the two another name",
    ),
    (lambda: Derive(f1=cast("Any", 3)), TypeError, r"Derive\(f1=\.\.\.\) must be a function of the run; got 3"),
    (
        lambda: Outputs().take(3),
        LossError,
        r"must return the loss as a tensor of shape \(\), a mapping with the key 'loss', or an",
    ),
    (lambda: COMPLEX.fit(), LossError, r"got a complex tensor \(torch.complex64\): return a real number"),
    (lambda: COMPLEX.evaluate(tiny_loader()), LossError, "the loss of 'eval' is complex"),
    (
        lambda: supervised(cast("Any", "mse")),
        TypeError,
        r"supervised takes a function \(predictions, targets\) -> loss; got 'mse'",
    ),
]


@pytest.mark.parametrize(("act", "error", "message"), ERRORS)
def test_what_is_no_output_or_no_loss_is_an_error(act: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


def test_a_derived_value_asked_for_too_late_is_an_error() -> None:
    kept: list[Outputs] = []
    keep = on(Callback.on_batch_end, at=1)(lambda run, batch, outputs: kept.append(outputs))  # type: ignore[arg-type]  # they are
    tiny_run(callbacks=[Derive(f1=lambda run: 1), keep])
    with pytest.raises(OutputError, match="was not read while its batch was there, and the batch is gone"):
        kept[0]["f1"]


class WithLoss(NamedTuple):
    loss: Tensor
    logits: Tensor


def test_a_tensor_is_the_loss_and_an_object_with_a_loss_gives_its_loss() -> None:
    outputs = Outputs()
    outputs.take(torch.tensor(1.0))
    assert dict(outputs) == {"loss": torch.tensor(1.0)}
    outputs = Outputs()
    outputs.take(WithLoss(torch.tensor(1.0), torch.tensor(2.0)))
    assert outputs["loss"] == 1.0


@pytest.mark.parametrize(
    ("mode", "min_delta", "values", "better"),
    [
        ("max", 0.0, (1.0, 0.5, 1.0, 1.5), [True, False, False, True]),
        ("min", 0.0, (1.0, 1.5, 1.0, 0.5), [True, False, False, True]),
        ("max", 0.25, (1.0, 1.25, 1.5), [True, False, True]),
    ],
)
def test_better_is_what_the_mode_says_by_more_than_min_delta(
    mode: Any, min_delta: float, values: tuple[float, ...], better: list[bool]
) -> None:
    run, monitor = tiny_run(steps=1), Monitor("eval/acc", mode, owner="Mine", min_delta=min_delta)
    assert [monitor.update(run, value) for value in values] == better


def test_nan_is_never_better_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    run, monitor = tiny_run(steps=1), Monitor("eval/acc", "max", owner="Mine")
    with caplog.at_level(logging.WARNING, logger="cadenza"):
        assert [monitor.update(run, value) for value in (math.nan, 1.0, math.nan, 2.0)] == [False, True, False, True]
    assert caplog.messages == ["Mine: 'eval/acc' is NaN, which is never better"]


def test_a_function_of_the_results_can_be_watched_and_a_value_of_another_evaluation_is_none_of_its_business() -> None:
    def total(results: Any) -> float:
        return float(results["eval/a"] + results["eval/b"])

    monitor = Monitor(total, "max", owner="Mine")
    assert monitor.name == "total"
    assert monitor.value_in("eval", {"eval/a": 1.0, "eval/b": 2.0}) == 3.0
    assert Monitor("test/acc", "max", owner="Mine").value_in("eval", {"eval/acc": 1.0}) is None


def test_an_unknown_name_is_an_error_that_lists_what_was_reported() -> None:
    with pytest.raises(
        MonitorError, match=r"Mine watches 'eval/ac', but the evaluation 'eval' reported only \['eval/acc'\]\. Did"
    ):
        Monitor("eval/ac", "max", owner="Mine").value_in("eval", {"eval/acc": 1.0})
    with pytest.raises(MonitorError, match=r"no evaluation will report it: there is 'valid/\.\.\.'\. "):
        Monitor("eval/acc", "max", owner="Mine").check_reported_by(["valid"])


@pytest.mark.parametrize("mode", ["auto", None, "MAX"])
def test_a_mode_is_never_guessed(mode: Any) -> None:
    with pytest.raises(ValueError, match=r"Mine: mode must be 'min' or 'max', the direction that is better; got"):
        Monitor("eval/acc", mode, owner="Mine")
    with pytest.raises(TypeError, match="Mine: a monitor is a name such as 'eval/acc' or a function of the results; got 3"):
        Monitor(cast("Any", 3), "max", owner="Mine")


def test_the_best_goes_round_a_save_and_a_load_and_is_forgotten_on_request() -> None:
    first, second = Monitor("eval/acc", "max", owner="Mine"), Monitor("eval/acc", "max", owner="Mine")
    first.update(tiny_run(steps=1), 0.5)
    second.load_state_dict(first.state_dict())
    assert second.best == 0.5
    second.reset()
    assert second.best == -math.inf


@pytest.mark.parametrize(
    ("watched", "known", "meant"),
    [
        ("evl/acc", ["eval", "far"], "Did you mean 'eval/acc'?"),
        ("evaluation/f1", ["eval"], "Did you mean 'eval/f1'?"),
        ("acc", ["eval"], "Did you mean 'eval/acc'?"),
        ("val_acc", ["eval"], "Did you mean 'eval/acc'?"),
        ("eval_loss", ["eval"], "Did you mean 'eval/loss'?"),
        ("test_loss", ["eval", "test"], "Did you mean 'test/loss'?"),
        ("val.loss", ["eval"], "Did you mean 'eval/loss'?"),
        ("train_loss", ["eval"], "Did you mean 'train/loss'?"),
        ("trian/loss", ["eval"], "Did you mean 'train/loss'?"),
        ("trian/loss", [], "Did you mean 'train/loss'?"),
        ("loss", ["eval"], "Did you mean 'eval/loss'?"),
        ("loss", [], "Did you mean 'train/loss'?"),
        ("val_loss", [], "Did you mean 'eval/loss'?"),
        ("eval/loss", [], "watch a name of one that is there."),
        ("train/grad_norm", ["eval"], "watch a name of one that is there."),
    ],
)
def test_a_misspelled_evaluation_is_answered_with_the_nearest_name(watched: str, known: list[str], meant: str) -> None:
    with pytest.raises(MonitorError) as caught:
        Monitor(watched, "max", owner="Mine").check_reported_by(known)
    assert str(caught.value).endswith(meant)


# -- tokens: counted from the outputs of a batch or by a function ------------------------------------


def sequences(lengths: list[int] | None = None) -> list[Tensor]:
    """Return batches of one sequence each; their values are not all positive."""
    return [torch.linspace(-1, 1, length).unsqueeze(1) for length in lengths or [3, 5, 2, 7, 4]]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def with_tokens(model: nn.Module, batch: Tensor) -> dict[str, Any]:
    return {"loss": loss_of(model, batch), "tokens": batch.numel()}


COUNTED: dict[str, dict[str, Any]] = {
    "outputs": {"compute_loss": with_tokens},
    "function": {"compute_loss": loss_of, "tokens": torch.Tensor.numel},
    "step_fn": {"step_fn": lambda run, batch: step_of(run, batch)},
}


def step_of(run: Run, batch: Tensor) -> dict[str, Any]:
    loss = loss_of(run.model, batch)
    run.backward(loss)
    run.update()
    return {"loss": loss, "tokens": torch.tensor(batch.numel())}  # a tensor on the host will do, too


def noted(**arguments: Any) -> tuple[Run, list[int]]:
    """Return a run, and the tokens at the end of each of its steps."""
    tokens: list[int] = []
    note = on(Callback.on_step_end)(lambda run: tokens.append(run.progress.tokens))
    return tiny_run(loader=sequences(), callbacks=[note], **arguments), tokens


@pytest.mark.parametrize("way", COUNTED)
def test_tokens_are_counted_after_each_step(way: str) -> None:
    run, tokens = noted(epochs=2, **COUNTED[way])
    assert tokens == [3, 8, 10, 17, 21, 24, 29, 31, 38, 42]
    assert run.progress.now().tokens == 42


@pytest.mark.parametrize("way", COUNTED)
@pytest.mark.parametrize(("limit", "steps"), [(1, 1), (8, 2), (9, 3), (21, 5), (22, 6), (40, 10)])
def test_a_run_ends_with_the_step_that_reaches_max_tokens(way: str, limit: int, steps: int) -> None:
    run, tokens = noted(max_tokens=limit, **COUNTED[way])
    assert run.progress.step == steps
    assert tokens[-1] >= limit > ([0, *tokens])[-2]
    assert run.outcome is not None
    assert run.outcome.kind == "finished"


def test_it_ends_after_whole_steps_at_the_first_limit_that_is_reached() -> None:
    def steps(**limits: Any) -> int:
        return tiny_run(loader=sequences(), compute_loss=with_tokens, **limits).progress.step

    assert steps(max_tokens=9, steps=2) == 2
    assert steps(max_tokens=9, steps=4) == 3
    assert steps(max_tokens=1000, epochs=1) == 5
    stream: Any = DataLoader(Stream(sequences()), batch_size=None)
    run = tiny_run(loader=stream, compute_loss=loss_of, tokens=torch.Tensor.numel, max_tokens=30)
    assert (run.progress.epoch, run.progress.step, run.progress.tokens) == (1, 8, 31), "without a length, too"
    run = tiny_run(loader=sequences(), compute_loss=with_tokens, max_tokens=4, accumulate=3)
    assert (run.progress.step, run.progress.batch, run.progress.tokens) == (1, 3, 10)


@pytest.mark.parametrize(("way", "cut"), [*zip(COUNTED, (1, 4, 7), strict=True)])
def test_a_resumed_run_counts_on_and_ends_at_the_same_step_with_the_same_bits(tmp_path: Path, way: str, cut: int) -> None:
    def fit(name: str, *callbacks: Callback, **limits: Any) -> Run:
        options = {**COUNTED[way], **limits, "loader": sequences(), "directory": tmp_path / name}
        return tiny_trainer(seed=1, callbacks=[Checkpoint(1), *callbacks], **options).fit(resume="auto")

    whole = fit("whole", max_tokens=37)
    fit("cut", steps=cut)
    rest = fit("cut", max_tokens=37)
    assert rest.progress.now() == whole.progress.now()
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))
    assert fit("cut", max_tokens=37).progress.now() == whole.progress.now(), "it is over"
    assert fit("cut", max_tokens=39).progress.step == whole.progress.step + 1


def test_batches_that_a_hook_skips_before_their_forward_pass_have_no_outputs_that_count_nor_do_evaluations() -> None:
    skip = on(Callback.on_batch_start, at=2)(lambda run, batch: run.skip_batch("not this one"))
    evaluate = Evaluate(sequences([9, 9]), every="1 step", compute=with_tokens)
    assert tiny_run(loader=sequences(), callbacks=[skip, evaluate], **COUNTED["outputs"]).progress.tokens == 21 - 5
    assert tiny_run(loader=sequences(), callbacks=[skip, evaluate], **COUNTED["function"]).progress.tokens == 21
    assert tiny_run(loader=sequences(), callbacks=[skip], max_tokens=16, **COUNTED["outputs"]).progress.step == 5


def test_records_and_the_run_directory_have_the_tokens_if_something_counts_them(tmp_path: Path) -> None:
    run = tiny_run(loader=sequences(), compute_loss=with_tokens, directory=tmp_path / "a", callbacks=[LogTraining("2 steps")])
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [8, 17]
    assert json.loads((tmp_path / "a" / "run.json").read_text())["progress"]["tokens"] == run.progress.tokens == 21
    assert tiny_run(directory=tmp_path / "b", callbacks=[LogTraining(1)]).progress.tokens == 0
    assert '"tokens"' not in (tmp_path / "b" / "metrics.jsonl").read_text()


@pytest.mark.parametrize("tokens", [1.5, -1, "two", torch.tensor(1.0), torch.tensor([1, 2]), torch.tensor(2, device="meta")])
def test_outputs_and_functions_that_return_no_whole_number_on_the_host_are_an_error(tokens: Any) -> None:
    with pytest.raises(
        LossError, match=r"outputs\['tokens'\] must be a whole number of at least 0, on the host; got .*tokens="
    ):
        tiny_run(loader=sequences(), compute_loss=lambda model, batch: {"loss": loss_of(model, batch), "tokens": tokens})
    for returned in (tokens, None):
        with pytest.raises(DataError, match=r"tokens=.* must return a whole number of at least 0, on the host; got"):
            tiny_run(loader=sequences(), compute_loss=loss_of, tokens=lambda batch, returned=returned: returned)


def test_two_counts_of_the_same_tokens_and_a_limit_that_nothing_counts_are_errors_at_the_first_batch() -> None:
    with pytest.raises(LossError, match=r"tokens are counted twice: by Trainer\(tokens=.*\), and by outputs\['tokens'\]"):
        tiny_run(loader=sequences(), compute_loss=with_tokens, tokens=torch.Tensor.numel)
    trainer = tiny_trainer(loader=sequences(), compute_loss=loss_of, max_tokens=9)
    with pytest.raises(LossError, match=r"max_tokens=9 needs the number of tokens in each batch: expected outputs\['tokens'\]"):
        trainer.fit()
    assert trainer._last_progress is not None
    assert trainer._last_progress.step == 0


def test_the_plan_says_how_many_tokens_the_run_has() -> None:
    plan = tiny_trainer(max_tokens=500).plan()
    assert plan.headline().startswith("fit: 5 batches an epoch, 500 tokens, on cpu")
    assert plan.to_dict()["max_tokens"] == 500
