"""SST-2: is a phrase from a film review positive or negative? A small convolutional network; dev accuracy about 0.81.

    python examples/sst2.py [--data DIR] [--epochs 3] [--directory runs/sst2] [--quick]

Shows: data read with `datasets`, batches of different lengths, evaluation within an epoch, early stopping, clipped gradients.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the files are local: no requests

import datasets
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from cadenza import Run, Trainer, supervised
from cadenza.callbacks import ClipGradients, EarlyStopping, Evaluate, LearningRate, Limit, LogTraining
from cadenza.sinks import Console, TensorBoard

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "sst2"
PADDING, UNKNOWN = 0, 1
Example = tuple[Tensor, int]  # word numbers (T,), label


def main(argv: Sequence[str] | None = None) -> Run:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a text classifier on SST-2.")
    parser.add_argument("--data", type=Path, default=DATA, help="folder with train.tsv and dev.tsv")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="run directory; without it, nothing is written")
    parser.add_argument("--quick", action="store_true", help="run only a few batches, to check that it works")
    options = parser.parse_args(argv)
    if not (options.data / "train.tsv").exists():
        sys.exit(
            f"SST-2 is not in {options.data}. Get train.tsv and dev.tsv (label, TAB, sentence; with a header line) from the "
            "folder data/SST2 of github.com/nlpaueb/nlp-optimizers and pass their folder: --data DIR"
        )

    texts = read(options.data)
    words = Counter(word for sentence in texts["train"]["text"] for word in sentence.split())
    numbers = {word: number for number, (word, _) in enumerate(words.most_common(), start=UNKNOWN + 1)}
    train = DataLoader(Phrases(texts["train"], numbers), batch_size=64, shuffle=True, collate_fn=padded)
    dev = DataLoader(Phrases(texts["dev"], numbers), batch_size=218, collate_fn=padded)
    steps = options.epochs * len(train)
    callbacks = [
        ClipGradients(max_norm=1.0),
        LearningRate(lambda optimizer: OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)),
        LogTraining(every="200 steps"),
        Evaluate(dev, metrics={"acc": MulticlassAccuracy(num_classes=2, average="micro")}, every="0.5 epoch", name="dev"),
        EarlyStopping("dev/acc", mode="max", patience=3),
        Console(),
    ]
    if options.directory:
        callbacks.append(TensorBoard())
    if options.quick:
        callbacks.append(Limit(train=20))

    torch.manual_seed(0)  # seeds the initial weights; the trainer's seed is for the training
    trainer = Trainer(
        WordsCnn(words=len(numbers) + UNKNOWN + 1),
        lambda parameters: torch.optim.AdamW(parameters),
        train,
        supervised(nn.CrossEntropyLoss()),
        max_epochs=options.epochs,
        seed=0,
        directory=options.directory,
        callbacks=callbacks,
    )
    run = trainer.fit()
    print(f"dev accuracy {run.history.latest['dev/acc']:.4f}")
    return run


class WordsCnn(nn.Module):
    """Word numbers (B, T) in, logits (B, 2) out: max pooling over filters of 2, 3 or 4 words."""

    def __init__(self, words: int, size: int = 64, filters: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, size, padding_idx=PADDING)
        self.convolutions = nn.ModuleList(nn.Conv1d(size, filters, width, padding=width // 2) for width in (2, 3, 4))
        self.light_dropout, self.dropout = nn.Dropout(0.2), nn.Dropout(0.5)
        self.head = nn.Linear(3 * filters, 2)

    def forward(self, words: Tensor) -> Tensor:
        vectors = self.light_dropout(self.embedding(words)).transpose(1, 2)  # (B, size, T)
        found = [convolution(vectors).amax(dim=2).relu() for convolution in self.convolutions]
        logits: Tensor = self.head(self.dropout(torch.cat(found, dim=1)))
        return logits


def read(folder: Path) -> datasets.DatasetDict:
    """Return the splits ``train`` and ``dev``, each with the columns ``label`` and ``text``."""
    datasets.disable_progress_bars()
    files = {"train": str(folder / "train.tsv"), "dev": str(folder / "dev.tsv")}
    # Columns by position, because their names differ. Quotes are part of the text.
    return datasets.load_dataset("csv", data_files=files, delimiter="\t", quoting=3, skiprows=1, column_names=["label", "text"])


class Phrases(Dataset[Example]):
    """Phrases as word numbers, with their labels."""

    def __init__(self, part: datasets.Dataset, numbers: dict[str, int]) -> None:
        self.labels: list[int] = list(part["label"])
        self.sentences = [torch.tensor([numbers.get(word, UNKNOWN) for word in text.split()]) for text in part["text"]]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Example:
        return self.sentences[index], self.labels[index]


def padded(examples: list[Example]) -> tuple[Tensor, Tensor]:
    """Return word numbers (B, T), with the T of the longest phrase, and labels (B,)."""
    words = pad_sequence([sentence for sentence, _ in examples], batch_first=True, padding_value=PADDING)
    return words, torch.tensor([label for _, label in examples])


if __name__ == "__main__":
    main()
