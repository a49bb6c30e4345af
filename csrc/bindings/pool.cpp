#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

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

IntList count_list(const PagePool& pool) { return list_of(PageIds(pool.counts().begin(), pool.counts().end())); }

}  // namespace

void bind_pool(nb::module_& m) {
  using namespace nb::literals;
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
      .def("resize", &PagePool::resize, "pages"_a,
           "Another number of pages, all FREE, with generations that none had before. All must be FREE now.")
      .def("states", &states, "pages"_a, "The state of each page, one byte each.")
      .def("state_code",
           [](const PagePool& pool, int64_t page) { return int(pool.state(checked_page_id(page, pool))); }, "page"_a)
      .def("generation",
           [](const PagePool& pool, int64_t page) { return pool.generation(checked_page_id(page, pool)); }, "page"_a)
      .def("count_list", &count_list, "Pages by state, in the states' order.")
      .def("check", &PagePool::check, "Recounts everything; for tests.");
}

}  // namespace kvferry
