"""The wheel: what is in it, and that it lives beside packages that own names like those of our folders."""

import importlib.util
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.packaging.wheels import ROOT, building, run

MAPPED = {"package/kvferry": "kvferry"} | {
    folder: f"kvferry/{folder}"
    for folder in ("proto", "radix", "transfer", "daemon", "client", "workers", "front", "loadgen", "connectors")
}

IMPORT_ALL = """
import importlib, pkgutil, sys
import kvferry, proto, daemon
def fail(name):
    raise ImportError(name)
names = [m.name for m in pkgutil.walk_packages(kvferry.__path__, "kvferry.", onerror=fail)]
for name in names:
    try:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        loaded_by_vllm = ("connector", "scheduler", "stats")
        loaded_by_sglang = ("bootstrap", "manager", "receiver", "sender")
        of_engines = [f"kvferry.connectors.vllm.{each}" for each in loaded_by_vllm]
        of_engines += [f"kvferry.connectors.sglang.{each}" for each in loaded_by_sglang]
        if name not in of_engines or error.name not in ("vllm", "sglang", "aiohttp", "requests"):
            raise
print("kvferry", kvferry.__file__)
print("core", sys.modules["kvferry._core"].__file__)
print("proto", proto.__file__, hasattr(proto, "Message"))
print("daemon", daemon.__file__, hasattr(daemon, "DaemonContext"))
print("modules", *names)
"""


def sources() -> set[str]:
    """What the wheel should have, by its name there."""
    wanted = set()
    for folder, package in MAPPED.items():
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".pyi", ".proto"} or path.name == "py.typed":
                wanted.add(f"{package}/{path.relative_to(ROOT / folder).as_posix()}")
    return wanted


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """The wheel and the source files there were when its build began."""
    folder = tmp_path_factory.mktemp("wheel")
    wanted = sources()
    have_backend = all(importlib.util.find_spec(name) for name in ("scikit_build_core", "nanobind"))
    isolation = ["--no-build-isolation"] if have_backend else []
    # What the editable installation compiled is not compiled again: both have the build folder of pyproject.toml.
    options = ["--no-deps", "--wheel-dir", folder / "dist"]
    with building():
        run(sys.executable, "-m", "pip", "wheel", "-q", *isolation, *options, ROOT)
    (wheel,) = (folder / "dist").glob("kvferry-*.whl")
    return wheel, wanted


@pytest.mark.nightly
def test_contents(built: tuple[Path, set[str]]) -> None:
    wheel, wanted = built
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
    assert wanted <= names, f"not in the wheel: {sorted(wanted - names)}"
    assert {"kvferry/py.typed", "kvferry/_core.pyi", "kvferry/proto/peer.proto"} <= names
    assert [name for name in names if name.endswith(".html")] == ["kvferry/daemon/observe/live_page.html"]
    assert "kvferry/_core" + sysconfig.get_config_var("EXT_SUFFIX") in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvferry"}
    for name in names:
        parts = name.split("/")
        assert not {"tests", "bench", "csrc", "deploy", "__pycache__"} & set(parts), name
        assert not name.endswith((".cpp", ".h", ".a", ".pyc", ".o")), name
    assert "License-Expression: Apache-2.0" in metadata


@pytest.mark.nightly
def test_lives_beside_packages_with_our_folders_names(built: tuple[Path, set[str]], tmp_path: Path) -> None:
    wheel, wanted = built
    environment = tmp_path / "clean"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    # Only these are installed; kvferry's own dependencies are borrowed from the environment of this test run.
    beside = ["proto-plus", "python-daemon", "lockfile"]
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, *beside)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # searched after the environment's own

    lines = [line.split(" ") for line in run(python, "-I", "-c", IMPORT_ALL).splitlines()]
    found = {line[0]: line[1:] for line in lines}
    assert Path(found["kvferry"][0]).parent == site / "kvferry"
    assert Path(found["core"][0]).parent == site / "kvferry"
    assert [Path(found["proto"][0]).parent, found["proto"][1]] == [site / "proto", "True"]
    assert [Path(found["daemon"][0]).parent, found["daemon"][1]] == [site / "daemon", "True"]
    modules = {
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in wanted if name.endswith(".py")
    }
    assert modules - set(found["modules"]) <= {"kvferry"}
    assert (environment / "bin" / "kvferry").exists()
