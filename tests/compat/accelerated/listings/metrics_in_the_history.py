"""Case 1 of the document: metrics in the run history."""

from torchmetrics_of_2022 import MetricCollection, Accuracy, Precision, Recall

from cadenza.compat.accelerated.callbacks import TrainerCallback

class ClassificationMetricsCallback(TrainerCallback):
    def __init__(self, num_classes):
        self.metrics = MetricCollection(
            {
                "accuracy": Accuracy(num_classes=num_classes),
                "precision": Precision(num_classes=num_classes),
                "recall": Recall(num_classes=num_classes),
            }
        )

    def _move_to_device(self, trainer):
        self.metrics.to(trainer.device)

    def on_training_run_start(self, trainer, **kwargs):
        self._move_to_device(trainer)

    def on_evaluation_run_start(self, trainer, **kwargs):
        self._move_to_device(trainer)

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        preds = batch_output["model_outputs"].argmax(dim=-1)
        self.metrics.update(preds, batch[1])

    def on_eval_epoch_end(self, trainer, **kwargs):
        metrics = self.metrics.compute()
        trainer.run_history.update_metric("accuracy", metrics["accuracy"].cpu())
        trainer.run_history.update_metric("precision", metrics["precision"].cpu())
        trainer.run_history.update_metric("recall", metrics["recall"].cpu())

        self.metrics.reset()


# -- what the document leaves to the reader: python metrics_in_the_history.py DATA OUT

if __name__ == "__main__":
    import json
    import sys
    from pathlib import Path

    from task import classifier, images
    from torch import nn

    from cadenza.compat.accelerated.trainer import DEFAULT_CALLBACKS, Trainer

    data, out = sys.argv[1:]
    model, optimizer = classifier()
    trainer = Trainer(
        model, nn.CrossEntropyLoss(), optimizer, callbacks=(ClassificationMetricsCallback(num_classes=10), *DEFAULT_CALLBACKS)
    )
    valid = images(data, 2000, 3000)
    trainer.train(images(data, 0, 2000), num_epochs=2, eval_dataset=valid, per_device_batch_size=50)
    history = trainer.run_history
    seen = {name: [float(value) for value in history.get_metric_values(name)] for name in history.get_metric_names()}
    pixels, labels = valid.tensors
    seen["counted"] = (model.eval()(pixels).argmax(dim=-1) == labels).float().mean().item()
    Path(out, "metrics.json").write_text(json.dumps(seen))
