"""``SimpleLossLoggerCallback`` and ``WandbCallback`` of NeMo 0.10."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cadenza.compat.neural.action import ActionCallback
from cadenza.compat.neural.adapted import AdaptedRun, Entry, entries, labelled
from cadenza.compat.neural.arguments import frequency
from cadenza.compat.neural.events import counters, listeners
from cadenza.compat.neural.logs import logging
from cadenza.compat.neural.tracking import Tracker

if TYPE_CHECKING:
    from cadenza.hooks.listener import Listener
    from cadenza.run import Run


class SimpleLossLoggerCallback(ActionCallback):
    """Print tensors and write them to TensorBoard every `step_freq` steps, from step 0 on, on the main process.

    Args:
        tensors: A tensor or a list of tensors. The functions get a list in this order. In a native run, keys of the outputs,
            such as ``"loss"``.
        print_func: Called with the list.
        get_tb_values: Returns pairs ``(tag, number)`` for the list, which are written.
        log_to_tb_func: Called with the writer, the list and the step.
        step_freq: The number of steps between two logs.
        tb_writer: A SummaryWriter. It is closed at the end of the training, after all callbacks, also after an error.
    """

    shows_progress = True

    def __init__(
        self,
        tensors: Entry | Sequence[Entry],
        print_func: Callable[[list[Tensor]], object] | None = None,
        get_tb_values: Callable[[list[Tensor]], Iterable[tuple[str, Any]]] | None = None,
        log_to_tb_func: Callable[[Any, list[Tensor], int], object] | None = None,
        step_freq: int = 25,
        tb_writer: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(step_freq, int) or step_freq < 1:
            raise ValueError(f"step_freq must be a whole number of at least 1; got {step_freq!r}")
        self.tensors: list[Entry] = entries(tensors)
        self.print_func: Callable[[list[Tensor]], object] | None = print_func
        self.get_tb_values: Callable[[list[Tensor]], Iterable[tuple[str, Any]]] | None = get_tb_values
        self.log_to_tb_func: Callable[[Any, list[Tensor], int], object] | None = log_to_tb_func
        self.step_freq: int = step_freq
        self.tb_writer: Any = tb_writer
        self._action_began = self._epoch_began = self._step_began = 0.0

    def listeners(self) -> list[Listener]:
        return [*listeners({"on_batch_end": self._compute}), *super().listeners()]

    def _compute(self, run: Run, adapted: AdaptedRun, event: str) -> None:
        """Compute the tensors before the update, as the loop of NeMo does."""
        step, _ = counters(adapted, event)
        if adapted.graph is not None and adapted.rank in (None, 0) and step % self.step_freq == 0:
            for tensor in self.tensors:
                adapted.value(tensor)

    def on_action_start(self) -> None:
        self._action_began = time.time()
        self._say("Starting .....")
        if self.tb_writer is None and self.global_rank in (None, 0) and (self.get_tb_values or self.log_to_tb_func):
            logging.warning(
                "nothing is written to TensorBoard: tb_writer is None. Pass that of a factory with create_tb_writer=True"
            )
        if self.tb_writer is not None and self.global_rank in (None, 0):
            self.action.run.at_end(self.tb_writer.close)

    def on_epoch_start(self) -> None:
        self._epoch_began = time.time()
        self._say(f"Starting epoch {self.epoch_num}")

    def on_iteration_start(self) -> None:
        self._step_began = time.time()

    def on_iteration_end(self) -> None:
        if self.step % self.step_freq or self.global_rank not in (None, 0):
            return
        values = [self.action.adapted.value(tensor) for tensor in self.tensors]
        logging.info("Step: %d", self.step)
        if self.print_func is not None:
            self.print_func(values)
        passed_s = time.time() - self._step_began
        if self.tb_writer is not None:
            if self.get_tb_values is not None:
                for tag, value in self.get_tb_values(values):
                    self.tb_writer.add_scalar(tag, value.item() if isinstance(value, Tensor) else value, self.step)
            if self.log_to_tb_func is not None:
                self.log_to_tb_func(self.tb_writer, values, self.step)
            self.tb_writer.add_scalar("misc/step_time", passed_s, self.step)
        logging.info("Step time: %.4f seconds", passed_s)

    def on_epoch_end(self) -> None:
        passed_s = time.time() - self._epoch_began
        self._say(f"Finished epoch {self.epoch_num} in {passed_s:.4f} seconds")
        if self.tb_writer is not None and self.global_rank in (None, 0):
            self.tb_writer.add_scalar("misc/epoch", self.epoch_num, self.step)
            self.tb_writer.add_scalar("misc/epoch_time", passed_s, self.step)

    def on_action_end(self) -> None:
        self._say(f"Done in {time.time() - self._action_began:.4f} seconds")

    def _say(self, text: str) -> None:
        if self.global_rank in (None, 0):
            logging.info(text)


class WandbCallback(ActionCallback):
    """Send tensors of the training and the learning rate to Weights & Biases, on the main process.

    Args:
        train_tensors: The tensors, each sent with its name.
        wandb_name: The name of the wandb run.
        wandb_project: The wandb project.
        args: Hyper-parameters to record.
        update_freq: The number of steps between two logs; -1 for never.
    """

    def __init__(
        self,
        train_tensors: Sequence[Entry] = (),
        wandb_name: str | None = None,
        wandb_project: str | None = None,
        args: Any = None,
        update_freq: int = 25,
    ) -> None:
        super().__init__()
        self.train_tensors: list[Entry] = entries(train_tensors)
        self.wandb_name: str | None = wandb_name
        self.wandb_project: str | None = wandb_project
        self.args: Any = args
        self.update_freq: int = frequency("update_freq", update_freq)
        self._tracker = Tracker()
        self._epoch_began = 0.0

    def on_action_start(self) -> None:
        if self.global_rank in (None, 0):
            self._tracker.start(self.wandb_name, self.wandb_project, self.args)

    def on_epoch_start(self) -> None:
        self._epoch_began = time.time()

    def on_iteration_end(self) -> None:
        if self._tracker.started and self.update_freq > 0 and self.step % self.update_freq == 0:
            values = {name: self.action.adapted.value(tensor) for name, tensor in labelled(self.train_tensors)}
            self._tracker.send({**values, "LR": self.learning_rate}, self.step)

    def on_epoch_end(self) -> None:
        if self.global_rank in (None, 0):
            self._tracker.send({"epoch": self.epoch_num, "epoch_time": time.time() - self._epoch_began}, self.step)
