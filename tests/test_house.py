"""The house in order: sizes of files, functions, constructors and folders, a name for one thing only, and docstrings
that say what they are about."""

import ast
import subprocess
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILE_LINES, FUNCTION_LINES, FOLDER_FILES, ARGUMENTS = 450, 70, 25, 8
CODE = {".py", ".cpp", ".h", ".cu", ".cuh", ".sh"}
PACKAGES = ("client", "connectors", "daemon", "front", "loadgen", "package", "proto", "radix", "transfer", "workers")
MADE = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "kernels_ptx.cpp", "_core.pyi")  # not by hand
GIVEN = ("bench/results", "tests/fuzz/seeds")
RIDDLES = ("Of", "Its", "As", "That", "Whose", "By", "From", "With", "In", "To", "Without")  # of what?


def ours() -> list[Path]:
    """Files that somebody has written, relative to the root."""
    try:
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout", allow_module_level=True)
    names = [name for name in listed.stdout.splitlines() if not name.startswith(GIVEN) and not name.endswith(MADE)]
    return [Path(name) for name in names if (ROOT / name).is_file()]


FILES = ours()


class Python(NamedTuple):
    """What a file has, by the line where it stands; its tree is not kept."""

    functions: dict[int, tuple[str, int]]  # name and lines
    constructors: dict[int, int]  # arguments
    classes: dict[int, str]  # public, of the module itself
    docstrings: dict[int, str]  # by the docstring's own line
    docstring: str | None


def read(path: Path) -> Python:
    tree = ast.parse((ROOT / path).read_text(), str(path))
    classes = {node.lineno: node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    public = {line: name for line, name in classes.items() if not name.startswith("_")}
    found = Python({}, {}, public, {}, ast.get_docstring(tree))
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if text := ast.get_docstring(node):
            found.docstrings[node.body[0].lineno] = text
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            found.functions[node.lineno] = (node.name, node.end_lineno - node.lineno + 1)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            own = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found.constructors[node.lineno] = len(own) - 1
    return found


@cache
def pythons() -> dict[Path, Python]:
    """Read once a test asks: every worker of a run collects this file."""
    return {path: read(path) for path in FILES if path.suffix == ".py"}


def test_files_are_read_in_one_sitting() -> None:
    lines = {path: len((ROOT / path).read_text().splitlines()) for path in FILES if path.suffix in CODE}
    assert len(lines) > 400
    assert not {str(path): count for path, count in lines.items() if count > FILE_LINES}


def test_functions_are_short() -> None:
    found = {
        f"{path}:{line} {name}": count
        for path, python in pythons().items()
        for line, (name, count) in python.functions.items()
    }
    assert len(found) > 4000
    assert not {where: count for where, count in found.items() if count > FUNCTION_LINES}


def test_folders_have_few_files() -> None:
    folders = Counter(path.parent for path in FILES)
    assert not {str(folder): count for folder, count in folders.items() if count > FOLDER_FILES}


def test_constructors_take_few_arguments() -> None:
    found = {
        f"{path}:{line}": count for path, python in pythons().items() for line, count in python.constructors.items()
    }
    assert len(found) > 200
    assert not {where: count for where, count in found.items() if count > ARGUMENTS}


def test_a_public_class_has_its_name_alone() -> None:
    found = defaultdict(list)
    for path, python in pythons().items():
        if path.parts[0] in PACKAGES:
            for line, name in python.classes.items():
                found[name].append(f"{path}:{line}")
    assert len(found) > 400
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_folders_say_what_lives_in_them() -> None:
    """Each folder of more than five files of a package opens with a docstring or a README."""
    for folder, count in Counter(path.parent for path in FILES if path.parts[0] in (*PACKAGES, "csrc")).items():
        if count > 5 and not (ROOT / folder / "README.md").exists():
            python = pythons().get(folder / "__init__.py")
            assert python is not None and python.docstring, f"{folder} has {count} files and no word on them"


def test_docstrings_name_their_subject() -> None:
    """One that is read alone, as an editor shows it, says what the thing is or does."""
    found = {
        f"{path}:{line}": text
        for path, python in pythons().items()
        if path.parts[0] in (*PACKAGES, "deploy", "docs")
        for line, text in python.docstrings.items()
    }
    assert len(found) > 1500
    assert not {where: text for where, text in found.items() if text.split()[0].rstrip(",.:;") in RIDDLES}
