// Where kernels leave the sums of parts: memory of the GPU that launches add to, and of the host that the last one writes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device.h"
#include "cuda/kernels/part_kernels.h"

namespace kvferry {

class SumCells {
 public:
  static constexpr size_t kCells = 1024;  // sums that are under way or not yet read

  explicit SumCells(std::shared_ptr<GpuDevice> device);
  ~SumCells();
  SumCells(const SumCells&) = delete;
  SumCells& operator=(const SumCells&) = delete;

  // Until `held` is destroyed. GpuError: all are in use.
  class Held {
   public:
    Held(std::shared_ptr<SumCells> cells, uint64_t nbytes);
    ~Held();
    Held(const Held&) = delete;
    Held& operator=(const Held&) = delete;

    SumInto into(uint32_t blocks) const;
    // Where the launches leave the sum of the part's words, as the device sees it.
    const unsigned long long* result() const;
    uint64_t nbytes() const { return nbytes_; }
    // When the copy is done.
    uint64_t sum() const;
    // From here to used_until: if not all of its launches are issued, the cell is not used again.
    void spoil_until_issued() { spoilt_ = true; }
    // The launches that add to it end with this event: before that the cell is nobody else's.
    void used_until(std::shared_ptr<const GpuCopy> end) {
      end_ = std::move(end);
      spoilt_ = false;
    }

   private:
    unsigned long long* result_on_device() const;

    const std::shared_ptr<SumCells> cells_;
    const uint64_t nbytes_;
    std::shared_ptr<const GpuCopy> end_;
    bool spoilt_ = false;
    uint32_t index_;
  };

 private:
  struct Retired {
    uint32_t index;
    std::shared_ptr<const GpuCopy> end;
  };

  uint32_t take();

  const std::shared_ptr<GpuDevice> device_;
  GpuMemory cells_;
  std::unique_ptr<unsigned long long, void (*)(void*)> results_;
  PinnedRange pinned_;
  GpuAddress results_on_device_ = 0;
  std::mutex mutex_;
  std::vector<uint32_t> free_;
  std::vector<Retired> retired_;  // dropped before their copies were done
};

}  // namespace kvferry
