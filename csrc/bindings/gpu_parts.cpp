// Checks the bounds of parts that move within a GPU, and of pages that are zeroed, then issues them with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>

#include <algorithm>

#include "bindings/cuda.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

using Held = std::unique_ptr<SumCells::Held>;

const char* way(Engine& engine) { return engine.parts().has_kernels() ? "kernel" : "batch"; }

void check_slot(const char* field, int64_t address, uint64_t nbytes) {
  check_range(field, address, 1, kMaxInt64 - int64_t(nbytes));
}

std::unique_ptr<Copying> copy_part(Engine& engine, const OwnedPages& pages, const Integers& ids, const PartRange& part,
                                   int64_t slot, PartDirection direction, std::optional<int64_t> stream, Held sum,
                                   const PartLabel& label) {
  check_slot("slot_address", slot, part.bytes);
  const GpuStream on = stream ? stream_at(stream) : engine.parts().stream(direction);
  const auto run = [&](SumCells::Held* into) {
    engine.parts().copy(*pages, ids.data(), part, GpuAddress(slot), direction, on, into, label);
    return way(engine);
  };
  return engine.issue(on, nb::find(pages), run, std::move(sum));
}

template <bool kSummed>
Held sum_of(Engine& engine, const PartRange& part) {
  const nb::gil_scoped_release release;
  return kSummed ? std::make_unique<SumCells::Held>(engine.parts().sums(), part.bytes) : nullptr;
}

// What stands before the slot's payload: none, or enough for the sum that is added to its end.
PartLabel checked_label(nb::handle object, int64_t slot, int64_t least) {
  const Buffer header(object, "header", Buffer::Access::kRead);
  PartLabel label;
  if (header.size() == 0) return label;
  check_range("header length", int64_t(header.size()), least, kMaxHeaderBytes);
  check_range("slot_address", slot, int64_t(header.size()) + 1, kMaxInt64);
  label.size = uint32_t(header.size());
  std::copy_n(header.data(), label.size, label.bytes.begin());
  return label;
}

template <bool kSummed>
std::unique_ptr<Copying> gather_part(Engine& engine, const OwnedPages& pages, const Integers& ids, int64_t byte_offset,
                                     int64_t nbytes, int64_t slot, std::optional<int64_t> stream, BufferArgument header,
                                     std::optional<int64_t> last_bytes) {
  check_device(engine, *pages);
  const PartRange part = checked_part(pages->layout(), ids, byte_offset, nbytes, last_bytes);
  const PartLabel label = checked_label(header, slot, kSummed ? sizeof(uint64_t) : 1);
  return copy_part(engine, pages, ids, part, slot, PartDirection::kGather, stream, sum_of<kSummed>(engine, part), label);
}

template <bool kSummed>
std::unique_ptr<Copying> scatter_part(Engine& engine, const OwnedPages& pages, const Integers& ids, int64_t byte_offset,
                                      int64_t nbytes, int64_t slot, std::optional<int64_t> stream) {
  check_device(engine, *pages);
  const PartRange part = checked_part(pages->layout(), ids, byte_offset, nbytes);
  check_distinct("page_ids", ids);
  return copy_part(engine, pages, ids, part, slot, PartDirection::kScatter, stream, sum_of<kSummed>(engine, part), {});
}

std::unique_ptr<Copying> add_up(Engine& engine, int64_t address, int64_t nbytes, std::optional<int64_t> stream) {
  check_range("nbytes", nbytes, 1, kMaxInt64);
  check_slot("address", address, uint64_t(nbytes));
  const GpuStream on = stream ? stream_at(stream) : engine.parts().stream(PartDirection::kScatter);
  auto sum = std::make_unique<SumCells::Held>(engine.parts().sums(), uint64_t(nbytes));
  const auto run = [&](SumCells::Held* into) {
    engine.parts().add_up(GpuAddress(address), uint64_t(nbytes), PartDirection::kScatter, on, *into);
    return way(engine);
  };
  return engine.issue(on, nb::none(), run, std::move(sum));
}

std::unique_ptr<Copying> zero(Engine& engine, const OwnedPages& pages, const int64_t* ids, size_t count, int64_t first_piece,
                              int64_t start, std::optional<int64_t> stream) {
  const GpuStream on = stream ? stream_at(stream) : engine.parts().stream(PartDirection::kScatter);
  return engine.issue(on, nb::find(pages), [&](SumCells::Held*) {
    engine.parts().zero(*pages, ids, count, uint32_t(first_piece), uint32_t(start), on);
    return way(engine);
  });
}

std::unique_ptr<Copying> move_pages(Engine& engine, const OwnedPages& from, const Integers& from_ids, const OwnedPages& to,
                                    const Integers& to_ids, std::optional<int64_t> stream) {
  check_device(engine, *from);
  check_device(engine, *to);
  const PageLayout &source = from->layout(), &target = to->layout();
  check_not_in_blocks("source", source);
  check_not_in_blocks("target", target);
  check_ids("source_ids", from_ids, source.pages);
  check_ids("target_ids", to_ids, target.pages);
  check_distinct("target_ids", to_ids);
  check_range("length of target_ids", int64_t(to_ids.size()), int64_t(from_ids.size()), int64_t(from_ids.size()));
  check_range("tensors of target", int64_t(target.bases.size()), int64_t(source.bases.size()), int64_t(source.bases.size()));
  check_range("pieces of target", target.pieces, source.pieces, source.pieces);
  check_range("fragment_bytes of target", target.fragment_bytes, source.fragment_bytes, source.fragment_bytes);
  const GpuStream on = stream ? stream_at(stream) : engine.parts().stream(PartDirection::kScatter);
  return engine.issue(on, nb::make_tuple(nb::find(from), nb::find(to)), [&](SumCells::Held*) {
    engine.parts().move(*from, from_ids.data(), *to, to_ids.data(), from_ids.size(), on);
    return way(engine);
  });
}

std::unique_ptr<Copying> zero_pages(Engine& engine, const OwnedPages& pages, const Integers& ids,
                                    std::optional<int64_t> stream) {
  check_device(engine, *pages);
  check_not_in_blocks("pages", pages->layout());
  check_ids("page_ids", ids, pages->layout().pages);
  return zero(engine, pages, ids.data(), ids.size(), 0, 0, stream);
}

std::unique_ptr<Copying> zero_page_from(Engine& engine, const OwnedPages& pages, int64_t page_id, int64_t start,
                                        int64_t first_piece, std::optional<int64_t> stream) {
  check_device(engine, *pages);
  check_not_in_blocks("pages", pages->layout());
  check_range("page_id", page_id, 0, pages->layout().pages - 1);
  check_range("start", start, 0, pages->layout().fragment_bytes);
  check_range("first_piece", first_piece, 0, pages->layout().pieces);
  return zero(engine, pages, &page_id, 1, first_piece, start, stream);
}

}  // namespace

void bind_gpu_parts(nb::module_&, nb::class_<Engine>& engine) {
  using namespace nb::literals;
  constexpr auto kGather = PartDirection::kGather, kScatter = PartDirection::kScatter;
  const auto gather = [&](const char* name, auto function, const char* doc) {
    engine.def(name, function, "pages"_a, "page_ids"_a, "byte_offset"_a, "nbytes"_a, "slot_address"_a,
               "stream"_a = nb::none(), "header"_a.sig("b''") = nb::bytes("", 0), "last_bytes"_a = nb::none(),
               nb::keep_alive<0, 1>(), doc);
  };
  const auto scatter = [&](const char* name, auto function, const char* doc) {
    engine.def(name, function, "pages"_a, "page_ids"_a, "byte_offset"_a, "nbytes"_a, "slot_address"_a,
               "stream"_a = nb::none(), nb::keep_alive<0, 1>(), doc);
  };
  gather("gather_part", &gather_part<false>, R"(
         Pool to slot on one device, or devices that reach each other: the rows of page_ids laid end to end; their
         [byte_offset, byte_offset + nbytes), which touches every page named (so byte_offset < row_bytes), goes to
         slot_address, and the header, at most 64 bytes, right before it. A block that is not there is zeros, and so is
         of each tensor of the last page what lies behind its first last_bytes (None: nothing): nobody reads it. stream
         None: `gather_stream`. Fast where all addresses and sizes are multiples of 16.

         IndexError (page id) or ValueError (any other bound) before a byte has moved.)");
  gather("gather_part_summed", &gather_part<true>, R"(
         `gather_part`, and adds up what is in the slot: `GpuCopy.checksum`, which is also added to the last 8 bytes of a
         header, a little-endian number. GpuError: the driver takes no kernels, or 1024 sums are held.)");
  scatter("scatter_part", &scatter_part<false>,
          R"(
          The reverse of `gather_part`, without blocks that are not there, on `scatter_stream`; an id named twice is a
          ValueError as well.)");
  scatter("scatter_part_summed", &scatter_part<true>,
          "`scatter_part`, and adds up what is in the slot: `GpuCopy.checksum`. GpuError as of `gather_part_summed`.");
  engine
      .def("add_up", &add_up, "address"_a, "nbytes"_a, "stream"_a = nb::none(), nb::keep_alive<0, 1>(),
           "The `part_checksum` of device memory, as `GpuCopy.checksum`; on `scatter_stream`.")
      .def("move_pages", &move_pages, "source"_a, "source_ids"_a, "target"_a, "target_ids"_a, "stream"_a = nb::none(),
           nb::keep_alive<0, 1>(), R"(
           The pages source_ids of one pool into the pages target_ids of another of the same shape, neither in blocks, on
           one device; their bytes do not overlap. On `scatter_stream`. ValueError or IndexError before a byte has moved.)")
      .def("zero_pages", &zero_pages, "pages"_a, "page_ids"_a, "stream"_a = nb::none(), nb::keep_alive<0, 1>(),
           "All bytes of these pages become zero; on `scatter_stream`. ValueError: pages in blocks.")
      .def("zero_page_from", &zero_page_from, "pages"_a, "page_id"_a, "start"_a, "first_piece"_a = 0,
           "stream"_a = nb::none(), nb::keep_alive<0, 1>(), R"(
           In the fragments of pieces [first_piece, pieces) of a page: bytes [start, fragment_bytes) become zero; on
           `scatter_stream`. ValueError: pages in blocks.)")
      .def("prepare_sums", [](Engine& self) { self.parts().sums(); }, nb::call_guard<nb::gil_scoped_release>(), R"(
           Makes the places of sums, so that no `_summed` part does: it may wait for the device; GIL released. GpuError:
           the driver takes no kernels, or memory cannot be had or pinned. Idempotent.)")
      .def_prop_ro("has_kernels", [](Engine& self) { return self.parts().has_kernels(); },
                   "Otherwise parts move by the driver's copies, which is slow, and nothing is added up.")
      .def_prop_ro("gather_stream", [](Engine& self) { return reinterpret_cast<int64_t>(self.parts().stream(kGather)); })
      .def_prop_ro("scatter_stream", [](Engine& self) { return reinterpret_cast<int64_t>(self.parts().stream(kScatter)); });
}

}  // namespace kvferry
