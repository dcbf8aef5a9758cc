"""``fastNLP.core.controllers``."""

from cadenza.compat.fastnlp.core.controllers.evaluator import Evaluator
from cadenza.compat.fastnlp.core.controllers.loops import EvaluateBatchLoop, Loop, TrainBatchLoop
from cadenza.compat.fastnlp.core.controllers.trainer import Trainer
from cadenza.compat.fastnlp.core.controllers.utils.state import State, TrainerState

__all__ = ["EvaluateBatchLoop", "Evaluator", "Loop", "State", "TrainBatchLoop", "Trainer", "TrainerState"]
