#include <nanobind/nanobind.h>

#include "bindings/bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "kvferry's C++ core: digests, copies, page pools and the radix tree";
  nanobind::set_leak_warnings(false);  // a daemon ends with its trees; the process's end frees them
  kvferry::bind_backstop(m);
  kvferry::bind_digests(m);
  kvferry::bind_copies(m);
  kvferry::bind_cuda(m);
  kvferry::bind_host_pages(m);
  kvferry::bind_pool(m);
  kvferry::bind_tree(m);
}
