"""What proves that a NIXL WRITE between two GPUs lands no more: each proof tried on CUDA IPC, with canaries.

Needs two GPUs that reach each other, and NIXL; nothing of kvferry. The watcher compares a sample of the target's words
all the time (a look every ~20 us) and looks at all of them at the end; a word counts as changed after a moment only
where both looks that saw the change were begun after it. A line with VIOLATED contradicts the design;
where there is one, or a proof did not run, the exit status is 1.

    python bench/gpu/proofs.py [--only drained,released,killed,unlocked,orphaned,order,transports] [--logs FOLDER]
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import select
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

from actor import COUNT, ERROR, HOST, MIB, STAMP, Target, Watched, clear, now
from nodes import Bench, Node, NodeError, Options, bench

VALUE, CANARY, POISON = 0x11111111, 0xCA7A7A7A, 0xA5A5A5A5
TLS = "cuda_copy,cuda_ipc,tcp"
AFTER_SECONDS = 0.008  # that a target is watched once nothing should land any more


@dataclass
class Trio:
    owner: Node
    watcher: Node
    writers: list[Node]
    target: Target


def trio(on: Bench, nbytes: int, writers: int = 1, source_bytes: int | None = None) -> Trio:
    """Owner and watcher on GPU 0, writers on GPU 1, connected; the sources hold VALUE, then the next word."""
    owner, watcher, *rest = [on.node(0), on.node(0), *(on.node(1) for _ in range(writers))]
    for node in on.nodes:
        node.answer(60)
    target, handle = owner.call("allocate", "slots", nbytes, 0)
    watcher.call("map", "slots", handle, nbytes, 0)
    metadata = owner.call("agent_up", ["slots"])
    for writer in rest:
        source = source_bytes or nbytes
        writer.call("allocate", "source", source, 1)
        writer.call("fill", "source", VALUE)
        writer.call("fill", "source", VALUE + 1, source // 2)
        writer.send("agent_up", ["source"])
    for writer in rest:
        owner.call("connect", writer.answer())
        writer.call("connect", metadata)
    return Trio(owner, watcher, rest, target)


def changed_after(watched: Watched, moment: int) -> bool:
    last = watched.last()
    return last is not None and last.begun > moment


def last_change(watched: Watched, moment: int) -> str:
    """In microseconds relative to the moment."""
    last = watched.last()
    if last is None:
        return "nothing changed at all"
    return f"last change {(last.begun - moment) / 1e3:+.0f} to {(last.ended - moment) / 1e3:+.0f} us"


def verdict(held: bool) -> str:
    """Of what the design claims."""
    return "holds" if held else "VIOLATED"


def report(line: str) -> None:
    print(line, flush=True)


# -- the proofs: each says whether all that the design claims held --------------------------------------------------


def drained(on: Bench) -> bool:
    """All handles DONE: nothing lands any more. The source is overwritten with a canary right after it."""
    held = True
    for chunk, posts, rounds in ((MIB, 8, 60), (8 * MIB, 16, 60), (64 * MIB, 4, 60), (256 * MIB, 1, 30)):
        chunk = on.size(chunk)
        now_trio = trio(on, chunk * posts)
        writer, owner, watcher = now_trio.writers[0], now_trio.owner, now_trio.watcher
        late, wrong, spread = 0, 0, []
        for _ in range(rounds):
            clear(on.board)
            watcher.call("fill", "slots", POISON)
            writer.call("fill", "source", VALUE)
            on.watching(watcher)
            owner.send("poll", 10.0)
            writer.call("write_then", "source", now_trio.target, chunk, posts, CANARY, True)
            time.sleep(AFTER_SECONDS)
            watched, _ = on.stop(watcher, owner)
            late += changed_after(watched, on.board[STAMP])
            wrong += watcher.call("count_other", "slots", VALUE) > 0
            last = watched.last()
            spread.append((last.begun - on.board[STAMP]) / 1e3 if last else 0.0)
        held &= not late and not wrong
        report(
            f"drained   {posts:3} x {chunk / MIB:5.1f} MiB, {rounds} rounds: changed after DONE {late}, wrong or"
            f" canary words at the end {wrong}; the last look that saw a change began {min(spread):+.0f} to"
            f" {max(spread):+.0f} us from DONE: {verdict(not late and not wrong)}"
        )
        on.end()
    return held


def released(on: Bench) -> bool:
    """A handle released in flight: does the write still land, and which bytes? The design claims nothing."""
    chunk, posts, rounds = on.size(128 * MIB), 8, 20
    now_trio = trio(on, chunk * posts)
    writer, owner, watcher = now_trio.writers[0], now_trio.owner, now_trio.watcher
    landed, canaries, lates, refusals = [], [], [], set()
    words = chunk * posts // 4
    for _ in range(rounds):
        clear(on.board)
        watcher.call("fill", "slots", POISON)
        writer.call("fill", "source", VALUE)
        on.watching(watcher)
        owner.send("poll", 10.0)
        refusals.add(writer.call("write_then", "source", now_trio.target, chunk, posts, CANARY, False))
        time.sleep(0.05)
        watched, _ = on.stop(watcher, owner)
        landed.append(watcher.call("count_other", "slots", POISON) / words)
        canaries.append((words - watcher.call("count_other", "slots", CANARY)) / words)
        last = watched.last()
        lates.append((last.begun - on.board[STAMP]) / 1e3 if last else float("nan"))
    report(
        f"released  {posts} x {chunk / MIB:.0f} MiB posted and released at once, {rounds} rounds: landed"
        f" {min(landed):.0%} to {max(landed):.0%}, with the source's later content {min(canaries):.0%} to"
        f" {max(canaries):.0%}; last change {min(lates):+.0f} to {max(lates):+.0f} us after the release; release said"
        f" {sorted(refusals)}"
    )
    return True


def killed(on: Bench) -> bool:
    """The writing process killed while it writes, and reaped: nothing lands any more."""
    held = True
    for chunk, in_flight, rounds in ((64 * MIB, 1, 8), (8 * MIB, 8, 8), (64 * MIB, 64, 8)):
        chunk = on.size(chunk)
        half = on.size(512 * MIB)
        now_trio = trio(on, half, rounds, 2 * half)
        owner, watcher = now_trio.owner, now_trio.watcher
        lines, ends, late, poisoned = [], [], 0, 0
        for writer in now_trio.writers:
            clear(on.board)
            on.watching(watcher)
            owner.send("poll", 20.0)
            writer.send("train", "source", now_trio.target, chunk, in_flight)
            time.sleep(random.uniform(0.08, 0.12))
            written = on.board[COUNT]
            sent, reaped = writer.kill()
            time.sleep(0.03)
            watched, _ = on.stop(watcher, owner)
            assert written and watched.changed, f"the train did not run: {written} writes"
            late += changed_after(watched, reaped)
            last = watched.last()
            assert last is not None
            ends.append(((last.ended - sent) / 1e6, (reaped - sent) / 1e6))
            watcher.call("fill", "slots", POISON)
            time.sleep(0.02)
            poisoned += watcher.call("count_other", "slots", POISON) > 0
            lines.append(written)
        held &= not late and not poisoned
        report(
            f"killed    {in_flight:2} writes of {chunk / MIB:.1f} MiB in flight, {rounds} rounds, {min(lines)} to"
            f" {max(lines)} writes before: changed after the reap {late}, poison overwritten after it {poisoned}; last"
            f" change {min(end for end, _ in ends):.1f} to {max(end for end, _ in ends):.1f} ms after SIGKILL, the"
            f" reap {min(reap for _, reap in ends):.1f} to {max(reap for _, reap in ends):.1f} ms:"
            f" {verdict(not late and not poisoned)}"
        )
        on.end()
    return held


def unlocked(on: Bench) -> bool:
    """A process killed while its copies to mapped memory are queued: its file lock is let go, then it has ended. Does
    anything land after that? The lock's end is expected to prove nothing, the process's is claimed to. The watcher is
    on another GPU, where there is one."""
    nbytes, rounds, held = on.size(256 * MIB), 12, True
    for number in (0, 500):  # the lock's descriptor: below and above the driver's
        owner = on.node(0)
        owner.answer(60)
        _, handle = owner.call("allocate", "slots", nbytes, 0)
        last_gpu = owner.call("last_gpu")
        watcher = on.node(last_gpu)
        watcher.answer(60)
        watcher.call("map", "slots", handle, nbytes, last_gpu)
        ends: list[Ends] = []
        for _ in range(rounds):
            clear(on.board)
            ends.append(killed_worker(on, watcher, handle, nbytes, number))
        unlocks, exits = (sum(each.late(moment) for each in ends) for moment in ("unlocked", "exited"))
        held &= not exits
        expected = "as expected" if unlocks else "this time"
        report(
            f"unlocked  descriptor {number}, {rounds} rounds; from SIGKILL: last change {spread(ends, 'last')}, lock"
            f" let go {spread(ends, 'unlocked')}, process ended {spread(ends, 'exited')}; changed after the lock's end"
            f" {unlocks} ({expected}), after the process's {exits}: {verdict(not exits)}"
        )
        on.end()
    return held


@dataclass
class Ends:
    """Milliseconds from SIGKILL to the looks that saw the last change, the lock let go, the process's end."""

    last_begun: float
    last: float
    unlocked: float
    exited: float

    def late(self, moment: str) -> bool:
        return self.last_begun > float(getattr(self, moment))


def spread(ends: list[Ends], what: str) -> str:
    values = [getattr(each, what) for each in ends]
    return f"{min(values):.1f} to {max(values):.1f} ms"


def killed_worker(on: Bench, watcher: Node, handle: bytes, nbytes: int, number: int) -> Ends:
    worker = on.node(0)
    worker.answer(60)
    worker.call("map", "mapped", handle, nbytes, 0)
    worker.call("allocate", "source", 2 * nbytes, 0)
    worker.call("fill", "source", VALUE)
    worker.call("fill", "source", VALUE + 1, nbytes)
    path = os.path.join(on.options.logs, f"lock-{worker.process.pid}")
    with open(path, "w+") as lock:
        worker.call("lock", path, number)
        on.watching(watcher)
        worker.send("queue_copies", "source", "mapped")
        time.sleep(random.uniform(0.3, 0.4))
        exited = select.poll()
        exited.register(os.pidfd_open(worker.process.pid), select.POLLIN)
        sent = now()
        worker.process.kill()
        while not acquired(lock.fileno()):
            pass
        unlocked = now()
        if not exited.poll(10_000):
            raise NodeError("the process did not end within 10 s of SIGKILL")
        end = now()
    time.sleep(0.1)
    (watched,) = on.stop(watcher)
    worker.end()
    last = watched.last()
    if last is None:
        raise NodeError("nothing changed")
    return Ends(*((moment - sent) / 1e6 for moment in (last.begun, last.ended, unlocked, end)))


def acquired(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def orphaned(on: Bench) -> bool:
    """The owner of the memory killed and reaped while others write to it and have it mapped: they may go on, and reach
    nobody else's memory."""
    held = True
    for by_nixl in (True, True, True, False, False):
        nbytes = on.size(2048 * MIB)
        now_trio = trio(on, nbytes, 1, on.size(512 * MIB))
        owner, watcher, writer = now_trio.owner, now_trio.watcher, now_trio.writers[0]
        free = [watcher.call("free_bytes")]
        clear(on.board)
        if by_nixl:
            owner.send("poll", 30.0)
            writer.send("train", "source", now_trio.target, on.size(64 * MIB), 4)
        else:
            writer.call("map", "mapped", owner.call("share", "slots"), nbytes, 1)
            writer.send("raw_train", "source", "mapped")
        on.watching(watcher)
        time.sleep(0.1)
        sent, reaped = owner.kill()
        counted = on.board[COUNT]
        time.sleep(0.15)
        (watched,) = on.stop(watcher)
        goes_on = on.board[COUNT] - counted
        free.append(watcher.call("free_bytes"))
        said = f"{(on.board[ERROR] - sent) / 1e6:+.1f} ms after SIGKILL" if on.board[ERROR] else "no error"
        report(
            f"orphaned  {'NIXL' if by_nixl else 'plain copies'}: reaped {(reaped - sent) / 1e6:.1f} ms after SIGKILL;"
            f" the mapped memory: {last_change(watched, reaped)}"
            f"{', written after the reap' if changed_after(watched, reaped) else ''}; {goes_on}"
            f" more writes done; the writer saw {said}: {writer.answer()!r}"
        )
        clear(on.board)
        held &= reuse(on, watcher, writer, None if by_nixl else "mapped", free)
        on.end()
    return held


def reuse(on: Bench, watcher: Node, writer: Node, mapped: str | None, free: list[int]) -> bool:
    """Takes all memory that is free: whether the writer's copies to the dead owner's memory do not reach it."""
    hoard = free[-1] - 512 * MIB if on.options.scale == 1 else 64 * MIB
    watcher.call("allocate", "hoard", hoard, 0)
    watcher.call("fill", "hoard", POISON)
    said = ""
    if mapped:
        writer.send("raw_train", "source", mapped)
        time.sleep(0.05)
    others = watcher.call("count_other", "hoard", POISON)
    if mapped:
        (said,) = on.stop(writer)
    others += watcher.call("count_other", "hoard", POISON)
    watcher.call("free", "hoard")
    watcher.call("unmap", "slots")
    free.append(watcher.call("free_bytes"))
    writer.end()
    free.append(watcher.call("free_bytes"))
    grown = [f"{(value - free[0]) / MIB:+.0f}" for value in free[1:]]
    report(
        f"reuse     {hoard / MIB:.0f} MiB of new memory, all that was free: {others} words overwritten"
        f"{f', copies said {said!r}' if said else ''}; free MiB against before, owner reaped {grown[0]},"
        f" watcher unmapped {grown[1]}, writer ended {grown[2]}: {verdict(not others)}"
    )
    return not others


def order(on: Bench) -> bool:
    """A notification seen: every byte of its write is visible to kernels and copies of another process."""
    held = True
    for chunk, posts, rounds in ((64 * 1024, 1, 400), (MIB, 8, 200), (64 * MIB, 4, 100)):
        chunk = on.size(chunk)
        now_trio = trio(on, chunk * posts)
        clear(on.board)
        now_trio.watcher.send("order_watcher", "slots", rounds)
        now_trio.owner.send("order_owner", posts, rounds)
        now_trio.writers[0].call("order_writer", "source", now_trio.target, chunk, posts, rounds)
        by_kernel, by_copy = now_trio.watcher.answer()
        now_trio.owner.answer()
        held &= not by_kernel and not by_copy
        report(
            f"order     {posts} x {chunk / MIB:.2f} MiB, {rounds} rounds: old words seen by a kernel in {by_kernel},"
            f" by a copy in {by_copy}: {verdict(not by_kernel and not by_copy)}"
        )
        on.end()
    return held


def transports(on: Bench) -> bool:
    """Which UCX_TLS work, and that the bytes are right where one does; one agent with memory of both GPUs; host memory
    on one side."""
    held = True
    chunk, posts = on.size(64 * MIB), 4
    for tls in (on.options.tls, "cuda_ipc,tcp", "cuda_ipc,cuda_copy,tcp,self", "cuda_copy,tcp", "tcp", "all"):
        try:
            sender, receiver = on.node(1, 0, UCX_TLS=tls, UCX_PROTO_INFO="y"), on.node(0, 1, UCX_TLS=tls)
            held &= pair(on, sender, receiver, tls, chunk, posts)
        except NodeError as error:
            report(f"transport {tls}: {error}")
        on.end()
    return held


def pair(on: Bench, sender: Node, receiver: Node, tls: str, chunk: int, posts: int) -> bool:
    """Whether all bytes are right."""
    held = True
    for node in (sender, receiver):
        node.answer(60)
    nbytes = chunk * posts
    targets = {HOST: receiver.call("allocate_host", name_of(HOST), nbytes)}
    sender.call("allocate_host", name_of(HOST), nbytes)
    for gpu in (0, 1):
        targets[gpu], _ = receiver.call("allocate", name_of(gpu), nbytes, gpu)
        sender.call("allocate", name_of(gpu), nbytes, gpu)
    names = [name_of(place) for place in targets]
    receiver_metadata = receiver.call("agent_up", names)
    receiver.call("connect", sender.call("agent_up", names))
    sender.call("connect", receiver_metadata)
    for source, target in ((1, 0), (0, 1), (0, 0), (1, 1), (HOST, 0), (1, HOST), (HOST, HOST)):
        clear(on.board)
        receiver.call("fill", name_of(target), POISON)
        sender.call("fill", name_of(source), VALUE + 2 + source)
        receiver.send("poll", 15.0)
        try:
            first = sender.call("write", name_of(source), targets[target], chunk, posts)
            best = min(sender.call("write", name_of(source), targets[target], chunk, posts) for _ in range(3))
        finally:
            on.stop(receiver)
        good = receiver.call("count_other", name_of(target), VALUE + 2 + source) == 0
        held &= good
        report(
            f"transport {tls}: {name_of(source)} -> {name_of(target)}, {posts} x {chunk / MIB:.0f} MiB: first"
            f" {first * 1e3:.1f} ms, best {best * 1e3:.2f} ms, {nbytes / best / 1e9:.1f} GB/s,"
            f" {'good' if good else 'BYTES DIFFER: VIOLATED'}"
        )
    return held


def name_of(place: int) -> str:
    return "host" if place == HOST else f"GPU {place}"


PROOFS: tuple[Callable[[Bench], bool], ...] = (transports, order, drained, released, killed, unlocked, orphaned)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [proof.__name__ for proof in PROOFS]
    parser.add_argument("--only", default=",".join(names))
    parser.add_argument("--tls", default=TLS)
    parser.add_argument("--logs", default="")
    parser.add_argument("--scale", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    wanted = arguments.only.split(",")
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(names)}")
    logs = arguments.logs or tempfile.mkdtemp(prefix="proofs-")
    options = Options(arguments.tls, logs, arguments.scale)
    good = True
    for proof in PROOFS:
        if proof.__name__ not in wanted:
            continue
        begin = now()
        with bench(options) as on:
            try:
                good &= proof(on)
            except Exception as error:
                good = False
                report(f"{proof.__name__}: did not run: {type(error).__name__}: {error}")
        report(f"# {proof.__name__}: {(now() - begin) / 1e9:.1f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
