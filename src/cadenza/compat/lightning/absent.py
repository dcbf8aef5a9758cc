"""What of Lightning's ``Trainer`` a native run does not provide, and what to use instead."""

from __future__ import annotations

from collections.abc import Mapping

ABSENT: Mapping[str, str] = {
    "fit": "Call trainer.fit() of the native trainer, outside of the run.",
    "validate": "Use cadenza.compat.adapter.requests.evaluate_now(run), or Evaluate in callbacks.",
    "test": "Call trainer.evaluate(loader, name='test') of the native trainer after the run.",
    "predict": "Call trainer.predict(loader) of the native trainer after the run.",
    "optimizers": "Give the optimizer to Trainer(...); Ema and Swa in callbacks average weights.",
    "signal_connector": "The run handles signals: see Checkpoint(on_signal=...).",
    "_signal_connector": "The run handles signals: see Checkpoint(on_signal=...).",
    "_data_connector": "Read trainer.train_dataloader and trainer.val_dataloaders.",
    "_callback_connector": "Give all callbacks to Trainer(callbacks=[...]).",
    "_results": "Read trainer.callback_metrics.",
    "tuner": "Put cadenza.callbacks.FindLearningRate or FindBatchSize into callbacks.",
    "gradient_clip_val": "Put cadenza.callbacks.ClipGradients into callbacks.",
    "gradient_clip_algorithm": "Put cadenza.callbacks.ClipGradients into callbacks.",
    "scaler": "The precision of the run holds it.",
    "init_module": "Build the model before the trainer.",
    "distributed_sampler_kwargs": "The run deals the batches to the ranks: see the guide of several ranks.",
}
"""By attribute, what to use instead."""
