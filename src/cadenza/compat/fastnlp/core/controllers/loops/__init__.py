"""``fastNLP.core.controllers.loops``: the loops over the batches of a loader."""

from cadenza.compat.fastnlp.core.controllers.loops.evaluate_batch_loop import EvaluateBatchLoop
from cadenza.compat.fastnlp.core.controllers.loops.loop import Loop
from cadenza.compat.fastnlp.core.controllers.loops.train_batch_loop import TrainBatchLoop

__all__ = ["EvaluateBatchLoop", "Loop", "TrainBatchLoop"]
