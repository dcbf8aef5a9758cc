"""`ReplayCheck` finds flipped bits before the update; `Fingerprint` names the first step and tensor at which two runs part."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Callback, Run, attach, on
from cadenza.callbacks import Checkpoint, ClipGradients, Ema, Fingerprint, ReplayCheck, StopOnNonFinite
from cadenza.commands.main import main
from cadenza.drivers import DdpDriver, FsdpDriver
from cadenza.errors import ReplayError
from cadenza.report.fingerprints import FILE, FirstDifference, first_difference, read_fingerprints
from cadenza.testing import launch, tiny_run, tiny_trainer
from tests.callbacks.flips import KINDS, Flip, Kind, bits, network, same, samples, state_of, trainer
from tests.callbacks.parts import failing


@pytest.mark.parametrize(
    "arguments",
    [{}, {"accumulate": 3}, {"precision": "bf16"}, {"precision": "fp16", "accumulate": 2}],
    ids=["fp32", "short windows", "bf16", "fp16"],
)
def test_a_run_has_the_same_bits_with_and_without_the_check(arguments: dict[str, Any]) -> None:
    drawn: list[list[Any]] = [[], []]

    def run(extra: list[Any], numbers: list[Any]) -> dict[str, Tensor]:
        numpy.random.seed(0)

        @on(Callback.on_step_end)
        def draw(run: Run) -> None:
            numbers.append((random.random(), torch.rand(()).item(), numpy.random.rand(), float(run.loss or 0)))

        return state_of(trainer([ClipGradients(max_norm=0.5), Ema(0.9), draw, *extra], **arguments).fit())

    check = ReplayCheck(every=1)
    assert same(run([], drawn[0]), run([check], drawn[1]))
    assert drawn[0] == drawn[1]
    assert check.steps == list(range(1, len(drawn[0]) + 1))


def test_flipped_bits_of_each_kind_are_found_before_the_update_and_repaired_by_the_majority() -> None:
    clean = trainer([], max_epochs=8).fit()
    flips, check = Flip(), ReplayCheck(every=1, action="majority")
    run = trainer([flips, check], max_epochs=8).fit()
    found = [decision for decision in run.decisions if decision.what == "replay differed"]
    assert {kind for _, kind, _ in flips.done} == {*KINDS}
    assert [decision.data["step"] for decision in found] == [step for step, _, _ in flips.done] == list(range(1, 41))
    assert {decision.data["kind"] for decision in found} == {"the step itself was wrong"}
    assert same(state_of(clean), state_of(run))
    named = {"gradient": "gradient", "activation": "module", "buffer": "buffer", "weight": "weight"}
    for decision, (_, kind, name) in zip(found, flips.done, strict=True):
        assert name in decision.data["ranks"]["0"][named[kind]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_difference_raises_before_the_update(kind: Kind) -> None:
    flips, steps = Flip([kind], [3]), list[int]()
    updated = on(Callback.on_after_optimizer_step)(lambda run: steps.append(run.progress.step + 1))
    with pytest.raises(ReplayError, match=r"a repeat of step 3 differs in .*the machine gave a wrong number") as raised:
        trainer([flips, updated, ReplayCheck(every=1)]).fit()
    assert steps == [1, 2]
    assert flips.done[0][2] in str(raised.value)


def test_a_warning_continues_with_the_results_of_the_step_itself(caplog: pytest.LogCaptureFixture) -> None:
    with_check = trainer([Flip(["activation"], [3]), ReplayCheck(every=1, action="warn")]).fit()
    without = trainer([Flip(["activation"], [3])]).fit()
    assert same(state_of(with_check), state_of(without))
    assert "The run continues with the step" in caplog.text
    assert [one.data["used"] for one in with_check.decisions if one.what == "replay differed"] == ["the step"]


class Noise(nn.Module):
    """Draws from a generator that nothing puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + torch.randn(inputs.shape, generator=self.generator)


@pytest.mark.parametrize("action", ["raise", "majority"])
def test_an_operation_that_is_not_deterministic_is_named_by_its_module(action: Any) -> None:
    model = nn.Sequential(network(), Noise(), nn.Linear(3, 3))
    with pytest.raises(ReplayError, match=r"the output of module '1' \(Noise\).*the gradient of '2.bias'; an operation is not"):
        trainer([ReplayCheck(every=4, action=action)], model=model).fit()


class Counting(nn.Module):
    """Changes its attributes, replaces a buffer, writes to its input and clamps its weight with each call."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history: list[Tensor] = []
        self.counts = {"calls": torch.zeros(())}
        self.total = torch.zeros(())
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(inputs.detach().sum())
        self.counts["calls"].add_(1)
        self.total += len(self.history) + self.counts["calls"]
        self.latest = self.total + 1
        self.seen = self.seen + inputs.detach().sum()
        self.scale.data.clamp_(-0.9, 0.9)
        inputs.add_(self.calls + self.latest / 100)
        return inputs * self.scale


def test_what_a_forward_pass_changes_is_put_back() -> None:
    def run(*callbacks: Any) -> tuple[tuple[float, ...], dict[str, Tensor]]:
        counting = Counting()
        done = trainer(callbacks, model=nn.Sequential(counting, network()), accumulate=2).fit()
        numbers = counting.calls, len(counting.history), counting.counts["calls"].item(), counting.total.item()
        return numbers, state_of(done)

    check = ReplayCheck(every=1)
    (calls, state), (others, other) = run(), run(check)
    assert calls == others == (10, 10, 10.0, 110.0)
    assert same(state, other)
    assert check.steps == [1, 2, 3, 4, 5, 6]


def test_weights_of_batches_and_parameters_of_the_loss_are_repeated_in_the_steps_of_the_schedule() -> None:
    centre, calls = nn.Parameter(torch.zeros(3)), []

    def loss(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        calls.append(1)
        inputs, targets = batch
        weight = (targets > 0).sum().float()
        return {"loss": nn.functional.cross_entropy(model(inputs) - centre, targets), "weight": weight}

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*parameters, centre], 0.1, fused=False)

    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    for every, steps in ((1, [1, 2, 3]), ("2 steps", [2])):
        calls.clear()
        check = ReplayCheck(every=every)
        arguments: dict[str, Any] = {"compute_loss": loss, "optimizer": optimizer, "loader": loader, "accumulate": 2}
        tiny_run(model=network(), seed=1, callbacks=[check], **arguments)
        assert check.steps == steps
        assert len(calls) == 5 + sum(1 if step == 3 else 2 for step in steps)


def test_a_step_that_cannot_be_repeated_is_not_checked_and_one_without_an_update_leaves_no_trace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @on(Callback.on_before_backward, at=2)
    def replace(run: Run, outputs: Any) -> None:
        outputs["loss"] = outputs["loss"] * 2

    skip = on(Callback.on_batch_start, at=4)(lambda run, batch: run.skip_batch("for the test"))
    check = ReplayCheck(every=1)
    run = tiny_run(callbacks=[StopOnNonFinite("skip"), replace, skip, check], batches=5)
    assert check.steps == [1, 3, 5]
    assert "a callback replaced the loss" in run.why("not checked")
    assert "ReplayCheck did not check step 2" in caplog.text
    assert not any(module._forward_hooks for module in run.model.modules())


def test_gradients_that_a_callback_changed_are_attributed_to_it() -> None:
    @on(Callback.on_after_backward)
    def halve(run: Run, outputs: Any) -> None:
        for parameter in run.model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)

    with pytest.raises(ReplayError, match="or a callback changed gradients: halve"):
        tiny_run(callbacks=[halve, ReplayCheck(every=1)])


def test_the_losses_of_a_loop_of_the_users_own_cannot_be_repeated() -> None:
    with pytest.raises(ValueError, match="in a loop of your own only your code"):
        [*tiny_trainer(callbacks=[ReplayCheck()]).steps()]
    model = nn.Linear(1, 1)
    loop = attach(model, torch.optim.SGD(model.parameters(), 0.1), progress=False, callbacks=[ReplayCheck()])
    with pytest.raises(ValueError, match="in a loop of your own only your code"), loop:
        pass


# -- Fingerprint --------------------------------------------------------------------------------------


def fingerprints(directory: Path, *callbacks: Any, **arguments: Any) -> Path:
    """Train 10 steps with a fingerprint of each; return the directory."""
    trainer([*callbacks, Fingerprint("1 step")], directory=directory, **arguments).fit()
    return directory


def parted(first: Path, second: Path) -> FirstDifference:
    found = first_difference(read_fingerprints(first / FILE), read_fingerprints(second / FILE))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fingerprints(tmp_path_factory.mktemp("runs") / "clean")


def test_equal_runs_have_equal_files(clean: Path, tmp_path: Path) -> None:
    again = fingerprints(tmp_path / "again", ClipGradients(max_norm=1e9))
    assert (clean / FILE).read_text() == (again / FILE).read_text()
    assert list(read_fingerprints(clean / FILE)) == list(range(11))
    assert str(parted(clean, again)) == "11 steps equal"


@pytest.mark.parametrize(
    ("kind", "step", "expected"),
    [
        ("gradient", 4, "the gradient of"),
        ("activation", 3, "outputs"),
        ("buffer", 7, "the buffer"),
        ("weight", 6, "the weight"),
    ],
)
def test_a_flipped_bit_is_named_with_its_step_and_tensor(
    clean: Path, tmp_path: Path, kind: Any, step: int, expected: str
) -> None:
    flips = Flip([kind], [step])
    found = parted(clean, fingerprints(tmp_path / "flipped", flips))
    assert found.step == found.equal == step
    assert expected in str(found)
    if kind != "activation":
        assert found.name == flips.done[0][2]


def test_other_data_other_weights_and_another_rate_are_told_apart(clean: Path, tmp_path: Path) -> None:
    add = on(Callback.on_batch_start, at=3)(lambda run, batch: batch[0].add_(1))

    @on(Callback.on_before_optimizer_step, at=5)
    def faster(run: Run) -> None:
        run.optimizers[0].param_groups[0]["lr"] = 0.5

    model = network()
    bits(model[4].weight.detach())[0] ^= 1  # type: ignore[operator]
    data = parted(clean, fingerprints(tmp_path / "data", add))
    assert str(data) == "the runs part at step 3: the batch; 3 steps before it equal"
    start = parted(clean, fingerprints(tmp_path / "start", model=model))
    rate = parted(clean, fingerprints(tmp_path / "rate", faster))
    assert (data.step, data.kind) == (3, "batch")
    assert (start.step, start.kind, start.name) == (0, "weights", "4.weight")
    assert (rate.step, rate.kind, rate.name) == (5, "weights", "0.weight")


def test_a_run_that_continues_has_the_file_of_the_whole_run(clean: Path, tmp_path: Path) -> None:
    callbacks = [Fingerprint("1 step"), Checkpoint(every="5 steps")]
    with pytest.raises(ZeroDivisionError):
        trainer([*callbacks, failing(Callback.on_step_end, at=7)], directory=tmp_path).fit()
    assert max(read_fingerprints(tmp_path / FILE)) >= 6
    trainer(callbacks, directory=tmp_path).fit(resume=True)
    assert (tmp_path / FILE).read_text() == (clean / FILE).read_text()


def test_compare_says_where_runs_part_and_which_run_has_no_fingerprints(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flips = Flip(["gradient"], [4])
    flipped = fingerprints(tmp_path / "flipped", flips, max_epochs=1)
    assert main(["compare", str(clean), str(flipped)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    name = flips.done[0][2]
    assert f"fingerprints: the runs part at step 4: the gradient of {name!r}; 4 steps before it equal" in shown
    assert "only the first has 5 steps from 6 to 10" in shown
    main(["compare", str(clean), str(flipped), "--json"])
    told = json.loads(capsys.readouterr().out)["runs"]
    assert told[0]["fingerprints"]["step"] is None
    assert (told[1]["fingerprints"]["step"], told[1]["fingerprints"]["name"]) == (4, name)
    without = [tiny_run(directory=tmp_path / name).info.directory for name in ("without", "neither")]
    main(["compare", str(clean), str(without[0])])
    assert "fingerprints: without has none" in capsys.readouterr().out
    main(["compare", *map(str, without)])
    assert "fingerprints" not in capsys.readouterr().out


def test_a_tensor_of_one_run_alone_and_a_run_beside_itself_are_told(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = network()
    larger.register_buffer("more", torch.zeros(2))
    other = fingerprints(tmp_path / "larger", model=larger)
    told = str(parted(clean, other))
    assert told.startswith("the runs part at step 0: the buffer 'more', which only the second has; 0 steps")
    assert main(["compare", str(clean), str(clean)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0].split() == ["run", "clean", "clean"]
    assert "11 steps equal" in told


def test_broken_lines_are_reported_and_the_last_one_may_be_incomplete(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = fingerprints(tmp_path / "other")
    lines = (clean / FILE).read_text().splitlines()
    lines[2], lines[-1] = '{"step": 2}', lines[-1][:40]
    (other / FILE).write_text("\n".join(lines))
    main(["compare", str(clean), str(other)])
    out, error = capsys.readouterr()
    assert "1 lines cannot be read, the first is line 3" in error or "line 3" in error
    assert "9 steps equal; only the first has 2 steps from 2 to 10" in " ".join(out.split())


def test_runs_on_several_ranks_are_compared_and_their_layouts_are_told(clean: Path, tmp_path: Path) -> None:
    def run() -> None:
        for name, driver in {"ddp": DdpDriver, "fsdp": FsdpDriver}.items():
            for directory in (tmp_path / name, tmp_path / f"{name} again"):
                fingerprints(directory, driver=driver("cpu", timeout_s=100))

    launch(run)
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    assert str(parted(ddp, tmp_path / "ddp again")) == str(parted(fsdp, tmp_path / "fsdp again")) == "11 steps equal"
    assert str(parted(ddp, fsdp)).endswith("not comparable: the weights are in other shards (2 ranks and 2 ranks, sharded)")
    one = parted(clean, ddp)
    assert (one.step, one.equal) == (1, 1)
    assert "(1 rank and 2 ranks). Other numbers of ranks add gradients in another order" in str(one)
