"""``fastNLP.io``: several data sets with their vocabularies."""

from cadenza.compat.absent import advise
from cadenza.compat.fastnlp.io.data_bundle import DataBundle

__all__ = ["DataBundle"]

advise(__name__)
