"""A GAN draws digits: a generator learns to fool a discriminator. Its pictures look like digits after half a minute.

    python examples/gan_digits.py [--epochs 200] [--directory runs/gan] [--quick]

Shows: two optimizers and a step of your own that updates each in turn; pictures in TensorBoard.
The data come with scikit-learn.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, pad
from torch.utils.data import DataLoader, TensorDataset

from cadenza import Callback, Image, Run, Trainer, on
from cadenza.callbacks import Limit, LogTraining
from cadenza.sinks import Console, TensorBoard

NOISE = 32  # random numbers from which a picture is made


def main(argv: Sequence[str] | None = None) -> Run:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Train a GAN on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--directory", type=Path, help="where the run writes; nothing is written if left out")
    parser.add_argument("--quick", action="store_true", help="only a few batches, to see that it works")
    options = parser.parse_args(argv)

    digits_N1HW = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # noqa: N806  # in -1..1
    train = DataLoader(TensorDataset(digits_N1HW), batch_size=64, shuffle=True, drop_last=True)
    callbacks = [
        LogTraining(every="10 epoch", outputs=("discriminator", "generator"), lr=False),
        show_samples,
        Console(),
    ]
    if options.directory:
        callbacks.append(TensorBoard())
    if options.quick:
        callbacks.append(Limit(train=5))

    torch.set_num_threads(1)  # so small a network gains nothing from more
    torch.manual_seed(0)  # for the first weights; the trainer's seed is for the training
    gan = Gan()
    trainer = Trainer(
        gan,
        [torch.optim.Adam(part.parameters(), lr=5e-4, betas=(0.5, 0.999)) for part in (gan.generator, gan.discriminator)],
        train,
        step_fn=step,
        max_epochs=options.epochs,
        seed=0,
        directory=options.directory,
        callbacks=callbacks,
        progress=True,
    )
    return trainer.fit()


def step(run: Run, batch: list[Tensor]) -> dict[str, Tensor]:
    """Update the discriminator, then the generator. Each ``run.backward`` and ``run.update`` fires the usual moments."""
    gan, (real,) = run.model, batch
    assert isinstance(gan, Gan)
    optimize_generator, optimize_discriminator = run.optimizers
    fake = gan.generator(torch.randn(len(real), NOISE, device=run.device))

    seen_real, seen_fake = gan.discriminator(real), gan.discriminator(fake.detach())
    discriminator_loss = (judged(seen_real, 0.9) + judged(seen_fake, 0.0)) / 2  # 0.9: never too sure
    run.backward(discriminator_loss)
    run.update(optimize_discriminator)

    gan.discriminator.requires_grad_(False)  # the generator's loss passes through it, and leaves no gradient in it
    generator_loss = judged(gan.discriminator(fake), 1.0)
    run.backward(generator_loss)
    run.update(optimize_generator)
    gan.discriminator.requires_grad_(True)

    both = {"discriminator": discriminator_loss.detach(), "generator": generator_loss.detach()}
    return {"loss": both["discriminator"] + both["generator"], **both}


@on(Callback.on_epoch_end, every=20)
def show_samples(run: Run) -> None:
    """Log a picture of 64 digits, always from the same random numbers."""
    assert isinstance(run.model, Gan)
    run.log("samples", Image(sheet(samples(run.model, 64))))


class Gan(nn.Module):
    """Both networks. Pictures are (B, 1, 8, 8) in -1..1."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE, 128), nn.BatchNorm1d(128), nn.ReLU()),
            *(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU()),
            *(nn.Linear(256, 64), nn.Tanh(), nn.Unflatten(1, (1, 8, 8))),
        )
        self.discriminator = nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1)),
        )


def judged(logits: Tensor, truth: float) -> Tensor:
    """Return how far the discriminator is from `truth`: 1 for real, 0 for fake."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


@torch.no_grad()
def samples(gan: Gan, count: int) -> Tensor:
    """Return `count` pictures in 0..1, always of the same random numbers."""
    noise = torch.randn(count, NOISE, generator=torch.Generator().manual_seed(1))
    gan.eval()
    pictures: Tensor = gan.generator(noise.to(next(gan.parameters()).device))
    gan.train()
    return (pictures + 1) / 2


def sheet(pictures: Tensor, columns: int = 8) -> Tensor:
    """Lay (N, 1, H, W) out as one picture (1, H', W') with grey lines between them."""
    framed = pad(pictures, (1, 1, 1, 1), value=0.4)
    return torch.cat([torch.cat(list(row), dim=2) for row in framed.split(columns)], dim=1)


if __name__ == "__main__":
    main()
