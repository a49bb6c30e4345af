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

#include "bindings/cuda.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

const char* const kStrategyNames[kStrategies] = {"batch", "loop", "kernel", "staged", "pitched"};

CopyStrategy strategy_named(const std::string& name) {
  for (size_t i = 0; i < kStrategies; ++i) {
    if (name == kStrategyNames[i]) return CopyStrategy(i);
  }
  refuse("strategy: '" + name.substr(0, 64) + "', must be batch, loop, kernel, staged or pitched");
}

const char* name_of(CopyStrategy strategy) { return kStrategyNames[size_t(strategy)]; }

std::unique_ptr<OwnedPages> pages_of(Engine& engine, const Integers& bases, const Integers& strides,
                                     int64_t fragment_bytes, int64_t pages, int64_t pieces, int64_t piece_stride,
                                     bool in_blocks) {
  PageLayout layout = checked_layout("bases", bases, 1, strides, fragment_bytes, pages, pieces, piece_stride, in_blocks);
  nb::gil_scoped_release release;
  return std::make_unique<OwnedPages>(engine.device(), std::move(layout));
}

std::unique_ptr<Copying> copy_pages(Engine& engine, const OwnedPages& owned, const Integers& ids, nb::handle rows,
                                    int64_t row_stride, const Integers& row_ids, CopyDirection direction,
                                    std::optional<int64_t> stream, const std::string& strategy, const std::string& order) {
  const GpuPages& pages = *owned;
  check_device(engine, pages);
  const CopyStrategy wanted = strategy_named(strategy);
  if (order != "stream" && order != "none") refuse("order: '" + order.substr(0, 64) + "', must be stream or none");
  if (order == "none" && stream) refuse("order: 'none', but a stream is given");
  const bool to_host = direction == CopyDirection::kToHost;
  const Buffer memory(rows, "rows", to_host ? Buffer::Access::kWrite : Buffer::Access::kRead);
  const int64_t row_bytes = int64_t(pages.layout().row_bytes());
  check_range("row_stride", row_stride, row_bytes, kMaxInt64);
  const int64_t count = checked_pages(pages.layout(), ids, !to_host);
  check_range("row_ids", int64_t(row_ids.size()), count, count);
  const int64_t size = int64_t(memory.size());
  check_ids("row_ids", row_ids, size < row_bytes ? 0 : std::min((size - row_bytes) / row_stride + 1, kMaxPages - 1));
  check_distinct(to_host ? "row_ids" : "page_ids", to_host ? row_ids : ids);
  const GpuStream on = stream ? stream_at(stream) : engine.get().stream();
  auto copying = engine.issue(on, nb::make_tuple(rows, nb::find(owned)), [&](SumCells::Held*) {
    const PageRows to{reinterpret_cast<uint64_t>(memory.data()), row_stride};
    const Issued issued = engine.get().copy_pages(pages, ids.data(), to, row_ids.data(), size_t(count), direction,
                                                  order == "none" ? nullptr : on, wanted);
    return Engine::Run(name_of(issued.strategy), issued.end);
  });
  engine.get().backlog(direction).add(copying->end, size_t(count * row_bytes));
  return copying;
}

std::unique_ptr<Copying> copy_list(Engine& engine, const Integers& dst, const Integers& src, const Integers& sizes,
                                   CopyDirection direction, std::optional<int64_t> stream, const std::string& strategy) {
  const CopyStrategy wanted = strategy_named(strategy);
  if (wanted == CopyStrategy::kStaged || wanted == CopyStrategy::kPitched) {
    refuse("strategy: a list goes by batch, loop or kernel");
  }
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
    list.append(uint64_t(to), uint64_t(from), size_t(bytes));
  }
  const GpuStream on = stream ? stream_at(stream) : engine.get().stream();
  return engine.issue(on, nb::none(),
                      [&](SumCells::Held*) { return name_of(engine.get().copy_list(list, direction, on, wanted)); });
}

bool wait_for(const Copying& copy, double seconds) {
  const auto time = checked_seconds(seconds);
  nb::gil_scoped_release release;
  return copy.end->wait_for(time);
}

using Counts = nb::typed<nb::dict, std::string, int>;
using Statistics = nb::typed<nb::dict, std::string, Counts>;

Statistics statistics(Engine& engine) {
  Statistics result;
  Counts fallbacks;
  const auto counts = engine.get().counts();
  for (size_t i = 0; i < kStrategies; ++i) {
    nb::dict of;
    of["copies"] = counts[i].copies;
    of["descriptors"] = counts[i].descriptors;
    of["bytes"] = counts[i].bytes;
    result[kStrategyNames[i]] = of;
  }
  for (const auto& [name, direction] : {std::pair{"gathered", PartDirection::kGather}, {"scattered", PartDirection::kScatter}}) {
    const PartCount count = engine.parts().count(direction);
    nb::dict of;
    of["parts"] = count.parts;
    of["launches"] = count.launches;
    of["bytes"] = count.bytes;
    result[name] = of;
  }
  nb::dict zeroed;
  zeroed["pages"] = engine.parts().zeroed();
  result["zeroed"] = zeroed;
  auto reasons = engine.get().fallbacks();
  for (const auto& [reason, count] : engine.parts().fallbacks()) reasons[reason] += count;
  for (const auto& [reason, count] : reasons) fallbacks[reason.c_str()] = count;
  result["fallbacks"] = fallbacks;
  return result;
}

}  // namespace

void check_device(Engine& engine, const GpuPages& pages) {
  const int own = engine.device()->number(), theirs = pages.device()->number();
  if (own == theirs) return;
  refuse("pages: of device " + std::to_string(theirs) + ", but this engine's is device " + std::to_string(own));
}

GpuStream stream_at(std::optional<int64_t> handle) {
  if (!handle) return nullptr;
  check_range("stream", *handle, 3, kMaxInt64);
  return reinterpret_cast<GpuStream>(*handle);
}

GpuStream any_stream_at(int64_t handle) {
  check_range("stream", handle, 0, kMaxInt64);
  return reinterpret_cast<GpuStream>(handle);
}

std::chrono::nanoseconds checked_seconds(double seconds) {
  constexpr double kMaxSeconds = 1e6;
  if (!(seconds >= 0 && seconds <= kMaxSeconds)) {
    refuse("seconds: " + std::to_string(seconds) + ", must be in [0, " + std::to_string(kMaxSeconds) + "]");
  }
  return std::chrono::nanoseconds(int64_t(seconds * 1e9));
}

std::shared_ptr<const GpuDriver> driver_of(const std::string& library, const std::string& api) {
  if (api != "cuda" && api != "hip") refuse("api: '" + api.substr(0, 64) + "', must be cuda or hip");
  nb::gil_scoped_release release;
  return open_gpu_driver(library, api == "cuda" ? GpuApi::kCuda : GpuApi::kHip);
}

Engine::Engine(int64_t ordinal, const std::string& library, const std::string& api, const CopyTuning& tuning,
               const PartTuning& part_tuning) {
  check_range("device", ordinal, 0, 1023);
  const auto driver = driver_of(library, api);
  nb::gil_scoped_release release;
  const auto device = std::make_shared<GpuDevice>(driver, int(ordinal));
  const auto kernels = std::make_shared<const GpuKernels>(device);
  engine_ = std::make_unique<GpuCopyEngine>(device, kernels, tuning);
  parts_ = std::make_unique<GpuParts>(device, kernels, part_tuning);
}

Engine::~Engine() {
  nb::gil_scoped_release release;
  parts_.reset();  // both wait for what they have issued
  engine_.reset();
  small_.reset();
}

SmallReads& Engine::small() {
  const std::lock_guard<std::mutex> hold(small_mutex_);
  if (small_ == nullptr) small_ = std::make_unique<SmallReads>(device());
  return *small_;
}

void bind_cuda(nb::module_& m) {
  using namespace nb::literals;
  nb::exception<GpuUnavailable>(m, "GpuUnavailable", PyExc_RuntimeError).doc() =
      "No driver, a driver that lacks what is needed, or no device.";
  nb::exception<GpuError>(m, "GpuError", PyExc_RuntimeError).doc() =
      "A call of the driver failed; no copy of the call that raised it runs on.";

  nb::class_<OwnedPages>(m, "GpuPages", R"(
      Where the fragments of pages lie on the device; see `GpuCopyEngine.pages`. Its end may wait for the device; GIL
      released.)")
      .def_prop_ro("fragments", [](const OwnedPages& self) { return self->layout().fragments(); },
                   "Fragments of a page.")
      .def_prop_ro("fragment_bytes", [](const OwnedPages& self) { return self->layout().fragment_bytes; })
      .def_prop_ro("runs", [](const OwnedPages& self) { return self->runs().size(); },
                   "Copies of a page by `pitched`; 0: its fragments lie too far apart.")
      .def_prop_ro("row_bytes", [](const OwnedPages& self) { return self->layout().row_bytes(); }, "Bytes of a page.")
      .def_prop_ro("pages", [](const OwnedPages& self) { return self->layout().pages; },
                   "Ids are 0 to pages - 1; of blocks, in blocks.")
      .def_prop_ro("ids_a_page", [](const OwnedPages& self) { return self->layout().ids_a_page(); },
                   "Ids that name a page: 1, or in blocks the number of them.");

  nb::class_<Copying>(m, "GpuCopy", "A copy that was issued. Hold it until it is done: it keeps alive what the copy uses.")
      .def_prop_ro("strategy", [](const Copying& self) { return self.strategy; },
                   nb::sig("def strategy(self) -> CopyStrategy"),
                   "The strategy that moves the bytes, which may be another than was asked for.")
      .def("done", [](const Copying& self) { return self.end->done(); },
           "GpuError: the copy, or anything on the device before it, failed.")
      .def("wait", [](const Copying& self) { self.end->wait(); }, nb::call_guard<nb::gil_scoped_release>(),
           "The thread sleeps, without the GIL, until it is done.")
      .def("wait_for", &wait_for, "seconds"_a,
           "False: it was not done after so long. Looks for some microseconds, then sleeps in between; GIL released.")
      .def("checksum",
           [](const Copying& self) {
             if (self.sum == nullptr) refuse("checksum: the copy was not one that adds up its bytes");
             if (!self.end->done()) refuse("checksum: the copy is not done");
             return self.sum->sum();
           },
           "The `part_checksum` of a `_summed` part or of `add_up`. ValueError: another copy, or not done.")
      .def("hold", [](const Copying& self, int64_t stream) { self.end->hold(any_stream_at(stream)); }, "stream"_a,
           "What is issued to `stream` (0: the default one) from now on runs after the copy.");

  nb::class_<Engine> engine(m, "GpuCopyEngine", R"(
      Copies between one device and host memory that is pinned (other memory works, slowly and not asynchronously).

      A stream is a handle of the driver's; None: the engine's own; the default streams are refused. Each copy runs
      after what was issued to its stream before it, but for copies of pages of order `none`: only who waits for one, or
      `hold`s a stream until its end, knows that it is done.
      Copies issue in microseconds and never wait for the device, GIL released.
      A copy from the host may read its source before the stream gets there: nothing may be writing to it any more.
      A stream of another device is a GpuError, pages of another device's engine a ValueError; nothing has moved then.
      What the driver does not support, or does not take, goes by other ways, and is counted: `statistics`. Which
      strategy suits a layout: `kvferry.transfer.host_tier.copy_plan`.)");
  engine
      .def(
          "__init__",
          [](Engine* self, int64_t device, const std::string& library, const GpuApiArgument& api, int64_t buffer_bytes,
             int64_t buffers, int64_t deep_buffers, int64_t deep_piece_bytes, int64_t small_bytes, int64_t growth,
             int64_t staging_blocks, int64_t bus_blocks, int64_t batch_descriptors, int64_t batch_flags, int64_t apart_percent, int64_t pitched_bytes,
             int64_t part_blocks, int64_t part_threads) {
            check_range("buffer_bytes", buffer_bytes, 1, kMaxRowBytes);
            check_range("buffers", buffers, 2, 64);
            check_range("deep_buffers", deep_buffers, 2, 64);
            check_range("deep_piece_bytes", deep_piece_bytes, 1 << 10, kMaxRowBytes);
            check_range("small_bytes", small_bytes, 1, kMaxRowBytes);
            check_range("growth", growth, 1, 64);
            check_range("staging_blocks", staging_blocks, 1, 1 << 16);
            check_range("bus_blocks", bus_blocks, 1, 1024);
            check_range("batch_descriptors", batch_descriptors, 1, 1 << 20);
            check_range("batch_flags", batch_flags, 0, 1);
            check_range("apart_percent", apart_percent, 0, 100);
            CopyTuning tuning;
            check_range("pitched_bytes", pitched_bytes, 1, kMaxRowBytes);
            tuning.apart_percent = unsigned(apart_percent);
            tuning.pitched_bytes = size_t(pitched_bytes);
            tuning.buffer_bytes = size_t(buffer_bytes);
            tuning.buffers = unsigned(buffers);
            tuning.deep_buffers = unsigned(deep_buffers);
            tuning.deep_piece_bytes = size_t(deep_piece_bytes);
            tuning.small_bytes = size_t(small_bytes);
            tuning.growth = unsigned(growth);
            tuning.staging_blocks = unsigned(staging_blocks);
            tuning.bus_blocks = unsigned(bus_blocks);
            tuning.batch_descriptors = size_t(batch_descriptors);
            tuning.batch_flags = unsigned(batch_flags);
            check_range("part_blocks", part_blocks, 1, 1 << 16);
            check_range("part_threads", part_threads, 1, kPartThreads);
            check_range("part_threads % 32", part_threads % 32, 0, 0);
            new (self) Engine(device, library, api, tuning, {unsigned(part_blocks), unsigned(part_threads)});
          },
          "device"_a = 0, "library"_a = "libcuda.so.1", "api"_a = "cuda", nb::kw_only(),
          "buffer_bytes"_a = CopyTuning().buffer_bytes, "buffers"_a = CopyTuning().buffers,
          "deep_buffers"_a = CopyTuning().deep_buffers, "deep_piece_bytes"_a = CopyTuning().deep_piece_bytes,
          "small_bytes"_a = CopyTuning().small_bytes, "growth"_a = CopyTuning().growth,
          "staging_blocks"_a = CopyTuning().staging_blocks, "bus_blocks"_a = CopyTuning().bus_blocks,
          "batch_descriptors"_a = CopyTuning().batch_descriptors, "batch_flags"_a = CopyTuning().batch_flags,
          "apart_percent"_a = CopyTuning().apart_percent, "pitched_bytes"_a = CopyTuning().pitched_bytes,
          "part_blocks"_a = PartTuning().blocks, "part_threads"_a = PartTuning().threads, R"(
          GpuUnavailable or GpuError. The numbers are those of CopyTuning in csrc/cuda/engine.h and of PartTuning in
          csrc/cuda/parts.h.)")
      .def("pages", &pages_of, "bases"_a, "strides"_a, "fragment_bytes"_a, "pages"_a, "pieces"_a = 1,
           "piece_stride"_a = 0, "in_blocks"_a = false, R"(
           A pool of `pages` pages: fragment tensor * pieces + piece of page p is the fragment_bytes at bases[tensor] +
           p * strides[tensor] + piece * piece_stride. In a row a page's fragments follow each other. in_blocks: as of
           `HostPages`. The addresses are the caller's word. Waits for the device, which writes its table, behind no other
           copy; GIL released.)")
      .def("copy_pages_to_host",
           [](Engine& self, const OwnedPages& pages, const Integers& page_ids, BufferArgument rows, int64_t row_stride,
              const Integers& row_ids, std::optional<int64_t> stream, const CopyStrategyArgument& strategy,
              const CopyOrderArgument& order) {
             return copy_pages(self, pages, page_ids, rows, row_stride, row_ids, CopyDirection::kToHost, stream, strategy, order);
           },
           "pages"_a, "page_ids"_a, "rows"_a, "row_stride"_a, "row_ids"_a, "stream"_a = nb::none(), "strategy"_a = "staged",
           "order"_a = "stream", nb::keep_alive<0, 1>(), R"(
           Page page_ids[i], in blocks that of the i-th `ids_a_page` ids, to the row that begins at row_ids[i] *
           row_stride. order `none`, of a copy without a stream: in no order with what is not done yet, so that it overlaps
           copies before it. IndexError: an id out of bounds, or a block that is not there; ValueError: any other bound, or
           a row named twice; nothing has moved then.)")
      .def("copy_pages_from_host",
           [](Engine& self, const OwnedPages& pages, const Integers& page_ids, BufferArgument rows, int64_t row_stride,
              const Integers& row_ids, std::optional<int64_t> stream, const CopyStrategyArgument& strategy,
              const CopyOrderArgument& order) {
             return copy_pages(self, pages, page_ids, rows, row_stride, row_ids, CopyDirection::kToDevice, stream, strategy, order);
           },
           "pages"_a, "page_ids"_a, "rows"_a, "row_stride"_a, "row_ids"_a, "stream"_a = nb::none(), "strategy"_a = "staged",
           "order"_a = "stream", nb::keep_alive<0, 1>(), R"(
           The reverse of `copy_pages_to_host`, without blocks that are not there (-1); an id named twice is a
           ValueError.)")
      .def("copy_list_to_host",
           [](Engine& self, const Integers& dst, const Integers& src, const Integers& sizes, std::optional<int64_t> stream,
              const ListStrategyArgument& strategy) {
             return copy_list(self, dst, src, sizes, CopyDirection::kToHost, stream, strategy);
           },
           "dst_addresses"_a, "src_addresses"_a, "sizes"_a, "stream"_a = nb::none(), "strategy"_a = "batch",
           nb::keep_alive<0, 1>(), R"(
           sizes[i] bytes from src_addresses[i] to dst_addresses[i]. The addresses are the caller's word. No item may
           overlap another item's destination; nobody checks it. `kernel` reads or writes pinned host memory itself: from
           an item on that is not pinned, what is left goes by `batch`.)")
      .def("copy_list_from_host",
           [](Engine& self, const Integers& dst, const Integers& src, const Integers& sizes, std::optional<int64_t> stream,
              const ListStrategyArgument& strategy) {
             return copy_list(self, dst, src, sizes, CopyDirection::kToDevice, stream, strategy);
           },
           "dst_addresses"_a, "src_addresses"_a, "sizes"_a, "stream"_a = nb::none(), "strategy"_a = "batch",
           nb::keep_alive<0, 1>(), "The reverse of `copy_list_to_host`.")
      .def("can", [](Engine& self, const CopyStrategyArgument& strategy) { return self.get().can(strategy_named(strategy)); },
           "strategy"_a, "Whether the driver takes this strategy.")
      .def_prop_ro("mps", [](Engine& self) { return self.get().device()->mps(); }, R"(
           Whether CUDA's MPS runs this process's kernels beside other processes'; without it they have the GPU by turns.)")
      .def("busy", [](Engine& self) { return self.get().busy(); }, nb::call_guard<nb::gil_scoped_release>(), R"(
           Whether a kernel would have to wait now for others to end. Takes some microseconds, at most about 30.)")
      .def_prop_ro("under_way_to_host", [](Engine& self) { return self.get().backlog(CopyDirection::kToHost).bytes(); },
                   "Bytes of copies of pages that were issued and have not ended; of 256 at most.")
      .def_prop_ro("under_way_from_host", [](Engine& self) { return self.get().backlog(CopyDirection::kToDevice).bytes(); })
      .def_prop_ro("stream", [](Engine& self) { return reinterpret_cast<int64_t>(self.get().stream()); },
                   "The stream of the engine's own.")
      .def("statistics", &statistics, R"(
           By strategy that was used: copies, descriptors, bytes; under `gathered` and `scattered`: parts, launches,
           bytes; under `zeroed`: pages; under `fallbacks`, how often for what reason.)");
  bind_gpu_memory(m, engine);
  bind_gpu_parts(m, engine);
  bind_gpu_waiter(m);
}

}  // namespace kvferry
