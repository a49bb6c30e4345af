"""`kvferry doctor` on machines that this one is not."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import grpc
import pytest

from kvferry.daemon.cli import doctor_checks as doctor
from kvferry.daemon.cli.doctor_checks import BAD, NOTE, OK, Finding
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.memory.gpu_probe import Driver, DriverError
from kvferry.daemon.peers.tls import TlsFiles, TlsWatch
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2
from kvferry.proto.versions import PROTOCOL
from tests.support.certificates import Authority, Folder


class Machine(Driver):
    """GPUs as told."""

    def __init__(self, version: int = 12080, count: int = 2, peers: bool = True, shares: bool = True) -> None:
        self._said = (version, count, peers, shares)

    def version(self) -> int:
        return self._said[0]

    def count(self) -> int:
        return self._said[1]

    def name(self, device: int) -> str:
        return "H200"

    def shares_memory(self, device: int) -> bool:
        return self._said[3]

    def peers(self, device: int, other: int) -> bool:
        return self._said[2]


def gpus(monkeypatch: pytest.MonkeyPatch, machine: Driver) -> dict[str, Finding]:
    monkeypatch.setattr(doctor, "Driver", lambda: machine)
    return {finding.what: finding for finding in doctor.gpus(DaemonConfig(role="decode"))}


def test_gpus_that_are_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus(monkeypatch, Machine())
    assert set(found) == {"driver's batch copy", "GPU 0 H200", "GPU 1 H200", "GPU peer access"}
    assert {finding.level for finding in found.values()} == {OK}
    assert found["driver's batch copy"].found == "CUDA 12.8: cuMemcpyBatchAsync is there"


def test_gpus_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus(monkeypatch, Machine(version=12040, peers=False, shares=False))
    assert found["driver's batch copy"].level == NOTE and "12.8" in found["driver's batch copy"].remedy
    assert found["GPU 0 H200"].level == BAD and found["GPU 0 H200"].remedy
    assert found["GPU peer access"].found == "none between 0-1"


def test_a_driver_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Machine):
        def count(self) -> int:
            raise DriverError("cuDeviceGetCount gives CUDA error 999")

    found = gpus(monkeypatch, Broken())
    assert found["GPU"].level == BAD and "999" in found["GPU"].found


@pytest.mark.parametrize(("device", "level"), [("cpu", OK), ("cuda", BAD)])
def test_no_driver_is_bad_where_a_gpu_is_wanted(monkeypatch: pytest.MonkeyPatch, device: str, level: str) -> None:
    def none() -> Driver:
        raise DriverError("no CUDA driver")

    monkeypatch.setattr(doctor, "Driver", none)
    (found,) = doctor.gpus(DaemonConfig(role="decode", device=device))
    assert found.level == level and "no CUDA driver" in found.found


def test_folders_that_cannot_be(tmp_path: Path) -> None:
    config = DaemonConfig(role="decode", shm_dir=str(tmp_path / "none"))
    (finding,) = doctor.memory(config)
    assert (finding.level, finding.found) == (BAD, "is no directory")
    config = DaemonConfig(role="both", pool_bytes=1 << 20, host_bytes=1 << 50 >> 2, host_dir=str(tmp_path / "a" / "b"))
    host = list(doctor.memory(config))[-1]
    assert host.level == BAD and "larger disk" in host.remedy


def test_sockets_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (finding,) = doctor.daemon_socket(DaemonConfig(role="decode", socket=str(tmp_path / "file")))
    assert (finding.level, finding.found) == (BAD, "exists and is no socket")
    path = str(tmp_path / "d.sock")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path)
        (finding,) = doctor.daemon_socket(DaemonConfig(role="decode", socket=path))
    assert (finding.level, finding.remedy) == (NOTE, f"kvferry health unix:{path} says which; a start clears it")
    (finding,) = doctor.daemon_socket(DaemonConfig(role="decode", socket="/" + "x" * 120))
    assert "at most 105" in finding.remedy
    (finding,) = doctor.daemon_socket(DaemonConfig(role="decode", socket=str(tmp_path / "file" / "a" / "d.sock")))
    assert finding.level == BAD and finding.found.endswith("file is no folder")
    (finding,) = doctor.daemon_socket(DaemonConfig(role="decode", socket="/proc/nowhere/d.sock"))
    assert finding.level == BAD or os.access("/proc", os.W_OK)
    (finding,) = doctor.daemon_socket(DaemonConfig(role="decode", socket=str(tmp_path / "a" / "b" / "d.sock")))
    assert (finding.level, finding.found) == (OK, "free")


def test_a_name_that_is_too_long_is_a_finding(tmp_path: Path) -> None:
    name = "x" * 300
    config = DaemonConfig(role="decode", host_bytes=1 << 20, host_dir=str(tmp_path / name / "h"))
    assert list(doctor.memory(config))[-1].what == f"host tier {config.host_dir}"
    (finding,) = doctor.daemon_socket(DaemonConfig(role="decode", socket=str(tmp_path / name / "d.sock")))
    assert finding.level == BAD and "at most 105" in finding.remedy


def test_a_folder_that_may_not_be_looked_into_is_a_finding(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0)
    config = DaemonConfig(
        role="decode", socket=str(private / "d.sock"), host_bytes=1, host_dir=str(private / "h" / "i")
    )
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        (finding,) = doctor.daemon_socket(config)
        host = list(doctor.memory(config))[-1]
    finally:
        os.seteuid(before)
        private.chmod(0o700)
    assert (finding.what, host.what) == (f"socket {config.socket}", f"host tier {config.host_dir}")


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        first, _ = doctor.network(DaemonConfig(role="decode", listen=address))
    assert (first.level, first.what, first.found) == (NOTE, f"--listen {address}", "Address already in use")
    assert first.remedy.startswith(f"another daemon may run here (kvferry health {address})")
    assert len(list(doctor.network(DaemonConfig(role="decode", listen=address)))) == 1


def test_interfaces_are_looked_at_where_peers_are_elsewhere() -> None:
    (finding,) = doctor.network(DaemonConfig(role="decode", listen="127.0.0.1:0"))
    assert "peers must be on this machine" in finding.found
    elsewhere = DaemonConfig(role="decode", listen="0.0.0.0:0", insecure=True)
    assert all("MTU" in finding.found or finding.what.startswith("RDMA") for finding in doctor.network(elsewhere))


def certificate(folder: Folder, **settings: object) -> doctor.Finding:
    files = {"tls_cert": folder.cert, "tls_key": folder.key, "tls_ca": folder.ca}
    (finding,) = doctor.certificate(DaemonConfig.model_validate({"role": "decode", **files, **settings}))
    return finding


def test_certificates_are_looked_at_and_their_end_is_told(tmp_path: Path) -> None:
    authority = Authority()
    folder = Folder(tmp_path).put(authority.sign(["d0.example.org", "spiffe://c/d"], ends=30.5), authority)
    found = certificate(folder)
    assert found.level == OK
    assert found.found.startswith("d0.example.org, spiffe://c/d; until 20") and found.found.endswith(", 30 days")
    folder.put(authority.sign(["d0.example.org"], ends=3.5), authority)
    found = certificate(folder)
    assert (found.level, found.found[-6:]) == (NOTE, "3 days") and "renew" in found.remedy
    folder.put(authority.sign([], ends=30), authority)
    assert "subjectAltName" in certificate(folder).remedy
    folder.put(authority.sign(["d0.example.org"], begins=-2, ends=-1), authority)
    assert certificate(folder).level == BAD and "expired at" in certificate(folder).found
    folder.put(authority.sign(["d0.example.org"], ends=30), authority)
    os.chmod(folder.key, 0o644)
    assert certificate(folder).remedy.startswith("chmod o-rwx")
    (finding,) = doctor.certificate(DaemonConfig(role="decode", listen="0.0.0.0:7070", insecure=True))
    assert finding.level == NOTE and "not encrypted" in finding.found
    assert not list(doctor.certificate(DaemonConfig(role="decode")))


def test_a_peer_over_tls_is_reached_or_it_is_said_why(tmp_path: Path) -> None:
    authority = Authority()
    theirs = Folder(tmp_path / "theirs").put(authority.sign(["127.0.0.1"]), authority)
    watch = TlsWatch(TlsFiles(theirs.cert, theirs.key, theirs.ca))
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_secure_port("127.0.0.1:0", watch.server_credentials())
    server.start()

    def peer(folder: Folder) -> doctor.Finding:
        files = {"tls_cert": folder.cert, "tls_key": folder.key, "tls_ca": folder.ca}
        settings = {"role": "decode", "peers": f"p0=127.0.0.1:{port}", **files}
        (finding,) = doctor.peers(DaemonConfig.model_validate(settings))
        assert finding.level == BAD
        return finding

    try:
        own = Folder(tmp_path / "own").put(authority.sign(["d0"]), authority)
        assert peer(own).found.startswith("UNIMPLEMENTED")  # it gets through; nothing is served there
        assert peer(own.put(authority.sign(["d0"]), Authority("x"))).remedy.startswith(
            "its certificate is not believed"
        )
        assert (
            "it does not believe this daemon's certificate"
            in peer(own.put(Authority("x").sign(["d0"]), authority)).remedy
        )
        theirs.put(authority.sign(["elsewhere"]), authority)
        assert "IP address mismatch" in peer(own.put(authority.sign(["d0"]), authority)).remedy
    finally:
        server.stop(None)


class Prefill(cache_pb2_grpc.CacheServicer):
    """A daemon of so many tokens a page."""

    def __init__(self, page_size: int, pages: int = 8) -> None:
        pool = cache_pb2.PoolStats(pages=pages, page_bytes=720 << 10)
        side = cache_pb2.SideStats(
            role=common_pb2.ROLE_PREFILL, pool=pool, digests=cache_pb2.DigestFacts(page_size=page_size)
        )
        self.reply = cache_pb2.StatsReply(daemon="p0", sides=[side], build=cache_pb2.BuildInfo(protocol=PROTOCOL))

    def Stats(self, request: cache_pb2.StatsRequest, context: grpc.ServicerContext) -> cache_pb2.StatsReply:
        return self.reply


def peer_of(servicer: Prefill, page_size: int, name: str = "p0") -> Finding:
    server = grpc.server(ThreadPoolExecutor(1))
    cache_pb2_grpc.add_CacheServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        (finding,) = doctor.peers(DaemonConfig(role="decode", page_size=page_size, peers={name: f"127.0.0.1:{port}"}))
    finally:
        server.stop(None)
    return finding


def test_a_peer_of_another_page_size_is_bad() -> None:
    found = peer_of(Prefill(16), 16)
    assert found.level == OK and found.found.endswith("pages of 16 tokens (720 KiB)")
    for pages in (8, 0):  # its worker need not be there
        found = peer_of(Prefill(16, pages), 32)
        assert (found.level, found.found) == (BAD, "pages of 16 tokens; here --page-size is 32")
        assert found.remedy == "start both daemons with the same --page-size"
    older = peer_of(Prefill(0), 32)
    assert older.level == OK and older.found.endswith("pages of 720 KiB")


def test_a_peer_that_calls_itself_otherwise_is_noted() -> None:
    found = peer_of(Prefill(16), 16, name="wrong")
    assert (found.level, found.found) == (NOTE, "calls itself 'p0'")
    assert "requests name it; now that must be 'wrong'" in found.remedy


@pytest.mark.parametrize(("way_back", "slots"), [("off", "128.0 MiB"), ("auto", "256.0 MiB")])
def test_the_memory_of_a_pool_is_named(way_back: Literal["off", "auto"], slots: str) -> None:
    config = DaemonConfig(role="decode", pool_bytes=1 << 47, way_back=way_back)
    found = next(finding for finding in doctor.memory(config) if finding.what == "memory")
    assert found.level == BAD and found.found.endswith(f"slots of 1 session(s) take {slots}, pools take 128.0 TiB")


def test_every_bad_finding_of_this_machine_has_a_remedy() -> None:
    config = DaemonConfig(role="decode", pool_bytes=1 << 45)
    for check in (doctor.memory, doctor.limits, doctor.daemon_socket):
        for finding in check(config):
            assert finding.level != BAD or finding.remedy, finding
