"""What the document leaves to the reader: a few images of Fashion-MNIST, and a model."""

import gzip
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset


def images(folder, first, last):
    """Return images (N, 1, 28, 28) in 0..1 and their labels."""
    with gzip.open(Path(folder) / "t10k-images-idx3-ubyte.gz") as file:
        pixels = torch.frombuffer(bytearray(file.read(16 + last * 784)), dtype=torch.uint8)[16:]
    with gzip.open(Path(folder) / "t10k-labels-idx1-ubyte.gz") as file:
        labels = torch.frombuffer(bytearray(file.read(8 + last)), dtype=torch.uint8)[8:]
    return TensorDataset(pixels.view(-1, 1, 28, 28)[first:] / 255, labels[first:].long())


def classifier():
    """Return a model with ten outputs and its optimizer."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=0.003)
