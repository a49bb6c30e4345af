"""Parts of SGLang's backend that need none of SGLang."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.client.requests import RequestName
from kvferry.connectors.sglang import facts
from kvferry.connectors.sglang.digests import prompt_pages, seed_of
from kvferry.connectors.sglang.rows import MetadataRows
from kvferry.connectors.sglang.settings import VARIABLE, BackendSettings, Unset
from kvferry.connectors.sglang.transfers import PageTransfer, PollState, PromptChunk, SentPrompt
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout


def named(extra_key: str | None, salt: str | None = None) -> SimpleNamespace:
    """A request of SGLang's, as far as its pages' names depend on it."""
    return SimpleNamespace(extra_key=extra_key, cache_salt=salt)


def settings(**values: object) -> BackendSettings:
    return BackendSettings.of({VARIABLE: json.dumps({"socket": "/s", **values})})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "SGLANG_KVFERRY is not set"),
        ("{", "no JSON"),
        ("[]", "must be an object"),
        ("{}", "socket is not set"),
        ('{"socket": 1}', "socket is 1; it must be a str"),
        ('{"socket": "s", "sockets": "s"}', "sockets: no such setting; there are socket"),
        ('{"socket": "s", "deadline_seconds": 0}', "deadline_seconds is 0; it must be above 0, at most 3600"),
        ('{"socket": "s", "waiting_share": 1.5}', "waiting_share is 1.5; it must be above 0, at most 1"),
    ],
)
def test_settings_are_checked(text: str, said: str) -> None:
    with pytest.raises(Unset, match=said):
        BackendSettings.of({VARIABLE: text})


def test_each_data_parallel_rank_has_a_daemon_of_its_own() -> None:
    assert settings(socket="/d-{dp_rank}.sock").at_rank(3, 4) == "/d-3.sock"
    assert settings().at_rank(0, 1) == "/s"
    with pytest.raises(Unset, match="for all 2 data-parallel ranks"):
        settings().at_rank(0, 2)


def test_digests_are_chained_from_no_parent() -> None:
    tokens = [7, 1 << 31, 5, 6, 9]
    raw = struct.pack("<5I", *tokens)
    first = hashlib.sha256(raw[:8]).digest()
    second = hashlib.sha256(first + raw[8:16]).digest()
    found = prompt_pages(tokens, 2)
    assert found.digests == first + second and found.tokens == 5
    assert found.tail_digest == hashlib.sha256(second + raw[16:]).digest()
    assert prompt_pages(tokens[:4], 2).tail_digest == b""


def test_an_extra_key_is_the_parent_of_the_first_page() -> None:
    plain, salted = prompt_pages(range(8), 4), prompt_pages(range(8), 4, seed_of(named("salt")))
    assert plain.digests[:32] != salted.digests[:32] and plain.digests[32:] != salted.digests[32:]
    assert salted.digests == prompt_pages(range(8), 4, seed_of(named("salt"))).digests
    assert seed_of(named(None)) == seed_of(named("")) == b""
    assert len({seed_of(each) for each in (named("a"), named("b"), named("a", "x"), named(None, "x"))}) == 4


@pytest.mark.parametrize("token", [-1, 1 << 32])
def test_a_token_that_is_none_is_refused(token: int) -> None:
    with pytest.raises(ValueError, match=f"{token}"):
        prompt_pages([token], 4)


def rows(*buffers: np.ndarray[Any, Any]) -> MetadataRows:
    args = SimpleNamespace(
        aux_data_ptrs=[buffer.ctypes.data for buffer in buffers],
        aux_data_lens=[buffer.nbytes for buffer in buffers],
        aux_item_lens=[buffer[0].nbytes for buffer in buffers],
    )
    return MetadataRows(args)


def test_rows_are_carried_whole() -> None:
    theirs = [np.arange(12, dtype=np.int32).reshape(3, 4), np.arange(6, dtype=np.uint64).reshape(3, 2)]
    ours = [np.zeros((5, 4), np.int32), np.zeros((5, 2), np.uint64)]
    content = rows(*theirs).read(1)
    assert len(content) == 32
    rows(*ours).write(4, content)
    assert ours[0][4].tolist() == [4, 5, 6, 7] and ours[1][4].tolist() == [2, 3]
    assert not ours[0][:4].any() and not ours[1][:4].any()
    with pytest.raises(ValueError, match="row has 32 bytes, this engine's 16"):
        rows(ours[0]).write(0, content)
    with pytest.raises(ValueError, match="row is 5; it must be 0 to 4"):
        rows(*ours).read(5)


def test_the_room_is_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang takes a row for whole once its room is there."""
    buffers = [np.zeros((2, 4), np.int32), np.zeros((2, 1), np.uint64)]
    written: list[int] = []
    monkeypatch.setattr(ctypes, "memmove", lambda at, content, size: written.append(at))
    rows(*buffers).write(1, bytes(24))
    assert written[-1] == buffers[1].ctypes.data + 8


def test_chunks_are_taken_in_order() -> None:
    asyncio.run(take_chunks())


async def take_chunks() -> None:
    order = SentPrompt(PageTransfer(RequestName(bytes(16), 1), range(40), 16, b""))
    waiting = asyncio.create_task(order.next(5))
    await asyncio.sleep(0)
    order.put(PromptChunk(16, [1]))
    order.put(PromptChunk(40, [2, 3], row=b"row"))
    assert (await waiting).end == 16
    assert (await order.next(5)).row == b"row"
    with pytest.raises(TimeoutError, match="was not computed within"):
        await order.next(0.01)


def test_a_transfer_keeps_its_first_reason() -> None:
    transfer = PageTransfer(RequestName(bytes(16), 1), range(33), 16, b"")
    assert transfer.pages == 3 and not transfer.over
    transfer.fail("one")
    transfer.fail("two")
    assert transfer.state is PollState.FAILED and transfer.reason == "one" and transfer.over


def server(**values: object) -> SimpleNamespace:
    return SimpleNamespace(**{"kv_cache_dtype": "auto", **values})


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("pp_size", 2),
        ("enable_dp_attention", True),
        ("speculative_algorithm", "EAGLE"),
        ("enable_lora", True),
        ("enable_memory_saver", True),
        ("attn_cp_size", 2),
        ("dcp_size", 2),
        ("nnodes", 2),
        ("enable_hisparse", True),
        ("disaggregation_decode_enable_offload_kvcache", True),
        ("kv_cache_dtype", "fp8_e4m3"),
    ],
)
def test_what_is_not_served_is_refused_by_its_name(argument: str, value: object) -> None:
    facts.check_server(server(enable_lora=None))
    with pytest.raises(facts.NotServed, match=f"{argument} is {value!r}"):
        facts.check_server(server(**{argument: value}))


def test_sglangs_own_host_tier_is_refused_on_decode_alone() -> None:
    facts.check_server(server(enable_hierarchical_cache=True, disaggregation_mode="prefill"))
    with pytest.raises(facts.NotServed, match=r"enable_hierarchical_cache is True.*--host-bytes"):
        facts.check_server(server(enable_hierarchical_cache=True, disaggregation_mode="decode"))


def test_pages_of_an_unknown_size_are_refused() -> None:
    geometry = KVGeometry(2, 2, 8, "bfloat16", 16, Layout.ENGINE)
    args = SimpleNamespace(kv_data_ptrs=[4096] * 4, kv_data_lens=[5 * 512] * 4, kv_item_lens=[512] * 4)
    blocks = facts.block_map(args, geometry)
    assert blocks.in_token_order and blocks.blocks == 5 and blocks.page_bytes == geometry.page_bytes
    args.kv_item_lens[3] = 544
    with pytest.raises(facts.NotServed, match=r"pages of \[512, 544\] bytes; 4 with pages of 512 were expected"):
        facts.block_map(args, geometry)


class MHATokenToKVPool(SimpleNamespace):
    """As far as its geometry goes."""


def of_rank(heads: int) -> MHATokenToKVPool:
    return MHATokenToKVPool(layer_num=2, head_num=heads, head_dim=8, dtype="torch.bfloat16", page_size=16)


@pytest.mark.parametrize(("own", "ranks"), [(4, 1), (2, 2), (1, 4), (1, 8)])
def test_ranks_share_the_heads_or_have_the_same_ones(own: int, ranks: int) -> None:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
    assert facts.geometry_of(of_rank(own), model, ranks).kv_heads == 4


@pytest.mark.parametrize(
    ("own", "ranks", "said"),
    [(2, 4, "a rank has 2 KV heads, the model 4, and there are 4 ranks"), (1, 3, "ranks is 3; it must divide")],
)
def test_heads_that_are_shared_otherwise_are_refused(own: int, ranks: int, said: str) -> None:
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 4)
    with pytest.raises(facts.NotServed, match=said):
        facts.geometry_of(of_rank(own), model, ranks)


def test_weights_without_a_name_are_refused(tmp_path: Any) -> None:
    model = SimpleNamespace(model_path=str(tmp_path), revision=None)
    dummy = SimpleNamespace(load_format="dummy", download_dir=None)
    with pytest.raises(facts.NotServed, match=r"SGLANG_KVFERRY\.revision"):
        facts.revision_of(model, dummy, settings())
    assert facts.revision_of(model, dummy, settings(revision="mine")) == "mine"
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    auto = SimpleNamespace(load_format="auto", download_dir=None)
    assert len(facts.revision_of(model, auto, settings())) == 64
