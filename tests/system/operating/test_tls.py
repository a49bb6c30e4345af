"""Mutual TLS between real daemons: who is let in, who is not, and certificates that are replaced under load."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_metrics

from kvferry.channels import ClientTls, open_channel
from kvferry.daemon.cli import main as cli
from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.front.engines import EngineLink, ServedModel
from kvferry.front.lookup import SKIP_AFTER_FAILURE_S, LookupCounts, Lookups
from kvferry.proto import cache_pb2, peer_pb2
from kvferry.proto.cache_pb2_grpc import CacheStub
from tests.support.certificates import Authority, Folder
from tests.support.engines import Engines, courier_pids, settled, stats
from tests.support.stacks import SmallSystem, running_stack

pytestmark = pytest.mark.timeout(120)

DECODE = "spiffe://cluster/kvferry/decode"
PREFILL_NAMES = ("prefill.example.org", "127.0.0.1")  # it is dialled by its address
SERVICE = peer_pb2.DESCRIPTOR.services_by_name["Peer"]


@dataclass
class Pair:
    """A prefill and a decode replica over mutual TLS."""

    stack: Stack
    prefill: Replica
    decode: Replica  # its statistics are asked for over the Unix socket, which is never TLS
    decode_address: str
    ca: Authority
    prefill_files: Folder
    decode_files: Folder
    path: Path
    clients: int = 0

    def client(self, authority: Authority, *names: str) -> ClientTls:
        """With a certificate of `authority` for `names`; it believes the daemons' own."""
        self.clients += 1
        made = Folder(self.path / f"client-{self.clients}").put(authority.sign(names), self.ca)
        return ClientTls(made.ca, made.cert, made.key)

    def log(self, replica: Replica) -> str:
        return replica.daemon.tail(400)

    def peer(self) -> cache_pb2.PeerStats:
        return stats(self.decode).peers[0]

    def break_session(self) -> None:
        """The couriers' death ends it; the decode daemon dials again, with the files as they are."""
        for pid in courier_pids(self.decode.daemon.popen.pid):
            os.kill(pid, signal.SIGKILL)

    def await_peer(self, what: Callable[[cache_pb2.PeerStats], bool]) -> None:
        deadline = time.monotonic() + 20
        while not what(peer := self.peer()):
            assert time.monotonic() < deadline, peer
            time.sleep(0.05)

    def serves(self) -> None:
        with Engines(self.prefill, self.decode) as engines:
            turn = engines.turn([*os.urandom(100)], 4)
        assert turn.error is None and turn.delta_pages > 0, turn


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path, ca = tmp_path_factory.mktemp("tls"), Authority()
    prefill_files = Folder(path / "prefill").put(ca.sign(PREFILL_NAMES), ca)
    decode_files = Folder(path / "decode").put(ca.sign([DECODE, "127.0.0.1"]), ca)
    spec = SmallSystem(
        page_size=16,
        prefill_flags=[*prefill_files.flags, "--tls-peer", f"{DECODE},other.example.org"],
        decode_flags=[*decode_files.flags, "--tls-peer", "127.0.0.1"],
    )
    with running_stack() as stack:
        (prefill,), (decode,) = start_replicas(stack, spec)
        by_socket = dataclasses.replace(decode, daemon_address=f"unix:{decode.socket}")
        found = Pair(stack, prefill, by_socket, decode.daemon_address, ca, prefill_files, decode_files, path)
        found.await_peer(lambda peer: peer.state == "up")
        yield found
        settled(found.decode)


def call_peer(address: str, tls: ClientTls | None, method: str) -> grpc.RpcError:
    """How a call of the Peer service ends that says nothing after its beginning."""
    with open_channel(address, tls) as channel:
        call = channel.stream_stream(f"/{SERVICE.full_name}/{method}")
        with pytest.raises(grpc.RpcError) as ended:
            list(call(iter(()), timeout=5))
    return ended.value


def test_a_transfer_over_tls_and_the_certificates_end_in_the_metrics(pair: Pair) -> None:
    pair.serves()
    with open_channel(pair.prefill.daemon_address, pair.client(pair.ca, "anybody")) as channel:
        reply = fetch(channel)  # any certificate of the authority may read statistics
        assert not CacheStub(channel).Lookup(cache_pb2.LookupRequest(namespace_id=bytes(32))).matched_tokens
    assert time.time() + 6 * 86400 < reply.tls.expires < time.time() + 8 * 86400
    metrics = open_metrics(reply.metrics)
    assert metrics["kvferry_tls_certificate_expiry_timestamp_seconds"] == reply.tls.expires
    assert metrics["kvferry_tls_files_rejected"] == 0


def open_metrics(address: str) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {sample.name: sample.value for family in parse_metrics(text) for sample in family.samples}


def test_who_has_no_certificate_of_the_authority_is_refused(pair: Pair) -> None:
    stranger = pair.client(Authority("stranger"), DECODE)  # the right name, of the wrong authority
    elsewhere = Folder(pair.path / "elsewhere").put(pair.ca.sign([DECODE]), Authority("stranger"))
    for tls in (None, stranger, ClientTls(elsewhere.ca, elsewhere.cert, elsewhere.key)):
        for address in (pair.prefill.daemon_address, pair.decode_address):
            with open_channel(address, tls) as channel, pytest.raises(grpc.RpcError) as refused:
                fetch(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert call_peer(pair.prefill.daemon_address, tls, "Session").code() is grpc.StatusCode.UNAVAILABLE
    no_certificate = grpc.ssl_channel_credentials(pair.ca.pem)
    with grpc.secure_channel(pair.prefill.daemon_address, no_certificate) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            fetch(channel)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


def test_every_method_of_sessions_needs_a_listed_name(pair: Pair) -> None:
    address = pair.prefill.daemon_address
    assert SERVICE.methods
    for method in SERVICE.methods:
        for names in (["prefill.example.org", "spiffe://cluster/kvferry/other"], [], [f"{DECODE}/more"]):
            refused = call_peer(address, pair.client(pair.ca, *names), method.name)
            assert refused.code() is grpc.StatusCode.PERMISSION_DENIED
            held = ", ".join(names) or "none"
            assert refused.details() == (
                f"the certificate's alternative names are {held}; "
                "none is among the --tls-peer (tls_peers) of 'prefill-0'"
            )
        for name in (DECODE, "OTHER.example.org"):
            taken = call_peer(address, pair.client(pair.ca, name), method.name)
            assert taken.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "first message must be hello" in str(taken.details())


def test_a_decode_daemon_whose_name_is_not_listed_is_told_so_and_is_back_with_another_certificate(pair: Pair) -> None:
    pair.decode_files.put(pair.ca.sign(["spiffe://cluster/kvferry/unknown", "127.0.0.1"]), pair.ca)
    pair.break_session()
    pair.await_peer(lambda peer: "alternative names are" in peer.error)
    error = pair.peer().error
    assert "prefill daemon 'prefill-0'" in error and "refuses the session" in error
    assert "spiffe://cluster/kvferry/unknown, 127.0.0.1; none is among the --tls-peer" in error
    pair.decode_files.put(pair.ca.sign([DECODE, "127.0.0.1"]), pair.ca)
    pair.await_peer(lambda peer: peer.state == "up")
    pair.serves()


def test_a_prefill_daemon_under_another_name_or_authority_gets_no_session(pair: Pair) -> None:
    pair.prefill_files.put(pair.ca.sign(["127.0.0.2", "prefill.example.org"]), pair.ca)
    pair.break_session()
    pair.await_peer(lambda peer: "Hostname Verification" in peer.error)
    pair.prefill_files.put(Authority("stranger").sign(PREFILL_NAMES), pair.ca)
    pair.await_peer(lambda peer: "CERTIFICATE_VERIFY_FAILED" in peer.error)
    pair.prefill_files.put(pair.ca.sign(PREFILL_NAMES), pair.ca)
    pair.await_peer(lambda peer: peer.state == "up")
    pair.serves()


def test_a_front_ends_look_ups_take_new_certificates(pair: Pair) -> None:
    clock = [0.0]
    files = Folder(pair.path / "front").put(Authority("stranger").sign(["front"]), pair.ca)
    link = cast(EngineLink, SimpleNamespace(facts=SimpleNamespace(daemon_address=pair.decode_address)))
    served = cast(ServedModel, SimpleNamespace(namespace_id=bytes(32), page_size=16, root_digest=bytes(32)))

    async def story() -> LookupCounts:
        lookups = Lookups(deadline_s=5.0, clock=lambda: clock[0], tls=ClientTls(files.ca, files.cert, files.key))
        assert await lookups.ask([link], served, list(range(32))) == [None]
        assert await lookups.ask([link], served, list(range(32))) == [None]  # not asked again so soon
        files.put(pair.ca.sign(["front"]), pair.ca)
        clock[0] += 2 * SKIP_AFTER_FAILURE_S
        (found,) = await lookups.ask([link], served, list(range(32)))
        assert found is not None and found.free_pages > 0
        await lookups.close()
        return lookups.counts

    assert asyncio.run(story()) == LookupCounts(asked=2, failed=1, skipped=1)


def test_certificates_are_replaced_while_the_load_goes_on(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    old_client = pair.client(pair.ca, DECODE)
    second = Authority("second")
    errors: list[object] = []
    turns = 0
    calm = threading.Event()

    def load() -> None:
        nonlocal turns
        with Engines(pair.prefill, pair.decode) as engines:
            while not calm.is_set():
                turn = engines.turn([turns, *os.urandom(63)], 4)
                turns += 1
                if turn.error is not None or len(turn.output) != 4:
                    errors.append(turn)

    client = threading.Thread(target=load, name="load")
    client.start()
    try:
        # 1: both authorities are believed. 2: certificates of the second. 3: the first is believed no more.
        everything = ((pair.prefill_files, PREFILL_NAMES), (pair.decode_files, (DECODE, "127.0.0.1")))
        for files, names in everything:
            files.put(pair.ca.sign(names), pair.ca, second)
        both = Folder(pair.path / "both").put(second.sign([DECODE]), pair.ca, second)
        words = ["stats", pair.prefill.daemon_address, "--format", "json", *both.flags]
        assert cli.main(words) == 0  # who comes with one of the second is let in
        for files, names in everything:
            files.put(second.sign(names, ends=5), pair.ca, second)
        assert call_peer(pair.prefill.daemon_address, both_of(both), "Session").code() is not None
        for files, names in everything:
            files.put(second.sign(names, ends=5), second)
        with open_channel(pair.prefill.daemon_address, old_client) as channel, pytest.raises(grpc.RpcError):
            fetch(channel)
        assert cli.main(words) == 0
        assert cli.main(["health", pair.prefill.daemon_address, *both.flags]) == 0
        assert cli.main(["top", pair.prefill.daemon_address, "--frames", "1", *both.flags]) == 0
        assert cli.main(["stats", pair.prefill.daemon_address]) == 2  # without TLS
        # Broken files: the certificate in use stays.
        pair.prefill_files.put(dataclasses.replace(second.sign(PREFILL_NAMES), key=b"broken"), second)
        assert cli.main(words) == 0
        assert "in use: --tls-key" in pair.log(pair.prefill)
        before = turns
        while turns < before + 2 and client.is_alive():
            time.sleep(0.02)
    finally:
        calm.set()
        client.join()
    assert not errors and turns >= 3
    with open_channel(pair.prefill.daemon_address, both_of(both)) as channel:
        reply = fetch(channel)
    assert "is no private key in PEM" in reply.tls.broken
    assert open_metrics(reply.metrics)["kvferry_tls_files_rejected"] == 1
    assert abs(reply.tls.expires - time.time() - 5 * 86400) < 600
    # A new session is made with what is in use now, though the files of one side are still broken.
    pair.break_session()
    pair.await_peer(lambda peer: peer.state != "up")
    pair.await_peer(lambda peer: peer.state == "up")
    pair.serves()
    assert pair.prefill.daemon.popen.poll() is None and pair.decode.daemon.popen.poll() is None
    for files, names in everything:
        files.put(pair.ca.sign(names), pair.ca)
    capsys.readouterr()


def both_of(files: Folder) -> ClientTls:
    return ClientTls(files.ca, files.cert, files.key)


def test_a_request_cannot_name_an_address(pair: Pair) -> None:
    """A daemon dials whom it was told of in its settings, whatever a request says."""
    with socket.create_server(("127.0.0.1", 0)) as tempting:
        tempting.settimeout(0.5)
        address = f"127.0.0.1:{tempting.getsockname()[1]}"
        with Engines(dataclasses.replace(pair.prefill, name=address), pair.decode) as engines:
            turn = engines.turn(list(range(64)), 4, deadline_s=5)
        assert turn.code is grpc.StatusCode.FAILED_PRECONDITION
        assert f"prefill is '{address}'; the configured peers are: prefill-0" in turn.details
        with pytest.raises(TimeoutError):
            tempting.accept()
