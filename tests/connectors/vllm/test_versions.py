"""Versions of vLLM: the interface that the connector uses is there, or the engine is refused."""

import importlib.util
from types import SimpleNamespace

import pytest

from kvferry.connectors.vllm.versions import HOOKS, TESTED, Call, InterfaceDiffers, check, check_calls


def base_with(**changed: tuple[str, ...] | None) -> type:
    hooks = {name: changed.get(name, arguments) for name, arguments in HOOKS.items()}
    body = "".join(
        f"    def {name}({', '.join(('self', *arguments))}): ...\n"
        for name, arguments in hooks.items()
        if arguments is not None
    )
    made: dict[str, type] = {}
    module = compile(f"class Base:\n{body}", "base", "exec")
    exec(module, made)
    return made["Base"]


def test_the_interface_that_was_run_is_accepted(caplog: pytest.LogCaptureFixture) -> None:
    check(base_with(), TESTED[-1])
    check(base_with(), f"{TESTED[-1]}+cpu")
    assert not caplog.records


def test_another_version_of_the_same_interface_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    check(base_with(), "9.9.9")
    assert "not with 9.9.9" in caplog.text


def test_what_is_missing_is_named_with_what_to_do() -> None:
    with pytest.raises(InterfaceDiffers, match=r"9\.9 KVConnectorBase_V1\.get_finished is not there: install vLLM"):
        check(base_with(get_finished=None), "9.9")


def test_other_arguments_are_named() -> None:
    with pytest.raises(InterfaceDiffers, match=r"takes \(request\), not \(request, num_computed_tokens\)"):
        check(base_with(get_num_new_matched_tokens=("request",)), "9.9")


def test_what_is_called_may_take_more_but_need_not() -> None:
    call = Call(SimpleNamespace(called=lambda request, tokens, more=0: None), "called", 2)
    check_calls("9.9", call, call._replace(keywords=("more",)))
    for other in (call._replace(positional=1), call._replace(keywords=("blocks",))):
        with pytest.raises(InterfaceDiffers, match=r"called takes \(request, tokens, more\), not \(argument 1"):
            check_calls("9.9", call, other)


def test_the_installed_vllm_has_it() -> None:
    try:
        found = importlib.util.find_spec("vllm.distributed.kv_transfer")
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip("vLLM is not installed here (bench/vllm/venv.sh makes an environment with it)")
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from kvferry.connectors.vllm import KVFerryConnector, scheduler

    assert scheduler.KVFerryScheduler is not None
    assert issubclass(KVFerryConnector, KVConnectorBase_V1)
