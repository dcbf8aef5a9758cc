"""A value is called the best if a callback of the run watched its metric, and so gave the direction that is better."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cadenza import Callback, on
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping
from cadenza.hooks.moments import BaseCallback
from cadenza.report import story_at
from cadenza.report.best import Best, best_of
from cadenza.status.decisions import decide
from cadenza.testing import tiny_run

from .pages import judge_by, report


def judged_run(directory: Path, losses: Sequence[float], *callbacks: BaseCallback) -> Path:
    tiny_run(epochs=len(losses), directory=directory, callbacks=[judge_by(losses), *callbacks])
    return directory


def test_a_checkpoint_that_keeps_the_best_gives_the_direction(tmp_path: Path) -> None:
    kept = Checkpoint("100 epochs", keep_best=("eval/loss", "max"))
    directory = judged_run(tmp_path / "run", [1.0, 3.0, 2.0], kept)
    assert best_of(story_at(directory), "eval/loss") == Best(10, 3.0, "Checkpoint", "max")


def test_the_best_is_found_when_its_checkpoint_was_written_for_another_reason(tmp_path: Path) -> None:
    evaluations: list[BaseCallback] = [Checkpoint("2 epochs", keep_best=("eval/loss", "min")), judge_by([4.0, 3.0, 2.0, 1.0])]
    tiny_run(epochs=4, directory=tmp_path / "run", callbacks=evaluations)
    story = story_at(tmp_path / "run")
    assert [kept.manifest["reason"] for kept in story.checkpoints][-1] == "every 2 epochs; eval/loss is 1, the best so far"
    assert best_of(story, "eval/loss") == Best(20, 1.0, "Checkpoint", "min")


def test_early_stopping_gives_the_direction_whether_it_stopped_the_run_or_not(tmp_path: Path) -> None:
    for patience in (2, 9):
        stopping = EarlyStopping("eval/loss", mode="min", patience=patience)
        directory = judged_run(tmp_path / str(patience), [3.0, 1.0, 2.0, 2.0, 2.0], stopping)
        assert best_of(story_at(directory), "eval/loss") == Best(10, 1.0, "EarlyStopping", "min")


def test_a_first_value_that_stayed_the_best_is_marked(tmp_path: Path) -> None:
    directory = judged_run(tmp_path / "run", [1.0, 2.0, 3.0], BestWeights("eval/loss", "min"))
    assert best_of(story_at(directory), "eval/loss") == Best(5, 1.0, "BestWeights", "min")
    assert report(directory).all("td", class_="best") == ["1 ★"]


def test_a_monitor_that_only_decisions_name_counts_and_two_that_disagree_do_not(tmp_path: Path) -> None:
    def watch(mode: str) -> BaseCallback:
        data = {"best": [{"monitor": "eval/loss", "mode": mode}, {"monitor": "eval/other", "mode": "max"}, "no mapping"]}
        return on(Callback.on_fit_end)(lambda run: decide(run, "judged", "as an adapter does", who=f"by {mode}", data=data))

    one, two = (
        judged_run(tmp_path / "1", [2.0, 1.0], watch("max")),
        judged_run(tmp_path / "2", [2.0], watch("max"), watch("min")),
    )
    assert best_of(story_at(one), "eval/loss") == Best(5, 2.0, "by max", "max")
    assert best_of(story_at(two), "eval/loss") is best_of(story_at(one), "eval/other") is None


def test_a_run_of_version_0_1_loads_and_the_report_says_less_of_it(tmp_path: Path) -> None:
    directory = judged_run(tmp_path / "run", [2.0, 3.0], BestWeights("eval/loss", "min"))
    rows = [json.loads(line) for line in (directory / "decisions.jsonl").read_text().splitlines()]
    texts = [json.dumps({name: value for name, value in row.items() if name != "data"}) for row in rows]
    (directory / "decisions.jsonl").write_text("\n".join([*texts, texts[0][:-1] + ', "data": 5}', ""]))
    info = json.loads((directory / "run.json").read_text())
    del info["monitors"]
    (directory / "run.json").write_text(json.dumps(info))
    story = story_at(directory)
    assert [decision.what for decision in story.decisions] == [row["what"] for row in rows]
    assert best_of(story, "eval/loss") is None
    assert story.problems == [f"1 line of decisions.jsonl cannot be read, the first is line {len(rows) + 1}"]
    assert "a version before 0.2 wrote them" in report(directory).words


def test_a_metric_without_a_monitor_has_both_ends_marked_and_no_best(tmp_path: Path) -> None:
    seen = report(judged_run(tmp_path / "run", [2.0, 3.0, 1.0]))
    assert seen.all("td", class_="best") == []
    assert (seen.all("td", class_="max"), seen.all("td", class_="min")) == (["3 ▴"], ["1 ▾"])
    assert "Where no callback watched a metric, ▴ is its highest value and ▾ its lowest." in seen.words


def test_what_is_not_finite_is_neither_the_best_nor_an_end(tmp_path: Path) -> None:
    seen = report(judged_run(tmp_path / "run", [2.0, float("nan"), 1.0, float("-inf")]))
    assert (seen.all("td", class_="max"), seen.all("td", class_="min")) == (["2 ▴"], ["1 ▾"])
    assert {"nan", "-inf"} <= set(seen.all("td"))


def test_evaluations_of_one_run_stand_beside_one_another(tmp_path: Path) -> None:
    other = judge_by([5.0], name="test", every="2 epochs")
    seen = report(judged_run(tmp_path / "run", [2.0, 3.0], other))
    assert seen.all("tr")[:3] == ["epochstepeval/losstest/loss", "152 ▾-", "2103 ▴5"]
