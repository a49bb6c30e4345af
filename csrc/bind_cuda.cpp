// Checks every bound of a copy between a GPU and rows of host memory, then issues it with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>

#include "bindings.h"
#include "cuda_engine.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

using Integers = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxRowBytes = int64_t(1) << 30;
constexpr int64_t kMaxPages = int64_t(1) << 31;
const char* const kStrategyNames[kStrategies] = {"batch", "loop", "kernel", "staged", "pitched"};

CopyStrategy strategy_named(const std::string& name) {
  for (size_t i = 0; i < kStrategies; ++i) {
    if (name == kStrategyNames[i]) return CopyStrategy(i);
  }
  refuse("strategy: '" + name.substr(0, 64) + "', must be batch, loop, kernel, staged or pitched");
}

// 0, 1 and 2 name the default streams: the batch copy refuses them, and nothing could overlap with them.
GpuStream stream_at(std::optional<int64_t> handle) {
  if (!handle) return nullptr;
  check_range("stream", *handle, 3, kMaxInt64);
  return reinterpret_cast<GpuStream>(*handle);
}

// A copy that was issued. It keeps alive what the copy uses; who drops it before it is done gives that up.
struct Copying {
  GpuCopy end;
  CopyStrategy strategy;
  nb::object uses;
};

class Engine {
 public:
  Engine(int64_t device, const std::string& library, const std::string& api, const CopyTuning& tuning) {
    check_range("device", device, 0, 1023);
    if (api != "cuda" && api != "hip") refuse("api: '" + api.substr(0, 64) + "', must be cuda or hip");
    nb::gil_scoped_release release;
    auto driver = open_gpu_driver(library, api == "cuda" ? GpuApi::kCuda : GpuApi::kHip);
    engine_ = std::make_unique<GpuCopyEngine>(std::make_shared<GpuDevice>(driver, int(device)), tuning);
  }
  ~Engine() {
    nb::gil_scoped_release release;
    engine_.reset();  // waits for what it has issued
  }

  GpuCopyEngine& get() { return *engine_; }

  std::unique_ptr<GpuPages> pages(const Integers& bases, const Integers& strides, int64_t fragment_bytes, int64_t pages,
                                  int64_t pieces, int64_t piece_stride) {
    check_range("bases", int64_t(bases.size()), 1, 1 << 16);
    check_range("strides", int64_t(strides.size()), int64_t(bases.size()), int64_t(bases.size()));
    check_range("pages", pages, 1, kMaxPages - 1);
    check_range("fragment_bytes", fragment_bytes, 1, kMaxRowBytes);
    check_range("pieces", pieces, 1, kMaxRowBytes / fragment_bytes / int64_t(bases.size()));
    check_range("piece_stride", piece_stride, pieces > 1 ? fragment_bytes : 0, kMaxInt64 / pieces);
    const int64_t extent = (pieces - 1) * piece_stride + fragment_bytes;
    PageLayout layout;
    for (size_t i = 0; i < bases.size(); ++i) {
      const int64_t base = bases.data()[i], stride = strides.data()[i];
      check_range("bases", base, 1, kMaxInt64);
      check_range("strides", stride, fragment_bytes, (kMaxInt64 - base - extent) / pages);
      layout.bases.push_back(uint64_t(base));
      layout.strides.push_back(stride);
    }
    layout.piece_stride = piece_stride;
    layout.pieces = uint32_t(pieces);
    layout.fragment_bytes = uint32_t(fragment_bytes);
    layout.pages = pages;
    nb::gil_scoped_release release;
    return std::make_unique<GpuPages>(engine_->device(), std::move(layout), engine_->stream());
  }

  std::unique_ptr<Copying> copy_pages(const GpuPages& pages, const Integers& ids, nb::handle rows, int64_t row_stride,
                                      const Integers& row_ids, CopyDirection direction, std::optional<int64_t> stream,
                                      const std::string& strategy) {
    const CopyStrategy wanted = strategy_named(strategy);
    const bool to_host = direction == CopyDirection::kToHost;
    const Buffer memory(rows, "rows", to_host ? Buffer::Access::kWrite : Buffer::Access::kRead);
    const int64_t row_bytes = int64_t(pages.layout().row_bytes());
    check_range("row_stride", row_stride, row_bytes, kMaxInt64);
    check_range("row_ids", int64_t(row_ids.size()), int64_t(ids.size()), int64_t(ids.size()));
    const int64_t size = int64_t(memory.size());
    check_ids("page_ids", ids, pages.layout().pages);
    check_ids("row_ids", row_ids, size < row_bytes ? 0 : std::min((size - row_bytes) / row_stride + 1, kMaxPages - 1));
    check_distinct(to_host ? "row_ids" : "page_ids", to_host ? row_ids : ids);
    const GpuStream on = stream_at(stream);
    return issue(on, nb::make_tuple(rows, nb::find(pages)), [&] {
      return engine_->copy_pages(pages, ids.data(), {reinterpret_cast<uint64_t>(memory.data()), row_stride}, row_ids.data(),
                                 ids.size(), direction, on, wanted);
    });
  }

  std::unique_ptr<Copying> copy_list(const Integers& dst, const Integers& src, const Integers& sizes,
                                     CopyDirection direction, std::optional<int64_t> stream, const std::string& strategy) {
    const CopyStrategy wanted = strategy_named(strategy);
    if (wanted != CopyStrategy::kBatch && wanted != CopyStrategy::kLoop) refuse("strategy: a list goes by batch or loop");
    const int64_t count = int64_t(sizes.size());
    check_range("dst_addresses", int64_t(dst.size()), count, count);
    check_range("src_addresses", int64_t(src.size()), count, count);
    CopyDescriptors list;
    list.reserve(sizes.size());
    for (size_t i = 0; i < sizes.size(); ++i) {
      const int64_t to = dst.data()[i], from = src.data()[i], bytes = sizes.data()[i];
      if (bytes == 0) continue;  // the driver refuses them
      if (bytes < 0 || to <= 0 || from <= 0 || to > kMaxInt64 - bytes || from > kMaxInt64 - bytes) {
        refuse("item " + std::to_string(i) + ": " + std::to_string(bytes) + " bytes from " + std::to_string(from) + " to " +
               std::to_string(to) + " is no memory of a process");
      }
      list.add(uint64_t(to), uint64_t(from), size_t(bytes));
    }
    const GpuStream on = stream_at(stream);
    return issue(on, nb::none(), [&] { return engine_->copy_list(list, direction, on, wanted); });
  }

 private:
  static void check_ids(const char* field, const Integers& ids, int64_t count) {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids.data()[i] >= 0 && ids.data()[i] < count) continue;
      throw nb::index_error((std::string(field) + "[" + std::to_string(i) + "]: " + std::to_string(ids.data()[i]) +
                             ", must be in [0, " + std::to_string(count) + ")")
                                .c_str());
    }
  }

  static void check_distinct(const char* field, const Integers& ids) {
    std::vector<int64_t> sorted(ids.data(), ids.data() + ids.size());
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) refuse(std::string(field) + ": " + std::to_string(*twice) + " would be written twice");
  }

  template <class Issue>
  std::unique_ptr<Copying> issue(GpuStream stream, nb::object uses, const Issue& run) {
    auto copying = std::unique_ptr<Copying>(new Copying{GpuCopy(engine_->device()), CopyStrategy::kBatch, std::move(uses)});
    nb::gil_scoped_release release;
    copying->strategy = run();
    copying->end.record(stream == nullptr ? engine_->stream() : stream);
    return copying;
  }

  std::unique_ptr<GpuCopyEngine> engine_;
};

// Pins a buffer, which stays exported as long as this lives: its owner cannot unmap or resize it.
class PinnedBuffer {
 public:
  PinnedBuffer(Engine& engine, nb::handle object)
      : buffer_(object, "buffer", Buffer::Access::kWrite),
        range_(engine.get().device(), buffer_.data(), buffer_.size()) {}

 private:
  Buffer buffer_;
  PinnedRange range_;
};

nb::dict statistics(Engine& engine) {
  nb::dict result, fallbacks;
  const auto counts = engine.get().counts();
  for (size_t i = 0; i < kStrategies; ++i) {
    nb::dict of;
    of["copies"] = counts[i].copies;
    of["descriptors"] = counts[i].descriptors;
    of["bytes"] = counts[i].bytes;
    result[kStrategyNames[i]] = of;
  }
  for (const auto& [reason, count] : engine.get().fallbacks()) fallbacks[reason.c_str()] = count;
  result["fallbacks"] = fallbacks;
  return result;
}

}  // namespace

void bind_cuda(nb::module_& m) {
  using namespace nb::literals;
  nb::exception<GpuUnavailable>(m, "GpuUnavailable", PyExc_RuntimeError);
  nb::exception<GpuError>(m, "GpuError", PyExc_RuntimeError);

  nb::class_<GpuPages>(m, "GpuPages")
      .def_prop_ro("fragments", [](const GpuPages& self) { return self.layout().fragments(); })
      .def_prop_ro("fragment_bytes", [](const GpuPages& self) { return self.layout().fragment_bytes; })
      .def_prop_ro("runs", [](const GpuPages& self) { return self.runs().size(); })
      .def_prop_ro("row_bytes", [](const GpuPages& self) { return self.layout().row_bytes(); })
      .def_prop_ro("pages", [](const GpuPages& self) { return self.layout().pages; });

  nb::class_<GpuMemory>(m, "GpuMemory")
      .def_prop_ro("address", &GpuMemory::address)
      .def("__len__", &GpuMemory::size);

  nb::class_<PinnedBuffer>(m, "PinnedBuffer").def(nb::init<Engine&, nb::handle>(), "engine"_a, "buffer"_a);

  nb::class_<Copying>(m, "GpuCopy")
      .def_prop_ro("strategy", [](const Copying& self) { return kStrategyNames[size_t(self.strategy)]; })
      .def("done", [](const Copying& self) { return self.end.done(); })
      .def("wait", [](const Copying& self) { self.end.wait(); }, nb::call_guard<nb::gil_scoped_release>())
      .def("hold", [](const Copying& self, int64_t stream) { self.end.hold(stream_at(stream)); }, "stream"_a);

  nb::class_<Engine>(m, "GpuCopyEngine")
      .def(
          "__init__",
          [](Engine* self, int64_t device, const std::string& library, const std::string& api, int64_t buffer_bytes,
             int64_t buffers, int64_t small_bytes, int64_t growth, int64_t staging_blocks, int64_t bus_blocks,
             int64_t batch_descriptors, int64_t batch_flags) {
            check_range("buffer_bytes", buffer_bytes, 1, kMaxRowBytes);
            check_range("buffers", buffers, 2, 64);
            check_range("small_bytes", small_bytes, 1, kMaxRowBytes);
            check_range("growth", growth, 1, 64);
            check_range("staging_blocks", staging_blocks, 1, 1024);
            check_range("bus_blocks", bus_blocks, 1, 1024);
            check_range("batch_descriptors", batch_descriptors, 1, 1 << 20);
            check_range("batch_flags", batch_flags, 0, 1);
            CopyTuning tuning;
            tuning.buffer_bytes = size_t(buffer_bytes);
            tuning.buffers = unsigned(buffers);
            tuning.small_bytes = size_t(small_bytes);
            tuning.growth = unsigned(growth);
            tuning.staging_blocks = unsigned(staging_blocks);
            tuning.bus_blocks = unsigned(bus_blocks);
            tuning.batch_descriptors = size_t(batch_descriptors);
            tuning.batch_flags = unsigned(batch_flags);
            new (self) Engine(device, library, api, tuning);
          },
          "device"_a = 0, "library"_a = "libcuda.so.1", "api"_a = "cuda", nb::kw_only(),
          "buffer_bytes"_a = CopyTuning().buffer_bytes, "buffers"_a = CopyTuning().buffers,
          "small_bytes"_a = CopyTuning().small_bytes, "growth"_a = CopyTuning().growth,
          "staging_blocks"_a = CopyTuning().staging_blocks, "bus_blocks"_a = CopyTuning().bus_blocks,
          "batch_descriptors"_a = CopyTuning().batch_descriptors, "batch_flags"_a = CopyTuning().batch_flags)
      .def("pages", &Engine::pages, "bases"_a, "strides"_a, "fragment_bytes"_a, "pages"_a, "pieces"_a = 1,
           "piece_stride"_a = 0)
      .def("allocate",
           [](Engine& self, int64_t nbytes) {
             check_range("nbytes", nbytes, 1, kMaxInt64);
             return std::make_unique<GpuMemory>(self.get().device(), size_t(nbytes));
           },
           "nbytes"_a)
      .def("copy_pages_to_host",
           [](Engine& self, const GpuPages& pages, const Integers& page_ids, nb::handle rows, int64_t row_stride,
              const Integers& row_ids, std::optional<int64_t> stream, const std::string& strategy) {
             return self.copy_pages(pages, page_ids, rows, row_stride, row_ids, CopyDirection::kToHost, stream, strategy);
           },
           "pages"_a, "page_ids"_a, "rows"_a, "row_stride"_a, "row_ids"_a, "stream"_a = nb::none(), "strategy"_a = "staged",
           nb::keep_alive<0, 1>())
      .def("copy_pages_from_host",
           [](Engine& self, const GpuPages& pages, const Integers& page_ids, nb::handle rows, int64_t row_stride,
              const Integers& row_ids, std::optional<int64_t> stream, const std::string& strategy) {
             return self.copy_pages(pages, page_ids, rows, row_stride, row_ids, CopyDirection::kToDevice, stream, strategy);
           },
           "pages"_a, "page_ids"_a, "rows"_a, "row_stride"_a, "row_ids"_a, "stream"_a = nb::none(), "strategy"_a = "staged",
           nb::keep_alive<0, 1>())
      .def("copy_list_to_host",
           [](Engine& self, const Integers& dst, const Integers& src, const Integers& sizes, std::optional<int64_t> stream,
              const std::string& strategy) {
             return self.copy_list(dst, src, sizes, CopyDirection::kToHost, stream, strategy);
           },
           "dst_addresses"_a, "src_addresses"_a, "sizes"_a, "stream"_a = nb::none(), "strategy"_a = "batch",
           nb::keep_alive<0, 1>())
      .def("copy_list_from_host",
           [](Engine& self, const Integers& dst, const Integers& src, const Integers& sizes, std::optional<int64_t> stream,
              const std::string& strategy) {
             return self.copy_list(dst, src, sizes, CopyDirection::kToDevice, stream, strategy);
           },
           "dst_addresses"_a, "src_addresses"_a, "sizes"_a, "stream"_a = nb::none(), "strategy"_a = "batch",
           nb::keep_alive<0, 1>())
      .def("can", [](Engine& self, const std::string& strategy) { return self.get().can(strategy_named(strategy)); },
           "strategy"_a)
      .def("busy", [](Engine& self) { return self.get().busy(); }, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("stream", [](Engine& self) { return reinterpret_cast<int64_t>(self.get().stream()); })
      .def("statistics", &statistics);
}

}  // namespace kvferry
