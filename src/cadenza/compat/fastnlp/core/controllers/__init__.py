"""``fastNLP.core.controllers``."""

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.core.controllers.evaluator import Evaluator
from cadenza.compat.fastnlp.core.controllers.trainer import Trainer
from cadenza.compat.fastnlp.core.controllers.utils.state import State, TrainerState

__all__ = ["Evaluator", "State", "Trainer", "TrainerState"]

advise(__name__)
