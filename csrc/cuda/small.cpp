#include "cuda/small.h"

#include <cstdlib>
#include <cstring>
#include <new>

namespace kvferry {
namespace {

constexpr std::chrono::seconds kDeadline(10);

char* page_of_memory() {
  void* memory = std::aligned_alloc(4096, SmallReads::kMaxBytes);
  if (memory == nullptr) throw std::bad_alloc();
  return static_cast<char*>(memory);
}

}  // namespace

SmallReads::SmallReads(std::shared_ptr<GpuDevice> device)
    : device_(std::move(device)),
      buffer_(page_of_memory(), std::free),
      pinned_(device_, buffer_.get(), kMaxBytes),
      stream_(device_, OwnStream::Priority::kGreatest),
      end_(device_) {}

SmallReads::~SmallReads() { stream_.drain(); }

void SmallReads::read(void* dst, GpuAddress src, size_t bytes) {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (stuck_) finish();
  {
    const GpuDevice::Use use(*device_);
    device_->check(device_->driver().copy_to_host(buffer_.get(), src, bytes, stream_.get()), "read");
    finish();
  }
  std::memcpy(dst, buffer_.get(), bytes);
}

void SmallReads::finish() {
  if (!stuck_) {
    try {
      end_.record(stream_.get());
    } catch (...) {
      stream_.drain();  // the caller learns of no read: none may run on
      throw;
    }
  }
  stuck_ = true;
  if (!end_.wait_for(kDeadline)) {
    throw GpuError("read: not done in " + std::to_string(kDeadline.count()) + " s");
  }
  stuck_ = false;
}

}  // namespace kvferry
