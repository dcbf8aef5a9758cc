"""A small GPT learns to add, in the manner of nanoGPT."""

import math
import random

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.data import DataLoader

from cadenza import Trainer
from cadenza.callbacks import Checkpoint, ClipGradients, EarlyStopping, Evaluate, LogTraining
from cadenza.sinks import Console, Csv, TensorBoard

CHARACTERS, CONTEXT, WIDTH, HEADS = "0123456789+=\n", 16, 32, 4
STEPS, ACCUMULATE, WARMUP, RATE = 100, 2, 10, 1e-2


class Block(nn.Module):
    """Attention to earlier characters, then a small network, each added to what came in."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_network = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, vectors: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C)."""
        parts = self.queries_keys_values(self.before_attention(vectors)).unflatten(-1, (3, HEADS, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        vectors = vectors + self.joined(attended.transpose(1, 2).flatten(2))
        return vectors + self.network(self.before_network(vectors))


class Gpt(nn.Module):
    """Predicts the next character."""

    def __init__(self):
        super().__init__()
        self.characters, self.positions = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, len(CHARACTERS), bias=False)
        self.head.weight = self.characters.weight
        nn.init.normal_(self.head.weight, std=0.2)

    def forward(self, characters: Tensor) -> Tensor:
        """Map (B, T) to (B, T, V)."""
        return self.head(self.blocks(self.characters(characters) + self.positions.weight))


def windows(count: int, seed: int) -> Tensor:
    """Return windows of a text of sums such as ``12+30=42``, (count, CONTEXT + 1)."""
    dice, text = random.Random(seed), ""
    while len(text) < count * CONTEXT + 1:
        first, second = dice.randrange(50), dice.randrange(50)
        text += f"{first}+{second}={first + second}\n"
    return torch.tensor([CHARACTERS.index(character) for character in text]).unfold(0, CONTEXT + 1, CONTEXT)[:count]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean loss of a batch of windows, shape ()."""
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def rate_at(step: int) -> float:
    """Return the learning rate: a linear warm-up, then half a cosine down to a tenth."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * (0.55 + 0.45 * math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


torch.manual_seed(1)
model = Gpt()
optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1)
train = DataLoader(windows(640, seed=1), batch_size=8, shuffle=True)
valid = DataLoader(windows(64, seed=2), batch_size=32)
tests = [Evaluate(valid, "20 steps", compute=loss_of), EarlyStopping("eval/loss", "min", patience=3)]
callbacks = [ClipGradients(1.0), *tests, LogTraining("10 steps"), Checkpoint("10 steps"), TensorBoard(), Csv(), Console()]
run = {"max_steps": STEPS, "accumulate": ACCUMULATE, "seed": 1, "directory": "runs/gpt", "callbacks": callbacks}
for step in Trainer(model, optimizer, train, **run).steps(resume="auto"):
    for group in optimizer.param_groups:
        group["lr"] = rate_at(step.run.progress.step)
    for batch in step:
        step.backward(loss_of(model, batch))
