"""Weights & Biases as both dialects use it: one session of the process, and no reason to end a training."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from cadenza.compat.neural.logs import logging


class Tracker:
    """Sends values to the process's session of Weights & Biases. What goes wrong there is said once, and it is silent then."""

    def __init__(self) -> None:
        self.started = False
        """Whether there is a session to send to."""

    def start(self, name: str | None, project: str | None, args: Any = None) -> None:
        """Start a session, or take the one that is there, whose configuration is then left alone.

        Args:
            name: Of the run.
            project: Where it belongs.
            args: Hyper-parameters: a mapping, or what ``argparse`` returned.
        """
        self.started = False
        if find_spec("wandb") is None:
            logging.error("wandb is not installed, so nothing is sent there: pip install 'cadenza[wandb]'")
            return
        import wandb

        if wandb.run is not None:
            logging.info("A wandb session is under way and is used; name, project and args are left as they are.")
            self.started = True
            return
        try:
            wandb.init(name=name, project=project)
            if args is not None:
                wandb.config.update(dict(args) if isinstance(args, Mapping) else vars(args))  # type: ignore[no-untyped-call]  # theirs
            self.started = True
        except Exception as error:  # no account, no server: a training does not end for that
            logging.error("wandb could not be started, so nothing is sent there: %r", error)

    def send(self, values: Mapping[str, Any], step: int) -> None:
        """Send values of a step, tensors as they are on the host; nothing without a session."""
        if not self.started:
            return
        import wandb

        try:
            wandb.log({name: _plain(value) for name, value in values.items()}, step=step)
        except Exception as error:
            self.started = False
            logging.error("wandb failed, so nothing more is sent there: %r", error)


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    host = value.detach().cpu()
    return host.item() if host.ndim == 0 else host.numpy()
