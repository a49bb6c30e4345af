"""An operator's commands to a running daemon: flush, pin, unpin, dump. On the Unix socket only. Shell."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import grpc

from kvferry.daemon.core.errors import RequestError, aborted, invalid, not_found, precondition
from kvferry.daemon.core.namespaces import Namespace
from kvferry.daemon.core.pins import MAX_PIN_SECONDS
from kvferry.daemon.peers.session import report_invariant
from kvferry.daemon.services.cache import NAMESPACE_BYTES, most_digest_bytes
from kvferry.daemon.services.worker import status_of
from kvferry.daemon.sides.side import AnySide
from kvferry.proto import admin_pb2 as admin
from kvferry.proto import admin_pb2_grpc
from kvferry.proto import common_pb2 as common
from kvferry.radix.digests import DIGEST_BYTES

DUMP_NODES = 1000  # unless the request says otherwise
MAX_DUMP_NODES = 10_000

if TYPE_CHECKING:
    from kvferry.daemon.services.worker import Context

_ROLES: dict[int, str] = {common.ROLE_DECODE: "decode", common.ROLE_PREFILL: "prefill"}
Reply = TypeVar("Reply")


class AdminService(admin_pb2_grpc.AdminServicer):
    """Each call is one step on the event loop: it is done wholly, or refused and nothing is changed; but for a flush
    that comes to all but a file."""

    def __init__(self, sides: dict[str, AnySide]) -> None:
        self._sides = sides

    async def Flush(self, request: admin.FlushRequest, context: Context) -> admin.FlushReply:
        return await _answer(context, lambda: self._flush(request))

    async def Pin(self, request: admin.PinRequest, context: Context) -> admin.PinReply:
        return await _answer(context, lambda: self._pin(request))

    async def Unpin(self, request: admin.UnpinRequest, context: Context) -> admin.UnpinReply:
        return await _answer(context, lambda: self._unpin(request))

    async def Dump(self, request: admin.DumpRequest, context: Context) -> admin.DumpReply:
        return await _answer(context, lambda: self._dump(request))

    # -- the steps -----------------------------------------------------------------------------------------------

    def _flush(self, request: admin.FlushRequest) -> admin.FlushReply:
        side = self._side(request.role)
        if side.tiers.reads_file:  # what comes behind the flush would stay
            raise precondition(f"the {side.role} side's host tier is still being read from its file: try again")
        if side.core is None and side.config.host_dir:
            raise precondition(f"the {side.role} side's host tier has not been read from its file: try again")
        known = _known(side, request.namespace_id)
        if request.strict:
            _check_nothing_held(side, known)
        side.tiers.forget_unread(request.namespace_id)  # which may be of a namespace that no tree is of
        if side.core is None:
            return admin.FlushReply()
        if not side.tiers.file_unopened:
            _check_known(side, request.namespace_id, known)
        count = side.cache.flush(known)
        side.tick()  # the rows' entries go with them, and who waits may have the pages
        if side.tiers.file_unopened:  # ABORTED: to ask again now would free no more
            raise aborted(
                f"{count.device} device pages were freed, {count.skipped} are held; the host tier's file, which could "
                f"not be opened, may still hold pages of {'this' if request.namespace_id else 'any'} namespace: "
                f"{side.tiers.host_stays}"
            )
        return admin.FlushReply(device_pages=count.device, host_pages=count.host, skipped_pages=count.skipped)

    def _pin(self, request: admin.PinRequest) -> admin.PinReply:
        side = self._side(request.role)
        most = most_digest_bytes(side.config)
        if not 1 <= request.seconds <= MAX_PIN_SECONDS:
            raise invalid(f"seconds is {request.seconds}; it must be 1 to {MAX_PIN_SECONDS}")
        digests = len(request.digests)
        if digests % DIGEST_BYTES or not DIGEST_BYTES <= digests <= most:
            raise invalid(
                f"digests has {digests} bytes; it must have {DIGEST_BYTES} for every page, and at most {most}"
            )
        _check_namespace(request.namespace_id)
        chosen = _chosen(side, request.namespace_id)
        if chosen is None:
            raise not_found(f"no {side.role} worker has come yet, so nothing is held")
        pin = side.ready_core.pins.pin(chosen[0], request.digests, side.now() + request.seconds)
        side.flush()
        return admin.PinReply(pin=pin.number, pinned_tokens=pin.pages * side.cache.page_size)

    def _unpin(self, request: admin.UnpinRequest) -> admin.UnpinReply:
        side = self._side(request.role)
        if not side.tiers.has_pool.is_set():
            return admin.UnpinReply()
        unpinned = side.ready_core.pins.unpin(request.pin)
        side.tick()  # requests that wait are looked at again: they may have the pages now
        return admin.UnpinReply(unpinned=unpinned)

    def _dump(self, request: admin.DumpRequest) -> admin.DumpReply:
        side = self._side(request.role)
        left = request.limit or DUMP_NODES
        if left > MAX_DUMP_NODES:
            raise invalid(f"limit is {left}; it must be 1 to {MAX_DUMP_NODES}, or 0 for {DUMP_NODES}")
        reply = admin.DumpReply()
        chosen = _chosen(side, request.namespace_id)
        if chosen is None:
            return reply
        clock = side.cache.clock.now
        for namespace in chosen:
            reply.total_nodes += namespace.tree.nodes
            if left:
                views = namespace.tree.dump(left)
                left -= len(views)
                for view in views:
                    reply.nodes.add(
                        namespace_id=namespace.id,
                        depth=view.depth,
                        pages=view.pages,
                        first_digest=view.first_digest,
                        last_digest=view.last_digest,
                        device=view.device,
                        host=view.host,
                        locks=view.locks,
                        hits=view.hits,
                        priority=view.priority,
                        output=view.output,
                        orphan=view.orphan,
                        copying=view.copying,
                        idle_seconds=max(0.0, clock - view.accessed_s),
                    )
        for pin in side.ready_core.pins.all():
            if pin.namespace in chosen:
                reply.pins.add(
                    pin=pin.number,
                    namespace_id=pin.namespace.id,
                    tokens=pin.pages * side.cache.page_size,
                    seconds_left=max(0.0, pin.until - side.now()),
                )
        return reply

    def _side(self, role: int) -> AnySide:
        """INVALID_ARGUMENT where the daemon has no such role, or several and none is named."""
        have = " and ".join(sorted(self._sides))
        if role == common.ROLE_UNSPECIFIED:
            if len(self._sides) > 1:
                raise invalid(f"role is not set; this daemon has {have}: name one")
            return next(iter(self._sides.values()))
        side = self._sides.get(_ROLES.get(role, ""))
        if side is None:
            raise invalid(f"role is {_ROLES.get(role, role)}; this daemon has {have}")
        return side


async def _answer(context: Context, step: Callable[[], Reply]) -> Reply:
    try:
        return step()
    except RequestError as error:
        await context.abort(status_of(error), error.message)
    except AssertionError as error:
        report_invariant(error)
        await context.abort(grpc.StatusCode.INTERNAL, "an invariant is broken; the daemon ends")
    raise AssertionError("abort returned")


def _check_namespace(namespace_id: bytes) -> None:
    if len(namespace_id) != NAMESPACE_BYTES:
        raise invalid(f"namespace_id has {len(namespace_id)} bytes; it must have {NAMESPACE_BYTES}")


def _known(side: AnySide, namespace_id: bytes) -> list[Namespace]:
    """The namespace, if there is a tree of it, or all where none is named. INVALID_ARGUMENT."""
    if namespace_id:
        _check_namespace(namespace_id)
    if side.core is None:
        return []
    return [space for name, space in side.cache.namespaces.items() if namespace_id in (b"", name)]


def _chosen(side: AnySide, namespace_id: bytes) -> list[Namespace] | None:
    """One namespace, or all where none is named; None before the first worker. NOT_FOUND where it is unknown."""
    known = _known(side, namespace_id)
    if not side.tiers.has_pool.is_set():
        return None
    _check_known(side, namespace_id, known)
    return known


def _check_known(side: AnySide, namespace_id: bytes, known: list[Namespace]) -> None:
    """NOT_FOUND where one was named, and there is none."""
    if namespace_id and not known:
        raise not_found(f"namespace_id {namespace_id.hex()[:16]}... is none that this daemon's {side.role} role has")


def _check_nothing_held(side: AnySide, namespaces: list[Namespace]) -> None:
    """FAILED_PRECONDITION where a flush would have to leave a page. What is held on both tiers counts on the device."""
    trees = [namespace.tree for namespace in namespaces]
    held = sum(tree.pages - tree.evictable + tree.host_pages - tree.host_evictable for tree in trees)
    copies = sum(side.cache.copies_of(namespace) for namespace in namespaces)
    if held or copies:
        raise precondition(
            f"{held} pages are held by requests, pins or copies between the tiers ({copies} under way); "
            "nothing was freed"
        )
