"""Fit a sine."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader


def loss_of(model, batch):
    """Return the loss of a batch, shape ()."""
    inputs, targets = batch
    return mse_loss(model(inputs), targets)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
xs = torch.linspace(-3, 3, 512).unsqueeze(1)
train = DataLoader(list(zip(xs, xs.sin(), strict=True)), batch_size=16, shuffle=True)
valid = DataLoader(list(zip(xs, xs.sin(), strict=True)), batch_size=64)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

for epoch in range(5):
    for inputs, targets in train:
        loss = loss_of(model, (inputs.to(device), targets.to(device)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch + 1}: loss {loss.item():.4f}")

torch.save(model.state_dict(), "weights.pt")
