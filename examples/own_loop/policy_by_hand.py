"""A policy learns to balance by REINFORCE, in an environment of its own."""

import math
import random

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli

STEPS, HORIZON, DISCOUNT = 80, 48, 0.95
STARTS = [-0.2, -0.1, 0.1, 0.2]


class Pole:
    """An inverted pendulum with gusts of wind: it is pushed left or right, falls beyond 0.5 rad, and stands up again."""

    def __init__(self, angle: float = 0.05) -> None:
        self.angle, self.speed, self.falls = angle, 0.0, 0

    def step(self, push: float) -> float:
        """Push (0 left, 1 right) for a tenth of a second; return the reward."""
        self.speed += 0.1 * (3 * math.sin(self.angle) + 3 * (push - 0.5) + random.uniform(-0.3, 0.3))
        self.angle += 0.1 * self.speed
        if abs(self.angle) < 0.5:
            return 1.0
        self.angle, self.speed, self.falls = random.uniform(-0.1, 0.1), 0.0, self.falls + 1
        return -5.0

    def seen(self) -> Tensor:
        """Return what the policy sees, (2,)."""
        return torch.tensor([self.angle, self.speed])


def score(policy: nn.Module, angle: float) -> dict[str, float]:
    """Return the reward of a policy that always takes the likelier push, from this angle on."""
    world = Pole(angle)
    return {"reward": sum(world.step(float(policy(world.seen()) > 0)) for _ in range(HORIZON)) / HORIZON}


def surrogate() -> Tensor:
    """Play on where the last rollout ended; return the loss that has the gradient of the policy, shape ()."""
    seen, pushes, rewards = [], [], []
    for _ in range(HORIZON):
        seen.append(pole.seen())
        with torch.no_grad():
            pushes.append(Bernoulli(logits=policy(seen[-1]), validate_args=False).sample())
        rewards.append(pole.step(float(pushes[-1])))
    total, totals = 0.0, []
    for reward in reversed(rewards):
        total = reward + DISCOUNT * total
        totals.insert(0, total)
    gains = torch.tensor(totals)
    gains = (gains - gains.mean()) / (gains.std() + 1e-6)
    chances = Bernoulli(logits=policy(torch.stack(seen)).squeeze(1)).log_prob(torch.cat(pushes))
    return -(chances * gains).mean()


random.seed(1)
torch.manual_seed(1)
pole = Pole()
policy = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(policy.parameters(), 0.02)
for _ in range(STEPS):
    loss = surrogate()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(sum(score(policy, angle)["reward"] for angle in STARTS) / len(STARTS), pole.falls)
