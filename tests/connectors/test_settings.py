"""The connector's settings, and the fields of requests that users may set."""

import pytest

from kvferry.connectors.params import answer, decode_half, prefill_half
from kvferry.connectors.settings import Settings

ID = "0123456789abcdef" * 2


def test_defaults_and_what_is_set() -> None:
    settings = Settings.of({"socket": "/run/d.sock", "page_size": 64, "deadline_seconds": 5})
    assert settings == Settings("/run/d.sock", page_size=64, deadline_seconds=5)
    assert settings.blocks_per_page(32) == 2
    assert Settings("/s").blocks_per_page(32) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "socket is not set"),
        ({"socket": "/s", "sokcet": 1}, "sokcet: no such setting; there are socket, page_size"),
        ({"socket": 3}, "socket is 3; it must be a str"),
        ({"socket": "/s", "page_size": True}, "page_size is True; it must be a int"),
        ({"socket": "/s", "page_size": -1}, "page_size is -1"),
        ({"socket": "/s", "deadline_seconds": 0}, "deadline_seconds is 0; it must be above 0"),
        ({"socket": "/s", "lookup_seconds": "1"}, "lookup_seconds is '1'"),
    ],
)
def test_what_cannot_be_is_named(config: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings.of(config)


def test_each_data_parallel_rank_has_a_daemon_of_its_own() -> None:
    settings = Settings("/run/d-{dp_rank}.sock", prefill="p-{dp_rank}")
    assert settings.at_rank(1, 2) == Settings("/run/d-1.sock", prefill="p-1")
    assert settings.at_rank(0, 1) == Settings("/run/d-0.sock", prefill="p-0")
    assert Settings("/run/d.sock").at_rank(0, 1) == Settings("/run/d.sock")
    for rank, ranks in ((1, 1), (0, 2)):  # vLLM tells a dense model's rank that it is one of one
        with pytest.raises(ValueError, match=f"socket is '/run/d.sock', for data-parallel rank {rank}, too; each rank"):
            Settings("/run/d.sock").at_rank(rank, ranks)


def test_a_page_is_whole_blocks() -> None:
    with pytest.raises(ValueError, match="page_size is 48; it must be a multiple of the block size, 32"):
        Settings("/s", page_size=48).blocks_per_page(32)


def test_the_halves_of_a_request() -> None:
    first = prefill_half({"do_remote_decode": True, "kvferry_request": ID})
    assert first is not None and first.name.request_id.hex() == ID
    told = answer(first, "p1", 7)
    assert told["kvferry_first_token"] == 7 and "kvferry_first_token" not in answer(first, "p1", None)
    second = decode_half(told, "")
    assert second is not None and (second.name, second.prefill) == (first.name, "p1")
    assert decode_half({"do_remote_prefill": True, "kvferry_request": ID}, "only") is not None


def test_prefill_names_a_request_that_its_router_did_not() -> None:
    one, two = (prefill_half({"do_remote_decode": True}) for _ in range(2))
    assert one is not None and two is not None and one.name != two.name


@pytest.mark.parametrize("params", [None, {}, {"do_remote_prefill": False}, {"do_remote_decode": False}])
def test_a_request_without_halves(params: dict[str, object] | None) -> None:
    assert prefill_half(params) is None
    assert decode_half(params, "p") is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"kvferry_request": "xyz", "kvferry_prefill": "p"},
            "kvferry_request is 'xyz'; it must be 32 hexadecimal digits",
        ),
        ({"kvferry_prefill": "p"}, "kvferry_request is 'None'"),
        ({"kvferry_request": ID}, "kvferry_prefill is ''"),
        ({"kvferry_request": ID, "kvferry_prefill": 5}, "kvferry_prefill is '5'"),
        ({"kvferry_request": ID, "kvferry_prefill": "p", "kvferry_attempt": 0}, "kvferry_attempt is '0'"),
        ({"kvferry_request": ID, "kvferry_prefill": "p", "kvferry_attempt": True}, "kvferry_attempt is 'True'"),
    ],
)
def test_what_a_router_says_wrongly_is_named(params: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode_half({"do_remote_prefill": True, **params}, "")
