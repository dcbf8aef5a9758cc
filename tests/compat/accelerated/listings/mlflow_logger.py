"""Case 2 of the document: a logger of one's own, for MLflow."""

import os

import mlflow

from cadenza.compat.accelerated.callbacks import LogMetricsCallback

class AzureMLLoggerCallback(LogMetricsCallback):
    def __init__(self):
        mlflow.set_tracking_uri(os.environ['MLFLOW_TRACKING_URI'])

    def on_training_run_start(self, trainer, **kwargs):
        mlflow.set_tags(trainer.run_config.to_dict())

    def log_metrics(self, trainer, metrics):
        if trainer.run_config.is_world_process_zero:
            mlflow.log_metrics(metrics)


# -- what the document leaves to the reader: MLFLOW_TRACKING_URI=... python mlflow_logger.py DATA

if __name__ == "__main__":
    import sys

    from task import classifier, images
    from torch import nn

    from cadenza.compat.accelerated.callbacks import PrintProgressCallback
    from cadenza.compat.accelerated.trainer import Trainer

    model, optimizer = classifier()
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(PrintProgressCallback, AzureMLLoggerCallback))
    local = {"num_workers": 0}
    trainer.train(
        images(sys.argv[1], 0, 500),
        num_epochs=2,
        eval_dataset=images(sys.argv[1], 500, 600),
        per_device_batch_size=50,
        train_dataloader_kwargs=local,
        eval_dataloader_kwargs=local,
    )
    mlflow.end_run()
    for name in ("train_loss_epoch", "eval_loss_epoch"):
        print(name, *trainer.run_history.get_metric_values(name))
