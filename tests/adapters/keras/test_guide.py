"""The guide names every class, event and attribute, so that nothing is left out without a reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from cadenza.adapters.keras.callback import KerasCallback
from cadenza.adapters.keras.classes import MAIN_ONLY, REFUSED, TRACKERS, WRITES_WEIGHTS
from cadenza.adapters.keras.events import EVENTS
from cadenza.adapters.keras.model_view import ModelView
from cadenza.adapters.keras.optimizer_view import OptimizersView
from cadenza.adapters.recognition import adapt, base_of
from tests.adapters.keras.parts import keras_package

if TYPE_CHECKING:
    import keras
else:
    keras = keras_package()

GUIDE = (Path(__file__).resolve().parents[3] / "docs" / "guides" / "from-keras.md").read_text()


def public(thing: type) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")} - {"title", "absent"}


def test_the_guide_names_all_classes_events_and_attributes() -> None:
    exported = {name for name in dir(keras.callbacks) if name[0].isupper()}
    assert exported
    assert not {name for name in exported if f"`{name}`" not in GUIDE}
    assert not {name for name in EVENTS if f"`{name}`" not in GUIDE}
    assert not {name for name in public(ModelView) | public(OptimizersView) if not re.search(rf"\b{name}\b", GUIDE)}
    assert not {name for name in TRACKERS if name not in GUIDE}
    titles = {f"keras.{name}" for name in exported}
    assert {title for title in MAIN_ONLY if title.startswith("keras.")} <= titles
    assert exported >= {*REFUSED, *WRITES_WEIGHTS}


def test_the_guide_has_ten_listings() -> None:
    assert GUIDE.count("```python") >= 10


def test_a_callback_of_the_older_package_is_recognized_by_its_name() -> None:
    base = type("Callback", (), {"__module__": "tf_keras.src.callbacks", "on_epoch_end": lambda self, epoch, logs=None: None})

    class Older(base):  # type: ignore[misc, valid-type]
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            pass

    assert base_of(Older()) is base
    adapter = adapt(Older())
    assert isinstance(adapter, KerasCallback)
    assert adapter.overridden() == ["on_epoch_end"]
