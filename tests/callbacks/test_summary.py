"""Summary: a table of the model, which disturbs nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Evaluate, Summary
from cadenza.callbacks.summary import Layer
from cadenza.testing import prove_resume, tiny_loader, tiny_model, tiny_run, tiny_trainer

Lines = pytest.CaptureFixture[str]


class Net(nn.Module):
    """Layers inside layers, one shared, one frozen, one never called, and an output of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)))
        self.rnn = nn.GRU(4, 3, batch_first=True)
        self.head = nn.Linear(3, 1)
        self.same_head = self.head
        self.idle = nn.Linear(5, 5)
        self.body[0].requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden, _ = self.rnn(self.body(inputs).unsqueeze(1))
        output: Tensor = self.same_head(hidden[:, 0])
        return output


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def shown(run_lines: Lines) -> list[str]:
    return run_lines.readouterr().out.splitlines()


# -- what is shown ------------------------------------------------------------------------------------


def test_the_table_has_a_row_for_each_layer(capsys: Lines) -> None:
    summary = Summary()
    tiny_run(model=net(), callbacks=[summary], steps=1, batches=1)
    assert summary.layers == [
        Layer("", "Net", ((2, 1),), 131, 123),
        Layer("body", "Sequential", ((2, 4),), 16, 8),
        Layer("body.0", "Linear", ((2, 4),), 8, 0),
        Layer("body.1", "Sequential", ((2, 4),), 8, 8),
        Layer("body.1.0", "BatchNorm1d", ((2, 4),), 8, 8),
        Layer("body.1.1", "Dropout", ((2, 4),), 0, 0),
        Layer("rnn", "GRU", ((2, 1, 3), (1, 2, 3)), 81, 81),
        Layer("head", "Linear", ((2, 1),), 4, 4),
        Layer("idle", "Linear", (), 30, 30),
    ]
    lines = shown(capsys)
    assert lines[:4] == [
        "layer    kind         output                parameters  trainable",
        "model    Net          (2, 1)                       131        123",
        "  body   Sequential   (2, 4)                        16          8",
        "    0    Linear       (2, 4)                         8          0",
    ]
    assert lines[7:9] == [
        "  rnn    GRU          (2, 1, 3), (1, 2, 3)          81         81",
        "  head   Linear       (2, 1)                         4          4",
    ]


def test_memory_is_that_of_parameters_gradients_optimizers_and_buffers(capsys: Lines) -> None:
    model = nn.Sequential(nn.Linear(1, 2**17, bias=False), nn.BatchNorm1d(2**17), nn.Linear(2**17, 1, bias=False))
    model[0].requires_grad_(False)
    tiny_run(model=model, optimizer=lambda parameters: torch.optim.AdamW(parameters, 0.1), callbacks=[Summary()], steps=1)
    mebibyte = 2**17 * 4 / 2**20
    assert shown(capsys)[-1] == (
        f"MiB: parameters {4 * mebibyte:.2f}, gradients {3 * mebibyte:.2f}, optimizers {6 * mebibyte:.2f}, "
        f"buffers {2 * mebibyte:.2f}, together {15 * mebibyte:.2f}"
    )


def test_depth_leaves_out_rows_and_counts_what_is_in_them(capsys: Lines) -> None:
    for depth, names in [(0, [""]), (1, ["", "body", "rnn", "head", "idle"]), (None, 9)]:
        summary = Summary(depth)
        tiny_run(model=net(), callbacks=[summary], steps=1)
        assert names in ([layer.name for layer in summary.layers], len(summary.layers))
        assert summary.layers[0].parameters == 131
    assert len(shown(capsys)) == (1 + 2) + (5 + 2) + (9 + 2)


def test_it_stands_in_console_log_and_comes_once_a_run(tmp_path: Path, capsys: Lines) -> None:
    summary = Summary()
    tiny_run(callbacks=[summary], epochs=3, accumulate=2, directory=tmp_path / "run")
    lines = shown(capsys)
    assert (tmp_path / "run" / "console.log").read_text().splitlines() == lines
    assert len(lines) == 3
    tiny_run(callbacks=[summary], model=net())
    assert len(summary.layers) == 9


class OwnLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(1, 1)

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(logits := self.line(inputs), targets), "logits": logits}


def test_a_model_with_a_loss_of_its_own_and_a_step_fn_are_seen_as_well(capsys: Lines) -> None:
    def step_fn(run: Run, batch: Any) -> Tensor:
        loss: Tensor = run.model.get_submodule("line")(batch[0]).mean()
        run.backward(loss)
        run.update()
        return loss

    tiny_run(model=OwnLoss(), compute_loss=None, callbacks=[Summary()], steps=1)
    assert shown(capsys)[1] == "model   OwnLoss  (), (2, 1)           2          2"
    summary = Summary()
    tiny_run(model=OwnLoss(), step_fn=step_fn, callbacks=[summary], steps=1)
    assert [layer.shapes for layer in summary.layers] == [(), ((2, 1),)]


# -- errors -------------------------------------------------------------------------------------------


class Failing(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        raise MemoryError("on purpose")


def test_if_the_first_step_fails_what_is_known_is_shown(capsys: Lines) -> None:
    model = nn.Sequential(nn.Linear(1, 3), Failing())
    with pytest.raises(MemoryError, match="on purpose"):
        tiny_run(model=model, callbacks=[Summary()])
    lines = shown(capsys)
    assert lines[1:4] == [
        "model  Sequential  -                6          6",
        "  0    Linear      (2, 3)           6          6",
        "  1    Failing     -                0          0",
    ]
    assert lines[4].endswith("optimizers not known before an update, buffers 0.00, together not known")
    assert hooks_in(model) == 0


def test_a_depth_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="depth must be None or a whole number of at least 0; got -1"):
        Summary(-1)


# -- nothing is disturbed -----------------------------------------------------------------------------


def hooks_in(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_after_the_first_step_nothing_listens_in_the_model() -> None:
    counts: list[int] = []
    model = net()
    look = on(Callback.on_step_start)(lambda run: counts.append(hooks_in(run.model)))
    tiny_run(model=model, callbacks=[Summary(), look], steps=3)
    assert counts == [9, 0, 0]  # the model and the layers in it, a shared one once


def test_shapes_are_those_of_training_also_after_a_trial_of_the_evaluation() -> None:
    summary = Summary()
    evaluate = Evaluate(tiny_loader(2, batch_size=7), sanity_batches=1, every="1 step")
    tiny_run(callbacks=[summary, evaluate], steps=2)
    assert summary.layers[0].shapes == ((2, 1),)


def test_a_layer_that_is_kept_in_evaluation_mode_is_seen(capsys: Lines) -> None:
    model = net()
    freeze = on(Callback.on_epoch_start)(lambda run: run.model.get_submodule("body").eval())
    summary = Summary()
    tiny_run(model=model, callbacks=[summary, freeze], steps=1)
    assert summary.layers[1].shapes == ((2, 4),)


def test_the_run_is_the_same_with_it_and_without() -> None:
    def weights(*callbacks: Callback) -> dict[str, Tensor]:
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(*map(torch.cat, zip(*tiny_loader(), strict=True))), 2, shuffle=True
        )
        return dict(tiny_run(model=net(), seed=1, epochs=2, loader=loader, callbacks=callbacks).model.state_dict())

    with_it, without = weights(Summary()), weights()
    assert all(torch.equal(with_it[name], without[name]) for name in without)


def test_a_resume_is_exact() -> None:
    def make(directory: Path) -> Trainer:
        return tiny_trainer(model=net(), directory=directory, epochs=2, seed=1, callbacks=[Summary()])

    prove_resume(make, at=[1, 6], in_process=True)


def test_a_compiled_model_is_shown_without_shapes(capsys: Lines) -> None:
    wrapped = torch.compile(tiny_model(), backend="eager")
    inside = nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))
    inside[0].compile(backend="eager")
    for model in (wrapped, inside):
        summary = Summary()
        tiny_run(model=model, callbacks=[summary], steps=1)
        assert all(layer.shapes == () for layer in summary.layers)
        assert summary.layers[0].parameters in (2, 7)
