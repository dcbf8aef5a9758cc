"""Parts of the metrics of generated texts: their arguments, and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cadenza.status.reprs import signature_of

Tokenizer = Callable[[str], Sequence[str]]
Texts = str | Sequence[str]
References = str | Sequence[str] | Sequence[Sequence[str]]

_TOKENIZERS: dict[str, Tokenizer] = {"en": str.split, "cn": list, "zh": list}


def paired(predictions: Texts, references: References) -> list[tuple[str, Sequence[str]]]:
    """Return each prediction with its references.

    Raises:
        AssertionError: The numbers of predictions and of references differ.

    >>> paired("a cat", ["the cat", "one cat"])
    [('a cat', ['the cat', 'one cat'])]
    >>> paired(["a cat", "a dog"], ["the cat", "the dog"])
    [('a cat', ['the cat']), ('a dog', ['the dog'])]
    """
    texts = [predictions] if isinstance(predictions, str) else list(predictions)
    given: list[Sequence[str]]
    if isinstance(references, str):
        given = [[references]]
    elif all(isinstance(reference, str) for reference in references):
        plain = [str(reference) for reference in references]
        given = [plain] if len(texts) == 1 else [[text] for text in plain]
    else:
        given = [list(reference) for reference in references]
    if len(texts) != len(given):
        raise AssertionError(f"each prediction needs its references; got {len(texts)} predictions and {len(given)} references")
    return list(zip(texts, given, strict=True))


def checked_tokenizer(given: Tokenizer | str | None, name: str) -> Tokenizer | None:
    """Return a tokenizer; None if the first prediction must choose it.

    Raises:
        TypeError: The function does not take one argument.
        ValueError: There is no tokenizer of this name.
    """
    if isinstance(given, str):
        if given not in _TOKENIZERS:
            raise ValueError(f"{name} must be a function, one of {list(_TOKENIZERS)}, or None; got {given!r}")
        return _TOKENIZERS[given]
    if given is not None:
        signature_of(given).bind("text")
    return given


def tokenizer_for(text: str) -> Tokenizer:
    """Return the tokenizer for a text: characters if one of them is Chinese, otherwise the parts between spaces."""
    return _TOKENIZERS["cn" if any("\u4e00" <= character <= "\u9fa5" for character in text) else "en"]
