"""``fastNLP.envs.env``: the names of environment variables, and of the files in a folder of a checkpoint."""

from __future__ import annotations

FASTNLP_GLOBAL_RANK = "FASTNLP_GLOBAL_RANK"
"""The rank of this process among all, from 0; set if there are several."""

FASTNLP_LAUNCH_TIME = "FASTNLP_LAUNCH_TIME"
"""The start time of this process and its child processes, such as ``2026-11-21-09_30_00_123456``."""

FASTNLP_LOG_LEVEL = "FASTNLP_LOG_LEVEL"
"""The level of fastNLP's logger: the name of one, or ``AUTO``, which is INFO on the main process and WARNING on the others."""

FASTNLP_GLOBAL_SEED = "FASTNLP_GLOBAL_SEED"
"""The seed of all processes."""

FASTNLP_BACKEND = "FASTNLP_BACKEND"
"""The framework. Cadenza trains with torch."""

FASTNLP_BACKEND_LAUNCH = "FASTNLP_BACKEND_LAUNCH"
"""``1`` if a launcher such as torchrun started this process."""

FASTNLP_DISTRIBUTED_CHECK = "FASTNLP_DISTRIBUTED_CHECK"
"""Set by fastNLP in the processes that it starts itself."""

FASTNLP_REMOVE_LOCAL_RANK = "FASTNLP_REMOVE_LOCAL_RANK"
"""Read by fastNLP for old launchers."""

FASTNLP_NO_SYNC = "FASTNLP_NO_SYNC"
"""The level of `fastnlp_no_sync_context`."""

USER_CUDA_VISIBLE_DEVICES = "USER_CUDA_VISIBLE_DEVICES"
"""Read by fastNLP for paddle."""

FASTNLP_MODEL_FILENAME = "fastnlp_model.pkl.tar"
"""The file of a model in a folder."""

FASTNLP_CHECKPOINT_FILENAME = "fastnlp_checkpoint.pkl.tar"
"""The file of the trainer's state."""

FASTNLP_EVALUATE_RESULT_FILENAME = "fastnlp_evaluate_results.json"
"""The file of the results of an evaluation."""
