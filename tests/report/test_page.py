"""The page holds all that a run wrote, whatever state its directory is in, with its media; and it stays small."""

from __future__ import annotations

import html
import json
import math
import random
import re
import shutil
import wave
from array import array
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import pytest
import torch
from matplotlib.figure import Figure as Drawing
from PIL import Image as Pillow

from cadenza import Audio, Callback, Figure, Histogram, Image, Run, Text, on
from cadenza.callbacks import BestWeights, Checkpoint, EarlyStopping, LogTraining, Profile
from cadenza.hooks.moments import BaseCallback
from cadenza.records.record import Record
from cadenza.report import page, pictures, small, story_at
from cadenza.report.best import Best, best_of
from cadenza.report.page import LIMIT
from cadenza.report.story import Series, Story
from cadenza.sinks import Console, Csv, ProgressBar
from cadenza.sinks import media as media_files
from cadenza.status.decisions import decide
from cadenza.status.progress import Counters
from cadenza.testing import tiny_run, tiny_trainer

from .pages import Parsed, finished_run, judge_by, logging, report


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all that the report tells of; tests that change its files change a copy."""
    return finished_run(tmp_path_factory.mktemp("runs") / "first", (3.0, 1.0, 2.0), Broken())


@pytest.fixture
def changed(first: Path, tmp_path: Path) -> Path:
    return shutil.copytree(first, tmp_path / "first", symlinks=True)


def rewrite(file: Path, **facts: object) -> None:
    """Change facts in a file of JSON."""
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **facts}), encoding="utf-8")


class Broken(Callback):
    on_fault = "disable"

    def on_step_end(self, run: Run) -> None:
        raise ConnectionError("the tracker is down")


def test_the_page_tells_all_that_the_run_wrote(first: Path) -> None:
    seen = report(first)
    assert "finished: the limit is reached" in seen.words
    names = [one["name"] for one in seen.data["charts"]]
    assert names == ["train/loss", "train/lr", "train/samples_per_s", "train/steps_per_s", "eval/loss"]
    assert seen.all("span", class_="name") == names
    assert seen.all("h3") == ["train", "eval"]
    kept = sorted(path.name for path in (first / "checkpoints").glob("step-*"))
    assert [text for text in seen.all("code") if text.startswith("step-")] == kept
    assert "on_step_end raised ConnectionError('the tracker is down')" in seen.all("p", class_="fault")[0]
    facts = json.loads((first / "run.json").read_text(encoding="utf-8"))
    assert all(value in seen.words for value in (facts["id"], facts["versions"]["torch"], facts["arguments"]["model"]))
    assert seen.all("td", class_="best") == ["1 ★"]
    assert "★ eval/loss: 1 at step 10 (lower is better, watched by Checkpoint)." in seen.words
    assert "Add Profile() to its callbacks" in seen.words


def test_every_chart_has_a_title_and_says_in_words_what_it_shows_and_nothing_is_fetched_from_anywhere(first: Path) -> None:
    seen = report(first)
    charts = [has for tag, has, _ in seen.elements if tag == "svg"]
    named = {has["id"]: "".join(words) for tag, has, words in seen.elements if tag in ("title", "desc") and "id" in has}
    told = [[named[one] for one in (has["aria-labelledby"] or "").split()] for has in charts]
    assert told[-1] == ["eval/loss", "Values over the steps 5 to 15, from 1 to 3."]
    assert len(told) == 5
    links = [has[key] for _, has, _ in seen.elements for key in ("src", "href", "action", "srcset") if has.get(key)]
    assert links
    assert all((link or "").startswith("#") for link in links)
    assert not re.search(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", seen.text)
    (policy,) = [has["content"] or "" for tag, has, _ in seen.elements if tag == "meta" and "http-equiv" in has]
    assert policy.startswith("default-src 'none'; ")


def test_files_and_results_count_completed_epochs_and_lines_show_the_current_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An epoch that a limit cut short is none; and what came after the last record counts."""
    log = LogTraining("2 steps", throughput=False)
    for steps, counted, said in ((4, "0 epochs, 4 steps", "4 steps, in epoch 1"), (5, "1 epoch, 5 steps", "1 epoch, 5 steps")):
        place = tmp_path / str(steps)
        sinks = [Csv(), Console(), ProgressBar("plain")]
        run = tiny_run(epochs=1 if steps == 5 else None, steps=steps, directory=place, callbacks=[log, *sinks])
        rows = (place / "metrics.csv").read_text(encoding="utf-8").splitlines()[1:]
        lines = capsys.readouterr().out.splitlines()
        shown = [line.split()[1] for line in lines if re.match(r"epoch \d  step \d  train", line)]
        assert [row.split(",")[0] for row in rows] == ["0", "0"]
        assert shown == ["1", "1"]
        assert any(line.startswith(f"finished after {said}, ") for line in lines)
        assert any(line.startswith("epoch 1") and f"step {steps}/{steps}  100%" in line for line in lines)
        assert f" · {counted}, " in small(run)
        card = dict(zip(*(report(place).all(tag)[:2] for tag in ("dt", "dd")), strict=True))
        assert card == {"epochs": counted[0], "steps": str(steps)}


def test_several_runs_share_the_charts_and_stand_side_by_side(tmp_path: Path) -> None:
    one, other = finished_run(tmp_path / "a" / "run", (3.0, 2.0)), finished_run(tmp_path / "b" / "run", (3.0, 1.0))
    seen = report(one, other)
    assert seen.all("h1") == ["a/run, b/run"]
    assert seen.all("button", aria_pressed="true") == ["a/run", "b/run"]
    assert all([line["run"] for line in one["lines"]] == [0, 1] for one in seen.data["charts"])
    assert all(len({line["run"] for line in one["lines"]}) == 2 for one in seen.data["charts"])
    assert "eval/loss, best" in seen.all("th")
    assert seen.all("tr")[0:3] == ["runeval/loss, best", "a/run2", "b/run1 ★"]


def test_a_run_that_goes_on_or_was_killed_is_read_as_far_as_it_came(first: Path, changed: Path) -> None:
    rewrite(changed / "run.json", outcome=None, ended=None)
    for name in ("metrics.jsonl", "decisions.jsonl"):
        with (changed / name).open("ab") as file:
            file.truncate((changed / name).stat().st_size - 20)
    seen = report(changed)
    assert "in progress or killed: run.json holds no outcome; last record 20" in seen.words
    assert seen.all("p", class_="fault") == report(first).all("p", class_="fault")
    assert [len(one["lines"][0]["x"]) for one in seen.data["charts"]] == [15, 15, 15, 15, 2]


def test_broken_lines_files_and_checkpoints_are_named_and_the_rest_is_there(changed: Path) -> None:
    lines = (changed / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    (changed / "metrics.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]) + "\n", encoding="utf-8")
    (changed / "profile.json").write_text("{", encoding="utf-8")
    (changed / "checkpoints" / "step-00000015" / "manifest.json").write_text("{", encoding="utf-8")
    seen = report(changed)
    assert "1 line of metrics.jsonl cannot be read, the first is line 2" in seen.all("p", class_="fault")
    assert any(text.startswith("profile.json cannot be read") for text in seen.all("p", class_="fault"))
    assert any("manifest.json cannot be read" in text for text in seen.all("span", class_="fault"))
    assert len(seen.data["charts"][0]["lines"][0]["x"]) == 15


def test_records_alone_are_enough_and_a_run_that_wrote_nothing_yet_has_a_page(tmp_path: Path) -> None:
    for name in ("records", "nothing"):
        (tmp_path / name).mkdir()
    record = Record(Counters(step=3), 1e9, {"loss": 0.5})
    (tmp_path / "records" / "metrics.jsonl").write_text(record.to_json() + "\n", encoding="utf-8")
    assert report(tmp_path / "records").data["charts"][0]["lines"][0] == {"run": 0, "x": [3], "y": [0.5]}
    (tmp_path / "nothing" / "run.json").write_text("{}", encoding="utf-8")
    assert "This run has no records." in report(tmp_path / "nothing").words


def test_times_stand_by_phase_and_callback_the_longest_first_and_the_plan_is_there_if_it_was_kept(changed: Path) -> None:
    phases = [{"name": "fetch", "calls": 15, "seconds": 0.5}, {"name": "forward", "calls": 15, "seconds": 1.5}]
    callbacks = [{"callback": "LogTraining", "moment": "on_step_end", "calls": 15, "seconds": 0.2}]
    profile = {"wall_s": 2.0, "steps": 15, "phases": phases, "callbacks": callbacks}
    (changed / "profile.json").write_text(json.dumps(profile), encoding="utf-8")
    rows = report(changed).all("tr")
    assert rows.index("forward151.5 s75.0 %100 ms") < rows.index("fetch15500 ms25.0 %33.3 ms")
    assert "LogTrainingon_step_end15200 ms10.0 %13.3 ms" in rows
    for plan, shown in (("on_setup  <Mine>", ["on_setup  <Mine>"]), (None, [])):
        rewrite(changed / "run.json", plan=plan)
        assert report(changed).all("pre") == shown


def test_what_profile_measured_is_shown(tmp_path: Path) -> None:
    rows = report(finished_run(tmp_path / "first", (2.0, 1.0), Profile())).all("tr")
    assert any(re.match(r"forward10\d", row) for row in rows)
    assert any(row.startswith("Checkpointon_") for row in rows)


NASTY = "</script><script>alert('&amp;')</script><img src=x onerror=alert(1)>\""


def test_names_and_reasons_are_text_whatever_they_hold(tmp_path: Path) -> None:
    class Nasty(Callback):
        on_fault = "disable"

        def on_step_end(self, run: Run) -> None:
            raise ValueError(NASTY)

    directory = tmp_path / "<b>run"
    tiny_run(directory=directory, callbacks=[logging([1.0] * 5, f"train/{NASTY}"), Nasty()])
    seen = report(directory)
    assert [tag for tag, _, _ in seen.elements].count("script") == 2
    assert not seen.all("img")
    assert seen.all("h1") == ["<b>run"]
    assert seen.data["charts"][0]["name"] == f"train/{NASTY}"
    assert html.escape(f"{NASTY[:9]}") in seen.text


def many(directory: Path, records: int, names: int) -> Path:
    """Write a run by hand that nobody wants to wait for; every 1000th value is not finite."""
    directory.mkdir()
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(1, records + 1):
            values = {f"train/{i}": math.sin(step * (i + 1)) if step % 1000 else math.nan for i in range(names)}
            file.write(Record(Counters(step=step), 1e9 + step, values).to_json() + "\n")
    return directory


def test_50000_records_stay_small_and_the_page_says_that_they_were_thinned(tmp_path: Path) -> None:
    seen = report(many(tmp_path / "long", 50_000, 1))
    assert len(seen.text.encode()) < LIMIT
    (count,) = seen.all("p", class_="count")
    assert re.fullmatch(
        r"50,000 points, thinned to [\d,]+, 50 not finite, strong line: mean of 2,497 values around each step", count
    )
    line = seen.data["charts"][0]["lines"][0]
    assert line["x"][0] == 1
    assert sum(line["x"]) == 50_000
    assert None in line["y"]


def test_very_many_values_stay_small_and_the_page_says_what_is_left_out(tmp_path: Path) -> None:
    seen = report(many(tmp_path / "wide", 3, 1500))
    assert len(seen.text.encode()) < LIMIT
    assert re.search(r"[\d,]+ more values were logged and are left out here\.", seen.words)


def test_100_runs_of_20_metrics_are_one_page_below_its_limit_with_all_charts() -> None:
    steps, chance = range(1, 301), random.Random(0)
    noise = [[chance.gauss(2, 1) / step**0.5 for step in steps] for _ in range(20)]  # the longest data: noisy, all digits
    series = {f"group/{i}": Series(array("q", steps), array("d", values)) for i, values in enumerate(noise)}
    arguments = [{"lr": chance.random(), "tags": ["a", number], "extra": {"b": None}} for number in range(100)]
    stories = [Story(f"run-{i}", {"arguments": one}, dict(series), Counters(step=300)) for i, one in enumerate(arguments)]
    text = page(stories)
    assert 1_000_000 < len(text.encode()) < LIMIT
    assert text.count("<figure data-chart=") == 20


def test_a_long_list_of_decisions_is_summed_up(tmp_path: Path) -> None:
    class Skipping(Callback):
        def on_batch_start(self, run: Run, batch: object) -> None:
            run.skip_batch("too long")

    tiny_run(directory=tmp_path / "run", batches=400, callbacks=[Skipping(), LogTraining("1 step", outputs=())])
    seen = report(tmp_path / "run")
    assert any(row.startswith("batch skippedSkipping400") for row in seen.all("tr"))
    assert "the last 300 of 400" in seen.all("summary")


def test_a_directory_read_while_the_run_holds_it_does_not_loosen_its_lock(tmp_path: Path) -> None:
    class Looking(Callback):
        def on_fit_end(self, run: Run) -> None:
            assert run.info.directory
            assert story_at(run.info.directory).kind == ""
            locks = Path("/proc/locks")
            if locks.exists():
                inode = (run.info.directory / "run.lock").stat().st_ino
                assert f":{inode} " in locks.read_text(encoding="utf-8")

    tiny_run(directory=tmp_path, callbacks=[Looking()])


def test_the_small_page_of_a_notebook_shows_the_outcome_and_a_curve_for_each_value_and_needs_no_script(tmp_path: Path) -> None:
    run = tiny_run(epochs=200, directory=tmp_path / "first", callbacks=[LogTraining("1 step")])
    seen = Parsed(f"<body>{small(run)}</body>")
    assert seen.words.startswith("first · finished: the limit is reached · 200 epochs, 1,000 steps, 2,000 samples")
    assert seen.all("th", scope="row") == run.history.names
    assert len(seen.all("svg")) == 4
    assert len(seen.text) < 12_000
    assert not {"script", "style", "link"} & {tag for tag, _, _ in seen.elements}
    assert run._repr_html_() == small(run)


def test_the_small_page_of_a_run_under_way_shows_a_fault_and_odd_values_are_shown_too() -> None:
    shown: list[str] = []

    class Fragile(Callback):
        on_fault = "disable"

        def on_step_start(self, run: Run) -> None:
            raise ConnectionError("<down>")

    show = [on(moment)(lambda run: shown.append(small(run))) for moment in (Callback.on_fit_start, Callback.on_epoch_end)]
    tiny_run(callbacks=[Fragile(), logging([1.0, math.nan, math.inf, 2.0, 3.0]), *show])
    assert "in progress · 0 epochs, 0 steps" in shown[0]
    assert "ConnectionError(&#x27;&lt;down&gt;&#x27;)" in shown[1]
    assert "train/odd" in shown[1]


# -- the best value of a metric that a callback watched ---------------------------------------------------


def judged_run(directory: Path, losses: Sequence[float], *callbacks: BaseCallback) -> Path:
    tiny_run(epochs=len(losses), directory=directory, callbacks=[judge_by(losses), *callbacks])
    return directory


@pytest.mark.parametrize(
    ("losses", "watching", "best"),
    [
        ([1.0, 3.0, 2.0], Checkpoint("100 epochs", keep_best=("eval/loss", "max")), Best(10, 3.0, "Checkpoint", "max")),
        ([3.0, 1.0, 2.0, 2.0, 2.0], EarlyStopping("eval/loss", "min", patience=2), Best(10, 1.0, "EarlyStopping", "min")),
        ([3.0, 1.0, 2.0, 2.0, 2.0], EarlyStopping("eval/loss", "min", patience=9), Best(10, 1.0, "EarlyStopping", "min")),
        ([1.0, 2.0, 3.0], BestWeights("eval/loss", "min"), Best(5, 1.0, "BestWeights", "min")),
    ],
    ids=["checkpoint", "stopped", "not stopped", "the first stayed the best"],
)
def test_a_callback_that_watches_gives_the_direction(
    losses: list[float], watching: BaseCallback, best: Best, tmp_path: Path
) -> None:
    directory = judged_run(tmp_path / "run", losses, watching)
    assert best_of(story_at(directory), "eval/loss") == best
    assert report(directory).all("td", class_="best") == [f"{best.value:g} ★"]


def test_the_best_is_found_when_its_checkpoint_was_written_for_another_reason(tmp_path: Path) -> None:
    evaluations: list[BaseCallback] = [Checkpoint("2 epochs", keep_best=("eval/loss", "min")), judge_by([4.0, 3.0, 2.0, 1.0])]
    tiny_run(epochs=4, directory=tmp_path / "run", callbacks=evaluations)
    story = story_at(tmp_path / "run")
    assert [kept.manifest["reason"] for kept in story.checkpoints][-1] == "every 2 epochs; eval/loss is 1, the best so far"
    assert best_of(story, "eval/loss") == Best(20, 1.0, "Checkpoint", "min")


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


def test_a_metric_without_a_monitor_has_both_finite_ends_marked_and_no_best(tmp_path: Path) -> None:
    seen = report(judged_run(tmp_path / "run", [2.0, 3.0, 1.0]))
    assert seen.all("td", class_="best") == []
    assert (seen.all("td", class_="max"), seen.all("td", class_="min")) == (["3 ▴"], ["1 ▾"])
    assert "Where no callback watched a metric, ▴ is its highest value and ▾ its lowest." in seen.words
    seen = report(judged_run(tmp_path / "odd", [2.0, float("nan"), 1.0, float("-inf")]))
    assert (seen.all("td", class_="max"), seen.all("td", class_="min")) == (["2 ▴"], ["1 ▾"])
    assert {"nan", "-inf"} <= set(seen.all("td"))
    two = report(judged_run(tmp_path / "two", [2.0, 3.0], judge_by([5.0], name="test", every="2 epochs")))
    assert two.all("tr")[:3] == ["epochstepeval/losstest/loss", "152 ▾-", "2103 ▴5"]  # side by side


# -- media: files in the run directory, of which the report shows as many as it has room for -----------


def media(side: int = 4) -> BaseCallback:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        step, drawing = run.progress.step, Drawing(figsize=(1, 1))
        drawing.subplots().plot([0, step])
        run.log("train/image", Image(torch.full((3, side, side), step / 10)))
        run.log({"figure": Figure(drawing), "weights": Histogram(torch.arange(10.0)), "note": Text(f"<b>step {step}")})
        run.log("tone", Audio(torch.sin(torch.arange(80.0)), 8000))

    return log


def noise(side: int, steps: int) -> BaseCallback:
    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        if run.progress.step <= steps:
            run.log("noise", Image(torch.rand(3, side, side, generator=torch.Generator().manual_seed(run.progress.step))))

    return log


def test_each_kind_of_media_is_a_file_that_other_programs_read(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, callbacks=[media()], steps=2)
    folder = tmp_path / "media"
    assert sorted(path.name for path in folder.iterdir()) == ["figure", "note", "tone", "train%2Fimage", "weights"]
    with Pillow.open(folder / "train%2Fimage" / "0000000002.png") as picture:
        assert (picture.size, picture.getpixel((0, 0))) == ((4, 4), (51, 51, 51))
    with wave.open(str(folder / "tone" / "0000000001.wav")) as tone:
        assert (tone.getframerate(), tone.getnframes()) == (8000, 80)
    assert sum(json.loads((folder / "weights" / "0000000001.json").read_text())["counts"]) == 10
    assert (folder / "note" / "0000000002.txt").read_text() == "<b>step 2"


def test_no_media_are_written_outside_of_the_folder_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run(callbacks=[media()], steps=1)  # no directory
    assert not list(tmp_path.iterdir())
    tiny_run(directory=tmp_path / "run", steps=1)  # no media
    assert not (tmp_path / "run" / "media").exists()
    odd = ("../../out", "..", "/etc/x", "a\\b", "x" * 1000)
    log = on(Callback.on_step_end)(lambda run: run.log({name: Text("x") for name in odd}))
    tiny_run(directory=tmp_path / "odd", callbacks=[log], steps=1)
    assert {path.name for path in tmp_path.iterdir()} == {"run", "odd"}
    folders = [path.name for path in (tmp_path / "odd" / "media").iterdir()]
    assert len(folders) == 5
    assert not any("." in name or "/" in name for name in folders)


def test_a_full_directory_leaves_media_out_and_the_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "FILES", 3)
    run = tiny_run(directory=tmp_path, callbacks=[media()], steps=2)
    assert len(list((tmp_path / "media").glob("*/*"))) == 3
    assert "the directory keeps 3 media files and 200 MB at most" in run.why("not kept")
    assert "the directory keeps 3 media files" in " ".join(report(tmp_path).all("p", class_="fault"))


def test_a_continued_run_replaces_files_also_in_a_full_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_files, "FILES", 6)

    def trained(steps: int) -> Run:
        callbacks = [noise(4, 9), Checkpoint(every="4 steps", background=False)]
        trainer = tiny_trainer(directory=tmp_path, batches=9, steps=steps, seed=1, callbacks=callbacks)
        return trainer.fit(resume="auto")

    trained(6)
    for kept in sorted((tmp_path / "checkpoints").glob("step-*6")):  # as if the process was killed after step 4
        shutil.rmtree(kept)
    (tmp_path / "media" / "noise" / "0000000005.png").write_bytes(b"of the earlier attempt")
    run = trained(7)
    assert len(list((tmp_path / "media").glob("*/*"))) == 6
    assert (tmp_path / "media" / "noise" / "0000000005.png").read_bytes().startswith(b"\x89PNG")
    assert "first that is left out is 'noise' of step 7" in run.why("not kept")


def test_media_that_are_logged_faster_than_written_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = Event()
    encode = media_files._encoded
    monkeypatch.setattr(media_files, "_encoded", lambda medium: written.wait(200) and encode(medium))

    @on(Callback.on_step_end)
    def log(run: Run) -> None:
        if run.progress.step == 9:
            written.set()
        else:
            run.log("large", Image(torch.zeros(1, 7000, 3000, dtype=torch.uint8)))

    run = tiny_run(directory=tmp_path, batches=9, steps=9, callbacks=[log])
    assert "the media of 3 records are left out, the first of step 6" in run.why("not kept")
    assert len(list((tmp_path / "media").glob("*/*"))) == 5


def test_a_disk_that_takes_no_media_does_not_end_the_run(tmp_path: Path) -> None:
    @on(Callback.on_fit_start)
    def block(run: Run) -> None:
        (tmp_path / "media").write_text("a file in its way")

    run = tiny_run(directory=tmp_path, callbacks=[block, media()], steps=3)
    assert (run.outcome and run.outcome.kind) == "finished"
    assert "media cannot be written" in run.why("not kept")


def test_the_report_shows_all_kinds_with_the_last_step_open(tmp_path: Path) -> None:
    for name in ("one", "two"):
        tiny_run(directory=tmp_path / name, callbacks=[media()], steps=3)
    seen = report(tmp_path / "one", tmp_path / "two")
    heads = seen.all("h3")
    assert heads[heads.index("figure") :][:5] == ["figure", "note", "tone", "train/image", "weights"]
    alts = [has["alt"] for tag, has, _ in seen.elements if tag == "img"]
    assert "train/image, two, step 3" in alts
    assert len(alts) == 2 * 2 * 3
    items = [has for tag, has, _ in seen.elements if tag == "div" and "data-step" in has]
    assert {has["data-step"] for has in items if "hidden" not in has} == {"3"}
    assert "<b>step 3" in seen.all("pre")
    sources = [has["src"] or "" for _, has, _ in seen.elements if has.get("src")]
    assert all(source.startswith(("data:image/png;base64,", "data:audio/wav;base64,")) for source in sources)
    assert any("10 values from 0 to 9" in (has.get("aria-label") or "") for _, has, _ in seen.elements)


def test_the_page_has_room_for_some_and_counts_the_others_the_last_and_the_first_of_each_come_first(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, callbacks=[noise(170, 20)], batches=20)
    seen = report(tmp_path)
    assert len(seen.text.encode()) < LIMIT
    steps = [int(has["data-step"] or 0) for _, has, _ in seen.elements if "data-step" in has]
    assert {1, 20} <= set(steps)
    assert 5 <= len(steps) < 20
    assert f"{20 - len(steps)} files left out" in seen.words


def test_a_large_picture_is_made_smaller_and_a_small_one_is_shown_larger_but_not_taller_than_the_screen(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path / "large", callbacks=[noise(700, 1)], steps=1)
    (source,) = [has["src"] or "" for tag, has, _ in report(tmp_path / "large").elements if tag == "img"]
    assert 1000 < len(source) < 1.4 * pictures.ONE
    small = {"small": Image(torch.rand(1, 8, 8)), "tall": Image(torch.rand(1, 300, 8))}
    log = on(Callback.on_step_end)(lambda run: run.log(dict(small)))
    tiny_run(directory=tmp_path / "small", steps=1, callbacks=[log])
    sizes = [(has["width"], has["height"]) for tag, has, _ in report(tmp_path / "small").elements if tag == "img"]
    assert sizes == [("160", "160"), ("8", "300")]


DAMAGED = {
    "0000000001.png": b"<svg onload=alert(1)>",
    "0000000001.wav": b"x",
    "0000000001.json": b"{}",
    "x.png": b"",
    "0000000001.svg": b"",
}


def test_files_that_are_no_media_are_left_out(tmp_path: Path) -> None:
    tiny_run(directory=tmp_path, steps=3)
    folder = tmp_path / "media" / "<i>bad"
    folder.mkdir(parents=True)
    for name, content in DAMAGED.items():
        (folder / name).write_bytes(content)
    (folder / "0000000002.png").symlink_to(tmp_path / "run.json")
    (folder / "0000000009.txt").write_text("a step that the run has not reached")
    seen = report(tmp_path)
    assert not seen.all("i")
    assert "4 files left out" in seen.words
    assert list(pictures.media_of([story_at(tmp_path)])) == ["<i>bad"]
