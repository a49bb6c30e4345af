"""Files of secrets: what is in them, their changes, and that nothing tells a secret."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvferry.secret_files import MAX_KEYS, ApiKeys, BearerToken, SecretFileError

KEY, OTHER = "sk-first-key", "sk-second-key"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def written(path: Path, text: str) -> Path:
    """A new file in the place of the old one, as mounted secrets change."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)
    return path


def test_each_key_of_the_file_is_known_and_nothing_else(tmp_path: Path) -> None:
    keys = ApiKeys(str(written(tmp_path / "keys", f"# of teams\n{KEY}\n\n  {OTHER}\r\n")))
    assert keys.hold(f"Bearer {KEY}") and keys.hold(f"bearer {OTHER}")
    for wrong in ("", "Bearer ", KEY, f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer # of teams"):
        assert not keys.hold(wrong)


def test_a_change_counts_within_a_second_and_one_that_cannot_be_read_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    path = written(tmp_path / "keys", KEY)
    keys = ApiKeys(str(path), clock)
    written(path, OTHER)
    assert keys.hold(f"Bearer {KEY}")  # not looked at yet
    clock.now = 1.0
    assert keys.hold(f"Bearer {OTHER}") and not keys.hold(f"Bearer {KEY}")
    with caplog.at_level(logging.INFO):
        for now, text in ((2.0, "short"), (3.0, ""), (4.0, f"{KEY} {KEY}")):
            written(path, text)
            clock.now = now
            assert keys.hold(f"Bearer {OTHER}")
        path.unlink()
        clock.now = 5.0
        assert keys.hold(f"Bearer {OTHER}")
    errors = [record.getMessage() for record in caplog.records]
    assert len(errors) == 4 and all("stays in use" in error and KEY not in error for error in errors)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has 0 keys; it must have 1 to 1000"),
        ("seven77", "line 1 has 7 characters; it must have 8 to 512"),
        ("# x\nwith a space", "line 2 must be printable ASCII without spaces"),
        ("with-ümlaut", "line 1 must be printable ASCII"),
        ("\n".join(f"number-{i}" for i in range(MAX_KEYS + 1)), "has 1001 keys"),
        ("x" * 513, "line 1 has 513 characters"),
    ],
)
def test_a_file_that_is_no_list_of_keys(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(SecretFileError, match=says) as caught:
        ApiKeys(str(written(tmp_path / "keys", text)))
    assert not text or text not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SecretFileError, match="absent: No such file"):
        ApiKeys(str(tmp_path / "absent"))


def test_a_token_is_one_line(tmp_path: Path) -> None:
    clock = Clock()
    path = written(tmp_path / "token", KEY + "\n")
    token = BearerToken(str(path), clock)
    assert token.header == f"Bearer {KEY}"
    written(path, OTHER)
    clock.now = 1.0
    assert token.header == f"Bearer {OTHER}"
    with pytest.raises(SecretFileError, match="has 2 tokens; it must have 1"):
        BearerToken(str(written(path, f"{KEY}\n{OTHER}")))
