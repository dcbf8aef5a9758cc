"""``fastNLP.core``."""

from cadenza.compat.fastnlp.core.callbacks import (
    Callback,
    CallbackManager,
    CheckpointCallback,
    EarlyStopCallback,
    Event,
    ExecuteOnceBetterMonitor,
    ExtraInfoStatistics,
    Filter,
    FitlogCallback,
    HasMonitorCallback,
    LoadBestModelCallback,
    LRSchedCallback,
    MoreEvaluateCallback,
    ProgressCallback,
    RawTextCallback,
    ResultsMonitor,
    RichCallback,
    TimerCallback,
    TopkSaver,
    TorchGradClipCallback,
    TorchWarmupCallback,
    TqdmCallback,
    choose_progress_callback,
)
from cadenza.compat.fastnlp.core.collators import (
    Batch,
    Collator,
    NullPadder,
    NumpyNumberPadder,
    NumpySequencePadder,
    NumpyTensorPadder,
    Padder,
    RawNumberPadder,
    RawSequencePadder,
    RawTensorPadder,
    TorchNumberPadder,
    TorchSequencePadder,
    TorchTensorPadder,
    get_padded_numpy_array,
)
from cadenza.compat.fastnlp.core.controllers import (
    EvaluateBatchLoop,
    Evaluator,
    Loop,
    State,
    TrainBatchLoop,
    Trainer,
    TrainerState,
)
from cadenza.compat.fastnlp.core.dataloaders import TorchDataLoader, prepare_dataloader, prepare_torch_dataloader
from cadenza.compat.fastnlp.core.dataset import ApplyResultException, DataSet, FieldArray, Instance
from cadenza.compat.fastnlp.core.drivers import Driver as Driver
from cadenza.compat.fastnlp.core.drivers import TorchDDPDriver, TorchSingleDriver, torch_seed_everything
from cadenza.compat.fastnlp.core.drivers import TorchDriver as TorchDriver
from cadenza.compat.fastnlp.core.drivers import TorchFSDPDriver as TorchFSDPDriver
from cadenza.compat.fastnlp.core.drivers import optimizer_state_to_device as optimizer_state_to_device
from cadenza.compat.fastnlp.core.log import logger, print
from cadenza.compat.fastnlp.core.metrics import (
    BLEU,
    ROUGE,
    Accuracy,
    ClassifyFPreRecMetric,
    Element,
    Metric,
    Perplexity,
    SpanFPreRecMetric,
    TransformersAccuracy,
)
from cadenza.compat.fastnlp.core.samplers import (
    BucketedBatchSampler,
    RandomBatchSampler,
    RandomSampler,
    ReproduceBatchSampler,
    ReproducibleBatchSampler,
    ReproducibleSampler,
    SequentialSampler,
    SortedSampler,
    UnrepeatedRandomSampler,
    UnrepeatedSampler,
    UnrepeatedSequentialSampler,
    UnrepeatedSortedSampler,
)
from cadenza.compat.fastnlp.core.utils import (
    Option as Option,
)
from cadenza.compat.fastnlp.core.utils import (
    apply_to_collection as apply_to_collection,
)
from cadenza.compat.fastnlp.core.utils import (
    auto_param_call,
    cache_results,
    f_rich_progress,
    f_tqdm_progress,
    seq_len_to_mask,
    torch_move_data_to_device,
)
from cadenza.compat.fastnlp.core.utils import (
    check_user_specific_params as check_user_specific_params,
)
from cadenza.compat.fastnlp.core.utils import (
    dataclass_to_dict as dataclass_to_dict,
)
from cadenza.compat.fastnlp.core.utils import (
    flat_nest_dict as flat_nest_dict,
)
from cadenza.compat.fastnlp.core.utils import (
    get_fn_arg_names as get_fn_arg_names,
)
from cadenza.compat.fastnlp.core.utils import (
    is_torch_module as is_torch_module,
)
from cadenza.compat.fastnlp.core.utils import (
    match_and_substitute_params as match_and_substitute_params,
)
from cadenza.compat.fastnlp.core.utils import (
    nullcontext as nullcontext,
)
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.core.vocabulary import Vocabulary

__all__ = [
    "BLEU",
    "ROUGE",
    "Accuracy",
    "ApplyResultException",
    "Batch",
    "BucketedBatchSampler",
    "Callback",
    "CallbackManager",
    "CheckpointCallback",
    "ClassifyFPreRecMetric",
    "Collator",
    "DataSet",
    "EarlyStopCallback",
    "EarlyStopException",
    "Element",
    "EvaluateBatchLoop",
    "Evaluator",
    "Event",
    "ExecuteOnceBetterMonitor",
    "ExtraInfoStatistics",
    "FieldArray",
    "Filter",
    "FitlogCallback",
    "HasMonitorCallback",
    "Instance",
    "LRSchedCallback",
    "LoadBestModelCallback",
    "Loop",
    "Metric",
    "MoreEvaluateCallback",
    "NullPadder",
    "NumpyNumberPadder",
    "NumpySequencePadder",
    "NumpyTensorPadder",
    "Padder",
    "Perplexity",
    "ProgressCallback",
    "RandomBatchSampler",
    "RandomSampler",
    "RawNumberPadder",
    "RawSequencePadder",
    "RawTensorPadder",
    "RawTextCallback",
    "ReproduceBatchSampler",
    "ReproducibleBatchSampler",
    "ReproducibleSampler",
    "ResultsMonitor",
    "RichCallback",
    "SequentialSampler",
    "SortedSampler",
    "SpanFPreRecMetric",
    "State",
    "TimerCallback",
    "TopkSaver",
    "TorchDDPDriver",
    "TorchDataLoader",
    "TorchGradClipCallback",
    "TorchNumberPadder",
    "TorchSequencePadder",
    "TorchSingleDriver",
    "TorchTensorPadder",
    "TorchWarmupCallback",
    "TqdmCallback",
    "TrainBatchLoop",
    "Trainer",
    "TrainerState",
    "TransformersAccuracy",
    "UnrepeatedRandomSampler",
    "UnrepeatedSampler",
    "UnrepeatedSequentialSampler",
    "UnrepeatedSortedSampler",
    "Vocabulary",
    "auto_param_call",
    "cache_results",
    "choose_progress_callback",
    "f_rich_progress",
    "f_tqdm_progress",
    "get_padded_numpy_array",
    "logger",
    "prepare_dataloader",
    "prepare_torch_dataloader",
    "print",
    "seq_len_to_mask",
    "torch_move_data_to_device",
    "torch_seed_everything",
]
