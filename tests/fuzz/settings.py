"""Settings of a daemon: a YAML file, KVFERRY_* variables and flags, of any content, from parser to settings.

A frame of tag 0 is the file, of tag 1 a variable (NAME=VALUE), of tag 2 a word of the command line. What is taken can
be shown, and is the same when it is read again; what is not is a ConfigError, whose message has a bound.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
from random import Random

from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.sources import add_arguments, load, shown
from kvferry.daemon.config.values import ConfigError
from tests.fuzz.frames import Frame, bytes_changed, change, join, split
from tests.fuzz.stage import FOLDER, Finding

FILE, VARIABLE, WORD = range(3)
PATH = os.path.join(FOLDER, "settings.yaml")
MAX_MESSAGE_CHARS = 1 << 14
_PARSER = argparse.ArgumentParser(prog="kvferry serve", allow_abbrev=False)
add_arguments(_PARSER)


def one_input(data: bytes) -> None:
    words = ["--config", PATH]
    environ: dict[str, str] = {}
    text = b""
    for frame in split(data):
        if frame.tag % 3 == FILE:
            text += frame.body
        elif frame.tag % 3 == VARIABLE:
            name, _, value = frame.body.decode(errors="replace").replace("\0", "").partition("=")
            environ[name] = value
        else:
            words.append(frame.body.decode(errors="replace").replace("\0", ""))
    with open(PATH, "wb") as file:
        file.write(text)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            args = _PARSER.parse_args(words)
    except SystemExit:
        return
    if getattr(args, "config", PATH) != PATH:
        return  # a file that is not the input's
    try:
        config = load(args, environ).config
    except ConfigError as error:
        if len(str(error)) > MAX_MESSAGE_CHARS:
            raise Finding(f"a message of {len(str(error))} characters") from error
        return
    again = DaemonConfig.model_validate({name: shown(name, getattr(config, name)) for name in _written(config)})
    if again != config:
        raise Finding(f"shown and read again it is {again}, not {config}")


def _written(config: DaemonConfig) -> list[str]:
    return [name for name in DaemonConfig.model_fields if shown(name, getattr(config, name)) != ""]


_TOKENS = (
    *DaemonConfig.model_fields,
    *(
        "8GiB",
        "1e999",
        "-1",
        "0",
        "²",
        "٣",
        "nan",
        "inf",
        "on",
        "off",
        "true",
        "null",
        "~",
        "[]",
        "{}",
        "&a",
        "*a",
        "!!int",
    ),
    *("127.0.0.1:0", "[::1]:7", "0.0.0.0:80", "a=b:1", "p=127.0.0.1:1", "default=1:2", "cuda:0", "x" * 200, "9" * 5000),
    *("- a\n", "\n", ": ", "'", '"', "\\0", "? ", "<<: *a\n", "---\n", "\t"),
)


def _change_body(frame: Frame, chance: Random) -> Frame:
    if chance.random() < 0.3:
        return Frame(frame.tag, bytes_changed(frame.body, chance))
    at = chance.randint(0, len(frame.body))
    token = chance.choice(_TOKENS).encode()
    if chance.random() < 0.5 and b":" in frame.body[:at]:
        at = frame.body.rindex(b":", 0, at) + 1
        end = frame.body.find(b"\n", at)
        return Frame(frame.tag, frame.body[:at] + b" " + token + (frame.body[end:] if end >= 0 else b""))
    return Frame(frame.tag, frame.body[:at] + token + frame.body[at:])


def mutate(data: bytes, most: int, seed: int) -> bytes:
    return change(data, most, Random(seed), SEEDS, _change_body)


def _seeds() -> list[bytes]:
    def told(file: str, variables: str = "", words: str = "") -> bytes:
        frames = [Frame(FILE, file.encode())]
        frames += [Frame(VARIABLE, each.encode()) for each in variables.split()]
        return join(frames + [Frame(WORD, each.encode()) for each in words.split()])

    quota = "default: '1:2'"
    return [
        told(
            "role: decode\nname: d0\npool_bytes: 64MiB\npeers:\n  p: 127.0.0.1:7071\n", "KVFERRY_SLOTS=8", "--queue 9"
        ),
        told("role: prefill\nlisten: 127.0.0.1:0\nmetrics: off\nucx_ports: 2000-2010\ndevice: 'cuda:0,cuda:1'\n"),
        told(f"role: both\nhost_bytes: 1GiB\nhost_dir: /x\nquotas: {{{quota}}}\novercommit: 2.5\ninsecure: true\n"),
        told("", "KVFERRY_ROLE=decode KVFERRY_PEERS=p=[::1]:1,q=h:2 KVFERRY_REUSE=off", "--checksums on --peer z=a:1"),
        told("a: &a [x, x, x]\nb: &b [*a, *a, *a]\npeers: [*b, *b, *b]\nrole: decode\n"),
    ]


SEEDS = _seeds()
