import pytest

from kvferry.connectors import worth


@pytest.fixture
def short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are short: else no wait would be worth the engine's steps."""
    monkeypatch.setattr(worth, "STEP_TOKENS", 0)
