"""A GAN draws digits: a generator learns to deceive a discriminator. Its images look like digits after half a minute.

    python examples/gan_digits.py [--epochs 200] [--directory runs/gan] [--quick]

Shows: two optimizers, a `step_fn` that updates one after the other, images in TensorBoard.
scikit-learn contains the data.
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

NOISE = 32  # random numbers per image


def main(argv: Sequence[str] | None = None) -> Run:
    """Train with the options of the command line."""
    parser = argparse.ArgumentParser(description="Train a GAN on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--directory", type=Path, help="run directory; without it, nothing is written")
    parser.add_argument("--quick", action="store_true", help="run only a few batches, to check that it works")
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

    torch.set_num_threads(1)  # more threads do not help such a small network
    torch.manual_seed(0)  # seeds the initial weights; the trainer's seed is for the training
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
    )
    return trainer.fit()


def step(run: Run, batch: list[Tensor]) -> dict[str, Tensor]:
    """Update the discriminator, then the generator. Each ``run.backward`` and ``run.update`` fires the usual moments."""
    gan, (real,) = run.model, batch
    assert isinstance(gan, Gan)
    optimize_generator, optimize_discriminator = run.optimizers
    fake = gan.generator(torch.randn(len(real), NOISE, device=run.device))

    seen_real, seen_fake = gan.discriminator(real), gan.discriminator(fake.detach())
    discriminator_loss = (adversarial_loss(seen_real, 0.9) + adversarial_loss(seen_fake, 0.0)) / 2  # 0.9: label smoothing
    run.backward(discriminator_loss)
    run.update(optimize_discriminator)

    generator_loss = adversarial_loss(gan.discriminator(fake), 1.0)
    run.backward(generator_loss, into=optimize_generator)  # otherwise its gradients reach the discriminator's next update
    run.update(optimize_generator)

    both = {"discriminator": discriminator_loss.detach(), "generator": generator_loss.detach()}
    return {"loss": both["discriminator"] + both["generator"], **both}


@on(Callback.on_epoch_end, every=20)
def show_samples(run: Run) -> None:
    """Log an image of 64 digits, always from the same random numbers."""
    assert isinstance(run.model, Gan)
    run.log("samples", Image(sheet(samples(run.model, 64))))


class Gan(nn.Module):
    """Both networks. Images are (B, 1, 8, 8) in -1..1."""

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


def adversarial_loss(logits: Tensor, truth: float) -> Tensor:
    """Return the loss, shape (), of discriminator `logits` for images that are real (`truth` 1) or generated (0)."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


@torch.no_grad()
def samples(gan: Gan, count: int) -> Tensor:
    """Return `count` images in 0..1, always from the same random numbers."""
    noise = torch.randn(count, NOISE, generator=torch.Generator().manual_seed(1))
    gan.eval()
    images: Tensor = gan.generator(noise.to(next(gan.parameters()).device))
    gan.train()
    return (images + 1) / 2


def sheet(images: Tensor, columns: int = 8) -> Tensor:
    """Arrange (N, 1, H, W) as one image (1, H', W') with gray lines in between."""
    framed = pad(images, (1, 1, 1, 1), value=0.4)
    return torch.cat([torch.cat(list(row), dim=2) for row in framed.split(columns)], dim=1)


if __name__ == "__main__":
    main()
