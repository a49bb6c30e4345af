"""Inputs of the image: the wheels' lists have all that pyproject.toml asks for, in versions that it allows."""

from __future__ import annotations

import re
import subprocess
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


def extras() -> dict[str, list[Requirement]]:
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    found = re.findall(r"^(\w+) = \[(.*?)\]$", section, re.MULTILINE | re.DOTALL)
    return {name: [Requirement(word) for word in re.findall(r'"([^"]+)"', words)] for name, words in found}


@pytest.mark.parametrize(
    ("extra", "lists"), [("front", ("runtime", "front")), ("workers", ("runtime", "front", "demo"))]
)
def test_every_package_of_an_extra_is_in_its_image(extra: str, lists: tuple[str, ...]) -> None:
    have = {name: version for each in lists for name, version in pins(each).items()}
    assert len(extras()[extra]) >= 3
    for requirement in extras()[extra]:
        assert requirement.specifier.contains(have[requirement.name]), requirement
    assert sum(len(pins(each)) for each in lists) == len(have), "a package is in two lists"


def test_no_host_of_packages_is_written_down() -> None:
    """Debian's packages come from where this system has them, Python's from where pip has them."""
    for path in (ROOT / "Dockerfile", *(path for path in IMAGE.iterdir() if path.is_file())):
        assert not re.search(r"https?://(?!127\.0\.0\.1)", path.read_text()), path


@pytest.mark.parametrize("path", ["Dockerfile", "deploy/image/vllm.Dockerfile"])
def test_nothing_is_resolved_in_the_build(path: str) -> None:
    """Each pip command reads no index, and no stage takes a package that nobody has fetched."""
    text = re.sub(r"\\\n", " ", (ROOT / path).read_text())
    commands = [word for line in text.splitlines() if line.startswith("RUN") for word in re.split(r";|&&|\|\|", line)]
    pips = [word for word in commands if re.search(r'(\bpip|"\$runner") (install|wheel)\b', word)]
    assert len(pips) >= 3
    wrapped = "--no-index --no-deps" in text and 'pip() { python3 "$runner" "$@" --no-index --no-deps; }' in text
    assert [word for word in pips if not wrapped and "--no-index" not in word] == []


def test_the_image_of_vllm_says_what_is_missing() -> None:
    done = subprocess.run(
        ["bash", IMAGE / "build.sh", "vllm"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 2
    assert "BASE must name an image with vLLM in it" in done.stderr
    done = subprocess.run(
        ["bash", IMAGE / "fetch.sh", "other"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert "there is no image other" in done.stderr
