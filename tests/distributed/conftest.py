"""Ranks that stand end with the file that started them."""

from tests.distributed.standing import standing_ranks as standing_ranks
