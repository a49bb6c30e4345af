#include "cuda_device.h"

namespace kvferry {

GpuDevice::GpuDevice(std::shared_ptr<const GpuDriver> driver, int ordinal) : driver_(std::move(driver)) {
  check(driver_->device_get(&device_, ordinal), "device");
  check(driver_->context_retain(&context_, device_), "context");
}

GpuDevice::~GpuDevice() { driver_->context_release(device_); }

GpuDevice::Use::Use(const GpuDevice& device) : driver_(*device.driver_) {
  device.check(driver_.context_push(device.context_), "context");
}

GpuDevice::Use::~Use() {
  GpuContext popped = nullptr;
  driver_.context_pop(&popped);
}

GpuMemory::GpuMemory(std::shared_ptr<GpuDevice> device, size_t bytes) : device_(std::move(device)), size_(bytes) {
  const GpuDevice::Use use(*device_);
  device_->check(device_->driver().mem_alloc(&address_, bytes), "memory of the device");
}

GpuMemory::~GpuMemory() {
  const GpuDevice::Use use(*device_);
  device_->driver().mem_free(address_);
}

PinnedRange::PinnedRange(std::shared_ptr<GpuDevice> device, void* address, size_t bytes)
    : device_(std::move(device)), address_(address) {
  constexpr unsigned kPortable = 1, kMapped = 2;
  const GpuDevice::Use use(*device_);
  device_->check(device_->driver().host_register(address, bytes, kPortable | kMapped), "pinning of host memory");
}

PinnedRange::~PinnedRange() {
  const GpuDevice::Use use(*device_);
  device_->driver().host_unregister(address_);
}

GpuPages::GpuPages(std::shared_ptr<GpuDevice> device, PageLayout layout, GpuStream stream)
    : device_(std::move(device)), layout_(std::move(layout)), runs_(pitched_runs(layout_)), table_(device_, 2 * layout_.bases.size() * sizeof(uint64_t)) {
  const GpuDevice::Use use(*device_);
  const size_t bytes = layout_.bases.size() * sizeof(uint64_t);
  GpuCopy written(device_);
  device_->check(device_->driver().copy_to_device(bases(), layout_.bases.data(), bytes, stream), "layout");
  device_->check(device_->driver().copy_to_device(strides(), layout_.strides.data(), bytes, stream), "layout");
  written.record(stream);
  written.wait();
}

GpuCopy::GpuCopy(std::shared_ptr<GpuDevice> device) : device_(std::move(device)) {
  const GpuDevice::Use use(*device_);
  device_->check(device_->driver().event_create(&event_, kGpuEventDisableTiming | kGpuEventBlockingSync), "event");
}

GpuCopy::~GpuCopy() {
  const GpuDevice::Use use(*device_);
  device_->driver().event_destroy(event_);
}

void GpuCopy::record(GpuStream stream) {
  const GpuDevice::Use use(*device_);
  device_->check(device_->driver().event_record(event_, stream), "event");
}

bool GpuCopy::done() const {
  const GpuDevice::Use use(*device_);
  const GpuStatus status = device_->driver().event_query(event_);
  if (status == kGpuNotReady) return false;
  device_->check(status, "copy");
  return true;
}

void GpuCopy::wait() const {
  const GpuDevice::Use use(*device_);
  device_->check(device_->driver().event_synchronize(event_), "copy");
}

void GpuCopy::hold(GpuStream stream) const {
  const GpuDevice::Use use(*device_);
  device_->check(device_->driver().stream_wait(stream, event_, 0), "wait of a stream");
}

}  // namespace kvferry
