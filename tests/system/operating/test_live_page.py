"""The live page of real daemons in a real browser, and what it costs them."""

from __future__ import annotations

import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvferry.daemon.cli.stack import Stack, lasting_port
from kvferry.daemon.cli.system import start_replicas
from tests.support.engines import Engines
from tests.support.stacks import SmallSystem

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
STATES = {"leased", "arriving", "orphaned", "spilling", "restoring", "cached", "free"}
VIEWERS, MEASURED_SECONDS, COST = 3, 15.0, 0.01
Page = Any  # playwright's


@contextmanager
def browser_page() -> Iterator[Page]:
    """A page of a headless browser. Skips where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright to drive a browser with")
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed (apt-get install chromium)")
    with sync_api.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        try:
            yield browser.new_page(viewport={"width": 1280, "height": 1500})
        finally:
            browser.close()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if holds():
            return
        time.sleep(0.1)
    raise AssertionError("it does not come")


def pages_by_state(page: Page, daemon: str, kind: str) -> dict[str, int]:
    parts = page.query_selector_all(f"section[data-daemon={daemon}] .pool[data-kind={kind}] .part")
    return {part.get_attribute("data-state"): int(part.get_attribute("data-pages")) for part in parts}


def number(page: Page, daemon: str, name: str) -> str:
    found = page.text_content(f'section[data-daemon={daemon}] [data-number="{name}"] b')
    return str(found)


def rates(page: Page) -> list[str]:
    """The sessions' rates, all at once: the page replaces its elements."""
    cells = "section[data-role] .sessions tr[data-peer] td:nth-child(3)"
    return list(page.eval_on_selector_all(cells, "cells => cells.map(cell => cell.textContent)"))


@pytest.mark.timeout(120)
def test_it_shows_what_moves(stack: Stack, tmp_path: Path) -> None:
    with browser_page() as page:
        at = f"127.0.0.1:{lasting_port()}"
        flags = ["--ui", "--metrics", at, "--host-bytes", "16MiB"]
        spec = SmallSystem(page_size=16, decode_pool_bytes=4 << 20, decode_flags=flags)
        prefills, decodes = start_replicas(stack, spec)
        asked: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(f"http://{at}/ui")
        page.wait_for_selector("section[data-daemon=decode-0][data-role=decode]")
        page.wait_for_selector("section[data-daemon=prefill-0][data-role=prefill]")
        assert set(pages_by_state(page, "decode-0", "device")) == STATES
        assert pages_by_state(page, "decode-0", "device")["cached"] == 0
        assert number(page, "decode-0", "hit rate") == "-"
        with Engines(prefills[0], decodes[0]) as engines:
            for chat in range(6):
                first = engines.turn(list(range(1000 * chat, 1000 * chat + 400)), 20)
                engines.turn(list(range(1000 * chat, 1000 * chat + 400)) + first.output, 20)
            until(lambda: page.query_selector("rect.run") is not None)
            until(lambda: number(page, "decode-0", "finished") == "12")
            page.wait_for_selector("tr[data-peer=prefill-0][data-state=up]")
            held = pages_by_state(page, "decode-0", "device")
            assert held["cached"] > 100 and page.query_selector('[id="decode-0/decode/hits"] path.hits')
            assert float(number(page, "decode-0", "hit rate").split()[0]) > 40
            assert "MiB" in number(page, "decode-0", "saved") or "KiB" in number(page, "decode-0", "saved")
            engines.turn(list(range(9000, 9400)), 20)
            until(lambda: len(moving := rates(page)) == 2 and not any(rate.startswith("0 ") for rate in moving))
        picture = page.screenshot(path=str(tmp_path / "live.png"))
        assert len(picture) > 20_000
        assert not said, said
        assert {url.split("/")[2] for url in asked} == {at}


@pytest.mark.timeout(120)
def test_a_request_that_waits_is_shown_with_its_stage(stack: Stack) -> None:
    at = f"127.0.0.1:{lasting_port()}"
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=16, decode_flags=["--ui", "--metrics", at]))
    with Engines(prefills[0], decodes[0]) as engines:
        over = threading.Event()

        def turns() -> None:
            while not over.is_set():  # the page is made anew once a second, and a turn may be shorter
                engines.turn(list(range(100)), 3000)

        turning = threading.Thread(target=turns)
        turning.start()
        seen: set[str] = set()

        def look() -> bool:
            for request in view(at)["daemons"][0]["roles"][0]["requests"]:
                assert len(request["request"]) == 12 and request["tokens"] == 100 and request["peer"] == "prefill-0"
                seen.add(request["stage"])
            return "ready" in seen

        try:
            until(look)
        finally:
            over.set()
            turning.join(60)
    until(lambda: view(at)["daemons"][0]["roles"][0]["requests"] == [])


def view(at: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{at}/ui/data", timeout=10) as answer:
        return json.load(answer)


@pytest.mark.nightly
@pytest.mark.timeout(120)
def test_three_viewers_cost_a_hundredth_of_a_core(stack: Stack) -> None:
    at = f"127.0.0.1:{lasting_port()}"
    prefills, decodes = start_replicas(stack, SmallSystem(page_size=16, decode_flags=["--ui", "--metrics", at]))
    with Engines(prefills[0], decodes[0]) as engines:
        for chat in range(40):
            engines.turn(list(range(1000 * chat, 1000 * chat + 400)), 5)
    daemon = psutil.Process(decodes[0].daemon.popen.pid)

    def spent() -> float:
        """Seconds of a core that it uses in a second."""
        begin, before = time.monotonic(), daemon.cpu_times()
        time.sleep(MEASURED_SECONDS)
        after = daemon.cpu_times()
        return (after.user + after.system - before.user - before.system) / (time.monotonic() - begin)

    alone = spent()
    looked: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(2.0):  # as the page does
            looked.append(len(view(at)["daemons"]))

    viewers = [threading.Thread(target=look) for _ in range(VIEWERS)]
    for viewer in viewers:
        viewer.start()
        time.sleep(0.5)  # not all at once
    watched = spent()
    over.set()
    for viewer in viewers:
        viewer.join(15)
    print(f"{1e3 * alone:.1f} ms/s alone, {1e3 * watched:.1f} ms/s with {VIEWERS} viewers, {len(looked)} looks")
    assert len(looked) >= VIEWERS * MEASURED_SECONDS / 2 * 0.8 and set(looked) == {2}
    assert watched - alone <= COST, (alone, watched)


def test_without_the_flag_there_is_no_page(stack: Stack) -> None:
    at = f"127.0.0.1:{lasting_port()}"
    start_replicas(stack, SmallSystem(page_size=16, prefills=0, decode_flags=["--metrics", at]))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        view(at)
