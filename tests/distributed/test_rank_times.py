"""The profile of several ranks names the slowest one in each part of a step."""

from __future__ import annotations

import json
import time
from pathlib import Path

from torch import Tensor, nn

from cadenza import Callback, Run, on
from cadenza.callbacks import Profile
from cadenza.report import page, story_at
from cadenza.testing import launch
from tests.distributed.parts import Batch, own_rank, squared_error, trainer


def test_the_slowest_rank_of_each_part_is_in_the_profile_and_in_the_report(tmp_path: Path) -> None:
    def slow_forward(model: nn.Module, batch: Batch) -> Tensor:
        time.sleep(0.05 * own_rank())
        return squared_error(model, batch)

    @on(Callback.on_step_end)
    def slow_hook(run: Run) -> None:
        time.sleep(0.05 * (1 - own_rank()))
        run.driver.barrier()

    def fit() -> tuple[dict[str, int], str, bool]:
        one = trainer(compute_loss=slow_forward, callbacks=[Profile(), slow_hook], directory=tmp_path)
        profile = one.fit().profile
        assert profile is not None
        shown = {one.part: one.slowest for one in profile.ranks}
        return shown, str(profile), "reduce" in vars(one.driver)

    main, other = launch(fit)
    assert set(main[0]) == {"data", "forward", "backward", "callbacks", "waiting"}
    assert (main[0]["forward"], main[0]["callbacks"]) == (1, 0)
    assert "slowest rank by part:" in main[1]
    assert "waiting for ranks" in main[1]
    assert other[0] == {}
    assert not main[2]
    written = json.loads((tmp_path / "profile.json").read_text())["ranks"]
    assert [one["slowest"] for one in written if one["part"] == "forward"] == [1]
    assert "by rank" in page([story_at(tmp_path)])
