"""The host tier's files and shared memory's: order of an index entry's stores, generations, locks, whose a file is."""

from tests.mutants.guard import Guard

INDEX, ROWS = "transfer/host_tier/index.py", "transfer/host_tier/rows.py"
SEGMENT = "transfer/mapping/segment.py"
OF_INDEX = ("tests/transfer/host_tier/test_index_kills.py", "tests/transfer/host_tier/test_index.py")
OF_ROWS = ("tests/transfer/host_tier/test_rows.py",)
OF_FILES = (
    "tests/transfer/host_tier/test_recovery.py::test_entries_that_a_killed_resize_left_do_not_come_back",
    "tests/transfer/host_tier/test_recovery.py::test_a_resize_that_is_killed_at_any_step_leaves_right_entries",
    "tests/transfer/host_tier/test_recovery.py::test_files_of_other_rows_are_replaced",
    "tests/transfer/host_tier/test_recovery.py::test_truncated_files_are_replaced",
    "tests/transfer/host_tier/test_recovery.py::test_holes_of_a_copied_file_are_filled_as_its_rows_are_made",
    "tests/transfer/host_tier/test_recovery.py::test_an_allocation_of_the_index_that_fails_leaves_what_was_there",
)
OF_GROWTH = ("tests/daemon/memory/test_tier_growth.py",)
OF_SEGMENT = ("tests/transfer/mapping/test_segment.py",)

THE_INDEX = (
    Guard(
        "an entry's state is written last",
        INDEX,
        "RowIndex.write",
        """        batch["state"] = 0
""",
        "",
        OF_INDEX,
    ),
    Guard(
        "an entry's other fields are written before its state",
        INDEX,
        "RowIndex.write",
        """        self._entries[at] = batch
        self._entries["state"][at] = IN_USE
""",
        """        self._entries["state"][at] = IN_USE
        batch["state"] = IN_USE
        self._entries[at] = batch
""",
        OF_INDEX,
    ),
    Guard(
        "an entry's state is cleared before its checksum",
        INDEX,
        "RowIndex.clear",
        """        self._entries["state"][at] = 0
        self._entries["entry_checksum"][at] = 0
""",
        """        self._entries["entry_checksum"][at] = 0
        self._entries["state"][at] = 0
""",
        OF_INDEX,
    ),
    Guard(
        "a cleared entry's checksum goes, too",
        INDEX,
        "RowIndex.clear",
        """        self._entries["entry_checksum"][at] = 0
""",
        "",
        OF_INDEX,
    ),
    Guard(
        "no entry is written over one that is there", INDEX, "RowIndex.write", "if len(live):", "if False:", OF_INDEX
    ),
    Guard(
        "an entry's checksum is seeded with its row",
        INDEX,
        "_entry_checksums",
        "covered], row)",
        "covered], 0)",
        OF_INDEX,
    ),
    Guard(
        "an entry's checksum is looked at",
        INDEX,
        "RowIndex.recover",
        '_entry_checksums(found[part], used[part]) == found["entry_checksum"][part]',
        "True",
        OF_INDEX,
    ),
    Guard(
        "a generation that was never given out is none",
        INDEX,
        "RowIndex.recover",
        ' & (found["generation"] < self._next)',
        "",
        OF_INDEX,
    ),
    Guard(
        "generations are reserved before the first is used",
        INDEX,
        "RowIndex.__init__",
        "        self._reserve(0)\n",
        "",
        OF_INDEX,
    ),
    Guard(
        "more generations are reserved before they run out",
        INDEX,
        "RowIndex.write",
        "if self._next + count > self._header.generations:",
        "if False:",
        OF_INDEX,
    ),
    Guard(
        "of two entries of a page the younger stays",
        INDEX,
        "_older_duplicates",
        'np.argsort(entries["generation"][candidates], kind="stable")',
        'np.argsort(entries["generation"][candidates], kind="stable")[::-1]',
        OF_INDEX,
    ),
    Guard(
        "the same page of another namespace is another page",
        INDEX,
        "_older_duplicates",
        'entries["namespace_id"][index].tobytes() + ',
        "",
        OF_INDEX,
    ),
    Guard(
        "rows in other heads' order are other rows",
        INDEX,
        "layout_fingerprint",
        "if shards > 1:",
        "if False:",
        OF_INDEX,
    ),
)

FILES = (
    Guard(
        "a host tier's files have one holder",
        ROWS,
        "_open_locked",
        "while not FileLock(path, fd).try_acquire():",
        "while False:",
        OF_ROWS,
    ),
    Guard(
        "a host tier's file is its user's own",
        ROWS,
        "_open_locked",
        "if status.st_uid != os.geteuid():",
        "if False:",
        OF_ROWS,
    ),
    Guard(
        "a host tier's file has no second name", ROWS, "_open_locked", "if status.st_nlink != 1:", "if False:", OF_ROWS
    ),
    Guard(
        "a host tier's file is waited for while its daemon ends",
        ROWS,
        "FileRows.open",
        "_open_locked(path, patience_s)",
        "_open_locked(path, 0.0)",
        OF_ROWS,
    ),
    Guard("a host tier's file is private", ROWS, "_open_locked", "        os.fchmod(fd, 0o600)\n", "", OF_ROWS),
    Guard(
        "the index is cut before it grows",
        ROWS,
        "_prepare",
        """    # Cut first: what is added then is zeros, and no entry of an earlier size comes back.
    os.ftruncate(index_fd, kept_index)
""",
        "",
        OF_FILES,
    ),
    Guard(
        "rows of another layout are not used",
        ROWS,
        "_unusable",
        "if old.layout != wanted.layout:",
        "if False:",
        OF_FILES,
    ),
    Guard(
        "a file that is shorter than its header says is not used",
        ROWS,
        "_unusable",
        "if rows_size < old.rows_bytes or index_size < old.index_bytes:",
        "if False:",
        OF_FILES,
    ),
    Guard(
        "generations go on in files that are replaced",
        ROWS,
        "_prepare",
        "header = wanted if old is None else dataclasses.replace(wanted, generations=old.generations)",
        "header = wanted",
        OF_FILES,
    ),
    Guard(
        "a row whose bytes differ is told",
        ROWS,
        "verify_rows",
        "checksum_rows(buffer, rows, page_bytes) != expected",
        "np.zeros(len(rows), np.bool_)",
        OF_ROWS,
    ),
    Guard(
        "a lock file has its name only once its lock is held",
        SEGMENT,
        "FileLock.create_held",
        'FileLock.create(f"{path}{_UNFINISHED}")',
        "FileLock.create(path)",
        OF_SEGMENT,
    ),
    Guard(
        "files of a daemon that lives are left alone",
        SEGMENT,
        "reclaim_stale",
        "if lock.try_acquire():",
        "if True:",
        OF_SEGMENT,
    ),
    Guard(
        "a dead daemon's lock file goes last",
        SEGMENT,
        "reclaim_stale",
        "sorted(paths, key=lambda path: path == lock_path)",
        "sorted(paths, key=lambda path: path != lock_path)",
        OF_SEGMENT,
    ),
    Guard(
        "a lock file that is being made is left alone",
        SEGMENT,
        "_remove_unfinished",
        "time.time() - os.lstat(path).st_mtime > UNFINISHED_SECONDS and ",
        "",
        OF_SEGMENT,
    ),
    Guard(
        "an engine's file is named within its folder",
        SEGMENT,
        "Segment.open_within",
        'if os.path.basename(name) != name or name in ("", ".", ".."):',
        "if False:",
        OF_SEGMENT,
    ),
    Guard(
        "an engine's file is this user's",
        SEGMENT,
        "Segment.open_within",
        "if found.st_uid != os.geteuid():",
        "if False:",
        OF_SEGMENT,
    ),
    Guard(
        "a chunk whose entries cannot be read is not pinned",
        "daemon/memory/growing_rows.py",
        "GrowingRows.make",
        "del self._pins[pins:]",
        "pass",
        ("tests/daemon/memory/test_growing_rows.py",),
    ),
    Guard(
        "rows of a disk are pinned as far as memory goes",
        "daemon/memory/growing_rows.py",
        "GrowingRows._pin",
        "if lack := self._lacks_pinned(start, end):",
        "if False:",
        ("tests/daemon/memory/test_growing_rows.py",),
    ),
    Guard(
        "a chunk that fails keeps no room on the disk",
        ROWS,
        "FileRows.unmake",
        "let_go(self.buffer[first * size : behind * size], mmap.MADV_REMOVE)",
        "pass",
        OF_GROWTH,
    ),
    Guard(
        "a later daemon's rows are not let go with those of a chunk that fails",
        INDEX,
        "RowIndex.unused",
        'self._entries["state"][first:last] == 0',
        'self._entries["state"][first:last] >= 0',
        OF_GROWTH,
    ),
    Guard(
        "nothing is flushed while pages of a file may come behind it",
        "daemon/services/admin.py",
        "AdminService._flush",
        "if side.tiers.reads_file:",
        "if False:",
        ("tests/daemon/test_host_growth.py",),
    ),
    Guard(
        "a flush beside a file that could not be opened says so",
        "daemon/services/admin.py",
        "AdminService._flush",
        "if side.tiers.file_unopened:  # ABORTED",
        "if False:  # ABORTED",
        ("tests/daemon/test_host_growth.py",),
    ),
    Guard(
        "a flush that is refused forgets nothing",
        "daemon/services/admin.py",
        "AdminService._flush",
        "        known = _known(",
        "        side.tiers.forget_unread(request.namespace_id)\n        known = _known(",
        ("tests/daemon/test_host_growth.py",),
    ),
    Guard(
        "a flush of a namespace that has no tree is of its rows in a file",
        "daemon/services/admin.py",
        "AdminService._flush",
        "side.tiers.forget_unread(request.namespace_id)",
        "side.tiers.forget_unread(_chosen(side, request.namespace_id) and request.namespace_id)",
        ("tests/daemon/test_host_growth.py",),
    ),
    Guard(
        "a flush of one tenant leaves what others have in a file",
        INDEX,
        "RowIndex.named",
        "if namespace_id:",
        "if False:",
        OF_GROWTH,
    ),
    Guard(
        "what is let go shares no page of memory with what stays",
        "transfer/mapping/populate.py",
        "let_go",
        "begin, end = -(-address // page) * page,",
        "begin, end = address // page * page,",
        OF_ROWS,
    ),
    Guard(
        "an engine's file has the bytes that were registered",
        SEGMENT,
        "Segment.open_within",
        "if found.st_size != nbytes:",
        "if False:",
        OF_SEGMENT,
    ),
    Guard(
        "an engine's file has its memory before it is mapped",
        SEGMENT,
        "Segment.open_within",
        "            os.posix_fallocate(fd, 0, nbytes)\n",
        "",
        OF_SEGMENT,
    ),
)

GUARDS: tuple[Guard, ...] = (*THE_INDEX, *FILES)
