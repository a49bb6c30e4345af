// Whether kernels find room on the GPU at once, or wait for others that hold every multiprocessor.
#pragma once

#include <chrono>

#include "cuda/device.h"

namespace kvferry {

// Launches kernels that do nothing and looks how long they took. All calls: within GpuDevice::Use, one at a time.
class BusyProbe {
 public:
  explicit BusyProbe(const GpuDevice& device);
  ~BusyProbe();
  BusyProbe(const BusyProbe&) = delete;
  BusyProbe& operator=(const BusyProbe&) = delete;

  // Waits kWait at most, and only if nothing was launched lately. A GPU that was found busy twice counts as busy for kRemember:
  // a large kernel leaves multiprocessors free at its end, and copies that wait for that moment have their successors ask
  // then. Once may have been chance, and counts for a moment.
  bool busy(GpuFunction kernel);

  // For the next answers. To be called when a copy was issued. A driver that refuses the kernel tells nothing.
  void launch(GpuFunction kernel);

  // By what is known, without asking.
  bool lately() const { return Clock::now() < busy_until_; }

  // A copy's kernel had to wait.
  void note_busy();

 private:
  using Clock = std::chrono::steady_clock;

  bool ended();

  const GpuDevice& device_;
  const GpuDriver& driver_;
  GpuStream stream_ = nullptr;
  GpuEvent begin_ = nullptr, end_ = nullptr;
  bool running_ = false;  // as far as is known
  bool told_ = false;     // that it is slow
  Clock::time_point launched_{}, slow_{}, busy_until_{};  // the last, and when the last slow one was seen; at first long ago
};

}  // namespace kvferry
