// Pages in a buffer of host memory: every bound is checked before a byte moves, and copies run with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/unique_ptr.h>

#include <memory>
#include <string>

#include "bindings/layout.h"
#include "copies/host_pages.h"
#include "copies/part_sum.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

constexpr int64_t kMaxThreads = 64;

class HostPages {
 public:
  HostPages(BufferArgument buffer, const Integers& offsets, const Integers& strides, int64_t pieces, int64_t piece_stride,
            int64_t fragment_bytes, int64_t pages, bool in_blocks)
      : buffer_(std::make_unique<Buffer>(buffer, "buffer", Buffer::Access::kWrite)),
        layout_(checked_layout("offsets", offsets, 0, strides, fragment_bytes, pages, pieces, piece_stride, in_blocks)) {
    for (size_t t = 0; t < layout_.bases.size(); ++t) {
      const uint64_t end = layout_.bases[t] + uint64_t((pages - 1) * layout_.strides[t] + layout_.extent());
      if (end > buffer_->size()) {
        refuse("offsets[" + std::to_string(t) + "]: " + std::to_string(layout_.bases[t]) + " with " + std::to_string(pages) +
               " pages of stride " + std::to_string(layout_.strides[t]) + " ends at " + std::to_string(end) +
               ", behind the " + std::to_string(buffer_->size()) + " bytes there are");
      }
      layout_.bases[t] += reinterpret_cast<uint64_t>(buffer_->data());
    }
  }

  const PageLayout& layout() const { return layout_; }

  // While a call runs without the GIL the buffer stays.
  const PageLayout& open() const {
    if (buffer_ == nullptr) refuse("pages: they are closed");
    return layout_;
  }

  void close() {
    if (users_ > 0) refuse("pages: in use by " + std::to_string(users_) + " calls");
    buffer_.reset();
  }

  class Use {  // with the GIL
   public:
    explicit Use(HostPages& pages) : pages_(pages) { ++pages_.users_; }
    ~Use() { --pages_.users_; }

   private:
    HostPages& pages_;
  };

 private:
  std::unique_ptr<Buffer> buffer_;
  PageLayout layout_;
  int users_ = 0;
};

// A part and the bytes of a slot that it goes to or comes from.
struct Checked {
  Checked(HostPages& pages, const Integers& ids, int64_t byte_offset, int64_t nbytes, const Buffer& slot, int64_t offset,
          int64_t threads, std::optional<int64_t> last_bytes = std::nullopt)
      : part(checked_part(pages.open(), ids, byte_offset, nbytes, last_bytes)) {
    check_range("threads", threads, 1, kMaxThreads);
    const int64_t size = int64_t(slot.size());
    check_range("nbytes", nbytes, 1, size);
    check_range("slot_offset", offset, 0, size - nbytes);
    bytes = slot.data() + offset;
    const uint64_t begin = reinterpret_cast<uint64_t>(bytes), end = begin + part.bytes;
    const PageLayout& layout = pages.layout();
    for (size_t t = 0; t < layout.bases.size(); ++t) {
      const uint64_t last = layout.bases[t] + uint64_t((layout.pages - 1) * layout.strides[t] + layout.extent());
      if (begin < last && layout.bases[t] < end) refuse("slot: overlaps the pages of tensor " + std::to_string(t));
    }
  }

  PartRange part;
  uint8_t* bytes;
};

template <class Sum, class Copy>
Sum gather(HostPages& pages, const Integers& ids, int64_t byte_offset, int64_t nbytes, nb::handle slot, int64_t slot_offset,
           int64_t threads, std::optional<int64_t> last_bytes, const Copy& copy) {
  const Buffer target(slot, "slot", Buffer::Access::kWrite);
  const Checked to(pages, ids, byte_offset, nbytes, target, slot_offset, threads, last_bytes);
  const HostPages::Use use(pages);
  nb::gil_scoped_release release;
  return copy(to.bytes, pages.layout(), ids.data(), to.part, unsigned(threads));
}

template <class Sum, class Copy>
Sum scatter(HostPages& pages, const Integers& ids, int64_t byte_offset, int64_t nbytes, nb::handle slot, int64_t slot_offset,
            int64_t threads, const Copy& copy) {
  const Buffer source(slot, "slot", Buffer::Access::kRead);
  const Checked from(pages, ids, byte_offset, nbytes, source, slot_offset, threads);
  check_distinct("page_ids", ids);
  const HostPages::Use use(pages);
  nb::gil_scoped_release release;
  return copy(pages.layout(), ids.data(), from.part, from.bytes, unsigned(threads));
}

void zero_from(HostPages& pages, int64_t page_id, int64_t start, int64_t first_piece) {
  const PageLayout& layout = pages.open();
  check_not_in_blocks("pages", layout);
  check_range("page_id", page_id, 0, layout.pages - 1);
  check_range("start", start, 0, layout.fragment_bytes);
  check_range("first_piece", first_piece, 0, layout.pieces);
  const HostPages::Use use(pages);
  nb::gil_scoped_release release;
  zero_page(layout, page_id, uint32_t(first_piece), uint32_t(start));
}

uint64_t checksum(BufferArgument object) {
  const Buffer buffer(object, "buffer", Buffer::Access::kRead);
  nb::gil_scoped_release release;
  return part_sum(sum_words(buffer.data(), buffer.size(), 0), buffer.size());
}

}  // namespace

void bind_host_pages(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<HostPages> pages(m, "HostPages", R"(
      Pages in a buffer of host memory: fragment tensor * pieces + piece of page p is the fragment_bytes at
      offsets[tensor] + p * strides[tensor] + piece * piece_stride; a page's row is its fragments one behind the other.

      So page-major pools are one tensor of one piece, layer-major ones a tensor for each layer's K and V, and a range of
      heads of NHD pages is pieces = tokens, piece_stride = a token's bytes, fragment_bytes = those of the heads.

      in_blocks: a page is of `pieces` blocks of an engine, each wherever it is, and named by their ids, `pieces` a page
      and -1 for one that is not there. Block b is the fragment_bytes at offsets[tensor] + b * strides[tensor];
      piece_stride is 0, `pages` counts blocks, and a page's row is what it is otherwise: tensor for tensor its blocks.

      The buffer is writable, and stays exported until `close`. ValueError, names the field: the buffer is too small, or
      any other bound.)");
  pages
      .def(nb::init<BufferArgument, const Integers&, const Integers&, int64_t, int64_t, int64_t, int64_t, bool>(), "buffer"_a,
           "offsets"_a, "strides"_a, "pieces"_a, "piece_stride"_a, "fragment_bytes"_a, "pages"_a, "in_blocks"_a = false)
      .def_prop_ro("fragments", [](const HostPages& self) { return self.layout().fragments(); }, "Fragments of a page.")
      .def_prop_ro("fragment_bytes", [](const HostPages& self) { return self.layout().fragment_bytes; })
      .def_prop_ro("row_bytes", [](const HostPages& self) { return self.layout().row_bytes(); }, "Bytes of a page.")
      .def_prop_ro("pages", [](const HostPages& self) { return self.layout().pages; },
                   "Ids are 0 to pages - 1; of blocks, in blocks.")
      .def_prop_ro("ids_a_page", [](const HostPages& self) { return self.layout().ids_a_page(); },
                   "Ids that name a page: 1, or in blocks the number of them.");
  using Part = int64_t;
  using LastBytes = std::optional<int64_t>;
  const auto gathers = [&](const char* name, auto function, const char* doc) {
    pages.def(name, function, "page_ids"_a, "byte_offset"_a, "nbytes"_a, "slot"_a, "slot_offset"_a = 0, "threads"_a = 1,
              "last_bytes"_a = nb::none(), doc);
  };
  gathers("gather_part",
          [](HostPages& self, const Integers& ids, Part at, Part nbytes, BufferArgument slot, Part offset, Part threads,
             LastBytes last) { gather<void>(self, ids, at, nbytes, slot, offset, threads, last, gather_part); },
          R"(
          The rows of page_ids laid end to end; their [byte_offset, byte_offset + nbytes), which touches every page
          named (so byte_offset < row_bytes), goes to slot[slot_offset:]. A block that is not there is zeros, and so is
          of each tensor of the last page what lies behind its first last_bytes (None: nothing): nobody reads it. GIL
          released.

          IndexError (page id) or ValueError (any other bound, or the slot lies in the pages) before a byte has
          moved.)");
  gathers("gather_part_summed",
          [](HostPages& self, const Integers& ids, Part at, Part nbytes, BufferArgument slot, Part offset, Part threads,
             LastBytes last) {
            return gather<uint64_t>(self, ids, at, nbytes, slot, offset, threads, last, gather_part_summed);
          },
          "`gather_part`, and the `part_checksum` of what is in the slot.");
  const auto scatters = [&](const char* name, auto function, const char* doc) {
    pages.def(name, function, "page_ids"_a, "byte_offset"_a, "nbytes"_a, "slot"_a, "slot_offset"_a = 0, "threads"_a = 1, doc);
  };
  scatters("scatter_part",
       [](HostPages& self, const Integers& ids, Part at, Part nbytes, BufferArgument slot, Part offset, Part threads) {
         scatter<void>(self, ids, at, nbytes, slot, offset, threads, scatter_part);
       },
       "The reverse of `gather_part`, without blocks that are not there; an id named twice is a ValueError as well.");
  scatters("scatter_part_summed",
       [](HostPages& self, const Integers& ids, Part at, Part nbytes, BufferArgument slot, Part offset, Part threads) {
         return scatter<uint64_t>(self, ids, at, nbytes, slot, offset, threads, scatter_part_summed);
       },
       "`scatter_part`, and the `part_checksum` of what is in the slot.");
  pages
      .def("zero_page_from", &zero_from, "page_id"_a, "start"_a, "first_piece"_a = 0, R"(
           In the fragments of pieces [first_piece, pieces) of a page: bytes [start, fragment_bytes) become zero.
           ValueError: pages in blocks.)")
      .def("close", &HostPages::close,
           "Lets go of the buffer; later calls are ValueErrors. ValueError: a call is running in another thread.");
  m.def("part_checksum", &checksum, "buffer"_a, R"(
        A 64-bit sum over the bytes, the same that the `_summed` copies make of a part here and on a GPU. GIL released.

        Finds every change within one aligned group of 4 bytes; anything else is missed with a chance near 2**-64 as
        long as nobody looks for bytes with the same sum (csrc/copies/part_sum.h has the details): accidents, not
        attacks.)");
}

}  // namespace kvferry
