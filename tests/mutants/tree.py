"""A copy of the checkout that is imported as kvferry, in which one guard at a time is broken."""

from __future__ import annotations

import filecmp
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import kvferry._core
from tests.mutants.guard import Guard

ROOT = Path(__file__).resolve().parents[2]


class Tree:
    """A copy below `folder`, with a Python of its own: this one's packages, and before them the copy. A folder that had
    a copy before keeps of it, and of its build, what has not changed since."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.splitlines()):
            if (ROOT / name).is_file():
                self._bring(name)
        self._build = folder / "build"
        self._overlay = folder / "overlay" / "kvferry"
        shutil.rmtree(self._overlay, ignore_errors=True)
        self._overlay.mkdir(parents=True)
        packages = [made.parent for made in self.root.glob("*/__init__.py")]
        for each in [*packages, *(self.root / "package/kvferry").iterdir()]:
            (self._overlay / each.name).symlink_to(each)
        self._whole = Path(kvferry._core.__file__)
        self._own = self._overlay / self._whole.name
        self._take(self._whole)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True)
        self.python = folder / "venv" / "bin" / "python"
        site = Path(folder / "venv" / "lib" / f"python3.{sys.version_info[1]}" / "site-packages")
        (site / "copy.pth").write_text(f"{self._overlay.parent}\n{sysconfig.get_paths()['purelib']}\n")

    def apply(self, guard: Guard) -> None:
        """Breaks the guard, building the extension where it is C++. CalledProcessError where that fails."""
        (self.root / guard.file).write_text(guard.broken(self.root))
        if guard.compiled:
            self._take(self._built())

    def restore(self, guard: Guard) -> None:
        """Makes the guard whole again."""
        self._bring(guard.file)
        if guard.compiled:
            self._take(self._whole)

    def build_whole(self) -> None:
        """Has the extension of guards that are whole built of the copy, too: the one that is installed may be older."""
        kept = self._build.parent / "whole"
        kept.mkdir(exist_ok=True)
        self._whole = Path(shutil.copyfile(self._built(), kept / self._own.name))
        self._take(self._whole)

    def _bring(self, name: str) -> None:
        """The checkout's file, written only where it differs: the build goes by the times of files."""
        source, target = ROOT / name, self.root / name
        if target.is_file() and filecmp.cmp(source, target, shallow=False):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        shutil.copymode(source, target)

    def _take(self, extension: Path) -> None:
        """Has the copy import it. A new file: one that a process still maps must not change under it."""
        self._own.unlink(missing_ok=True)
        shutil.copyfile(extension, self._own)

    def _built(self) -> Path:
        """The extension of the copy's C++, as the wheel has it. Builds only what has changed."""
        environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

        def run(*command: str) -> str:
            done = subprocess.run(
                command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
            )
            return done.stdout

        if not (self._build / "CMakeCache.txt").exists():
            nanobind = run(sys.executable, "-m", "nanobind", "--cmake_dir").strip()
            options = (
                f"-Dnanobind_DIR={nanobind}",
                f"-DPython_EXECUTABLE={sys.executable}",
                "-DCMAKE_BUILD_TYPE=Release",
            )
            run("cmake", "-S", str(self.root), "-B", str(self._build), *options)
        run("cmake", "--build", str(self._build), "--parallel", "2")
        return self._build / self._own.name
