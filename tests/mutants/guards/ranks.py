"""Engines whose ranks are processes of their own: how they come together, speak as one worker, and end."""

from tests.mutants.guard import Guard

GATHERING = ("tests/daemon/sides/test_gathering.py",)
WORDS = ("tests/daemon/sides/test_rank_words.py",)
SETTINGS = ("tests/connectors/test_settings.py",)
NEWS = ("tests/connectors/test_scheduler_side.py", "tests/connectors/test_scheduler_prefill.py")

_COMING = (
    Guard(
        "all ranks are taken in, or none",
        "daemon/sides/gathering.py",
        "Gathering.join",
        "if len(engine.hellos) == self._ranks:",
        "if len(engine.hellos) == self._ranks - 1:",
        GATHERING,
    ),
    Guard(
        "ranks are taken in by rank",
        "daemon/sides/gathering.py",
        "Gathering._all_in",
        "[engine.hellos[rank] for rank in range(self._ranks)]",
        "list(engine.hellos.values())",
        GATHERING,
    ),
    Guard(
        "ranks are of one engine",
        "daemon/sides/gathering.py",
        "Gathering._all_in",
        "check_alike(hellos)",
        "pass",
        GATHERING,
    ),
    Guard(
        "engines that gather have a bound",
        "daemon/sides/gathering.py",
        "Gathering.join",
        "if len(self._engines) >= self._most:",
        "if False:",
        GATHERING,
    ),
    Guard(
        "a rank that comes again ends what its process before began",
        "daemon/sides/gathering.py",
        "Gathering.join",
        "if rank.rank in engine.hellos:",
        "if False:",
        GATHERING,
    ),
    Guard(
        "ranks that have come do not wait for ever",
        "daemon/sides/gathering.py",
        "Gathering._all_come",
        "within(GATHER_SECONDS, asyncio.shield(engine.welcomes))",
        "within(1e6, asyncio.shield(engine.welcomes))",
        GATHERING,
    ),
    Guard(
        "a rank that left while all were taken in leaves",
        "daemon/sides/gathering.py",
        "Gathering._leaves",
        "self._workers.leave(welcomes.result()[rank][0])",
        "pass",
        GATHERING,
    ),
    Guard(
        "an engine has as many ranks as its daemon",
        "daemon/sides/gathering.py",
        "check_rank",
        "if rank.ranks != ranks:",
        "if False:",
        GATHERING,
    ),
    Guard(
        "the memory of every rank is the pool",
        "daemon/sides/gathering.py",
        "together",
        "for hello in hellos[1:]:",
        "for hello in hellos[2:]:",
        GATHERING,
    ),
)

_SPEAKING = (
    Guard(
        "a request is opened by all ranks",
        "daemon/sides/rank_words.py",
        "RankWords._open",
        "if len(request.opened) < self._ranks:",
        "if request.opening is None:",
        WORDS,
    ),
    Guard(
        "progress is that of the slowest rank",
        "daemon/sides/rank_words.py",
        "RankWords._progress",
        "if (tokens := min(request.progress)) <= request.passed_tokens:",
        "if (tokens := max(request.progress)) <= request.passed_tokens:",
        WORDS,
    ),
    Guard(
        "pages are free when no rank touches them",
        "daemon/sides/rank_words.py",
        "RankWords._settle",
        "if len(request.last) < (len(request.opened) if request.late else self._ranks):",
        "if not request.last:",
        WORDS,
    ),
    Guard(
        "one rank's abort is the request's",
        "daemon/sides/rank_words.py",
        "RankWords._settle",
        'next((word for word in request.last.values() if word.kind == "abort"), request.last[0])',
        "request.last[0]",
        WORDS,
    ),
    Guard(
        "the other ranks hear of an abort",
        "daemon/sides/rank_words.py",
        "RankWords._end",
        'if word.kind == "abort" and request.failure is None:',
        "if False:",
        WORDS,
    ),
    Guard(
        "a rank that comes too late has its answer",
        "daemon/sides/rank_words.py",
        "RankWords._open",
        "if request.failure is not None:",
        "if False:",
        WORDS,
    ),
    Guard(
        "ranks do not wait for ever for one that has no session",
        "daemon/sides/rank_words.py",
        "RankWords.tick",
        "if not request.passed and not request.late:",
        "if False:",
        WORDS,
    ),
    Guard(
        "rank 0 alone speaks for the engine",
        "daemon/sides/rank_words.py",
        "RankWords.take",
        "if rank != 0:",
        "if False:",
        WORDS,
    ),
    Guard(
        "blocks are given back when all ranks want them back",
        "daemon/sides/rank_words.py",
        "RankWords._stow",
        "if len(stow.ranks) < self._ranks:",
        "if False:",
        WORDS,
    ),
    Guard(
        "a rank wants blocks back behind its aux",
        "daemon/sides/rank_words.py",
        "RankWords._stow",
        "if request is not None and rank not in request.last:",
        "if False:",
        WORDS,
    ),
    Guard(
        "a rank waits for the end of what no daemon has",
        "daemon/sides/rank_words.py",
        "_Request.fail",
        " or self._is_vain(rank)",
        "",
        WORDS,
    ),
    Guard(
        "no rank begins behind its end",
        "daemon/sides/rank_words.py",
        "RankWords._progress",
        "if rank in request.last:",
        "if False:",
        WORDS,
    ),
)

_ENGINES = (
    Guard(
        "an engine is there when each rank has a session",
        "connectors/scheduler_side.py",
        "SchedulerSide._session",
        "all(self._sessions.values())",
        "any(self._sessions.values())",
        NEWS,
    ),
    Guard(
        "ranks' sessions do not hide each other",
        "connectors/orders.py",
        "News.then",
        "sessions = {**self.sessions, **later.sessions}",
        "sessions = later.sessions or self.sessions",
        NEWS,
    ),
    Guard(
        "a load is bad where one rank's is",
        "connectors/orders.py",
        "News.then",
        "self.bad | later.bad",
        "self.bad & later.bad",
        NEWS,
    ),
    Guard(
        "data-parallel ranks never meet on one daemon",
        "connectors/settings.py",
        "Settings.at_rank",
        "if (dp_size > 1 or dp_rank > 0) and DP_RANK not in self.socket:",
        "if False:",
        SETTINGS,
    ),
)

GUARDS: tuple[Guard, ...] = (*_COMING, *_SPEAKING, *_ENGINES)
