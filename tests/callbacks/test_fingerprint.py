"""`Fingerprint` writes checksums, and the comparison names the first step and tensor at which two runs part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint, ClipGradients, Fingerprint
from cadenza.commands.main import main
from cadenza.drivers import DdpDriver, FsdpDriver
from cadenza.errors import ScheduleError
from cadenza.records.fingerprints import FILE, Parting, parting, read_fingerprints
from cadenza.testing import launch, tiny_run
from tests.callbacks.flips import Flip, bits, network, trainer


def fingerprints(directory: Path, *callbacks: Any, **arguments: Any) -> Path:
    """Train 10 steps with a fingerprint of each; return the directory."""
    trainer([*callbacks, Fingerprint("1 step")], directory=directory, **arguments).fit()
    return directory


def parted(first: Path, second: Path) -> Parting:
    found = parting(read_fingerprints(first / FILE), read_fingerprints(second / FILE))
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
    assert found.step == step
    assert found.equal == step
    assert expected in str(found)
    if kind != "activation":
        assert found.name == flips.done[0][2]


def test_other_data_other_weights_and_another_rate_are_told_apart(clean: Path, tmp_path: Path) -> None:
    @on(Callback.on_batch_start, at=3)
    def add(run: Run, batch: Any) -> None:
        batch[0].add_(1)

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
    class CutError(RuntimeError):
        pass

    @on(Callback.on_step_end, at=7)
    def fail(run: Run) -> None:
        raise CutError

    callbacks = [Fingerprint("1 step"), Checkpoint(every="5 steps")]
    with pytest.raises(CutError):
        trainer([*callbacks, fail], directory=tmp_path).fit()
    assert max(read_fingerprints(tmp_path / FILE)) >= 6
    trainer(callbacks, directory=tmp_path).fit(resume=True)
    assert (tmp_path / FILE).read_text() == (clean / FILE).read_text()


def test_compare_says_where_runs_part(clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_a_tensor_of_one_run_alone_and_a_run_beside_itself_are_told(
    clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = network()
    larger.register_buffer("more", torch.zeros(2))
    other = fingerprints(tmp_path / "larger", model=larger)
    assert str(parted(clean, other)).startswith(
        "the runs part at step 0: the buffer 'more', which only the second has; 0 steps"
    )
    assert main(["compare", str(clean), str(clean)]) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[0].split() == ["run", "clean", "clean"]
    assert "11 steps equal" in told


def test_compare_says_which_run_has_no_fingerprints(clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_run(directory=tmp_path / "without")
    tiny_run(directory=tmp_path / "neither")
    main(["compare", str(clean), str(tmp_path / "without")])
    assert "fingerprints: without has none" in capsys.readouterr().out
    main(["compare", str(tmp_path / "neither"), str(tmp_path / "without")])
    assert "fingerprints" not in capsys.readouterr().out


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


def test_a_fingerprint_needs_steps_and_a_directory() -> None:
    with pytest.raises(ScheduleError, match=r"so Fingerprint\(every=...\) needs an interval in steps"):
        Fingerprint("1 epoch")
    with pytest.raises(ValueError, match=r"Fingerprint writes fingerprints.jsonl to the directory of the run"):
        tiny_run(callbacks=[Fingerprint()])


def test_runs_on_several_ranks_are_compared_and_their_layouts_are_told(clean: Path, tmp_path: Path) -> None:
    def run() -> None:
        for name in ("ddp", "ddp again"):
            fingerprints(tmp_path / name, driver=DdpDriver("cpu", timeout_s=100))
        torch.manual_seed(0)
        fingerprints(tmp_path / "fsdp", driver=FsdpDriver("cpu", timeout_s=100))
        fingerprints(tmp_path / "fsdp again", driver=FsdpDriver("cpu", timeout_s=100))

    launch(run)
    ddp, fsdp = tmp_path / "ddp", tmp_path / "fsdp"
    assert str(parted(ddp, tmp_path / "ddp again")) == str(parted(fsdp, tmp_path / "fsdp again")) == "11 steps equal"
    assert str(parted(ddp, fsdp)).endswith("not comparable: the weights are in other shards (2 ranks and 2 ranks, sharded)")
    one = parted(clean, ddp)
    assert (one.step, one.equal) == (1, 1)
    assert "(1 rank and 2 ranks). Other numbers of ranks add gradients in another order" in str(one)
