// Moves parts between pages and slots of one GPU, rows between its pages, and zeroes pages. Gathers, scatters and spills never wait for each other
// to be issued, and run on streams of their own.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "cuda/device.h"
#include "cuda/pages.h"
#include "cuda/sums.h"
#include "cuda/kernels/part_kernels.h"

namespace kvferry {

enum class PartDirection : int { kGather = 0, kScatter = 1 };

struct PartTuning {
  unsigned blocks = 1056;  // of one launch at most: what an H200 holds at a time
  unsigned threads = 256;  // a block
};

struct PartCount {
  uint64_t parts = 0, launches = 0, bytes = 0;
};

// What is written in front of a part, right before its slot's payload; nothing: size 0.
struct PartLabel {
  std::array<uint8_t, kMaxHeaderBytes> bytes{};
  uint32_t size = 0;
};

// All bounds were checked by the caller; slot and pages do not overlap. What a page has not (PartRange, kNoBlock) is gathered
// as zeros, and is left out by a scatter; a sum is that of the slot.
class GpuParts {
 public:
  GpuParts(std::shared_ptr<GpuDevice> device, std::shared_ptr<const GpuKernels> kernels, const PartTuning& tuning);
  ~GpuParts();
  GpuParts(const GpuParts&) = delete;
  GpuParts& operator=(const GpuParts&) = delete;

  // Ordered on `stream`, null: that of the direction. sum: adds up the part too, with kernels only, and adds its sum to the
  // last 8 bytes of the label. A driver that does not support a launch is asked for no other, and its own copies take over.
  void copy(const GpuPages& pages, const int64_t* ids, const PartRange& part, GpuAddress slot, PartDirection direction,
            GpuStream stream, SumCells::Held* sum, const PartLabel& label);

  // Adds up bytes of the device that lie one behind the other.
  void add_up(GpuAddress address, uint64_t nbytes, PartDirection direction, GpuStream stream, SumCells::Held& sum);

  // Of pages ids[0 .. count), not in blocks: in the fragments of pieces [first_piece, pieces), bytes [start, fragment_bytes).
  void zero(const GpuPages& pages, const int64_t* ids, size_t count, uint32_t first_piece, uint32_t start, GpuStream stream);

  // Rows from_ids[0 .. count) of `from` into rows to_ids[0 .. count) of `to`, of equal tensors, pieces and fragments, neither in blocks.
  void move(const GpuPages& from, const int64_t* from_ids, const GpuPages& to, const int64_t* to_ids, size_t count,
            GpuStream stream);

  bool has_kernels() const { return kernels_->loaded(); }
  GpuStream stream(PartDirection direction) const { return lanes_[size_t(direction)].stream.get(); }
  std::shared_ptr<SumCells> sums();
  PartCount count(PartDirection direction) const;
  uint64_t zeroed() const;  // pages
  std::map<std::string, uint64_t> fallbacks() const;

 private:
  static constexpr size_t kWidths = 3;
  struct Lane {
    OwnStream stream;
    mutable std::mutex mutex;  // held while a part is issued, not while it moves
    PartCount count;
    uint64_t zeroed = 0;
    std::map<std::string, uint64_t> fallbacks;
  };

  void launch_copies(Lane& lane, const GpuPages& pages, const int64_t* ids, const PartRange& part, GpuAddress slot,
                     PartDirection direction, GpuStream stream, SumCells::Held* sum);
  void put(const PartLabel& label, GpuAddress slot, GpuStream stream, const SumCells::Held* sum);
  void launch_sum(GpuAddress address, uint64_t nbytes, GpuStream stream, SumCells::Held& sum);
  void launch_zeros(const GpuPages& pages, const int64_t* ids, size_t count, uint32_t first_piece, uint32_t start,
                    GpuStream stream);
  void zero_by_driver(const GpuPages& pages, const int64_t* ids, size_t count, uint32_t first_piece, uint32_t start,
                      GpuStream stream);
  void launch_moves(Lane& lane, const GpuPages& from, const int64_t* from_ids, const GpuPages& to, const int64_t* to_ids,
                    size_t count, GpuStream stream);
  void copy_by_driver(Lane& lane, const GpuPages& pages, const int64_t* ids, const PartRange& part, GpuAddress slot,
                      PartDirection direction, GpuStream stream);
  void move_by_driver(Lane& lane, const PageLayout& from, const int64_t* from_ids, const PageLayout& to, const int64_t* to_ids,
                      size_t count, GpuStream stream);
  void issue_list(Lane& lane, const CopyDescriptors& list, GpuStream stream);
  unsigned blocks_for(uint64_t words, unsigned words_a_thread) const;
  void launch(GpuFunction kernel, unsigned blocks, unsigned threads, GpuStream stream, void* parameters);

  const std::shared_ptr<GpuDevice> device_;
  const GpuDriver& driver_;
  const std::shared_ptr<const GpuKernels> kernels_;
  const PartTuning tuning_;
  std::array<GpuFunction, kWidths> copies_{}, moves_{}, zeros_{};
  GpuFunction summed_copy_ = nullptr, sum_ = nullptr, put_header_ = nullptr;
  std::array<Lane, 2> lanes_;
  std::atomic<bool> batch_refused_{false};  // for good
  std::mutex sums_mutex_;
  std::shared_ptr<SumCells> sums_;  // made when first used
};

}  // namespace kvferry
