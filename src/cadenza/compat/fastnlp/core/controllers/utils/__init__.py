"""``fastNLP.core.controllers.utils``."""

from cadenza.compat.fastnlp.core.controllers.utils.state import State, TrainerState

__all__ = ["State", "TrainerState"]
