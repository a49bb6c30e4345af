"""Settings of speculative decoding with which a page's name would not say all that its draft model's KV is of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from kvferry.connectors.scheduler_side import Shape
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm.caches import DRAFT_FILES, Unfit, draft_of
from kvferry.connectors.vllm.facts import facts_of, kv_heads_of
from kvferry.connectors.vllm.weights import draft_name, fingerprint, kv_scales
from kvferry.transfer.geometry.namespace import differences
from kvferry.transfer.geometry.rank_lanes import rank_geometry
from tests.connectors.vllm.test_caches import (
    BLOCK,
    LAYERS,
    FullAttentionSpec,
    MLAAttentionSpec,
    drafts,
    engine,
    kv,
    together,
    weights,
    with_dtype,
)
from tests.connectors.vllm.test_facts import downloaded


def loading(**settings: object) -> SimpleNamespace:
    """vLLM's load configuration, as the engine's here."""
    return SimpleNamespace(**{**vars(engine().load_config), **settings})


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
        *(
            (
                with_settings("eagle", draft_load_config=loading(**{name: "/other"})),
                f"draft_load_config.{name} is '/other'; it must be the model's, .*: .* leave draft_load_config out, on",
            )
            for name in DRAFT_FILES
        ),
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
        with_settings("eagle", draft_load_config=loading(safetensors_load_strategy="eager")),
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
    config.model_config.use_mla = False
    config.model_config.get_total_num_kv_heads = lambda: 4
    config.speculative_config.draft_model_config.get_total_num_kv_heads = lambda: 8
    with pytest.raises(Unfit, match="the draft model has 8 KV heads, the model 4, tensor_parallel_size is 8"):
        kv_heads_of(config, FullAttentionSpec(num_kv_heads=1))
    assert kv_heads_of(config, MLAAttentionSpec()) == 1, "every rank has all of it"
    config.speculative_config.draft_model_config.get_total_num_kv_heads = lambda: 4
    assert kv_heads_of(config, FullAttentionSpec(num_kv_heads=1)) == 4


def test_beside_latents_the_heads_are_the_draft_models() -> None:
    """DeepSeek V3 says 128, and none of its layers has them; each rank has all of the latents."""
    config = engine(ranks=8, draft=drafts("eagle3"))
    config.model_config.use_mla = True
    config.speculative_config.draft_model_config.get_total_num_kv_heads = lambda: 16
    group = together(("head", 1, FullAttentionSpec()), ("model", LAYERS, MLAAttentionSpec(cache_dtype_str="auto")))
    found = facts_of(config, group, Shape(BLOCK, 1), Settings("/s", revision="1")).geometry
    assert [(cache.layers, cache.kv_heads) for cache in found.caches] == [(1, 16), (LAYERS, 1)]
    assert [cache.kv_heads for cache in rank_geometry(found, 8).caches] == [2, 1]
    with pytest.raises(Unfit, match="a rank has 3 KV heads, the draft model 16, tensor_parallel_size is 8"):
        kv_heads_of(config, FullAttentionSpec(num_kv_heads=3))


def test_engines_whose_draft_models_have_other_scales_share_no_page(tmp_path: Path) -> None:
    """Where `revision` names the weights, nothing else tells draft models of other files apart."""
    folders = [weights(tmp_path / name, scale) for name, scale in (("a", 0.5), ("b", 0.5), ("c", 0.25))]
    configs = [with_dtype("fp8_e4m3", draft=drafts("eagle3", folder)) for folder in folders]
    shape, settings = Shape(BLOCK, 1), Settings("/s", revision="1")
    facts = [facts_of(config, kv(FullAttentionSpec()), shape, settings) for config in configs]
    assert facts[0].kv_scales and facts[0].id == facts[1].id
    (difference,) = differences(facts[0], facts[2])
    assert difference.field == "kv_scales"
    assert kv_scales(engine(draft=drafts("eagle3", folders[0]))) == ""  # nothing is quantized
    assert kv_scales(with_dtype("fp8_e4m3", folder=folders[0])) not in ("", facts[0].kv_scales)  # the model's, not its


def test_a_draft_models_files_are_those_of_its_revision(tmp_path: Path) -> None:
    """vLLM loads those of speculative_config.revision, from where the model's own are."""
    for number, (branch, scale) in enumerate([("main", 0.5), ("v2", 0.25)]):
        file = weights(tmp_path / branch, scale) / "model.safetensors"
        downloaded(tmp_path / "cache", str(number) * 40, file.read_bytes(), branch)

    def names(folder: object, revision: str | None = None) -> tuple[str, str]:
        draft = drafts("eagle3", folder)
        draft.draft_model_config.revision = revision
        config = with_dtype("fp8_e4m3", draft=draft)
        config.load_config.download_dir = str(tmp_path / "cache")
        config.model_config.revision = "main"  # a draft model has one of its own
        return kv_scales(config), draft_name(config, Settings("/s"))

    assert names("org/a") == names("org/a", "main") == names("org/a", "0" * 40) == names(tmp_path / "main")
    assert names("org/a", "v2") == names("org/a", "1" * 40) == names(tmp_path / "v2")
    assert not set(names("org/a")) & set(names("org/a", "v2"))
    with pytest.raises(Unfit, match="no weight files of model 'org/a' were found"):
        names("org/a", "v3")


def test_a_draft_model_whose_weights_are_made_up_is_named_by_whoever_made_them(tmp_path: Path) -> None:
    config = with_settings("eagle", draft_load_config=loading(load_format="dummy"))
    config.load_config.load_format = "dummy"
    config.speculative_config.draft_model_config.model = str(weights(tmp_path / "a", 0.5))
    with pytest.raises(Unfit, match="load_format is dummy"):
        draft_name(config, Settings("/s"))
    assert draft_name(config, Settings("/s", revision="1")).endswith(" 1")
