"""`kvferry size`: models by their config.json, the arithmetic of docs/sizing.md, and flags that a daemon takes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.daemon.cli.main import main
from kvferry.daemon.cli.model_config import ModelConfigError, ModelKV, model_kv
from kvferry.daemon.cli.sizing import ChatLoad, Servers, decode_need, prefill_need, slots_for
from kvferry.daemon.config import sources
from kvferry.daemon.config.model import DaemonConfig
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.geometry.pool_shape import PoolShape

GIB = 1 << 30

# What the models' own files say, without what their KV does not depend on.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
}
LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
}
DEEPSEEK_V32 = DEEPSEEK_V3 | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
QWEN2_5_7B = {  # its window is written down, and not used
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
SMOLLM2 = {"hidden_size": 576, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3}
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "torch_dtype": "float32"}
FALCON_7B = {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "multi_query": True}
QWEN2_5_VL = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "dtype": "bfloat16", "text_config": QWEN2_5_7B}
GEMMA3 = {
    "head_dim": 256,
    "hidden_size": 2560,
    "num_attention_heads": 8,
    "num_hidden_layers": 34,
    "num_key_value_heads": 4,
    "layer_types": ["sliding_attention"] * 29 + ["full_attention"] * 5,
}


@pytest.mark.parametrize(
    ("fields", "token_bytes"),
    [
        (LLAMA_8B, 128 << 10),
        (LLAMA_70B, 320 << 10),
        (QWEN3_32B, 256 << 10),
        (DEEPSEEK_V3, 70_272),
        (DEEPSEEK_V32, 70_272 + 8_052),
        (QWEN2_5_7B, 56 << 10),
        (SMOLLM2, 23_040),
        (GPT2, 73_728),
        (FALCON_7B, 8 << 10),
        (QWEN2_5_VL, 56 << 10),
    ],
    ids=[
        "8b",
        "70b",
        "qwen3-32b",
        "deepseek-v3",
        "deepseek-v3.2",
        "qwen2.5-7b",
        "smollm2",
        "gpt2",
        "falcon-7b",
        "qwen2.5-vl",
    ],
)
def test_a_token_of_known_models(fields: dict[str, object], token_bytes: int) -> None:
    model = model_kv(fields)
    assert model.geometry(64, "").token_bytes == token_bytes
    if not model.index_dim:  # beside an indexer quantized latents have scales of their own
        assert model.geometry(64, "fp8").token_bytes == token_bytes // (4 if fields is GPT2 else 2)
    assert model.geometry(16, "").page_bytes == 16 * token_bytes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has none of num_hidden_layers"),
        (LLAMA_8B | {"num_hidden_layers": "32"}, "num_hidden_layers is '32'; it must be a whole number"),
        (LLAMA_8B | {"num_hidden_layers": True}, "num_hidden_layers is 'True'"),
        (LLAMA_8B | {"num_key_value_heads": 0}, "num_key_value_heads is '0'"),
        (LLAMA_8B | {"hidden_size": 4100}, "hidden_size is 4100; without head_dim it must be a multiple of 32 heads"),
        (LLAMA_8B | {"torch_dtype": "int3"}, "torch_dtype is 'int3'; it must be one of bool,"),
        (GEMMA3, "layer_types has 29 of 34 layers of sliding_attention: kvferry keeps the KV of full attention alone"),
        (LLAMA_8B | {"sliding_window": 4096}, "sliding_window is 4096"),
        (LLAMA_8B | {"mamba_d_ssm": 128}, "mamba_d_ssm is 128"),
        (DEEPSEEK_V32 | {"index_head_dim": 64}, "index_head_dim is 64; it must be a multiple of 128"),
        (DEEPSEEK_V32 | {"index_head_dim": None}, "has none of index_head_dim"),
        (DEEPSEEK_V32 | {"index_kpool": 4}, "index_kpool is 4: its indexer has one key for several tokens"),
    ],
)
def test_models_that_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        model_kv(fields)


def servers(way_back: str = "off", **changed: int) -> Servers:
    found = {"ranks": 1, "on_gpus": 1, "blocks": 0, "prefills": 1, "decodes": 1, "prompts": 8, "pool_room": 0}
    found |= {"slots": 16, "slot_bytes": 64 << 20} | changed
    whole = {name: value for name, value in found.items() if name not in ("on_gpus", "blocks")}
    return Servers(on_gpus=bool(found["on_gpus"]), blocks=bool(found["blocks"]), way_back=way_back, **whole)


CHATS = ChatLoad(running=32, kept=200, turns=1, system_tokens=0, turn_tokens=8000, answer_tokens=500)


def test_the_worked_example() -> None:
    """docs/sizing.md: 133 pages a chat, 33 GiB run, 208 GiB are kept; 15.6 GiB of prompts under way."""
    geometry = model_kv(LLAMA_8B).geometry(64, "")
    need = decode_need(geometry, CHATS, servers())
    assert (need.running_pages, need.kept_pages) == (32 * 133, 200 * 133)
    assert (need.pool_bytes, need.host_bytes) == (32 * 133 * 8 << 20, 200 * 133 * 8 << 20)
    roomy = decode_need(geometry, CHATS, servers(pool_room=40 * GIB))
    assert roomy.pool_bytes <= 40 * GIB
    assert roomy.pool_bytes + roomy.host_bytes == need.pool_bytes + need.host_bytes
    prefill = prefill_need(geometry, CHATS, servers())
    assert prefill.pool_bytes == 2 * 8 * 125 * 8 << 20
    assert prefill.host_bytes == 0


def test_ranks_that_hold_the_same_heads() -> None:
    """A latent is on every rank, and in the host tier once."""
    assert model_kv(DEEPSEEK_V32).geometry(64, "fp8").token_bytes == 61 * (656 + 132)
    geometry = model_kv(DEEPSEEK_V3).geometry(64, "")
    need = decode_need(geometry, CHATS, servers(ranks=8))
    assert need.page_bytes == 8 * 64 * 70_272
    assert need.row_bytes == 64 * 70_272
    assert need.host_bytes == 200 * 133 * 64 * 70_272
    shape = PoolShape(geometry, 8, StorageOrder.PAGE_MAJOR, need.running_pages)
    assert need.pool_bytes == 8 * shape.rank_bytes
    with pytest.raises(ValueError, match="ranks is 3; it must divide"):
        decode_need(model_kv(LLAMA_8B).geometry(64, ""), CHATS, servers(ranks=3))


def test_a_common_beginning_is_held_once() -> None:
    geometry = model_kv(LLAMA_8B).geometry(64, "")
    chats = ChatLoad(running=4, kept=2, turns=3, system_tokens=1000, turn_tokens=100, answer_tokens=300)
    need = decode_need(geometry, chats, servers())
    assert (chats.tokens, chats.prompt_tokens) == (2200, 1900)
    assert (need.running_pages, need.kept_pages) == (15 + 4 * (35 - 15), 2 * (35 - 15))


def test_memory_of_a_pod_and_of_a_gpu() -> None:
    geometry = model_kv(SMOLLM2).geometry(64, "")
    on_cpus = decode_need(geometry, CHATS, servers(on_gpus=0, prefills=3, slot_bytes=8 << 20))
    slots = 3 * 16 * 8 << 20
    assert on_cpus.shm_bytes == on_cpus.pool_bytes + on_cpus.index_bytes
    index = on_cpus.index_bytes - 64
    assert 32 <= index / (on_cpus.running_pages + on_cpus.kept_pages) <= 64 and index & index - 1 == 0
    assert on_cpus.memory_bytes == on_cpus.shm_bytes + on_cpus.host_bytes * 17 // 16 + slots + (100 + 3 * 60 << 20)
    assert on_cpus.gpu_bytes == 0
    on_gpus = decode_need(geometry, CHATS, servers(ranks=3, prefills=2))
    assert on_gpus.shm_bytes == on_gpus.index_bytes == on_cpus.index_bytes
    buffers = (288 << 20) + on_gpus.host_bytes // 512
    assert on_gpus.gpu_bytes == on_gpus.pool_bytes // 3 + 3 * (288 << 20) + 2 * (1 << 30) + buffers
    back = decode_need(geometry, CHATS, servers("auto", ranks=3, prefills=2))
    assert back.gpu_bytes == on_gpus.gpu_bytes + 2 * (1 << 30), "the way back has slots of its own"
    many = decode_need(geometry, CHATS, servers(prefills=100))
    assert many.last_port == 21199
    assert many.files == 128 + 16 * 100 + 4 * 64


def test_slots_that_keep_a_link_full() -> None:
    """docs/sizing.md: 16 x 8 MiB keep 25 Gbit/s full at 40 ms, and one is being copied."""
    assert slots_for(25, 0.04, 8 << 20) == 15 + 1
    assert slots_for(1, 0.001, 64 << 20) == 2


def say(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["size", *words])
    said = capsys.readouterr()
    return status, said.out, said.err


def told(folder: Path, fields: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--gpus", "0"),
        ("--gpus", "4", "--kept", "50", "--decodes", "3", "--gbit", "200"),
        ("--pool", "engine"),
        ("--way-back", "auto"),
    ],
)
def test_its_flags_are_a_daemons(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str]) -> None:
    status, out, _ = say(capsys, told(tmp_path, LLAMA_8B), "--format", "json", *words)
    assert status == 0
    for role, need in json.loads(out)["servers"].items():
        config = config_of(need["serve"])
        assert config.role == role
        if config.pool == "daemon":
            assert config.pool_bytes // need["page_bytes"] >= need["running_pages"]
        assert config.host_bytes >= need["host_bytes"]
        assert config.ucx_ports == (21000, need["last_port"])


def config_of(words: Sequence[str]) -> DaemonConfig:
    parser = argparse.ArgumentParser()
    sources.add_arguments(parser)
    return sources.load(parser.parse_args(words)).config


def test_a_table_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = say(capsys, told(tmp_path, DEEPSEEK_V3), "--gpus", "8", "--kept", "10")
    assert status == 0
    assert "DeepseekV3ForCausalLM: 61 layers, a latent x 576, bfloat16" in out
    assert "a token 70,272 bytes, a page of 64 tokens 4.3 MiB" in out
    assert "\nkvferry serve --role decode --page-size 64 --device cuda:0,cuda:1," in out
    assert "\nkvferry serve --role prefill " in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--pool-room", "20GiB"), "--pool-room is 2560 pages; 32 chats at a time need 4256: it holds 19 of them"),
        (("--page-size", "5000"), "geometry.page_size is 5000; it must be 1 to 4096"),
        (("--kv-dtype", "nvfp4"), "geometry.dtype is 'nvfp4'; it must be one of"),
        (("--slot-bytes", "1KiB"), "--slot-bytes is 1024; it must be 4096 to 536870912"),
        (("--slot-bytes", "1GiB"), "--slot-bytes is 1073741824; it must be 4096 to 536870912"),
        (("--gpus", "65"), "--gpus is 65; it must be 0 to 64"),
        (
            ("--gbit", "800", "--round-trip-ms", "1000"),
            "slots of each of 1 ranks; they may be 1024: a larger --slot-bytes",
        ),
    ],
)
def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: Sequence[str], message: str) -> None:
    status, _, err = say(capsys, told(tmp_path, LLAMA_8B), *words)
    assert status == 2
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("{", "is no JSON"),
        ("[1]", "is no JSON object"),
        ("[" * 100_000, "is no JSON"),
        ("{}", "none of"),
    ],
)
def test_files_that_are_no_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    status, _, err = say(capsys, str(file))
    assert status == 2
    assert message in err and str(file) in err


def test_the_architecture_is_named() -> None:
    assert model_kv(LLAMA_8B) == ModelKV("LlamaForCausalLM", 32, 8, 128, 2, "bfloat16")
