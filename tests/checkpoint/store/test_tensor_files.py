"""Safetensors files that are written and read in one pass: the bytes are those of the safetensors package."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from cadenza.checkpoint.store.files import LocalFiles
from cadenza.checkpoint.store.tensor_files import _DTYPES, facts_of, pieces, read_tensors


def every_format() -> dict[str, Tensor]:
    """Return tensors of each number format, of no, one and several dimensions, and empty ones."""
    numbers = torch.arange(24)
    filled = {f"a.{dtype}": numbers.to(dtype).reshape(2, 3, 4) for dtype in _DTYPES.values()}
    return {**filled, "scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "ümläut": torch.ones(1, dtype=torch.bool)}


def bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("header", [None, {"format": "pt", "text": '{"a": [1]}'}])
def test_the_bytes_are_those_of_the_package(header: dict[str, str] | None) -> None:
    tensors = every_format()
    written = b"".join(pieces(tensors, header))
    found = load(written)
    assert found.keys() == tensors.keys()
    assert all(bits(one).equal(bits(tensors[name])) and one.dtype == tensors[name].dtype for name, one in found.items())
    if header is None:
        assert b"".join(pieces({"w": torch.arange(3.0)})) == save({"w": torch.arange(3.0)})
    assert b"".join(pieces({})) == save({})


def test_what_is_read_has_the_same_bits_its_own_aligned_memory_and_the_checksum_of_the_file() -> None:
    for content in (b"".join(pieces(every_format(), {"a": "b"})), save(every_format())):
        found, facts = read_tensors(BytesIO(content), len(content))
        assert isinstance(found, dict)
        for name, one in every_format().items():
            assert (found[name].dtype, found[name].shape) == (one.dtype, one.shape)
            assert bits(found[name]).equal(bits(one))
            assert found[name].data_ptr() % 64 == 0
        assert facts == facts_of(content)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]},
        {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        [],
        None,
    ],
)
def test_a_header_cannot_ask_for_any_amount_of_memory(entry: Any) -> None:
    import json

    text = json.dumps({"w": entry}).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    found, _ = read_tensors(BytesIO(content), len(content))
    assert isinstance(found, ValueError)


def test_a_format_that_the_file_cannot_hold_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the tensor 'w' has the number format torch\.complex128"):
        LocalFiles(tmp_path).write_tensors("one", {"w": torch.ones(1, dtype=torch.complex128)})


@pytest.mark.parametrize("linked", [True, False])
def test_a_file_that_joins_is_linked_or_copied_and_its_checksum_is_that_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    source, files = tmp_path / "config.json", LocalFiles(tmp_path / "there")
    source.write_bytes(b"text" * 700_000)
    files.make("step")

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    if not linked:
        monkeypatch.setattr("os.link", refuse)
    assert files.add("step/a/config.json", source) == facts_of(source.read_bytes()) == files.checksum("step/a/config.json")
    assert (source.stat().st_nlink == 2) is linked
