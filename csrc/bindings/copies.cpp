// Checks every bound of a copy before its first byte moves, then copies with the GIL released.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/types.h"
#include "copies/copy_pages.h"
#include "copies/host_pages.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

using Access = Buffer::Access;
using AnyIds = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr int64_t kMaxThreads = 64;
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

template <class T>
std::vector<int64_t> widen(const AnyIds& ids) {
  const T* data = static_cast<const T*>(ids.data());
  return std::vector<int64_t>(data, data + ids.size());
}

// A 32 or 64 bit integer array is read in place of its items' objects; any other sequence of integers item by item.
std::vector<int64_t> read_ids(nb::handle object) {
  AnyIds array;
  if (nb::try_cast<AnyIds>(object, array)) {
    if (array.dtype() == nb::dtype<int64_t>()) return widen<int64_t>(array);
    if (array.dtype() == nb::dtype<uint64_t>()) return widen<uint64_t>(array);  // what is too large turns negative: refused
    if (array.dtype() == nb::dtype<int32_t>()) return widen<int32_t>(array);
    if (array.dtype() == nb::dtype<uint32_t>()) return widen<uint32_t>(array);
    throw nb::type_error("page_ids: an array must hold 32 or 64 bit integers");
  }
  const nb::object owned = nb::steal(PySequence_Fast(object.ptr(), "page_ids: must be a sequence of integers"));
  if (!owned.is_valid()) throw nb::python_error();
  const Items items(owned.ptr());
  const Py_ssize_t count = items.size();
  std::vector<int64_t> ids;
  ids.reserve(size_t(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* item = items[i];
    const long long id = item == nullptr ? -1 : PyLong_AsLongLong(item);
    if (id == -1 && PyErr_Occurred()) throw nb::python_error();
    ids.push_back(id);
  }
  return ids;
}

void check_ids(const std::vector<int64_t>& ids, size_t pool_pages) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && uint64_t(ids[i]) < pool_pages) continue;
    throw nb::index_error(("page_ids[" + std::to_string(i) + "]: " + std::to_string(ids[i]) + ", must be in [0, " +
                           std::to_string(pool_pages) + ")")
                              .c_str());
  }
}

// [offset, offset + nbytes) must lie in `size` bytes.
void check_span(const char* field, int64_t offset, int64_t nbytes, size_t size) {
  check_range(field, offset, 0, kMaxInt64);
  check_range("nbytes", nbytes, 0, kMaxInt64);
  if (uint64_t(offset) <= size && uint64_t(nbytes) <= size - uint64_t(offset)) return;
  refuse(std::string(field) + ": " + std::to_string(offset) + " with nbytes " + std::to_string(nbytes) +
         " ends behind the " + std::to_string(size) + " bytes there are");
}

// The pages of `ids` that [byte_offset, byte_offset + nbytes) of their concatenation touches, checked against the pool.
struct PageRange {
  PageRange(nb::handle page_ids, const Buffer& pool, int64_t page_bytes, int64_t byte_offset, int64_t nbytes)
      : ids(read_ids(page_ids)) {
    check_range("page_bytes", page_bytes, 1, kMaxInt64);
    check_ids(ids, pool.size() / size_t(page_bytes));
    if (ids.size() > uint64_t(kMaxInt64) / uint64_t(page_bytes)) refuse("page_ids: more bytes than an address space holds");
    check_span("byte_offset", byte_offset, nbytes, ids.size() * size_t(page_bytes));
    if (nbytes == 0) return;
    first = size_t(byte_offset / page_bytes);
    last = size_t((byte_offset + nbytes - 1) / page_bytes);
  }

  bool touches(const uint8_t* pool, size_t page_bytes, const uint8_t* begin, size_t nbytes) const {
    for (size_t i = first; i <= last; ++i) {
      const uint8_t* page = pool + size_t(ids[i]) * page_bytes;
      if (page < begin + nbytes && begin < page + page_bytes) return true;
    }
    return false;
  }

  void check_distinct() const {
    std::vector<int64_t> sorted(ids.begin() + std::ptrdiff_t(first), ids.begin() + std::ptrdiff_t(last) + 1);
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) refuse("page_ids: " + std::to_string(*twice) + " is named twice in one scatter");
  }

  std::vector<int64_t> ids;
  size_t first = 0, last = 0;  // inclusive
};

// The pages of a pool as a layout of one tensor.
PageLayout plain_layout(const Buffer& pool, int64_t page_bytes) {
  check_range("page_bytes", page_bytes, 1, int64_t(1) << 30);
  PageLayout layout;
  layout.bases.push_back(reinterpret_cast<uint64_t>(pool.data()));
  layout.strides.push_back(page_bytes);
  layout.fragment_bytes = uint32_t(page_bytes);
  layout.pages = int64_t(pool.size()) / page_bytes;
  return layout;
}

template <class Done, class Gather>
Done gather(nb::handle dst, int64_t dst_offset, nb::handle src, nb::handle page_ids, int64_t page_bytes,
            int64_t byte_offset, int64_t nbytes, int64_t threads, const Gather& run) {
  check_range("threads", threads, 1, kMaxThreads);
  const Buffer target(dst, "dst", Access::kWrite), pool(src, "src", Access::kRead);
  check_span("dst_offset", dst_offset, nbytes, target.size());
  const PageRange range(page_ids, pool, page_bytes, byte_offset, nbytes);
  uint8_t* out = target.data() + dst_offset;
  if (nbytes > 0 && range.touches(pool.data(), size_t(page_bytes), out, size_t(nbytes))) {
    refuse("dst: overlaps a page that is gathered");
  }
  return run(pool, range, out);
}

template <class Done, class Scatter>
Done scatter(nb::handle dst, nb::handle page_ids, int64_t page_bytes, int64_t byte_offset, nb::handle src,
             int64_t src_offset, int64_t nbytes, int64_t threads, const Scatter& run) {
  check_range("threads", threads, 1, kMaxThreads);
  const Buffer pool(dst, "dst", Access::kWrite), source(src, "src", Access::kRead);
  check_span("src_offset", src_offset, nbytes, source.size());
  const PageRange range(page_ids, pool, page_bytes, byte_offset, nbytes);
  const uint8_t* in = source.data() + src_offset;
  if (nbytes > 0) {
    range.check_distinct();
    if (range.touches(pool.data(), size_t(page_bytes), in, size_t(nbytes))) refuse("src: overlaps a page that is scattered to");
  }
  return run(pool, range, in);
}

void gather_plain(BufferArgument dst, int64_t dst_offset, BufferArgument src, IdsArgument page_ids, int64_t page_bytes,
                  int64_t byte_offset, int64_t nbytes, int64_t threads) {
  gather<void>(dst, dst_offset, src, page_ids, page_bytes, byte_offset, nbytes, threads,
               [&](const Buffer& pool, const PageRange& range, uint8_t* out) {
                 nb::gil_scoped_release release;
                 gather_pages(out, pool.data(), range.ids.data(), size_t(page_bytes), size_t(byte_offset), size_t(nbytes),
                              unsigned(threads));
               });
}

uint64_t gather_summed(BufferArgument dst, int64_t dst_offset, BufferArgument src, IdsArgument page_ids, int64_t page_bytes,
                       int64_t byte_offset, int64_t nbytes, int64_t threads) {
  return gather<uint64_t>(dst, dst_offset, src, page_ids, page_bytes, byte_offset, nbytes, threads,
                          [&](const Buffer& pool, const PageRange& range, uint8_t* out) {
                            const PageLayout layout = plain_layout(pool, page_bytes);
                            const PartRange part{uint64_t(byte_offset), uint64_t(nbytes), layout.tensor_bytes()};
                            nb::gil_scoped_release release;
                            return gather_part_summed(out, layout, range.ids.data(), part, unsigned(threads));
                          });
}

void scatter_plain(BufferArgument dst, IdsArgument page_ids, int64_t page_bytes, int64_t byte_offset, BufferArgument src,
                   int64_t src_offset, int64_t nbytes, int64_t threads) {
  scatter<void>(dst, page_ids, page_bytes, byte_offset, src, src_offset, nbytes, threads,
                [&](const Buffer& pool, const PageRange& range, const uint8_t* in) {
                  nb::gil_scoped_release release;
                  scatter_pages(pool.data(), range.ids.data(), size_t(page_bytes), size_t(byte_offset), in, size_t(nbytes),
                                unsigned(threads));
                });
}

uint64_t scatter_summed(BufferArgument dst, IdsArgument page_ids, int64_t page_bytes, int64_t byte_offset, BufferArgument src,
                        int64_t src_offset, int64_t nbytes, int64_t threads) {
  return scatter<uint64_t>(dst, page_ids, page_bytes, byte_offset, src, src_offset, nbytes, threads,
                           [&](const Buffer& pool, const PageRange& range, const uint8_t* in) {
                             const PageLayout layout = plain_layout(pool, page_bytes);
                             const PartRange part{uint64_t(byte_offset), uint64_t(nbytes), layout.tensor_bytes()};
                             nb::gil_scoped_release release;
                             return scatter_part_summed(layout, range.ids.data(), part, in, unsigned(threads));
                           });
}

void check_address(const char* field, size_t i, int64_t address, int64_t size) {
  if (size == 0 || (address > 0 && address <= kMaxInt64 - size)) return;
  refuse(std::string(field) + "[" + std::to_string(i) + "]: " + std::to_string(address) + " with " + std::to_string(size) +
         " bytes is no memory of a process");
}

void copy_items(const Integers& dst, const Integers& src, const Integers& sizes, int64_t threads) {
  check_range("threads", threads, 1, kMaxThreads);
  const size_t n = sizes.size();
  if (dst.size() != n || src.size() != n) {
    refuse("sizes: " + std::to_string(n) + " items, but dst_addresses has " + std::to_string(dst.size()) +
           " and src_addresses has " + std::to_string(src.size()));
  }
  int64_t total = 0;
  for (size_t i = 0; i < n; ++i) {
    const int64_t to = dst.data()[i], from = src.data()[i], bytes = sizes.data()[i];
    check_range(("sizes[" + std::to_string(i) + "]").c_str(), bytes, 0, kMaxInt64 - total);
    check_address("dst_addresses", i, to, bytes);
    check_address("src_addresses", i, from, bytes);
    if (bytes > 0 && to < from + bytes && from < to + bytes) {
      refuse("dst_addresses[" + std::to_string(i) + "]: overlaps its own source");
    }
    total += bytes;
  }
  nb::gil_scoped_release release;
  copy_list(dst.data(), src.data(), sizes.data(), n, unsigned(threads));
}

void zero(BufferArgument dst, int64_t offset, int64_t fragments, int64_t stride, int64_t fragment_bytes, int64_t start) {
  const Buffer target(dst, "dst", Access::kWrite);
  const int64_t size = int64_t(target.size());
  check_range("offset", offset, 0, size);
  check_range("fragments", fragments, 0, kMaxInt64);
  if (fragments == 0) return;
  check_range("fragment_bytes", fragment_bytes, 0, size);
  check_range("start", start, 0, fragment_bytes);
  check_range("stride", stride, fragments > 1 ? std::max<int64_t>(fragment_bytes, 1) : 0, kMaxInt64);
  const int64_t room = size - offset - fragment_bytes;  // for all but the last fragment
  if (room < 0 || (fragments > 1 && fragments - 1 > room / stride)) {
    refuse("fragments: " + std::to_string(fragments) + " of stride " + std::to_string(stride) + " from offset " +
           std::to_string(offset) + " end behind the " + std::to_string(size) + " bytes there are");
  }
  nb::gil_scoped_release release;
  zero_ranges(target.data() + offset, size_t(fragments), size_t(stride), size_t(fragment_bytes), size_t(start));
}

}  // namespace

void bind_copies(nb::module_& m) {
  using namespace nb::literals;
  m.def("gather_pages", &gather_plain, "dst"_a, "dst_offset"_a, "src"_a, "page_ids"_a, "page_bytes"_a, "byte_offset"_a,
        "nbytes"_a, "threads"_a = 1, R"(
        Pool to slot: the pages of `src` named by page_ids, one behind the other, are a virtual byte string; its
        [byte_offset, byte_offset + nbytes) goes to dst[dst_offset:]. GIL released.

        IndexError (page id) or ValueError (any other bound, or dst overlaps a page) before a byte has moved.)");
  m.def("scatter_pages", &scatter_plain, "dst"_a, "page_ids"_a, "page_bytes"_a, "byte_offset"_a, "src"_a, "src_offset"_a,
        "nbytes"_a, "threads"_a = 1,
        "Slot to pool, the reverse of `gather_pages`; a page named twice is a ValueError as well.");
  m.def("gather_pages_summed", &gather_summed, "dst"_a, "dst_offset"_a, "src"_a, "page_ids"_a, "page_bytes"_a,
        "byte_offset"_a, "nbytes"_a, "threads"_a = 1, R"(
        `gather_pages`, and the `part_checksum` of what it gathered, made on the way: nearly as fast where page_bytes and
        byte_offset are multiples of 8.)");
  m.def("scatter_pages_summed", &scatter_summed, "dst"_a, "page_ids"_a, "page_bytes"_a, "byte_offset"_a, "src"_a,
        "src_offset"_a, "nbytes"_a, "threads"_a = 1,
        "`scatter_pages`, and the `part_checksum` of what it scattered. The bytes are in the pages when it is known.");
  m.def("copy_list", &copy_items, "dst_addresses"_a, "src_addresses"_a, "sizes"_a, "threads"_a = 1, R"(
        Copies sizes[i] bytes from src_addresses[i] to dst_addresses[i]; GIL released. Addresses are the caller's word.

        No item may overlap another item's destination. ValueError: lengths differ, negative size, an item over itself.)");
  m.def("zero_ranges", &zero, "dst"_a, "offset"_a, "fragments"_a, "stride"_a, "fragment_bytes"_a, "start"_a, R"(
        Zeroes bytes [start, fragment_bytes) of each fragment; fragment f begins at offset + f * stride. GIL released.)");
}

}  // namespace kvferry
