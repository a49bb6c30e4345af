#include "cuda/device.h"

#include <atomic>
#include <iterator>
#include <thread>

#include "cuda/kernels/copy_kernels.h"
#include "wait_pace.h"

namespace kvferry {

namespace {

std::atomic<bool> stacks_are_spared{false};

// Whether anybody in this process has a context of the device already, whose limits are theirs; so too where none can be set.
bool is_there(const GpuDriver& driver, int device) {
  unsigned flags = 0;
  int active = 0;
  if (driver.context_state == nullptr || driver.context_limit == nullptr) return true;
  return driver.context_state(device, &flags, &active) != kGpuSuccess || active != 0;
}

}  // namespace

void GpuDevice::spare_stacks() { stacks_are_spared = true; }

GpuDevice::GpuDevice(std::shared_ptr<const GpuDriver> driver, int ordinal) : driver_(std::move(driver)) {
  check(driver_->device_get(&device_, ordinal), "device");
  const bool is_made = stacks_are_spared && !is_there(*driver_, device_);
  check(driver_->context_retain(&context_, device_), "context");
  if (is_made && driver_->context_push(context_) == kGpuSuccess) {
    constexpr int kStackSize = 0;  // CU_LIMIT_STACK_SIZE
    driver_->context_limit(kStackSize, 0);  // one that is refused is as it was
    GpuContext popped = nullptr;
    driver_->context_pop(&popped);
  }
}

GpuDevice::~GpuDevice() { driver_->context_release(device_); }

GpuUuid GpuDevice::uuid() const {
  GpuUuid uuid{};
  check(driver_->device_uuid(&uuid, device_), "uuid of the device");
  return uuid;
}

bool GpuDevice::mps() const {
  constexpr int kMpsEnabled = 133;  // CU_DEVICE_ATTRIBUTE_MPS_ENABLED; older drivers do not know it
  int enabled = 0;
  return driver_->device_attribute != nullptr &&
         driver_->device_attribute(&enabled, kMpsEnabled, device_) == kGpuSuccess && enabled != 0;
}

std::pair<size_t, size_t> GpuDevice::memory_info() const {
  const Use use(*this);
  size_t free = 0, total = 0;
  check(driver_->mem_info(&free, &total), "memory of the device");
  return {free, total};
}

GpuAddress GpuDevice::seen_at(uint64_t host, size_t bytes) const {
  {
    const std::lock_guard<std::mutex> hold(pinned_mutex_);
    const auto after = pinned_.upper_bound(host);
    if (after != pinned_.begin()) {
      const auto& [begin, block] = *std::prev(after);
      const uint64_t inside = host - begin;
      if (inside < block.bytes && bytes <= block.bytes - inside) return block.seen_at + inside;
    }
  }
  const auto ask = [this](uint64_t at, GpuAddress* seen) {
    return driver_->host_device_address(seen, reinterpret_cast<void*>(at), 0) == kGpuSuccess;
  };
  GpuAddress first = 0, last = 0;
  if (!ask(host, &first) || !ask(host + bytes - 1, &last)) return 0;
  return last - first == bytes - 1 ? first : 0;
}

void GpuDevice::note_pinned(uint64_t host, size_t bytes) {
  GpuAddress seen = 0;
  if (driver_->host_device_address(&seen, reinterpret_cast<void*>(host), 0) != kGpuSuccess) return;
  const std::lock_guard<std::mutex> hold(pinned_mutex_);
  pinned_[host] = {bytes, seen};
}

void GpuDevice::note_unpinned(uint64_t host) {
  const std::lock_guard<std::mutex> hold(pinned_mutex_);
  pinned_.erase(host);
}

GpuDevice::Use::Use(const GpuDevice& device) : driver_(*device.driver_) {
  device.check(driver_.context_push(device.context_), "context");
}

GpuDevice::Use::~Use() {
  GpuContext popped = nullptr;
  driver_.context_pop(&popped);
}

GpuMemory::GpuMemory(std::shared_ptr<GpuDevice> device, size_t bytes, size_t block)
    : device_(std::move(device)), size_(bytes) {
  const GpuDevice::Use use(*device_);
  const GpuStatus status = device_->driver().mem_alloc(&address_, (bytes + block - 1) / block * block);
  if (status != kGpuSuccess) device_->check(status, ("memory of the device, " + std::to_string(bytes) + " bytes").c_str());
}

GpuMemory::~GpuMemory() {
  if (left_) return;
  const GpuDevice::Use use(*device_);
  device_->driver().mem_free(address_);
}

void GpuMemory::leave() {
  if (!left_.exchange(true)) new std::shared_ptr<GpuDevice>(device_);  // the end of its context would free it, too
}

PinnedRange::PinnedRange(std::shared_ptr<GpuDevice> device, void* address, size_t bytes)
    : device_(std::move(device)), address_(address) {
  constexpr unsigned kPortable = 1, kMapped = 2;
  const GpuDevice::Use use(*device_);
  const GpuStatus status = device_->driver().host_register(address, bytes, kPortable | kMapped);
  if (status != kGpuSuccess) {
    device_->check(status, ("pinning of " + std::to_string(bytes) +
                            " bytes of host memory (anonymous, or of /dev/shm or a memfd; a file of a disk's file system cannot"
                            " be pinned, nor memory that is pinned already, nor more than `ulimit -l` allows)")
                               .c_str());
  }
  device_->note_pinned(reinterpret_cast<uint64_t>(address), bytes);
}

PinnedRange::~PinnedRange() {
  device_->note_unpinned(reinterpret_cast<uint64_t>(address_));
  const GpuDevice::Use use(*device_);
  device_->driver().host_unregister(address_);
}

GpuPages::GpuPages(std::shared_ptr<GpuDevice> device, PageLayout layout)
    : device_(std::move(device)),
      layout_(std::move(layout)),
      runs_(pitched_runs(layout_)),
      table_(device_, 2 * layout_.bases.size() * sizeof(uint64_t)) {
  const OwnStream stream(device_, OwnStream::Priority::kGreatest);
  const GpuDevice::Use use(*device_);
  const size_t bytes = layout_.bases.size() * sizeof(uint64_t);
  GpuCopy written(device_);
  try {
    device_->check(device_->driver().copy_to_device(bases(), layout_.bases.data(), bytes, stream.get()), "layout");
    device_->check(device_->driver().copy_to_device(strides(), layout_.strides.data(), bytes, stream.get()), "layout");
    written.record(stream.get());
    written.wait();
  } catch (...) {
    stream.drain();
    throw;
  }
}

GpuKernels::GpuKernels(std::shared_ptr<GpuDevice> device) : device_(std::move(device)) {
  const GpuDriver& driver = device_->driver();
  if (!driver.module_load || !driver.module_unload || !driver.module_function || !driver.launch) return;
  const GpuDevice::Use use(*device_);
  if (driver.module_load(&module_, kCopyKernels) != kGpuSuccess) module_ = nullptr;
}

GpuKernels::~GpuKernels() {
  if (module_ == nullptr) return;
  const GpuDevice::Use use(*device_);
  device_->driver().module_unload(module_);
}

GpuFunction GpuKernels::get(const char* name) const {
  GpuFunction function = nullptr;
  device_->check(device_->driver().module_function(&function, module_, name), name);
  return function;
}

OwnStream::OwnStream(std::shared_ptr<GpuDevice> device, Priority priority) : device_(std::move(device)) {
  const GpuDevice::Use use(*device_);
  int least = 0, greatest = 0;
  device_->check(device_->driver().stream_priorities(&least, &greatest), "priorities");
  device_->check(device_->driver().stream_create(&stream_, kGpuStreamNonBlocking,
                                                 priority == Priority::kGreatest ? greatest : least),
                 "stream");
}

OwnStream::~OwnStream() {
  const GpuDevice::Use use(*device_);
  device_->driver().stream_destroy(stream_);
}

void drain_stream(const GpuDevice& device, GpuStream stream) {
  const GpuDriver& driver = device.driver();
  const GpuDevice::Use use(device);
  GpuEvent event = nullptr;
  bool waited = false;
  if (driver.event_create(&event, kGpuEventDisableTiming) == kGpuSuccess) {
    waited = driver.event_record(event, stream) == kGpuSuccess && driver.event_synchronize(event) == kGpuSuccess;
    driver.event_destroy(event);
  }
  if (!waited) driver.stream_synchronize(stream);  // another device's stream takes copies, but no event of this one's
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

bool GpuCopy::wait_for(std::chrono::nanoseconds time) const {
  OwnTime waited(time);
  WaitPace pace;
  for (; pace.next().count() == 0; ) {
    if (done()) return true;
    if (waited.over()) return done();
  }
  for (const FineTimer fine; !done(); std::this_thread::sleep_for(pace.next())) {
    if (waited.over()) return done();
  }
  return true;
}

void GpuCopy::hold(GpuStream stream) const {
  const GpuDevice::Use use(*device_);
  device_->check(device_->driver().stream_wait(stream, event_, 0), "wait of a stream");
}

}  // namespace kvferry
