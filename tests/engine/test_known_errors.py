"""The likely cures of frequent errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cadenza.engine.known_errors import Scene, cure_of

TOKENS, LABELS = torch.full((2, 3), 59), torch.tensor([1, 9])


@pytest.mark.parametrize(
    ("batch", "told"),
    [
        ({"input_ids": TOKENS, "labels": LABELS}, "; those in the batch range from 1 to 9. "),
        ((torch.ones(2), LABELS), "; those in the batch range from 1 to 9. "),
        ({"ids": TOKENS, "classes": LABELS}, "dimension 1 of the predictions. "),
        ((TOKENS, LABELS), "dimension 1 of the predictions. "),
    ],
)
def test_the_range_of_labels_is_not_that_of_the_tokens_beside_them(batch: Any, told: str) -> None:
    cure = cure_of(IndexError("Target 9 is out of bounds."), Scene(torch.device("cpu"), batch=batch))
    assert cure is not None
    assert told in cure
