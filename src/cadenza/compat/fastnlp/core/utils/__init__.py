"""``fastNLP.core.utils``."""
