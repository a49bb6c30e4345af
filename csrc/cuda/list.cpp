// Lists of fragments by a kernel that reads or writes pinned host memory, and the launches of all copy kernels.
#include <algorithm>

#include "cuda/engine.h"

namespace kvferry {
namespace {

constexpr uint64_t kWords[] = {16, 4, 1};
constexpr unsigned kStagingThreads = 32, kBusThreads = kCopyThreads;  // a block
constexpr size_t kMostBytes = size_t(1) << 30;  // of a fragment of a launch

// The fragments of one launch, as they are added.
struct Chunk {
  ListCopy copy{};
  uint64_t alignment = 0;

  bool full() const { return copy.fragments == kFragmentsPerLaunch; }
  void add(uint64_t target, uint64_t source, uint32_t bytes) {
    const uint32_t i = copy.fragments++;
    copy.targets[i] = target;
    copy.sources[i] = source;
    copy.sizes[i] = bytes;
    copy.first_tiles[i] = copy.tiles;
    copy.tiles += (bytes + kTileBytes - 1) / kTileBytes;
    alignment |= target | source | bytes;
  }
  void clear() { alignment = copy.fragments = copy.tiles = 0; }
};

}  // namespace

size_t kernel_width(uint64_t alignment) {
  size_t width = 0;
  while (alignment % kWords[width] != 0) ++width;
  return width;
}

// False: the driver refused it; one that does not support it is not asked again.
bool GpuCopyEngine::launch_tiles(GpuFunction kernel, uint64_t tiles, bool on_bus, GpuStream stream, void* parameters) {
  const unsigned threads = on_bus ? kBusThreads : kStagingThreads;
  const uint64_t useful = (tiles * 32 + threads - 1) / threads;
  const uint64_t blocks = on_bus ? tuning_.bus_blocks : tuning_.staging_blocks;
  void* arguments[] = {parameters};
  const GpuStatus status = driver_.launch(kernel, unsigned(std::min<uint64_t>(blocks, useful)), 1, 1, threads, 1, 1, 0, stream,
                                          arguments, nullptr);
  if (status == kGpuNotSupported || status == kGpuInvalidValue) {
    fall_back("the driver refused a kernel");
    if (status == kGpuNotSupported) module_->refuse();
    return false;
  }
  device_->check(status, "kernel");
  return true;
}

// How many of the list's fragments it moves: the rest begins where one is not pinned, or at a launch that the driver refused.
size_t GpuCopyEngine::run_list_kernel(const CopyDescriptors& list, CopyDirection direction, GpuStream stream) {
  if (!can(CopyStrategy::kKernel)) {
    fall_back("the driver takes no kernels");
    return 0;
  }
  const bool to_host = direction == CopyDirection::kToHost;
  Chunk chunk;
  size_t launched = 0;
  const auto launch_chunk = [&] {
    const GpuFunction kernel = list_kernels_[kernel_width(chunk.alignment)];
    return launch_tiles(kernel, chunk.copy.tiles, true, stream, &chunk.copy);
  };
  for (size_t i = 0; i < list.size(); ++i) {
    const size_t bytes = list.sizes[i];
    const GpuAddress seen = device_->seen_at(to_host ? list.dst[i] : list.src[i], bytes);
    if (seen == 0) {
      fall_back("host memory is not pinned");
      return launched;
    }
    for (size_t done = 0; done < bytes; done += kMostBytes) {
      if (chunk.full()) {
        if (!launch_chunk()) return launched;
        launched = i;
        chunk.clear();
      }
      const uint64_t target = to_host ? seen : list.dst[i], source = to_host ? list.src[i] : seen;
      chunk.add(target + done, source + done, uint32_t(std::min(kMostBytes, bytes - done)));
    }
  }
  if (chunk.copy.fragments > 0 && !launch_chunk()) return launched;
  return list.size();
}

}  // namespace kvferry
