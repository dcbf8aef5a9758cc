"""The recipe for cross-validation: a sweep that was interrupted continues, and repeats no finished fold."""

from __future__ import annotations

from pathlib import Path

import pytest

from cadenza import Trainer
from cadenza.run import Run
from tests.recipes.pages import blocks, run


def test_a_sweep_that_was_interrupted_repeats_no_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definitions = blocks("cross-validation")[0].partition("best = sweep()")[0]
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = run(definitions)["sweep"]()
    monkeypatch.chdir(tmp_path / "cut")
    names = run(definitions)
    fit, begun = names["fit"], list[int]()

    def fit_three(fold: int, seed: int, directory: str) -> Run:
        if len(begun) == 3:
            fit(fold, seed, directory, max_epochs=2)  # the fourth is under way
            raise KeyboardInterrupt
        begun.append(fold)
        return fit(fold, seed, directory)  # type: ignore[no-any-return]

    names["fit"] = fit_three
    with pytest.raises(KeyboardInterrupt):
        names["sweep"]()
    steps: dict[str, int] = {}
    original = Trainer.fit

    def counting(trainer: Trainer, resume: str) -> Run:
        one = original(trainer, resume=resume)
        steps[Path(str(trainer.directory)).name] = one.progress.step - one.progress.origin.step
        return one

    monkeypatch.setattr(Trainer, "fit", counting)
    again = run(definitions)
    assert again["sweep"]() == whole
    trained = {name: count for name, count in steps.items() if count}
    assert len(steps) == 10
    assert {count for name, count in steps.items() if name in trained and name != "fold-3-seed-0"} == {52}
    assert trained["fold-3-seed-0"] == 26  # two of four epochs
