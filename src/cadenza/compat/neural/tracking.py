"""Weights & Biases for both versions of NeMo: one session per process. Its errors do not end a training."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from cadenza.compat.neural.logs import logging


class Tracker:
    """Sends values to the wandb session of this process. The first error is logged, and nothing is sent after it."""

    def __init__(self) -> None:
        self.started: bool = False
        """Whether there is a wandb session."""

    def start(self, name: str | None, project: str | None, args: Any = None) -> None:
        """Start a wandb session, or use the current one without a change of its configuration.

        Args:
            name: The name of the wandb run.
            project: The wandb project.
            args: Hyper-parameters: a mapping, or a namespace of ``argparse``.
        """
        self.started = False
        if find_spec("wandb") is None:
            logging.error("wandb is not installed, so nothing is sent to it. Install it with: pip install 'cadenza[wandb]'")
            return
        import wandb

        if wandb.run is not None:
            logging.info("The current wandb session is used; name, project and args are ignored.")
            self.started = True
            return
        try:
            wandb.init(name=name, project=project)
            if args is not None:
                wandb.config.update(dict(args) if isinstance(args, Mapping) else vars(args))  # type: ignore[no-untyped-call]  # wandb has no types here
            self.started = True
        except Exception as error:  # such as no account or no server
            logging.error("wandb could not be started, so nothing is sent to it: %r", error)

    def send(self, values: Mapping[str, Any], step: int) -> None:
        """Send the values of a step, tensors copied to the host. Without a session, do nothing."""
        if not self.started:
            return
        import wandb

        try:
            wandb.log({name: _plain(value) for name, value in values.items()}, step=step)
        except Exception as error:
            self.started = False
            logging.error("wandb failed, so nothing more is sent to it: %r", error)


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    host = value.detach().cpu()
    return host.item() if host.ndim == 0 else host.numpy()
