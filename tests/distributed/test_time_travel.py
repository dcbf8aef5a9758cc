"""`ReplayCheck`, `Capsule` and `Recover` on multiple ranks and with tensor parallelism, and with a compiled model.

All ranks repeat the step, the wrong one is named, and most ranks or passes correct it. A rollback begins a branch on all ranks.
"""

from __future__ import annotations

import logging
import math
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils.data import DataLoader

from cadenza import Callback, Run, Trainer, load_weights, on
from cadenza.callbacks import Capsule, Checkpoint, Ema, Evaluate, Recover, ReplayCheck
from cadenza.drivers import Driver
from cadenza.drivers.sharding import local
from cadenza.testing import tiny_loader, tiny_model, tiny_trainer
from cadenza.timetravel import replay_capsule
from cadenza.timetravel.capsule_files import capsules_in, facts_of_capsule
from tests.callbacks import flips
from tests.callbacks.flips import Flip, bits
from tests.callbacks.test_recover import trainer_in
from tests.distributed.drivers import ddp, fsdp
from tests.distributed.parts import adamw, samples, squared_error
from tests.distributed.standing import on_ranks
from tests.distributed.test_tensor_parallel import network, tensor_parallel

Result = tuple[bytes, list[int], list[dict[str, Any]]]


@on(Callback.on_step_end, at=4)
def spoil_last_rank(run: Run) -> None:
    if run.driver.rank == run.driver.world_size - 1:
        bits(run.model.get_parameter("4.weight").detach())[3] ^= 1


def content_of(run: Run) -> bytes:
    state: dict[str, Tensor] = flips.state_of(run)
    return b"".join(bits(one).tobytes() for name, one in state.items() if "running" not in name)


def checked(*callbacks: Any, model: nn.Sequential | None = None, driver: Driver) -> Result:
    model = flips.network() if model is None else model
    run = flips.trainer(callbacks, model=model, driver=driver, accumulate=2, max_epochs=3).fit()
    check = [one for one in callbacks if isinstance(one, ReplayCheck)]
    data = [dict(one.data) for one in run.decisions if one.what == "replay differed"]
    return content_of(run), check[0].steps if check else [], data


def in_copies(*callbacks: Any, **options: Any) -> Result:
    return checked(*callbacks, driver=ddp(**options))


def in_shards(*callbacks: Any) -> Result:
    model = flips.network()
    del model[1]  # the statistics of its batches are per rank
    return checked(*callbacks, model=model, driver=fsdp())


def both(make: Any) -> tuple[Result, Result, Result]:
    """Return the results of a run without the check, with it, and with flipped bits."""
    none = Flip(steps=[])  # with a hook before the batch, FSDP reduces gradients with each batch
    spoilt = [Flip(["activation", "gradient"], [3, 5], rank=1), ReplayCheck(every=1, action="majority")]
    return make(none), make(none, ReplayCheck(every=1)), make(*spoilt)


@pytest.mark.parametrize("make", [in_copies, in_shards])
def test_two_ranks_repeat_a_step_name_the_wrong_rank_and_correct_it(make: Any) -> None:
    ranks = on_ranks(lambda: both(make))
    if make is in_copies:
        assert len({content for results in ranks for content, _, _ in results}) == 1
    for clean, checked, spoilt in ranks:
        assert clean[0] == checked[0] == spoilt[0]
        last = checked[1][-1]
        assert checked[1] == spoilt[1] == list(range(2, last + 1))  # not the first: DDP orders its buckets after it
        assert checked[2] == []
        assert [data["step"] for data in spoilt[2]] == [3, 5]
        assert all("1" in data["ranks"] for data in spoilt[2])
    assert ranks[0][2][2] == ranks[1][2][2]


def test_gradients_of_a_window_that_fsdp_holds_back_are_repeated() -> None:
    for clean, checked in on_ranks(lambda: (in_shards(), in_shards(ReplayCheck(every=1)))):
        assert clean[0] == checked[0]
        assert checked[1:] == (list(range(2, 10)), [])


def three() -> tuple[Result, Result]:
    options = {"gradient_as_bucket_view": True}
    return in_copies(**options), in_copies(spoil_last_rank, ReplayCheck(every="3 steps", action="majority"), **options)


def test_of_three_ranks_the_one_with_other_weights_gets_those_of_the_others() -> None:
    ranks = on_ranks(three, 3)
    for _, spoilt in ranks:
        assert spoilt[0] == ranks[0][1][0]
        assert [data["step"] for data in spoilt[2]] == [6]
        assert spoilt[2][0]["ranks"] == {"2": "the weight '4.weight'"}
        assert spoilt[2][0]["kind"] == "ranks differ"


def test_of_two_ranks_with_different_weights_both_are_named() -> None:
    """Nothing says which one is wrong."""
    for _, _, (data, *_) in on_ranks(lambda: in_copies(spoil_last_rank, ReplayCheck(every="6 steps", action="warn"))):
        assert data["ranks"] == dict.fromkeys(("0", "1"), "the weight '4.weight'")


def trained(*callbacks: Any, bad: int | None = None, directory: Path | None = None) -> Run:
    """Train for 6 steps. A sample may have a target that is NaN."""
    data = samples(24)
    if bad is not None:
        data.tensors[1][bad] = math.nan
    return Trainer(
        network(dropout=0.2),
        adamw,
        DataLoader(data, 4, shuffle=True),
        squared_error,
        max_epochs=1,
        seed=3,
        directory=directory,
        callbacks=callbacks,
        driver=tensor_parallel(),
        progress=False,
    ).fit()


def numbers(run: Run) -> list[Any]:
    return [local(one).tolist() for one in run.model.state_dict().values()]


def left_out(run: Run) -> list[Any]:
    return [one.data["samples"] for one in run.decisions if one.what == "batch left out"]


def elsewhere(told: BufferingHandler) -> list[str]:
    return [one.getMessage() for one in told.buffer if "written elsewhere" in one.getMessage()]


def test_with_tensor_parallelism_steps_are_repeated_and_a_sample_is_named_and_left_out(tmp_path: Path) -> None:
    def train() -> list[Any]:
        check = ReplayCheck(every="2 steps")
        checked, plain = trained(check), trained()
        told = BufferingHandler(1000)
        logging.getLogger("cadenza").addHandler(told)
        healed = trained(Capsule(), Recover(), Checkpoint("2 steps"), bad=5, directory=tmp_path)
        (out,) = left_out(healed)
        return [
            check.steps,
            numbers(checked) == numbers(plain),
            healed.progress.step,
            all(5 in one for one in out),
            elsewhere(told),
        ]

    assert on_ranks(train) == [[[2, 4, 6], True, 6, True, []]] * 2
    for path in capsules_in(tmp_path):
        facts = facts_of_capsule(path)
        assert (facts["guilty_samples"], facts["module"], facts["weights_exact"]) == ([5], None, False)


def test_with_a_compiled_model_a_capsule_is_written_and_the_batch_is_left_out(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"compile": {"backend": "aot_eager"}}
    check = ReplayCheck(every="2 steps")
    assert flips.same(*(flips.state_of(flips.trainer(some, **plain).fit()) for some in ([check], [])))
    assert check.steps == [2, 4, 6, 8, 10]
    healed = trainer_in(tmp_path, {100: math.nan}, Recover(), Capsule(), epochs=1, **plain).fit()
    ((out,),) = left_out(healed)
    assert 100 in out
    facts = facts_of_capsule(capsules_in(tmp_path)[0])
    assert (facts["guilty_samples"], facts["module"], facts["weights_exact"]) == ([100], "MSELoss", True)
    again = replay_capsule(trainer_in(tmp_path / "again", {}, epochs=1, **plain), tmp_path)
    assert (again.same, again.located.rows) == (True, [facts["batches"][0]["samples"].index(100)])


@pytest.mark.parametrize("driver", ["ddp", "fsdp"])
def test_two_ranks_continue_the_branch_that_a_rollback_began(tmp_path: Path, driver: str) -> None:
    def fit(resume: Any, steps: int, *callbacks: Callback) -> int:
        judge = Evaluate(tiny_loader(2), every="2 steps", weights="ema")
        keep = Checkpoint("2 steps", keep_last=None, keep_best=("eval/loss", "min"), on_exception=False)
        given = [Ema(0.9), judge, keep, *callbacks]
        run = tiny_trainer(callbacks=given, directory=tmp_path, steps=steps, seed=1, driver=driver, batches=8).fit(
            resume=resume
        )
        return run.progress.origin.step

    @on(Callback.on_batch_start)
    def kill(run: Run, batch: Any) -> None:
        if run.progress.step == 5:
            raise KeyboardInterrupt

    def job() -> list[int]:
        fit("auto", 10)
        with pytest.raises(KeyboardInterrupt):
            fit(tmp_path / "checkpoints" / "step-00000004", 10, kill)
        return [fit("auto", 8), fit("auto", 8)]

    assert on_ranks(job, 2) == [[4, 8], [4, 8]]
    averaged, own = tiny_model(), tiny_model()
    load_weights(tmp_path, averaged)
    load_weights(tmp_path, own, weights="model")
    assert averaged.weight.item() == pytest.approx(0.7376850843)
    assert own.weight.item() == pytest.approx(1.1870883703)
