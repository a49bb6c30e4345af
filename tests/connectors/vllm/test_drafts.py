"""Settings of speculative decoding with which a page's name would not say all that its draft model's KV is of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm.caches import Unfit, draft_of
from kvferry.connectors.vllm.facts import kv_heads_of
from kvferry.connectors.vllm.weights import draft_name, fingerprint
from tests.connectors.vllm.test_caches import FullAttentionSpec, MLAAttentionSpec, drafts, engine


def with_settings(method: str, **settings: object) -> SimpleNamespace:
    draft = drafts(method)
    vars(draft).update(settings)
    return engine(draft=draft)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            with_settings("mtp", num_speculative_tokens=3, use_multi_module_mtp=lambda: True),
            r"several MTP modules, and num_speculative_tokens 3: .* set num_speculative_tokens to 1",
        ),
        (with_settings("eagle", disable_eagle_block_drop=True), "disable_eagle_block_drop is on: .* leave it out"),
        (with_settings("draft_model", kv_cache_dtype="fp8"), "kv_cache_dtype is 'fp8', --kv-cache-dtype 'auto'"),
    ],
)
def test_settings_that_are_refused(config: SimpleNamespace, message: str) -> None:
    with pytest.raises(Unfit, match=message):
        draft_of(config)


def test_settings_that_are_served() -> None:
    for config in (
        with_settings("mtp", num_speculative_tokens=3, use_multi_module_mtp=lambda: False),
        with_settings("eagle", disable_eagle_block_drop=False, kv_cache_dtype=None),
        with_settings("draft_model", kv_cache_dtype="auto"),
    ):
        assert draft_of(config) is config.speculative_config


def test_the_length_that_is_set_for_a_draft_model_names_it() -> None:
    names = [
        draft_name(with_settings("eagle", max_model_len=most), Settings("/s", revision="1"))
        for most in (None, 4096, 2048)
    ]
    assert len(set(names)) == 3
    assert draft_name(with_settings("eagle"), Settings("/s", revision="1")) == names[0]


def test_the_length_that_a_model_writes_into_its_configuration_is_no_part_of_its_name() -> None:
    """MiniMax M2 does: the length is set for one engine, and a pair's other may have another."""
    asked = engine().model_config
    before, given = fingerprint(asked), asked.hf_config.to_dict()
    asked.hf_config = SimpleNamespace(to_dict=lambda: {**given, "max_model_len": 32})
    assert fingerprint(asked) == before


def test_on_several_ranks_a_draft_model_has_as_many_heads_as_the_model() -> None:
    """Of the model's four each is on two of eight ranks, of the draft model's eight on one."""
    config = engine(ranks=8, draft=drafts("draft_model"))
    config.model_config.get_total_num_kv_heads = lambda: 4
    config.speculative_config.draft_model_config.get_total_num_kv_heads = lambda: 8
    with pytest.raises(Unfit, match="the draft model has 8 KV heads, the model 4, tensor_parallel_size is 8"):
        kv_heads_of(config, FullAttentionSpec(num_kv_heads=1))
    assert kv_heads_of(config, MLAAttentionSpec()) == 1, "every rank has all of it"
    config.speculative_config.draft_model_config.get_total_num_kv_heads = lambda: 4
    assert kv_heads_of(config, FullAttentionSpec(num_kv_heads=1)) == 4
