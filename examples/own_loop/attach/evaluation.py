"""Learn which of four slot machines pays most, by REINFORCE."""

import torch
from torch import nn
from torch.distributions import Categorical

from cadenza import attach
from cadenza.callbacks import Evaluate


class Machines:
    """Four slot machines. What they pay changes slowly."""

    def __init__(self):
        self.pays, self.plays = torch.tensor([0.1, 0.2, 0.3, 0.9]), 0

    def play(self, chosen):
        """Return the rewards of the machines with these indices, shape (B,)."""
        self.plays += len(chosen)
        self.pays = self.pays + 0.001 * torch.randn(4)
        return self.pays[chosen] + 0.1 * torch.randn(len(chosen))


def score(policy, context):
    """Return the mean that the policy is paid."""
    return {"reward": (policy(context).softmax(-1) * machines.pays).sum()}


torch.manual_seed(0)
machines = Machines()
policy = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)

callbacks = [
    Evaluate([torch.ones(1, 1)] * 2, every="10 steps", compute=score),
]
with attach(policy, optimizer, max_steps=60, precision="bf16", callbacks=callbacks) as loop:
    while not loop.over():
        with loop.step():
            for _ in range(2):
                with loop.precision():
                    logits = policy(torch.ones(32, 1))
                choice = Categorical(logits=logits.float())
                chosen = choice.sample()
                rewards = machines.play(chosen)
                loss = -(choice.log_prob(chosen) * (rewards - rewards.mean())).mean()
                loop.backward(loss / 2)
            loop.update()
