"""A GAN learns eight points on a circle: two updates of the judge, then one of the maker."""

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

STEPS, SIZE, NOISE = 300, 64, 8
CENTERS = torch.tensor([[math.cos(math.pi * k / 4), math.sin(math.pi * k / 4)] for k in range(8)])


def real() -> Tensor:
    """Draw points close to the centers, (SIZE, 2)."""
    return CENTERS[torch.randint(8, (SIZE,))] + 0.05 * torch.randn(SIZE, 2)


def score(maker: nn.Module, noise: Tensor) -> dict[str, Tensor]:
    """Return how far the centers are from the nearest point that is made of `noise`, on average."""
    return {"distance": torch.cdist(CENTERS, maker(noise)).amin(1).mean()}


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Update the weights of one player. The loss of the maker leaves gradients in the judge, too."""
    maker.zero_grad()
    judge.zero_grad()
    loss.backward()
    optimizer.step()


def play() -> None:
    """Let the judge learn twice, and the maker once."""
    for _ in range(2):
        made = maker(torch.randn(SIZE, NOISE)).detach()
        update(optimizers[1], softplus(-judge(real())).mean() + softplus(judge(made)).mean())
    update(optimizers[0], softplus(-judge(maker(torch.randn(SIZE, NOISE)))).mean())


torch.manual_seed(1)
maker = nn.Sequential(nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
judge = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizers = [torch.optim.Adam(network.parameters(), 1e-3, betas=(0.5, 0.9)) for network in (maker, judge)]
fixed = torch.randn(256, NOISE, generator=torch.Generator().manual_seed(2))
for _ in range(STEPS):
    play()
print(score(maker, fixed))
