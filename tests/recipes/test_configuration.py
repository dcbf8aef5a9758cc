"""Every callback and sink with plain arguments is made from YAML, by Hydra and by jsonargparse."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.utils import instantiate
from jsonargparse import ArgumentParser
from omegaconf import OmegaConf

from cadenza import Callback, Trainer
from cadenza.hooks.moments import BaseCallback
from tests.callbacks.shipped import CALLBACKS, SINKS, arguments

HYDRA = {"SCHEDULER": {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "_partial_": True, "factor": 0.5}}
JSONARGPARSE = {"SCHEDULER": {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau", "init_args": {"factor": 0.5}}}
PLAIN = [name for name, row in (CALLBACKS | SINKS).items() if row.config is not None]


def path_of(name: str) -> str:
    return f"cadenza.{'callbacks' if name in CALLBACKS else 'sinks'}.{name}"


def with_objects(name: str, objects: dict[str, Any]) -> dict[str, Any]:
    return {key: objects.get(value, value) if isinstance(value, str) else value for key, value in arguments(name).items()}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("convert", ["none", "all"])
def test_hydra_makes_it(name: str, convert: str) -> None:
    config = OmegaConf.create({"_target_": path_of(name), **with_objects(name, HYDRA)})
    assert type(instantiate(config, _convert_=convert)).__name__ == name


@pytest.mark.parametrize("name", PLAIN)
def test_jsonargparse_makes_it_as_one_of_the_callbacks(name: str) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--callbacks", type=list[Callback])
    given = parser.parse_object({"callbacks": [{"class_path": path_of(name), "init_args": with_objects(name, JSONARGPARSE)}]})
    (made,) = parser.instantiate(given).callbacks
    assert isinstance(made, BaseCallback)
    assert type(made).__name__ == name


def test_jsonargparse_reads_the_signature_of_the_trainer() -> None:
    parser = ArgumentParser(exit_on_error=False)
    added = parser.add_class_arguments(Trainer, "trainer", fail_untyped=True)
    assert {"trainer.callbacks", "trainer.max_epochs", "trainer.driver", "trainer.compile"} <= set(added)
