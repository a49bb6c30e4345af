"""The words of an engine's ranks: passed on when all have said them; one that aborts, or does not come, ends it."""

from __future__ import annotations

import pytest

from kvferry.daemon.core.errors import RequestError, unavailable
from kvferry.daemon.sides import rank_words
from kvferry.daemon.sides.rank_words import OPEN_SECONDS, Pass, RankWords, Refuse, Tell, Word
from kvferry.proto import common_pb2 as common
from kvferry.proto import worker_pb2 as wire

NAME = common.RequestName(request_id=b"r" * 16, attempt=1)
ADMIT = wire.WorkerMessage(admit=wire.Admit(name=NAME, tokens=9, digests=b"d" * 32))
PART = wire.WorkerMessage(admit=wire.Admit(name=NAME))
PART_BEGIN = wire.WorkerMessage(begin=wire.Begin(name=NAME))
BEGIN = wire.WorkerMessage(begin=wire.Begin(name=NAME, tokens=64))
ABORT = wire.WorkerMessage(abort=wire.Abort(name=NAME))
AUX = wire.WorkerMessage(aux=wire.Aux(name=NAME))
STOW = wire.WorkerMessage(stow=wire.Stow(name=NAME))
FINISH = wire.WorkerMessage(finish=wire.Finish(name=NAME, tokens=9))


def progress(tokens: int, *blocks: int) -> wire.WorkerMessage:
    return wire.WorkerMessage(progress=wire.Progress(name=NAME, tokens=tokens, blocks=blocks))


def say(words: RankWords, rank: int, message: wire.WorkerMessage, now: float = 0.0) -> list[Word]:
    return list(words.take(rank, str(message.WhichOneof("kind")), message, now))


def told(words: list[Word]) -> list[tuple[int, str]]:
    return [(word.rank, str(word.event.WhichOneof("kind"))) for word in words if isinstance(word, Tell)]


def opened(words: RankWords, opening: wire.WorkerMessage = ADMIT) -> None:
    for rank in range(1, 3):
        assert say(words, rank, PART) == []
    assert say(words, 0, opening) == [Pass(str(opening.WhichOneof("kind")), opening)]


def test_what_all_have_said_is_passed_on_once_as_rank_0_said_it() -> None:
    words = RankWords(3)
    opened(words)
    assert say(words, 0, FINISH) == say(words, 2, FINISH) == []
    assert say(words, 1, FINISH) == [Pass("finish", FINISH)]
    assert len(words) == 0


def test_progress_is_that_of_the_last_with_the_blocks_that_rank_0_named() -> None:
    words = RankWords(3)
    opened(words, BEGIN)
    assert say(words, 0, progress(32, 7, 8)) == say(words, 1, progress(64)) == []
    assert say(words, 2, progress(32)) == [Pass("progress", progress(32, 7, 8))]
    assert say(words, 0, progress(64, 9)) == []
    assert say(words, 2, progress(64)) == [Pass("progress", progress(64, 9))]
    assert say(words, 1, FINISH) == []
    assert told(say(words, 1, progress(65))) == [(1, "failed")], "behind its end"
    with pytest.raises(RequestError, match="66 are named of 64 tokens"):
        say(words, 0, progress(65, *range(66)))


def test_what_a_rank_has_computed_before_another_has_opened_it_counts() -> None:
    """An engine with blocks of its own waits for no Begun: its ranks' loops are woken when they are."""
    words = RankWords(3)
    assert say(words, 0, BEGIN) == say(words, 1, PART_BEGIN) == []
    assert say(words, 0, progress(32, 7)) == say(words, 1, progress(64)) == say(words, 0, progress(64, 8)) == []
    assert say(words, 0, AUX) == []
    assert say(words, 2, PART_BEGIN) == [Pass("begin", BEGIN)]
    assert say(words, 2, progress(64)) == [Pass("progress", progress(64, 7, 8))]
    assert say(words, 2, AUX) == []
    assert say(words, 1, AUX) == [Pass("aux", AUX)]
    assert len(words) == 0


def test_what_was_handed_in_and_not_every_rank_has_opened_failed() -> None:
    words = RankWords(3)
    assert say(words, 0, BEGIN) == say(words, 1, PART_BEGIN) == []
    assert say(words, 0, progress(64, 7)) == say(words, 0, AUX) == []
    assert told(list(words.tick(OPEN_SECONDS))) == [(0, "failed"), (1, "failed")]
    assert told(say(words, 1, ABORT)) == [(0, "ended"), (1, "ended")]
    assert say(words, 0, ABORT) == [Pass("abort", ABORT)], "an answer to what it was told"
    assert len(words) == 0


def fetch(*blocks: int) -> wire.WorkerMessage:
    return wire.WorkerMessage(fetch=wire.Fetch(name=NAME, blocks=blocks, held_tokens=16))


def waiting() -> RankWords:
    """Three ranks have a prompt open that waits for a fetch."""
    words = RankWords(3)
    waits = wire.Begin(name=NAME, tokens=64, patience=wire.PATIENCE_FETCH, held_tokens=32)
    opened(words, wire.WorkerMessage(begin=waits))
    return words


def test_blocks_are_fetched_into_when_all_ranks_have_named_them_as_rank_0_did() -> None:
    """Before that what a rank had queued on its GPU may still use them."""
    words = waiting()
    assert say(words, 1, fetch(7, 8)) == say(words, 0, fetch(5, 6)) == []
    assert told(say(words, 1, fetch(7, 8))) == [(1, "failed")], "it comes once"
    assert say(words, 2, fetch(7, 8)) == [Pass("fetch", fetch(5, 6))]
    assert say(words, 2, progress(64)) == say(words, 1, progress(64)) == []
    assert say(words, 0, progress(64, 9)) == [Pass("progress", progress(64, 9))], "it goes on as ever"


def test_nothing_is_fetched_where_one_rank_has_no_blocks_for_it() -> None:
    words = waiting()
    assert say(words, 0, fetch(5, 6)) == say(words, 1, fetch()) == []
    nothing = wire.WorkerMessage(fetch=wire.Fetch(name=NAME))
    assert say(words, 2, fetch(5, 6)) == [Pass("fetch", nothing)]


def test_what_a_rank_gave_up_is_fetched_for_none() -> None:
    words = waiting()
    assert say(words, 0, fetch(5, 6)) == say(words, 1, fetch(5, 6)) == []
    assert told(say(words, 2, ABORT)) == [(0, "failed"), (1, "failed")]
    assert told(say(words, 2, fetch(5, 6))) == [(2, "failed")], "behind its end"
    assert say(words, 0, ABORT) == []
    assert say(words, 1, ABORT) == [Pass("abort", ABORT)]
    words = waiting()
    assert told(say(words, 2, ABORT)) == [(0, "failed"), (1, "failed")]
    assert say(words, 0, fetch(5, 6)) == say(words, 1, fetch(5, 6)) == [], "they hear of it, and answer"
    assert say(words, 0, ABORT) == []
    assert say(words, 1, ABORT) == [Pass("abort", ABORT)]
    assert len(words) == 0


def test_what_rank_0_has_fetched_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_words, "MAX_WAITING_BYTES", 200)
    words = waiting()
    assert told(say(words, 0, fetch(*range(1000, 1200)))) == [(0, "failed"), (1, "failed"), (2, "failed")]
    assert say(words, 1, fetch(5, 6)) == say(words, 2, fetch(5, 6)) == [], "they hear of it, and answer"
    words = waiting()
    assert say(words, 0, fetch(5, 6)) == say(words, 1, fetch(5, 6)) == []
    assert say(words, 2, fetch(5, 6)) == [Pass("fetch", fetch(5, 6))]
    assert words._waiting_bytes == 0


def test_one_that_aborts_has_it_aborted_when_all_have_answered() -> None:
    words = RankWords(3)
    opened(words)
    assert say(words, 2, FINISH) == []
    assert told(say(words, 1, ABORT)) == [(0, "failed")], "rank 2 has said its last word"
    assert say(words, 0, ABORT) == [Pass("abort", ABORT)]
    assert say(words, 2, ABORT) == [Pass("abort", ABORT)], "an answer to what it was told since"
    assert len(words) == 0


def test_one_that_aborts_when_rank_0_has_finished_it_has_it_aborted() -> None:
    words = RankWords(3)
    opened(words)
    assert say(words, 0, FINISH) == []
    assert told(say(words, 2, ABORT)) == [(1, "failed")]
    assert say(words, 1, ABORT) == [Pass("abort", ABORT)]


def test_what_is_aborted_before_all_have_opened_it_never_is_passed_on() -> None:
    words = RankWords(3)
    assert say(words, 0, ADMIT) == say(words, 0, ABORT) == []
    assert told(say(words, 1, PART)) == [(1, "failed")] and told(say(words, 2, PART)) == [(2, "failed")]
    assert say(words, 1, ABORT) == []
    assert told(say(words, 2, ABORT)) == [(0, "ended"), (1, "ended"), (2, "ended")]
    assert len(words) == 0


def test_a_rank_that_does_not_come_is_not_waited_for() -> None:
    words = RankWords(3)
    assert say(words, 0, ADMIT, 5.0) == say(words, 1, PART, 6.0) == []
    assert words.tick(5.0 + OPEN_SECONDS - 0.1) == []
    assert told(list(words.tick(5.0 + OPEN_SECONDS))) == [(0, "failed"), (1, "failed")]
    assert say(words, 0, ABORT) == []
    assert told(say(words, 1, ABORT)) == [(0, "ended"), (1, "ended")]
    assert len(words) == 0
    opened(words)
    assert words.tick(1e9) == [], "what is passed on has the core's deadlines"


def test_what_a_rank_may_not_say() -> None:
    words = RankWords(3)
    opened(words)
    assert told(say(words, 1, PART)) == [(1, "failed")], "the name is in use"
    grow = wire.WorkerMessage(grow=wire.Grow(name=NAME, tokens=1))
    assert say(words, 0, grow) == [Pass("grow", grow)]
    with pytest.raises(RequestError, match="rank 1 does not send grow"):
        say(words, 1, grow)
    other = wire.WorkerMessage(finish=wire.Finish(name=common.RequestName(request_id=b"o" * 16, attempt=1)))
    assert told(say(words, 1, other)) == [(1, "failed")]


def test_blocks_are_wanted_back_when_all_ranks_want_them() -> None:
    words = RankWords(3)
    opened(words, BEGIN)
    assert told(say(words, 1, STOW)) == [(1, "failed")], "before its aux"
    assert say(words, 1, AUX) == say(words, 1, STOW) == say(words, 0, AUX) == say(words, 0, STOW) == []
    assert say(words, 2, AUX) == [Pass("aux", AUX)]
    assert say(words, 2, STOW) == [Pass("stow", STOW)]


def test_blocks_stay_that_not_all_ranks_want_back() -> None:
    words = RankWords(3)
    opened(words, BEGIN)
    for rank in range(3):
        say(words, rank, AUX)
    assert say(words, 2, STOW, 1.0) == say(words, 0, STOW, 2.0) == []
    assert list(words.tick(1.0 + OPEN_SECONDS - 0.1)) == []
    late = list(words.tick(1.0 + OPEN_SECONDS))
    assert told(late) == [(0, "stowed"), (2, "stowed")]
    assert not any(word.event.stowed.stored for word in late if isinstance(word, Tell))
    assert list(words.tick(100.0)) == []


def test_requests_whose_blocks_some_ranks_want_back_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.daemon.sides.rank_words.MAX_OPEN", 1)
    words = RankWords(3)
    assert say(words, 0, STOW) == []
    other = wire.WorkerMessage(stow=wire.Stow(name=common.RequestName(request_id=b"o" * 16, attempt=1)))
    with pytest.raises(RequestError, match="1 requests wait for some rank's stow; that is the bound"):
        say(words, 1, other)
    assert say(words, 1, STOW) == say(words, 1, STOW) == []
    assert say(words, 2, STOW) == [Pass("stow", STOW)]


def test_a_name_that_is_used_again_has_no_old_word() -> None:
    words = RankWords(2)
    assert say(words, 0, STOW) == []
    assert say(words, 0, BEGIN) == []
    assert say(words, 1, PART_BEGIN) == [Pass("begin", BEGIN)]
    for rank in range(2):
        say(words, rank, AUX)
    assert say(words, 1, STOW) == []


def refused(words: list[Word]) -> list[str]:
    return [word.error.message for word in words if isinstance(word, Refuse)]


def test_whoever_asked_for_a_prompt_hears_that_a_rank_does_not_begin_it() -> None:
    words = RankWords(2)
    assert say(words, 1, PART_BEGIN) == []
    assert refused(say(words, 1, ABORT)) == ["rank 1 of the engine has aborted it"], "before rank 0 has opened it"
    late = say(words, 0, BEGIN)
    assert told(late) == [(0, "failed")] and refused(late), "it may have been asked for since"
    assert say(words, 0, progress(32, 7)) == [], "it had not heard of the failure"
    assert told(say(words, 0, ABORT)) == [(1, "ended"), (0, "ended")]
    assert say(words, 0, BEGIN, 20.0) == []
    assert refused(list(words.tick(20.0 + OPEN_SECONDS))) == ["ranks [1] have not opened it within 10 s"]
    words = RankWords(2)
    assert say(words, 1, PART) == []
    assert refused(say(words, 1, ABORT)) == [], "nobody asks decode for a prompt"
    words = RankWords(3)
    opened(words, BEGIN)
    assert refused(say(words, 1, ABORT)) == [], "the core knows it, and tells"


def test_a_rank_that_comes_too_late_hears_so_at_once() -> None:
    words = RankWords(2)
    assert say(words, 0, ADMIT, 5.0) == []
    late = 5.0 + OPEN_SECONDS
    words.tick(late)
    assert told(say(words, 0, ABORT, late)) == [(0, "ended")]
    assert told(say(words, 1, PART, late + 1)) == [(1, "failed")]
    assert told(say(words, 1, ABORT, late + 1)) == [(1, "ended")] and len(words) == 0
    assert say(words, 1, PART, late + 2) == [], "once: it is another request of that name"
    assert say(words, 0, ADMIT, late + 2) == [Pass("admit", ADMIT)]


def test_a_standstill_of_the_daemon_makes_no_rank_late() -> None:
    words = RankWords(2)
    assert say(words, 0, ADMIT, 5.0) == []
    words.stood_still(11.0, 16.0)
    assert words.tick(16.0) == [] and say(words, 1, PART, 16.0) == [Pass("admit", ADMIT)]
    words = RankWords(2)
    assert say(words, 0, ADMIT, 3600.0) == []  # it had waited in the socket
    words.stood_still(3600.0, 3600.0)
    assert told(list(words.tick(3600.0 + OPEN_SECONDS))) == [(0, "failed")]


def test_what_waits_for_a_rank_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_words, "MAX_WAITING_BYTES", ADMIT.ByteSize() + 8)
    words, more = RankWords(2), wire.WorkerMessage()
    more.CopyFrom(ADMIT)
    more.admit.name.attempt = 2
    assert say(words, 0, ADMIT) == []
    assert told(say(words, 0, more)) == [(0, "failed")]
    assert say(words, 1, PART) == [Pass("admit", ADMIT)], "it waits no more"
    more.admit.name.attempt = 3
    assert say(words, 0, more) == []
    more.admit.name.attempt = 2
    assert told(say(words, 1, more)) == [(1, "failed")]
    words = RankWords(2)
    opened2 = [say(words, rank, BEGIN) for rank in (1, 0)]
    assert opened2[1] == [Pass("begin", BEGIN)]
    assert told(say(words, 0, progress(64, *range(64)))) == [(0, "failed"), (1, "failed")]
    assert say(words, 0, progress(64, 64)) == [], "it had not heard of that"
    big = wire.WorkerMessage(aux=wire.Aux(name=NAME, blob=bytes(1000)))
    words = RankWords(2)
    assert [say(words, rank, BEGIN) for rank in (1, 0)][1] == [Pass("begin", BEGIN)]
    assert told(say(words, 0, big)) == [(1, "failed")]
    assert say(words, 1, AUX) == [Pass("abort", ABORT)], "what it would have handed in is not there"


def test_what_waits_is_counted_as_long_as_it_waits() -> None:
    words = RankWords(2)
    for _ in range(3):
        say(words, 0, BEGIN), say(words, 0, progress(32, 7)), say(words, 1, BEGIN), say(words, 1, progress(32))
        say(words, 0, progress(64, 8)), say(words, 0, AUX), say(words, 1, ABORT)
        assert len(words) == 0
    assert words._waiting_bytes == 0


def test_whoever_asked_hears_that_the_engine_leaves() -> None:
    words = RankWords(2)
    assert say(words, 0, BEGIN) == []
    assert refused(list(words.end(unavailable("it is gone")))) == ["it is gone"]
    assert say(words, 1, BEGIN) == [Pass("begin", BEGIN)]
    assert list(words.end(unavailable("it is gone"))) == [], "the core knows it"


@pytest.mark.parametrize(("length", "attempt", "ends"), [(16, 0, False), (16, 65537, False), (1000, 1, True)])
def test_names_are_judged_before_they_are_kept(length: int, attempt: int, ends: bool) -> None:
    words = RankWords(2)
    name = common.RequestName(request_id=b"r" * length, attempt=attempt)
    for message in (wire.WorkerMessage(admit=wire.Admit(name=name)), wire.WorkerMessage(stow=wire.Stow(name=name))):
        if ends:
            with pytest.raises(RequestError, match=r"name.request_id has 1000 bytes; it must have 16"):
                say(words, 1, message)
        else:
            assert told(say(words, 1, message)) == [(1, "failed")]
    assert len(words) == 0


def test_each_rank_says_its_last_word() -> None:
    words = RankWords(2)
    alone = wire.WorkerMessage(admit=wire.Admit(name=NAME, tokens=9, ends_itself=True))
    assert told(say(words, 0, alone)) == [(0, "failed")] and len(words) == 0
