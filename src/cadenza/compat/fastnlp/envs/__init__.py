"""``fastNLP.envs``: names of files."""

from cadenza.compat.absent import advise

advise(__name__)

FASTNLP_MODEL_FILENAME = "fastnlp_model.pkl.tar"
"""The file of a model in a folder."""

FASTNLP_CHECKPOINT_FILENAME = "fastnlp_checkpoint.pkl.tar"
"""The file of the trainer's state."""
