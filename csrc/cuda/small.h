// Reads a few bytes of the device, and waits for them: the headers of slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "cuda/device.h"

namespace kvferry {

class SmallReads {
 public:
  static constexpr size_t kMaxBytes = 4096;

  explicit SmallReads(std::shared_ptr<GpuDevice> device);
  ~SmallReads();
  SmallReads(const SmallReads&) = delete;
  SmallReads& operator=(const SmallReads&) = delete;

  // Runs beside everything else on the device: what must come before it has ended. GpuError: not done in kDeadline.
  void read(void* dst, GpuAddress src, size_t bytes);

 private:
  void finish();

  const std::shared_ptr<GpuDevice> device_;
  const std::unique_ptr<char, void (*)(void*)> buffer_;
  const PinnedRange pinned_;
  const OwnStream stream_;
  GpuCopy end_;
  std::mutex mutex_;
  bool stuck_ = false;  // a read was given up: the buffer is the device's until it ends
};

}  // namespace kvferry
