#include "cuda/sums.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace kvferry {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kResultBytes = (SumCells::kCells * sizeof(unsigned long long) + kPageBytes - 1) / kPageBytes * kPageBytes;

unsigned long long* new_results() {
  void* memory = std::aligned_alloc(kPageBytes, kResultBytes);
  if (memory == nullptr) throw std::bad_alloc();
  std::memset(memory, 0, kResultBytes);
  return static_cast<unsigned long long*>(memory);
}

bool ended(const GpuCopy& end) {
  try {
    return end.done();
  } catch (const GpuError&) {
    return true;  // the device is lost: nothing runs on it any more
  }
}

}  // namespace

SumCells::SumCells(std::shared_ptr<GpuDevice> device)
    : device_(std::move(device)),
      cells_(device_, kCells * sizeof(SumCell)),
      results_(new_results(), std::free),
      pinned_(device_, results_.get(), kResultBytes) {
  const GpuDriver& driver = device_->driver();
  const OwnStream stream(device_, OwnStream::Priority::kGreatest);
  const GpuDevice::Use use(*device_);
  device_->check(driver.host_device_address(&results_on_device_, results_.get(), 0), "sums");
  GpuCopy zeroed(device_);
  device_->check(driver.set_bytes(cells_.address(), 0, kCells * sizeof(SumCell), stream.get()), "sums");
  zeroed.record(stream.get());
  zeroed.wait();
  for (uint32_t i = 0; i < kCells; ++i) free_.push_back(uint32_t(kCells) - 1 - i);
}

SumCells::~SumCells() {
  for (const Retired& cell : retired_) {
    try {
      cell.end->wait();
    } catch (const GpuError&) {  // nothing runs on the device any more
    }
  }
}

uint32_t SumCells::take() {
  const std::lock_guard<std::mutex> hold(mutex_);
  const auto done = std::partition(retired_.begin(), retired_.end(), [](const Retired& cell) { return !ended(*cell.end); });
  for (auto cell = done; cell != retired_.end(); ++cell) free_.push_back(cell->index);
  retired_.erase(done, retired_.end());
  if (free_.empty()) throw GpuError(std::to_string(kCells) + " sums of parts are under way or held: drop copies that are done");
  const uint32_t index = free_.back();
  free_.pop_back();
  return index;
}

SumCells::Held::Held(std::shared_ptr<SumCells> cells, uint64_t nbytes)
    : cells_(std::move(cells)), nbytes_(nbytes), index_(cells_->take()) {}

SumCells::Held::~Held() {
  if (spoilt_) return;
  const std::lock_guard<std::mutex> hold(cells_->mutex_);
  if (end_ == nullptr || ended(*end_)) {
    cells_->free_.push_back(index_);
  } else {
    cells_->retired_.push_back({index_, end_});
  }
}

SumInto SumCells::Held::into(uint32_t blocks) const {
  return {reinterpret_cast<SumCell*>(cells_->cells_.address()) + index_, result_on_device(), blocks};
}

const unsigned long long* SumCells::Held::result() const { return result_on_device(); }

unsigned long long* SumCells::Held::result_on_device() const {
  return reinterpret_cast<unsigned long long*>(cells_->results_on_device_) + index_;
}

uint64_t SumCells::Held::sum() const {
  return part_sum(static_cast<const volatile unsigned long long*>(cells_->results_.get())[index_], nbytes_);
}

}  // namespace kvferry
