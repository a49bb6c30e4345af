"""What `kvferry serve` refuses, by name, value and bound."""

from __future__ import annotations

import argparse

import pytest

from kvferry.daemon import serve
from kvferry.daemon.config import ConfigError, DaemonConfig, parse_address, parse_size


def config_of(*words: str) -> DaemonConfig:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.config_of(parser.parse_args(words))


@pytest.mark.parametrize(
    ("text", "size"), [("4096", 4096), ("64MiB", 64 << 20), ("8 GiB", 8 << 30), ("2GB", 2 * 10**9), ("1kib", 1024)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5GiB", "GiB", "8 parsecs"])
def test_sizes_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_size(text)


def test_addresses() -> None:
    assert parse_address("127.0.0.1:7070") == ("127.0.0.1", 7070)
    assert parse_address("[::1]:7070") == ("::1", 7070)
    for text in ("7070", "host", "host:", ":7070", "host:70700", "host:x"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_address(text)


def test_defaults_follow_the_role() -> None:
    assert config_of("--role", "decode").listen == "127.0.0.1:7070"
    assert config_of("--role", "prefill").listen == "127.0.0.1:7071"
    both = config_of("--role", "both", "--peer", "p=127.0.0.1:1", "--peer", "q=127.0.0.1:2")
    assert both.roles == ("decode", "prefill")
    assert both.peers == {"p": "127.0.0.1:1", "q": "127.0.0.1:2"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "0.0.0.0:7070"], "needs --insecure"),
        (["--listen", "nowhere"], "HOST:PORT"),
        (["--peer", "p0"], "NAME=HOST:PORT"),
        (["--peer", "p=127.0.0.1:1", "--peer", "p=127.0.0.1:2"], "twice"),
        (["--peer", "p/0=127.0.0.1:1"], "'p/0' must be"),
        (["--name", ""], None),
        (["--name", "x" * 200], "must be 1 to 128"),
        (["--page-size", "0"], "page_size is 0; it must be 1 to 4096"),
        (["--slots", "5000"], "slots is 5000; it must be 1 to 1024"),
        (["--ranks", "0"], "ranks is 0; it must be 1 to 64"),
        (["--ranks", "65"], "ranks is 65; it must be 1 to 64"),
        (["--ranks", "64", "--slots", "17"], "slots is 17 of each of 64 ranks; together they must be 1024 at most"),
        (["--slot-bytes", "100"], "slot_bytes is 100"),
        (["--pool-bytes", "0"], "pool_bytes is 0"),
        (["--transfer-seconds", "0"], "transfer_seconds is 0.0"),
        (["--ucx-ports", "80-90"], "--ucx-ports '80-90'"),
    ],
)
def test_refusals_name_field_value_and_bound(words: list[str], message: str | None) -> None:
    if message is None:
        assert config_of("--role", "decode", *words).name == "decode"  # empty: the default
        return
    with pytest.raises(ConfigError) as refused:
        config_of("--role", "decode", *words)
    assert message in str(refused.value)
