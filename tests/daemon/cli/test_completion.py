"""`kvferry completion`: what a shell completes with the script."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.daemon.cli.main import COMMANDS
from tests.support.commands import kvferry


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "kvferry.bash"
    path.write_text(printed("bash"))
    return path


def printed(shell: str) -> str:
    done = kvferry("completion", shell)
    assert done.returncode == 0
    return done.stdout


def completed(script: Path, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f'"{word}"' for word in ("kvferry", *words))
    program = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; "
        '$(complete -p kvferry | sed "s/.*-F \\([^ ]*\\).*/\\1/"); printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_bash_completes_commands_flags_and_choices(script: Path) -> None:
    assert completed(script, "") >= set(COMMANDS)
    assert completed(script, "co") == {"config", "completion"}
    assert completed(script, "serve", "--host") == {"--host-bytes", "--host-dir"}
    assert completed(script, "front", "--vllm") == {"--vllm-prefill", "--vllm-decode"}
    assert completed(script, "stats", "--format", "") == {"table", "json"}
    assert completed(script, "config", "") == {"show", "schema"}


def test_zsh_takes_the_script(tmp_path: Path) -> None:
    text = printed("zsh")
    assert text.startswith("#compdef kvferry\n")
    assert all(f"    {name}:'" in text for name in COMMANDS)
    if (zsh := shutil.which("zsh")) is not None:
        (tmp_path / "_kvferry").write_text(text)
        subprocess.run([zsh, "-n", tmp_path / "_kvferry"], timeout=60, check=True)
