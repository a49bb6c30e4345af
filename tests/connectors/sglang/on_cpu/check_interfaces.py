"""What SGLang offers a backend is what this one was written for."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest

from kvferry.connectors.sglang import versions
from kvferry.connectors.sglang.digests import prompt_pages
from kvferry.connectors.sglang.plugin import BACKEND
from kvferry.connectors.sglang.transfers import PollState


def test_every_hook_is_applied(sglang: str) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    assert sglang in (*versions.RUN, *versions.READ)
    assert set(HookRegistry._hooks) == HookRegistry._patched and len(HookRegistry._patched) >= 9
    reads_ahead = "sglang.srt.managers.scheduler.Scheduler.run_batch" in HookRegistry._patched
    assert reads_ahead is (sglang in versions.READ_AHEAD)


def test_the_backend_is_chosen_by_its_name(sglang: str) -> None:
    from sglang.srt import server_args
    from sglang.srt.disaggregation import decode, prefill, utils
    from sglang.srt.managers import disagg_service

    assert BACKEND in server_args.DISAGG_TRANSFER_BACKEND_CHOICES
    backend = utils.TransferBackend(BACKEND)
    assert backend in utils.TransferBackend and backend is utils.TransferBackend.KVFERRY
    for module in (decode, prefill, disagg_service):  # each has imported the function by its name
        found = module.get_kv_class(backend, utils.KVClassType.BOOTSTRAP_SERVER)
        assert found.__name__ == "KVFerryBootstrapServer"
    names = {kind.name: utils.get_kv_class(backend, kind).__name__ for kind in utils.KVClassType}
    assert names["MANAGER"] == "KVFerryManager" and names["KVARGS"] == "KVArgs"
    others = utils.get_kv_class(utils.TransferBackend.FAKE, utils.KVClassType.SENDER)
    assert others.__name__ == "FakeKVSender"


def test_states_have_the_numbers_of_sglang(sglang: str) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    names = ("Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success")
    assert [getattr(KVPoll, name) for name in names] == [int(state) for state in PollState]


def test_an_interface_that_differs_is_named(sglang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.base.conn import BaseKVSender
    from sglang.srt.disaggregation.utils import MetadataBuffers

    versions.check()
    monkeypatch.setattr(BaseKVSender, "send", lambda self, pages: None)
    with pytest.raises(versions.SGLangDiffers, match=r"BaseKVSender.send takes \(pages\), not \(kv_indices, state"):
        versions.check()
    monkeypatch.undo()
    monkeypatch.delattr(MetadataBuffers, "get_buf_infos")
    with pytest.raises(versions.SGLangDiffers, match="get_buf_infos is not there"):
        versions.check()


def test_a_version_that_nobody_tried_is_said(sglang: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import sglang as package

    monkeypatch.setattr(package, "__version__", "9.9", raising=False)
    with mock.patch.object(versions._log, "warning") as warning:
        versions.check()
    assert "9.9" in warning.call_args.args


def test_a_manager_outside_of_a_queue_is_refused(sglang: str) -> None:
    from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend, get_kv_class

    manager = get_kv_class(TransferBackend(BACKEND), KVClassType.MANAGER)
    with pytest.raises(RuntimeError, match="hooks were not applied"):
        manager(None, DisaggregationMode.DECODE, None, False)


NOT_CALLED = {
    "ensure_abort_notified",  # where enable_deferred_decode_kv_release is on, which is off
    "set_kv_buffer_tensors",  # these three where the staging buffer is on, which is refused
    "register_buffer_to_engine",
    "deregister_buffer_to_engine",
    "_staging_handler",
}


@pytest.mark.parametrize(
    ("variable", "module", "kind"),
    [
        ("disagg_kv_sender", "sender", "KVFerrySender"),
        ("kv_receiver", "receiver", "KVFerryReceiver"),
        ("kv_manager", "manager", "KVFerryManager"),
    ],
)
def test_what_sglang_uses_of_a_backend_is_there(sglang: str, variable: str, module: str, kind: str) -> None:
    """Methods and attributes, by the names in the source of its queues."""
    import sglang as package

    found = getattr(import_module(f"kvferry.connectors.sglang.{module}"), kind)
    made = {name for each in found.__mro__[:-1] for name in re.findall(r"self\.(\w+)\b.* = ", inspect.getsource(each))}
    used: set[str] = set()
    for path in (Path(package.__path__[0]) / "srt" / "disaggregation").glob("*.py"):
        used.update(re.findall(rf"\b{variable}\.(\w+)", path.read_text()))
    assert len(used) >= 6
    assert used - made - set(dir(found)) <= NOT_CALLED


def test_pages_have_the_names_of_sglangs_own_tiers(sglang: str) -> None:
    """By its source's formula: its own function is compiled at its first call."""
    from array import array
    from hashlib import sha256

    tokens = list(range(100, 100 + 40))
    first = sha256(array("I", tokens[:16]).tobytes()).digest()
    second = sha256(first + array("I", tokens[16:32]).tobytes()).digest()
    assert prompt_pages(tokens, 16).digests == first + second
