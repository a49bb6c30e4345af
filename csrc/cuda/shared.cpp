#include "cuda/shared.h"

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

namespace kvferry {
namespace {

using Key = std::array<char, sizeof(GpuIpcHandle)>;

Key key_of(const GpuIpcHandle& handle) {
  Key key;
  std::memcpy(key.data(), handle.bytes, key.size());
  return key;
}

// The handles that this process has given out: a driver does not map a process's own memory a second time.
std::mutex own_mutex;
std::map<Key, GpuAddress>& own_handles() {
  static auto* const handles = new std::map<Key, GpuAddress>;  // as long as the process
  return *handles;
}

bool is_own(const GpuDevice& device, const GpuIpcHandle& handle) {
  const std::lock_guard<std::mutex> hold(own_mutex);
  const auto found = own_handles().find(key_of(handle));
  if (found == own_handles().end()) return false;
  GpuIpcHandle now;  // what was exported may be gone, and its handle another's by now
  if (device.driver().ipc_export(&now, found->second) == kGpuSuccess && key_of(now) == found->first) return true;
  own_handles().erase(found);
  return false;
}

void need(const void* entry, const char* what) {
  if (entry == nullptr) throw GpuUnavailable(std::string("the driver has no ") + what);
}

}  // namespace

int device_count(const GpuDriver& driver) {
  int count = 0;
  check_gpu(driver, driver.device_count(&count), "count of devices");
  return count;
}

GpuUuid device_uuid(const GpuDriver& driver, int ordinal) {
  int device = 0;
  GpuUuid uuid{};
  check_gpu(driver, driver.device_get(&device, ordinal), "device");
  check_gpu(driver, driver.device_uuid(&uuid, device), "uuid of the device");
  return uuid;
}

AddressRange address_range(const GpuDevice& device, GpuAddress address) {
  const GpuDevice::Use use(device);
  AddressRange range;
  const GpuStatus status = device.driver().mem_address_range(&range.base, &range.size, address);
  if (status != kGpuSuccess) device.check(status, ("address " + std::to_string(address) + " is in no allocation").c_str());
  return range;
}

ExportedMemory export_memory(const GpuDevice& device, GpuAddress address) {
  need(reinterpret_cast<const void*>(device.driver().ipc_export), "memory for other processes");
  ExportedMemory exported{{}, address_range(device, address)};
  const GpuDevice::Use use(device);
  device.check(device.driver().ipc_export(&exported.handle, exported.range.base),
               "handle of memory for other processes (only plain allocations have one, not memory mapped piece by piece)");
  const std::lock_guard<std::mutex> hold(own_mutex);
  own_handles()[key_of(exported.handle)] = exported.range.base;
  return exported;
}

GpuMapping::GpuMapping(std::shared_ptr<GpuDevice> device, const GpuIpcHandle& handle, size_t bytes)
    : device_(std::move(device)), size_(bytes) {
  const GpuDriver& driver = device_->driver();
  need(reinterpret_cast<const void*>(driver.ipc_open), "memory of other processes");
  need(reinterpret_cast<const void*>(driver.ipc_close), "memory of other processes");
  const GpuDevice::Use use(*device_);
  if (is_own(*device_, handle)) throw GpuError("handle: names memory of this process, which needs no mapping");
  device_->check(driver.ipc_open(&address_, handle, kGpuIpcEnablePeerAccess),
                 "handle: cannot be opened; its process may have ended, or freed the memory, or it is of this process");
  try {
    const AddressRange range = address_range(*device_, address_);
    if (range.holds(address_, bytes)) return;
    throw GpuError("nbytes: " + std::to_string(bytes) + ", but the handle names " +
                   std::to_string(range.size - (address_ - range.base)) + " bytes");
  } catch (...) {
    driver.ipc_close(address_);
    throw;
  }
}

GpuMapping::~GpuMapping() { close(); }

void GpuMapping::close() {
  if (address_ == 0) return;
  const GpuDevice::Use use(*device_);
  device_->driver().ipc_close(address_);
  address_ = 0;
}

}  // namespace kvferry
