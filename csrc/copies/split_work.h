// Divides bytes among threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace kvferry {

constexpr size_t kBytesWorthAThread = size_t(1) << 20;  // less than this a thread costs more than it gains
constexpr size_t kSplitAlignment = 4096;

// Calls copy(begin, end) on disjoint ranges that cover [0, nbytes), on up to `threads` threads with the caller's own. All
// but the last end at a multiple of kSplitAlignment.
template <class Copy>
void split(size_t nbytes, unsigned threads, const Copy& copy) {
  const size_t useful = std::max<size_t>(1, std::min<size_t>(threads, nbytes / kBytesWorthAThread));
  if (useful == 1) return copy(size_t(0), nbytes);
  const size_t share = ((nbytes + useful - 1) / useful + kSplitAlignment - 1) / kSplitAlignment * kSplitAlignment;
  std::vector<std::thread> helpers;
  helpers.reserve(useful - 1);
  size_t begin = 0;
  for (size_t i = 0; i + 1 < useful && begin + share < nbytes; ++i, begin += share) {
    try {
      helpers.emplace_back([&copy, begin, share] { copy(begin, begin + share); });
    } catch (const std::exception&) {
      break;  // the process may start no more threads: the rest is copied here
    }
  }
  copy(begin, nbytes);
  for (auto& helper : helpers) helper.join();
}

}  // namespace kvferry
