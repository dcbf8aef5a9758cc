"""Links to the newest and the best checkpoint: readers skip them, a path may end in one, and none leads nowhere for long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cadenza import Trainer, load_weights
from cadenza.callbacks import Checkpoint
from cadenza.checkpoint.finding import checkpoint_at
from cadenza.checkpoint.store import Saved, Store
from cadenza.checkpoint.store.links import linked, set_links
from cadenza.errors import CheckpointError
from cadenza.status.plain import same
from cadenza.testing import tiny_model, tiny_run, tiny_trainer
from tests.callbacks.test_checkpoint import Scripted, names
from tests.checkpoint.store.contents import filled


def place(tmp_path: Path, scheme: str) -> str:
    return f"{scheme}://{tmp_path}/saved" if scheme else str(tmp_path / "saved")


@pytest.mark.parametrize("scheme", ["", "file", "memory"])
def test_a_link_is_set_and_moved_and_readers_skip_it(tmp_path: Path, scheme: str) -> None:
    store, saved = filled(place(tmp_path, scheme), 2, 4)
    set_links(store, {"last": "step-00000002", "best": "step-00000002"})
    set_links(store, {"last": "step-00000004", "best-eval-acc": "step-00000002"})
    assert store.files.links() == {"best": "step-00000002", "best-eval-acc": "step-00000002", "last": "step-00000004"}
    assert linked(store, "last") == Saved(4, 1, "step-00000004")
    assert linked(store, "best-eval-loss") is None
    assert store.saved() == saved
    assert store.latest()[0] == saved[1]
    assert checkpoint_at(f"{store.files}/best")[1] == saved[0]


@pytest.mark.parametrize("scheme", ["", "file", "memory"])
def test_a_link_to_a_checkpoint_that_is_gone_is_an_error_until_the_next_save_deletes_it(tmp_path: Path, scheme: str) -> None:
    store, _ = filled(place(tmp_path, scheme), 2, 4)
    set_links(store, {"best": "step-00000002"})
    store.prune(["step-00000004"])
    with pytest.raises(
        CheckpointError, match=r"the link 'best' in .* names step-00000002, which is gone\. There is step-00000004"
    ):
        checkpoint_at(f"{store.files}/best")
    set_links(store, {"last": "step-00000004"})
    assert store.files.links() == {"last": "step-00000004"}


def test_where_there_are_no_symbolic_links_they_are_small_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    trainer = tiny_trainer(directory=tmp_path, steps=2, callbacks=[Checkpoint()])
    trainer.fit()
    link = tmp_path / "checkpoints" / "last"
    assert (link.is_symlink(), link.read_text()) == (False, "step-00000002")
    model = tiny_model()
    load_weights(link, model)
    assert same(dict(model.state_dict()), dict(trainer.model.state_dict()))


def test_a_folder_of_the_user_with_the_name_of_a_link_stays_and_the_save_is_written(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "last").mkdir(parents=True)
    run = tiny_run(directory=tmp_path, steps=2, callbacks=[Checkpoint()])
    assert "has the name of one" in run.why("not pruned")
    assert names(tmp_path) == ["02"]
    assert Store(tmp_path / "checkpoints").files.links() == {}


def test_a_run_sets_last_and_best_and_can_be_continued_at_both(tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        script = Scripted(acc=[0.1, 0.9, 0.2, 0.3, 0.4, 0.5], loss=[5.0, 4.0, 1.0, 2.0, 2.0, 2.0])
        keep = Checkpoint("2 steps", keep_last=1, keep_best=[("eval/acc", "max"), ("eval/loss", "min")])
        return tiny_trainer(directory=tmp_path, steps=steps, seed=1, callbacks=[script, keep])

    trainer(6).fit()
    folder = tmp_path / "checkpoints"
    assert {path.name: str(path.readlink()) for path in folder.iterdir() if path.is_symlink()} == {
        "last": "step-00000006", "best": "step-00000002", "best-eval-acc": "step-00000002", "best-eval-loss": "step-00000003",
    }  # fmt: skip
    assert trainer(6).fit(resume=folder / "best").progress.origin.step == 2
    assert str((folder / "last").readlink()) == "step-00000006"
