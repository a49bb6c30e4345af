"""Settings of speculative decoding with which a page's name would not say all that its draft model's KV is of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connectors.vllm.caches import Unfit, draft_of
from tests.connectors.vllm.test_caches import drafts, engine


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
