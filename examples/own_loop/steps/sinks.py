"""Fit a sine."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from cadenza import Trainer
from cadenza.callbacks import EarlyStopping, Evaluate, LogTraining
from cadenza.sinks import Console, Csv, TensorBoard


def loss_of(model, batch):
    """Return the loss of a batch, shape ()."""
    inputs, targets = batch
    return mse_loss(model(inputs), targets)


torch.manual_seed(0)
xs = torch.linspace(-3, 3, 512).unsqueeze(1)
train = DataLoader(list(zip(xs, xs.sin(), strict=True)), batch_size=16, shuffle=True)
valid = DataLoader(list(zip(xs, xs.sin(), strict=True)), batch_size=64)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

callbacks = [
    Evaluate(valid, compute=loss_of),
    EarlyStopping("eval/loss", "min", patience=2),
    LogTraining("10 steps"),
    TensorBoard(),
    Csv(),
    Console(),
]
trainer = Trainer(
    model,
    optimizer,
    train,
    max_epochs=5,
    accumulate=4,
    precision="bf16",
    callbacks=callbacks,
    directory="runs/sine",
)
for step in trainer.steps():
    for batch in step:
        with step.precision():
            loss = loss_of(model, batch)
        step.backward(loss)

torch.save(model.state_dict(), "weights.pt")
