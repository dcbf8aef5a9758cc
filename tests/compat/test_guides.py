"""The pages about other systems name all that these have: classes, events and attributes, so that nothing is left out."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from cadenza import Callback, Run
from cadenza.hooks.moments import moments_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "tables" / "other-systems.md").read_text(encoding="utf-8")


def not_named(names: set[str], guide: str) -> set[str]:
    """Return the names that a guide does not have in code style."""
    assert names
    text = (DOCS / "guides" / guide).read_text(encoding="utf-8")
    return {name for name in names if f"`{name}`" not in text}


def test_the_guide_of_lightning_names_every_callback_class() -> None:
    pytest.importorskip("lightning", reason="the classes are those of Lightning")
    modules = [import_module(f"lightning.pytorch.{name}") for name in ("callbacks", "serve", "cli")]
    kinds: list[Any] = [modules[0].Callback]
    found = set[str]()
    for kind in kinds:
        kinds += kind.__subclasses__()
        found |= {kind.__name__} if kind.__module__.startswith("lightning.pytorch.") and kind.__name__[0] != "_" else set()
    assert {"BaseFinetuning", "Timer", "ServableModuleValidator", "SaveConfigCallback"} < found
    assert not_named(found, "from-lightning.md") == set()


def test_the_guide_of_transformers_names_every_callback_class() -> None:
    transformers: Any = pytest.importorskip("transformers", reason="the classes are those of transformers")
    packages = (transformers, transformers.integrations)
    exported = {name for package in packages for name in dir(package) if name.endswith("Callback")}
    assert len(exported) > 15
    assert not_named(exported, "from-huggingface.md") == set()


def public(thing: type) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")} - {"title", "absent"}


def test_the_guide_of_keras_names_all_classes_events_and_attributes() -> None:
    keras: Any = pytest.importorskip("keras", reason="the classes are those of Keras")
    from cadenza.compat.keras.classes import MAIN_ONLY, REFUSED, TRACKERS, WRITES_WEIGHTS
    from cadenza.compat.keras.events import EVENTS
    from cadenza.compat.keras.model_view import ModelView
    from cadenza.compat.keras.optimizer_view import OptimizersView

    guide = (DOCS / "guides" / "from-keras.md").read_text(encoding="utf-8")
    exported = {name for name in dir(keras.callbacks) if name[0].isupper()}
    assert not_named(exported | set(EVENTS), "from-keras.md") == set()
    assert not {name for name in public(ModelView) | public(OptimizersView) if not re.search(rf"\b{name}\b", guide)}
    assert not {name for name in TRACKERS if name not in guide}
    assert {title for title in MAIN_ONLY if title.startswith("keras.")} <= {f"keras.{name}" for name in exported}
    assert exported >= {*REFUSED, *WRITES_WEIGHTS}
    assert guide.count("```python") >= 10


# -- the table of events of systems without adapters -------------------------------------------------------

EVENTS = {
    "Composer": """INIT BEFORE_LOAD AFTER_LOAD FIT_START ITERATION_START EPOCH_START BEFORE_DATALOADER AFTER_DATALOADER
        BATCH_START BEFORE_TRAIN_BATCH BEFORE_FORWARD AFTER_FORWARD BEFORE_LOSS AFTER_LOSS BEFORE_BACKWARD AFTER_BACKWARD
        AFTER_TRAIN_BATCH BATCH_END BATCH_CHECKPOINT EPOCH_END EPOCH_CHECKPOINT ITERATION_END ITERATION_CHECKPOINT FIT_END
        PREDICT_START PREDICT_BATCH_START PREDICT_BEFORE_FORWARD PREDICT_AFTER_FORWARD PREDICT_BATCH_END PREDICT_END
        EVAL_BEFORE_ALL EVAL_START EVAL_BATCH_START EVAL_BEFORE_FORWARD EVAL_AFTER_FORWARD EVAL_BATCH_END EVAL_END
        EVAL_AFTER_ALL EVAL_STANDALONE_START EVAL_STANDALONE_END""",
    "fastai": """after_create before_fit before_epoch before_train before_batch after_pred after_loss before_backward
        after_cancel_backward after_backward before_step after_cancel_step after_step after_cancel_batch after_batch
        after_cancel_train after_train before_validate after_cancel_validate after_validate after_cancel_epoch after_epoch
        after_cancel_fit after_fit""",
    "Ignite": """STARTED EPOCH_STARTED GET_BATCH_STARTED GET_BATCH_COMPLETED ITERATION_STARTED ITERATION_COMPLETED
        DATALOADER_STOP_ITERATION EXCEPTION_RAISED TERMINATE_SINGLE_EPOCH TERMINATE INTERRUPT EPOCH_COMPLETED COMPLETED""",
    "MMEngine": """before_run after_run before_train after_train before_val after_val before_test after_test
        before_save_checkpoint after_load_checkpoint before_train_epoch before_val_epoch before_test_epoch after_train_epoch
        after_val_epoch after_test_epoch before_train_iter before_val_iter before_test_iter after_train_iter
        after_val_iter after_test_iter""",
    "OLMo-core": """post_attach post_checkpoint_loaded pre_train pre_epoch pre_load_batch pre_step pre_optim_step
        post_train_batch post_step post_checkpoint_saved pre_log_metrics log_metrics post_epoch post_train on_error close""",
}
"""All events of each system."""


def rows() -> list[list[str]]:
    lines = [line for line in PAGE.splitlines() if line.startswith("| `on_")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_first_column_has_each_moment_once() -> None:
    named = [row[0].strip("`") for row in rows()]
    assert sorted(named) == sorted(moments_of(Callback))


def test_each_row_has_five_systems_and_no_event_has_two_places() -> None:
    by_system = list(zip(*(row[1:] for row in rows()), strict=True))
    assert len(by_system) == 5
    for cells in by_system:
        events = [event for cell in cells for event in re.findall(r"`(\w+)`", cell) if "evaluator" not in cell]
        assert len(events) > 9
        assert [one for one in events if events.count(one) > 1] in ([], ["before_batch", "after_batch"] * 2)
        assert all("`" in cell or cell == "-" for cell in cells)


@pytest.mark.parametrize("system", EVENTS)
def test_the_page_has_every_event(system: str) -> None:
    assert not [one for one in EVENTS[system].split() if f"`{one}`" not in PAGE]


def test_the_verbs_in_the_text_are_those_of_a_run() -> None:
    verbs = set(re.findall(r"`run\.(\w+)", PAGE))
    assert {"stop", "end_epoch", "skip_batch", "replace_model"} <= verbs
    assert all(hasattr(Run, verb) for verb in verbs)
