// Memory of a GPU and events, of this process and of others.
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

// What torch and others map without a copy.
nb::dict array_interface(GpuAddress address, size_t size) {
  nb::dict interface;
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
  char* const to = PyBytes_AS_STRING(data.ptr());
  nb::gil_scoped_release release;
  engine.small().read(to, GpuAddress(address), size_t(nbytes));
  return data;
}

void hold_for(Engine& engine, const GpuIpcEvent& event, std::optional<int64_t> stream) {
  if (stream) return event.hold(any_stream_at(*stream));
  for (const GpuStream own : engine.get().streams()) event.hold(own);
  event.hold(engine.parts().stream(PartDirection::kGather));
  event.hold(engine.parts().stream(PartDirection::kScatter));
}

// Pins a buffer, which stays exported as long as this lives: its owner cannot unmap or resize it. Both take the driver up
// to seconds, without the GIL.
class PinnedBuffer {
 public:
  PinnedBuffer(Engine& engine, nb::handle object) : buffer_(object, "buffer", Buffer::Access::kWrite) {
    const nb::gil_scoped_release release;
    range_.emplace(engine.device(), buffer_.data(), buffer_.size());
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

int64_t find_ordinal(const nb::bytes& uuid, const std::string& library, const std::string& api) {
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
        [](const std::string& library, const std::string& api) { return device_count(*driver_of(library, api)); },
        "library"_a = "libcuda.so.1", "api"_a = "cuda");
  m.def("gpu_device_uuid",
        [](int64_t ordinal, const std::string& library, const std::string& api) {
          check_range("ordinal", ordinal, 0, 1023);
          return bytes_of(device_uuid(*driver_of(library, api), int(ordinal)));
        },
        "ordinal"_a, "library"_a = "libcuda.so.1", "api"_a = "cuda");
  m.def("gpu_device_ordinal", &find_ordinal, "uuid"_a, "library"_a = "libcuda.so.1", "api"_a = "cuda");
}

void bind_engine(nb::class_<Engine>& engine) {
  using namespace nb::literals;
  engine
      .def("allocate",
           [](Engine& self, int64_t nbytes) {
             check_range("nbytes", nbytes, 1, kMaxInt64 - int64_t(kShareableBlock));
             return std::make_unique<OwnedMemory>(self.device(), size_t(nbytes), kShareableBlock);
           },
           "nbytes"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("export_memory",
           [](Engine& self, int64_t address, int64_t nbytes) {
             check_memory(address, nbytes);
             check_range_of(*self.device(), "address", address, nbytes);
             const ExportedMemory exported = export_memory(*self.device(), GpuAddress(address));
             return nb::make_tuple(bytes_of(exported.handle), GpuAddress(address) - exported.range.base);
           },
           "address"_a, "nbytes"_a)
      .def("open_ipc",
           [](Engine& self, const nb::bytes& handle, int64_t nbytes) {
             check_range("nbytes", nbytes, 1, kMaxInt64);
             const auto name = read_value<GpuIpcHandle>("handle", handle);
             nb::gil_scoped_release release;
             return std::make_unique<OwnedMapping>(self.device(), name, size_t(nbytes));
           },
           "handle"_a, "nbytes"_a)
      .def("address_range",
           [](Engine& self, int64_t address) {
             check_range("address", address, 1, kMaxInt64);
             const AddressRange range = address_range(*self.device(), GpuAddress(address));
             return std::pair(range.base, range.size);
           },
           "address"_a)
      .def("check_range",
           [](Engine& self, int64_t address, int64_t nbytes) {
             check_memory(address, nbytes);
             check_range_of(*self.device(), "address", address, nbytes);
           },
           "address"_a, "nbytes"_a)
      .def("check_pages", &check_pages, "pages"_a)
      .def("device_uuid", [](Engine& self) { return bytes_of(self.device()->uuid()); })
      .def("device_memory_info", [](Engine& self) { return self.device()->memory_info(); })
      .def("read", &read, "address"_a, "nbytes"_a)
      .def("make_ipc_event", [](Engine& self) { return std::make_unique<GpuIpcEvent>(self.device()); })
      .def("open_ipc_event",
           [](Engine& self, const nb::bytes& handle) {
             return std::make_unique<GpuIpcEvent>(self.device(), read_value<GpuIpcHandle>("handle", handle));
           },
           "handle"_a)
      .def("hold", &hold_for, "event"_a, "stream"_a = nb::none());
}

}  // namespace

void bind_gpu_memory(nb::module_& m, nb::class_<Engine>& engine) {
  using namespace nb::literals;
  nb::class_<OwnedMemory>(m, "GpuMemory")
      .def_prop_ro("address", [](const OwnedMemory& self) { return self->address(); })
      .def("__len__", [](const OwnedMemory& self) { return self->size(); })
      .def("leave", [](const OwnedMemory& self) { self->leave(); })
      .def("ipc_handle",
           [](const OwnedMemory& self) { return bytes_of(export_memory(*self->device(), self->address()).handle); })
      .def_prop_ro("__cuda_array_interface__",
                   [](const OwnedMemory& self) { return array_interface(self->address(), self->size()); });

  nb::class_<OwnedMapping>(m, "GpuMapping")
      .def_prop_ro("address", [](const OwnedMapping& self) { return open_one(self).address(); })
      .def_prop_ro("closed", [](const OwnedMapping& self) { return self->closed(); })
      .def("__len__", [](const OwnedMapping& self) { return self->size(); })
      .def("close", [](const OwnedMapping& self) { self->close(); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("__cuda_array_interface__",
                   [](const OwnedMapping& self) { return array_interface(open_one(self).address(), self->size()); });

  nb::class_<GpuIpcEvent>(m, "GpuIpcEvent")
      .def_prop_ro("handle", [](const GpuIpcEvent& self) { return bytes_of(self.handle()); })
      .def("record", [](GpuIpcEvent& self, int64_t stream) { self.record(any_stream_at(stream)); }, "stream"_a)
      .def("done", &GpuIpcEvent::done);

  nb::class_<PinnedBuffer>(m, "PinnedBuffer").def(nb::init<Engine&, nb::handle>(), "engine"_a, "buffer"_a);
  bind_engine(engine);
  bind_devices(m);
}

}  // namespace kvferry
