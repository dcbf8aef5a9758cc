"""The rows of the tables: where each framework's module is, and the environment that it needs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A framework, or one way to use it."""

    module: str
    package: str
    """The name of the distribution."""
    environment: str | None
    """The name of its requirements file; None: the environment that runs the benchmark."""


HAND, HAND_FUSED = "by hand", "by hand, fused"

ROWS = {
    "by hand, again": Row("peers.with_hands", "torch", None),
    HAND_FUSED: Row("peers.with_hands", "torch", None),
    "Cadenza": Row("peers.with_cadenza", "cadenza", None),
    "Cadenza, optimizer instance": Row("peers.with_cadenza", "cadenza", None),
    "Ignite": Row("peers.with_ignite", "pytorch-ignite", "ignite"),
    "Ignite, own step": Row("peers.with_ignite", "pytorch-ignite", "ignite"),
    "Fabric": Row("peers.with_fabric", "lightning", "lightning"),
    "accelerate": Row("peers.with_accelerate", "accelerate", "accelerate"),
    "pytorch-accelerated": Row("peers.with_pytorch_accelerated", "pytorch-accelerated", "pytorch_accelerated"),
    "Lightning": Row("peers.with_lightning", "lightning", "lightning"),
    "HF Trainer": Row("peers.with_transformers", "transformers", "transformers"),
    "HF Trainer, fused": Row("peers.with_transformers", "transformers", "transformers"),
}
