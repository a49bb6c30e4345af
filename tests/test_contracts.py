"""What may import what, and calls that nobody may make: read from the syntax trees of all our packages."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("proto", "radix", "transfer", "daemon", "workers", "connectors", "loadgen")

# The core: state machines fed with events and a clock, so that a simulator can drive them. Whole folders end in a dot.
PURE = (
    "kvferry.radix.",
    "kvferry.connectors.digests",
    "kvferry.connectors.orders",
    "kvferry.connectors.params",
    "kvferry.connectors.scheduler_decode",
    "kvferry.connectors.scheduler_prefill",
    "kvferry.connectors.scheduler_side",
    "kvferry.connectors.settings",
    "kvferry.transfer.coverage",
    "kvferry.transfer.lanes",
    "kvferry.transfer.layouts",
    "kvferry.transfer.outgoing",
    "kvferry.transfer.pool_shape",
    "kvferry.transfer.receiver",
    "kvferry.transfer.registration",
    "kvferry.transfer.sender",
    "kvferry.transfer.slots",
    "kvferry.daemon.admission",
    "kvferry.daemon.arrivals",
    "kvferry.daemon.asks",
    "kvferry.daemon.core",
    "kvferry.daemon.counters",
    "kvferry.daemon.decode_core",
    "kvferry.daemon.decode_requests",
    "kvferry.daemon.effects",
    "kvferry.daemon.errors",
    "kvferry.daemon.holds",
    "kvferry.daemon.kv_events",
    "kvferry.daemon.lease",
    "kvferry.daemon.limits",
    "kvferry.daemon.metrics",
    "kvferry.daemon.namespaces",
    "kvferry.daemon.pins",
    "kvferry.daemon.prefill_core",
    "kvferry.daemon.prefill_entry",
    "kvferry.daemon.prefill_requests",
    "kvferry.daemon.prefill_supply",
    "kvferry.daemon.progress",
    "kvferry.daemon.store",
    "kvferry.daemon.supply",
    "kvferry.daemon.tls_names",
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
LAYERS = {
    "kvferry.proto.": ("kvferry.proto.",),
    "kvferry.radix.": ("kvferry._core", "kvferry.radix."),
    "kvferry.transfer.": ("kvferry", "kvferry._core", "kvferry.proto.", "kvferry.transfer.", "kvferry.waiting"),
    "kvferry.workers.": ("kvferry", "kvferry.proto.", "kvferry.radix.", "kvferry.workers.", "CLIENT"),
    "kvferry.connectors.": (
        "kvferry",
        "kvferry._core",
        "kvferry.proto.",
        "kvferry.radix.",
        "kvferry.connectors.",
        "kvferry.workers.client",
        "kvferry.workers.requests",
        "CLIENT",
    ),
    "kvferry.loadgen.": ("kvferry", "kvferry.proto.", "kvferry.radix.", "kvferry.loadgen.", "CLIENT"),
}
# The client side maps the daemon's memory, and shares no other code with it.
CLIENT = (
    "kvferry.channels",
    "kvferry.flags",
    "kvferry.listening",
    "kvferry.logs",
    "kvferry.pauses",
    "kvferry.tracing",
    "kvferry.transfer",
    "kvferry.transfer.geometry",
    "kvferry.transfer.ipc_memory",
    "kvferry.transfer.lanes",
    "kvferry.transfer.layouts",
    "kvferry.transfer.namespace",
    "kvferry.transfer.registration",
    "kvferry.transfer.segment",
    "kvferry.waiting",
)


class Import(NamedTuple):
    name: str  # of the module
    line: int


class Module(NamedTuple):
    name: str
    path: Path
    tree: ast.Module

    def where(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"


def modules() -> dict[str, Module]:
    found = {}
    for folder, package in [("package/kvferry", "kvferry")] + [(folder, f"kvferry.{folder}") for folder in FOLDERS]:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join((package, *(part for part in parts if part != "__init__")))
            found[name] = Module(name, path, ast.parse(path.read_text(), str(path)))
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
    return any(matches_any(name, CLIENT) if pattern == "CLIENT" else matches(name, pattern) for pattern in patterns)


def ours(name: str) -> bool:
    return matches(name, "kvferry.")


def closure(start: str) -> dict[str, str]:
    """Every module of ours that importing `start` brings in (packages on the way too) -> the one that asked for it."""
    asked_by = {start: start}
    todo = [start]
    while todo:
        name = todo.pop()
        wanted = {imported.name for imported in imports(MODULES[name]) if imported.name in MODULES}
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
    assert {"kvferry._core", "kvferry.radix.cbor"} <= {
        found.name for found in imports(MODULES["kvferry.radix.digests"])
    }
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
    names = [found.name for found in imports(Module("planted", ROOT / "planted.py", ast.parse(source)))]
    expected = ["os.path", "typing", "time", "kvferry.radix.digests", "kvferry.radix", "kvferry._core"]
    assert names == expected


@pytest.mark.parametrize("name", sorted(MODULES))
def test_layers(name: str) -> None:
    module = MODULES[name]
    for layer, allowed in LAYERS.items():
        if not matches(name, layer):
            continue
        for found in imports(module):
            if ours(found.name):
                assert matches_any(found.name, allowed), f"{module.where(found.line)}: {layer} imports {found.name}"


@pytest.mark.parametrize("name", CORE)
def test_the_core_does_no_io(name: str) -> None:
    for reached, asked_by in closure(name).items():
        module = MODULES[reached]
        for found in imports(module):
            assert found.name.split(".")[0] not in NOT_IN_CORE, (
                f"{module.where(found.line)}: {name} (by way of {asked_by}) imports {found.name}"
            )
