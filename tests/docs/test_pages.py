"""What the pages name is there: files and folders, functions behind a file's name, the places that links lead to."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")), ROOT / "bench/results/README.md"]
FOLDERS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
MADE = ("build", "dist", "wheels", "shared")  # not the repository's: made, or a developer's own
OURS = tuple(f"{folder}/" for folder in FOLDERS if folder not in MADE)
PACKAGES = ("client", "connectors", "daemon", "front", "loadgen", "package", "radix", "transfer", "workers")
OTHERS = ("vllm/",)  # the beginning of paths in other projects
SOURCES = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".sh", ".proto", ".txt", ".md")

# A path from the repository's root, wherever it stands: in a sentence, a table, a command or a picture.
PATH = re.compile(rf"(?<![\w./~-])(?:{'|'.join(map(re.escape, OURS))})[\w./*{{}},-]*")
CODE = re.compile(r"`([^`\n]+)`")
PLACE = re.compile(
    r"^([\w/.-]+\.(?:py|cpp|h|cu|cuh)):+([A-Za-z_][\w.]*)$"
)  # file:function, file:Class.method, file::test
MODULE = re.compile(r"\bkvferry\.(" + "|".join(PACKAGES) + r")((?:\.\w+)*)")  # and perhaps a name in it
METHOD = re.compile(r"^[A-Z]\w*[a-z]\w*\.[a-z_]\w*$")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


def where(page: Path) -> str:
    return str(page.relative_to(ROOT))


@cache
def names() -> Counter[str]:
    """Of all files that are ours, and how many have each."""
    return Counter(path.name for folder in OURS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES)


@cache
def methods() -> frozenset[str]:
    """Of all Python packages, also as Class.method."""
    return frozenset(name for folder in PACKAGES for path in (ROOT / folder).rglob("*.py") for name in defined(path))


def is_there(path: str) -> bool:
    """`path` may have stars, and a pair of braces with alternatives."""
    if found := re.search(r"\{([^{}]*)\}", path):
        return all(is_there(path[: found.start()] + one + path[found.end() :]) for one in found[1].split(","))
    return any(ROOT.glob(path.rstrip("/"))) if "*" in path else (ROOT / path).exists()


def defined(path: Path) -> Iterator[str]:
    """Functions, classes and methods of a Python file, also as Class.method."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield from (inner.name, f"{node.name}.{inner.name}")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_paths_are_there(page: Path) -> None:
    found = {match.rstrip(".,-") for match in PATH.findall(page.read_text())}
    assert not sorted(path for path in found if not is_there(path))


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_files_that_are_named_are_there(page: Path) -> None:
    """Also by a name alone, which then is one file's only."""
    wrong = set()
    for code in CODE.findall(BLOCK.sub("", page.read_text())):
        for word in code.split():
            path = word.partition(":")[0]
            if path.endswith(SOURCES) and not path.startswith((*OTHERS, "-", "/")):
                if "/" in path or (ROOT / path).exists() or (page.parent / path).exists():
                    right = is_there(path) or (page.parent / path).exists()
                else:
                    right = names()[path] == 1 or path.startswith("__")
                if not right:
                    wrong.add(path)
    assert not sorted(wrong)


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_functions_that_are_named_are_there(page: Path) -> None:
    for code in CODE.findall(page.read_text()):
        if (place := PLACE.match(code)) is None:
            continue
        file, name = ROOT / place[1], place[2]
        assert file.is_file(), f"{where(page)}: {code}: there is no such file"
        if file.suffix == ".py":
            assert name in set(defined(file)), f"{where(page)}: {code}: nothing there has that name"
        else:
            assert re.search(rf"\b{name.rpartition('.')[2]}\(", file.read_text()), f"{where(page)}: {code}: not there"


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_modules_that_are_named_are_there(page: Path) -> None:
    for folder, rest in MODULE.findall(page.read_text()):
        path = ROOT / folder / rest.replace(".", "/").lstrip("/")
        inside = path.with_suffix(".py").exists() or path.is_dir()
        assert inside or path.parent.with_suffix(".py").exists(), f"{where(page)}: kvferry.{folder}{rest}"


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        if target.startswith("http"):
            continue
        other = (page.parent / target).resolve() if target else page
        assert other.exists(), f"{where(page)}: {target}"
        if anchor:
            assert other.suffix == ".md", f"{where(page)}: {target}#{anchor}"
            assert anchor in anchors(other), f"{where(page)}: {target} has no heading for #{anchor}"


def test_the_walks_name_functions() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    found = CODE.findall(text)
    assert sum(PLACE.match(code) is not None for code in found) >= 25
    assert not [code for code in found if METHOD.match(code) and code not in methods()]
    assert len(text.splitlines()) <= 130, "it is read in ten minutes: what is more goes to docs/internals"


GENERATED = "docs/protocol.md"
PAGE_WORDS, FIRST_PAGE_WORDS, TABLE_ROWS, CELL_WORDS = 2500, 1500, 12, 25


@pytest.mark.parametrize("page", [page for page in PAGES if where(page) != GENERATED], ids=where)
def test_pages_are_short(page: Path) -> None:
    words = len(page.read_text().split())
    assert words <= (FIRST_PAGE_WORDS if where(page) == "README.md" else PAGE_WORDS), f"{where(page)}: {words} words"


def test_the_first_page_has_one_table_and_that_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    (table,) = re.findall(r"(?:^\|.*\n)+", BLOCK.sub("", text), re.MULTILINE)
    assert text.index("## Results") < text.index(table)
    rows = table.splitlines()[2:]
    cells = [cell for row in rows for cell in row.strip("|").split("|")]
    assert 0 < len(rows) <= TABLE_ROWS
    assert not [cell for cell in cells if len(cell.split()) > CELL_WORDS]
    (picture,) = [block for block in BLOCK.findall(text) if "┌─" in block]
    assert all(f"{folder}/" in picture for folder in ("front", "connectors", "workers", "daemon", "transfer"))
    assert re.findall(r"^!\[.+\]\((.+)\)$", text, re.MULTILINE) == ["docs/img/bytes_ttft.svg", "docs/img/hit_rate.svg"]


@pytest.mark.parametrize("page", PAGES, ids=where)
def test_links_to_others_have_a_form(page: Path) -> None:
    """Nothing is fetched: a host with a name, a path without spaces or braces, and TLS wherever it is linked to."""
    text = BLOCK.sub("", page.read_text())
    linked = [found for found, _ in LINK.findall(text) if ":" in found.split("/")[0]]
    for target in linked + re.findall(r"<(\w+:[^>\s]+)>", text):
        form = r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/[\w.~%@+=&?/#:-]*)?"
        assert re.fullmatch(form, target), f"{where(page)}: {target}"


def test_each_result_has_a_line() -> None:
    text = (ROOT / "bench" / "results" / "README.md").read_text()
    names = {path.name for path in (ROOT / "bench" / "results").iterdir()} - {"README.md"}
    assert not sorted(name for name in names if f"({name})" not in text)
