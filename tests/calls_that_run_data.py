"""Finds, in a syntax tree, whatever could run data as code: names are followed through imports and their aliases."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

# Modules that nobody imports. What is under one is meant, too.
MODULES = (
    "_pickle",
    "cloudpickle",
    "code",
    "codeop",
    "dill",
    "imp",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "pty",
    "runpy",
    "shelve",
)
# Functions that nobody names, whether called or handed on.
NAMES = frozenset(
    {
        "asyncio.create_subprocess_shell",
        "builtins.__import__",
        "builtins.compile",
        "builtins.eval",
        "builtins.exec",
        "logging.config.listen",
        "numpy.lib.format.read_array",
        "os.popen",
        "os.system",
        "pandas.read_pickle",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "torch.hub.load",
        "torch.jit.load",
        "torch.load",
        "torch.package.PackageImporter",
        "torch.serialization.load",
        "yaml.full_load",
        "yaml.full_load_all",
        "yaml.load",
        "yaml.load_all",
        "yaml.unsafe_load",
        "yaml.unsafe_load_all",
    }
)
# Classes of loaders that make objects of any kind; yaml.CSafeLoader and yaml.SafeLoader are none.
NAMES |= {
    f"yaml.{kind}" for kind in ("CFullLoader", "CLoader", "CUnsafeLoader", "FullLoader", "Loader", "UnsafeLoader")
}
# Pickle under the name of multiprocessing: their `get` and `recv` decode whatever was written to them.
PICKLING = frozenset(
    {
        "multiprocessing.JoinableQueue",
        "multiprocessing.Manager",
        "multiprocessing.Pipe",
        "multiprocessing.Pool",
        "multiprocessing.Queue",
        "multiprocessing.SimpleQueue",
        "multiprocessing.connection.Client",
        "multiprocessing.connection.Listener",
        "multiprocessing.connection.Pipe",
        "multiprocessing.managers.BaseManager",
        "multiprocessing.managers.SyncManager",
        "multiprocessing.pool.Pool",
        "multiprocessing.queues.JoinableQueue",
        "multiprocessing.queues.Queue",
        "multiprocessing.queues.SimpleQueue",
    }
)
BUILTINS = frozenset(("__import__", "compile", "eval", "exec"))
METHODS = frozenset(("deserialize_descs", "get_serialized_descs", "read_pickle"))
# What pickle asks an object for.
PICKLED = frozenset(("__getnewargs__", "__getnewargs_ex__", "__reduce__", "__reduce_ex__", "__setstate__"))
# Keyword arguments that may be False alone.
KEYWORDS = frozenset(("allow_pickle", "shell", "trust_remote_code"))


class Found(NamedTuple):
    what: str  # its full name
    line: int


def runs_data(tree: ast.Module) -> Iterator[Found]:
    """Whatever of the lists above stands in this module, at any depth."""
    nodes = list(ast.walk(tree))
    names = _imported(nodes)
    for node in nodes:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import | ast.ImportFrom):
            for full in _of_import(node):
                if _is_forbidden(full):
                    yield Found(full, line)
        elif isinstance(node, ast.Name | ast.Attribute):
            full = _full_name(node, names)
            if full is not None and _is_forbidden(full):
                yield Found(full, line)
            elif isinstance(node, ast.Attribute) and node.attr in METHODS:
                yield Found(node.attr, line)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in PICKLED:
            yield Found(node.name, line)
        elif isinstance(node, ast.Call):
            yield from _of_call(node, names)


def _of_call(call: ast.Call, names: dict[str, str]) -> Iterator[Found]:
    for keyword in call.keywords:
        harmless = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in KEYWORDS and not harmless:
            yield Found(f"{keyword.arg}=", call.lineno)
    called = _full_name(call.func, names)
    if called == "numpy.load" and len(call.args) > 2:  # allow_pickle is the third
        yield Found("allow_pickle=", call.lineno)
    if called in ("builtins.getattr", "importlib.import_module"):
        for given in call.args:
            text = given.value if isinstance(given, ast.Constant) else None
            if isinstance(text, str) and (text in BUILTINS or _is_forbidden(text)):
                yield Found(text, call.lineno)


@cache
def _is_forbidden(full: str) -> bool:
    return full in NAMES or full in PICKLING or any(full == name or full.startswith(f"{name}.") for name in MODULES)


def _of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Modules, and what is taken out of them."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            yield alias.name
        elif node.level == 0:
            yield f"{node.module}.{alias.name}"


def _imported(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """The names that imports bind in the module of these nodes, wherever they stand, and what each of them is."""
    names = {name: f"builtins.{name}" for name in (*BUILTINS, "getattr")} | {"__builtins__": "builtins"}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname is not None:
                    names[alias.asname] = alias.name
                else:
                    top = alias.name.split(".")[0]
                    names[top] = top
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes:  # `context = multiprocessing.get_context(...)` has what multiprocessing has
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made = _full_name(node.value.func, names)
            if made == "multiprocessing.get_context":
                names |= {target.id: "multiprocessing" for target in node.targets if isinstance(target, ast.Name)}
    return names


def _full_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """`np.load` as numpy.load; None for what is no name of an import."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        whole = _full_name(node.value, names)
        return None if whole is None else f"{whole}.{node.attr}"
    if isinstance(node, ast.Call) and _full_name(node.func, names) == "multiprocessing.get_context":
        return "multiprocessing"
    return None
