"""The best is what a callback of the run decided; where nobody did, nothing is called the best."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping
from cadenza.hooks.moments import BaseCallback
from cadenza.report import story_at
from cadenza.report.best import Best, best_of
from cadenza.testing import tiny_run

from .pages import judge_by, report


def judged_run(directory: Path, losses: Sequence[float], *callbacks: BaseCallback) -> Path:
    tiny_run(epochs=len(losses), directory=directory, callbacks=[judge_by(losses), *callbacks])
    return directory


def test_a_checkpoint_that_is_kept_as_the_best_tells_which_way_is_better(tmp_path: Path) -> None:
    kept = Checkpoint("100 epochs", keep_best=("eval/loss", "max"))
    directory = judged_run(tmp_path / "run", [1.0, 3.0, 2.0], kept)
    assert best_of(story_at(directory), "eval/loss") == Best(10, 3.0, "Checkpoint", "max")


def test_it_is_found_also_when_a_checkpoint_was_written_for_another_reason(tmp_path: Path) -> None:
    evaluations: list[BaseCallback] = [Checkpoint("2 epochs", keep_best=("eval/loss", "min")), judge_by([4.0, 3.0, 2.0, 1.0])]
    tiny_run(epochs=4, directory=tmp_path / "run", callbacks=evaluations)
    story = story_at(tmp_path / "run")
    assert [kept.facts["reason"] for kept in story.checkpoints][-1] == "every 2 epochs"
    assert best_of(story, "eval/loss") == Best(20, 1.0, "Checkpoint", "min")


def test_early_stopping_tells_it_when_it_stopped_the_run(tmp_path: Path) -> None:
    directory = judged_run(tmp_path / "run", [3.0, 1.0, 2.0, 2.0, 2.0], EarlyStopping("eval/loss", mode="min", patience=2))
    assert best_of(story_at(directory), "eval/loss") == Best(10, 1.0, "EarlyStopping", "min")


def test_best_weights_tell_it_when_they_are_put_back(tmp_path: Path) -> None:
    directory = judged_run(tmp_path / "run", [3.0, 1.0, 2.0], BestWeights("eval/loss", "min"))
    assert best_of(story_at(directory), "eval/loss") == Best(10, 1.0, "BestWeights", "min")


def test_a_first_value_that_stayed_the_best_is_marked_though_the_way_is_not_known(tmp_path: Path) -> None:
    directory = judged_run(tmp_path / "run", [1.0, 2.0, 3.0], BestWeights("eval/loss", "min"))
    assert best_of(story_at(directory), "eval/loss") == Best(5, 1.0, "BestWeights", "")
    assert report(directory).all("td", class_="best") == ["1 ★"]


def test_where_nobody_decided_both_ends_are_marked_and_none_is_the_best(tmp_path: Path) -> None:
    seen = report(judged_run(tmp_path / "run", [2.0, 3.0, 1.0]))
    assert seen.all("td", class_="best") == []
    assert (seen.all("td", class_="max"), seen.all("td", class_="min")) == (["3 ▴"], ["1 ▾"])
    assert "Where nobody decided which way is better, ▴ is the highest value and ▾ the lowest." in seen.words


def test_what_is_not_finite_is_neither_the_best_nor_an_end(tmp_path: Path) -> None:
    seen = report(judged_run(tmp_path / "run", [2.0, float("nan"), 1.0, float("-inf")]))
    assert (seen.all("td", class_="max"), seen.all("td", class_="min")) == (["2 ▴"], ["1 ▾"])
    assert {"NaN", "-Infinity"} <= set(seen.all("td"))


def test_evaluations_of_one_run_stand_beside_one_another(tmp_path: Path) -> None:
    other = judge_by([5.0], name="test", every="2 epochs")
    seen = report(judged_run(tmp_path / "run", [2.0, 3.0], other))
    assert seen.all("tr")[:3] == ["epochstepeval/losstest/loss", "152 ▾-", "2103 ▴5"]
