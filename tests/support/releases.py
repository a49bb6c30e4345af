"""Other releases as processes of a stack: one that is installed elsewhere, or this one of another protocol."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.release.release import Release, environment, release_of, run, unpack
from kvferry.daemon.cli.stack import Process
from tests.support.devices import DeviceStack

ROOT = Path(__file__).resolve().parents[2]
# The interpreter of an installation, in the place of one that is made of a tag. Daemons refuse a variable that begins
# like their settings and is none.
VARIABLE = "TEST_LAST_RELEASE"


@dataclass(frozen=True)
class Other:
    """Another release: `prefix` takes the words of a command that runs this one, and runs itself."""

    prefix: tuple[str, ...]


def installed(python: Path) -> Other:
    return Other(("sh", "-c", 'shift 3; exec "$0" -I -m kvferry "$@"', str(python)))


def speaking(protocol: int, oldest: int) -> Other:
    """This release as if it spoke `protocol`, and with peers from `oldest` on."""
    program = (
        "import sys; from kvferry.proto import versions; "
        f"versions.PROTOCOL, versions.PROTOCOL_MIN = {protocol}, {oldest}; "
        "from kvferry.daemon.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return Other(("sh", "-c", 'shift 3; exec "$0" -c "$PROGRAM" "$@"'.replace("$PROGRAM", program), sys.executable))


class MixedStack(DeviceStack):
    """The replicas of these names, daemon and worker, are of other releases."""

    def __init__(self, others: dict[str, Other]) -> None:
        super().__init__()
        self.others = others

    def start(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Process:
        other = self.others.get(name.removesuffix("-worker"))
        prefix = other.prefix if other is not None else prefix
        return super().start(name, words, environment=environment, prefix=prefix)


def last_release(folder: Path) -> Path:
    """The interpreter of an installation of the last release: of the newest tag before this commit, and while there is
    none, of this commit as v0.1.0 in a clone. It borrows its dependencies from the environment of the tests."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    repository = ROOT
    before = ("--merged", "HEAD", "--no-contains", "HEAD")  # a commit with a tag is not judged by itself
    tags = run("git", "-C", ROOT, "tag", "--list", "v*", "--sort=-version:refname", *before).split()
    if not tags:
        repository = folder / "clone"
        run("git", "clone", "-q", "--shared", ROOT, repository)
        run("git", "-C", repository, "tag", "--force", "v0.1.0")  # there, too, where this commit has it
        tags = ["v0.1.0"]
    release = release_of(repository, tags[0])
    return _installed(repository, release, folder)


def _installed(repository: Path, release: Release, folder: Path) -> Path:
    tree = folder / "tree"
    unpack(repository, release, tree)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "-w", folder / "dist", tree)
    shutil.rmtree(tree)
    python = environment(sys.executable, folder / "last")
    (wheel,) = (folder / "dist").glob("kvferry-*.whl")
    run(python, "-m", "pip", "install", "-q", "--no-deps", wheel)
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")  # searched after its own
    return python


def version_of(python: Path) -> str:
    """What `kvferry --version` of an installation says."""
    words = [str(python), "-I", "-m", "kvferry", "--version"]
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.strip()
