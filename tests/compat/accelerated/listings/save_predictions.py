"""Case 3 of the document: predictions as csv."""

from collections import defaultdict
import pandas as pd

from cadenza.compat.accelerated.callbacks import TrainerCallback

class SavePredictionsCallback(TrainerCallback):

    def __init__(self, out_filename='./outputs/valid_predictions.csv') -> None:
        super().__init__()
        self.predictions = defaultdict(list)
        self.out_filename = out_filename

    def on_eval_step_end(self, trainer, batch, batch_output, **kwargs):
        input_features, targets = batch
        class_preds = trainer.gather(batch_output['model_outputs']).argmax(dim=-1)
        self.predictions['prediction'].extend(class_preds.cpu().tolist())
        self.predictions['targets'].extend(targets.cpu().tolist())

    def on_eval_epoch_end(self, trainer, **kwargs):
        trainer._accelerator.wait_for_everyone()
        if trainer.run_config.is_local_process_zero:
            df = pd.DataFrame.from_dict(self.predictions)
            df.to_csv(f'{self.out_filename}', index=False)


# -- what the document leaves to the reader: python save_predictions.py DATA, in a folder that has a folder outputs

if __name__ == "__main__":
    import sys

    from task import classifier, images
    from torch import nn

    from cadenza.compat.accelerated.trainer import Trainer

    model, optimizer = classifier()
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=(SavePredictionsCallback,))
    local = {"num_workers": 0}
    trainer.train(
        images(sys.argv[1], 0, 500),
        num_epochs=1,
        eval_dataset=images(sys.argv[1], 500, 620),
        per_device_batch_size=50,
        train_dataloader_kwargs=local,
        eval_dataloader_kwargs=local,
    )
    print(*model.eval()(images(sys.argv[1], 500, 620).tensors[0]).argmax(dim=-1).tolist())
    print(*images(sys.argv[1], 500, 620).tensors[1].tolist())
