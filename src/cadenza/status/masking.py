"""Mask tokens and passwords in the files of a run and in views of them. The values in memory do not change."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

MASK = "***"
_ENDINGS = ["token", "apikey", "secret", "password", "passwd", "credential", "credentials"]
_KEYS = ("api-key", "access-key", "secret-key")
_PART = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z0-9]+")
_KEY = re.compile(r"\b(?:hf_|sk-|gh[a-z]_|github_pat_)[A-Za-z0-9_-]{6,}|\bAKIA[0-9A-Z]{6,}")
_USER = re.compile(r"(?<=://)[^/@\s'\"]+(?=@)")
_HEADER = re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]{8,}")
_IS = r"""=|["']?\s*:\s*(?=["']?[^\s"',;)\]}]*[A-Za-z_])"""  # behind a colon a number is shown: it may be a result
_SET = re.compile(rf"""(?P<name>[\w.-]*[A-Za-z][\w.-]*)(?P<is>{_IS})(?![{{\[])(?P<value>"[^"]*"|'[^']*'|[^\s,;)\]}}]+)""")

_QUERY = re.compile(r"(?P<name>(?<=[?&])[\w.-]+)(?P<is>=)[^&\s'\"]+")
_OPTION = re.compile(
    rf"""(?P<name>(?<!\S)--?[\w.-]*(?:{"|".join(_ENDINGS)}|key))(?P<is>\s+)(?!-)(?:"[^"]*"|'[^']*'|[^\s'"]+)""", re.IGNORECASE
)


def is_secret(name: str) -> bool:
    """Return whether the value of a name, such as that of an option, must not be shown.

    >>> [is_secret(name) for name in ("--hf-token", "hub.token", "apiKey", "OPENAI_API_KEY", "--db_password")]
    [True, True, True, True, True]
    >>> [is_secret(name) for name in ("--max-tokens", "--tokenizer", "--num-key-value-heads", "--key-metric", "--seq-tokens")]
    [False, False, False, False, False]
    """
    parts = [part.lower() for part in _PART.findall(name)]
    return bool(parts) and (parts[-1] in _ENDINGS or "-".join(parts).endswith(_KEYS))


@lru_cache(256)  # a run writes the same texts several times
def masked_text(text: str) -> str:
    """Return a text without known keys, users of URLs, and values of secret names: behind ``=``, ``:``, or an option.

    >>> masked_text("train.py hub.token=abc s3://me:pass@bucket/a hf_AbCdEfGh lr=0.1")
    'train.py hub.token=*** s3://***@bucket/a *** lr=0.1'
    >>> masked_text("bash -c 'train.py --hf-token abc --max-tokens 5' https://host/a?token=abc&b=1")
    "bash -c 'train.py --hf-token *** --max-tokens 5' https://host/a?token=***&b=1"
    >>> masked_text('--cfg={"api_key": "abc", "lr": 0.1} Authorization: Bearer abcdefgh password:x1 secret: 0.5')
    '--cfg={"api_key": ***, "lr": 0.1} Authorization: Bearer *** password:*** secret: 0.5'
    """
    text = _HEADER.sub(rf"\1 {MASK}", _KEY.sub(MASK, _USER.sub(MASK, text)))
    for pattern in (_QUERY, _OPTION, _SET):
        text = pattern.sub(lambda found: f"{found['name']}{found['is']}{MASK}" if is_secret(found["name"]) else found[0], text)
    return text


def masked_command(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a command line without secrets: also those that follow their option.

    >>> masked_command(["train.py", "--hf-token", "abc", "--max-tokens", "4096", "--api-key=abc"])
    ['train.py', '--hf-token', '***', '--max-tokens', '4096', '--api-key=***']
    """
    shown, option = [], ""
    for argument in arguments:
        is_value = option.startswith("-") and "=" not in option and not argument.startswith("--")
        shown.append(MASK if is_value and is_secret(option) else masked_text(argument))
        option = argument
    return shown


def masked(value: Any) -> Any:
    """Return plain data without secrets: values of secret names in mappings, in command lines and in texts.

    >>> masked({"command": ["--token", "abc"], "arguments": {"hub_token": "abc", "tokens": 5}})
    {'command': ['--token', '***'], 'arguments': {'hub_token': '***', 'tokens': 5}}
    """
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, Mapping):
        return {
            key: MASK if isinstance(item, str) and item and isinstance(key, str) and is_secret(key) else masked(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return (
            masked_command(value)
            if value and all(isinstance(item, str) for item in value)
            else [masked(item) for item in value]
        )
    return value
