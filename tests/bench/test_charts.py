"""The README's charts: those that are kept are what bench/charts.py makes, and say what the files say."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import charts

TEXT = "{http://www.w3.org/2000/svg}text"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("img")
    charts.write_charts(charts.RESULTS, folder)
    return folder


def words(path: Path) -> list[str]:
    return ["".join(text.itertext()).strip() for text in ElementTree.parse(path).iter(TEXT)]


@pytest.mark.parametrize("name", sorted(charts.CHARTS))
def test_the_kept_chart_is_current(name: str, made: Path) -> None:
    assert (charts.IMAGES / name).read_text() == (made / name).read_text(), f"docs/img/{name} is stale: make charts"


def test_bars_have_the_numbers_of_the_files(made: Path) -> None:
    shown = words(made / "bytes_ttft.svg")
    moved = re.findall(r"^│ (nixl|kvferry) +│ +([\d.]+) ", (charts.RESULTS / "vllm-compare.txt").read_text(), re.M)
    assert [value for _, value in moved] == ["252.1", "118.0", "118.0", "118.0"]
    first = re.findall(
        r"^│ (nixl|kvferry) +│ +\d+ │ [^│]*│ +([\d.]+) ", (charts.RESULTS / "gpu_compare.txt").read_text(), re.M
    )
    assert len(first) == 8
    drawn = [*charts.moved_megabytes(charts.RESULTS), *charts.first_token_milliseconds(charts.RESULTS)]
    assert [v for case in drawn for v in (case.nixl, case.kvferry)] == [float(value) for _, value in (*moved, *first)]
    for _, value in (*moved, *first):
        assert f"{float(value):.0f}" in shown


def test_lines_have_the_numbers_of_the_file() -> None:
    text = (charts.RESULTS / "trace_replay.txt").read_text().split("\n\n\n")[0]
    rates = charts.hit_rates(charts.RESULTS)
    for policy, percent in rates.percent.items():
        assert [f"{rate:.2f}" for rate in percent] == re.findall(rf" {policy} +(\d+\.\d\d) ", text)
    assert [f"{size:,}" for size in rates.blocks] == re.findall(r"^ *([\d,]+) +no end", text, re.M)


@pytest.mark.parametrize("name", sorted(charts.CHARTS))
def test_every_number_is_whole_and_both_backgrounds_will_do(name: str, made: Path) -> None:
    shown = words(made / name)
    assert len(shown) >= 15 and not [word for word in shown if re.fullmatch(r"[\d,]*\.\d+", word)]
    assert (made / name).stat().st_size < 30_000
    colours = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", (made / name).read_text()))
    assert len(colours) >= 2
    for colour in colours:
        assert min(contrast(colour, "#ffffff"), contrast(colour, "#0d1117")) >= 3, colour


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG: 3 is enough for large text and graphics."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def test_a_file_without_a_row_is_refused(tmp_path: Path) -> None:
    text = (charts.RESULTS / "vllm-compare.txt").read_text()
    (tmp_path / "vllm-compare.txt").write_text(text.replace("│ nixl ", "│ other", 1))
    with pytest.raises(ValueError, match=r"rows of .*must have"):
        charts.moved_megabytes(tmp_path)
