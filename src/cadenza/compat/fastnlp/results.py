"""The results of a native evaluation with fastNLP's names."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cadenza.loading.evaluation import Evaluation

DEFAULT = "eval"
"""The name of a native evaluation without a name of its own."""


class NamedResults(dict[str, Any]):
    """The results of an evaluation by fastNLP's names; a look-up by a native name finds them too.

    ``eval/acc/f1`` is ``f1#acc``, and ``dev/acc/f1`` is ``f1#acc#dev``.

    Args:
        evaluation: A native evaluation.
        names: The names of all evaluations of the run.
    """

    def __init__(self, evaluation: Evaluation, names: Collection[str] = ()) -> None:
        self._native, self._name = evaluation.results, evaluation.name
        self._others = set(names) - {evaluation.name}
        suffix = [] if self._name == DEFAULT else [self._name]
        super().__init__({"#".join([*_reversed_parts(one), *suffix]): value for one, value in self._native.items()})

    def __missing__(self, key: str) -> Any:
        return self._native[key]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self._native

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, self._native.get(key, default))

    def lacks(self, monitor: str) -> bool:
        """Return whether a monitored name belongs to another evaluation of the run, so that no result here can replace it."""
        if monitor in self:
            return False
        names = {*self._others, self._name}
        owner = next((one for one in names if monitor.startswith(f"{one}/") or monitor.endswith(f"#{one}")), DEFAULT)
        return owner in self._others


def _reversed_parts(name: str) -> list[str]:
    """Return the parts of a native name after that of the evaluation, the innermost first."""
    return name.split("/")[:0:-1]
