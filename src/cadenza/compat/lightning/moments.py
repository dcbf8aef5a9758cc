"""Lightning's hooks without a native equivalent. A conductor fires each for all callbacks before the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cadenza.hooks.moments import Callback

if TYPE_CHECKING:
    from cadenza.run import Run


class LightningMoments(Callback, declares=True):
    """The hooks that a `Conductor` fires on all Lightning callbacks and then on the LightningModule."""

    def on_stage_setup(self, run: Run, stage: str, /) -> None:
        """Called before a stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``. It is ``setup``."""

    def on_fit_begin(self, run: Run, /) -> None:
        """Called once the run is restored, before a sanity check. It is ``on_fit_start``."""

    def on_sanity_check_start(self, run: Run, /) -> None:
        """Called before a sanity check."""

    def on_sanity_check_end(self, run: Run, /) -> None:
        """Called after a sanity check."""

    def on_train_start(self, run: Run, /) -> None:
        """Called before the first epoch of a fit."""

    def on_train_epoch_end(self, run: Run, /) -> None:
        """Called after the evaluations at the end of an epoch."""

    def on_train_epoch_end_monitoring(self, run: Run, /) -> None:
        """``on_train_epoch_end`` of callbacks that monitor a value, called after the LightningModule's."""

    def on_train_end(self, run: Run, /) -> None:
        """Called after the last epoch."""

    def on_fit_finish(self, run: Run, /) -> None:
        """Called after ``on_train_end``. It is ``on_fit_end``."""

    def on_stage_teardown(self, run: Run, stage: str, /) -> None:
        """Called after a stage. It is ``teardown``."""

    def on_validation_start(self, run: Run, /) -> None:
        """Called before an evaluation."""

    def on_validation_epoch_start(self, run: Run, /) -> None:
        """Called after ``on_validation_start``."""

    def on_validation_epoch_end(self, run: Run, /) -> None:
        """Called after the last batch, with results."""

    def on_validation_end(self, run: Run, /) -> None:
        """Called after ``on_validation_epoch_end``."""

    def on_test_start(self, run: Run, /) -> None:
        """Called before ``Trainer.evaluate(name="test")``."""

    def on_test_epoch_start(self, run: Run, /) -> None:
        """Called after ``on_test_start``."""

    def on_test_epoch_end(self, run: Run, /) -> None:
        """Called after the last batch, with results."""

    def on_test_end(self, run: Run, /) -> None:
        """Called after ``on_test_epoch_end``."""

    def on_predict_start(self, run: Run, /) -> None:
        """Called before ``Trainer.predict``."""

    def on_predict_epoch_start(self, run: Run, /) -> None:
        """Called after ``on_predict_start``."""

    def on_predict_epoch_end(self, run: Run, /) -> None:
        """Called after the last batch."""

    def on_predict_end(self, run: Run, /) -> None:
        """Called after ``on_predict_epoch_end``."""
