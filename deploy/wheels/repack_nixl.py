#!/usr/bin/env python3
"""Makes kvferry-nixl: NIXL for couriers, out of NVIDIA's wheel nixl-cu13 as it is on the package index.

    python deploy/wheels/repack_nixl.py [--python 3.11] [--version 1.5.1] [--dest build/nixl] [--wheel FILE]

NVIDIA's wheel asks for torch, which only its kernels for expert parallelism need, and brings eleven plugins for storage
and other networks. This one has NIXL's Python API and core, its UCX plugin, UCX, and the libraries that these are
linked to, byte for byte and in the places that they look for each other in; every licence text; no other file. It takes
pyelftools and wheel.
"""

from __future__ import annotations

import argparse
import io
import platform
import posixpath
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from wheel.wheelfile import WheelFile

SOURCE = "nixl-cu13"
MODULE, LIBRARIES, CORE = "nixl_cu13", "nixl_cu13.libs", ".nixl_cu13.mesonpy.libs"
PLUGIN = "libplugin_UCX.so"
# UCX opens these by itself. Its other modules are tools, or need what no kvferry host has (DOCA's GPU-side networking).
UCX_MODULES = ("libucm_cuda.so", "libuct_cma.so", "libuct_cuda.so")
UCX_MODULES += ("libuct_ib.so", "libuct_ib_efa.so", "libuct_ib_mlx5.so")
PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
NOTICE = """\
NIXL {version} for kvferry's couriers.

Taken unchanged from NVIDIA's wheel {source}: NIXL's Python API and core and its UCX plugin (Apache-2.0), UCX
(BSD-3-Clause), and the libraries that these are linked to; sboms/ lists all components of that wheel with their
licences. Left out: what needs torch (expert parallelism), and NIXL's plugins for storage and other networks.

That wheel also has licenses/NVIDIA-proprietary-LICENSE.txt, which forbids distribution and does not say of which of its
files it speaks. Whoever makes this wheel has theirs from NVIDIA; before it is published on an index, ask NVIDIA.
"""
METADATA = """\
Metadata-Version: 2.4
Name: kvferry-nixl
Version: {version}
Summary: NIXL without torch, for kvferry's couriers; made from NVIDIA's nixl-cu13
License-Expression: Apache-2.0 AND BSD-3-Clause
{licences}Requires-Python: >=3.10
Requires-Dist: numpy
Description-Content-Type: text/plain

{notice}"""


class RepackError(Exception):
    """NVIDIA's wheel is not as this script knows it."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="1.5.1")
    parser.add_argument("--python", default=f"{sys.version_info[0]}.{sys.version_info[1]}", metavar="MAJOR.MINOR")
    parser.add_argument("--dest", type=Path, default=Path("build/nixl"), metavar="FOLDER")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="NVIDIA's, where it is here already")
    args = parser.parse_args()
    args.dest.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            source = args.wheel or fetch(args.version, args.python, Path(folder))
            made = repack(source, args.dest)
    except (RepackError, subprocess.CalledProcessError) as error:
        print(f"repack_nixl: {error}", file=sys.stderr)
        return 1
    print(f"{made}: {made.stat().st_size / 1e6:.0f} MB, of {source.name}")
    return 0


def fetch(version: str, python: str, folder: Path) -> Path:
    """Downloads NVIDIA's wheel, for a Python that need not be the one that runs this."""
    machine = platform.machine()
    platforms = [word for name in PLATFORMS for word in ("--platform", f"{name}_{machine}")]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python, *platforms]
    subprocess.run([*command, "--dest", str(folder), f"{SOURCE}=={version}"], check=True)
    (found,) = folder.glob("*.whl")
    return found


def repack(source: Path, dest: Path) -> Path:
    """Writes kvferry-nixl's wheel beside others in `dest`; returns its path. RepackError."""
    _, version, tags = source.stem.split("-", 2)
    with zipfile.ZipFile(source) as given:
        kept = wanted(given)
        made = dest / f"kvferry_nixl-{version}-{tags}.whl"
        info = f"kvferry_nixl-{version}.dist-info"
        notice = NOTICE.format(version=version, source=source.name)
        theirs = f"nixl_cu13-{version}.dist-info/"
        folders = (theirs + "licenses/", theirs + "sboms/")
        papers = [name for name in given.namelist() if name.startswith(folders) and not name.endswith("/")]
        if not any(posixpath.basename(name) == "LICENSE" for name in papers):
            raise RepackError(f"{source.name} has no LICENSE; it must travel with what is taken")
        licences = [name.removeprefix(theirs + "licenses/") for name in papers if "/licenses/" in name]
        with WheelFile(made, "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("kvferry_nixl/__init__.py", f'"""NIXL {version} for kvferry\'s couriers."""\n')
            for name in kept:
                wheel.writestr(f"kvferry_nixl/{name}", given.read(name))
            for name in papers:
                wheel.writestr(info + "/" + name.removeprefix(theirs), given.read(name))
            wheel.writestr(f"{info}/licenses/NOTICE", notice)
            fields = "".join(f"License-File: {name}\n" for name in [*licences, "NOTICE"])
            wheel.writestr(f"{info}/METADATA", METADATA.format(version=version, licences=fields, notice=notice))
            tagged = "".join(f"Tag: {tag}\n" for tag in expanded(tags))
            wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: kvferry\nRoot-Is-Purelib: false\n{tagged}")
    return made


def expanded(tags: str) -> Iterable[str]:
    """The tags of a wheel's name, one by one."""
    pythons, abis, platforms = tags.split("-")
    return (f"{p}-{a}-{f}" for p in pythons.split(".") for a in abis.split(".") for f in platforms.split("."))


def wanted(given: zipfile.ZipFile) -> list[str]:
    """The files to be taken: what couriers import and UCX opens, and what that is linked to."""
    names = [name for name in given.namelist() if not name.endswith("/")]
    libraries = {posixpath.basename(name): name for name in names if posixpath.dirname(name) in (LIBRARIES, CORE)}
    modules = [f"{LIBRARIES}/ucx/{name}" for name in UCX_MODULES]
    begin = [name for name in names if name.startswith(f"{MODULE}/")]
    begin += [name for name in names if posixpath.basename(name) == PLUGIN]
    begin += [name for name in names if name.split(".so")[0] + ".so" in modules]
    if not any(PLUGIN in name for name in begin) or not any("_bindings" in name for name in begin):
        raise RepackError(f"no {MODULE}/_bindings or no {PLUGIN} in {given.filename}: another layout than 1.5's")
    found = dict.fromkeys(begin)
    for name in (waiting := list(begin)):
        for needed in linked(given.read(name)):
            if needed in libraries and libraries[needed] not in found:
                found[libraries[needed]] = None
                waiting.append(libraries[needed])
    return sorted(found)


def linked(content: bytes) -> list[str]:
    """The libraries that an ELF file names; none, where it is another kind of file."""
    try:
        dynamic = ELFFile(io.BytesIO(content)).get_section_by_name(".dynamic")
    except ELFError:
        return []
    if not isinstance(dynamic, DynamicSection):
        return []
    return [tag.needed for tag in dynamic.iter_tags("DT_NEEDED")]


if __name__ == "__main__":
    sys.exit(main())
