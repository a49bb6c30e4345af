#include <nanobind/nanobind.h>

#include "bindings.h"

NB_MODULE(_core, m) {
  m.doc() = "kvferry's C++ core: the digest chain and the copy engine";
  kvferry::bind_digests(m);
  kvferry::bind_copies(m);
}
