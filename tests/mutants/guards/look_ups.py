"""Look-ups between daemons: who is asked and told, what is lent, and who waits for another's fetch."""

from tests.mutants.guard import Guard

LOANS = ("tests/daemon/core/way_back/test_loans.py",)
LOOK_UPS = ("tests/daemon/core/way_back/test_look_ups.py",)
FOLLOW = ("tests/daemon/core/way_back/test_follow.py",)
SESSIONS = ("tests/daemon/peers/test_look_up_session.py",)
_LOANS, _LOOK_UPS = "daemon/core/way_back/loans.py", "daemon/core/way_back/look_ups.py"
_FETCHES = "daemon/core/way_back/fetches.py"

_LENT = (
    Guard(
        "only what can be read is found",
        "daemon/core/cache.py",
        "Cache.readable",
        "leading_readable(self.pool.states(tree.match_pages(tree.match(digests))))",
        "tree.match(digests).pages",
        LOANS,
    ),
    Guard(
        "what is gone is not lent",
        _LOANS,
        "Loans._lend",
        "namespace is None or self._cache.readable(namespace, ask.digests) < end:",
        "namespace is None:",
        LOANS,
    ),
    Guard(
        "what was promised is not lent",
        _LOANS,
        "Loans._lend",
        "if not self._cache.fits(namespace, 0):",
        "if False:",
        LOANS,
    ),
    Guard(
        "nothing is lent while a request waits for pages",
        _LOANS,
        "Loans._lend",
        "if waiting := self._waiting():",
        "if waiting := 0:",
        LOANS,
    ),
    Guard(
        "what is lent is locked until no gather runs",
        _LOANS,
        "Loans.ask_end",
        "loan.ending = True",
        "self.closed(session, transfer, completed=False)",
        LOANS,
    ),
    Guard(
        "a loan has a deadline",
        _LOANS,
        "Loans.look",
        "if loan.deadline <= self._cache.clock.now and",
        "if False and",
        LOANS,
    ),
    Guard("loans of a session are bounded", _LOANS, "Loans._refusal", "if lent >= MAX_LOANS:", "if False:", LOANS),
    Guard(
        "of a closed namespace nothing is told",
        _LOANS,
        "Loans._open_namespace",
        "None if namespace_id in self._excluded else ",
        "",
        LOANS,
    ),
)

_ASKED = (
    Guard(
        "more than was looked up is not believed",
        _LOOK_UPS,
        "LookUps.heard",
        "min(pages, search.pages)",
        "pages",
        LOOK_UPS,
    ),
    Guard(
        "a daemon answers once, where it was asked",
        _LOOK_UPS,
        "LookUps.heard",
        "search is None or session not in search.waits",
        "search is None",
        LOOK_UPS,
    ),
    Guard(
        "of a closed namespace nobody is asked",
        _LOOK_UPS,
        "LookUps.begin",
        " or prompt.namespace_id in self._excluded",
        "",
        LOOK_UPS,
    ),
    Guard(
        "daemons that are asked for a prompt are bounded",
        _LOOK_UPS,
        "LookUps.begin",
        "[:MOST_ASKED]",
        "",
        LOOK_UPS,
    ),
    Guard("look-ups are bounded", _LOOK_UPS, "LookUps.begin", "len(self._open) >= MOST_OPEN or ", "", LOOK_UPS),
    Guard(
        "a session that ends is not waited for",
        _LOOK_UPS,
        "LookUps.session_down",
        "over += [] if search.waits else [search.entry]",
        "over += []",
        LOOK_UPS,
    ),
    Guard("look-ups take no time of their own", _FETCHES, "Fetches._search", " or until <= now", "", LOOK_UPS),
    Guard(
        "answers are waited for briefly",
        _FETCHES,
        "Fetches.wake",
        "_searching.items() if until <= now]",
        "_searching.items() if until < 0]",
        LOOK_UPS,
    ),
    Guard(
        "a request that ends looks for nothing",
        _FETCHES,
        "Fetches.leave",
        "self.look_ups.take(entry)",
        "pass",
        LOOK_UPS,
    ),
    Guard(
        "a request outlives the session that it fetches from",
        _FETCHES,
        "Fetches.session_down",
        "fetch.entry.session != session or ",
        "",
        LOOK_UPS,
    ),
    Guard(
        "a prompt waits for what is its own alone",
        _FETCHES,
        "Fetches._leader",
        "min(fetch.end, self._most(prompt))",
        "prompt.hold.matched + 1",
        FOLLOW,
    ),
    Guard(
        "who waited for another's fetch goes on behind it",
        _FETCHES,
        "Fetches._over",
        "self._resume(*follower)",
        "pass",
        FOLLOW,
    ),
    Guard(
        "pages that are given up are nobody's",
        _FETCHES,
        "Fetches._resume",
        "prompt.private = prompt.private[len(given_up) :]",
        "pass",
        FOLLOW,
    ),
    Guard(
        "nobody waits for a row of fetches",
        _FETCHES,
        "Fetches._leader",
        "theirs.followed",
        "False",
        FOLLOW,
    ),
    Guard(
        "who would compute it sooner does not wait",
        _FETCHES,
        "Fetches._leader",
        "gained > 0 and self.judge.worth_waiting(gained, fetch.deadline - prompt.begun_at)",
        "gained > 0",
        FOLLOW,
    ),
    Guard(
        "look-ups do not break a session off",
        "daemon/peers/sending.py",
        "SendingSession.look_up",
        "if self._outgoing_bytes <= OUTGOING_BYTES // 4:",
        "if True:",
        SESSIONS,
    ),
)

_AGREED = (
    Guard(
        "a daemon that knows no look-ups is sent none",
        "daemon/peers/handshake.py",
        "looks_up",
        "for hello in (own, theirs)",
        "for hello in (own,)",
        SESSIONS,
    ),
    Guard(
        "what was not agreed on is not answered",
        "daemon/sides/returning.py",
        "DecodeReturns._answers",
        "if not session.looks_up:",
        "if False:",
        SESSIONS,
    ),
    Guard(
        "a closed peer is told nothing",
        "daemon/sides/returning.py",
        "DecodeReturns._answers",
        ".intersection(self._side.config.closed_peers)",
        ".intersection(())",
        SESSIONS,
    ),
    Guard(
        "a closed peer is not asked",
        "daemon/sides/fetching.py",
        "_FetchEvents.on_session_up",
        " and session.remote not in self._side.config.closed_peers",
        "",
        SESSIONS,
    ),
)

GUARDS = (*_LENT, *_ASKED, *_AGREED)
