"""Checksums of parts: both daemons' Hellos say whether there are any."""

from __future__ import annotations

import logging

import pytest

from kvferry.daemon.peers.handshake import PART_SUMS, part_checksums
from kvferry.proto import peer_pb2 as peer


def hello(name: str, wants: bool, able: bool = True) -> peer.PeerHello:
    return peer.PeerHello(daemon=name, checksums=wants, capabilities=["aux", *([PART_SUMS] if able else [])])


@pytest.mark.parametrize(("one", "other"), [(False, False), (True, False), (False, True), (True, True)])
def test_one_that_wants_them_is_enough(one: bool, other: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert part_checksums(hello("d", one), hello("p", other)) is (one or other)
    assert part_checksums(hello("p", other), hello("d", one)) is (one or other), "both ends come to the same"
    assert not caplog.records


def test_one_that_cannot_make_them_is_named_and_done_without(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert part_checksums(hello("d", True), hello("old", False, able=False)) is False
    assert "parts between d and old have no checksums, though --checksums is on: old cannot make them" in caplog.text
    caplog.clear()
    assert part_checksums(hello("d", False), hello("old", False, able=False)) is False
    assert not caplog.records, "nobody wants them"
