#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "bindings/ids.h"
#include "bindings/types.h"
#include "checks.h"
#include "radix/page_pool.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

PageState state_of(int64_t code, const char* field) {
  check_range(field, code, 0, int64_t(kPageStates) - 1);
  return PageState(code);
}

nb::bytes states(const PagePool& pool, PagesArgument pages) {
  std::string codes;
  for (const uint32_t page : read_page_ids(pages, pool)) codes.push_back(char(pool.state(page)));
  return nb::bytes(codes.data(), codes.size());
}

// An index in a buffer, which stays until `close`.
class HeldIndexObject {
 public:
  HeldIndexObject(BufferArgument memory, Buffer::Access access)
      : buffer_(std::make_unique<Buffer>(memory, "memory", access)) {
    if (reinterpret_cast<uintptr_t>(buffer_->data()) % 64 != 0) refuse("memory: it does not begin at a multiple of 64");
    index_ = access == Buffer::Access::kWrite ? HeldIndex::make(buffer_->data(), buffer_->size())
                                              : HeldIndex::read(buffer_->data(), buffer_->size());
  }

  HeldIndex& open() {
    if (buffer_ == nullptr) refuse("index: it is closed");
    return *index_;
  }
  void close() {
    if (index_->publishers > 0) throw BrokenInvariant("index: " + std::to_string(index_->publishers) + " pools publish to it");
    buffer_.reset();
  }

 private:
  std::unique_ptr<Buffer> buffer_;
  std::optional<HeldIndex> index_;
};

struct HeldIndexWriter : HeldIndexObject {
  explicit HeldIndexWriter(BufferArgument memory) : HeldIndexObject(memory, Buffer::Access::kWrite) {}
};

struct HeldIndexReader : HeldIndexObject {
  explicit HeldIndexReader(BufferArgument memory) : HeldIndexObject(memory, Buffer::Access::kRead) {}
};

const uint8_t* namespace_bytes(const nb::bytes& namespace_id) {
  if (namespace_id.size() != kNamespaceBytes) {
    refuse("namespace_id has " + std::to_string(namespace_id.size()) + " bytes; it must have " + std::to_string(kNamespaceBytes));
  }
  return reinterpret_cast<const uint8_t*>(namespace_id.c_str());
}

size_t held_pages(HeldIndexReader& self, DigestsArgument digests, const nb::bytes& namespace_id) {
  const DigestBuffer buffer(digests, "digests");
  return self.open().held(buffer.data(), buffer.count(), namespace_bytes(namespace_id));
}

void name_pages(PagePool& pool, PagesArgument pages, DigestsArgument digests, const nb::bytes& namespace_id) {
  const PageIds ids = read_page_ids(pages, pool);
  const DigestBuffer buffer(digests, "digests");
  if (buffer.count() != ids.size()) {
    refuse("pages has " + std::to_string(ids.size()) + " entries; digests has " + std::to_string(buffer.count()));
  }
  pool.name(ids, buffer.data(), namespace_bytes(namespace_id));
}

void bind_held_index(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<HeldIndexWriter>(m, "HeldIndex", R"(
      The digests whose pages are readable, in memory that other processes map: see csrc/radix/held_index.h. This end
      writes; the memory is empty from now on.)")
      .def(nb::init<BufferArgument>(), "memory"_a, "ValueError: of less than `bytes_for(1)`, or not aligned to 64.")
      .def_static("bytes_for", &HeldIndex::bytes_for, "pages"_a, "Bytes of an index for so many pages of all tiers.")
      .def("beat", [](HeldIndexWriter& self, int64_t now) { self.open().beat(now); }, "now"_a,
           "Says that the writer lives, in nanoseconds of CLOCK_MONOTONIC; 0: it has ended.")
      .def("close", &HeldIndexWriter::close, "Lets the memory go. No pool may publish to it any more. Idempotent.");
  nb::class_<HeldIndexReader>(m, "HeldIndexReader", "Another process's HeldIndex.")
      .def(nb::init<BufferArgument>(), "memory"_a, "ValueError: it is no index.")
      .def_prop_ro("last_beat", [](HeldIndexReader& self) { return self.open().last_beat(); },
                   "When the writer last said that it lives, in nanoseconds of CLOCK_MONOTONIC; 0: it has ended.")
      .def("held_pages", &held_pages, "digests"_a, "namespace_id"_a, R"(
           The number of first pages of a prompt that were readable just now, of any tier. They may be gone by the time
           they are asked for.)")
      .def("close", &HeldIndexReader::close, "Lets the memory go. Idempotent.");
}

IntList count_list(const PagePool& pool) { return list_of(PageIds(pool.counts().begin(), pool.counts().end())); }

}  // namespace

void bind_pool(nb::module_& m) {
  using namespace nb::literals;
  bind_held_index(m);
  nb::exception<PoolExhausted>(m, "PoolExhausted").doc() = "Fewer pages are free than were asked for; nothing was taken.";
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const BrokenInvariant& broken) {
      PyErr_SetString(PyExc_AssertionError, broken.what());
    }
  });
  nb::class_<PagePool>(m, "PagePool", R"(
      See `kvferry.radix.pool.PagePool`, which adds the states' names. Page states are the numbers of PageState.)")
      .def(nb::init<int64_t, std::string>(), "pages"_a, "tier"_a = "device")
      .def_prop_ro("pages", &PagePool::pages)
      .def_prop_ro("tier", [](const PagePool& pool) { return pool.tier(); })
      .def_prop_ro("free", &PagePool::free, "Pages in state FREE.")
      .def_prop_rw("log_frees", &PagePool::log_frees, &PagePool::set_log_frees, R"(
                   Whether freed ids are collected for `take_freed`. Off at first; turning it off drops what was
                   collected.)")
      .def("take_freed", [](PagePool& pool) { return list_of(pool.take_freed()); },
           "Ids freed since the last call, in that order; one that was freed twice is there twice.")
      .def_prop_rw("log_readable", &PagePool::log_readable, &PagePool::set_log_readable, R"(
                   Whether changes are collected for `take_readable`. Off at first; turning it off drops what was
                   collected.)")
      .def("take_readable",
           [](PagePool& pool) {
             IntList changes;
             for (const int64_t change : pool.take_readable()) changes.append(change);
             return changes;
           },
           R"(
           Since the last call, in that order: a page that became readable, ~page for one that ceased to be. Readable on
           the device are CACHED and SPILLING pages, on the host CACHED and RESTORING ones.)")
      .def("allocate",
           [](PagePool& pool, int64_t n, int64_t state) { return list_of(pool.allocate(n, state_of(state, "state"))); },
           "n"_a, "state"_a = int(PageState::kLeased), R"(
           `n` page ids, ascending: the smallest run that holds them all, else as few runs as can be. They become
           LEASED, ARRIVING, SPILLING or RESTORING.

           PoolExhausted if fewer are free.)")
      .def("claim",
           [](PagePool& pool, PagesArgument pages, int64_t state) {
             pool.claim(read_page_ids(pages, pool), state_of(state, "state"));
           },
           "pages"_a, "state"_a, "These FREE pages become LEASED or CACHED.")
      .def("free_pages", [](PagePool& pool, PagesArgument pages) { pool.free_pages(read_page_ids(pages, pool)); }, "pages"_a,
           "Any state but FREE -> FREE, with a new generation.")
      .def("move",
           [](PagePool& pool, PagesArgument pages, int64_t source, int64_t target) {
             pool.move(read_page_ids(pages, pool), state_of(source, "source"), state_of(target, "target"));
           },
           "pages"_a, "source"_a, "target"_a,
           "Each page must be in `source`, and the change one that the life of a page has; use free_pages for FREE.")
      .def("expect", &PagePool::expect, "pages"_a, "Has room for so many, so that to grow up to them moves nothing.")
      .def("grow", &PagePool::grow, "pages"_a, "So many pages instead of fewer: those that come behind are FREE.")
      .def("resize", &PagePool::resize, "pages"_a,
           "Another number of pages, all FREE, with generations that none had before. All must be FREE now.")
      .def("states", &states, "pages"_a, "The state of each page, one byte each.")
      .def("state_code",
           [](const PagePool& pool, int64_t page) { return int(pool.state(checked_page_id(page, pool))); }, "page"_a)
      .def("generation",
           [](const PagePool& pool, int64_t page) { return pool.generation(checked_page_id(page, pool)); }, "page"_a)
      .def("count_list", &count_list, "Pages by state, in the states' order.")
      .def("name_pages", &name_pages, "pages"_a, "digests"_a, "namespace_id"_a, R"(
           Says whose pages these are, before they are readable: 32 bytes for each, and for their namespace.)")
      .def("publish",
           [](PagePool& pool, HeldIndexWriter* index) { pool.publish(index != nullptr ? &index->open() : nullptr); },
           "index"_a.none(), nb::keep_alive<1, 2>(), R"(
           Has every readable page that has a name in `index`, from now on; None: in none. The index it was in before
           is left as it is.)")
      .def("check", &PagePool::check, "Recounts everything; for tests.");
}

}  // namespace kvferry
