"""``fastNLP.envs``: names of files."""

FASTNLP_MODEL_FILENAME = "fastnlp_model.pkl.tar"
"""What a model is saved to, inside of a folder."""

FASTNLP_CHECKPOINT_FILENAME = "fastnlp_checkpoint.pkl.tar"
"""What a trainer's state is saved to, beside the model."""
