"""The callbacks of Cadenza: one per file."""

from typing import TYPE_CHECKING

from cadenza.lazy import contents

if TYPE_CHECKING:
    from cadenza.callbacks.best_weights import BestWeights as BestWeights
    from cadenza.callbacks.checkpoint import Checkpoint as Checkpoint
    from cadenza.callbacks.clip_gradients import ClipGradients as ClipGradients
    from cadenza.callbacks.confusion_matrix import ConfusionMatrix as ConfusionMatrix
    from cadenza.callbacks.derive import Derive as Derive
    from cadenza.callbacks.device_stats import DeviceStats as DeviceStats
    from cadenza.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from cadenza.callbacks.ema import Ema as Ema
    from cadenza.callbacks.evaluate import Evaluate as Evaluate
    from cadenza.callbacks.freezing import Freeze as Freeze
    from cadenza.callbacks.freezing import freeze as freeze
    from cadenza.callbacks.freezing import unfreeze as unfreeze
    from cadenza.callbacks.histograms import Histograms as Histograms
    from cadenza.callbacks.learning_rate import LearningRate as LearningRate
    from cadenza.callbacks.limit import Limit as Limit
    from cadenza.callbacks.log_training import LogTraining as LogTraining
    from cadenza.callbacks.move_modules import MoveModules as MoveModules
    from cadenza.callbacks.omit_frozen import OmitFrozen as OmitFrozen
    from cadenza.callbacks.profile import Profile as Profile
    from cadenza.callbacks.sample_images import SampleImages as SampleImages
    from cadenza.callbacks.schedule_value import ScheduleValue as ScheduleValue
    from cadenza.callbacks.sequence_length import SequenceLength as SequenceLength
    from cadenza.callbacks.stop_on_non_finite import StopOnNonFinite as StopOnNonFinite
    from cadenza.callbacks.summary import Summary as Summary
    from cadenza.callbacks.swa import Swa as Swa
    from cadenza.callbacks.sync_batch_norm import ConvertSyncBatchNorm as ConvertSyncBatchNorm
    from cadenza.callbacks.time_limit import TimeLimit as TimeLimit
    from cadenza.callbacks.timer import Timer as Timer
    from cadenza.callbacks.warmup import Warmup as Warmup
    from cadenza.checkpoint.keep_rules import Best as Best
    from cadenza.parallel.slurm_requeue import SlurmRequeue as SlurmRequeue
    from cadenza.timetravel.capsule import Capsule as Capsule
    from cadenza.timetravel.finders import FindBatchSize as FindBatchSize
    from cadenza.timetravel.finders import FindLearningRate as FindLearningRate
    from cadenza.timetravel.fingerprint import Fingerprint as Fingerprint
    from cadenza.timetravel.loss_signs import NonFinite as NonFinite
    from cadenza.timetravel.loss_signs import Spike as Spike
    from cadenza.timetravel.recover import LowerRate as LowerRate
    from cadenza.timetravel.recover import Recover as Recover
    from cadenza.timetravel.replay_check import ReplayCheck as ReplayCheck
    from cadenza.trackers.alert import Alert as Alert
    from cadenza.trackers.alert_targets import AlertMessage as AlertMessage
    from cadenza.trackers.optuna_pruning import OptunaPruning as OptunaPruning
    from cadenza.trackers.save_predictions import SavePredictions as SavePredictions

    __all__: list[str]
else:
    __all__, __getattr__, __dir__ = contents(__name__)
