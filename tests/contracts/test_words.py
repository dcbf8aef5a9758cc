"""Code, docs and messages use the terms of the field, not the private words that they replaced.

``python tests/contracts/test_words.py src/cadenza/hooks`` lists the hits below a path.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

ASKED = (
    r"(?<!says )(?<!say )(?<!shows )(?<!show )(?<!see )(?<!decides )(?<!knows )"  # before a question: "says what is missing"
)
OWNERS = ("a", "the", "its", "their", "own", "'s", "per", "each")  # before a noun: "its share", but "two runs share a folder"
BANNED = {  # in prose: a pattern, and the term to use
    r"nobody|somebody": "name the rank, the callback or the user",
    r"shall": "must, or the present tense",
    r"(?:is|are|was|were|be|been) told": "gets, receives, or: the message names",
    r"hears?|heard|unheard": "runs at, has a hook at, listens to",
    r"borders?": "step boundary",
    r"former(?:ly)?": "previous, restored, earlier",
    r"as it is": "unchanged, or: because it is",
    r"by itself": "automatically, or: alone",
    r"words?": "term, name, text; rank sync for an exchange between ranks",
    r"books?": "metric buffer",
    r"(?<!in )(?<!in-)(?<!in its )(?<!in their )(?<!first )(?<!takes )(?<!take )(?<!took )(?<!taking )"
    r"places?": "index, rank, path",
    "|".join(rf"(?<={before} )shares?" for before in OWNERS): "shard",
    r"shares? of": "loss scale, shard",
    r"(?<!users )(?<!people )whose": "with, of which; or a second sentence",
    rf"{ASKED}what (?:is|are|was|were)(?! wrong| expected|[^.]*\?)": "a noun: the rest, the values, the files",
}
PROSE = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): instead for pattern, instead in BANNED.items()}
QUICK = re.compile(r"body|shall|told|hear|border|former|itself|it\s+is|word|book|place|share|whose|what\s", re.IGNORECASE)
NAMES = {"nobody", "somebody", "shall", "hear", "hears", "heard", "unheard", "border", "borders"}
NAMES |= {"former", "word", "words", "book", "books", "whose"}
NOUNS = {"place", "places", "share", "shares"}  # allowed in in_place, and as a verb: share_data

ALLOWED: dict[str, tuple[set[str], str]] = {
    "examples/sst2.py": ({"word", "words"}, "a text classifier"),
    "docs/guides/from-fastnlp.md": ({"word", "words"}, "text data: the column names of its tutorials"),
    "src/cadenza/compat/fastnlp/": ({"word", "words", "former"}, "vocabularies of text data, and fastNLP's names"),
    "src/cadenza/compat/nemo": ({"share"}, "a name of NeMo: WeightShareTransform"),
    "src/cadenza/compat/neural/": ({"share"}, "a name of NeMo: WeightShareTransform"),
    "src/cadenza/report/": ({"border", "borders"}, "the property of CSS"),
    "src/cadenza/sinks/progress_renderers.py": ({"border"}, "the property of CSS"),
    "src/cadenza/status/formats.py": ({"words"}, "an argument of textwrap"),
    "src/cadenza/status/markup.py": ({"border"}, "the property of CSS"),
    "src/cadenza/text/hints.toml": ({"border"}, "a name of 0.1 that is answered with its new one"),
}

CODE = re.compile(r"``.+?``|`[^`\n]+`", re.DOTALL)
FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
GENERATED = re.compile(r"<!-- generated: [\w\s]+ -->.*?<!-- end -->", re.DOTALL)
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
PIECE = re.compile(r"\s+|\S+")
FIELD = re.compile(r"\{[^{}]*\}")  # of an f-string
TOKEN = re.compile(
    r"""(?P<prefix>[bfruBFRU]{0,2})(?:\"{3}.*?\"{3}|'{3}.*?'{3}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\#[^\n]*)|(?P<name>\b[^\W\d]\w*)""",
    re.DOTALL,
)
QUOTES = re.compile(r"^[bfruBFRU]*[\"']+|[\"']+$")


class Hit(NamedTuple):
    """A banned word in a file."""

    path: str
    line: int
    found: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.found!r}; write: {self.instead}"


def in_prose(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the offset of each banned word, the word, and the term to use; code in backticks does not count."""
    if not QUICK.search(text):
        return
    text = CODE.sub(lambda code: re.sub(r"[^\n]", "`", code[0]), text)
    plain, where = "", list[int]()
    for piece in PIECE.finditer(text):  # a phrase may continue in the next line
        shown = " " if piece[0].isspace() else piece[0]
        plain += shown
        where += range(piece.start(), piece.start() + len(shown))
    for pattern, instead in PROSE.items():
        for match in pattern.finditer(plain):
            yield where[match.start()], match[0], instead


@cache
def in_name(name: str) -> list[str]:
    """Return the banned parts of an identifier, which is split at underscores and capitals."""
    found = []
    parts = [part.lower() for part in PARTS.findall(name)]
    for at, part in enumerate(parts):
        before, after = parts[at - 1] if at else "", parts[at + 1] if at + 1 < len(parts) else ""
        verb = part == "share" and not before and after not in ("", "of")
        if part in NAMES or (part in NOUNS and before not in ("in", "takes", "take") and not verb):
            found.append(part)
    return found


def in_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, banned word and term for names, comments and strings; a string that is a name is read as one."""
    for token in TOKEN.finditer(source):
        line = partial(source.count, "\n", 0)
        inner = QUOTES.sub("", token[0])
        fields = FIELD.findall(token[0]) if "f" in (token["prefix"] or "").lower() else []
        for name in [inner] if inner.isidentifier() else fields:
            yield from ((line(token.start()) + 1, f"{part} in {name}", "another name") for part in in_name(name))
        if not inner.isidentifier():
            prose = FIELD.sub(lambda field: "`" * len(field[0]), token[0])
            yield from ((line(token.start() + at) + 1, found, instead) for at, found, instead in in_prose(prose))


def in_page(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the same for Markdown; Python blocks are read as Python, and generated parts are read in src."""
    text = GENERATED.sub(lambda part: "\n" * part[0].count("\n"), text)
    for fence in FENCE.finditer(text):
        first = text.count("\n", 0, fence.start("code"))
        if fence["kind"] == "python":
            yield from ((first + line, found, instead) for line, found, instead in in_python(fence["code"]))
    blank = FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text)
    yield from ((blank.count("\n", 0, at) + 1, found, instead) for at, found, instead in in_prose(blank))


@cache
def hits(path: Path) -> list[Hit]:
    """Return what is found in a file, without the words that it may use."""
    name, text = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    found = in_python(text) if path.suffix in (".py", ".toml") else in_page(text)
    allowed = set().union(*(words for start, (words, _) in ALLOWED.items() if name.startswith(start)))
    return [Hit(name, *one) for one in found if one[1].split()[0].lower() not in allowed]


def files(*folders: str) -> list[Path]:
    """Return the files of folders, or a file itself."""
    below = [ROOT / folder for folder in folders]
    suffixes = {".py", ".toml", ".md", ".js"}
    return sorted(
        {one for start in below for one in ([start] if start.is_file() else start.rglob("*")) if one.suffix in suffixes}
    )


def listed(found: Iterable[Hit]) -> str:
    return "\n".join(map(str, found))


@pytest.mark.parametrize("path", files("README.md", "CHANGELOG.md", "docs", "examples"), ids=lambda path: path.stem)
def test_a_page_uses_the_terms_of_the_field(path: Path) -> None:
    assert not hits(path), listed(hits(path))


def test_the_source_uses_the_terms_of_the_field() -> None:
    found = [hit for path in files("src") for hit in hits(path)]
    assert not found, listed(found)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Nobody is told at the border.", ["Nobody", "is told", "border"]),
        ("It changes in place, takes place, and stands in its place.", []),
        ("The place of a batch; each judges its share.", ["place", "share"]),
        ("Two runs share a folder; `place` and ``share`` are names.", []),
        ("Restore what was saved, and say what is wrong. What is it?", ["what was"]),
        ("A batch whose loss is NaN stays as it\n    is.", ["whose", "as it is"]),
    ],
)
def test_prose_is_matched_by_whole_phrases(text: str, found: list[str]) -> None:
    assert sorted(one for _, one, _ in in_prose(text)) == sorted(found)


def test_names_are_matched_by_their_parts() -> None:
    for name in ("put_in_place", "share_data", "TransformerBlock"):
        assert in_name(name) == []
    found = {"at_next_border": "border", "heardTwice": "heard", "place_of": "place", "Share": "share", "keyword_book": "book"}
    assert {name: in_name(name) for name in found} == {name: [part] for name, part in found.items()}


def test_comments_strings_and_names_are_read() -> None:
    source = 'border = 1  # nobody\nx = f"{share} {y}: by\\n"\n"""Of what\nis left."""\n"former"\n'
    assert [(line, one.split()[0]) for line, one, _ in in_python(source)] == [
        (1, "border"), (1, "nobody"), (2, "share"), (3, "what"), (5, "former"),
    ]  # fmt: skip


def test_the_changes_of_a_version_can_be_read_in_five_minutes() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(changes.split()) <= 1_500


def test_a_new_engineer_can_read_all_decisions() -> None:
    pages = files("docs/decisions")
    assert len(pages) <= 25, "put the decision on the page of its subject"
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 8_000


if __name__ == "__main__":
    sys.stdout.write(listed(hit for path in files(*(sys.argv[1:] or ["src"])) for hit in hits(path)) + "\n")
