"""The installation: wheels that need no compiler, a daemon without torch, and what it weighs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.packaging.wheels import ROOT, building, run

MOST_BYTES = 250 << 20  # of all that `pip install kvferry` brings
GLIBC = (2, 34)  # the newest that a wheel may ask for


pytestmark = pytest.mark.nightly  # it compiles the extension


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that deploy/wheels/build.sh makes."""
    folder = tmp_path_factory.mktemp("dist")
    with building():
        run("env", "ONLY_WHEELS=1", f"PYTHON={sys.executable}", ROOT / "deploy" / "wheels" / "build.sh", folder)
    return folder


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with kvferry and nothing else; its interpreter."""
    folder = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--only-binary", ":all:"]
    run(*command, "--find-links", dist, "kvferry")
    return python


def wheel(dist: Path, name: str) -> Path:
    (found,) = dist.glob(f"{name}-*.whl")
    return found


@pytest.mark.timeout(600)
def test_wheels_run_on_older_systems(dist: Path) -> None:
    for name in ("kvferry", "kvferry_nixl"):
        found = re.search(r"manylinux_(\d+)_(\d+)_", wheel(dist, name).name)
        assert found is not None, f"{wheel(dist, name).name} is for this machine alone"
        assert (int(found[1]), int(found[2])) <= GLIBC
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel(dist, "kvferry"))
    assert re.search(r'consistent with\s+the following platform tag:\s+"manylinux_2_', shown), shown


@pytest.mark.timeout(600)
def test_nixl_comes_without_what_needs_torch(dist: Path) -> None:
    with zipfile.ZipFile(wheel(dist, "kvferry_nixl")) as archive:
        names = set(archive.namelist())
        (metadata,) = (archive.read(n).decode() for n in names if n.endswith(".dist-info/METADATA"))
        assert archive.testzip() is None
    assert re.findall("^Requires-Dist: (.*)$", metadata, re.MULTILINE) == ["numpy"]
    assert {n.split("/")[0].split("-")[0] for n in names} == {"kvferry_nixl"}
    papers = {n.partition(".dist-info/")[2] for n in names if ".dist-info/" in n}
    assert {"licenses/LICENSE", "licenses/NOTICE", "licenses/licenses/NVIDIA-proprietary-LICENSE.txt"} <= papers
    plugins = {n.rpartition("/")[2] for n in names if "libplugin_" in n}
    assert plugins == {"libplugin_UCX.so"}
    assert any("ucx/libuct_cuda" in n for n in names) and any("ucx/libuct_ib_mlx5" in n for n in names)


@pytest.mark.timeout(600)
def test_the_installation_is_small_and_has_no_torch(installed: Path) -> None:
    site = Path(run(installed, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    files = [path for path in site.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    assert not {path.name for path in site.iterdir()} & {"torch", "nixl", "nixl_cu13", "transformers", "fastapi"}


@pytest.mark.timeout(600)
def test_a_daemon_runs_from_it(installed: Path, tmp_path: Path) -> None:
    """With a courier on NIXL, as doctor starts one, and health over its socket."""
    kvferry = installed.parent / "kvferry"
    told = run(kvferry, "doctor", "--socket", tmp_path / "d.sock", "--metrics", "off")
    assert "UCX transports: " in told and "courier: starts on" in told
    words = [
        "serve",
        "--role",
        "decode",
        "--listen",
        "127.0.0.1:0",
        "--socket",
        tmp_path / "d.sock",
        "--metrics",
        "off",
    ]
    with subprocess.Popen([kvferry, *words], stdout=subprocess.PIPE, text=True) as daemon:
        try:
            assert daemon.stdout is not None
            address = daemon.stdout.readline().split()[-1]
            assert run(kvferry, "health", address) == "SERVING\n"
        finally:
            daemon.terminate()
            assert daemon.wait(timeout=60) == 0


@pytest.mark.timeout(600)
def test_a_command_of_an_extra_says_which(installed: Path) -> None:
    done = subprocess.run(
        [installed.parent / "kvferry", "front", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert re.fullmatch(r"kvferry front: needs the package \w+: pip install 'kvferry\[front\]'\n", done.stderr)


def test_a_wheel_of_another_layout_is_refused(tmp_path: Path) -> None:
    strange = tmp_path / "nixl_cu13-9.9-cp311-cp311-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(strange, "w") as archive:
        archive.writestr("nixl_cu13/__init__.py", "")
    script = ROOT / "deploy" / "wheels" / "repack_nixl.py"
    done = subprocess.run(
        [sys.executable, script, "--wheel", strange, "--dest", tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 1
    assert "no nixl_cu13/_bindings or no libplugin_UCX.so in" in done.stderr
    assert not list(tmp_path.glob("kvferry_nixl-*"))
