"""Keep rules: what each keeps, that they compose, that one write serves all, and that a kill during pruning changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cadenza import Callback, Trainer, on
from cadenza.callbacks import Best, Checkpoint, Evaluate
from cadenza.checkpoint.keeping import Keep, parts_of, rule_of
from cadenza.checkpoint.retention import kept_by
from cadenza.checkpoint.rules import Known, line_of
from cadenza.checkpoint.store import Saved, Store
from cadenza.errors import ScheduleError
from cadenza.hooks import At, Between, Every, First, Last
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
    return Known.of_facts(Saved(step, rank[3], f"step-{step:08d}"), rank, {**counters, **whole, **facts})


LINE = [known(step) for step in (2, 4, 6, 8, 11, 12)]


def steps(rule: Any, line: Sequence[Known] = LINE, limits: Any = LIMITS) -> list[int]:
    return sorted(one.saved.step for one in rule_of(rule, limits, 2).keeps(line_of(line)))


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


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("6 h", r"expected a keep rule; got '6 h'\. Use one of: Last\(2\).* Did you mean Every\('6 h'\)"),
        ([2], r"expected a keep rule; got 2\. .* Did you mean Every\(2\) or Last\(2\)\?"),
        (Between("1 step", "2 steps"), "expected a keep rule; got Between"),
        (Last(2) & Every("6 h"), "expected a keep rule"),
        ([], "keep must have at least one rule; got none"),
    ],
)
def test_what_is_no_keep_rule_is_an_error_when_it_is_written(keep: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Checkpoint(keep=keep)


@pytest.mark.parametrize("short", [{"keep_last": 3}, {"keep_last": None}, {"keep_best": ("eval/acc", "max")}])
def test_the_short_arguments_beside_the_rules_are_an_error(short: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep=\.\.\.\) takes all rules, and keep_last= and keep_best= are short for"):
        Checkpoint(keep=[Last(2)], **short)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Best needs mode='min' or mode='max'"),
        ({"mode": "top"}, "mode must be 'min' or 'max'"),
        ({"mode": "max", "count": 0}, "count must be a whole number of at least 1"),
    ],
)
def test_a_wrong_best_is_an_error(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Best("eval/acc", **arguments)


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
        Checkpoint("2 steps", keep=Every("2 steps"), weights_only=True),
        Checkpoint("2 steps", directory=tmp_path / "b"),
    )
    tiny_run(directory=tmp_path / "a", steps=4, callbacks=[Checkpoint("4 steps", keep_last=1), small, other])
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
