"""The decorators of NeMo's modules, and the command line of its scripts."""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import Any

import pytest

import cadenza.compat.nemo
import cadenza.compat.nemo10
from cadenza.compat.nemo.core import NeuralType

VERSIONS = pytest.mark.parametrize("nemo", [cadenza.compat.nemo, cadenza.compat.nemo10], ids=lambda nemo: nemo.__version__)


@VERSIONS
def test_a_modules_ports_are_in_the_docstring_of_the_property(nemo: ModuleType) -> None:
    decorate: Any = importlib.import_module(f"{nemo.__name__}.utils.decorators").add_port_docs

    class Module:
        size = 3

        @property
        @decorate()  # type: ignore[untyped-decorator]
        def input_ports(self) -> dict[str, NeuralType]:
            """Return the inputs."""
            return {"x": NeuralType(("B", "D")), "y": NeuralType()}

        @property
        @decorate  # type: ignore[untyped-decorator]
        def output_ports(self) -> dict[str, NeuralType]:
            return {"z": NeuralType(("B", "D"))}

        @property
        @decorate()  # type: ignore[untyped-decorator]
        def of_this_instance(self) -> dict[str, NeuralType]:
            """Return the ports of one instance."""
            return {str(index): NeuralType() for index in range(self.size)}

    assert set(Module().input_ports) == {"x", "y"}
    assert len(Module().of_this_instance) == 3
    text = Module.input_ports.__doc__ or ""
    assert text.startswith("Return the inputs.\n\n* *x* : ")
    assert "\n\n* *y* : " in text
    assert (Module.output_ports.__doc__ or "").startswith("* *z* : ")
    assert Module.of_this_instance.__doc__ == "Return the ports of one instance."


@VERSIONS
def test_a_deprecated_function_warns_once(nemo: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    deprecated: Any = importlib.import_module(f"{nemo.__name__}.utils.decorators.deprecated").deprecated

    @deprecated(version="0.12", explanation="Use new().")  # type: ignore[untyped-decorator]
    def old(value: int) -> int:
        """Return the value."""
        return value

    @deprecated  # type: ignore[untyped-decorator]
    def older() -> None:
        pass

    with caplog.at_level(logging.WARNING, "nemo"):
        assert [old(1), old(value=2)] == [1, 2]
        older()
    assert importlib.import_module(f"{nemo.__name__}.utils.decorators").deprecated is deprecated  # not the module of this name
    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["old is deprecated. Version 0.12 removes it. Use new().", "older is deprecated."]
    assert (old.__name__, old.__doc__) == ("old", "Return the value.")


@VERSIONS
def test_the_command_line_of_scripts(nemo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    parser = nemo.utils.NemoArgParser(description="Jasper")
    parser.set_defaults(batch_size=32, optimizer="novograd")
    parser.add_argument("--exp_name", default="Jasper")
    given = vars(parser.parse_args(["--lr", "0.02", "--create_tb_writer", "--eval_datasets", "a", "b", "--num_epochs", "3"]))
    expected = {
        "local_rank": 1,
        "amp_opt_level": "O0",
        "cudnn_benchmark": False,
        "model_config": None,
        "train_dataset": None,
        "eval_datasets": ["a", "b"],
        "batch_size": 32,
        "eval_batch_size": None,
        "eval_freq": 1000,
        "optimizer": "novograd",
        "weight_decay": 0.0,
        "num_epochs": 3,
        "max_steps": None,
        "lr": 0.02,
        "lr_policy": "WarmupAnnealing",
        "iter_per_step": 1,
        "work_dir": None,
        "checkpoint_dir": None,
        "create_tb_writer": True,
        "tensorboard_dir": None,
        "checkpoint_save_freq": 1000,
        "exp_name": "Jasper",
    }
    assert given == expected
