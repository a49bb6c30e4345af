#include "copies/copy_pages.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "copies/split_work.h"

namespace kvferry {
namespace {

// Calls move(page address, offset in the caller's buffer, bytes) for each piece of the virtual byte string's range.
template <class Byte, class Move>
void walk_pages(Byte* pool, const int64_t* page_ids, size_t page_bytes, size_t byte_offset, size_t begin, size_t end,
                const Move& move) {
  while (begin < end) {
    const size_t at = byte_offset + begin;
    const size_t inside = at % page_bytes;
    const size_t bytes = std::min(page_bytes - inside, end - begin);
    move(pool + size_t(page_ids[at / page_bytes]) * page_bytes + inside, begin, bytes);
    begin += bytes;
  }
}

}  // namespace

void gather_pages(uint8_t* dst, const uint8_t* pool, const int64_t* page_ids, size_t page_bytes, size_t byte_offset,
                  size_t nbytes, unsigned threads) {
  split(nbytes, threads, [=](size_t begin, size_t end) {
    walk_pages(pool, page_ids, page_bytes, byte_offset, begin, end,
               [dst](const uint8_t* page, size_t offset, size_t bytes) { std::memcpy(dst + offset, page, bytes); });
  });
}

void scatter_pages(uint8_t* pool, const int64_t* page_ids, size_t page_bytes, size_t byte_offset, const uint8_t* src,
                   size_t nbytes, unsigned threads) {
  split(nbytes, threads, [=](size_t begin, size_t end) {
    walk_pages(pool, page_ids, page_bytes, byte_offset, begin, end,
               [src](uint8_t* page, size_t offset, size_t bytes) { std::memcpy(page, src + offset, bytes); });
  });
}

void copy_list(const int64_t* dst, const int64_t* src, const int64_t* sizes, size_t n, unsigned threads) {
  std::vector<size_t> ends(n);  // of item i in the concatenation of all items
  size_t total = 0;
  for (size_t i = 0; i < n; ++i) ends[i] = total += size_t(sizes[i]);
  split(total, threads, [&](size_t begin, size_t end) {
    size_t i = size_t(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (; begin < end; ++i) {
      const size_t inside = begin - (ends[i] - size_t(sizes[i]));
      const size_t bytes = std::min(ends[i], end) - begin;
      std::memcpy(reinterpret_cast<uint8_t*>(dst[i]) + inside, reinterpret_cast<const uint8_t*>(src[i]) + inside, bytes);
      begin += bytes;
    }
  });
}

void zero_ranges(uint8_t* first, size_t fragments, size_t stride, size_t fragment_bytes, size_t start) {
  for (size_t f = 0; f < fragments; ++f) std::memset(first + f * stride + start, 0, fragment_bytes - start);
}

}  // namespace kvferry
