"""When checkpoints are saved, and which are kept: keep rules, that they compose, and blocks in which no save is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza import Callback, Run, Trainer, on
from cadenza.callbacks import Best, Checkpoint, Evaluate
from cadenza.checkpoint.keep_rules import CheckpointRule, Keep, Known, line_of, parts_of, rule_of
from cadenza.checkpoint.retention import Retention, kept_by
from cadenza.checkpoint.store import Saved, Store
from cadenza.checkpoint.store.files import LocalFiles
from cadenza.checkpoint.store.manifest import MANIFEST
from cadenza.errors import ScheduleError
from cadenza.hooks import At, Between, Every, First, Last
from cadenza.hooks.moments import Moment
from cadenza.testing import launch, tiny_loader, tiny_run, tiny_trainer
from tests.callbacks.test_checkpoint import Scripted, bests, decided, manifest, names

LIMITS = SimpleNamespace(
    batches_per_epoch=4, has_epochs=True, total=lambda unit, accumulate=1: {"step": 80 // accumulate}.get(unit)
)


def known(step: int, **facts: Any) -> Known:
    """Return a checkpoint of a run with 4 batches an epoch, with a step a minute."""
    abandoned = facts.pop("abandoned", False)
    rank = (0, 0, step, 1) if abandoned else (1, 0, step, facts.pop("again", 1))
    counters = {
        "epoch": step // 4,
        "batch_in_epoch": step % 4,
        "batches_per_epoch": 4,
        "samples": 10 * step,
        "tokens": 7 * step,
    }
    whole = {"exact": True, "asked_by": ["Checkpoint"], "began": 1e9, "time": 1e9 + 60 * step}
    return Known.of(Saved(step, rank[3], f"step-{step:08d}"), rank, {**counters, **whole, **facts})


LINE = [known(step) for step in (2, 4, 6, 8, 11, 12)]


def steps(rule: Any, line: Sequence[Known] = LINE, limits: Any = LIMITS) -> list[int]:
    return sorted(one.saved.step for one in rule_of(rule, limits, 2)(line_of(line)))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (Last(2), [11, 12]), (Last("5 steps"), [8, 11, 12]), (Last("6 min"), [8, 11, 12]), (Last("1 epoch"), [11, 12]),
        (First(2), [2, 4]), (First("6 steps"), [2, 4, 6]), (First("1 epoch"), [2, 4]),
        (Every("4 steps"), [4, 8, 12]), (Every("5 steps"), [6, 11]),
        (Every("0.05 h"), [4, 6, 11, 12]), (Every("1 epoch"), [4, 8, 12]),
        (Every("0.5 epoch"), [2, 4, 6, 8, 11, 12]), (Every("50 samples"), [6, 11]), (Every("35 tokens"), [6, 11]),
        (Every("25%"), [11]),
        (Every(4), [4, 8, 12]), (At("5 steps"), [6]), (At("2 epochs"), [8]), (At("50 steps"), []),
    ],
)  # fmt: skip
def test_each_rule_keeps(rule: Any, expected: list[int]) -> None:
    assert steps(rule) == expected


@pytest.mark.parametrize(
    ("count", "mode", "expected"), [(1, "max", [4]), (2, "max", [4, 8]), (3, "min", [2, 6, 12]), (9, "max", [2, 4, 6, 8, 12])]
)
def test_of_equal_results_the_earlier_is_better_and_what_is_not_finite_is_never_kept(
    count: int, mode: Any, expected: list[int]
) -> None:
    values = {2: 0.1, 4: 0.9, 6: 0.5, 8: 0.9, 11: float("nan"), 12: 0.5}
    line = [known(step, values={"acc": value}) for step, value in values.items()]
    assert steps(Best("acc", count, mode=mode), [*line, known(13, values={"acc": 5.0}, finite=False), known(14)]) == expected


@pytest.mark.parametrize("rule", [Last(3), Last("5 steps"), First(2), Every("3 steps"), Every("4 min"), At("5 steps")])
def test_a_rule_keeps_what_it_kept_when_the_others_are_gone(rule: Any) -> None:
    for length in range(1, len(LINE) + 1):
        once = [one for one in LINE[:length] if one.saved.step in steps(rule, LINE[:length])]
        assert steps(rule, once) == [one.saved.step for one in once]


@pytest.mark.parametrize(
    ("rule", "expected"), [(Last(4), [3, 4, 6, 8]), (First(1), [2]), (Every("4 steps"), [4, 8]), (At("3 steps"), [4])]
)
def test_abandoned_ones_count_as_older_than_all_and_only_a_number_of_newest_keeps_them(rule: Any, expected: list[int]) -> None:
    present = [known(step) for step in (2, 4, 6, 8)]
    abandoned = [known(step, abandoned=True) for step in (1, 3)]
    line = [*present[1:], *abandoned] if rule == Last(4) else [*present, *abandoned]
    assert steps(rule, line) == expected


def test_of_a_step_that_was_saved_twice_the_one_at_which_a_run_can_continue_counts_with_the_results_of_both() -> None:
    twice = [known(4, values={"acc": 0.5}), known(4, again=2, exact=False), known(4, again=3, weights_only=True)]
    [one] = line_of(twice)
    assert (one.saved.again, dict(one.values)) == (1, {"acc": 0.5})
    [later] = line_of([known(4, values={"acc": 0.5}), known(4, again=2, asked_by=["other"])])
    assert (later.saved.again, dict(later.values), {*later.owners}) == (2, {"acc": 0.5}, {"Checkpoint", "other"})


@pytest.mark.parametrize(
    "keep",
    [Last(2) | Best("eval/acc", 3, mode="max") | Every("6 h"), Best("eval/acc", 3, mode="max") | (Last(2) | Every("6 h")),
     [Last(2), Best("eval/acc", 3, mode="max") | Every("6 h")], (Last(2) | Every("6 h")) | Best("eval/acc", 3, mode="max")],
)  # fmt: skip
def test_rules_are_joined_in_a_list_or_by_a_bar(keep: Keep) -> None:
    assert {repr(one) for one in parts_of(keep)} == {"Last(2)", "Best('eval/acc', 3, mode='max')", "Every('6 h')"}


class Even(CheckpointRule):
    """Keeps the checkpoints of even steps: a rule as a contributor writes one."""

    def keeps(self, line: Sequence[Known]) -> list[Known]:
        return [one for one in line if one.saved.step % 2 == 0]

    def __repr__(self) -> str:
        return "Even()"


@pytest.mark.parametrize("keep", [Even() | Last(1), Last(1) | Even(), Even() | Best("eval/acc", mode="max") | Last(1)])
def test_a_rule_of_a_new_class_is_joined_by_a_bar_and_keeps_what_it_says(keep: Keep) -> None:
    assert {"Even()", "Last(1)"} <= {repr(one) for one in parts_of(keep)}
    assert sorted({step for rule in parts_of(keep) for step in steps(rule)}) == [2, 4, 6, 8, 12]


BESIDE = r"keep=\.\.\.\) takes all rules, and keep_last= and keep_best= are short for"


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Checkpoint, {"keep": "6 h"}, r"expected a keep rule; got '6 h'\. Use one of: Last\(2\).* Did you mean Every\('6 h'\)"),
        (Checkpoint, {"keep": [2]}, r"expected a keep rule; got 2\. .* Did you mean Every\(2\) or Last\(2\)\?"),
        (Checkpoint, {"keep": Between("1 step", "2 steps")}, "expected a keep rule; got Between"),
        (Checkpoint, {"keep": Last(2) & Every("6 h")}, "expected a keep rule"),
        (Checkpoint, {"keep": []}, "keep must have at least one rule; got none"),
        (Checkpoint, {"keep": [Last(2)], "keep_last": 3}, BESIDE),
        (Checkpoint, {"keep": [Last(2)], "keep_last": None}, BESIDE),
        (Checkpoint, {"keep": [Last(2)], "keep_best": ("eval/acc", "max")}, BESIDE),
        (Best, {"monitor": "eval/acc"}, "Best needs mode='min' or mode='max'"),
        (Best, {"monitor": "eval/acc", "mode": "top"}, "mode must be 'min' or 'max'"),
        (Best, {"monitor": "eval/acc", "mode": "max", "count": 0}, "count must be a whole number of at least 1"),
    ],
)
def test_what_is_no_keep_rule_is_an_error_when_it_is_written(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(**arguments)


def test_a_function_is_a_keep_rule(tmp_path: Path) -> None:
    def at_powers_of_two(checkpoints: Sequence[Known]) -> list[Known]:
        """Keep the checkpoints of steps 1, 2, 4, 8 and so on."""
        return [one for one in checkpoints if (step := int(one.position("step"))) & (step - 1) == 0]

    saves = Checkpoint("1 step", keep=[Last(1), at_powers_of_two])
    tiny_trainer(steps=7, directory=tmp_path, callbacks=[saves]).fit()
    assert names(tmp_path) == ["01", "02", "04", "07"]
    run = tiny_trainer(steps=9, directory=tmp_path, callbacks=[saves]).fit(resume="auto")
    assert names(tmp_path) == ["01", "02", "04", "08", "09"]
    rules = kept_by(Store(tmp_path / "checkpoints", run.info.id))["step-00000004"]
    assert len(rules) == 1
    assert "at_powers_of_two" in rules[0]["rule"]
    assert " at 0x" not in rules[0]["rule"]


def test_a_length_that_the_run_does_not_know_is_an_error_at_the_start(tmp_path: Path) -> None:
    endless = SimpleNamespace(batches_per_epoch=None, has_epochs=True, total=lambda unit, accumulate=1: None)
    for rule in (Every("0.5 epoch"), Every("10%")):
        with pytest.raises(ScheduleError):
            rule_of(rule, endless)  # type: ignore[arg-type]
    assert steps(Every("1 epoch"), limits=endless) == [4, 8, 12]


def test_the_short_arguments_are_the_same_rules(tmp_path: Path) -> None:
    short = Checkpoint(keep_last=3, keep_best=[("eval/acc", "max"), ("eval/loss", "min")]).keep
    assert [repr(one) for one in short.given] == ["Last(3)", "Best('eval/acc', mode='max')", "Best('eval/loss', mode='min')"]
    assert [repr(one) for one in Checkpoint().keep.given] == ["Last(2)"]
    assert Checkpoint(keep_last=None).keep.keeps_all


# -- in runs ------------------------------------------------------------------------------------------

ACC = [0.1, 0.7, 0.3, 0.9, 0.7, 0.2, 0.3, 0.8]


def test_one_write_serves_all_rules_and_another_process_sees_which_rule_keeps_which(tmp_path: Path) -> None:
    rules: Any = [Last(1), Best("eval/acc", 3, mode="max"), Every("5 steps")]
    run = tiny_run(directory=tmp_path, steps=8, callbacks=[Scripted(acc=ACC), Checkpoint("1 step", keep=rules)])
    assert names(tmp_path) == ["02", "04", "05", "08"]
    assert len(decided(run, "saved")) == 8
    kept = {
        name[-2:]: [one["rule"] for one in by] for name, by in kept_by(Store(tmp_path / "checkpoints", run.info.id)).items()
    }
    best = "Best('eval/acc', 3, mode='max')"
    assert kept == {"02": [best], "04": [best], "05": ["Every('5 steps')"], "08": ["Last(1)", best]}
    assert decided(run, "saved")[1] == "step-00000002: eval/acc is 0.7, among the best 3 so far; every step"


def test_several_in_one_list_write_a_step_once_and_each_has_rules_of_its_own(tmp_path: Path) -> None:
    ephemeral, permanent = Checkpoint("1 step", keep=[Last(1)]), Checkpoint("1 epoch", keep=Every("1 epoch"))
    run = tiny_run(directory=tmp_path, steps=12, callbacks=[ephemeral, permanent])
    assert names(tmp_path) == ["05", "10", "12"]
    assert [why.split(":")[0][5:] for why in decided(run, "saved")] == [f"{step:08d}" for step in range(1, 13)]
    assert manifest(tmp_path, "05")["asked_by"] == ["Checkpoint", "Checkpoint#2"]


def test_an_evaluation_at_the_end_of_an_epoch_comes_between_two_states_and_the_later_replaces_the_earlier(
    tmp_path: Path,
) -> None:
    callbacks = [Evaluate(tiny_loader(1)), Checkpoint("5 steps", keep=Last(9)), Checkpoint("1 epoch", keep=Last(9))]
    run = tiny_run(directory=tmp_path, epochs=2, callbacks=callbacks)
    assert names(tmp_path) == ["05-2", "10-2"]
    assert len(decided(run, "saved")) == 4


def test_weights_alone_and_another_folder_are_written_beside(tmp_path: Path) -> None:
    small, other = (
        Checkpoint("2 steps", keep=Every("2 steps"), weights_only=True, background=False),
        Checkpoint("2 steps", directory=tmp_path / "b"),
    )
    whole = Checkpoint("4 steps", keep_last=1, background=False)  # two threads would write step 4 in any order
    tiny_run(directory=tmp_path / "a", steps=4, callbacks=[whole, small, other])
    store = Store(tmp_path / "a" / "checkpoints")
    assert [(saved.step, store.manifest(saved)["weights_only"]) for saved in store.saved()] == [
        (2, True),
        (4, False),
        (4, True),
    ]
    assert store.files.links() == {"last": "step-00000004"}
    assert [saved.step for saved in Store(tmp_path / "b").saved()] == [2, 4]


def test_a_callback_that_asks_for_a_state_that_is_saved_gets_that_checkpoint(tmp_path: Path) -> None:
    stop = on(Callback.on_step_end, at=4)(lambda run: run.stop("enough"))
    callbacks = [stop, Checkpoint("2 steps", keep=Last(1)), Checkpoint("3 steps", keep=Last(1))]
    run = tiny_run(directory=tmp_path, steps=9, callbacks=callbacks)
    assert names(tmp_path) == ["04"]
    assert {one["callback"] for one in kept_by(Store(tmp_path / "checkpoints", run.info.id))["step-00000004"]} == {
        "Checkpoint", "Checkpoint#2",
    }  # fmt: skip


def trainer(directory: Path, steps: int, *keeps: Any, every: str = "1 step") -> Trainer:
    callbacks = [Scripted(acc=ACC * 2), *(Checkpoint(every, keep=keep, background=False) for keep in keeps)]
    return tiny_trainer(directory=directory, steps=steps, seed=1, callbacks=callbacks)


def test_a_resumed_run_keeps_what_an_uninterrupted_one_keeps(tmp_path: Path) -> None:
    keeps = ([Last(1), Best("eval/acc", 2, mode="max")], [Every("3 steps")])
    trainer(tmp_path / "a", 8, *keeps).fit()
    for steps in (3, 6, 8):
        trainer(tmp_path / "b", steps, *keeps).fit(resume="auto")
    assert names(tmp_path / "a") == names(tmp_path / "b")


def test_changed_rules_are_reported_and_hold_from_the_next_save_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, 4, Last(4)).fit()
    seen: list[list[str]] = []
    changed = trainer(tmp_path, 6, Last(2))
    changed.callbacks.append(on(Callback.on_step_start, at=5)(lambda run: seen.append(names(tmp_path))))
    run = changed.fit(resume="auto")
    assert "keeps Last(2); until now Last(4)" in caplog.text
    assert run.why("rules changed").endswith("Checkpoint keeps Last(2); until now Last(4)")
    assert (seen, names(tmp_path)) == ([["01", "02", "03", "04"]], ["05", "06"])


def test_checkpoints_of_a_callback_that_is_gone_stay_and_are_reported(tmp_path: Path) -> None:
    trainer(tmp_path, 4, Last(1), Every("2 steps")).fit()
    run = trainer(tmp_path, 8, Last(1)).fit(resume="auto")
    assert names(tmp_path) == ["02", "04", "08"]
    told = "'Checkpoint#2' is not in callbacks: the checkpoints that it keeps stay: step-00000002, step-00000004"
    assert run.why("rules changed").endswith(told)


def test_the_best_that_was_deleted_by_hand_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, 5, [Last(1), Best("eval/acc", mode="max")]).fit()
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    again = trainer(tmp_path, 8, [Last(1), Best("eval/acc", mode="max")])
    again.fit(resume="auto")
    assert "step-00000004, which Best('eval/acc', mode='max') kept, no longer exists" in caplog.text
    assert bests(again.callbacks[-1]) == {"eval/acc": ("step-00000008", 0.8)}  # type: ignore[arg-type]


def test_a_save_reads_no_manifest_of_the_checkpoints_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, steps = LocalFiles.read, list[int]()

    def noted(files: LocalFiles, path: str) -> bytes:
        if path.endswith(MANIFEST):
            steps.append(int(path.split("/")[0].removeprefix("step-")))
        return read(files, path)

    monkeypatch.setattr(LocalFiles, "read", noted)
    rules = Best("eval/acc", 2, mode="max") | Last(3) | Every("2 steps")
    scripted = Scripted(acc=[0.1, 0.5, 0.3, 0.2, 0.6, 0.4, 0.7, 0.0])
    tiny_run(steps=8, callbacks=[scripted, Checkpoint("1 step", keep=rules, background=False)], directory=tmp_path)
    assert set(steps) == {*range(1, 9)}
    assert steps == sorted(steps)


def test_a_resume_sets_links_and_notes_only_if_the_last_prune_was_not_completed(tmp_path: Path) -> None:
    rules = Last(2) | Best("eval/acc", mode="max")
    trainer(tmp_path, 3, rules).fit()
    folder, seen = tmp_path / "checkpoints", list[Any]()
    [notes] = folder.glob(".kept-*.json")
    before = notes.stat().st_ino
    again = trainer(tmp_path, 5, rules)
    again.callbacks.append(on(Callback.on_step_start, at=4)(lambda run: seen.append(notes.stat().st_ino)))
    again.fit(resume="auto")
    assert seen == [before]
    content = json.loads(notes.read_text())
    del content["checkpoints"]["step-00000005"]  # the process was killed after the write and before the prune
    notes.write_text(json.dumps(content))
    (folder / "last").unlink()
    again = trainer(tmp_path, 7, rules)
    again.callbacks.append(on(Callback.on_step_start, at=6)(lambda run: seen.append(Store(folder).files.links()["last"])))
    run = again.fit(resume="auto")
    assert seen[1:] == ["step-00000005"]
    assert {*kept_by(Store(folder, run.info.id))} == {saved.name for saved in Store(folder).saved()}


def test_a_written_checkpoint_is_known_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, under_way = Retention.read, list[bool]()

    def noted(retention: Retention, *joined: Any) -> None:  # on the thread that writes, while the training compares results
        under_way.append(retention.under_way is not None)
        read(retention, *joined)

    monkeypatch.setattr(Retention, "read", noted)
    trainer(tmp_path, 4, Best("eval/acc", mode="max")).fit()
    assert under_way == [False, *[True] * 4]  # the first one is at the start


def test_notes_that_were_damaged_are_written_again(tmp_path: Path) -> None:
    trainer(tmp_path, 3, Last(2)).fit()
    [notes] = (tmp_path / "checkpoints").glob(".kept-*.json")
    for content in ("", "[1]", '{"callbacks": {"Checkpoint": 1}, "checkpoints": {"step-00000003": {"kept_by": [1]}}}'):
        notes.write_text(content)
        trainer(tmp_path, 3, Last(2)).fit(resume="auto")
    run = trainer(tmp_path, 5, Last(2)).fit(resume="auto")
    assert [*kept_by(Store(tmp_path / "checkpoints", run.info.id))] == ["step-00000004", "step-00000005"]


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_the_rules_hold_behind_fsspec(tmp_path: Path, scheme: str) -> None:
    url = f"{scheme}://{tmp_path}/saved"
    keep: Any = [Last(1), Best("eval/acc", 2, mode="max")]
    tiny_run(directory=tmp_path, steps=8, callbacks=[Scripted(acc=ACC), Checkpoint("2 steps", keep=keep, directory=url)])
    assert [saved.step for saved in Store(url).saved()] == [4, 8]
    assert Store(url).files.links() == {"best": "step-00000004", "last": "step-00000008"}


def test_two_callbacks_on_two_ranks_write_a_step_once(tmp_path: Path) -> None:
    def fit(driver: str) -> list[str]:
        keep = [
            Checkpoint("2 steps", keep=[Last(1), Best("eval/acc", mode="max")]),
            Checkpoint("4 steps", keep=Every("4 steps")),
        ]
        callbacks = [Scripted(acc=ACC), *keep]
        return decided(tiny_run(directory=tmp_path / driver, steps=8, batches=16, driver=driver, callbacks=callbacks), "saved")

    main, _ = launch(lambda: [fit(driver) for driver in ("ddp", "fsdp")])
    assert [len(saved) for saved in main] == [5, 5]
    assert names(tmp_path / "ddp") == names(tmp_path / "fsdp") == ["04", "08"]


# -- run.block_saves: a save waits until the last block is left, and a state inside of one is never saved ---


class Blocking(Callback):
    """Blocks saves from one moment of a step to another moment of a later one."""

    def __init__(self, first: int, last: int, name: str | None = None) -> None:
        self.first, self.last, self.name, self.stack = first, last, name, ExitStack()

    def on_step_end(self, run: Run) -> None:
        if run.progress.step == self.first:
            self.stack.enter_context(run.block_saves("a partial state"))

    def on_batch_start(self, run: Run, batch: Any) -> None:
        if run.progress.step == self.last:
            self.stack.close()


def test_a_save_that_is_due_in_a_block_follows_at_the_end_of_the_step_in_which_the_block_ends(tmp_path: Path) -> None:
    run = tiny_run(directory=tmp_path, steps=9, callbacks=[Blocking(2, 3), Checkpoint("2 steps", keep_last=None)])
    assert names(tmp_path) == ["04", "06", "08", "09"]
    assert decided(run, "save postponed") == ["every 2 steps: saves are blocked by Blocking, since step 2 (a partial state)"]


def test_several_saves_of_one_block_are_one_and_keep_their_reasons(tmp_path: Path) -> None:
    ask = on(Callback.on_step_end, at=3)(lambda run: run.save("I want it"))
    tiny_run(directory=tmp_path, steps=5, callbacks=[Blocking(2, 4), ask, Checkpoint("2 steps", keep_last=None)])
    assert names(tmp_path) == ["05"]
    assert manifest(tmp_path, "05")["reason"].startswith("every 2 steps")


def test_blocks_of_several_callbacks_and_nested_ones_hold_until_the_last_is_left(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=2)
    def nested(run: Run) -> None:
        with run.block_saves(), run.block_saves("twice"):
            pass

    callbacks = [nested, Blocking(2, 3, "one"), Blocking(2, 4, "other"), Checkpoint("2 steps", keep_last=None)]
    tiny_run(directory=tmp_path, steps=7, callbacks=callbacks)
    assert names(tmp_path) == ["05", "06", "07"]


def test_a_run_that_is_resumed_at_a_postponed_checkpoint_ends_in_the_same_bits(tmp_path: Path) -> None:
    def make(steps: int) -> Any:
        return tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=[Blocking(2, 3), Checkpoint("2 steps")])

    make(4).fit()
    resumed, whole = make(8).fit(resume="auto"), tiny_run(steps=8, seed=1)
    assert [one.tolist() for one in resumed.model.parameters()] == [one.tolist() for one in whole.model.parameters()]


def test_a_block_that_is_open_at_the_end_leaves_no_checkpoint_of_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tiny_run(directory=tmp_path, steps=5, callbacks=[Blocking(3, 99), Checkpoint("2 steps")])
    assert names(tmp_path) == ["02"]
    assert run.why("not saved").endswith("step 5: saves are blocked by Blocking, since step 3 (a partial state)")
    assert "the run ended while saves were blocked by Blocking, since step 3 (a partial state)" in caplog.text

    class ToTheLastMoment(Blocking):
        def on_fit_end(self, run: Run) -> None:
            self.stack.close()

    tiny_run(directory=tmp_path / "closed", steps=5, callbacks=[ToTheLastMoment(3, 99), Checkpoint("2 steps")])
    assert names(tmp_path / "closed") == ["02", "05"]


@pytest.mark.parametrize("moment", [Callback.on_step_start, Callback.on_step_end, Callback.on_epoch_end])
def test_an_error_inside_of_a_block_leaves_the_checkpoint_before(tmp_path: Path, moment: Moment) -> None:
    def fail(run: Run) -> None:
        if run.progress.step == 5:
            with run.block_saves("half a swap"):
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        tiny_run(directory=tmp_path, epochs=2, callbacks=[on(moment)(fail), Checkpoint("2 steps", keep_last=None)])
    assert names(tmp_path) == ["02", "04"]
    told = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    [why] = [one["why"] for one in told if one["what"] == "not saved"]
    assert why == "step 5: the error ZeroDivisionError() left the block of fail, since step 5 (half a swap)"


def test_after_an_error_in_a_block_a_save_that_was_postponed_is_dropped(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=4)
    def fail(run: Run) -> None:
        run.save("before the error")
        with run.block_saves():
            raise ZeroDivisionError

    for on_exception in (True, False):
        folder = tmp_path / str(on_exception)
        callbacks = [Blocking(2, 99), fail, Checkpoint("2 steps", keep_last=None, on_exception=on_exception)]
        with pytest.raises(ZeroDivisionError):
            tiny_run(directory=folder, steps=9, callbacks=callbacks)
        assert not (folder / "checkpoints").exists() or names(folder) == []


def test_an_error_that_a_callback_handles_does_not_prevent_the_next_save(tmp_path: Path) -> None:
    @on(Callback.on_step_end, at=2)
    def handled(run: Run) -> None:
        with pytest.raises(ZeroDivisionError), run.block_saves():
            raise ZeroDivisionError

    @on(Callback.on_batch_start)
    def fail(run: Run, batch: Any) -> None:
        if run.progress.step == 3:
            raise KeyError("another one")

    with pytest.raises(KeyError):
        tiny_run(directory=tmp_path, callbacks=[handled, fail, Checkpoint("2 steps", keep_last=None)])
    assert names(tmp_path) == ["02", "03"]


def on_one_rank(folder: str, rank: int) -> list[int]:
    class OnOneRank(Blocking):
        def on_step_end(self, run: Run) -> None:
            if run.driver.rank == rank:
                super().on_step_end(run)

    saves = Checkpoint("2 steps", keep_last=None)
    tiny_run(directory=folder, steps=8, batches=16, driver="auto", callbacks=[OnOneRank(2, 4), saves])
    return [saved.step for saved in Store(f"{folder}/checkpoints").saved()]


def test_a_block_on_one_rank_holds_for_all(tmp_path: Path) -> None:
    assert launch(lambda: [on_one_rank(str(tmp_path / str(rank)), rank) for rank in (0, 1)]) == [[[5, 6, 8]] * 2] * 2
