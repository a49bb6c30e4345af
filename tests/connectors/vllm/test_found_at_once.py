"""What a daemon says of a prompt that waits reaches the scheduler's half before a step's outcome does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvferry.connectors.orders import News
from kvferry.connectors.worker_state import Reports
from tests.connectors.scheduling import TO_PREFILL, Daemon, Request, prefill
from tests.connectors.vllm.test_workers_namespace import SCHEDULER, half, process  # noqa: F401

TOKENS = 10_000


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(("found", "answer"), [(8000, (8000, True)), (0, (0, False))])
def test_it_is_heard_in_the_next_step(found: int, answer: tuple[int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    connector, reports = half(SCHEDULER), Reports()
    connector._scheduler = side = prefill(Daemon(fetch_tokens=16))
    request = Request("a", TOKENS, TO_PREFILL)
    connector.on_new_request(request)
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    reports.add_news(News(found={"b": 16}))
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False), "of another prompt, and in no process"
    monkeypatch.setitem(connector._workers, connector._engine, SimpleNamespace(reports=reports))
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False)
    reports.add_news(News(failed=frozenset("a"), found={"a": found}))
    assert connector.get_num_new_matched_tokens(request, 0) == (None, False), "it will not be loaded: a step tells"
    reports.take_news()
    reports.add_news(News(found={"a": found, "b": 16}))
    assert connector.get_num_new_matched_tokens(request, 0) == answer
    side.hear(News(found={"a": 16}))  # as the step's outcome says once more
    assert connector.get_num_new_matched_tokens(request, 0) == answer
    assert reports.take_news() == News(found={"a": found, "b": 16})
