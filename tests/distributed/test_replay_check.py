"""`ReplayCheck` on several ranks: all ranks repeat the step, the wrong one is named, and most ranks or passes correct it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import ReplayCheck
from cadenza.drivers import DdpDriver, FsdpDriver
from cadenza.testing import launch
from tests.callbacks.flips import Flip, bits, network, state_of, trainer

Result = tuple[bytes, list[int], list[dict[str, Any]]]


@on(Callback.on_step_end, at=4)
def spoil_last_rank(run: Run) -> None:
    if run.driver.rank == run.driver.world_size - 1:
        bits(run.model.get_parameter("4.weight").detach())[3] ^= 1


def content_of(run: Run) -> bytes:
    state: dict[str, Tensor] = state_of(run)
    return b"".join(bits(one).tobytes() for name, one in state.items() if "running" not in name)


def ddp(*callbacks: Any, **options: Any) -> Result:
    check = [one for one in callbacks if isinstance(one, ReplayCheck)]
    run = trainer(callbacks, driver=DdpDriver("cpu", timeout_s=100, **options), accumulate=2, max_epochs=3).fit()
    data = [dict(one.data) for one in run.decisions if one.what == "replay differed"]
    return content_of(run), check[0].steps if check else [], data


def fsdp(*callbacks: Any) -> Result:
    model = network()
    del model[1]  # the statistics of its batches are per rank
    driver = FsdpDriver("cpu", timeout_s=100)
    run = trainer(callbacks, model=model, driver=driver, accumulate=2, max_epochs=3).fit()
    check = [one for one in callbacks if isinstance(one, ReplayCheck)]
    data = [dict(one.data) for one in run.decisions if one.what == "replay differed"]
    return content_of(run), check[0].steps if check else [], data


def both(make: Any) -> tuple[Result, Result, Result]:
    """Return the results of a run without the check, with it, and with flipped bits."""
    none = Flip(steps=[])  # with a hook before the batch, FSDP reduces gradients with each batch
    spoilt = [Flip(["activation", "gradient"], [3, 5], rank=1), ReplayCheck(every=1, action="majority")]
    return make(none), make(none, ReplayCheck(every=1)), make(*spoilt)


@pytest.mark.parametrize("make", [ddp, fsdp])
def test_two_ranks_repeat_a_step_name_the_wrong_rank_and_correct_it(make: Any) -> None:
    ranks = launch(lambda: both(make))
    if make is ddp:
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
    for clean, checked in launch(lambda: (fsdp(), fsdp(ReplayCheck(every=1)))):
        assert clean[0] == checked[0]
        assert checked[1:] == (list(range(2, 10)), [])


def three() -> tuple[Result, Result]:
    options = {"gradient_as_bucket_view": True}
    return ddp(**options), ddp(spoil_last_rank, ReplayCheck(every="3 steps", action="majority"), **options)


def test_of_three_ranks_the_one_with_other_weights_gets_those_of_the_others() -> None:
    ranks = launch(three, 3)
    for _, spoilt in ranks:
        assert spoilt[0] == ranks[0][1][0]
        assert [data["step"] for data in spoilt[2]] == [6]
        assert spoilt[2][0]["ranks"] == {"2": "the weight '4.weight'"}
        assert spoilt[2][0]["kind"] == "ranks differ"


def test_of_two_ranks_with_different_weights_both_are_named() -> None:
    """Nothing says which one is wrong."""
    for _, _, (data, *_) in launch(lambda: ddp(spoil_last_rank, ReplayCheck(every="6 steps", action="warn"))):
        assert data["ranks"] == dict.fromkeys(("0", "1"), "the weight '4.weight'")
