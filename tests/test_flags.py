"""Flags: the values that they take, and how they refuse the rest."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import pytest

from kvferry import flags
from kvferry.client.engine_pools import parse_devices
from kvferry.daemon.cli.main import main
from kvferry.workers.main import add_arguments

Parse = Callable[[str], object]
twice = flags.parsed(lambda text: 2 * int(text, 16))


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (flags.whole, "1", 1),
        (flags.whole_or_0, "0", 0),
        (flags.at_least(7), "7", 7),
        (flags.not_negative, "0", 0.0),
        (flags.positive, "1e-3", 0.001),
        (twice, "ff", 510),
        (flags.devices, "cpu", ()),
        (flags.devices, "cuda", (0,)),
        (flags.devices, "cuda:3, cuda", (3, 0)),
        (parse_devices, "cuda", (0,)),
        (flags.device, "cuda", "cuda:0"),
        (flags.device, "cuda:1", "cuda:1"),
    ],
)
def test_taken(parse: Parse, text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        *(
            (flags.whole, text, "must be a whole number >= 1, got")
            for text in ("0", "-1", "1.5", "", " 1", "1_0", "²", "٣", 5000 * "1")
        ),
        (flags.whole_or_0, "-1", "must be a whole number >= 0, got '-1'"),
        (flags.at_least(7), "6", "must be a whole number >= 7, got '6'"),
        *((flags.not_negative, text, "must be a number >= 0, got") for text in ("-1", "nan", "inf", "x", "")),
        (flags.positive, "0.0", "must be > 0, got '0.0'"),
        (flags.positive, "-2", "must be a number >= 0, got '-2'"),
        (twice, "z", "invalid literal"),
    ],
)
def test_refused(parse: Parse, text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--clock", "0"), "argument --clock: must be > 0, got '0'"),
        (("--clock", "1001"), "argument --clock: must be at most 1000, got '1001'"),
        (("--connect-timeout", "0"), "argument --connect-timeout: must be > 0, got '0'"),
        (("--grace", "nan"), "argument --grace: must be a number >= 0, got 'nan'"),
        (("--synthetic-decode-us", "inf"), "argument --synthetic-decode-us: must be a number >= 0, got 'inf'"),
        (("--ranks", "0"), "argument --ranks: must be a whole number >= 1, got '0'"),
    ],
)
def test_a_worker_refuses(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["decode", "--socket", "s", "--listen", "x:0", "--synthetic", *words])
    assert message in capsys.readouterr().err


def test_a_synthetic_worker_has_no_pages_that_only_an_engine_can_look_into(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["worker", "decode", "--synthetic", "--socket", "/nowhere/d.sock", "--listen", "127.0.0.1:0"]
    shape = ["--synthetic-tensors", "1", "--synthetic-further", "layers=1,head_dim=4,tensors=2"]
    assert main([*words, *shape, "--synthetic-layout", "engine-hnd"]) == 2
    assert "--synthetic-further has tensors=2, and --synthetic-tensors is 1" in capsys.readouterr().err
