"""Certificates of a daemon: what is taken, what is refused by name, and what happens when the files are replaced."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from kvferry.channels import ChannelError, ClientTls, open_channel
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.tls_names import MAX_TLS_NAME_CHARS, MAX_TLS_PEERS, parse_tls_peers
from kvferry.daemon.config.values import ConfigError
from kvferry.daemon.peers.dialing import dial_plainly, dialling
from kvferry.daemon.peers.discovery import prefill_name
from kvferry.daemon.peers.gate import names_in
from kvferry.daemon.peers.tls import MAX_FILE_BYTES, TlsFiles, TlsWatch
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2
from tests.support.certificates import Authority, Folder, Signed

CA = Authority()
FILES = {"tls_cert": "/c", "tls_key": "/k", "tls_ca": "/a"}


def folder(path: Path, *names: str) -> Folder:
    return Folder(path).put(CA.sign(names or ("prefill",)), CA)


def watch(made: Folder) -> TlsWatch:
    return TlsWatch(TlsFiles(made.cert, made.key, made.ca))


# -- names and settings ------------------------------------------------------------------------------------------------


def test_names_of_peers_are_compared_exactly_and_once() -> None:
    given = ["Decode.Example.org, spiffe://Cluster/ns/kvferry", "[2001:DB8:0::1]", "decode.example.org"]
    assert parse_tls_peers(given) == ("decode.example.org", "spiffe://Cluster/ns/kvferry", "2001:db8::1")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([f"d{i}" for i in range(MAX_TLS_PEERS + 1)], f"{MAX_TLS_PEERS + 1} names are given; the bound is"),
        ("spiffe://" + "x" * MAX_TLS_NAME_CHARS, f"characters; the bound is {MAX_TLS_NAME_CHARS}"),
        ("two words", "'two words' is no name of DNS"),
        ("x" * 254, "is no name of DNS"),
        (7, "7 is no list of names"),
    ],
)
def test_names_that_cannot_be(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        parse_tls_peers(value)
    assert len(parse_tls_peers([f"d{i}" for i in range(MAX_TLS_PEERS)])) == MAX_TLS_PEERS


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tls_cert": "/c"}, "--tls-cert without --tls-key and --tls-ca: TLS takes all of"),
        ({"tls_peers": "d"}, "--tls-peer is 'd', but there is no TLS"),
        ({"role": "prefill", **FILES}, "--tls-peer is not given: name the decode daemons"),
        ({"peers": "p=10.0.0.1:7071", "tls_peers": "p0", **FILES}, "--peer p dials '10.0.0.1', which is not among"),
        ({"peer_service": "pre:7071", "tls_peers": "p0", **FILES}, "--peer-service dials 'pre', which is not among"),
        ({"metrics": "0.0.0.0:9470", **FILES}, "--metrics is 0.0.0.0:9470: .* needs --insecure-metrics or --insecure"),
        ({"listen": "0.0.0.0:7070"}, "without --tls-cert, --tls-key and --tls-ca sessions are not encrypted"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DaemonConfig.model_validate({"role": "decode", **settings})


def test_with_tls_an_address_need_not_be_insecure() -> None:
    for settings in ({"role": "decode"}, {"role": "prefill", "tls_peers": "spiffe://c/decode"}):
        DaemonConfig.model_validate({"listen": "0.0.0.0:7070", **FILES, **settings})
        own = {"metrics": "0.0.0.0:9470", "insecure_metrics": True}
        DaemonConfig.model_validate({"listen": "0.0.0.0:7070", **FILES, **settings, **own})


def test_kinds_of_names_are_kept_apart() -> None:
    auth = {
        "peer_dns": [b"D0.example.org"],
        "peer_uri": [b"spiffe://c/d"],
        "peer_email": [b"admin@x"],
        "x509_common_name": [b"prefill"],
        "x509_subject_alternative_name": [b"admin@x"],
    }
    assert names_in(auth) == ["d0.example.org", "spiffe://c/d"]
    assert names_in({"peer_dns": [b"\xff", b"", b"a b", b"x" * 5000]}) == []
    assert names_in({"peer_dns": [b"spiffe://c/d", b"10.0.0.1", b"::1"], "peer_uri": [b"d0.example.org"]}) == []
    assert names_in({"peer_ip": [b"10.0.0.1"], "peer_dns": [b"d1"]}) == ["d1", "10.0.0.1"]


# -- files -------------------------------------------------------------------------------------------------------------


def spoil(made: Folder, what: str) -> None:
    """One of the things that can be wrong with what replaces the files."""
    good = CA.sign(["prefill"])
    if what == "another key":
        made.put(Signed(good.chain, CA.sign(["prefill"]).key), CA)
    elif what == "no PEM":
        made.put(Signed(b"garbage", good.key), CA)
    elif what == "no key":
        made.put(Signed(good.chain, b""), CA)
    elif what == "empty authorities":
        made.put(good)
    elif what == "expired":
        made.put(CA.sign(["prefill"], begins=-2, ends=-1), CA)
    elif what == "not yet":
        made.put(CA.sign(["prefill"], begins=1, ends=2), CA)
    elif what == "too long":
        made.put(Signed(b"#" * (MAX_FILE_BYTES + 1), good.key), CA)
    elif what == "Ed25519":
        pem = ed25519.Ed25519PrivateKey.generate().private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        made.put(Signed(good.chain, pem), CA)
    else:
        (made.path / "..data").unlink()


SPOILT = {
    "another key": "is not the key of the first certificate of --tls-cert",
    "no PEM": "--tls-cert .* holds no certificates in PEM",
    "no key": "--tls-key .* is no private key in PEM",
    "empty authorities": "--tls-ca .* holds no certificates in PEM",
    "expired": "--tls-cert .* expired at 20",
    "not yet": "is valid from .* is this machine's clock right",
    "too long": f"has more than {MAX_FILE_BYTES} bytes",
    "Ed25519": "gRPC takes RSA and elliptic curves",
    "gone": "No such file",
}


@pytest.mark.parametrize(("what", "said"), SPOILT.items(), ids=SPOILT.keys())
def test_files_that_do_not_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, said: str) -> None:
    """At the start they are refused; later the old ones stay, with a warning, until good ones come."""
    made = folder(tmp_path)
    running = watch(made)
    first = running.current()
    assert first.names == ("prefill",) and time.time() + 6 * 86400 < first.expires < time.time() + 8 * 86400
    spoil(made, what)
    with caplog.at_level(logging.WARNING):
        assert running.current() is first and running.current() is first
    with pytest.raises(ConfigError, match=said):
        watch(made)
    assert [record for record in caplog.messages if "what is in use stays in use" in record] == caplog.messages
    assert len(caplog.messages) == 1 and running.broken in caplog.messages[0]
    running.server_credentials(), running.channel_credentials()  # of the old ones, still
    made.put(CA.sign(["prefill", "spiffe://c/prefill"]), CA)
    assert running.current().names == ("prefill", "spiffe://c/prefill")
    assert running.broken == ""


def test_what_did_not_fit_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder(tmp_path)
    running = watch(made)
    made.put(CA.sign(["later"], begins=1, ends=9), CA)
    assert running.current().names == ("prefill",) and "valid from" in running.broken
    assert running.read_again().names == ("prefill",)
    tomorrow = time.time() + 1.5 * 86400
    monkeypatch.setattr("kvferry.daemon.peers.tls.time.time", lambda: tomorrow)
    assert running.current().names == ("prefill",)  # the files have not changed
    assert running.read_again().names == ("later",) and not running.broken


# -- dialling ----------------------------------------------------------------------------------------------------------


class Statistics(cache_pb2_grpc.CacheServicer):
    async def Stats(self, request: object, context: object) -> cache_pb2.StatsReply:
        return cache_pb2.StatsReply(daemon="p0", sides=[cache_pb2.SideStats(role=common_pb2.ROLE_PREFILL)])


def test_a_daemon_found_at_an_address_must_have_the_services_name(tmp_path: Path) -> None:
    """DNS gives addresses, which no certificate of a cluster names; the name that was looked up is what counts."""

    async def story() -> None:
        own = watch(folder(tmp_path / "decode", "decode"))
        server = grpc.aio.server()
        cache_pb2_grpc.add_CacheServicer_to_server(Statistics(), server)
        made = folder(tmp_path / "prefill", "kvferry-prefill", "spiffe://c/prefill")
        port = server.add_secure_port("127.0.0.1:0", watch(made).server_credentials())
        await server.start()
        address = f"127.0.0.1:{port}"
        try:
            for service, name in (("kvferry-prefill:7071", "p0"), ("elsewhere:7071", ""), ("", "")):
                assert await prefill_name(address, service, dialling(own)) == name
            assert await prefill_name(address, "kvferry-prefill:7071", dial_plainly) == ""
        finally:
            await server.stop(0)

    asyncio.run(story())


def test_a_link_to_a_found_daemon_expects_the_services_name() -> None:
    config = DaemonConfig.model_validate({"role": "decode", "peer_service": "pre:7071", "peers": "p0=p0.example:7071"})
    side = DecodeSide(config, bytes(16), time.monotonic)
    assert side.add_peer("p1", "10.0.0.7:7071").expected == "pre:7071"
    assert side.links["p0"].expected == ""  # the host of its own address


def test_a_client_names_what_it_lacks(tmp_path: Path) -> None:
    tls = ClientTls(str(tmp_path / "none"), "", "")
    with pytest.raises(ChannelError, match=r"--tls-ca .*/none: No such file"):
        open_channel("127.0.0.1:1", tls)
    open_channel("unix:/nowhere", tls).close()  # a Unix socket is never TLS


def test_a_certificate_on_a_curve_that_nobody_here_knows_changes_nothing(tmp_path: Path) -> None:
    made = folder(tmp_path)
    used = watch(made)
    before = used.current()
    signed = CA.sign(["prefill"])
    der = x509.load_pem_x509_certificate(signed.chain).public_bytes(serialization.Encoding.DER)
    p256, other = bytes.fromhex("06082a8648ce3d030107"), bytes.fromhex("06082a8648ce3d030105")
    assert p256 in der
    chain = ssl.DER_cert_to_PEM_cert(der.replace(p256, other)).encode()
    made.put(Signed(chain, signed.key), CA)
    assert used.read_again() == before
    assert "cannot be used" in used.broken and made.cert in used.broken
