"""Pages' shapes and sizes, what is refused, and the id that stands for a namespace."""

import dataclasses
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proto import common_pb2 as common
from kvferry.transfer.geometry.kv_geometry import ITEMSIZES, MAX_CACHES, MAX_PAGE_BYTES, CacheShape, KVGeometry, Layout
from kvferry.transfer.geometry.namespace import NamespaceFacts, differences

GEOMETRY = KVGeometry(layers=3, kv_heads=2, head_dim=8, dtype="bfloat16", page_size=16)
FACTS = NamespaceFacts(
    model="llama", revision="1", geometry=GEOMETRY, digest_algorithm="sha256_cbor", root_digest=bytes(32)
)

geometries = st.builds(
    KVGeometry,
    layers=st.integers(1, 8),
    kv_heads=st.integers(1, 8),
    head_dim=st.integers(1, 64),
    dtype=st.sampled_from(sorted(ITEMSIZES)),
    page_size=st.integers(1, 64),
    layout=st.sampled_from(Layout),
    tensors=st.integers(1, 2),
)


@given(geometries)
def test_sizes_agree_with_each_other_and_with_the_shape(geometry: KVGeometry) -> None:
    elements = int(np.prod(geometry.page_shape))
    assert geometry.page_bytes == elements * geometry.itemsize
    assert geometry.page_bytes == geometry.token_bytes * geometry.page_size
    assert geometry.page_bytes == geometry.fragments * geometry.fragment_bytes
    assert geometry.token_bytes == geometry.fragments * geometry.fragment_token_bytes


@given(geometries, st.data())
def test_a_fragment_holds_its_tokens_one_after_the_other(geometry: KVGeometry, data: st.DataObject) -> None:
    """Token t of every fragment is found where the shape says that token t is."""
    token = data.draw(st.integers(0, geometry.page_size - 1))
    page = np.arange(int(np.prod(geometry.page_shape))).reshape(geometry.page_shape)
    of_token = page[:, :, :, token] if geometry.layout is Layout.PAGE_HND else page[:, :, token]
    length = geometry.fragment_token_bytes // geometry.itemsize
    by_fragment = page.reshape(geometry.fragments, -1)[:, token * length : (token + 1) * length]
    assert np.array_equal(np.sort(of_token, axis=None), np.sort(by_fragment, axis=None))


@given(geometries)
def test_it_goes_over_the_wire_unchanged(geometry: KVGeometry) -> None:
    data = geometry.to_proto().SerializeToString()
    assert KVGeometry.from_proto(common.Geometry.FromString(data)) == geometry


def test_what_the_wire_leaves_out_has_its_stated_meaning() -> None:
    message = GEOMETRY.to_proto()
    message.layout, message.tensors = common.LAYOUT_UNSPECIFIED, 0
    geometry = KVGeometry.from_proto(message)
    assert (geometry.layout, geometry.tensors) == (Layout.PAGE_NHD, 2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("layers", 1025),
        ("kv_heads", 0),
        ("head_dim", 1 << 20),
        ("page_size", 0),
        ("page_size", 4097),
        ("tensors", 3),
        ("dtype", "float31"),
    ],
)
def test_a_value_out_of_bounds_is_named(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"geometry\.{field} is '?{value}'?; it must be"):
        dataclasses.replace(GEOMETRY, **{field: value})  # type: ignore[arg-type]


def test_every_dtype_with_whole_bytes_has_torchs_size() -> None:
    torch = pytest.importorskip("torch")
    kept = re.compile(r"bool|bfloat16|u?int(8|16|32|64)|float\d+(_\w+)?|complex\d+")  # not those made of a few bits
    known = {str(value)[6:]: value.itemsize for value in vars(torch).values() if isinstance(value, torch.dtype)}
    whole = {name: size for name, size in known.items() if kept.fullmatch(name)}
    assert len(whole) >= 12
    assert whole.items() <= ITEMSIZES.items()


@pytest.mark.parametrize("name", ["torch.float16", "int4", "qint8", "Float32", ""])
def test_no_other_name_is_a_dtype(name: str) -> None:
    with pytest.raises(ValueError, match=rf"geometry\.dtype is '{name}'; it must be one of bool, int8, .*, complex128"):
        dataclasses.replace(GEOMETRY, dtype=name)


def test_a_page_over_the_bound_is_refused() -> None:
    with pytest.raises(ValueError, match=f"the bound is {MAX_PAGE_BYTES}"):
        KVGeometry(layers=1024, kv_heads=128, head_dim=256, dtype="float64", page_size=4096)


INDEXED = dataclasses.replace(GEOMETRY, further=(CacheShape(3, 1, 132, "uint8", 1), CacheShape(2, 4, 6, "bfloat16")))


def test_a_page_has_all_its_caches() -> None:
    first, indexer, wider = INDEXED.caches
    assert first == GEOMETRY == GEOMETRY.caches[0]
    assert (indexer.layers, indexer.tensors, indexer.head_dim, indexer.dtype) == (3, 1, 132, "uint8")
    assert (wider.kv_heads, wider.tensors, wider.page_size, wider.further) == (4, 2, GEOMETRY.page_size, ())
    assert [cache.token_bytes for cache in INDEXED.caches] == [192, 3 * 132, 2 * 2 * 4 * 6 * 2]
    assert INDEXED.token_bytes == sum(cache.token_bytes for cache in INDEXED.caches)
    assert INDEXED.page_bytes == INDEXED.token_bytes * INDEXED.page_size
    own = dataclasses.replace(INDEXED, layout=Layout.ENGINE, head_runs=2)
    assert [cache.head_runs for cache in own.caches] == [2, 1, 2]


def test_bytes_a_token_are_the_models_own() -> None:
    latents = KVGeometry(61, 1, 576, "bfloat16", 64, Layout.ENGINE, tensors=1)
    indexed = dataclasses.replace(latents, further=(CacheShape(61, 1, 132, "uint8", 1),))
    packed = dataclasses.replace(indexed, head_dim=656, dtype="uint8")
    found = {"V3": latents, "V3.2": indexed, "V3.2, fp8": packed}
    for name, geometry in found.items():
        print(f"{name}: {geometry.token_bytes:,} bytes a token")
    assert [each.token_bytes for each in found.values()] == [70_272, 70_272 + 8_052, 61 * 656 + 8_052]


def test_several_caches_go_over_the_wire() -> None:
    data = INDEXED.to_proto().SerializeToString()
    assert KVGeometry.from_proto(common.Geometry.FromString(data)) == INDEXED
    message = INDEXED.to_proto()
    message.further[1].tensors = 0
    assert KVGeometry.from_proto(message) == INDEXED, "0 means K and V"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layers": 0}, r"geometry\.further\[1\]\.layers is 0; it must be 1 to 1024"),
        ({"kv_heads": 4097}, r"geometry\.further\[1\]\.kv_heads is 4097"),
        ({"head_dim": 0}, r"geometry\.further\[1\]\.head_dim is 0"),
        ({"tensors": 3}, r"geometry\.further\[1\]\.tensors is 3; it must be 1 to 2"),
        ({"dtype": "float31"}, r"geometry\.further\[1\]\.dtype is 'float31'; it must be one of"),
    ],
)
def test_a_further_cache_out_of_bounds_is_named(change: dict[str, object], said: str) -> None:
    message = INDEXED.to_proto()
    for name, value in change.items():
        setattr(message.further[1], name, value)
    if change == {"tensors": 3}:
        assert message.further[1].tensors == 3
    with pytest.raises(ValueError, match=said):
        KVGeometry.from_proto(message)


def test_a_page_has_so_many_caches_and_no_more() -> None:
    further = INDEXED.further[:1] * (MAX_CACHES - 1)
    assert len(dataclasses.replace(INDEXED, further=further).caches) == MAX_CACHES
    message = INDEXED.to_proto()
    message.further.extend([message.further[0]] * 1000)
    with pytest.raises(
        ValueError, match=rf"geometry\.further, the number of entries, is {MAX_CACHES}; it must be 0 to 7"
    ):
        KVGeometry.from_proto(message)
    wide = CacheShape(1024, 4096, 1 << 16, "float64")
    with pytest.raises(ValueError, match=f"the bound is {MAX_PAGE_BYTES}"):
        dataclasses.replace(INDEXED, further=(wide,))


def test_who_says_nothing_of_further_caches_is_another_namespace() -> None:
    """An older release leaves the field out: its pages lack those bytes, or have them in no known place."""
    mine = dataclasses.replace(FACTS, geometry=INDEXED)
    message = mine.to_proto()
    message.geometry.ClearField("further")
    older = NamespaceFacts.from_proto(message)
    assert older.id != mine.id
    (difference,) = differences(mine, older)
    assert str(difference) == (
        "geometry.further is 3 layers of 1 x 1 x 132 uint8, 2 layers of 2 x 4 x 6 bfloat16 here and none there; serve "
        "the same model on both sides, with the same kvferry: an older one knows one cache alone"
    )


def test_an_unknown_layout_from_the_wire_is_named() -> None:
    message = common.Geometry.FromString(GEOMETRY.to_proto().SerializeToString() + bytes([6 << 3, 9]))
    with pytest.raises(ValueError, match=r"geometry\.layout is 9"):
        KVGeometry.from_proto(message)


# One other value for each field, so that a field added later must be thought of here.
OTHER: dict[str, object] = {
    "model": "qwen",
    "revision": "2",
    "digest_algorithm": "blake3_cbor",
    "root_digest": bytes([1]) * 32,
    "tenant_salt_digest": bytes([2]) * 32,
    "engine_layout": "vllm cpu, blocks of 8",
    "digest_tokens": 8,
    "kv_scales": "5c1e",
    "speculative": "eagle3 head",
}
OTHER_GEOMETRY: dict[str, object] = {
    "layers": 4,
    "kv_heads": 3,
    "head_dim": 16,
    "dtype": "float16",
    "page_size": 32,
    "layout": Layout.PAGE_HND,
    "tensors": 1,
    "further": (CacheShape(3, 1, 132, "uint8", 1),),
}


def test_other_values_are_given_for_every_field() -> None:
    assert {field.name for field in dataclasses.fields(NamespaceFacts)} == OTHER.keys() | {"geometry"}
    assert {field.name for field in dataclasses.fields(KVGeometry) if field.compare} == OTHER_GEOMETRY.keys()


def others() -> list[tuple[str, NamespaceFacts]]:
    """Each differs from FACTS in the field named."""
    plain = [(name, dataclasses.replace(FACTS, **{name: value})) for name, value in OTHER.items()]  # type: ignore[arg-type]
    geometries = [
        (f"geometry.{name}", dataclasses.replace(GEOMETRY, **{name: value}))  # type: ignore[arg-type]
        for name, value in OTHER_GEOMETRY.items()
    ]
    return plain + [(name, dataclasses.replace(FACTS, geometry=geometry)) for name, geometry in geometries]


def test_every_field_changes_the_id() -> None:
    ids = [FACTS.id, *(facts.id for _, facts in others())]
    assert len(set(ids)) == len(ids)
    assert all(len(each) == 32 for each in ids)


@pytest.mark.parametrize(("field", "theirs"), others())
def test_a_difference_names_field_both_values_and_remedy(field: str, theirs: NamespaceFacts) -> None:
    (difference,) = differences(FACTS, theirs)
    assert difference.field == field
    assert difference.ours != difference.theirs
    assert difference.remedy
    for said in (field, difference.ours, difference.theirs, difference.remedy):
        assert said in str(difference)


def test_what_explains_other_differences_is_told_first() -> None:
    """A draft model's layers are among the geometry's, and quantized elements have a type of their own."""
    more = dataclasses.replace(GEOMETRY, layers=GEOMETRY.layers + 1, dtype="uint8")
    drafts = dataclasses.replace(FACTS, geometry=more, kv_scales="5c1e", speculative="eagle3 head")
    told = [difference.field for difference in differences(FACTS, drafts)]
    assert told == ["kv_scales", "speculative", "geometry.layers", "geometry.dtype"]
    other = dataclasses.replace(drafts, model="qwen")
    assert differences(FACTS, other)[0].field == "model"


def test_equal_facts_have_no_difference_and_one_id() -> None:
    again = NamespaceFacts.from_proto(common.NamespaceFacts.FromString(FACTS.to_proto().SerializeToString()))
    assert again == FACTS
    assert again.id == FACTS.id
    assert differences(FACTS, again) == []


def test_text_does_not_leak_from_one_field_into_the_next() -> None:
    first = dataclasses.replace(FACTS, model="a", revision="b\ndigest_algorithm:1:c")
    second = dataclasses.replace(FACTS, model="a\nrevision:1:b", revision="c")
    assert len({first.id, second.id, FACTS.id}) == 3


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("model", "", "facts.model has 0 characters"),
        ("model", "x" * 513, "facts.model has 513 characters"),
        ("revision", "x" * 513, "facts.revision has 513 characters"),
        ("root_digest", b"short", "facts.root_digest has 5 bytes; it must have 32"),
        ("tenant_salt_digest", b"short", "facts.tenant_salt_digest has 5 bytes; it must have 0 or 32"),
    ],
)
def test_unusable_facts_are_named(field: str, value: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(FACTS, **{field: value})  # type: ignore[arg-type]


def test_what_was_added_later_leaves_older_ids_as_they_were() -> None:
    assert FACTS.id.hex() == "32fddf148d71b8dec6fd57268f02117824a75d04fdedb08a04a4c86cadf6bb0f"


def test_a_layout_of_an_engine_has_a_name() -> None:
    geometry = dataclasses.replace(GEOMETRY, layout=Layout.ENGINE)
    with pytest.raises(ValueError, match=r"engine_layout has 0 characters; with layout ENGINE it must have 1 to 512"):
        dataclasses.replace(FACTS, geometry=geometry)


def in_runs(runs: int) -> NamespaceFacts:
    """Of an engine's layout, each head in that many runs."""
    geometry = dataclasses.replace(GEOMETRY, layout=Layout.ENGINE, head_runs=runs)
    return dataclasses.replace(FACTS, geometry=geometry, engine_layout="heads outermost")


def test_how_pages_are_cut_is_no_difference_unless_both_say_it() -> None:
    """Engines of a release that does not say it have the same pages."""
    unsaid, one, two = (in_runs(runs) for runs in (0, 1, 2))
    assert unsaid.id == one.id == two.id and unsaid == one == two
    for pair in ((unsaid, one), (one, unsaid), (two, two)):
        assert differences(*pair) == []
    (difference,) = differences(one, two)
    assert str(difference).startswith("geometry.head_runs is 1 here and 2 there; install the same connector")


@pytest.mark.parametrize("runs", [0, 1, 2])
def test_runs_of_heads_go_over_the_wire(runs: int) -> None:
    data = in_runs(runs).to_proto().SerializeToString()
    geometry = NamespaceFacts.from_proto(common.NamespaceFacts.FromString(data)).geometry
    assert (geometry.head_runs, geometry.runs_of_a_head, geometry.heads_first) == (runs, runs, runs == 2)


def test_runs_of_heads_are_an_engines_layouts() -> None:
    with pytest.raises(ValueError, match=r"geometry\.head_runs is 3; it must be 0 to 2"):
        in_runs(3)
    for layout in (Layout.PAGE_NHD, Layout.PAGE_HND):
        with pytest.raises(ValueError, match=r"geometry\.head_runs is 1; it must be 0 to 0"):
            dataclasses.replace(GEOMETRY, layout=layout, head_runs=1)
    assert dataclasses.replace(GEOMETRY, layout=Layout.PAGE_HND).runs_of_a_head == GEOMETRY.tensors
    assert dataclasses.replace(GEOMETRY, layout=Layout.PAGE_NHD).runs_of_a_head == 0


def test_digests_of_a_part_of_a_page_divide_it() -> None:
    with pytest.raises(ValueError, match=r"digest_tokens is 6; it must divide the page size, 16"):
        dataclasses.replace(FACTS, digest_tokens=6)
