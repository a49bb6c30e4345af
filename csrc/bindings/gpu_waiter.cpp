// One thread learns of the ends of many copies.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <vector>

#include "bindings/cuda.h"
#include "wait_pace.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

// Lock order: the GIL, then mutex_. wait() asks for the GIL only when it has let go of mutex_.
class GpuWaiter {
 public:
  void add(nb::typed<nb::handle, Copying> copy) {
    const Copying& copying = nb::cast<const Copying&>(copy);
    const std::lock_guard<std::mutex> hold(mutex_);
    if (entries_.size() >= kMost) refuse("copy: " + std::to_string(kMost) + " are waited for already");
    entries_.push_back({nb::borrow(copy), copying.end});
    pace_ = WaitPace();
    changed_.notify_all();
  }

  void wake() {
    const std::lock_guard<std::mutex> hold(mutex_);
    woken_ = true;
    changed_.notify_all();
  }

  size_t size() const {
    const std::lock_guard<std::mutex> hold(mutex_);
    return entries_.size();
  }

  nb::typed<nb::list, Copying> wait(double seconds) {
    const auto time = checked_seconds(seconds);
    std::vector<Entry> ended;
    {
      nb::gil_scoped_release release;
      ended = wait_without_gil(std::chrono::steady_clock::now() + time);
    }
    nb::typed<nb::list, Copying> result;
    for (Entry& entry : ended) result.append(entry.copy);
    return result;
  }

 private:
  static constexpr size_t kMost = size_t(1) << 16;
  struct Entry {
    nb::object copy;
    std::shared_ptr<GpuCopy> end;
  };
  using Time = std::chrono::steady_clock::time_point;

  static bool has_ended(const GpuCopy& end) {
    try {
      return end.done();
    } catch (const GpuError&) {
      return true;  // who asks the copy itself is told
    }
  }

  std::vector<Entry> wait_without_gil(Time deadline) {
    std::unique_lock<std::mutex> hold(mutex_);
    const FineTimer fine;
    pace_ = WaitPace();
    std::vector<Entry> ended;
    while (!woken_) {
      const auto running = std::stable_partition(entries_.begin(), entries_.end(),
                                                 [](const Entry& entry) { return has_ended(*entry.end); });
      std::move(entries_.begin(), running, std::back_inserter(ended));
      entries_.erase(entries_.begin(), running);
      if (!ended.empty() || std::chrono::steady_clock::now() >= deadline) break;
      if (entries_.empty()) {
        changed_.wait_until(hold, deadline);
      } else if (const auto sleep = pace_.next(); sleep.count() > 0) {
        changed_.wait_for(hold, sleep);
      } else {
        hold.unlock();
        hold.lock();
      }
    }
    woken_ = false;
    return ended;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Entry> entries_;
  WaitPace pace_;  // since the last copy was added
  bool woken_ = false;
};

}  // namespace

void bind_gpu_waiter(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<GpuWaiter>(m, "GpuWaiter", R"(
      One thread waits for many copies: it sleeps while there are none, and learns of an end within some 20 us.)")
      .def(nb::init<>())
      .def("add", &GpuWaiter::add, "copy"_a,
           "From any thread; a `wait` that runs includes it. ValueError: 65536 are waited for already.")
      .def("wait", &GpuWaiter::wait, "seconds"_a, R"(
           Those that ended, well or not (`done` tells), at least one unless the time is up or `wake` was called; no
           other `wait` returns them. GIL released.)")
      .def("wake", &GpuWaiter::wake, "The `wait` that runs, or else the next one, returns at once.")
      .def("__len__", &GpuWaiter::size, "Copies that no `wait` has returned.");
}

}  // namespace kvferry
