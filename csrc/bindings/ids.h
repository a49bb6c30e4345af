// How page ids and digests come from Python and go back.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

#include "bindings/types.h"
#include "radix/page_pool.h"

namespace kvferry {

// IndexError: an id that the pool does not have.
uint32_t checked_page_id(int64_t id, const PagePool& pool);

// A sequence of integers, or a buffer of 32 or 64 bit ones, each checked.
PageIds read_page_ids(nanobind::handle object, const PagePool& pool);

IntList list_of(const PageIds& pages);

// n * 32 bytes, or a (n, 32) array of uint8, held for the length of a call; copied only if it is not contiguous.
class DigestBuffer {
 public:
  DigestBuffer(nanobind::handle object, const char* field);
  ~DigestBuffer();
  DigestBuffer(const DigestBuffer&) = delete;
  DigestBuffer& operator=(const DigestBuffer&) = delete;

  const uint8_t* data() const { return data_; }
  uint32_t count() const { return count_; }

 private:
  void take_view(nanobind::handle object);

  const char* field_;
  const uint8_t* data_ = nullptr;
  uint32_t count_ = 0;
  Py_buffer view_{};
  std::vector<uint8_t> copied_;
};

}  // namespace kvferry
