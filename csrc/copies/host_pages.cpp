#include "copies/host_pages.h"

#include <atomic>
#include <cstring>

#include "copies/part_sum.h"
#include "copies/split_work.h"

namespace kvferry {
namespace {

constexpr size_t kCached = 16 << 10;  // stays in a first-level cache between a copy and its sum
constexpr uint64_t kWord = sizeof(uint64_t);

// Calls move(page bytes, offset in the slot, bytes), or lack(offset in the slot, bytes) for what the page has not.
template <class Move, class Lack>
void walk(const PageLayout& layout, const int64_t* ids, const PartRange& part, size_t begin, size_t end, const Move& move,
          const Lack& lack) {
  const auto move_next = [&](uint64_t address, size_t bytes) {
    move(reinterpret_cast<uint8_t*>(address), begin, bytes);
    begin += bytes;
  };
  const auto lack_next = [&](size_t bytes) {
    lack(begin, bytes);
    begin += bytes;
  };
  walk_part(layout, ids, part, begin, end, move_next, lack_next);
}

constexpr auto kLeaveOut = [](size_t, size_t) {};

// Whether every fragment, or part of one, begins with a word of the part.
bool in_words(const PageLayout& layout, const PartRange& part) {
  return layout.fragment_bytes % kWord == 0 && part.offset % kWord == 0 && part.last_bytes % kWord == 0;
}

template <class Copy>
void by_cached(size_t begin, size_t end, const Copy& copy) {
  for (; begin < end; begin += kCached) copy(begin, std::min(begin + kCached, end));
}

void gather_range(uint8_t* slot, const PageLayout& layout, const int64_t* ids, const PartRange& part, size_t begin,
                  size_t end) {
  walk(
      layout, ids, part, begin, end,
      [slot](const uint8_t* page, size_t at, size_t bytes) { std::memcpy(slot + at, page, bytes); },
      [slot](size_t at, size_t bytes) { std::memset(slot + at, 0, bytes); });
}

}  // namespace

void gather_part(uint8_t* slot, const PageLayout& layout, const int64_t* ids, const PartRange& part, unsigned threads) {
  split(part.bytes, threads, [&](size_t begin, size_t end) { gather_range(slot, layout, ids, part, begin, end); });
}

void scatter_part(const PageLayout& layout, const int64_t* ids, const PartRange& part, const uint8_t* slot, unsigned threads) {
  split(part.bytes, threads, [&](size_t begin, size_t end) {
    walk(
        layout, ids, part, begin, end,
        [slot](uint8_t* page, size_t at, size_t bytes) { std::memcpy(page, slot + at, bytes); }, kLeaveOut);
  });
}

uint64_t gather_part_summed(uint8_t* slot, const PageLayout& layout, const int64_t* ids, const PartRange& part,
                            unsigned threads) {
  std::atomic<uint64_t> sum{0};
  split(part.bytes, threads, [&](size_t first, size_t last) {
    uint64_t own = 0;
    if (in_words(layout, part)) {
      const auto copy = [&](const uint8_t* page, size_t at, size_t bytes) {
        own += copy_words(slot + at, page, bytes, at / kWord);
      };
      walk(layout, ids, part, first, last, copy, [&](size_t at, size_t bytes) {
        std::memset(slot + at, 0, bytes);
        own += sum_words(slot + at, bytes, at / kWord);
      });
    } else {
      by_cached(first, last, [&](size_t begin, size_t end) {
        gather_range(slot, layout, ids, part, begin, end);
        own += sum_words(slot + begin, end - begin, begin / kWord);
      });
    }
    sum += own;
  });
  return part_sum(sum, part.bytes);
}

uint64_t scatter_part_summed(const PageLayout& layout, const int64_t* ids, const PartRange& part, const uint8_t* slot,
                             unsigned threads) {
  std::atomic<uint64_t> sum{0};
  split(part.bytes, threads, [&](size_t first, size_t last) {
    uint64_t own = 0;
    if (in_words(layout, part)) {
      const auto copy = [&](uint8_t* page, size_t at, size_t bytes) {
        own += copy_words(page, slot + at, bytes, at / kWord);
      };
      const auto sum_alone = [&](size_t at, size_t bytes) { own += sum_words(slot + at, bytes, at / kWord); };
      walk(layout, ids, part, first, last, copy, sum_alone);
    } else {
      // Read once: a late write to the slot between sum and copy would pass the check.
      uint8_t cached[kCached];
      by_cached(first, last, [&](size_t begin, size_t end) {
        std::memcpy(cached, slot + begin, end - begin);
        own += sum_words(cached, end - begin, begin / kWord);
        const auto copy = [&cached, begin](uint8_t* page, size_t at, size_t bytes) {
          std::memcpy(page, cached + (at - begin), bytes);
        };
        walk(layout, ids, part, begin, end, copy, kLeaveOut);
      });
    }
    sum += own;
  });
  return part_sum(sum, part.bytes);
}

void zero_page(const PageLayout& layout, int64_t page, uint32_t first_piece, uint32_t start) {
  for (uint32_t f = 0; f < layout.fragments(); ++f) {
    if (f % layout.pieces < first_piece) continue;
    std::memset(reinterpret_cast<uint8_t*>(layout.address(&page, f)) + start, 0, layout.fragment_bytes - start);
  }
}

}  // namespace kvferry
