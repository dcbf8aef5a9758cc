"""``fastNLP.core.utils.exceptions``."""

from __future__ import annotations


class EarlyStopException(BaseException):
    r"""Raise it in a hook to end the training. ``on_exception`` and ``on_train_end`` are called, and no error is raised.

    In a native trainer it becomes ``run.stop(msg)``.
    """

    def __init__(self, msg: str = "") -> None:
        super().__init__(msg)
        self.msg = msg
