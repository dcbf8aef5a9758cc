"""Show the progress of a training and the results of its evaluations."""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from cadenza.compat.fastnlp.core.callbacks.has_monitor_callback import HasMonitorCallback
from cadenza.compat.fastnlp.core.utils.utils import Watched
from cadenza.errors import MissingExtraError
from cadenza.hooks.moments import BaseCallback
from cadenza.sinks.progress_renderers import NotebookRenderer, RichRenderer, Row, in_notebook

if TYPE_CHECKING:
    from cadenza.compat.fastnlp.core.controllers.view import TrainerView


logger: logging.Logger = logging.getLogger("cadenza")

SIGNS = 10  # width on each side of a headline


@runtime_checkable
class ExtraInfo(Protocol):
    """The interface of objects that collect values to show beside the loss."""

    def update(self, outputs: Any) -> None:
        """Add the outputs of the model for a batch."""

    def get_stat(self) -> Mapping[str, Any]:
        """Return the values to show by name, then reset."""


class ExtraInfoStatistics:
    """The means of entries of the model's outputs, such as an accuracy in training. Override it for other values.

    Args:
        keys: The entries.
    """

    def __init__(self, keys: str | Sequence[str]) -> None:
        self.keys: list[str] = [keys] if isinstance(keys, str) else list(keys)
        self._sums: dict[str, Any] = {}
        self._count = 0

    def update(self, outputs: Any) -> None:
        """Add the outputs of the model for a batch.

        Raises:
            KeyError: An entry is missing.
        """
        for key in self.keys:
            if key not in outputs:
                raise KeyError(f"extra_show_keys needs {key!r} in the outputs of the model; got {list(outputs)}")
            value = outputs[key]
            self._sums[key] = self._sums.get(key, 0) + (value.detach() if isinstance(value, Tensor) else value)
        self._count += 1

    def get_stat(self) -> Mapping[str, Any]:
        """Return the mean of each entry since the last call."""
        means = {key: float(value) / self._count for key, value in self._sums.items()}
        self._sums, self._count = {}, 0
        return means


class ProgressCallback(HasMonitorCallback):
    """The base class of callbacks that show a training.

    Args:
        print_every: Show every n batches, with their mean loss. Reading it waits for the device.
        loss_round_ndigit: The number of decimals of the loss.
        monitor: The result that defines the best evaluation; None: the trainer's monitor, see `HasMonitorCallback`.
        larger_better: Whether a larger value is better.
        format_json: Print results as JSON.
        extra_show_keys: Entries of the model's outputs; their means are shown beside the loss. Or an `ExtraInfo`.

    Raises:
        ValueError: `print_every` is below 1.
    """

    shows_progress = True

    def __init__(
        self,
        print_every: int = 1,
        loss_round_ndigit: int = 6,
        monitor: Watched | None = None,
        larger_better: bool = True,
        format_json: bool = True,
        extra_show_keys: str | Sequence[str] | ExtraInfo | None = None,
    ) -> None:
        if not isinstance(print_every, int) or print_every < 1:
            raise ValueError(f"print_every must be a whole number of at least 1; got {print_every!r}")
        super().__init__(monitor, larger_better)
        self.print_every: int = print_every
        self.loss_round_ndigit: int = loss_round_ndigit
        self.format_json: bool = format_json
        self.extra: ExtraInfo | None
        if extra_show_keys is None or isinstance(extra_show_keys, ExtraInfo):
            self.extra = extra_show_keys
        else:
            self.extra = ExtraInfoStatistics(extra_show_keys)
        self._loss: Tensor | float = 0.0
        self._best: tuple[int, int, dict[str, Any]] | None = None

    def forget(self) -> None:
        super().forget()
        self._best = None

    def on_train_begin(self, trainer: TrainerView) -> None:
        self._loss = 0.0

    def on_before_backward(self, trainer: TrainerView, outputs: Any) -> None:
        self._loss = self._loss + trainer.extract_loss_from_outputs(outputs).detach()
        if self.extra is not None:
            self.extra.update(outputs)

    def on_train_batch_end(self, trainer: TrainerView) -> None:
        if trainer.global_forward_batches % self.print_every == 0:
            mean, self._loss = self._loss / self.print_every, 0.0
            self.show_batch(trainer, mean)

    def on_evaluate_end(self, trainer: TrainerView, results: dict[str, Any]) -> None:
        if not results:
            return
        sign = "-"
        if self.is_better_results(results):
            sign = "+"
            self._best = trainer.cur_epoch_idx, trainer.global_forward_batches, self.itemize_results(results)
        headline = f"Eval. results on Epoch:{trainer.cur_epoch_idx}, Batch:{trainer.batch_idx_in_epoch}"
        shown = {name: value for name, value in self.itemize_results(results).items() if not name.startswith("_")}
        self.say(f"{self.ruled(headline, sign)}\n{self._results(shown)}")

    def on_train_end(self, trainer: TrainerView) -> None:
        if self._best is not None:
            epoch, batch, results = self._best
            self.say(
                f"The best performance for monitor {self.monitor_name}:{self.monitor_value} was achieved in Epoch:{epoch}, "
                f"Global Batch:{batch}. The evaluation result: \n{results}"
            )

    def on_save_checkpoint(self, trainer: TrainerView) -> dict[str, Any] | None:
        return None if self._best is None else {"monitor_value": self.monitor_value, "best": list(self._best)}

    def on_load_checkpoint(self, trainer: TrainerView, states: dict[str, Any] | None) -> None:
        if states:
            epoch, batch, results = states["best"]
            self.monitor_value: Any = states["monitor_value"]
            self._best = (epoch, batch, results)

    # -- for subclasses ---------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The name for ``Trainer(progress_bar=...)``."""
        return "auto"

    def show_batch(self, trainer: TrainerView, loss: Tensor | float) -> None:
        """Show the progress after `print_every` more batches, and their mean loss, shape (), on the device."""

    def ruled(self, headline: str, sign: str) -> str:
        """Return a headline between signs."""
        return f"{sign * SIGNS} {headline} {sign * SIGNS}"

    def shown_values(self, loss: Tensor | float) -> dict[str, Any]:
        """Return the rounded loss, and the values beside it. Waits for the device."""
        extra = {} if self.extra is None else {name: _rounded(value) for name, value in self.extra.get_stat().items()}
        return {"loss": round(float(loss), self.loss_round_ndigit), **extra}

    def say(self, text: str) -> None:
        """Show lines to the user, on the main process."""
        if self._adapted is not None:
            self._adapted.run.print(text)

    def _results(self, shown: dict[str, Any]) -> str:
        return json.dumps(shown, default=str) if self.format_json else str(shown)


class RawTextCallback(ProgressCallback):
    """Show a training as lines of text. The arguments are those of `ProgressCallback`."""

    @property
    def title(self) -> str:
        return "raw"

    def on_train_epoch_begin(self, trainer: TrainerView) -> None:
        self.say(f"\n{'*' * SIGNS} Epoch:{trainer.cur_epoch_idx} starts {'*' * SIGNS}")

    def show_batch(self, trainer: TrainerView, loss: Tensor | float) -> None:
        values = ", ".join(f"{name}:{value}" for name, value in self.shown_values(loss).items())
        part = (
            "" if not trainer.n_batches else f", finished {round(trainer.global_forward_batches / trainer.n_batches * 100, 2)}%"
        )
        self.say(f"Epoch:{trainer.cur_epoch_idx}/{trainer.n_epochs}, Batch:{trainer.batch_idx_in_epoch}, {values}{part}.")


class RichCallback(ProgressCallback):
    """Show a training as bars in a terminal or a notebook, drawn a few times a second by the renderers of `ProgressBar`.

    The arguments are those of `ProgressCallback`.

    Raises:
        MissingExtraError: rich is not installed.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if find_spec("rich") is None:
            raise MissingExtraError("rich", needed_by="RichCallback", extra="progress")
        self._renderer: RichRenderer | NotebookRenderer | None = None
        self._shown: tuple[str, ...] = ()
        self._drawn = 0.0

    @property
    def title(self) -> str:
        return "rich"

    def on_train_begin(self, trainer: TrainerView) -> None:
        super().on_train_begin(trainer)
        if self._adapted is not None and trainer.driver.is_global_zero():
            self._shown, self._drawn = (), time.monotonic()
            renderer = NotebookRenderer() if in_notebook() else RichRenderer()
            renderer.open(self._rows(trainer))
            self._renderer = renderer

    def show_batch(self, trainer: TrainerView, loss: Tensor | float) -> None:
        now, renderer = time.monotonic(), self._renderer
        if renderer is None or (
            now - self._drawn < renderer.interval_s and trainer.global_forward_batches != trainer.n_batches
        ):
            return  # the bar is not redrawn yet, and reading the loss waits for the device
        self._shown, self._drawn = tuple(f"{name}:{value}" for name, value in self.shown_values(loss).items()), now
        renderer.show(self._rows(trainer))

    def on_train_end(self, trainer: TrainerView) -> None:
        renderer, self._renderer = self._renderer, None
        if renderer is not None:
            renderer.close(self._rows(trainer))
        super().on_train_end(trainer)

    def ruled(self, headline: str, sign: str) -> str:
        return f" {headline} ".center(shutil.get_terminal_size().columns, sign)

    def _results(self, shown: dict[str, Any]) -> str:
        return json.dumps(shown, indent=2, default=str) if self.format_json else str(shown)

    def _rows(self, trainer: TrainerView) -> list[Row]:
        epoch = Row(f"Epoch:{trainer.cur_epoch_idx}", "batch", trainer.global_forward_batches, trainer.n_batches or None)
        inside, whole = trainer.batch_idx_in_epoch, trainer.num_batches_per_epoch
        return [epoch, Row(f"Batch:{inside}", "batch", inside, whole, self._shown)]


class TqdmCallback(ProgressCallback):
    """Show a training as two bars of tqdm. The arguments are those of `ProgressCallback`.

    Raises:
        MissingExtraError: tqdm is not installed.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        try:
            from tqdm.auto import tqdm
        except ImportError:
            raise MissingExtraError("tqdm", needed_by="TqdmCallback", extra="progress") from None
        self._tqdm: Any = tqdm
        self._bars: list[Any] = []

    @property
    def title(self) -> str:
        return "tqdm"

    def on_train_begin(self, trainer: TrainerView) -> None:
        super().on_train_begin(trainer)
        silent = not trainer.driver.is_global_zero()
        done = trainer.global_forward_batches
        self._bars = [
            self._tqdm(desc="Epoch:0", total=trainer.n_batches, initial=done, disable=silent, position=0),
            self._tqdm(desc="Batch", total=trainer.num_batches_per_epoch, disable=silent, position=1),
        ]

    def on_train_epoch_begin(self, trainer: TrainerView) -> None:
        epochs, batches = self._bars
        epochs.set_description_str(f"Epoch:{trainer.cur_epoch_idx}")
        batches.reset()
        batches.update(trainer.batch_idx_in_epoch)

    def show_batch(self, trainer: TrainerView, loss: Tensor | float) -> None:
        epochs, batches = self._bars
        batches.set_postfix(self.shown_values(loss), refresh=False)
        batches.update(trainer.batch_idx_in_epoch - batches.n)
        epochs.update(trainer.global_forward_batches - epochs.n)

    def on_train_end(self, trainer: TrainerView) -> None:
        bars, self._bars = self._bars, []
        for bar in reversed(bars):
            bar.close()
        super().on_train_end(trainer)

    def say(self, text: str) -> None:
        with self._tqdm.external_write_mode():
            super().say(text)


KINDS: dict[str, type[ProgressCallback]] = {"rich": RichCallback, "tqdm": TqdmCallback, "raw": RawTextCallback}


def choose_progress_callback(
    progress_bar: str | ProgressCallback | None, extra_show_keys: str | Sequence[str] | ExtraInfo | None = None
) -> ProgressCallback | None:
    """Return the callback for ``Trainer(progress_bar=...)``; ``"auto"`` is rich in a terminal or notebook, else raw.

    An unknown name shows no progress, as in fastNLP.
    """
    if progress_bar is None or isinstance(progress_bar, ProgressCallback):
        return progress_bar
    if progress_bar == "auto":
        interactive = in_notebook() or (sys.stdout is not None and sys.stdout.isatty() and find_spec("rich") is not None)
        progress_bar = "rich" if interactive else "raw"
    kind = KINDS.get(progress_bar)
    return None if kind is None else kind(extra_show_keys=extra_show_keys)


def with_progress_bar(callbacks: list[BaseCallback], kwargs: Mapping[str, Any]) -> list[BaseCallback]:
    """Return the callbacks, with the requested progress bar in front."""
    asked = kwargs.get("progress_bar", "auto")
    if asked is None:
        return callbacks
    if any(isinstance(callback, ProgressCallback) for callback in callbacks):
        if asked != "auto":
            logger.warning("a progress bar is in the list of callbacks, so progress_bar=%r is ignored", asked)
        return callbacks
    bar = choose_progress_callback(asked, extra_show_keys=kwargs.get("extra_show_keys"))
    return callbacks if bar is None else [bar, *callbacks]


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value
