"""Contracts of the packages: what may import what, and calls that nobody may make; read from their syntax trees."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("proto", "radix", "transfer", "daemon", "client", "workers", "front", "connectors", "loadgen")

# State machines fed with events and a clock, so that a simulator can drive them: folders, which end in a dot, and what
# is pure among others.
PURE = (
    "kvferry.radix.",
    "kvferry.transfer.geometry.",
    "kvferry.transfer.protocol.",
    "kvferry.daemon.core.",
    "kvferry.daemon.config.tls_names",
    "kvferry.daemon.observe.metrics",
    "kvferry.daemon.observe.progress",
    "kvferry.connectors.digests",
    "kvferry.connectors.orders",
    "kvferry.connectors.params",
    "kvferry.connectors.scheduler_decode",
    "kvferry.connectors.scheduler_prefill",
    "kvferry.connectors.scheduler_side",
    "kvferry.connectors.settings",
    "kvferry.connectors.weights_epoch",
)
NOT_IN_CORE = frozenset(
    {
        "asyncio",
        "concurrent",
        "datetime",
        "grpc",
        "multiprocessing",
        "nixl",
        "os",
        "random",
        "select",
        "selectors",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
        "torch",
    }
)

# What a folder may import of ours; a name that ends in a dot stands for all below it.
SHARED = ("kvferry", "kvferry.proto.", "kvferry.threads", "kvferry.waiting")
# The client side maps the daemon's memory, and shares no other code with it.
CLIENT = (
    *SHARED,
    "kvferry.radix.",
    "kvferry.transfer",
    "kvferry.transfer.geometry.",
    "kvferry.transfer.mapping.",
    "kvferry.addresses",
    "kvferry.byte_tokens",
    "kvferry.channels",
    "kvferry.flags",
    "kvferry.frames",
    "kvferry.listening",
    "kvferry.logs",
    "kvferry.pauses",
    "kvferry.secret_files",
    "kvferry.signals",
    "kvferry.tracing",
)
LAYERS = {
    "kvferry.proto.": ("kvferry.proto.",),
    "kvferry.radix.": ("kvferry._core", "kvferry.radix."),
    "kvferry.transfer.": (*SHARED, "kvferry._core", "kvferry.transfer."),
    "kvferry.transfer.geometry.": (*SHARED, "kvferry.transfer.geometry."),
    "kvferry.transfer.protocol.": (
        "kvferry._core",
        "kvferry.transfer.geometry.",
        "kvferry.transfer.protocol.",
    ),
    "kvferry.transfer.mapping.": (*SHARED, "kvferry._core", "kvferry.transfer.geometry.", "kvferry.transfer.mapping."),
    "kvferry.client.": (*CLIENT, "kvferry.client."),
    "kvferry.workers.": (*CLIENT, "kvferry.client.", "kvferry.workers."),
    "kvferry.front.": (*CLIENT, "kvferry.front."),
    "kvferry.connectors.": (*CLIENT, "kvferry._core", "kvferry.client.", "kvferry.connectors."),
    "kvferry.loadgen.": (*CLIENT, "kvferry.loadgen."),
}
# The daemon's floors, top down: a module imports its own floor and those below it.
FLOORS = (
    ("cli",),
    ("server", "backstop", "capabilities", "grpc_servers", "socket_file"),
    ("services",),
    ("observe",),
    ("sides",),
    ("peers",),
    ("memory",),
    ("config",),
    ("core",),
)


class Import(NamedTuple):
    name: str  # of the module
    line: int


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    source: str | None = None  # None: what the file has

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text() if self.source is None else self.source, str(self.path))

    @cached_property
    def imports(self) -> list[Import]:
        return list(imports(self))

    def where(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def modules() -> dict[str, Module]:
    found = {}
    for folder, package in [("package/kvferry", "kvferry")] + [(folder, f"kvferry.{folder}") for folder in FOLDERS]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found[name] = Module(name, path)
    return found


MODULES = modules()


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes, without what stands under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield other
                yield from at_run_time(other)
            continue
        yield child
        yield from at_run_time(child)


def imports(module: Module) -> Iterator[Import]:
    """Every import in this module, in functions too; `from package import module` gives the module."""
    for node in at_run_time(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module.where(node.lineno)}: relative import; write kvferry.<folder>.<module>"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield Import(full if full in MODULES or full == "kvferry._core" else node.module, node.lineno)


def matches(name: str, pattern: str) -> bool:
    return name == pattern or (pattern.endswith(".") and f"{name}.".startswith(pattern))


def matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(matches(name, pattern) for pattern in patterns)


def ours(name: str) -> bool:
    return matches(name, "kvferry.")


def closure(start: str) -> dict[str, str]:
    """Every module of ours that importing `start` brings in (packages on the way too) -> the one that asked for it."""
    asked_by = {start: start}
    todo = [start]
    while todo:
        name = todo.pop()
        wanted = {imported.name for imported in MODULES[name].imports if imported.name in MODULES}
        for target in {name} | wanted:
            parts = target.split(".")
            wanted |= {".".join(parts[:end]) for end in range(2, len(parts))} & MODULES.keys()
        for target in wanted - asked_by.keys():
            asked_by[target] = name
            todo.append(target)
    return asked_by


CORE = sorted(name for name in MODULES if matches_any(name, PURE))


def test_the_walk_sees_our_packages() -> None:
    for name in ("kvferry", "kvferry.radix.digests", "kvferry.proto.peer_pb2", "kvferry.transfer"):
        assert name in MODULES
    assert {"kvferry._core", "kvferry.radix.cbor"} <= {found.name for found in MODULES["kvferry.radix.digests"].imports}
    assert len(CORE) >= 8


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import os.path
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import grpc
else:
    import time
def late():
    from kvferry.radix import digests, PagePool
    from kvferry import _core
"""
    names = [found.name for found in imports(Module("planted", ROOT / "planted.py", source))]
    expected = ["os.path", "typing", "time", "kvferry.radix.digests", "kvferry.radix", "kvferry._core"]
    assert names == expected


def test_layers() -> None:
    wrong = []
    for name, module in MODULES.items():
        for layer, allowed in LAYERS.items():
            if matches(name, layer):
                wrong += [
                    f"{module.where(found.line)}: {layer} imports {found.name}"
                    for found in module.imports
                    if ours(found.name) and not matches_any(found.name, allowed)
                ]
    assert len(MODULES) > 300
    assert not wrong, "\n".join(wrong)


def floor_of(name: str) -> int | None:
    """Floor of a module of the daemon; None: of another package, or the package itself."""
    parts = name.split(".")
    if parts[:2] != ["kvferry", "daemon"] or len(parts) == 2:
        return None
    floors = [floor for floor, rooms in enumerate(FLOORS) if parts[2] in rooms]
    assert floors, f"{name} is on no floor of the daemon: {FLOORS}"
    return floors[0]


def test_the_daemons_floors() -> None:
    wrong, seen = [], 0
    for name, module in MODULES.items():
        own = floor_of(name)
        if own is None:
            continue
        seen += 1
        for found in module.imports:
            other = floor_of(found.name)
            if other is not None and other < own:
                wrong.append(f"{module.where(found.line)}: {FLOORS[own]} imports {found.name}, which is above it")
    assert seen > 100
    assert not wrong, "\n".join(wrong)


def test_the_core_does_no_io() -> None:
    wrong = [
        f"{MODULES[reached].where(found.line)}: {name} (by way of {asked_by}) imports {found.name}"
        for name in CORE
        for reached, asked_by in closure(name).items()
        for found in MODULES[reached].imports
        if found.name.split(".")[0] in NOT_IN_CORE
    ]
    assert not wrong, "\n".join(wrong)
