"""The link against couriers that misbehave, and what it gives to one."""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import os
import signal
import stat
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.transfer.courier import config as courier_config
from kvferry.transfer.courier.config import BLAS_THREADS, courier_environment, make_slot_memory, nvidia_gpus
from kvferry.transfer.courier.link import CourierConfig, CourierError, CourierLink
from kvferry.transfer.courier.messages import (
    Connected,
    CourierDied,
    CourierEvent,
    Expect,
    MessageError,
    PostDone,
    encode_order,
)
from kvferry.transfer.courier.network_interfaces import InterfaceError, interface_addresses, interface_of
from kvferry.transfer.courier.process import OUTPUT_LIMIT_BYTES, CourierProcess
from tests.support.standstill import jumping_clock

SECONDS = 30.0
CONFIG = CourierConfig(slot_bytes=4096, receive_slots=1, send_slots=1, port_range=(21300, 21363))
Actor = Callable[[str], None]


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Actor:
    """Puts a program in the place of the courier; it finds its socket as `s`."""

    def act(program: str) -> None:
        head = f"""\
            #!{sys.executable}
            import os, socket, struct, sys, time
            s = socket.socket(fileno=int(sys.argv[3]))
            started = struct.pack("<BQI", 17, 4096, 0) + b"metadata"
        """
        path = tmp_path / "actor"
        path.write_text(textwrap.dedent(head) + textwrap.dedent(program))
        path.chmod(stat.S_IRWXU)
        monkeypatch.setattr(sys, "executable", str(path))

    return act


def start(events: list[CourierEvent], deadline_s: float = SECONDS) -> Any:
    return CourierLink.start(CONFIG, events.append, deadline_s)


async def until_event(events: list[CourierEvent]) -> CourierEvent:
    async def wait() -> None:
        while not events:
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), SECONDS)
    return events[0]


def test_one_that_exits_at_once(actor: Actor) -> None:
    actor("print('no such thing', flush=True); sys.exit(3)")
    with pytest.raises(CourierError, match=r"did not start: .*exit status 3.*no such thing"):
        asyncio.run(start([]))


def test_one_that_says_nothing_is_ended_at_the_deadline(actor: Actor) -> None:
    actor("print(os.getpid(), flush=True); time.sleep(600)")
    with pytest.raises(CourierError, match=r"did not start within 4.0 s .*last words: \d+") as raised:
        asyncio.run(start([], 4.0))
    pid = int(str(raised.value).rpartition(" ")[2])
    assert not Path(f"/proc/{pid}").exists()


def test_one_that_starts_while_the_daemon_stands_still_has_started(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor("time.sleep(0.5); s.send(started); time.sleep(600)")
    stand_still = jumping_clock(monkeypatch)

    async def test() -> None:
        asyncio.get_running_loop().call_later(0.1, stand_still, 60.0)
        link = await start([])
        assert link.metadata == b"metadata"
        await link.stop(SECONDS)

    asyncio.run(test())


@pytest.mark.parametrize(
    ("packet", "said"),
    [
        ("started", "event is Started"),
        ("struct.pack('<B', 18)", "event is Connected"),
        ("struct.pack('<BQ', 19, 7)", "post_id is 7"),
        ("struct.pack('<BQ', 20, 7) + b'text'", "post_id is 7"),
        ("struct.pack('<BB', 21, 0) + b'payload'", "event is Notification"),
        ("struct.pack('<BB', 21, 0) + b'x' * 257", "notification's length is 257"),
        ("struct.pack('<BB', 21, 65) + b'x' * 100", "header's length is 65"),
        ("struct.pack('<B', 99)", "event's kind is 99"),
        ("b'x' * 90000", "packet's length is"),
        ("struct.pack('<B', 22) + b'I am done'", "I am done"),
    ],
)
def test_one_that_says_what_cannot_be_is_ended(actor: Actor, packet: str, said: str) -> None:
    actor(f"s.send(started); s.send({packet}); time.sleep(600)")

    async def test() -> None:
        events: list[CourierEvent] = []
        link = await start(events)
        assert link.metadata == b"metadata"
        assert link.receive_address == 4096
        died = await until_event(events)
        assert isinstance(died, CourierDied)
        assert said in died.message
        with pytest.raises(ProcessLookupError):
            os.kill(link.pid, 0)
        await link.stop(SECONDS)
        assert events == [died]

    asyncio.run(test())


def test_one_that_cannot_be_reaped_keeps_its_slots(actor: Actor, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still write them."""
    actor("s.send(started); time.sleep(600)")

    async def unreapable(process: CourierProcess, deadline_s: float) -> str:
        raise CourierError(f"courier {process.pid} did not end within {deadline_s} s of SIGKILL")

    async def test() -> None:
        link = await start([])
        with monkeypatch.context() as patch:
            patch.setattr(CourierProcess, "reap", unreapable)
            with pytest.raises(CourierError, match=r"did not end within 5.0 s of SIGKILL"):
                await link.stop(5.0)
            assert len(link.host_slots.receive_slot(0)) == CONFIG.slot_bytes
        await link.stop(SECONDS)
        with pytest.raises(CourierError, match="was stopped"):
            link.host_slots.receive_slot(0)

    asyncio.run(test())


def test_one_that_is_being_ended_says_nothing_behind_a_stop(actor: Actor) -> None:
    actor("s.send(started); time.sleep(600)")

    async def test() -> None:
        events: list[CourierEvent] = []
        link = await start(events)
        link._fail("it is over")
        await link.stop(SECONDS)
        assert events == []

    asyncio.run(test())


def test_one_of_host_slots_tells_no_headers(actor: Actor) -> None:
    actor("""
        s.send(started)
        setup, connect = s.recv(4096), s.recv(4096)
        s.send(struct.pack('<B', 18))
        s.send(struct.pack('<BB', 21, 64) + bytes(64) + b'notice')
        time.sleep(600)
    """)

    async def test() -> None:
        events: list[CourierEvent] = []
        link = await start(events)
        link.connect(b"metadata", 4096, 1, 4096)
        assert await until_event(events) == Connected()
        del events[0]
        died = await until_event(events)
        assert isinstance(died, CourierDied)
        assert "header's length is 64, must be 0 for slots in host memory" in died.message
        await link.stop(SECONDS)

    asyncio.run(test())


def test_one_that_takes_no_orders_is_ended(actor: Actor) -> None:
    actor("s.send(started); time.sleep(600)")

    async def test() -> None:
        events: list[CourierEvent] = []
        link = await start(events)
        for number in range(20000):
            link.expect(number % 2)
        died = await until_event(events)
        assert isinstance(died, CourierDied)
        assert "does not take orders" in died.message
        await link.stop(SECONDS)

    asyncio.run(test())


def test_only_a_change_of_what_is_expected_is_an_order(actor: Actor) -> None:
    actor("s.send(started); time.sleep(600)")

    async def test() -> None:
        events: list[CourierEvent] = []
        link = await start(events)
        sent: list[bytes] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(link, "_send", sent.append)
            for active in (0, 1, 2, 20, 1, 0, 0, 7):
                link.expect(active)
        assert sent == [encode_order(Expect(active)) for active in (1, 0, 7)]
        await link.stop(SECONDS)
        assert events == []

    asyncio.run(test())


def test_the_oldest_post_of_one_that_is_stopped_stays(actor: Actor) -> None:
    actor("""
        s.send(started)
        setup, connect = s.recv(4096), s.recv(4096)
        s.send(struct.pack('<B', 18))
        first, second = s.recv(4096), s.recv(4096)
        s.send(struct.pack('<B', 19) + first[1:9])
        s.recv(4096)
        s.send(struct.pack('<B', 19) + second[1:9])
        time.sleep(600)
    """)

    async def test() -> None:
        events: list[CourierEvent] = []
        link = await CourierLink.start(dataclasses.replace(CONFIG, send_slots=2), events.append, SECONDS)
        link.connect(b"metadata", 4096, 2, 4096)
        assert await until_event(events) == Connected()
        events.clear()
        assert link.oldest_post is None

        os.kill(link.pid, signal.SIGSTOP)
        link.post(7, 0, 0, 1, b"first")
        link.post(2, 1, 1, 1, b"second")
        await asyncio.sleep(0.01)
        assert link.oldest_post == 7
        assert events == []

        os.kill(link.pid, signal.SIGCONT)
        assert await until_event(events) == PostDone(7)
        assert link.oldest_post == 2
        events.clear()
        link.expect(1)
        assert await until_event(events) == PostDone(2)
        assert link.oldest_post is None
        await link.stop(SECONDS)

    asyncio.run(test())


def test_one_that_talks_without_end_is_read_and_dropped(actor: Actor, caplog: pytest.LogCaptureFixture) -> None:
    actor(f"for _ in range({OUTPUT_LIMIT_BYTES} // 50): print('x' * 99)\nprint('end', flush=True)\nsys.exit(4)")
    with caplog.at_level(logging.INFO), pytest.raises(CourierError, match=r"exit status 4.*\| end$"):
        asyncio.run(start([]))
    assert (
        0.9 * OUTPUT_LIMIT_BYTES < sum(len(record.getMessage()) for record in caplog.records) < 2 * OUTPUT_LIMIT_BYTES
    )
    assert "the rest is dropped" in caplog.text


@pytest.mark.parametrize(
    ("ranks", "said"), [("b''", "ranks of the courier is 0"), ("rank * 2", "ranks of the courier is 2")]
)
def test_one_that_has_other_ranks_is_ended(actor: Actor, ranks: str, said: str) -> None:
    actor(f"""
        rank = struct.pack("<Q64sQ64s", 4096, b"handle", 8192, b"handle")
        ranks = {ranks}
        s.send(struct.pack("<BQI", 17, 0, len(ranks) // len(rank)) + ranks + b"metadata")
        time.sleep(600)
    """)
    config = dataclasses.replace(CONFIG, devices=(0,))
    with pytest.raises(CourierError, match=f"cannot be mapped: {said}"):
        asyncio.run(CourierLink.start(config, lambda _: None, SECONDS))


def test_a_courier_without_its_gpu_says_so() -> None:
    config = dataclasses.replace(CONFIG, devices=(1023,))
    with pytest.raises(CourierError, match=r"did not start: Gpu(Unavailable|Error): "):
        asyncio.run(CourierLink.start(config, lambda _: None, SECONDS))


# -- configuration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("slot_bytes", {"slot_bytes": 4095}),
        ("slot_bytes", {"slot_bytes": (1 << 30) + 1}),
        ("receive_slots", {"receive_slots": -1}),
        ("send_slots", {"send_slots": 1025}),
        ("receive_slots + send_slots", {"receive_slots": 0, "send_slots": 0}),
        ("devices' count", {"devices": (0,) * 65}),
        ("device", {"devices": (-1,)}),
        ("receive_slots", {"receive_slots": 3, "send_slots": 2, "devices": (0, 1)}),
        ("send_slots", {"receive_slots": 2, "devices": (0, 1)}),
        ("port_range's first", {"port_range": (0, 10)}),
        ("port_range's last", {"port_range": (10, 9)}),
        ("tls", {"tls": ""}),
        ("tcp_user_timeout_s", {"tcp_user_timeout_s": 0}),
        ("tcp_keepalive_idle_s", {"tcp_keepalive_idle_s": float("nan")}),
    ],
)
def test_configuration_is_checked(field: str, values: dict[str, Any]) -> None:
    with pytest.raises(MessageError) as raised:
        CourierConfig(**{"slot_bytes": 4096, "receive_slots": 1, "send_slots": 1, **values})
    assert raised.value.field == field


def test_environment(tmp_path: Path) -> None:
    base = {"HOME": str(tmp_path), "UCX_TLS": "all", "UCX_NET_DEVICES": "eth7", "UCX_LOG_LEVEL": "info"}
    environment = courier_environment(CONFIG, ipaddress.ip_address("127.0.0.1"), base)
    assert environment["UCX_NET_DEVICES"] == "lo"
    assert environment["UCX_TLS"] == ("cuda_copy,tcp" if nvidia_gpus() else "tcp")
    assert environment["UCX_TCP_PORT_RANGE"] == "21300-21363"
    assert environment["UCX_TCP_USER_TIMEOUT"] == "3000ms"
    assert environment["HOME"] == str(tmp_path)
    assert environment["UCX_LOG_LEVEL"] == "info"
    assert "UCX_NET_DEVICES" not in courier_environment(CONFIG, None, base)


SECRETS = {"KVFERRY_TLS_KEY": "/a/key.pem", "OTEL_EXPORTER_OTLP_HEADERS": "authorization=x", "AWS_SECRET_KEY": "x"}
PASSED = {"UCX_LOG_LEVEL": "warn", "LC_ALL": "C", "TSAN_OPTIONS": "exitcode=66", "PYTHONHASHSEED": "7"}


def test_a_process_has_nothing_else_of_its_daemons_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, **PASSED}.items():
        monkeypatch.setenv(name, value)

    async def test() -> dict[str, str]:
        link = await start([])
        try:
            return psutil.Process(link.pid).environ()
        finally:
            await link.stop(SECONDS)

    for threads in BLAS_THREADS:
        monkeypatch.delenv(threads, raising=False)
    found = asyncio.run(test())
    assert not SECRETS.keys() & found.keys()
    assert PASSED.items() <= found.items()
    assert found["OPENBLAS_NUM_THREADS"] == "1"


@pytest.mark.parametrize("threads", BLAS_THREADS)
def test_an_operators_number_of_threads_is_the_couriers(threads: str) -> None:
    base = {threads: "3"}
    environment = courier_environment(CONFIG, None, base)
    assert {name: environment[name] for name in BLAS_THREADS if name in environment} == base


@pytest.mark.parametrize(
    ("values", "transports"),
    [({"devices": (0,)}, "cuda_copy,cuda_ipc,tcp"), ({"tls": "tcp"}, "tcp"), ({"devices": (0,), "tls": "all"}, "all")],
)
def test_transports(values: dict[str, Any], transports: str) -> None:
    config = dataclasses.replace(CONFIG, **values)
    assert courier_environment(config, None, {})["UCX_TLS"] == transports


def test_transports_of_rdma_have_its_devices_beside_the_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in ("mlx5_0", "mlx5_1"):
        (tmp_path / device / "ports" / "1").mkdir(parents=True)
    monkeypatch.setattr(courier_config.rdma_ports, "__defaults__", (str(tmp_path),))
    loopback = ipaddress.ip_address("127.0.0.1")
    found = {
        tls: courier_environment(dataclasses.replace(CONFIG, tls=tls), loopback, {})["UCX_NET_DEVICES"]
        for tls in ("tcp", "cuda_copy,cuda_ipc,tcp", "rc_x,tcp", "rc,cuda_copy,tcp", "all")
    }
    rdma = "lo,mlx5_0:1,mlx5_1:1"
    assert list(found.values()) == ["lo", "lo", rdma, rdma, rdma]
    assert courier_config.rdma_ports(str(tmp_path / "none")) == []
    config = dataclasses.replace(CONFIG, tls="rc,tcp", rdma=("mlx5_1:1",))
    assert courier_environment(config, loopback, {})["UCX_NET_DEVICES"] == "lo,mlx5_1:1"
    assert courier_environment(dataclasses.replace(config, tls="tcp"), loopback, {})["UCX_NET_DEVICES"] == "lo"
    with pytest.raises(CourierError, match="RDMA ports mlx5_7:1 are not on this machine; it has mlx5_0:1, mlx5_1:1"):
        courier_environment(dataclasses.replace(config, rdma=("mlx5_1:1", "mlx5_7:1")), loopback, {})


def test_gpus_are_counted_by_their_pci_devices(tmp_path: Path) -> None:
    devices = (
        ("0x10de", "0x030200"),
        ("0x10de", "0x030000"),
        ("0x10de", "0x040300"),
        ("0x1002", "0x030000"),
        ("?", "?"),
    )
    for number, (vendor, class_) in enumerate(devices):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(vendor + "\n")
        (tmp_path / str(number) / "class").write_text(class_ + "\n")
    (tmp_path / "without files").mkdir()
    assert nvidia_gpus(str(tmp_path)) == 2
    assert nvidia_gpus(str(tmp_path / "none")) == 0


@pytest.mark.parametrize("home", [None, "", "/nonexistent/home"])
def test_home_is_readable(home: str | None) -> None:
    environment = courier_environment(CONFIG, None, {} if home is None else {"HOME": home})
    assert environment["HOME"] == "/"


def test_interface_of_an_address() -> None:
    owners = interface_addresses()
    assert owners[ipaddress.ip_address("127.0.0.1")] == "lo"
    for address, name in owners.items():
        assert interface_of(address) == name
        assert Path(f"/sys/class/net/{name}").exists()
    assert interface_of(ipaddress.ip_address("127.1.2.3")) == "lo"
    with pytest.raises(InterfaceError, match=r"bind_host 240\.0\.0\.1 belongs to no network interface"):
        interface_of(ipaddress.ip_address("240.0.0.1"))


@pytest.mark.parametrize(
    ("bind_host", "said"), [("240.0.0.1", "240.0.0.1"), ("no-such-host.invalid", "cannot be resolved")]
)
def test_bind_host_that_is_not_ours(bind_host: str, said: str) -> None:
    config = CourierConfig(slot_bytes=4096, receive_slots=1, send_slots=1, bind_host=bind_host)
    with pytest.raises((CourierError, InterfaceError), match=said):
        asyncio.run(CourierLink.start(config, lambda _: None, SECONDS))


def test_slot_memory_can_be_neither_shrunk_nor_grown() -> None:
    fd = make_slot_memory(8192)
    try:
        assert os.fstat(fd).st_size == 8192
        assert os.fstat(fd).st_blocks * 512 >= 8192
        for size in (0, 16384):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)
