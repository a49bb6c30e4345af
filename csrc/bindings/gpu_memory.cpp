// Memory of a GPU, of this process and of others.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstring>
#include <optional>

#include "bindings/cuda.h"
#include "cuda/shared.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

using OwnedMemory = Owned<GpuMemory>;
using OwnedMapping = Owned<GpuMapping>;

nb::bytes bytes_of(const GpuIpcHandle& handle) { return nb::bytes(handle.bytes, sizeof handle.bytes); }

nb::bytes bytes_of(const GpuUuid& uuid) { return nb::bytes(uuid.bytes, sizeof uuid.bytes); }

template <class Value>
Value read_value(const char* field, const nb::bytes& bytes) {
  check_range((std::string(field) + " length").c_str(), int64_t(bytes.size()), sizeof(Value), sizeof(Value));
  Value value;
  std::memcpy(&value, bytes.c_str(), sizeof value);
  return value;
}

void check_memory(int64_t address, int64_t nbytes) {
  check_range("address", address, 1, kMaxInt64);
  check_range("nbytes", nbytes, 1, kMaxInt64 - address);
}

using ArrayInterface = nb::typed<nb::dict, std::string, nb::object>;

// What torch and others map without a copy.
ArrayInterface array_interface(GpuAddress address, size_t size) {
  ArrayInterface interface;
  interface["shape"] = nb::make_tuple(size);
  interface["typestr"] = "|u1";
  interface["data"] = nb::make_tuple(address, false);
  interface["strides"] = nb::none();
  interface["version"] = 3;
  return interface;
}

const GpuMapping& open_one(const OwnedMapping& mapping) {
  if (mapping->closed()) refuse("mapping: it is closed");
  return *mapping;
}

void check_range_of(const GpuDevice& device, const char* field, int64_t address, int64_t nbytes) {
  AddressRange range;
  try {
    range = address_range(device, GpuAddress(address));
  } catch (const GpuError& error) {
    refuse(std::string(field) + ": " + error.what());
  }
  if (range.holds(GpuAddress(address), size_t(nbytes))) return;
  refuse(std::string(field) + ": " + std::to_string(address) + " with nbytes " + std::to_string(nbytes) +
         " ends behind its allocation, which is [" + std::to_string(range.base) + ", " +
         std::to_string(range.base + range.size) + ")");
}

void check_pages(Engine& engine, const OwnedPages& pages) {
  check_device(engine, *pages);
  const PageLayout& layout = pages->layout();
  for (size_t t = 0; t < layout.bases.size(); ++t) {
    check_range_of(*engine.device(), ("bases[" + std::to_string(t) + "]").c_str(), int64_t(layout.bases[t]),
                   (layout.pages - 1) * layout.strides[t] + layout.extent());
  }
}

nb::bytes read(Engine& engine, int64_t address, int64_t nbytes) {
  check_range("nbytes", nbytes, 1, int64_t(SmallReads::kMaxBytes));
  check_memory(address, nbytes);
  nb::bytes data = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(nbytes)));
  if (!data.is_valid()) throw nb::python_error();
  char* const to = PyBytes_AsString(data.ptr());
  nb::gil_scoped_release release;
  engine.small().read(to, GpuAddress(address), size_t(nbytes));
  return data;
}

// Pins a buffer, which stays exported as long as this lives: its owner cannot unmap or resize it. Both take the driver up
// to seconds, without the GIL.
class PinnedBuffer {
 public:
  PinnedBuffer(std::shared_ptr<GpuDevice> device, BufferArgument object)
      : buffer_(object, "buffer", Buffer::Access::kWrite) {
    const nb::gil_scoped_release release;
    range_.emplace(std::move(device), buffer_.data(), buffer_.size());
  }
  ~PinnedBuffer() {
    const nb::gil_scoped_release release;
    range_.reset();
  }
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

 private:
  Buffer buffer_;
  std::optional<PinnedRange> range_;
};

// Pins for a device, whatever becomes of the engine that it is of.
struct Pinner {
  std::shared_ptr<GpuDevice> device;
};

int64_t find_ordinal(const nb::bytes& uuid, const std::string& library, const GpuApiArgument& api) {
  const auto wanted = read_value<GpuUuid>("uuid", uuid);
  const auto driver = driver_of(library, api);
  const int count = device_count(*driver);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const GpuUuid found = device_uuid(*driver, ordinal);
    if (std::memcmp(found.bytes, wanted.bytes, sizeof wanted.bytes) == 0) return ordinal;
  }
  refuse("uuid: none of the " + std::to_string(count) + " devices that this process sees has it");
}

void bind_devices(nb::module_& m) {
  using namespace nb::literals;
  m.def("gpu_device_count",
        [](const std::string& library, const GpuApiArgument& api) { return device_count(*driver_of(library, api)); },
        "library"_a = "libcuda.so.1", "api"_a = "cuda", "GpuUnavailable: no driver, or no device.");
  m.def("gpu_device_uuid",
        [](int64_t ordinal, const std::string& library, const GpuApiArgument& api) {
          check_range("ordinal", ordinal, 0, 1023);
          return bytes_of(device_uuid(*driver_of(library, api), int(ordinal)));
        },
        "ordinal"_a, "library"_a = "libcuda.so.1", "api"_a = "cuda",
        "16 bytes, the same in every process, whatever devices it sees.");
  m.def("gpu_spare_stacks", &GpuDevice::spare_stacks, R"(
      This process's contexts have no memory for kernels' stacks: 264 MiB less on an H200. Before the first of them, in a
      process of kvferry's own: another's kernel that recurses would find no stack.)");
  m.def("gpu_device_ordinal", &find_ordinal, "uuid"_a, "library"_a = "libcuda.so.1", "api"_a = "cuda",
        "Number of the device in this process. ValueError: this process does not see it.");
}

void bind_engine(nb::class_<Engine>& engine) {
  using namespace nb::literals;
  engine
      .def("allocate",
           [](Engine& self, int64_t nbytes) {
             check_range("nbytes", nbytes, 1, kMaxInt64 - int64_t(kShareableBlock));
             return std::make_unique<OwnedMemory>(self.device(), size_t(nbytes), kShareableBlock);
           },
           "nbytes"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Whole blocks of 2 MiB, of which nobody else has a part: their handle shows others nothing else.")
      .def("export_memory",
           [](Engine& self, int64_t address, int64_t nbytes) {
             check_memory(address, nbytes);
             check_range_of(*self.device(), "address", address, nbytes);
             const ExportedMemory exported = export_memory(*self.device(), GpuAddress(address));
             return std::pair(bytes_of(exported.handle), GpuAddress(address) - exported.range.base);
           },
           "address"_a, "nbytes"_a, R"(
           The handle of the allocation that these bytes lie in, whoever made it, and their offset in it: others open
           offset + nbytes of it. ValueError: not in one allocation. GpuError: one that cannot be exported (mapped piece
           by piece, as torch's expandable segments are).)")
      .def("open_ipc",
           [](Engine& self, const nb::bytes& handle, int64_t nbytes) {
             check_range("nbytes", nbytes, 1, kMaxInt64);
             const auto name = read_value<GpuIpcHandle>("handle", handle);
             nb::gil_scoped_release release;
             return std::make_unique<OwnedMapping>(self.device(), name, size_t(nbytes));
           },
           "handle"_a, "nbytes"_a, R"(
           The first nbytes of another process's allocation, on any device that this one's can reach. GpuError: fewer
           bytes, a handle of this process, or one whose memory or process is gone.)")
      .def("address_range",
           [](Engine& self, int64_t address) {
             check_range("address", address, 1, kMaxInt64);
             const AddressRange range = address_range(*self.device(), GpuAddress(address));
             return std::pair(range.base, range.size);
           },
           "address"_a, "Base and size of the allocation, or of the mapping, that it lies in. GpuError: in none.")
      .def("check_range",
           [](Engine& self, int64_t address, int64_t nbytes) {
             check_memory(address, nbytes);
             check_range_of(*self.device(), "address", address, nbytes);
           },
           "address"_a, "nbytes"_a, "ValueError: the bytes do not lie in one allocation, which is named.")
      .def("check_pages", &check_pages, "pages"_a, "`check_range` of every tensor: bases[t] to the end of its last page.")
      .def("device_uuid", [](Engine& self) { return bytes_of(self.device()->uuid()); },
           "16 bytes, the same in every process.")
      .def("device_memory_info", [](Engine& self) { return self.device()->memory_info(); },
           "Bytes free on the device, and all it has.")
      .def("read", &read, "address"_a, "nbytes"_a, R"(
           At most 4096 bytes of the device, at once: it waits for nothing that was issued before. GpuError: not done in
           10 s. GIL released. The address is the caller's word.)");
}

}  // namespace

void bind_gpu_memory(nb::module_& m, nb::class_<Engine>& engine) {
  using namespace nb::literals;
  nb::class_<OwnedMemory>(m, "GpuMemory", R"(
      A plain allocation on the device, freed with this object. What it holds at first is anything.
      `torch.as_tensor(memory, device=...)` is a tensor of uint8 over it, which keeps it.)")
      .def_prop_ro("address", [](const OwnedMemory& self) { return self->address(); })
      .def("__len__", [](const OwnedMemory& self) { return self->size(); })
      .def("leave", [](const OwnedMemory& self) { self->leave(); }, R"(
           It stays until this process ends, also without this object. Others that were given its handle may have it
           mapped, and under them it must not be freed. Idempotent.)")
      .def("ipc_handle",
           [](const OwnedMemory& self) { return bytes_of(export_memory(*self->device(), self->address()).handle); },
           "64 bytes by which other processes map it (`GpuCopyEngine.open_ipc`), as long as it is here.")
      .def_prop_ro("__cuda_array_interface__",
                   [](const OwnedMemory& self) { return array_interface(self->address(), self->size()); },
                   "uint8, one dimension, version 3.");

  nb::class_<OwnedMapping>(m, "GpuMapping", R"(
      Memory of another process, mapped until it is closed or this object ends. The exporter's end does not end it.)")
      .def_prop_ro("address", [](const OwnedMapping& self) { return open_one(self).address(); },
                   "ValueError: it is closed.")
      .def_prop_ro("closed", [](const OwnedMapping& self) { return self->closed(); })
      .def("__len__", [](const OwnedMapping& self) { return self->size(); }, "As many bytes as were asked for.")
      .def("close", [](const OwnedMapping& self) { self->close(); }, nb::call_guard<nb::gil_scoped_release>(),
           "Nobody may use the address any more: no copy under way, no tensor over it.")
      .def_prop_ro("__cuda_array_interface__",
                   [](const OwnedMapping& self) { return array_interface(open_one(self).address(), self->size()); },
                   "As that of GpuMemory.");

  nb::class_<PinnedBuffer>(m, "PinnedBuffer", R"(
      A writable buffer, pinned and exported as long as this lives: anonymous or shared memory (/dev/shm, memfd).
      GpuError says why it cannot be pinned. To pin and to unpin takes up to seconds; GIL released.)")
      .def("__init__", [](PinnedBuffer* self, Engine& engine, BufferArgument buffer) {
             new (self) PinnedBuffer(engine.device(), buffer);
           }, "engine"_a, "buffer"_a);
  nb::class_<Pinner>(m, "GpuPinner", R"(
      Pins memory for an engine's device, whose context stays as long as this and what it has pinned.)")
      .def("__init__", [](Pinner* self, Engine& engine) { new (self) Pinner{engine.device()}; }, "engine"_a)
      .def("pin", [](const Pinner& self, BufferArgument buffer) {
             return std::make_unique<PinnedBuffer>(self.device, buffer);
           }, "buffer"_a, "See `PinnedBuffer`.");
  bind_engine(engine);
  bind_devices(m);
}

}  // namespace kvferry
