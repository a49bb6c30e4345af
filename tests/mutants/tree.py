"""A copy of the checkout that is imported as kvferry, in which one guard at a time is broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import kvferry._core
from tests.mutants.guard import Guard

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("proto", "radix", "transfer", "daemon", "client", "workers", "front", "loadgen", "connectors")
BUILD_SECONDS = 900.0


class Tree:
    """A copy below `folder`, with a Python of its own: this one's packages, and before them the copy."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.root.mkdir(parents=True)
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.splitlines()):
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self._build = folder / "build"
        self._overlay = folder / "overlay" / "kvferry"
        self._overlay.mkdir(parents=True)
        for each in [*PACKAGES, *(f"package/kvferry/{p.name}" for p in (self.root / "package/kvferry").iterdir())]:
            (self._overlay / Path(each).name).symlink_to(self.root / each)
        made = Path(kvferry._core.__file__)
        self._own = self._overlay / made.name
        shutil.copy2(made, self._own)
        self._made = made
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        self.python = folder / "venv" / "bin" / "python"
        site = Path(folder / "venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages")
        (site / "copy.pth").write_text(f"{self._overlay.parent}\n{sysconfig.get_paths()['purelib']}\n")

    def apply(self, guard: Guard) -> None:
        """Breaks the guard, building the extension where it is C++. CalledProcessError where that fails."""
        (self.root / guard.file).write_text(guard.broken(self.root))
        if guard.compiled:
            self.build()

    def restore(self, guard: Guard) -> None:
        """Makes the guard whole again."""
        shutil.copyfile(ROOT / guard.file, self.root / guard.file)
        if guard.compiled:
            shutil.copy2(self._made, self._own)

    def build(self) -> None:
        """Builds the copy's extension, again only what has changed."""
        nanobind = subprocess.run(
            [sys.executable, "-m", "nanobind", "--cmake_dir"], check=True, capture_output=True, text=True
        ).stdout.strip()
        options = [f"-Dnanobind_DIR={nanobind}", f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_BUILD_TYPE=Release"]
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        for command in (
            ["cmake", "-S", str(self.root), "-B", str(self._build), *options],
            ["cmake", "--build", str(self._build), "--parallel", "2"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=BUILD_SECONDS, env=environment)
        for made in self._build.glob("_core*.so"):
            shutil.copy2(made, self._own)
