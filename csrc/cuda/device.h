// What lives on a GPU, and ends with its last user: a context, memory, layouts, the ends of copies.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/driver.h"
#include "cuda/pages.h"

namespace kvferry {

// A driver's context of one device, retained as long as this lives, and made current by Use.
class GpuDevice {
 public:
  GpuDevice(std::shared_ptr<const GpuDriver> driver, int ordinal);
  ~GpuDevice();
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  // Contexts that this process makes from now on have no memory for kernels' stacks, which is a KiB for each thread that fits
  // on the device: half of a context. Ours need none; for another's the driver makes room when it is launched, if it knows
  // how much: a kernel that recurses has less than it would have had.
  static void spare_stacks();

  class Use {
   public:
    explicit Use(const GpuDevice& device);
    ~Use();
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    const GpuDriver& driver_;
  };

  const GpuDriver& driver() const { return *driver_; }
  int number() const { return device_; }  // the driver's
  GpuUuid uuid() const;
  // Whether CUDA's MPS runs this process's kernels beside other processes'; without it they have the GPU by turns.
  bool mps() const;
  std::pair<size_t, size_t> memory_info() const;  // bytes free, and all
  void check(GpuStatus status, const char* what) const { check_gpu(*driver_, status, what); }

  // Where the device sees these bytes of host memory, all of which are pinned; 0: they are not. In use of this device.
  GpuAddress seen_at(uint64_t host, size_t bytes) const;
  // What is pinned through this is known to be so, and the driver is not asked.
  void note_pinned(uint64_t host, size_t bytes);
  void note_unpinned(uint64_t host);

 private:
  struct Block {
    size_t bytes;
    GpuAddress seen_at;
  };
  std::shared_ptr<const GpuDriver> driver_;
  int device_ = 0;
  GpuContext context_ = nullptr;
  mutable std::mutex pinned_mutex_;
  std::map<uint64_t, Block> pinned_;  // by its first byte
};

// Memory of the device, a plain allocation: it can be shared with other processes.
class GpuMemory {
 public:
  // What is allocated is a multiple of `block` bytes.
  GpuMemory(std::shared_ptr<GpuDevice> device, size_t bytes, size_t block = 1);
  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  // It stays until this process ends: others may have it mapped, under whom it must not be freed. Idempotent.
  void leave();

  GpuAddress address() const { return address_; }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<GpuDevice> device_;
  GpuAddress address_ = 0;
  size_t size_;
  std::atomic<bool> left_{false};
};

// Host memory that the device reads and writes at the bus's speed, as long as this lives.
class PinnedRange {
 public:
  PinnedRange(std::shared_ptr<GpuDevice> device, void* address, size_t bytes);
  ~PinnedRange();
  PinnedRange(const PinnedRange&) = delete;
  PinnedRange& operator=(const PinnedRange&) = delete;

 private:
  std::shared_ptr<GpuDevice> device_;
  void* address_;
};

// A layout with its bases and strides on the GPU as well, where the kernels read them.
class GpuPages {
 public:
  // Written on a stream of its own, behind no other copy, and waited for.
  GpuPages(std::shared_ptr<GpuDevice> device, PageLayout layout);
  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  const PageLayout& layout() const { return layout_; }
  const std::vector<PitchedRun>& runs() const { return runs_; }
  GpuAddress bases() const { return table_.address(); }
  GpuAddress strides() const { return table_.address() + layout_.bases.size() * sizeof(uint64_t); }

 private:
  std::shared_ptr<GpuDevice> device_;
  PageLayout layout_;
  std::vector<PitchedRun> runs_;
  GpuMemory table_;  // freed only when no kernel reads it any more: the driver waits
};

// The driver's compiled kernels. None, where it takes none, or has refused to run one.
class GpuKernels {
 public:
  explicit GpuKernels(std::shared_ptr<GpuDevice> device);
  ~GpuKernels();
  GpuKernels(const GpuKernels&) = delete;
  GpuKernels& operator=(const GpuKernels&) = delete;

  bool loaded() const { return module_ != nullptr && !refused_; }
  void refuse() const { refused_ = true; }  // for good
  GpuFunction get(const char* name) const;

 private:
  std::shared_ptr<GpuDevice> device_;
  GpuModule module_ = nullptr;
  mutable std::atomic<bool> refused_{false};
};

// Waits for what was issued to `stream`, if it can; for the clean-up after an error.
void drain_stream(const GpuDevice& device, GpuStream stream);

// A stream of its own, that does not wait for the default ones.
class OwnStream {
 public:
  enum class Priority { kLeast, kGreatest };  // greatest: before others when multiprocessors become free
  OwnStream(std::shared_ptr<GpuDevice> device, Priority priority);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  GpuStream get() const { return stream_; }
  void drain() const { drain_stream(*device_, stream_); }

 private:
  std::shared_ptr<GpuDevice> device_;
  GpuStream stream_ = nullptr;
};

// The end of a copy, as an event of its stream.
class GpuCopy {
 public:
  explicit GpuCopy(std::shared_ptr<GpuDevice> device);
  ~GpuCopy();
  GpuCopy(const GpuCopy&) = delete;
  GpuCopy& operator=(const GpuCopy&) = delete;

  void record(GpuStream stream);
  bool done() const;
  void wait() const;
  // False: it is not done after so long.
  bool wait_for(std::chrono::nanoseconds time) const;
  // What is issued to `stream` from now on runs after the copy.
  void hold(GpuStream stream) const;

 private:
  std::shared_ptr<GpuDevice> device_;
  GpuEvent event_ = nullptr;
};

}  // namespace kvferry
