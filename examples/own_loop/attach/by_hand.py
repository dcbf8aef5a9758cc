"""Learn which of four slot machines pays most, by REINFORCE."""

import torch
from torch import nn
from torch.distributions import Categorical


class Machines:
    """Four slot machines. What they pay changes slowly."""

    def __init__(self):
        self.pays, self.plays = torch.tensor([0.1, 0.2, 0.3, 0.9]), 0

    def play(self, chosen):
        """Return the rewards of the machines with these indices, shape (B,)."""
        self.plays += len(chosen)
        self.pays = self.pays + 0.001 * torch.randn(4)
        return self.pays[chosen] + 0.1 * torch.randn(len(chosen))


torch.manual_seed(0)
machines = Machines()
policy = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)

for number in range(60):
    choice = Categorical(logits=policy(torch.ones(32, 1)))
    chosen = choice.sample()
    rewards = machines.play(chosen)
    loss = -(choice.log_prob(chosen) * (rewards - rewards.mean())).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if number % 10 == 9:
        print(f"step {number + 1}: reward {rewards.mean():.3f}")
