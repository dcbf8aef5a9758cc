"""Send an alert when a condition on the records begins to hold."""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cadenza.errors import MonitorError, nearest
from cadenza.hooks.dispatch import hooks_of
from cadenza.hooks.moments import Callback
from cadenza.hooks.schedule import Every
from cadenza.status.decisions import decide
from cadenza.trackers.alert_rules import Function, Rule, Silence, parse_rule
from cadenza.trackers.alert_targets import LEVELS, AlertMessage, AlertSender, Console, Level, Target, line_of, targets_of

if TYPE_CHECKING:
    from cadenza.records.record import Record
    from cadenza.run import Run

_FILE = "alerts.jsonl"
_logger = logging.getLogger("cadenza")


class Alert(Callback):
    """Send an alert when a condition on the records begins to hold: to the console, a phone, a webhook or the like.

    An alert is sent once, and again only after the condition has ceased to hold, and not within `pause`: those are held back,
    and the next message has their number. A run resumed from a checkpoint that repeats the same steps does not send it again,
    and the pause goes on. Each alert is a decision, ``"alerted"``, and a line of ``alerts.jsonl`` in the
    directory of the run. A target that fails is tried three times and reported; it never stops the run.

    The rule is a text or a function:

    - ``"train/loss > 10"``, also ``<``, ``>=``, ``<=``; ``"eval/acc < 0.5 for 3 records"``: in three records in a row.
    - ``"eval/loss rises 3 times"``, ``"eval/acc falls"``: from record to record, in a row.
    - ``"non-finite"``: any value is NaN or infinite; ``"train/loss non-finite"``: this one.
    - ``"no record for 10 min"``, ``"no eval/loss for 2 h"``: a thread watches the time, even while the training hangs.
    - A function of a `Record`, or of a `Record` and the `History`. It returns a string while its condition holds, otherwise
      None.

    Records without the name do not count. Rules are applied on the main process, to the means over all ranks.

    With multiple ranks: the main process applies the rule to the means over all ranks, and sends one alert; it does not
    communicate.

    Args:
        rule: The rule.
        to: One target, or a list of targets. ``"console"``: the screen and ``console.log``. ``"desktop"``: a notification.
            ``"mailto:me@example.org"``: an e-mail by the mail server of this machine; `Email` of ``cadenza.trackers`` by
            another one. `Ntfy` of ``cadenza.trackers``: a phone. A URL: a POST request with the `AlertMessage` as JSON, which
            has its text as ``"text"``. A list of strings inside of the list: a command, run without a shell, with the text as
            its input and ``CADENZA_ALERT_TEXT``, ``CADENZA_ALERT_STEP``, ... in the environment. A function of an
            `AlertMessage`. All targets except the console are called in a separate thread, with a timeout of 30 s.
        level: ``"info"``, ``"warning"`` or ``"error"``, for the targets.
        name: The name of the callback; None takes the name of the class.
        pause: How long no other alert of this callback is sent, such as ``"10 min"``; None sends all. Each one is
            a decision, also those that are held back.

    Raises:
        ScheduleError: The time in the rule or `pause` cannot be read.
        ValueError: The rule cannot be read, `level` is invalid, or there is no target.
        TypeError: `rule` or a target has a wrong type.
        MonitorError: In a run: an evaluation does not report the name.

    >>> from cadenza.testing import tiny_run
    >>> from cadenza.callbacks import LogTraining
    >>> sent = []
    >>> alert = Alert("train/loss > 2.5", to=[lambda message: sent.append((message.step, message.text))], pause=None)
    >>> run = tiny_run(callbacks=[LogTraining("1 step", throughput=False), alert], losses=[1.0, 3.0, 4.0, 2.0, 5.0])
    >>> sent
    [(2, 'train/loss is 3, > 2.5'), (5, 'train/loss is 5, > 2.5')]
    >>> print(run.why("alerted"))
    alerted by Alert at epoch 1, step 5, batch 5: train/loss is 5, > 2.5
    """

    on_fault: Literal["raise", "disable", "retry"] = "disable"

    def __init__(
        self,
        rule: str | Function,
        to: str | Callable[[AlertMessage], object] | Sequence[object] = "console",
        *,
        level: Level = "warning",
        name: str | None = None,
        pause: str | None = "5 min",
    ) -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be 'info', 'warning' or 'error'; got {level!r}.{nearest(str(level), LEVELS)}")
        self.rule: Rule = parse_rule(rule)
        self.to: list[Target] = targets_of(to)
        self.level: Level = level
        self.name: str | None = name
        self.pause: str | None = pause
        self._pause_s = 0.0 if pause is None else _seconds(pause)
        self._forget()

    def _forget(self) -> None:
        self.rule.reset()
        self._sender: AlertSender | None = None
        self._sent: set[tuple[str, int, str]] = set()
        self._last_sent = float("-inf")
        self._held = 0
        self._path: Path | None = None
        self._silent: deque[AlertMessage] = deque()
        self._last_s, self._last_step = time.monotonic(), 0
        self._is_silent = self._seen = self._advised = False

    def state_dict(self) -> dict[str, Any]:
        return {**self.rule.state_dict(), "held": self._held}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        self.rule.load_state_dict(state)
        self._held = state.get("held", 0)

    def on_setup(self, run: Run) -> None:
        self._forget()

    def on_fit_start(self, run: Run) -> None:
        if not run.is_main:
            return
        self._owner = hooks_of(run).name_of(self)
        if run.info.directory is not None:
            self._path = run.info.directory / _FILE
            self._sent, self._last_sent = _sent_before(self._path, self._owner)
        self._sender = AlertSender([target for target in self.to if not isinstance(target, Console)])
        self._last_s, self._last_step = time.monotonic(), run.progress.step
        run.at_end(partial(self._finish, run, self._sender))
        if isinstance(self.rule, Silence):
            self._sender.watch(partial(self._look_at_silence, run, self.rule, self._sender))

    def on_log(self, run: Run, record: Record) -> None:
        if self._sender is None:  # the run is ending
            return
        self._check_name(run, record)
        if self.rule.name is None or self.rule.name in record.values:
            self._last_s, self._last_step = time.monotonic(), record.step
            if self._is_silent:
                self._is_silent = False
                self._sender.wake()
        self._report_failures(run, self._sender)
        text = self.rule.look(record, run.history)
        if text is not None:
            self._send(run, self._sender, self._message(run, text, record.step))

    def _send(self, run: Run, sender: AlertSender, message: AlertMessage) -> None:
        self._decide(run, message)
        key = (message.alert, message.step, message.text)
        if key in self._sent:  # written before the resume, with the number of those held back until then
            self._held = 0
            return
        self._sent.add(key)
        self._pass_on(message, sender, run.print if message.level == "info" else run.warn)

    def _pass_on(self, message: AlertMessage, sender: AlertSender, show: Callable[[str], object]) -> None:
        """Show, write and send an alert, unless one was sent a moment ago: by the clock, since people read them."""
        if 0 <= message.time - self._last_sent < self._pause_s:
            self._held += 1
            return
        message = replace(message, held=self._held)
        self._last_sent = message.time
        self._held = 0
        self._keep(message)
        if any(isinstance(target, Console) for target in self.to):
            show(line_of(message))
        sender.send(message)

    def _message(self, run: Run, text: str, step: int) -> AlertMessage:
        info = run.info
        return AlertMessage(
            text,
            level=self.level,
            step=step,
            rule=str(self.rule),
            alert=self._owner,
            epoch=run.progress.epoch,
            time=round(time.time(), 3),
            run_id=info.id,
            run_name=info.name,
            directory=str(info.directory or ""),
        )

    def _decide(self, run: Run, message: AlertMessage) -> None:
        data = {"level": message.level, "rule": message.rule, "step": message.step}
        decide(run, "alerted", message.text, who=self._owner, data=data)

    def _keep(self, message: AlertMessage) -> None:
        """Write the alert to the directory. A resume does not truncate the file: it is the log of sent alerts."""
        if self._path is not None:
            # sending the alert matters more than writing this file
            with suppress(OSError), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(message.to_dict()) + "\n")

    def _look_at_silence(self, run: Run, rule: Silence, sender: AlertSender) -> float | None:
        """Send an alert if no record has arrived for too long. Called in the watcher thread, since the training may hang."""
        left = (rule.silence_s or 0.0) - (time.monotonic() - self._last_s)
        if left > 0:
            return left
        if not self._is_silent:
            self._is_silent = True
            message = self._message(run, rule.text(self._last_step), self._last_step)
            self._pass_on(message, sender, partial(_logger.warning, "%s"))
            self._silent.append(message)  # only the training thread may write decisions
        return None

    def _report_failures(self, run: Run, sender: AlertSender) -> None:
        while self._silent:
            self._decide(run, self._silent.popleft())
        while sender.failures:
            failure = sender.failures.popleft()
            decide(run, "not sent", failure, who=self._owner)
            run.warn(f"{self._owner}: {failure}")

    def _finish(self, run: Run, sender: AlertSender) -> None:
        self._sender = None
        sender.finish()
        self._report_failures(run, sender)
        if self.rule.name is not None and not self._seen and run.history.names:
            run.warn(
                f"{self._owner} watches {self.rule.name!r}, and no record had it.{nearest(self.rule.name, run.history.names)} "
                f"Logged were: {', '.join(sorted(run.history.names))}"
            )

    def _check_name(self, run: Run, record: Record) -> None:
        """Raise `MonitorError` if an evaluation does not report the watched name."""
        name = self.rule.name
        if self._seen or name is None or name in record.values:
            self._seen = True
            return
        group = f"{name.partition('/')[0]}/"
        alike = sorted(known for known in record.values if known.startswith(group))
        if alike and group[:-1] in run.evaluations:
            raise MonitorError(
                f"{self._owner} watches {name!r}, but the evaluation {group[:-1]!r} reported only {alike}."
                f"{nearest(name, alike)}"
            )
        if not self._advised and (meant := nearest(name, record.values, cutoff=0.8)):
            self._advised = True
            run.warn(f"{self._owner} watches {name!r}, and the record of step {record.step} does not have it.{meant}")


def _seconds(pause: str) -> float:
    length = Every(pause)
    if length.unit != "s":
        raise ValueError(f'pause must be a time such as "10 min", or None; got {pause!r}')
    return float(length.count)


def _sent_before(path: Path, owner: str) -> tuple[set[tuple[str, int, str]], float]:
    """Return the alerts sent by earlier processes of the run, and when one of a callback was sent last."""
    sent, last = set(), float("-inf")
    with suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with suppress(ValueError, LookupError, TypeError):  # a killed process may have left an incomplete last line
                row = json.loads(line)
                sent.add((str(row["alert"]), int(row["step"]), str(row["text"])))
                last = float(row["time"]) if row["alert"] == owner else last
    return sent, last
