"""Inputs of the image: the wheels' lists have all that pyproject.toml asks for, in versions that it allows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "deploy" / "image"


def pins(name: str) -> dict[str, str]:
    lines = (IMAGE / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def dependencies() -> list[Requirement]:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    return [Requirement(word) for word in re.findall(r'"([^"]+)"', listed[1])]


def test_every_dependency_is_in_the_image() -> None:
    have = pins("runtime")
    wanted = dependencies()
    assert len(wanted) >= 8
    for requirement in wanted:
        assert requirement.name in have, requirement
        assert requirement.specifier.contains(have[requirement.name]), requirement
    text = (ROOT / "pyproject.toml").read_text()
    for requirement in re.findall(r'^requires = \["([^"]+)", "([^"]+)"\]', text, re.MULTILINE)[0]:
        built = Requirement(requirement)
        assert built.specifier.contains(pins("build")[built.name])


@pytest.mark.parametrize(
    "line",
    [
        "ARG BASE=debian:bookworm-slim",
        "ARG VARIANT=cpu",
        "USER 65532:65532",
        'ENTRYPOINT ["kvferry"]',
        'HEALTHCHECK --interval=10s --timeout=5s --start-period=30s CMD ["kvferry", "health"]',
    ],
)
def test_what_the_image_promises(line: str) -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert line in lines
    last_user = [row for row in lines if row.startswith("USER")][-1]
    assert last_user == "USER 65532:65532"


def test_nothing_is_resolved_in_the_build() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "--no-index --no-deps" in text
    assert "pip install" not in re.sub(r"^ +pip install --target.*$", "", text, flags=re.MULTILINE).replace(
        "cuda) pip install --target /opt/kvferry", ""
    )
