"""The colours of the runs differ, also for people who are colour-blind, and can be read on the paper, light and dark."""

from __future__ import annotations

import re
from itertools import combinations
from math import dist
from pathlib import Path

import pytest

from cadenza import report

STYLE = (Path(report.__file__).parent / "style" / "colours.css").read_text(encoding="utf-8")
Linear = tuple[float, ...]
Matrix = tuple[tuple[float, ...], ...]

# Machado, Oliveira and Fernandes, 2009: how linear RGB looks without one of the three kinds of cones.
SIGHTS: dict[str, Matrix] = {
    "full": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}
CONES: Matrix = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
OKLAB: Matrix = (
    (0.2104542553, 0.793617785, -0.0040720468),
    (1.9779984951, -2.428592205, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.808675766),
)


def times(matrix: Matrix, vector: Linear) -> Linear:
    return tuple(sum(one * other for one, other in zip(row, vector, strict=True)) for row in matrix)


def linear(colour: str) -> Linear:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return tuple(part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)


def oklab(colour: Linear) -> Linear:
    inside = tuple(min(1.0, max(0.0, part)) for part in colour)
    return times(OKLAB, tuple(part ** (1 / 3) for part in times(CONES, inside)))


def colours(scheme: str, name: str) -> list[Linear]:
    found = re.findall(rf"--{name}: light-dark\((#\w{{6}}), (#\w{{6}})\)", STYLE)
    return [linear(pair[scheme == "dark"]) for pair in found]


@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_of_runs_are_apart(scheme: str, sight: str) -> None:
    seen = [oklab(times(SIGHTS[sight], colour)) for colour in colours(scheme, r"c\d")]
    assert len(seen) == 8
    apart = {pair: 100 * dist(seen[pair[0]], seen[pair[1]]) for pair in combinations(range(8), 2)}
    assert min(apart.values()) > (9 if sight == "full" else 3), sorted(apart.items(), key=lambda one: one[1])[:3]
    assert min(apart[pair] for pair in combinations(range(4), 2)) > (15 if sight == "full" else 9)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colours_of_runs_can_be_read_as_text(scheme: str) -> None:
    weights = (0.2126, 0.7152, 0.0722)
    ((paper,),) = [times((weights,), one) for one in colours(scheme, "paper")]
    for (ink,) in (times((weights,), one) for one in colours(scheme, r"c\d")):
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5
