"""Who takes no part in look-ups: names and namespaces, as flags, in YAML, and what is none."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from kvferry.daemon.config.kinds import MAX_CLOSED
from kvferry.daemon.config.model import DaemonConfig, closed_namespaces

NAMESPACE = "AB" * 32


def config(**settings: Any) -> DaemonConfig:
    return DaemonConfig.model_validate({"role": "decode", **settings})


def test_nobody_is_excluded_by_default() -> None:
    plain = config()
    assert (plain.look_ups, plain.closed_peers, plain.closed_namespaces) == ("on", (), ())


@pytest.mark.parametrize("given", ["p0, p1,p0", ["p0", "p1"], ["p0,p1"]])
def test_names_are_a_list_or_have_commas_between(given: object) -> None:
    assert config(closed_peers=given).closed_peers == ("p0", "p1")


def test_namespaces_are_compared_as_bytes() -> None:
    assert closed_namespaces(config(closed_namespaces=NAMESPACE)) == {b"\xab" * 32}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"closed_peers": "a b"}, "name 'a b' must be 1 to 128 letters"),
        ({"closed_peers": 5}, "name 5 is no list of names"),
        ({"closed_namespaces": NAMESPACE[:-1]}, "must be 64 hexadecimal digits"),
        ({"closed_namespaces": "default"}, "must be 64 hexadecimal digits"),
        ({"closed_peers": [f"p{i}" for i in range(MAX_CLOSED + 1)]}, "257 names are named; the bound is 256"),
        ({"look_ups": "sometimes"}, "'on' or 'off'"),
    ],
)
def test_what_is_none_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        config(**settings)


def test_as_many_as_the_bound_are_taken() -> None:
    assert len(config(closed_peers=[f"p{i}" for i in range(MAX_CLOSED)]).closed_peers) == MAX_CLOSED
