"""Memory and events that processes share, ranges, small reads: over the fake driver, and on a GPU."""

import ctypes
import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import IO

import numpy as np
import pytest
from numpy.typing import NDArray

from kvferry import _core
from kvferry._core import GpuCopyEngine, GpuError, GpuUnavailable, PinnedBuffer
from tests.csrc.gpu.driver import calls

MIB = 1 << 20
POISON = 0xA5
Bytes = NDArray[np.uint8]


def put(engine: GpuCopyEngine, address: int, data: bytes) -> None:
    """They are there when it returns."""
    source = np.frombuffer(data, np.uint8)
    where = np.array([address]), np.array([source.ctypes.data]), np.array([len(source)])
    engine.copy_list_from_host(*where, strategy="loop").wait()


def handle_of(address: int) -> bytes:
    """As the fake makes them."""
    return address.to_bytes(8, "little") + bytes([0x5A] * 56)


def test_another_process_memory_is_mapped_until_it_is_closed(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    address = fake.fake_foreign(3 * MIB)
    mapping = engine.open_ipc(handle_of(address), 2 * MIB)
    assert (mapping.address, len(mapping), mapping.closed) == (address, 2 * MIB, False)
    assert engine.address_range(address + 5) == (address, 3 * MIB)
    assert mapping.__cuda_array_interface__ == {
        "shape": (2 * MIB,),
        "typestr": "|u1",
        "data": (address, False),
        "strides": None,
        "version": 3,
    }
    mapping.close()
    mapping.close()
    assert mapping.closed and calls(fake, "ipc_close") == 1
    for use in (lambda: mapping.address, lambda: mapping.__cuda_array_interface__):
        with pytest.raises(ValueError, match="mapping: it is closed"):
            use()
    engine.open_ipc(handle_of(address), 1)  # dropped at once
    assert calls(fake, "ipc_close") == 2
    with pytest.raises(GpuError, match=f"nbytes: {3 * MIB + 1}, but the handle names {3 * MIB} bytes"):
        engine.open_ipc(handle_of(address), 3 * MIB + 1)
    assert calls(fake, "ipc_close") == 3
    fake.fake_foreign_ends(address)
    with pytest.raises(GpuError, match=r"handle: cannot be opened; its process may have ended.*INVALID_VALUE"):
        engine.open_ipc(handle_of(address), 1)


def test_own_memory(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    memory = engine.allocate(100)
    assert len(memory) == 100
    assert engine.address_range(memory.address) == (memory.address, 2 * MIB)  # shared as a whole
    assert memory.ipc_handle() == handle_of(memory.address)
    assert engine.export_memory(memory.address + 40, 60) == (handle_of(memory.address), 40)
    assert memory.__cuda_array_interface__["data"] == (memory.address, False)
    with pytest.raises(GpuError, match="handle: names memory of this process"):
        engine.open_ipc(memory.ipc_handle(), 10)
    assert calls(fake, "ipc_open") == 0
    fake.fake_answer(b"ipc_export", 801)
    with pytest.raises(GpuError, match="only plain allocations have one"):
        memory.ipc_handle()
    for bad in (b"", bytes(63), bytes(65)):
        with pytest.raises(ValueError, match=rf"handle length: {len(bad)}, must be in \[64, 64\]"):
            engine.open_ipc(bad, 1)
    with pytest.raises(ValueError, match="nbytes: 0"):
        engine.allocate(0)


def test_a_handle_is_this_processs_own_while_its_memory_is_there(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    memory = engine.allocate(100)
    handle = memory.ipc_handle()
    del memory
    fake.fake_answer(b"ipc_export", 1)  # nothing is there any more
    with pytest.raises(GpuError, match="handle: cannot be opened"):  # it would be another's by now
        engine.open_ipc(handle, 10)
    assert calls(fake, "ipc_open") == 1


def test_ranges(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    memory = engine.allocate(2 * MIB)
    end = memory.address + 2 * MIB
    engine.check_range(memory.address, 2 * MIB)
    engine.check_range(end - 1, 1)
    with pytest.raises(ValueError, match=rf"address: {end - 1} with nbytes 2 ends behind its allocation, .*{end}\)"):
        engine.check_range(end - 1, 2)
    with pytest.raises(ValueError, match="address: address 64 is in no allocation: INVALID_VALUE"):
        engine.check_range(64, 2)
    with pytest.raises(GpuError, match="address 64 is in no allocation"):
        engine.address_range(64)
    for address, nbytes, field in ((0, 1, "address: 0"), (memory.address, 0, "nbytes: 0"), (1, 2**63 - 1, "nbytes")):
        with pytest.raises(ValueError, match=field):
            engine.check_range(address, nbytes)
    bases = np.array([memory.address, memory.address + MIB])
    engine.check_pages(engine.pages(bases, np.array([256, 256]), 256, 4096))
    with pytest.raises(ValueError, match=r"bases\[1\]: \d+ with nbytes 1048832 ends behind"):
        engine.check_pages(engine.pages(bases, np.array([256, 256]), 256, 4097))


def test_devices(fake: ctypes.CDLL, library: str) -> None:
    assert _core.gpu_device_count(library) == 3
    assert _core.gpu_device_uuid(2, library) == bytes([0x12] * 16)
    assert _core.gpu_device_ordinal(bytes([0x11] * 16), library, "hip") == 1
    engine = GpuCopyEngine(1, library)
    assert engine.device_uuid() == bytes([0x11] * 16)
    assert engine.device_memory_info() == (1000, 2000)
    with pytest.raises(ValueError, match="uuid: none of the 3 devices"):
        _core.gpu_device_ordinal(bytes(16), library)
    with pytest.raises(ValueError, match="uuid length: 15"):
        _core.gpu_device_ordinal(bytes(15), library)
    with pytest.raises(ValueError, match="api: 'metal'"):
        _core.gpu_device_count(library, "metal")  # type: ignore[arg-type]
    with pytest.raises(GpuUnavailable):
        _core.gpu_device_count("libkvferry-has-no-such-driver.so")


# How often a context was given its limit: after one that was there before, one that is made, another vendor's, one
# that refuses. Then the contexts that are current, and retained, at the end.
SPARING = """
import ctypes, sys
from kvferry._core import GpuCopyEngine, gpu_spare_stacks
fake = ctypes.CDLL(sys.argv[1])
limits = lambda: fake.fake_calls(b"context_limit")
before = GpuCopyEngine(0, sys.argv[1])
gpu_spare_stacks()
beside = GpuCopyEngine(0, sys.argv[1])
told = [limits()]
del before, beside
made = [GpuCopyEngine(0, sys.argv[1]), GpuCopyEngine(0, sys.argv[1])]
told.append(limits())
made.clear()
GpuCopyEngine(0, sys.argv[1], "hip")
told.append(limits())
fake.fake_answer(b"context_limit", 801)
GpuCopyEngine(0, sys.argv[1])
print(*told, limits(), fake.fake_contexts(), fake.fake_calls(b"context_retain") - fake.fake_calls(b"context_release"))
"""


def test_contexts_of_a_process_that_spares_stacks(library: str) -> None:
    """It is for the whole process, hence one of its own."""
    done = subprocess.run([sys.executable, "-c", SPARING, library], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("0 1 1 2 0 0\n", "")


def test_small_reads(fake: ctypes.CDLL, library: str) -> None:
    engine = GpuCopyEngine(0, library)
    memory = engine.allocate(8192)
    data = os.urandom(4096)
    put(engine, memory.address, data)
    assert engine.read(memory.address, 4096) == data
    assert engine.read(memory.address + 10, 6) == data[10:16]
    for nbytes in (0, 4097):
        with pytest.raises(ValueError, match=rf"nbytes: {nbytes}, must be in \[1, 4096\]"):
            engine.read(memory.address, nbytes)
    with pytest.raises(ValueError, match="address: 0"):
        engine.read(0, 1)
    fake.fake_answer(b"copy_to_host", 700)
    with pytest.raises(GpuError, match="read: "):
        engine.read(memory.address, 1)
    fake.fake_answer(b"copy_to_host", 0)
    fake.fake_answer(b"host_register", 2)
    with pytest.raises(GpuError, match=r"pinning of 4096 bytes of host memory .*ulimit -l"):
        GpuCopyEngine(0, library).read(memory.address, 1)


# -- a real device

# Exports memory, then does what each line of its input says.
EXPORTER = """
import sys
import numpy as np
from kvferry._core import GpuCopyEngine
engine = GpuCopyEngine(int(sys.argv[2]))
memory = engine.allocate(int(sys.argv[1]))
data = np.random.default_rng(5).integers(0, 256, len(memory), np.uint8)
at, size = np.array([memory.address]), np.array([len(memory)])

def put(bytes_):
    return engine.copy_list_from_host(at, np.array([bytes_.ctypes.data]), size, strategy="loop")

put(data).wait()
print(memory.ipc_handle().hex(), engine.device_uuid().hex(), flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "sum":
        copy = engine.add_up(memory.address, len(memory))
        copy.wait()
        print(copy.checksum(), flush=True)
    elif word == "write":
        data = np.random.default_rng(6).integers(0, 256, len(memory), np.uint8)
        copies = [put(data) for _ in range(20)]
        for copy in copies:
            copy.wait()
        print("written", flush=True)
    elif word == "end":
        break
"""


class Exporter:
    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", EXPORTER, str(nbytes), str(device)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.timer = threading.Timer(60, self.process.kill)  # nothing here waits for ever
        self.timer.start()
        self.handle, self.uuid = (bytes.fromhex(word) for word in self.output().readline().split())

    def output(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.output().readline().strip()

    def end(self, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        self.process.communicate("end\n" if not kill else None)
        self.timer.cancel()


@pytest.fixture
def exporter(gpu_engine: Callable[..., GpuCopyEngine]) -> Iterator[Exporter]:
    gpu_engine()
    exporter = Exporter(16 * MIB + 100)
    yield exporter
    if exporter.process.poll() is None:
        exporter.end(kill=True)


def get(engine: GpuCopyEngine, address: int, nbytes: int) -> Bytes:
    bytes_: Bytes = np.full(nbytes, POISON, np.uint8)
    to, source = np.array([bytes_.ctypes.data]), np.array([address])
    engine.copy_list_to_host(to, source, np.array([nbytes]), strategy="loop").wait()
    return bytes_


@pytest.mark.gpu
def test_two_processes_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], exporter: Exporter) -> None:
    """Every byte through a mapping, scattered into it, and written by the other process, which then says so."""
    engine = gpu_engine()
    size = 16 * MIB + 100
    assert exporter.uuid == engine.device_uuid() == _core.gpu_device_uuid(_core.gpu_device_ordinal(exporter.uuid))
    mapping = engine.open_ipc(exporter.handle, size)
    engine.check_range(mapping.address, size)
    assert engine.address_range(mapping.address)[0] == mapping.address  # blocks of their own
    expected: Bytes = np.random.default_rng(5).integers(0, 256, size, np.uint8)
    assert (get(engine, mapping.address, size) == expected).all()
    fragment, pages = 4096, 512
    bases = mapping.address + np.arange(8, dtype=np.int64) * fragment * pages
    layout = engine.pages(bases, np.full(8, fragment, np.int64), fragment, pages)
    engine.check_pages(layout)
    ids = np.random.default_rng(1).permutation(pages)[:100].astype(np.int64)
    slot = engine.allocate(100 * layout.row_bytes)
    copy = engine.gather_part_summed(layout, ids, 0, len(slot), slot.address)
    copy.wait()
    tensors = expected[: 16 * MIB].reshape(8, pages, fragment)
    rows = tensors[:, ids].transpose(1, 0, 2).reshape(-1)
    assert (get(engine, slot.address, len(slot)) == rows).all()
    assert copy.checksum() == _core.part_checksum(rows)
    engine.scatter_part(layout, ids[::-1].copy(), 0, len(slot), slot.address).wait()
    tensors[:, ids[::-1]] = tensors[:, ids].copy()
    assert int(exporter.ask("sum")) == _core.part_checksum(expected)

    assert exporter.ask("write") == "written"
    engine.gather_part(layout, ids, 0, len(slot), slot.address).wait()
    expected = np.random.default_rng(6).integers(0, 256, size, np.uint8)
    rows = expected[: 16 * MIB].reshape(8, pages, fragment)[:, ids].transpose(1, 0, 2).reshape(-1)
    assert (get(engine, slot.address, len(slot)) == rows).all()
    with pytest.raises(GpuError, match=r"nbytes: .*, but the handle names"):
        engine.open_ipc(exporter.handle, 64 * MIB)
    mapping.close()


@pytest.mark.gpu
def test_an_exporter_that_is_killed_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], exporter: Exporter) -> None:
    engine = gpu_engine()
    mapping = engine.open_ipc(exporter.handle, 16 * MIB)
    exporter.end(kill=True)
    expected: Bytes = np.random.default_rng(5).integers(0, 256, 16 * MIB + 100, np.uint8)[: 16 * MIB]
    assert (get(engine, mapping.address, 16 * MIB) == expected).all()  # the mapping keeps the memory
    mapping.close()
    with pytest.raises(GpuError, match="handle: cannot be opened") as refused:
        engine.open_ipc(exporter.handle, 16 * MIB)
    print(f"a dead exporter's handle: {refused.value}")


@pytest.mark.gpu
def test_two_processes_on_two_gpus(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    """Pages of one device, mapped by a process whose engine has the other, go to its slot and back."""
    engine = gpu_engine()
    if _core.gpu_device_count() < 2:
        pytest.skip("needs two GPUs")
    exporter = Exporter(16 * MIB, device=1)
    try:
        assert exporter.uuid != engine.device_uuid()
        mapping = engine.open_ipc(exporter.handle, 16 * MIB)
        engine.check_range(mapping.address, 16 * MIB)
        expected: Bytes = np.random.default_rng(5).integers(0, 256, 16 * MIB, np.uint8)
        layout = engine.pages(np.array([mapping.address]), np.array([4096]), 4096, 4096)
        ids = np.random.default_rng(1).permutation(4096)[:1000].astype(np.int64)
        slot = engine.allocate(1000 * 4096)
        copy = engine.gather_part_summed(layout, ids, 0, len(slot), slot.address)
        copy.wait()
        rows = expected.reshape(4096, 4096)[ids].reshape(-1)
        assert (get(engine, slot.address, len(slot)) == rows).all()
        assert copy.checksum() == _core.part_checksum(rows)
        back = np.roll(ids, 1)
        engine.scatter_part(layout, back, 0, len(slot), slot.address).wait()
        expected.reshape(4096, 4096)[back] = rows.reshape(1000, 4096)
        assert int(exporter.ask("sum")) == _core.part_checksum(expected)
        assert exporter.ask("write") == "written"
        engine.gather_part(layout, ids, 0, len(slot), slot.address).wait()
        written: Bytes = np.random.default_rng(6).integers(0, 256, 16 * MIB, np.uint8)
        assert (get(engine, slot.address, len(slot)) == written.reshape(4096, 4096)[ids].reshape(-1)).all()
        mapping.close()
    finally:
        exporter.end(kill=True)


@pytest.mark.gpu
def test_small_memory_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    engine = gpu_engine()
    memory, other = engine.allocate(5000), engine.allocate(100)
    assert abs(memory.address - other.address) >= 2 * MIB
    data = os.urandom(4096)
    put(engine, memory.address + 3, data)
    assert engine.read(memory.address + 3, 4096) == data
    assert engine.read(memory.address + 100, 7) == data[97:104]
    with pytest.raises(GpuError, match="handle: names memory of this process"):
        engine.open_ipc(memory.ipc_handle(), 10)
    handle, offset = engine.export_memory(memory.address + 3, 10)
    assert (handle, offset) == (memory.ipc_handle(), 3)
    engine.check_range(memory.address, 5000)
    with pytest.raises(ValueError, match="is in no allocation"):
        engine.check_range(4096, 1)
    with pytest.raises(ValueError, match="ends behind its allocation"):
        engine.check_range(memory.address, 1 << 40)
    free, total = engine.device_memory_info()
    assert 0 < free < total
    assert _core.gpu_device_ordinal(engine.device_uuid()) == 0


@pytest.mark.gpu
def test_torch_sees_the_memory_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine], exporter: Exporter) -> None:
    torch = pytest.importorskip("torch")
    engine = gpu_engine()
    memory = engine.allocate(1000)
    tensor = torch.as_tensor(memory, device="cuda")
    assert tensor.data_ptr() == memory.address and tensor.dtype == torch.uint8 and tuple(tensor.shape) == (1000,)
    tensor.fill_(7)
    torch.cuda.synchronize()
    assert engine.read(memory.address, 1000) == bytes([7]) * 1000
    mapping = engine.open_ipc(exporter.handle, 1000)
    expected: Bytes = np.random.default_rng(5).integers(0, 256, 16 * MIB + 100, np.uint8)[:1000]
    mapped = torch.as_tensor(mapping, device="cuda")
    assert mapped.data_ptr() == mapping.address
    assert (mapped.cpu().numpy() == expected).all()
    from_torch = torch.arange(0, 100, dtype=torch.uint8, device="cuda")
    handle, offset = engine.export_memory(from_torch.data_ptr(), 100)
    assert len(handle) == 64 and offset >= 0


@pytest.mark.gpu
def test_what_can_be_pinned_on_a_gpu(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    engine = gpu_engine()
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(4 * MIB)
        with mmap.mmap(file.fileno(), 4 * MIB) as memory:
            pinned = PinnedBuffer(engine, memory)
            with pytest.raises(GpuError, match="pinned already"):
                PinnedBuffer(engine, memory)
            with pytest.raises(BufferError):
                memory.close()
            del pinned
    with tempfile.TemporaryFile(dir=".") as file:
        file.truncate(4 * MIB)
        with mmap.mmap(file.fileno(), 4 * MIB) as memory:
            try:
                PinnedBuffer(engine, memory)
                print("a file's mapping can be pinned here")
            except GpuError as refused:
                print(f"a file's mapping: {refused}")


# Says that it has a context, and keeps it until its input ends.
HOLDER = """
import sys
from kvferry._core import GpuCopyEngine, gpu_spare_stacks
if sys.argv[1] == "spared":
    gpu_spare_stacks()
engine = GpuCopyEngine(0)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.gpu
def test_a_context_without_stacks_takes_less(gpu_engine: Callable[..., GpuCopyEngine]) -> None:
    """Half of it, on a device as large as an H100."""
    engine = gpu_engine()
    taken = {}
    for how in ("as it is", "spared"):
        before = engine.device_memory_info()[0]
        words = [sys.executable, "-c", HOLDER, how]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "there\n"
            taken[how] = before - engine.device_memory_info()[0]
            process.communicate(timeout=60)
    assert 0 < taken["spared"] < 0.75 * taken["as it is"], taken
