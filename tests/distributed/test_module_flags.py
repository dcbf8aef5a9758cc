"""What a hook froze is frozen after a resume on all ranks: the gradients of the rest are reduced, and nothing is waited for."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from cadenza import Callback, Run, on
from cadenza.callbacks import Checkpoint
from cadenza.drivers import Driver, FsdpDriver
from cadenza.testing import launch
from tests.distributed.parts import driver, momentum, network, trainer
from tests.distributed.test_fsdp import weights_of


@on(Callback.on_step_end, at=2)
def freeze(run: Run) -> None:
    run.driver.unwrap(run.model).get_submodule("0").requires_grad_(False)
    run.driver.renew(run.model)


def fit(directory: Path, kind: type[FsdpDriver] | None, steps: int) -> Tensor:
    ranks: Driver = driver() if kind is None else kind("cpu", timeout_s=100)
    one = trainer(
        model=network(),
        optimizer=momentum,
        driver=ranks,
        directory=directory,
        max_steps=steps,
        callbacks=[freeze, Checkpoint("2 steps")],
    )
    run = one.fit(resume="auto")
    frozen = [name for name, parameter in one.model.named_parameters() if not parameter.requires_grad]
    assert frozen == ["0.weight", "0.bias"]
    assert run.progress.step == steps
    return weights_of(one)


def test_what_a_hook_froze_is_frozen_on_all_ranks_after_a_resume(tmp_path: Path) -> None:
    def both() -> list[tuple[Tensor, Tensor]]:
        results = []
        for kind in (None, FsdpDriver):
            whole = fit(tmp_path / f"whole {kind}", kind, 6)
            for steps in (2, 4, 6):
                continued = fit(tmp_path / f"cut {kind}", kind, steps)
            results.append((whole, continued))
        return results

    for rank in launch(both):
        for whole, continued in rank:
            assert torch.equal(whole, continued)
