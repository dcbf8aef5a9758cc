"""Two loops in one process that take turns: one in this thread, one in a second thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class Turns:
    """Lets two loops run in turn, never at the same time, and gives each its own CPU time.

    A turn ends at a forward pass, in the middle of a step, which is the same place for every framework. The hand-written loop
    runs in a second thread, so its CPU time is that of the thread. All other CPU time of the process is that of the framework
    in this thread, with the threads that it starts.
    """

    def __init__(self) -> None:
        self._here, self._hand = threading.Lock(), threading.Lock()
        self._here.acquire()
        self._hand.acquire()
        self._alone = False
        self._hand_s = 0.0

    def here_s(self) -> float:
        """Return the CPU seconds of the loop in this thread; to be called in its turns."""
        return time.process_time() - self._hand_s

    def pass_from_here(self) -> None:
        """End a turn of the loop in this thread, and wait for the next one."""
        if not self._alone:
            self._hand.release()
            self._here.acquire()

    def pass_from_hand(self) -> None:
        """End a turn of the loop by hand, and wait for the next one."""
        if not self._alone:
            self._hand_s = time.thread_time()
            self._here.release()
            self._hand.acquire()

    def run(self, here: Callable[[], Any], hand: Callable[[], Any]) -> tuple[Any, Any]:
        """Return the results of both; raise the error of either. The loop by hand has the first turn."""
        results: dict[str, Any] = {}

        def other() -> None:
            self._hand.acquire()
            try:
                results["hand"] = hand()
            except BaseException as error:
                results["error"] = error
            finally:
                self._hand_s, self._alone = time.thread_time(), True
                self._here.release()

        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        self._hand.release()
        self._here.acquire()
        try:
            if "error" not in results:
                results["here"] = here()
        finally:
            self._alone = True
            if thread.is_alive():
                self._hand.release()
                thread.join()
        if "error" in results:
            raise results["error"]
        return results["here"], results["hand"]
