// Copies pages between a GPU's memory and rows of host memory, asynchronously, by one of five strategies.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/apart.h"
#include "cuda/backlog.h"
#include "cuda/device.h"
#include "cuda/kernels/copy_kernels.h"
#include "cuda/pages.h"
#include "cuda/probe.h"

namespace kvferry {

enum class CopyStrategy : int {
  kBatch = 0,   // fragments in one call of the driver, moved by copy engines
  kLoop = 1,    // a call a fragment
  kKernel = 2,  // a kernel that reads or writes host memory over the bus: takes some of the multiprocessors' time
  kStaged = 3,  // fragments to and from a buffer on the GPU by a kernel, rows over the bus by copy engines
  kPitched = 4,  // a page's fragments that lie evenly spaced in one go of a copy engine: takes no multiprocessor
};
constexpr size_t kStrategies = 5;

enum class CopyDirection { kToHost, kToDevice };

struct CopyTuning {
  size_t buffer_bytes = size_t(16) << 20;  // of staging, allocated when first used
  unsigned buffers = 4;                    // a direction
  // For copies that fill more than those, or are behind others, and kept from then on. Kernels of an engine's process and
  // this one's have the GPU by turns, of some 4 ms: all that the bus moves until the next turn has to lie in buffers.
  // Each is memory that an engine beside has not. A daemon's restores have more (daemon/memory/gpu_ranks.py).
  unsigned deep_buffers = 8;
  // Of what goes over the bus at a time for copies behind others, while kernels beside them hold every multiprocessor (MPS):
  // at 0.97 of the bus in such pieces products are slowed by 1.2 %, at 0.99 in longer ones by 1.8 %.
  size_t deep_piece_bytes = size_t(192) << 10;
  size_t small_bytes = size_t(2) << 20;  // of the first part that is gathered, the last that is scattered
  unsigned growth = 4;                   // of the parts between
  // Of gathers and scatters within the GPU, a warp each: room is found for them. As many as fit beside a product slow it by up
  // to 5 %, since those that run in its midst run for long; this many by 1.4 % at most (bench/results/gpu_copies.txt).
  unsigned staging_blocks = 4096;
  unsigned bus_blocks = 4;                 // of the kernel strategy, which keeps its multiprocessors for as long as it runs
  size_t batch_descriptors = 4096;         // in one call of the driver
  unsigned batch_flags = 0;
  // Of the pages of a pitched copy that follows another: they go by fragments on a second stream, which fills the gaps that
  // a copy engine leaves between pages, and takes this thread 0.3 us a fragment: fewer where that is too long. 0: none.
  // Only a copy behind another one does so: an idle GPU's copies are staged, and a first one goes whole.
  unsigned apart_percent = 50;
  // Of one pitched copy at most. A copy engine at 0.96 of the bus slows products by 2 to 5 %, at 0.84 by 1 % less or more
  // (bench/results/gpu_copies.txt).
  size_t pitched_bytes = size_t(768) << 10;
};

// Which of the kernels moves what is aligned like this: the widest that can.
size_t kernel_width(uint64_t alignment);

// What moves the bytes, and the stream on which that ends.
struct Issued {
  CopyStrategy strategy;
  GpuStream end;
};

struct StrategyCount {
  uint64_t copies = 0, descriptors = 0, bytes = 0;
};

// Bounds were checked by the caller: ids lie in the layout and in the rows, and no destination is named twice. `count` is of
// rows; in blocks each has a page's ids, of which kNoBlock, to the device only, is left out.
class GpuCopyEngine {
 public:
  GpuCopyEngine(std::shared_ptr<GpuDevice> device, std::shared_ptr<const GpuKernels> kernels, const CopyTuning& tuning);
  ~GpuCopyEngine();
  GpuCopyEngine(const GpuCopyEngine&) = delete;
  GpuCopyEngine& operator=(const GpuCopyEngine&) = delete;

  // Page i of ids <-> row row_ids[i], ordered on `stream`, never waiting for the GPU; null: in no order with what is not done
  // yet, on whatever stream, so that copies which follow each other overlap. To the device: rows must be written already and
  // no copy may be writing to them, since they may be read before the stream gets there. The strategy is not the one asked
  // for where that cannot be.
  Issued copy_pages(const GpuPages& pages, const int64_t* ids, const PageRows& rows, const int64_t* row_ids, size_t count,
                    CopyDirection direction, GpuStream stream, CopyStrategy strategy);

  // Of copies of pages in one direction.
  Backlog& backlog(CopyDirection direction) { return lanes_[size_t(direction)].backlog; }

  // The general form: batch, loop or kernel. No destination overlaps another item.
  CopyStrategy copy_list(const CopyDescriptors& list, CopyDirection direction, GpuStream stream, CopyStrategy strategy);

  bool can(CopyStrategy strategy) const;

  // Whether a kernel would wait now, since others hold every multiprocessor: so would a staged copy.
  bool busy();
  GpuStream stream() const { return stream_; }
  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  std::array<StrategyCount, kStrategies> counts() const;
  std::map<std::string, uint64_t> fallbacks() const;

 private:
  struct Buffer {
    GpuAddress address = 0;
    GpuEvent filled = nullptr, emptied = nullptr;
  };
  struct Ring {
    std::vector<Buffer> buffers;
    size_t next = 0;
    bool refused = false;  // memory for more: not asked for again
  };
  // What one direction stages in: a spill and a restore never wait for each other.
  struct Lane {
    GpuStream stream = nullptr;  // of its kernels; before others when multiprocessors become free
    GpuEvent begun = nullptr;
    GpuStream apart = nullptr;  // of what a pitched copy does not move
    GpuEvent ended = nullptr;   // of the last pitched copy
    bool pitched = false;       // there is one
    ApartShare share;
    Backlog backlog;
    Ring ring;
    // Around a copy, on its stream: its time. Of another copy only when this one's is known.
    GpuEvent from = nullptr, to = nullptr;
    bool timing = false;
    CopyStrategy timed = CopyStrategy::kStaged;  // what moved it in the end
    double timed_bytes = 0, best_rate = 0;  // bytes a millisecond
  };
  struct Pages {  // of one copy
    const GpuPages& pages;
    const int64_t* ids;
    PageRows rows;
    const int64_t* row_ids;
    size_t count;
    CopyDirection direction;
    bool alone;  // in no order with others

    const int64_t* ids_of(size_t page) const { return ids + page * pages.layout().ids_a_page(); }
  };

  bool prepare(Ring& ring, unsigned count);
  void release(Ring& ring) const;
  void learn_waits();
  CopyStrategy usable(CopyStrategy strategy, const Pages& copy, GpuAddress* rows_on_device);
  void fall_back(const char* reason);
  void count(CopyStrategy strategy, uint64_t descriptors, uint64_t bytes);
  bool run_staged(const Pages& copy, GpuStream* stream);
  bool run_pitched(const Pages& copy, GpuStream stream, size_t* descriptors);
  bool issue_pitched(const Pages& copy, size_t apart, GpuStream stream, size_t* descriptors);
  void add_runs(const Pages& copy, size_t page);
  bool issue_runs(GpuStream stream);
  size_t pages_apart(const Pages& copy, const Lane& lane) const;
  bool find_rows(const Pages& copy, GpuAddress* rows_on_device) const;
  bool run_kernel(const Pages& copy, GpuAddress rows_on_device, GpuStream stream);
  size_t run_list_kernel(const CopyDescriptors& list, CopyDirection direction, GpuStream stream);
  size_t run_fragments(const Pages& copy, GpuStream stream, CopyStrategy* strategy);
  void add_fragments(const Pages& copy, size_t page);
  CopyStrategy issue(const CopyDescriptors& list, CopyDirection direction, GpuStream stream, bool batch,
                     size_t done = 0);
  bool launch(const Pages& copy, const PageChunk& chunk, GpuAddress rows, bool rows_are_staged,
              GpuStream stream);
  bool launch_tiles(GpuFunction kernel, uint64_t tiles, bool on_bus, GpuStream stream, void* parameters);

  const std::shared_ptr<GpuDevice> device_;
  const GpuDriver& driver_;
  const CopyTuning tuning_;
  GpuStream stream_ = nullptr;
  const std::shared_ptr<const GpuKernels> module_;  // without its kernels `batch` moves everything
  std::array<GpuFunction, 3> kernels_{}, list_kernels_{};  // that move 16, 4, 1 bytes at a time
  std::array<Lane, 2> lanes_;             // by direction
  std::unique_ptr<BusyProbe> probe_;
  mutable std::mutex mutex_;              // held while a copy is issued, not while it runs
  bool batch_refused_ = false, pitched_batch_refused_ = false;  // for good
  CopyDescriptors scratch_;
  std::vector<PitchedOperation> runs_;
  mutable std::mutex counts_mutex_;  // of the two below, so that who reads them waits for no device
  std::array<StrategyCount, kStrategies> counts_{};
  std::map<std::string, uint64_t> fallbacks_;
};

}  // namespace kvferry
