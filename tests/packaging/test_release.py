"""What is refused before a release is built, and what the changelog and the tag must say."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.release import release as made
from tests.packaging.wheels import ROOT

CHANGELOG = "# Changelog\n\n## 0.1.0 (2026-11-27)\n\n* New.\n\n## 0.0.9 (2026-11-01)\n\n* Old.\n"
RELEASE = made.Release("v0.1.0", "c" * 40, "1790000000")


def test_the_changelog_has_the_version_that_is_next() -> None:
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert made.notes_of(ROOT, made.Release(f"v{version[1]}", "", "")).startswith(f"# kvferry {version[1]}\n\n")


def test_notes_are_the_newest_section(tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    assert made.notes_of(tmp_path, RELEASE) == "# kvferry 0.1.0\n\n* New.\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "begins with ''"),
        (CHANGELOG.replace("0.1.0 (2026-11-27)", "0.1.0"), "it must be '0.1.0 "),
        (CHANGELOG.replace("0.1.0", "0.2.0"), "begins with '0.2.0 "),
        (CHANGELOG.replace("* New.\n", ""), "says nothing about 0.1.0"),
    ],
)
def test_a_changelog_that_does_not_speak_of_the_version(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "CHANGELOG.md").write_text(text)
    with pytest.raises(made.ReleaseError, match=re.escape(says)):
        made.notes_of(tmp_path, RELEASE)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two files, with a tag of its version and one of another."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "pyproject.toml").write_text('version = "0.1.0"\n')
    (folder / "CHANGELOG.md").write_text(CHANGELOG.replace("* New.", ""))
    author = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "a"), ("tag", "v0.1.0"), ("tag", "v0.2.0")):
        subprocess.run(["git", "-C", str(folder), *author, *words], check=True, timeout=60)
    return folder


@pytest.mark.parametrize(
    ("tag", "says"),
    [
        ("0.1.0", "tag is '0.1.0'; it must be vX.Y.Z"),
        ("v0.3.0", "tag v0.3.0 is not there"),
        ("v0.2.0", "version of pyproject.toml is '0.1.0'; that of the tag is '0.2.0'"),
        ("v0.1.0", "CHANGELOG.md says nothing about 0.1.0"),
    ],
)
def test_a_tag_that_cannot_be_released_is_refused_before_anything_is_built(
    tag: str, says: str, repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [tag, "--repository", str(repository), "--dest", str(tmp_path / "dist"), "--partial"]
    assert made.main(words) == 1
    assert says in capsys.readouterr().err and not (tmp_path / "dist").exists()


def test_a_python_that_is_missing_or_another_is_said(
    repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made.shutil, "which", lambda name: None)
    words = ["v0.1.0", "--repository", str(repository), "--dest", str(tmp_path / "dist")]
    own = f"{sys.version_info[0]}.{sys.version_info[1]}"
    others = [version for version in made.PYTHONS if version != own]
    assert made.main([*words, "--python", f"{own}={sys.executable}"]) == 1
    assert f"no Python {', '.join(others)} is here" in capsys.readouterr().err
    assert made.main([*words, "--python", f"{others[0]}={sys.executable}"]) == 1
    assert f"is not Python {others[0]}" in capsys.readouterr().err
    assert made.main([*words, "--python", "2.7=python"]) == 1
    assert "--python 2.7: must be one of" in capsys.readouterr().err


def test_checksums_are_those_of_every_file(tmp_path: Path) -> None:
    (tmp_path / "nixl").mkdir()
    (tmp_path / "a.whl").write_bytes(b"a")
    (tmp_path / "nixl" / "b.whl").write_bytes(b"b")
    made.write_checksums(tmp_path)
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert lines[0] == f"{hashlib.sha256(b'a').hexdigest()}  a.whl" and len(lines) == 2
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path, check=True, timeout=60)
