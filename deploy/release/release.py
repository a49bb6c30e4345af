#!/usr/bin/env python3
"""Makes a release out of a tag: wheels for Python 3.10 to 3.13, source distribution, images, SBOM, checksums.

    python deploy/release/release.py v0.1.0 [--dest dist] [--images cpu front] [--no-images] [--partial]

All is built from the tag's own files, never from the working tree, into FOLDER/TAG:

    kvferry-*.whl, kvferry-*.tar.gz    from 3.12 on one wheel for all (the stable ABI), tried with each Python
    nixl/                              kvferry-nixl for each Python: to be used where it is made, see docs/install.md
    images/                            archives that docker load and podman load take
    kvferry-*.cdx.json                 what an installation has, by CycloneDX
    notes.md, SHA256SUMS               the version's section of CHANGELOG.md; what sha256sum --check reads

An interpreter is python3.10 ... python3.13 on the PATH, or --python 3.10=FILE. One that is missing ends it before
anything is built, unless --partial, which goes on and names it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
STABLE_FROM = "3.12"  # the wheel of this Python stands for all later ones
STORE = "build/images"  # of deploy/image/build.sh, where no docker engine answers
LIMIT_S = 3600.0  # of each step
IMPORTS = "import kvferry._core, kvferry.daemon.cli.main"


class ReleaseError(Exception):
    """The release cannot be made; the message says why."""


@dataclass(frozen=True)
class Release:
    tag: str
    commit: str
    seconds: str  # when it was committed, since 1970: what is built has this time

    @property
    def version(self) -> str:
        return self.tag.removeprefix("v")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tag")
    parser.add_argument("--dest", type=Path, default=Path("dist"), metavar="FOLDER")
    parser.add_argument("--python", action="append", default=[], metavar="3.X=FILE")
    parser.add_argument("--images", nargs="+", default=["cpu", "front"], metavar="VARIANT")
    parser.add_argument("--no-images", action="store_true")
    parser.add_argument("--partial", action="store_true")
    parser.add_argument("--repository", type=Path, default=ROOT, metavar="FOLDER")
    args = parser.parse_args(argv)
    try:
        make(args)
    except (ReleaseError, OSError, subprocess.SubprocessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def make(args: argparse.Namespace) -> None:
    release = release_of(args.repository, args.tag)
    interpreters, missing = interpreters_of(args.python)
    if missing and not args.partial:
        raise ReleaseError(
            f"no Python {', '.join(missing)} is here; --python 3.X=FILE names one, --partial does without"
        )
    dest = (args.dest / release.tag).resolve()
    if dest.exists():
        raise ReleaseError(f"{dest} is there already; a release is made once")
    with tempfile.TemporaryDirectory(prefix="kvferry-release-") as folder:
        tree = Path(folder) / "tree"
        unpack(args.repository, release, tree)
        notes = notes_of(tree, release)
        made = Path(folder) / "made"
        (made / "nixl").mkdir(parents=True)
        (made / "notes.md").write_text(notes)
        build_wheels(tree, made, interpreters, release)
        try_wheels(tree, made, interpreters, release)
        write_sbom(tree, made, interpreters[newest(interpreters)], release)
        for variant in () if args.no_images else args.images:
            build_image(tree, made, variant, release)
        write_checksums(made)
        shutil.copytree(made, dest)
    for path in sorted(each for each in dest.rglob("*") if each.is_file()):
        print(f"{path.stat().st_size:>12,}  {path.relative_to(dest)}")
    if missing:
        print(f"not built: {', '.join(missing)} (no such Python here)")


def run(*command: str | Path, folder: Path | None = None, **environment: str) -> str:
    """The command's output. ReleaseError where it fails."""
    words = [str(word) for word in command]
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        words, cwd=folder, env=clean | environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ReleaseError(f"{' '.join(words[:6])} exited {done.returncode}:\n{said}")
    return done.stdout


# -- what is released ------------------------------------------------------------------------------------------------


def release_of(repository: Path, tag: str) -> Release:
    if not re.fullmatch(r"v\d+\.\d+\.\d+((a|b|rc)\d+)?", tag):
        raise ReleaseError(f"tag is {tag!r}; it must be vX.Y.Z, vX.Y.ZaN, vX.Y.ZbN or vX.Y.ZrcN")
    known = run("git", "-C", repository, "tag", "--list", tag).split()
    if not known:
        raise ReleaseError(f"tag {tag} is not there; git tag {tag} COMMIT makes it")
    commit, seconds = run("git", "-C", repository, "log", "-1", "--format=%H %ct", f"refs/tags/{tag}").split()
    return Release(tag, commit, seconds)


def unpack(repository: Path, release: Release, tree: Path) -> None:
    """The tag's files, whose version must be the tag's."""
    tree.mkdir()
    archive = tree.parent / "tree.tar"
    run("git", "-C", repository, "archive", "--output", archive, release.commit)
    run("tar", "-xf", archive, "-C", tree)
    found = re.search(r'^version = "(.+)"$', (tree / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None or found[1] != release.version:
        raise ReleaseError(
            f"version of pyproject.toml is {found and found[1]!r}; that of the tag is {release.version!r}"
        )


def notes_of(tree: Path, release: Release) -> str:
    """The version's section of CHANGELOG.md: the newest, with a day, not empty."""
    path = tree / "CHANGELOG.md"
    parts = re.split(r"^## (.*)\n", path.read_text() if path.exists() else "", flags=re.MULTILINE)
    head, text = (parts[1], parts[2].strip()) if len(parts) > 2 else ("", "")
    if not re.fullmatch(rf"{re.escape(release.version)} \(\d{{4}}-\d\d-\d\d\)", head):
        raise ReleaseError(f"CHANGELOG.md begins with {head!r}; it must be '{release.version} (YEAR-MONTH-DAY)'")
    if not text:
        raise ReleaseError(f"CHANGELOG.md says nothing about {release.version}")
    return f"# kvferry {release.version}\n\n{text}\n"


# -- interpreters ----------------------------------------------------------------------------------------------------


def interpreters_of(named: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Each version's interpreter, and the versions that have none here."""
    given = dict(each.partition("=")[::2] for each in named)
    if strange := sorted(set(given) - set(PYTHONS)):
        raise ReleaseError(f"--python {strange[0]}: must be one of {', '.join(PYTHONS)}")
    found = {version: given.get(version) or shutil.which(f"python{version}") for version in PYTHONS}
    there = {version: path for version, path in found.items() if path and version_of(path) == version}
    if wrong := sorted(set(given) - set(there)):
        raise ReleaseError(f"--python {wrong[0]}={given[wrong[0]]} is not Python {wrong[0]}")
    return there, [version for version in PYTHONS if version not in there]


def version_of(interpreter: str) -> str:
    try:
        return run(interpreter, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    except (ReleaseError, OSError):
        return ""


def newest(interpreters: dict[str, str]) -> str:
    return max(interpreters, key=PYTHONS.index)


def environment(interpreter: str, folder: Path) -> Path:
    """The interpreter of a new virtual environment."""
    run(interpreter, "-m", "venv", folder)
    return folder / "bin" / "python"


def install(python: Path, *words: str | Path) -> None:
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words)


# -- what is made ----------------------------------------------------------------------------------------------------


def build_wheels(tree: Path, made: Path, interpreters: dict[str, str], release: Release) -> None:
    stable = next((version for version in interpreters if PYTHONS.index(version) >= PYTHONS.index(STABLE_FROM)), None)
    for version, interpreter in interpreters.items():
        python = environment(interpreter, tree.parent / f"build-{version}")
        install(python, "-r", tree / "deploy" / "release" / "tools.txt")
        if PYTHONS.index(version) >= PYTHONS.index(STABLE_FROM) and version != stable:
            run(python, "deploy/wheels/repack_nixl.py", "--dest", made / "nixl", folder=tree)
            continue
        print(f"building with Python {version}", flush=True)
        settings = {"PYTHON": str(python), "SOURCE_DATE_EPOCH": release.seconds}
        once = {} if not list(made.glob("*.tar.gz")) else {"ONLY_WHEELS": "1"}
        run("deploy/wheels/build.sh", made, folder=tree, **settings, **once)
        for wheel in made.glob("kvferry_nixl-*.whl"):
            wheel.rename(made / "nixl" / wheel.name)


def try_wheels(tree: Path, made: Path, interpreters: dict[str, str], release: Release) -> None:
    """Each Python finds a wheel among them, which loads and has the version."""
    for version, interpreter in interpreters.items():
        python = environment(interpreter, tree.parent / f"tried-{version}")
        install(python, "--no-index", "--no-deps", "--find-links", made, f"kvferry=={release.version}")
        install(python, "--no-index", "--no-deps", "--find-links", made / "nixl", "kvferry-nixl")
        run(python, "-c", IMPORTS)
        said = run(python.parent / "kvferry", "--version")
        if not said.startswith(f"kvferry {release.version}, protocol "):
            raise ReleaseError(f"kvferry --version of Python {version} says {said!r}")
        print(f"Python {version}: {said}", end="", flush=True)


def write_sbom(tree: Path, made: Path, interpreter: str, release: Release) -> None:
    """The bill of all that `pip install kvferry` brings, with the newest Python."""
    python = environment(interpreter, tree.parent / "installed")
    install(python, "--find-links", made, "--find-links", made / "nixl", f"kvferry=={release.version}")
    run(python, "-m", "pip", "uninstall", "-q", "-y", "pip")  # the environment's own, no part of the installation
    tools = next(tree.parent.glob(f"build-{version_of(interpreter)}")) / "bin" / "cyclonedx-py"
    target = made / f"kvferry-{release.version}.cdx.json"
    words = ("--pyproject", tree / "pyproject.toml", "--output-reproducible", "--validate", "--output-file", target)
    run(tools, "environment", *words, python)


def build_image(tree: Path, made: Path, variant: str, release: Release) -> None:
    """An archive of an image: by docker where an engine answers, else by buildah, as deploy/image/build.sh has it."""
    print(f"building the image {variant}", flush=True)
    python = next(iter(sorted(tree.parent.glob("build-3.*")))) / "bin" / "python"
    run("deploy/image/fetch.sh", variant, folder=tree, PYTHON=str(python))
    run("deploy/image/build.sh", variant, folder=tree)
    name = "kvferry-front:cpu" if variant == "front" else f"kvferry:{variant}"
    archive = made / "images" / f"kvferry-{release.version}-{variant}.tar"
    archive.parent.mkdir(exist_ok=True)
    store = tree / STORE
    if store.exists():
        buildah = ("buildah", "--root", store / "root", "--runroot", store / "run", "--storage-driver", "vfs")
        run(*buildah, "push", f"localhost/{name}", f"docker-archive:{archive}:{name.split(':')[0]}:{release.version}")
    else:
        run("docker", "save", "--output", archive, name)


def write_checksums(made: Path) -> None:
    files = sorted(path for path in made.rglob("*") if path.is_file())
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(made)}\n" for path in files)
    (made / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    sys.exit(main())
