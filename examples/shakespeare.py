"""Tiny Shakespeare: a transformer with 0.4 million weights writes plays, character by character. Loss 1.8 after 3 epochs.

    python examples/shakespeare.py [--data FILE] [--epochs 3] [--directory runs/shakespeare] [--quick]

Shows: a model that computes its own loss, a function at a moment (it logs a sample after each epoch), text in TensorBoard.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Run, Text, Trainer, on
from cadenza.callbacks import ClipGradients, Evaluate, LearningRate, Limit, LogTraining
from cadenza.sinks import Console, TensorBoard

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "tinyshakespeare" / "input.txt"
CONTEXT = 64  # characters per window


def main(argv: Sequence[str] | None = None) -> Run:
    """Train with the options of the command line, and print a sample."""
    parser = argparse.ArgumentParser(description="Train a character transformer on Shakespeare's plays.")
    parser.add_argument("--data", type=Path, default=DATA, help="a text file")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="run directory; without it, nothing is written")
    parser.add_argument("--quick", action="store_true", help="run only a few batches, to check that it works")
    options = parser.parse_args(argv)
    if not options.data.exists():
        sys.exit(
            f"There is no text in {options.data}. Get data/tinyshakespeare/input.txt from github.com/karpathy/char-rnn, or "
            "use any other text file: --data FILE"
        )

    text = options.data.read_text(encoding="utf-8")
    characters = sorted(set(text))
    number = {character: index for index, character in enumerate(characters)}
    encoded = torch.tensor([number[character] for character in text])
    split = len(encoded) * 9 // 10
    train = DataLoader(windows(encoded[:split]), batch_size=64, shuffle=True)
    valid = DataLoader(windows(encoded[split:]), batch_size=64)
    steps = options.epochs * len(train)

    @on(Callback.on_epoch_end)
    def show_sample(run: Run) -> None:
        run.log("sample", Text(generated(model, characters, length=200)))

    callbacks = [
        ClipGradients(max_norm=1.0),
        LearningRate(lambda optimizer: OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)),
        LogTraining(every="50 steps"),
        Evaluate(valid, every="1 epoch", name="valid"),
        show_sample,
        Console(),
    ]
    if options.directory:
        callbacks.append(TensorBoard())
    if options.quick:
        callbacks.append(Limit(train=10, evaluation=2))

    torch.manual_seed(0)  # seeds the initial weights; the trainer's seed is for the training
    model = Writer(len(characters))
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.AdamW(parameters),
        train,
        max_epochs=options.epochs,
        seed=0,
        directory=options.directory,
        callbacks=callbacks,
    )
    run = trainer.fit()
    print(generated(model, characters, length=400))
    print(f"validation loss {run.history.latest['valid/loss']:.4f}")
    return run


class Writer(nn.Module):
    """A transformer that predicts the next character. B batch, T characters, V different characters."""

    def __init__(self, kinds: int, size: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(kinds, size), nn.Embedding(CONTEXT, size)
        layer = nn.TransformerEncoderLayer(size, heads, 4 * size, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(size), enable_nested_tensor=False)
        self.head = nn.Linear(size, kinds)

    def forward(self, characters_BT: Tensor, next_BT: Tensor) -> Tensor:  # noqa: N803  # the dimensions
        """Return the loss, shape (). Without ``compute_loss``, the trainer calls this with the parts of the batch."""
        return nn.functional.cross_entropy(self.logits(characters_BT).flatten(0, 1), next_BT.flatten())

    def logits(self, characters_BT: Tensor) -> Tensor:  # noqa: N803
        """Return (B, T, V)."""
        length = characters_BT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=characters_BT.device)
        vectors = self.characters(characters_BT) + self.positions.weight[:length]
        logits_BTV: Tensor = self.head(self.layers(vectors, mask=mask, is_causal=True))  # noqa: N806
        return logits_BTV


def windows(encoded: Tensor) -> TensorDataset:
    """Return the characters of each window (CONTEXT,), and the same window shifted by one."""
    windows_NT = encoded.unfold(0, CONTEXT + 1, CONTEXT)  # noqa: N806
    return TensorDataset(windows_NT[:, :-1], windows_NT[:, 1:])


@torch.no_grad()
def generated(model: Writer, characters: list[str], length: int) -> str:
    """Generate text, always the same for the same weights. The RNG state of the training does not change."""
    device, training = model.head.weight.device, model.training
    generator = torch.Generator().manual_seed(0)
    chosen = [characters.index("\n")]
    model.eval()
    while len(chosen) <= length:
        logits_V = model.logits(torch.tensor([chosen[-CONTEXT:]], device=device))[0, -1]  # noqa: N806
        chosen.append(int(torch.multinomial(logits_V.softmax(dim=0).cpu(), 1, generator=generator)))
    model.train(training)
    return "".join(characters[index] for index in chosen[1:])


if __name__ == "__main__":
    main()
