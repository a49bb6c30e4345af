"""Every inbound length and count at its bound, and one past it: docs/internals/bounds.md has the same table."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from annotated_types import Ge, Le
from pydantic import ValidationError

from kvferry.client.requests import RequestFailed
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.core.errors import RequestError
from kvferry.daemon.peers.session import SessionBroken
from kvferry.front.engines import Mismatch
from kvferry.front.errors import ApiError
from kvferry.front.vllm_body import Refusal
from kvferry.proto import limits as wire_limits
from kvferry.transfer.courier.messages import MAX_NOTIFICATION_BYTES, MAX_PACKET_BYTES, MessageError, decode_order
from kvferry.transfer.protocol.slots import SlotError
from tests.limits.limit_cases import LIMITS, Limit
from tests.limits.more_cases import MORE

CASES = {**LIMITS, **MORE}
# Of gRPC itself, and of a text that is cut where it is made.
ELSEWHERE = {
    "MAX_MESSAGE_BYTES": ("test_servers.py", "test_a_message_of_a_byte_too_many_is_refused"),
    "MAX_REASON_CHARS": ("test_servers.py", "test_a_reason_is_cut_where_it_is_made"),
}


@pytest.mark.parametrize("limit", CASES.values(), ids=CASES.keys())
def test_at_its_bound_and_one_past_it(limit: Limit) -> None:
    assert limit.give(limit.within) is None
    try:
        said = limit.give(limit.past)
    except (RequestError, RequestFailed, SessionBroken, SlotError, Mismatch, ApiError, Refusal, ValueError) as error:
        said = str(error)
    assert said is not None and limit.refusal in str(said), said


def test_every_bound_of_the_wire_is_in_the_table() -> None:
    names = {name for name, value in vars(wire_limits).items() if name.isupper() and isinstance(value, int)}
    assert names <= CASES.keys() | ELSEWHERE.keys(), f"not tested: {names - CASES.keys() - ELSEWHERE.keys()}"
    for name, (module, test) in ELSEWHERE.items():
        assert f"\ndef {test}(" in (Path(__file__).parent / module).read_text(), f"{name}: {module} has no {test}"


@pytest.mark.parametrize("nbytes", [0, 1, MAX_PACKET_BYTES + 1])
def test_a_couriers_packets_have_a_length(nbytes: int) -> None:
    with pytest.raises(MessageError):
        decode_order(bytes(nbytes))
    assert MAX_NOTIFICATION_BYTES < MAX_PACKET_BYTES


NUMBERS = [name for name, field in DaemonConfig.model_fields.items() if field.annotation in (int, float)]


def bounds(setting: str) -> tuple[float, float]:
    """Least and most, as the model has them."""
    metadata = DaemonConfig.model_fields[setting].metadata
    least = [meta.ge for meta in metadata if isinstance(meta, Ge)]
    most = [meta.le for meta in metadata if isinstance(meta, Le)]
    assert len(least) == len(most) == 1, f"{setting} lacks a bound"
    return cast(float, least[0]), cast(float, most[0])


@pytest.mark.parametrize("setting", NUMBERS)
def test_settings_have_bounds(setting: str) -> None:
    """At its bounds a setting may still not go with others; then it is no setting alone that is refused."""
    assert len(NUMBERS) >= 20
    least, most = bounds(setting)
    step = 1 if DaemonConfig.model_fields[setting].annotation is int else 0.001
    for past in (least - step, most + step):
        assert refused_alone(setting, past) == {setting}
    for within in (least, most):
        assert not refused_alone(setting, within)


def refused_alone(setting: str, value: float) -> set[object]:
    """The settings that are refused by themselves, without those whose defaults follow from one of them."""
    try:
        DaemonConfig.model_validate({"role": "decode", setting: value})
    except ValidationError as error:
        told = [each for each in error.errors() if each["type"] != "default_factory_not_called"]
        return {each["loc"][0] for each in told if each["loc"]}
    return set()
