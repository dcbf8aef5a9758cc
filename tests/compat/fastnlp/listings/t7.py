"""Tutorial T7: callbacks and Trainer.on. Its fourteen code cells in order; import lines and the data's path are changed."""

# In [1]
import sys

from datasets import load_dataset

# sst-2 数据集
sst2data = load_dataset('csv', data_files={'train': sys.argv[1] + '/train.tsv'}, delimiter='\t', quoting=3)
sst2data = sst2data.map(lambda row, place: {'idx': place}, with_indices=True)  # the file does not number its rows

# In [2]
from cadenza.compat.fastnlp import DataSet, Vocabulary, prepare_dataloader

# 仅取 20 条数据
dataset = DataSet.from_datasets(sst2data['train'])[:100]
dataset.apply_more(lambda ins:{'words': ins['sentence'].lower().split(), 'target': ins['label']}, 
                   progress_bar="tqdm")
dataset.add_seq_len('words')
dataset.delete_field('sentence')
dataset.delete_field('label')
dataset.delete_field('idx')

vocab = Vocabulary()
vocab.from_dataset(dataset, field_name='words')
vocab.index_dataset(dataset, field_name='words')

# 训练集和验证集 0.8:0.2
train_dataset, evaluate_dataset = dataset.split(ratio=0.8)

print(train_dataset)

train_dataloader = prepare_dataloader(
    train_dataset, batch_size=16, shuffle=True
)
val_dataloader = prepare_dataloader(
    evaluate_dataset, batch_size=4, shuffle=False
)

# In [3]
from cadenza.compat.fastnlp.models.torch import CNNText
model = CNNText(embed=(len(vocab), 224), num_classes=2, dropout=0.2)

# In [4]
from cadenza.compat.fastnlp import Callback

class MyCallback(Callback):
    def __init__(self):
        pass

    def on_train_begin(self, trainer):
        print("Now start training...")

    def on_train_epoch_begin(self, trainer):
        print(f"Epoch {trainer.cur_epoch_idx + 1}/{trainer.n_epochs}")
        trainer.state['loss'] = 0

    def on_train_batch_begin(self, trainer, batch, indices):
        print(f"Training Batch {trainer.batch_idx_in_epoch + 1}/{trainer.num_batches_per_epoch}...")
        print("Batch Words:", batch['words'].tolist(), "Target:", batch['target'].tolist(), "Indices:", indices)
        

    def on_before_backward(self, trainer, outputs):
        print("Loss:", outputs["loss"].tolist())
        trainer.state['loss'] += outputs['loss'].item()

    def on_train_epoch_end(self, trainer):
        ave_loss = trainer.state['loss'] / trainer.num_batches_per_epoch
        print(f"End Epoch {trainer.cur_epoch_idx}, Average Loss {ave_loss}")

    def on_train_end(self, trainer):
        print("Quit training process.")

# In [5]
from torch.optim import Adam

from cadenza.compat.fastnlp import Trainer

adam = Adam(model.parameters(), 1e-3)
trainer = Trainer(
    model=model, train_dataloader=train_dataloader, optimizers=adam,
    device='cpu', n_epochs=1, callbacks=[MyCallback()],
)
trainer.run()

# In [6]
import gc

del trainer
del model
del adam

gc.collect()

# In [7]
from cadenza.compat.fastnlp import HasMonitorCallback

class WatchAccCallback(HasMonitorCallback):
    def __init__(self):
        super(WatchAccCallback, self).__init__(
            monitor='acc#acc',
            larger_better=True
        )

    def on_evaluate_end(self, trainer, results):
        if self.is_better_results(results):
            print(f"Epoch: {trainer.cur_epoch_idx + 1}/{trainer.n_epochs}, "
                  f"'acc' is better: {self.get_monitor_value(results)}")
        else:
            print(f"Epoch: {trainer.cur_epoch_idx + 1}/{trainer.n_epochs}, "
                  f"'acc' is not better: {self.get_monitor_value(results)}")

# In [8]
from cadenza.compat.fastnlp import Accuracy

model = CNNText(embed=(len(vocab), 224), num_classes=2, dropout=0)
metrics = {'acc': Accuracy()}
sgd = Adam(model.parameters(), 1e-3)
trainer = Trainer(
    model=model, train_dataloader=train_dataloader, optimizers=sgd,
    device='cpu', n_epochs=40, evaluate_dataloaders=val_dataloader,
    metrics=metrics, callbacks=[WatchAccCallback()], evaluate_every=-10
)
trainer.run()

# In [9]
import gc

del trainer
del metrics
del sgd
del model

gc.collect()

# In [10]
from cadenza.compat.fastnlp.core import Event

@Trainer.on(Event.on_before_backward())
def print_loss(trainer, outputs):
    print("Total Batches {}/{} Loss {}".format(
        trainer.global_forward_batches + 1, trainer.n_batches,
        outputs['loss'].item()))

model = CNNText(embed=(len(vocab), 100), num_classes=2, dropout=0.1)
adam = Adam(model.parameters(), 1e-3)
trainer = Trainer(
    model=model, train_dataloader=train_dataloader, optimizers=adam,
    device='cpu', n_epochs=2
)
trainer.run()

# In [11]
@Trainer.on(Event.on_before_backward(every=2))
def print_loss_every(trainer, outputs):
    print("Total Batches {}/{} Loss {}".format(
        trainer.global_forward_batches + 1, trainer.n_batches,
        outputs['loss'].item()))

trainer_on_every = Trainer(
    model=model, train_dataloader=train_dataloader, optimizers=adam,
    device='cpu', n_epochs=2
)
trainer_on_every.run()

# In [12]
@Trainer.on(Event.on_before_backward(once=2))
def print_loss_once(trainer, outputs):
    print("Total Batches {}/{} Loss {}".format(
        trainer.global_forward_batches + 1, trainer.n_batches,
        outputs['loss'].item()))

trainer_on_once = Trainer(
    model=model, train_dataloader=train_dataloader, optimizers=adam,
    device='cpu', n_epochs=2
)
trainer_on_once.run()

# In [13]
def filter_fn(filter, trainer):
    return filter.num_called % 2 == 0

@Trainer.on(Event.on_before_backward(filter_fn=filter_fn))
def print_loss_filter(trainer, outputs):
    print("Total Batches {}/{} Loss {}".format(
        trainer.global_forward_batches + 1, trainer.n_batches,
        outputs['loss'].item()))

trainer_on_filter = Trainer(
    model=model, train_dataloader=train_dataloader, optimizers=adam,
    device='cpu', n_epochs=2
)
trainer_on_filter.run()

# In [14]
import gc

del trainer
del trainer_on_every
del trainer_on_once
del trainer_on_filter
del model
del adam

gc.collect()
