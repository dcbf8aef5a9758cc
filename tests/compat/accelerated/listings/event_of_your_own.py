"""A callback event of one's own."""

from cadenza.compat.accelerated.callbacks import TrainerCallback
from cadenza.compat.accelerated.trainer import Trainer


class VerifyBatchCallback(TrainerCallback):
    def verify_train_batch(self, trainer, xb, yb):
        assert xb.shape[0] == trainer.run_config["train_per_device_batch_size"]
        assert xb.shape[1] == 1
        assert xb.shape[2] == 28
        assert xb.shape[3] == 28
        assert yb.shape[0] == trainer.run_config["train_per_device_batch_size"]


class TrainerWithCustomCallbackEvent(Trainer):
    def calculate_train_batch_loss(self, batch) -> dict:
        xb, yb = batch
        self.callback_handler.call_event(
            "verify_train_batch", trainer=self, xb=xb, yb=yb
        )
        return super().calculate_train_batch_loss(batch)


# -- what the document leaves to the reader: python event_of_your_own.py DATA

if __name__ == "__main__":
    import sys

    from task import classifier, images
    from torch import nn

    model, optimizer = classifier()
    trainer = TrainerWithCustomCallbackEvent(model, nn.CrossEntropyLoss(), optimizer, callbacks=(VerifyBatchCallback,))
    local = {"num_workers": 0}
    train = images(sys.argv[1], 0, 100)
    trainer.train(train, num_epochs=1, per_device_batch_size=50, train_dataloader_kwargs=local)
    print("all batches are as they should be")
    trainer.train(train, num_epochs=1, per_device_batch_size=30, train_dataloader_kwargs=local)  # the last one has 10
