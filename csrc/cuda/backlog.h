// The bytes of one direction's copies that have not ended.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <utility>

#include "cuda/device.h"

namespace kvferry {

class Backlog {
 public:
  // A copy was issued. Of more than kMost at a time only so many count, and only what there is memory for: it runs anyway.
  void add(std::shared_ptr<const GpuCopy> copy, size_t bytes) noexcept {
    const std::lock_guard<std::mutex> hold(mutex_);
    drop_ended();
    try {
      if (copies_.size() < kMost) copies_.emplace_back(std::move(copy), bytes);
    } catch (const std::bad_alloc&) {
    }
  }

  size_t bytes() {
    const std::lock_guard<std::mutex> hold(mutex_);
    drop_ended();
    size_t sum = 0;
    for (const auto& [copy, bytes] : copies_) sum += bytes;
    return sum;
  }

 private:
  static constexpr size_t kMost = 256;

  // From the oldest on: they end in about this order.
  void drop_ended() {
    while (!copies_.empty() && ended(*copies_.front().first)) copies_.pop_front();
  }

  static bool ended(const GpuCopy& copy) {
    try {
      return copy.done();
    } catch (const GpuError&) {
      return true;
    }
  }

  std::mutex mutex_;
  std::deque<std::pair<std::shared_ptr<const GpuCopy>, size_t>> copies_;
};

}  // namespace kvferry
