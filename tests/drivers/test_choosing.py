"""``device=`` and ``driver=``: where tensors are, and how processes are run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadenza.drivers import SingleDriver, driver_of
from cadenza.testing import tiny_run, tiny_trainer


def test_a_device_is_a_name_or_a_torch_device_may_agree_with_the_driver_and_is_else_the_best_one() -> None:
    for device in ("cpu", torch.device("cpu")):
        run = tiny_run(device=device)
        assert run.device == torch.device("cpu")
        assert next(run.model.parameters()).device == torch.device("cpu")
    driver = SingleDriver("cpu")
    assert tiny_trainer(device="cpu", driver=driver).driver is driver
    assert driver_of().device == SingleDriver().device
    assert driver_of("single").device == SingleDriver().device


SCRIPT = """\
from cadenza import Trainer
import torch
m = torch.nn.Linear(1, 1)
Trainer(m, lambda p: torch.optim.SGD(p, 0.1), [0], lambda m, b: 0, max_epochs=1, driver='cpu')
"""


def test_a_device_as_driver_works_for_one_release_with_a_warning_and_the_name_of_a_driver_without() -> None:
    with pytest.warns(DeprecationWarning, match=r"driver='cpu' is deprecated: use device='cpu'") as caught:
        trainer = tiny_trainer(driver="cpu")
    assert trainer.driver.device == torch.device("cpu")
    assert len(caught) == 1
    with pytest.warns(DeprecationWarning, match="use device='cpu'") as caught:
        exec(compile(SCRIPT, "<string>", "exec"), {"__name__": "__main__"})
    assert [(one.filename, one.lineno) for one in caught] == [("<string>", 4)], "the user's own line"
    assert tiny_run(driver="single", device="cpu").progress.step == 5  # a warning would be an error


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"driver": "dpp"}, ValueError, r"driver must be one of 'auto', 'single', 'ddp', 'fsdp', or a Driver; got 'dpp'"),
        ({"device": "gpu"}, ValueError, r"device must be a name such as 'cpu', .*; got 'gpu'"),
        ({"device": 0}, TypeError, r"device must be a name such as 'cpu', .*; got 0"),
        ({"device": "ddp"}, ValueError, r"device must be .*; got 'ddp'\. Use driver='ddp'\."),
        ({"device": "cpu", "driver": "cuda"}, ValueError, r"driver must be one of 'auto', .*; got 'cuda'"),
        (
            {"device": "cuda:0", "driver": SingleDriver("cpu")},
            ValueError,
            r"device='cuda:0' contradicts driver=SingleDriver\('cpu'\), which computes on 'cpu'\. Leave device out",
        ),
        (
            {"device": "cuda:1", "driver": "ddp"},
            ValueError,
            r"device='cuda:1' names one device, but with driver='ddp' each process takes its own\. Use device='cuda'",
        ),
    ],
)
def test_a_wrong_device_or_driver_is_an_error_that_says_what_to_write(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        tiny_trainer(**arguments)
