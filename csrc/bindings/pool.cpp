#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "bindings/ids.h"
#include "bindings/bindings.h"
#include "checks.h"
#include "radix/page_pool.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

PageState state_of(int64_t code, const char* field) {
  check_range(field, code, 0, int64_t(kPageStates) - 1);
  return PageState(code);
}

nb::bytes states(const PagePool& pool, nb::handle pages) {
  std::string codes;
  for (const uint32_t page : read_page_ids(pages, pool)) codes.push_back(char(pool.state(page)));
  return nb::bytes(codes.data(), codes.size());
}

nb::list count_list(const PagePool& pool) { return list_of(PageIds(pool.counts().begin(), pool.counts().end())); }

}  // namespace

void bind_pool(nb::module_& m) {
  using namespace nb::literals;
  nb::exception<PoolExhausted>(m, "PoolExhausted");
  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const BrokenInvariant& broken) {
      PyErr_SetString(PyExc_AssertionError, broken.what());
    }
  });
  nb::class_<PagePool>(m, "PagePool")
      .def(nb::init<int64_t, std::string>(), "pages"_a, "tier"_a = "device")
      .def_prop_ro("pages", &PagePool::pages)
      .def_prop_ro("tier", [](const PagePool& pool) { return pool.tier(); })
      .def_prop_ro("free", &PagePool::free)
      .def_prop_rw("log_frees", &PagePool::log_frees, &PagePool::set_log_frees)
      .def("take_freed", [](PagePool& pool) { return list_of(pool.take_freed()); })
      .def_prop_rw("log_readable", &PagePool::log_readable, &PagePool::set_log_readable)
      .def("take_readable",
           [](PagePool& pool) {
             nb::list changes;
             for (const int64_t change : pool.take_readable()) changes.append(change);
             return changes;
           })
      .def("allocate",
           [](PagePool& pool, int64_t n, int64_t state) { return list_of(pool.allocate(n, state_of(state, "state"))); },
           "n"_a, "state"_a = int(PageState::kLeased))
      .def("claim",
           [](PagePool& pool, nb::handle pages, int64_t state) {
             pool.claim(read_page_ids(pages, pool), state_of(state, "state"));
           },
           "pages"_a, "state"_a)
      .def("free_pages", [](PagePool& pool, nb::handle pages) { pool.free_pages(read_page_ids(pages, pool)); }, "pages"_a)
      .def("move",
           [](PagePool& pool, nb::handle pages, int64_t source, int64_t target) {
             pool.move(read_page_ids(pages, pool), state_of(source, "source"), state_of(target, "target"));
           },
           "pages"_a, "source"_a, "target"_a)
      .def("resize", &PagePool::resize, "pages"_a)
      .def("states", &states, "pages"_a)
      .def("state_code",
           [](const PagePool& pool, int64_t page) { return int(pool.state(checked_page_id(page, pool))); }, "page"_a)
      .def("generation",
           [](const PagePool& pool, int64_t page) { return pool.generation(checked_page_id(page, pool)); }, "page"_a)
      .def("count_list", &count_list)
      .def("check", &PagePool::check);
}

}  // namespace kvferry
