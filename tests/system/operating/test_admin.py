"""Administration of real daemons: the commands, what they refuse, and that only the Unix socket takes them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.proto import admin_pb2 as admin
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common
from kvferry.proto.admin_pb2_grpc import AdminStub
from kvferry.proto.cache_pb2_grpc import CacheStub
from kvferry.radix.digests import prompt_digests
from tests.support.commands import Done, kvferry
from tests.support.engines import OPTIONS, Engines, settled, stats
from tests.support.stacks import SmallSystem

pytestmark = pytest.mark.timeout(120)
PAGE = 16
TOKENS = list(range(100))  # 6 full pages; with 10 of output (9 of them are in the cache) there are no more


def digests_of(tokens: list[int]) -> bytes:
    return prompt_digests(tokens, page_size=PAGE).digests


@dataclass
class Target:
    """A decode daemon that holds TOKENS, and a prefill daemon that does."""

    engines: Engines
    prefill: Replica
    decode: Replica
    namespace: bytes

    def run(self, command: str, *words: str) -> Done:
        return kvferry(command, "--socket", self.decode.socket, *words)

    def ok(self, command: str, *words: str) -> str:
        done = self.run(command, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def fill(self) -> cache.SideStats:
        assert self.engines.turn(TOKENS, 10).error is None
        return settled(self.decode)

    def matched(self) -> int:
        with grpc.insecure_channel(f"unix:{self.decode.socket}", OPTIONS) as channel:
            request = cache.LookupRequest(namespace_id=self.namespace, digests=digests_of(TOKENS))
            return int(CacheStub(channel).Lookup(request, timeout=5).matched_tokens)


@pytest.fixture(scope="module")
def module_target() -> Iterator[Target]:
    with Stack() as stack:
        prefills, decodes = start_replicas(stack, SmallSystem(page_size=PAGE))
        with Engines(prefills[0], decodes[0]) as engines:
            namespaces = stats(decodes[0]).namespaces
            assert len(namespaces) == 1
            yield Target(engines, prefills[0], decodes[0], namespaces[0].namespace_id)


@pytest.fixture
def target(module_target: Target) -> Target:
    """Holds nothing but TOKENS."""
    module_target.ok("unpin", "all")
    module_target.ok("flush")
    module_target.fill()
    return module_target


@pytest.fixture
def tokens_file(tmp_path: Path) -> str:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return str(path)


def test_what_is_pinned_outlives_a_flush(target: Target, tokens_file: str) -> None:
    prefix = target.namespace.hex()[:8]
    words = ["--tokens", tokens_file, "--seconds", "60", "--namespace", prefix]  # the page size is the daemon's
    said = target.ok("pin", *words)
    number = said.split()[1]
    assert said == f"pin {number} holds 96 tokens for 60 s"
    side = stats(target.decode)
    assert (side.namespaces[0].pinned_pages, side.pool.locks, side.pool.evictable) == (6, 1, 0)

    assert target.engines.turn([7] * 40, 1).error is None  # 2 pages more
    strict = target.run("flush", "--strict")
    assert strict.returncode == 1
    assert "FAILED_PRECONDITION: 6 pages are held" in strict.stderr
    assert stats(target.decode).pool.cached == 8, "nothing was freed"
    assert target.ok("flush", "--namespace", prefix) == "freed 2 device pages and 0 host pages; 6 are held"
    assert target.engines.turn(TOKENS, 1).matched == 96

    assert target.ok("unpin", number) == "ended 1 pin"
    assert target.ok("flush", "--strict") == "freed 6 device pages and 0 host pages; 0 are held"
    assert target.matched() == 0
    assert settled(target.decode).pool.free == stats(target.decode).pool.pages
    gone = target.run("unpin", number)
    assert (gone.returncode, gone.stderr) == (1, f"kvferry unpin: there is no pin {number}\n")


def test_a_pin_ends_by_itself(target: Target) -> None:
    # The only namespace need not be named; digests may be given in full.
    said = target.ok("pin", "--digests", digests_of(TOKENS)[:64].hex(), "--seconds", "1")
    assert said.endswith("holds 32 tokens for 1 s")
    deadline = time.monotonic() + 10
    while stats(target.decode).namespaces[0].pinned_pages:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert settled(target.decode).pool.evictable == 6
    assert target.ok("unpin", "all") == "ended 0 pins"


def test_dump(target: Target, tmp_path: Path) -> None:
    digests = digests_of(TOKENS)
    (tmp_path / "digests").write_text("\n".join(digests[i : i + 32].hex() for i in range(0, 96, 32)) + "\n")
    target.ok("pin", "--digests", str(tmp_path / "digests"), "--seconds", "600")
    found = json.loads(target.ok("dump", "--json"))
    assert found["total_nodes"] == len(found["nodes"]) >= 2, "the pin splits the path"
    by_depth = sorted(found["nodes"], key=lambda node: node["depth"])
    assert sum(node["pages"] for node in by_depth) == 6
    assert by_depth[0]["first_digest"] == digests[:32].hex()
    assert by_depth[-1]["last_digest"] == digests[-32:].hex()
    for node in by_depth:
        assert (node["namespace_id"], node["device"], node["host"]) == (target.namespace.hex(), True, False)
        assert node["locks"] == (1 if node["depth"] < 3 else 0)
        assert 0 <= node["idle_seconds"] < 60 and not node["copying"] and not node["orphan"]
    assert len(found["pins"]) == 1
    assert found["pins"][0]["tokens"] == 48
    assert 480 < found["pins"][0]["seconds_left"] <= 600

    text = target.ok("dump", "--limit", "1", "--namespace", target.namespace.hex()).splitlines()
    assert text[0].split()[:4] == ["namespace", "depth", "pages", "tier"]
    assert text[1].split()[0] == target.namespace.hex()[:12]
    assert text[2] == f"1 of {found['total_nodes']} nodes"
    assert text[3].startswith(f"pin {found['pins'][0]['pin']} holds 48 tokens of {target.namespace.hex()[:12]}, ")


def test_a_page_size_that_is_not_the_daemons(target: Target, tokens_file: str) -> None:
    done = target.run("pin", "--tokens", tokens_file, "--page-size", "64", "--seconds", "60")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "kvferry pin: --page-size is 64, the daemon's is 16; leave the flag out\n"
    assert stats(target.decode).namespaces[0].pinned_pages == 0


def test_the_prefill_daemon_has_it_too(target: Target) -> None:
    side = stats(target.prefill)
    assert side.pool.cached >= 6
    done = kvferry("flush", "--socket", target.prefill.socket, "--role", "prefill")
    assert done.stdout == f"freed {side.pool.cached} device pages and 0 host pages; 0 are held\n"
    assert settled(target.prefill).pool.cached == 0


def test_statistics_show_namespaces(target: Target) -> None:
    name = target.namespace.hex()
    shown = kvferry("stats", f"unix:{target.decode.socket}")
    assert shown.returncode == 0, shown.stderr
    assert f"namespace {name[:12]}" in shown.stdout
    assert "evicted by lru" in shown.stdout
    found = json.loads(kvferry("stats", f"unix:{target.decode.socket}", "--format", "json").stdout)["sides"][0]
    assert found["namespaces"][0]["namespace_id"] == name
    assert found["namespaces"][0]["device_pages"] == "6"
    assert int(found["namespaces"][0]["queried_tokens"]) == int(found["requests"]["queried_tokens"])
    assert (found["host"]["pages"], found["tiers"]["copies"], found["policy"]) == ("0", "0", "lru")


def test_pages_of_the_host_tier(module_target: Target, tokens_file: str) -> None:
    page_bytes = stats(module_target.decode).pool.page_bytes
    flags = ["--host-bytes", str(32 * page_bytes)]
    spec = SmallSystem(page_size=PAGE, decode_pool_bytes=16 * page_bytes, decode_flags=flags)
    with Stack() as stack:
        prefills, decodes = start_replicas(stack, spec)
        with Engines(prefills[0], decodes[0]) as engines:
            target = Target(engines, prefills[0], decodes[0], stats(decodes[0]).namespaces[0].namespace_id)
            target.fill()
            assert engines.turn([7] * 208, 1).error is None  # 13 pages: 3 of the 6 are spilled
            side = settled(target.decode)
            assert (side.host.pages, side.host.cached, side.host.evictable, side.tiers.spilled_pages) == (32, 3, 3, 3)
            assert (side.namespaces[0].device_pages, side.namespaces[0].host_pages) == (16, 3)
            found = json.loads(target.ok("dump", "--json"))["nodes"]
            assert sorted((n["device"], n["host"], n["pages"]) for n in found) == [
                (False, True, 3),
                (True, False, 3),
                (True, False, 13),
            ]
            words = ["--tokens", tokens_file, "--page-size", "16", "--seconds", "60"]
            assert "holds 96 tokens" in target.ok("pin", *words)
            assert " host " in target.ok("dump")
            assert "6 pages are held" in target.run("flush", "--strict").stderr
            assert target.ok("flush") == "freed 13 device pages and 0 host pages; 6 are held"
            turn = engines.turn(TOKENS, 1)
            assert (turn.error, turn.matched) == (None, 96)
            side = stats(target.decode)
            assert (side.requests.host_hit_tokens, side.namespaces[0].host_hit_tokens) == (48, 48)
            assert (side.tiers.restored_pages, side.tiers.copies) == (3, 0)
            shown = kvferry("stats", f"unix:{target.decode.socket}").stdout
            assert "host pages" in shown and "mean speed of copies" in shown
            target.ok("unpin", "all")
            assert target.ok("flush", "--strict") == "freed 6 device pages and 3 host pages; 0 are held"
            side = settled(target.decode)
            assert (side.pool.free, side.host.free) == (16, 32)


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["flush", "--role", "prefill"], 1, "INVALID_ARGUMENT: role is prefill; this daemon has decode"),
        (["flush", "--namespace", "abc"], 2, "--namespace is 'abc'; it must be 8 to 64 hex digits"),
        (["flush", "--namespace", ""], 2, "--namespace is ''; it must be 8 to 64 hex digits"),
        (["flush", "--namespace", "0123456789"], 1, "the daemon has no namespace 0123456789"),
        (["dump", "--limit", "0"], 2, "--limit is 0; it must be 1 to 10000"),
        (["dump", "--limit", "10001"], 2, "--limit is 10001; it must be 1 to 10000"),
        (["unpin", "first"], 2, "PIN is 'first'"),
        (["unpin", "0"], 2, "PIN is '0'"),
        (["unpin", 5000 * "1"], 2, "PIN is '1111"),
        (["unpin"], 2, "PIN"),
        (["pin", "--seconds", "9"], 2, "--digests"),
        (["pin", "--digests", "00" * 32], 2, "--seconds"),
        (["pin", "--digests", "00" * 32, "--seconds", "0"], 2, "--seconds is 0; it must be 1 to 604800"),
        (["pin", "--digests", "00" * 32, "--seconds", "604801"], 2, "--seconds is 604801; it must be 1 to 604800"),
        (["pin", "--digests", "00" * 31, "--seconds", "9"], 2, "--digests: neither hex digits"),
        (["pin", "--digests", os.devnull, "--seconds", "9"], 2, "--digests: the file has 0 characters"),
        (["pin", "--digests", "00" * 32, "--seconds", "9"], 1, "NOT_FOUND: nothing of this prompt is held"),
        (["pin", "--tokens", "/nowhere", "--seconds", "9"], 2, "--tokens /nowhere: "),
        (["pin", "--tokens", os.devnull, "--seconds", "9"], 2, "--tokens /dev/null: "),
        (["pin", "--tokens", "/nowhere", "--page-size", "0", "--seconds", "9"], 2, "--page-size is 0; it must be 1 to"),
    ],
)
def test_refusals(module_target: Target, words: list[str], code: int, message: str) -> None:
    done = module_target.run(*words)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


@pytest.mark.parametrize("text", ["{}", "[1, -2]", '["a"]', "[1.5]", "[1, 2", "[]", "[true]"])
def test_token_files_that_cannot_be(module_target: Target, tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokens.json"
    path.write_text(text)
    done = module_target.run("pin", "--tokens", str(path), "--seconds", "9")
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvferry pin: --tokens {path}: ")


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({"namespace_id": b"short"}, "INVALID_ARGUMENT", "namespace_id has 5 bytes; it must have 32"),
        ({"namespace_id": b""}, "INVALID_ARGUMENT", "namespace_id has 0 bytes; it must have 32"),
        ({"namespace_id": bytes(32)}, "NOT_FOUND", "namespace_id 0000000000000000"),
        ({"digests": b""}, "INVALID_ARGUMENT", "digests has 0 bytes"),
        ({"digests": bytes(33)}, "INVALID_ARGUMENT", "digests has 33 bytes"),
        (
            {"digests": bytes((1 << 21) + 32)},
            "INVALID_ARGUMENT",
            "digests has 2097184 bytes; it must have 32 for every",
        ),
        ({"seconds": 0}, "INVALID_ARGUMENT", "seconds is 0; it must be 1 to 604800"),
        ({"seconds": 604801}, "INVALID_ARGUMENT", "seconds is 604801; it must be 1 to 604800"),
        ({"role": common.ROLE_PREFILL}, "INVALID_ARGUMENT", "role is prefill; this daemon has decode"),
    ],
)
def test_what_the_daemon_refuses_to_pin(
    module_target: Target, changes: dict[str, object], code: str, message: str
) -> None:
    fields = {"namespace_id": module_target.namespace, "digests": digests_of(TOKENS), "seconds": 9, **changes}
    request = admin.PinRequest(**fields)
    with grpc.insecure_channel(f"unix:{module_target.decode.socket}", OPTIONS) as channel:
        pin = AdminStub(channel).Pin
        with pytest.raises(grpc.RpcError) as refused:
            pin(request, timeout=5)
    assert (refused.value.code().name, message in refused.value.details()) == (code, True), refused.value.details()


def test_bounds_of_flush_and_dump(module_target: Target) -> None:
    with grpc.insecure_channel(f"unix:{module_target.decode.socket}", OPTIONS) as channel:
        stub = AdminStub(channel)
        for request, code, message in (
            (admin.DumpRequest(limit=10001), grpc.StatusCode.INVALID_ARGUMENT, "limit is 10001; it must be 1 to 10000"),
            (admin.DumpRequest(namespace_id=bytes(32)), grpc.StatusCode.NOT_FOUND, "namespace_id 0000"),
            (admin.FlushRequest(namespace_id=bytes(32)), grpc.StatusCode.NOT_FOUND, "namespace_id 0000"),
            (admin.FlushRequest(namespace_id=bytes(31)), grpc.StatusCode.INVALID_ARGUMENT, "has 31 bytes"),
        ):
            call = stub.Dump if isinstance(request, admin.DumpRequest) else stub.Flush
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=5)
            assert refused.value.code() == code
            assert message in refused.value.details()


def test_tcp_does_not_take_administration(module_target: Target) -> None:
    with grpc.insecure_channel(module_target.decode.daemon_address, OPTIONS) as channel:
        stub = AdminStub(channel)
        for call, request in (
            (stub.Flush, admin.FlushRequest()),
            (stub.Pin, admin.PinRequest()),
            (stub.Unpin, admin.UnpinRequest()),
            (stub.Dump, admin.DumpRequest()),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(request, timeout=5)
            assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_no_daemon_is_said_so(tmp_path: Path) -> None:
    for words in (["flush"], ["pin", "--digests", "00" * 32, "--seconds", "9"], ["unpin", "all"], ["dump"]):
        command, *rest = words
        done = kvferry(command, "--socket", str(tmp_path / "nobody"), *rest)
        assert done.returncode == 2
        assert f"no daemon answers at {tmp_path}/nobody" in done.stderr
    done = kvferry("flush", XDG_RUNTIME_DIR=str(tmp_path))
    assert done.returncode == 2
    assert f"there is no {tmp_path}/kvferry-decode.sock" in done.stderr


def test_a_daemon_of_both_roles_before_its_first_worker(tmp_path: Path) -> None:
    with Stack() as stack:
        environment = {"XDG_RUNTIME_DIR": stack.folder}
        words = ["serve", "--role", "both", "--listen", "127.0.0.1:0", "--reflection"]
        address = stack.ready(stack.start("both", words, environment=environment))
        unnamed = kvferry("flush", **environment)
        assert unnamed.returncode == 1
        assert "INVALID_ARGUMENT: role is not set; this daemon has decode and prefill" in unnamed.stderr
        for role in ("decode", "prefill"):
            done = kvferry("flush", "--role", role, **environment)
            assert done.stdout == "freed 0 device pages and 0 host pages; 0 are held\n"
            assert kvferry("dump", "--role", role, **environment).stdout == "0 of 0 nodes\n"
            assert kvferry("unpin", "all", "--role", role, **environment).stdout == "ended 0 pins\n"
        pin = kvferry("pin", "--role", "decode", "--digests", "00" * 32, "--seconds", "9", **environment)
        assert (pin.returncode, pin.stderr) == (1, "kvferry pin: the daemon has no namespace\n")
        socket = f"unix:{stack.folder}/kvferry-both.sock"
        with grpc.insecure_channel(socket, OPTIONS) as channel:
            request = admin.PinRequest(role="ROLE_DECODE", namespace_id=bytes(32), digests=bytes(32), seconds=9)
            with pytest.raises(grpc.RpcError) as refused:
                AdminStub(channel).Pin(request, timeout=5)
            assert refused.value.code() == grpc.StatusCode.NOT_FOUND
            assert "kvferry.v1.Admin" in ProtoReflectionDescriptorDatabase(channel).get_services()
        with grpc.insecure_channel(address, OPTIONS) as channel:
            assert "kvferry.v1.Admin" not in ProtoReflectionDescriptorDatabase(channel).get_services()
