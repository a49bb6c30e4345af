"""Pools that there is no room for: said at the start, in the log for each refused worker, and with the flags."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import grpc
import pytest

from kvferry.daemon.cli import doctor_checks as doctor
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.memory import capacity as pool_room
from kvferry.daemon.memory import making
from kvferry.daemon.memory.gpu_probe import Driver
from kvferry.daemon.memory.held_pages import HeldPages
from kvferry.daemon.peers.dialing import dial_plainly
from kvferry.daemon.services.worker import WorkerService
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.proto import common_pb2, worker_pb2
from kvferry.radix.digests import root_digest
from kvferry.transfer.host_tier.rows import AnonymousRows
from kvferry.transfer.mapping import memory_room
from kvferry.transfer.mapping.memory_room import MemoryRoom

HUGE = 1 << 47


class TwoGpus(Driver):
    def __init__(self) -> None:
        """Of 80 GiB each."""

    def version(self) -> int:
        return 12080

    def count(self) -> int:
        return 2

    def name(self, device: int) -> str:
        return "H100"

    def shares_memory(self, device: int) -> bool:
        return True

    def peers(self, device: int, other: int) -> bool:
        return True

    def total_bytes(self, device: int) -> int:
        return 80 << 30


def test_what_does_not_fit_in_shared_memory_is_said_with_its_flags(tmp_path: Path) -> None:
    (lack,) = pool_room.pool_lacks(DaemonConfig(role="both", pool_bytes=HUGE, shm_dir=str(tmp_path)))
    assert lack.startswith(f"shared memory {tmp_path}: ") and "pools take 256.0 TiB; a smaller --pool-bytes" in lack
    for fits in ({"pool_bytes": 1 << 20}, {"pool_bytes": HUGE, "pool": "engine"}):
        assert not pool_room.pool_lacks(
            DaemonConfig.model_validate({"role": "decode", "shm_dir": str(tmp_path), **fits})
        )


def test_a_host_tier_that_does_not_fit_in_memory_is_said_and_takes_no_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def a_cgroup(nbytes: int) -> None:
        there = [MemoryRoom("a machine", 1 << 40), MemoryRoom("a cgroup", nbytes)]
        monkeypatch.setattr(memory_room, "rooms", lambda: iter(there))

    most = (1 << 30) * 16 // 33  # of each role
    a_cgroup(1 << 30)
    config = DaemonConfig(role="both", pool_bytes=1, host_bytes=most, shm_dir=str(tmp_path))
    assert not pool_room.host_lacks(config)
    a_cgroup((1 << 30) - most)  # the other's is made
    rows = AnonymousRows(2, most)
    assert rows.lacks(0, most) == "" and rows.lacks(0, most + 2), "a daemon's own rule"
    rows.close()
    a_cgroup(1 << 30)
    large = config.model_copy(update={"host_bytes": most + 1})
    (lack,) = pool_room.host_lacks(large)
    assert lack.startswith(
        "host tier: 993.0 MiB are asked for, 1.0 GiB are there (a cgroup), and 31.0 MiB stay free beside it; it grows "
        "that far. A smaller"
    )
    assert not pool_room.host_lacks(large.model_copy(update={"host_dir": str(tmp_path)}))
    assert not pool_room.pool_lacks(large), "it grows as far as there is room"
    (_, finding), (_, kept) = doctor.memory(large), doctor.memory(config)
    assert (finding.level, kept.level) == ("bad", "bad"), "slots want some, too"
    assert (
        "1.0 GiB by a cgroup" in finding.found and "host tier takes 993.0 MiB and leaves 31.0 MiB free" in finding.found
    )
    assert finding.remedy.startswith("a smaller --host-bytes")


@pytest.mark.parametrize(("roles", "page"), [("decode", "112.0 KiB"), ("both", "224.0 KiB")])
def test_pages_of_which_there_can_be_no_index_are_said(
    roles: Literal["decode", "both"], page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_room.shutil, "disk_usage", lambda path: SimpleNamespace(free=64 << 20))
    config = DaemonConfig(role=roles, device="cuda:0", pool_bytes=8 << 30, host_bytes=104 << 30, shm_dir=str(tmp_path))
    (lack,) = pool_room.index_lacks(config)
    left = "64.0 MiB" if roles == "decode" else "32.0 MiB"
    assert lack.startswith(f"shared memory {tmp_path}: {left} are left for the index of the pages that are held; ")
    assert f"an engine whose pages have less than {page} is refused. another --shm-dir, or more" in lack
    _, note, *_ = doctor.memory(config)
    assert note.level == "note" and note.found.endswith("is refused") and note.remedy.startswith("another --shm-dir")
    assert not pool_room.index_lacks(config.model_copy(update={"host_bytes": 24 << 30}))


@pytest.mark.parametrize("free", [65 << 30, 500 << 30, 1 << 50])
def test_large_shared_memory_has_room_for_any_index(free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_room.shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    config = DaemonConfig(role="decode", device="cuda:0", pool_bytes=8 << 30, host_bytes=1 << 40, shm_dir=str(tmp_path))
    assert not pool_room.index_lacks(config)


def test_what_stays_free_beside_tiers_is_of_the_last_one_made() -> None:
    config = DaemonConfig(role="both", pool_bytes=1 << 30, host_bytes=160 << 30)
    assert pool_room.host_wanted(config) == (2 * 160 + 10) << 30
    assert pool_room.host_wanted(DaemonConfig(role="decode", pool_bytes=1 << 30)) == 0


def test_what_does_not_fit_on_gpus_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "Driver", TwoGpus)
    monkeypatch.setattr(pool_room, "Driver", TwoGpus)
    fits = DaemonConfig(role="decode", device="cuda:0,cuda:1", pool_bytes=160 << 30)
    assert not pool_room.pool_lacks(fits)
    assert "GPU memory" not in [finding.what for finding in doctor.gpus(fits)]
    shared, *_ = doctor.memory(fits)
    assert shared.found.endswith(" free")  # no pool lies there
    large = DaemonConfig(role="decode", device="cuda:1,cuda:2", pool_bytes=200 << 30)
    small, absent = pool_room.pool_lacks(large)
    assert small.startswith("GPU 1 has 80.0 GiB; its part of the pools takes 100.0 GiB; a smaller --pool-bytes")
    assert absent.startswith("--device names GPU 2; the driver has 2")
    found = [finding for finding in doctor.gpus(large) if finding.what == "GPU memory"]
    assert [finding.level for finding in found] == ["bad", "bad"] and "--pool-bytes" in found[0].remedy


class Call:
    """Of one worker that says hello: what a servicer sees of it."""

    def __init__(self, hello: worker_pb2.WorkerHello) -> None:
        self._message = worker_pb2.WorkerMessage(hello=hello)

    async def read(self) -> worker_pb2.WorkerMessage:
        return self._message

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise PermissionError(f"{code.name}: {details}")


@pytest.mark.parametrize(
    ("owner", "made", "what", "flags"),
    [
        (making.SharedPoolMemory, "create", "pool of 1048576 bytes in ", "--pool-bytes or --shm-dir"),
        (
            HeldPages,
            "__init__",
            "index of 192 pages that may be held, 8256 bytes in .*: ",
            "--host-bytes, another --shm-dir, or more: .*",
        ),
    ],
)
def test_a_refused_worker_is_logged_and_told_the_flags(
    owner: type,
    made: str,
    what: str,
    flags: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(owner, made, full)
    geometry = common_pb2.Geometry(layers=2, kv_heads=1, head_dim=16, dtype="float32")
    facts = common_pb2.NamespaceFacts(
        model="synthetic", revision="1", geometry=geometry, digest_algorithm="sha256_cbor", root_digest=root_digest()
    )
    hello = worker_pb2.WorkerHello(protocol=1, role=common_pb2.ROLE_DECODE, worker="w\n0", facts=facts)

    async def story() -> None:
        config = DaemonConfig(role="decode", shm_dir=str(tmp_path), pool_bytes=1 << 20, host_bytes=2 << 20)
        side = DecodeSide(config, bytes(16), time.monotonic, dial_plainly)
        service = WorkerService({"decode": side}, "")
        with pytest.raises(PermissionError, match=f"RESOURCE_EXHAUSTED: {what}.*--shm-dir"):
            await service.Session(None, cast(Any, Call(hello)))
        await side.close()

    asyncio.run(story())
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    said = record.getMessage()
    assert re.match(rf"decode worker 'w\\n0' is refused: RESOURCE_EXHAUSTED: {what}", said), said
    assert re.search(f"No space left on device( .[0-9]+ are free.)?; (change|a smaller) {flags}$", said), said


def test_a_tier_in_a_file_of_a_tmpfs_is_memory_as_far_as_it_is_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_room, "is_memory", lambda file: True)
    monkeypatch.setattr(memory_room, "rooms", lambda: iter([MemoryRoom("a cgroup", 33 << 20)]))
    config = DaemonConfig(role="decode", pool_bytes=1, host_bytes=32 << 20, host_dir=str(tmp_path / "a" / "b"))
    assert (pool_room.in_memory(config), pool_room.host_wanted(config)) == (32 << 20, 34 << 20)
    (lack,) = pool_room.host_lacks(config)
    assert lack.startswith("host tier: 32.0 MiB are asked for, 33.0 MiB are there (a cgroup), and 2.0 MiB stay free")
    here = config.model_copy(update={"host_dir": str(tmp_path)})
    file = tmp_path / "kvferry-host-decode.rows"
    file.write_bytes(bytes(8 << 20))
    assert pool_room.host_wanted(here) == 26 << 20 and not pool_room.host_lacks(here)
    file.write_bytes(bytes(32 << 20))
    assert pool_room.host_wanted(here) == 0, "all of it is there"


def test_a_disk_that_is_too_small_for_the_tier_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_room, "is_memory", lambda file: False)
    monkeypatch.setattr(pool_room, "disk_room", lambda file: 20 << 20)
    folder, other = tmp_path / "h", tmp_path / "shm"
    folder.mkdir()
    config = DaemonConfig(role="both", pool_bytes=1 << 20, host_bytes=16 << 20, host_dir=str(folder), shm_dir="/proc")
    (lack,) = pool_room.host_lacks(config)
    assert lack == (
        f"host tier: 32.0 MiB are to be made in --host-dir {folder}, 20.0 MiB are free there; it grows that far. "
        "A smaller --host-bytes, or a larger disk"
    )
    (folder / "kvferry-host-prefill.rows").write_bytes(bytes(12 << 20))
    assert not pool_room.host_lacks(config), "of an earlier run"
    other.mkdir()
    beside = config.model_copy(update={"shm_dir": str(other)})
    assert pool_room.file_room(beside) == (20 << 20, 22 << 20), "pools are on the same file system"
    assert pool_room.host_lacks(beside)
    monkeypatch.setattr(pool_room, "index_room", lambda config: (1 << 30, 1))
    finding = list(doctor.memory(beside))[-1]
    assert (finding.level, finding.what) == ("bad", f"host tier {folder}")
    assert finding.found == (
        "20.0 MiB free on its file system; the files take 22.0 MiB more than the 12.0 MiB of them that are there"
    )
    monkeypatch.setattr(pool_room, "disk_room", lambda file: None)
    assert not pool_room.host_lacks(beside), "it has no limit"
