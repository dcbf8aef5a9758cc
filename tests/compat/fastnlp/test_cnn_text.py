"""The text classifier of fastNLP's tutorials."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from cadenza.compat.fastnlp.models.torch import CNNText

WORDS = torch.tensor([[2, 3, 4, 5], [6, 7, 0, 0]])


def model(**options: object) -> CNNText:
    torch.manual_seed(0)
    return CNNText((10, 6), 3, **options)  # type: ignore[arg-type]  # any


def test_the_model_returns_scores_a_loss_and_classes() -> None:
    cnn, lengths, target = model(dropout=0.0), torch.tensor([4, 2]), torch.tensor([0, 2])
    scores = cnn(WORDS, lengths)["pred"]
    assert scores.shape == (2, 3)
    assert torch.equal(cnn.train_step(WORDS, target, lengths)["loss"], functional.cross_entropy(scores, target))
    assert torch.equal(cnn.evaluate_step(WORDS, lengths)["pred"], scores.argmax(-1))


def test_each_convolution_keeps_the_length_and_has_its_width_and_no_bias() -> None:
    convs = [conv for conv in model().modules() if isinstance(conv, nn.Conv1d)]
    assert [(conv.out_channels, conv.kernel_size, conv.padding, conv.bias) for conv in convs] == [
        (30, (1,), (0,), None),
        (40, (3,), (1,), None),
        (50, (5,), (2,), None),
    ]
    assert model().fc.in_features == 120


def test_the_initial_embedding_is_within_the_root_of_3_over_its_dimensions() -> None:
    weight = model().embed.weight
    assert weight.shape == (10, 6)
    assert 0.6 < weight.abs().max() <= 0.5**0.5


def test_padding_has_no_effect_if_the_length_is_known() -> None:
    cnn = model(kernel_sizes=(1,), kernel_nums=(8,)).eval()
    short, lengths = cnn(WORDS[1:, :2], torch.tensor([2]))["pred"], torch.tensor([4, 2])
    torch.testing.assert_close(cnn(WORDS, lengths)["pred"][1:], short)
    assert not torch.allclose(cnn(WORDS)["pred"][1:], short)


def test_an_embedding_or_its_weights_can_be_given() -> None:
    given = nn.Embedding(10, 6)
    assert CNNText(given, 2).embed is given
    made = CNNText(given.weight.detach().clone(), 2).embed
    assert torch.equal(made.weight, given.weight)
    assert made.weight.requires_grad


def test_even_widths_and_missing_channels_are_errors() -> None:
    with pytest.raises(ValueError, match=r"must be odd.*got \[2\]"):
        model(kernel_sizes=(1, 2, 3))
    with pytest.raises(ValueError, match=r"for each of \[1, 3, 5\]; got \[4\]"):
        model(kernel_nums=(4,))
