// Memory that several processes use, and which allocation an address lies in.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "cuda/device.h"

namespace kvferry {

// Allocations are whole blocks of this size: a handle shows other processes the block, and with it whatever else lies there.
constexpr size_t kShareableBlock = size_t(2) << 20;

int device_count(const GpuDriver& driver);
GpuUuid device_uuid(const GpuDriver& driver, int ordinal);

struct AddressRange {
  GpuAddress base = 0;
  size_t size = 0;

  bool holds(GpuAddress address, size_t bytes) const {
    return address >= base && address - base <= size && bytes <= size - (address - base);
  }
};

// The allocation that `address` lies in. GpuError: in none.
AddressRange address_range(const GpuDevice& device, GpuAddress address);

// What another process opens to map the allocation that `address` lies in.
struct ExportedMemory {
  GpuIpcHandle handle;
  AddressRange range;
};
ExportedMemory export_memory(const GpuDevice& device, GpuAddress address);

// Memory of another process, mapped until it is closed, whatever becomes of that process.
class GpuMapping {
 public:
  // GpuError: the handle is of this process, or its exporter is gone, or what it names has fewer bytes.
  GpuMapping(std::shared_ptr<GpuDevice> device, const GpuIpcHandle& handle, size_t bytes);
  ~GpuMapping();
  GpuMapping(const GpuMapping&) = delete;
  GpuMapping& operator=(const GpuMapping&) = delete;

  void close();  // a second time: nothing
  bool closed() const { return address_ == 0; }
  GpuAddress address() const { return address_; }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<GpuDevice> device_;
  GpuAddress address_ = 0;
  size_t size_;
};

}  // namespace kvferry
