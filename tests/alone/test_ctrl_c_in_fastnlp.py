"""A real Ctrl-C in a training of the trainer of fastNLP."""

from __future__ import annotations

import signal
from pathlib import Path

from cadenza.callbacks import Checkpoint
from tests.compat.fastnlp.toy import Hooks, live, trained


def test_ctrl_c_that_a_native_checkpoint_takes_ends_the_training_as_fastnlp_does(tmp_path: Path) -> None:
    press = Hooks(on_train_batch_end=lambda trainer: signal.raise_signal(signal.SIGINT))
    trainer = trained(20, [press, Checkpoint("100 steps", directory=tmp_path)], n_epochs=4)
    outcome = live(trainer).outcome
    assert outcome is not None
    assert outcome.kind == "interrupted"
