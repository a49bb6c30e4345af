"""A daemon's words to those who do not keep the protocol; it serves on."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestFailed, RequestName
from kvferry.daemon.cli.stack import Stack, StackError
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.proto import cache_pb2, cache_pb2_grpc, common_pb2, engine_pb2, engine_pb2_grpc, peer_pb2, peer_pb2_grpc
from kvferry.radix.digests import prompt_digests
from tests.support.engines import OPTIONS, Engines, Turn, settled, stats, wait_until
from tests.support.stacks import SmallSystem

pytestmark = pytest.mark.timeout(90)
PAGE = 16


@pytest.fixture(scope="module")
def replicas() -> Iterator[tuple[Replica, Replica]]:
    with Stack() as stack:
        prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
        yield prefills[0], decodes[0]


def facts_of(replica: Replica) -> common_pb2.NamespaceFacts:
    with grpc.insecure_channel(replica.worker_address, OPTIONS) as channel:
        return engine_pb2_grpc.EngineStub(channel).Describe(engine_pb2.DescribeRequest(), timeout=5).facts


def open_session(replica: Replica, message: peer_pb2.PeerMessage) -> grpc.RpcError:
    with grpc.insecure_channel(replica.daemon_address, OPTIONS) as channel:
        call = peer_pb2_grpc.PeerStub(channel).Session(iter([message]), timeout=10)
        with pytest.raises(grpc.RpcError) as refused:
            next(call)
        return refused.value


def hello(replica: Replica, **changes: object) -> peer_pb2.PeerMessage:
    fields = {
        "protocol": 1,
        "protocol_min": 1,
        "daemon": "test",
        "incarnation": bytes(16),
        "role": common_pb2.ROLE_DECODE,
        "facts": facts_of(replica),
        "epoch": 1,
        "page_bytes": 4096,
    }
    return peer_pb2.PeerMessage(hello=peer_pb2.PeerHello(**{**fields, **changes}))


def test_a_protocol_that_is_too_new_is_refused(replicas: tuple[Replica, Replica]) -> None:
    refused = open_session(replicas[0], hello(replicas[0], protocol=9, protocol_min=8))
    assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
    for part in ("protocol", "speaks 1 to 1", "8 to 9", "install"):
        assert part in refused.details()


def test_a_newer_protocol_that_still_speaks_ours_is_taken(replicas: tuple[Replica, Replica]) -> None:
    with grpc.insecure_channel(replicas[0].daemon_address, OPTIONS) as channel:
        hold = threading.Event()

        def messages() -> Iterator[peer_pb2.PeerMessage]:
            yield hello(replicas[0], protocol=2, protocol_min=1)
            hold.wait(10)

        call = peer_pb2_grpc.PeerStub(channel).Session(messages(), timeout=20)
        assert next(call).hello.protocol == 1
        call.cancel()
        hold.set()


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"role": common_pb2.ROLE_PREFILL}, "role"),
        ({"page_bytes": 5}, "page_bytes"),
        ({"facts": None}, "facts"),
        ({"ranks": 65}, "ranks is 65; it must be 1 to 64"),
        ({"ranks": 2}, "has 1, 'test' at ipv4:127.0.0.1"),
        ({"ranks": 2}, "2 and lacks the capability 'lanes'; install the same kvferry on both"),
    ],
)
def test_other_hellos_that_do_not_fit(replicas: tuple[Replica, Replica], changes: dict[str, object], part: str) -> None:
    refused = open_session(replicas[0], hello(replicas[0], **changes))
    assert refused.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert part in refused.details()


def test_a_session_that_does_not_begin_with_hello(replicas: tuple[Replica, Replica]) -> None:
    refused = open_session(replicas[0], peer_pb2.PeerMessage(heartbeat=peer_pb2.Heartbeat()))
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_admissions_that_cannot_be_are_refused_one_by_one(replicas: tuple[Replica, Replica]) -> None:
    decode = replicas[1]
    good = prompt_digests(list(range(40)), page_size=PAGE)
    cases = [
        ({"digests": good.digests[:-1]}, "digests has 63 bytes"),
        ({"tail_digest": b""}, "tail_digest has 0 bytes"),
        ({"tokens": 2_000_000}, "tokens is 2000000; it must be 1 to 1048576"),
        ({"max_new_tokens": 1_048_570}, "max_new_tokens is 1048570"),
        ({"prefill": "nobody"}, "prefill is 'nobody'; the configured peers are: prefill-0"),
    ]

    async def ask() -> None:
        client = await DaemonClient.connect(decode.socket, common_pb2.ROLE_DECODE, facts_of(decode), "test")
        for changes, message in cases:
            fields = {
                "digests": good.digests,
                "tokens": 40,
                "tail_digest": good.tail,
                "prefill": "",
                "max_new_tokens": 4,
                "deadline_s": 5.0,
                **changes,
            }
            name = RequestName(os.urandom(16), 1)
            with pytest.raises(RequestFailed) as refused:
                await client.admit(name, **fields)
            assert message in str(refused.value)
            await client.abort(name, "test")
        await client.close()

    asyncio.run(ask())
    assert settled(decode).requests.running == 0


def test_a_worker_of_another_model_is_refused(replicas: tuple[Replica, Replica]) -> None:
    decode = replicas[1]
    facts = facts_of(decode)
    facts.model = "another"
    with pytest.raises(Exception, match="model is synthetic here and another there"):
        asyncio.run(DaemonClient.connect(decode.socket, common_pb2.ROLE_DECODE, facts, "test"))


def test_look_ups_are_bounded(replicas: tuple[Replica, Replica]) -> None:
    with grpc.insecure_channel(replicas[1].daemon_address, OPTIONS) as channel:
        cache = cache_pb2_grpc.CacheStub(channel)
        for request, part in (
            (cache_pb2.LookupRequest(namespace_id=b"x", digests=b""), "namespace_id has 1 bytes"),
            (cache_pb2.LookupRequest(namespace_id=bytes(32), digests=b"x"), "digests has 1 bytes"),
            (
                cache_pb2.LookupRequest(namespace_id=bytes(32), digests=bytes((2 << 20) + 32)),
                "digests has 2097184 bytes; it must have 32 for every page, and at most 2097152",
            ),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                cache.Lookup(request, timeout=5)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert part in refused.value.details()
        for digests in (b"", bytes(2 << 20)):
            most = cache_pb2.LookupRequest(namespace_id=bytes(32), digests=digests)
            assert cache.Lookup(most, timeout=5).matched_tokens == 0


def test_health_and_file_modes(replicas: tuple[Replica, Replica]) -> None:
    for replica in replicas:
        assert stat.S_IMODE(os.stat(replica.socket).st_mode) == 0o600
        with grpc.insecure_channel(replica.daemon_address, OPTIONS) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    ours = [entry for entry in os.scandir("/dev/shm") if entry.name.startswith("kvferry-") and entry.is_file()]
    assert ours
    modes = set()
    for entry in ours:
        with suppress(FileNotFoundError):  # another test's, and gone by now
            modes.add(stat.S_IMODE(entry.stat().st_mode))
    assert modes == {0o600}


def test_sigterm_lets_what_was_accepted_finish(stack: Stack) -> None:
    spec = SmallSystem(page_size=PAGE, decode_worker_flags=["--synthetic-decode-us", "20000"])
    prefills, decodes = start_replicas(stack, spec)
    turns: list[Turn] = []
    with Engines(prefills[0], decodes[0]) as engines:
        thread = threading.Thread(target=lambda: turns.append(engines.turn(list(range(100)), 60)))
        thread.start()
        wait_until(lambda: stats(decodes[0]).transfers.completed >= 1)
        decodes[0].daemon.popen.send_signal(signal.SIGTERM)
        wait_until(lambda: "draining" in decodes[0].daemon.tail(100))
        late = engines.turn(list(range(50)), 4, deadline_s=5)
        assert late.code is grpc.StatusCode.UNAVAILABLE
        thread.join(30)
    assert turns[0].error is None, turns[0].details
    assert len(turns[0].output) == 60
    assert decodes[0].daemon.popen.wait(20) == 0
    assert not os.path.exists(decodes[0].socket)


def test_a_second_daemon_on_the_same_socket_is_refused(stack: Stack) -> None:
    socket = os.path.join(stack.folder, "one.sock")
    words = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--socket", socket]
    stack.ready(stack.start("one", words))
    with pytest.raises(StackError, match="another daemon answers there"):
        stack.ready(stack.start("two", words))


def test_a_killed_daemons_files_are_removed_by_the_next(stack: Stack) -> None:
    _, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, prefills=0))
    mine = {name for name in os.listdir("/dev/shm") if name.startswith("kvferry-")}
    stack.kill(decodes[0].daemon)
    words = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--socket", decodes[0].socket]
    stack.ready(stack.start("next", words))
    left = {name for name in os.listdir("/dev/shm") if name.startswith("kvferry-")}
    assert len(mine - left) >= 2  # its lock and its pool
