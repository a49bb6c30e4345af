"""Makes kvferry's entry points known where it was not installed by pip: entry_point.py SITE_PACKAGES, in the
repository's root. SGLang loads its plugins by them, and checks that they resolve."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import tomllib

GROUP = "sglang.srt.plugins"


def main(site: Path) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    folder = site / f"kvferry-{project['version']}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvferry\nVersion: {project['version']}\n")
    points = project["entry-points"][GROUP]
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    for point in entry_points(group=GROUP, name="kvferry"):
        print(f"{point.value}: {point.load()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
