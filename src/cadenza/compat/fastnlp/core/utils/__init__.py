"""``fastNLP.core.utils``."""

from cadenza.compat.fastnlp.core.utils.cache_results import cache_results
from cadenza.compat.fastnlp.core.utils.exceptions import EarlyStopException
from cadenza.compat.fastnlp.core.utils.rich_progress import f_rich_progress
from cadenza.compat.fastnlp.core.utils.seq_len_to_mask import seq_len_to_mask
from cadenza.compat.fastnlp.core.utils.torch_utils import is_torch_module, torch_move_data_to_device
from cadenza.compat.fastnlp.core.utils.tqdm_progress import f_tqdm_progress
from cadenza.compat.fastnlp.core.utils.utils import (
    Option,
    apply_to_collection,
    auto_param_call,
    check_user_specific_params,
    dataclass_to_dict,
    flat_nest_dict,
    get_fn_arg_names,
    match_and_substitute_params,
    nullcontext,
)

__all__ = [
    "EarlyStopException",
    "Option",
    "apply_to_collection",
    "auto_param_call",
    "cache_results",
    "check_user_specific_params",
    "dataclass_to_dict",
    "f_rich_progress",
    "f_tqdm_progress",
    "flat_nest_dict",
    "get_fn_arg_names",
    "is_torch_module",
    "match_and_substitute_params",
    "nullcontext",
    "seq_len_to_mask",
    "torch_move_data_to_device",
]
