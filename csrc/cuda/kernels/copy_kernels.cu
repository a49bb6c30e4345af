// The source of generated/kernels_ptx.cpp (made by make.sh): gathers fragments into rows, scatters rows into fragments,
// copies lists of fragments.
#include "cuda/kernels/copy_kernels.h"

namespace {

using namespace kvferry;

constexpr uint32_t kWarp = 32;

// A warp's copy of bytes [begin, end). Loads come first, so that many are under way at a time: a few blocks have to fill
// PCIe, or move a page through HBM before a matrix product misses their multiprocessors.
template <class Word>
__device__ __forceinline__ void copy_tile(const char* from, char* to, uint32_t begin, uint32_t end, uint32_t lane) {
  constexpr uint32_t kLoads = kTileBytes / kWarp / sizeof(Word) > 4 ? 4 : kTileBytes / kWarp / sizeof(Word);
  constexpr uint32_t kStep = kWarp * sizeof(Word);
  for (uint32_t at = begin + lane * sizeof(Word); at < end; at += kLoads * kStep) {
    Word words[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      if (at + i * kStep < end) words[i] = __ldcs(reinterpret_cast<const Word*>(from + at + i * kStep));
    }
#pragma unroll
    for (uint32_t i = 0; i < kLoads; ++i) {
      if (at + i * kStep < end) *reinterpret_cast<Word*>(to + at + i * kStep) = words[i];
    }
  }
}

// Each warp takes tile after tile of up to kTileBytes.
template <class Word>
__device__ void copy_pages(const PageCopy& copy) {
  const uint32_t tiles_a_fragment = (copy.fragment_bytes + kTileBytes - 1) / kTileBytes;
  const uint32_t tiles_a_page = tiles_a_fragment * copy.fragments;
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warps = gridDim.x * (blockDim.x / kWarp);
  const uint64_t tiles = uint64_t(tiles_a_page) * copy.pages;
  for (uint64_t tile = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp; tile < tiles; tile += warps) {
    const uint32_t page = uint32_t(tile / tiles_a_page);
    const uint32_t in_page = uint32_t(tile % tiles_a_page);
    const uint32_t fragment = copy.first_fragment + in_page / tiles_a_fragment;
    const uint32_t begin = in_page % tiles_a_fragment * kTileBytes;
    const uint32_t tensor = fragment / copy.pieces, piece = fragment % copy.pieces;
    const uint32_t id = copy.page_ids[copy.in_blocks ? page * copy.pieces + piece : page];
    if (id == kNotHere) continue;
    const uint64_t on_device = copy.bases[tensor] + uint64_t(int64_t(id) * copy.strides[tensor] +
                                                             int64_t(piece) * copy.piece_stride);
    const uint64_t in_row = copy.rows + uint64_t(int64_t(copy.row_ids[page]) * copy.row_stride) +
                            uint64_t(fragment) * copy.fragment_bytes;
    const char* from = reinterpret_cast<const char*>(copy.to_rows ? on_device : in_row);
    char* to = reinterpret_cast<char*>(copy.to_rows ? in_row : on_device);
    copy_tile<Word>(from, to, begin, min(begin + kTileBytes, copy.fragment_bytes), lane);
  }
}

template <class Word>
__device__ void copy_list(const ListCopy& copy) {
  const uint32_t warps = gridDim.x * (blockDim.x / kWarp);
  for (uint32_t tile = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp; tile < copy.tiles; tile += warps) {
    uint32_t fragment = 0, behind = copy.fragments;  // the last one that begins at this tile or before it lies in between
    while (behind - fragment > 1) {
      const uint32_t middle = (fragment + behind) / 2;
      if (copy.first_tiles[middle] <= tile) fragment = middle;
      else behind = middle;
    }
    const uint32_t begin = (tile - copy.first_tiles[fragment]) * kTileBytes;
    const char* from = reinterpret_cast<const char*>(copy.sources[fragment]) + begin;
    char* to = reinterpret_cast<char*>(copy.targets[fragment]) + begin;
    copy_tile<Word>(from, to, 0, min(kTileBytes, copy.sizes[fragment] - begin), threadIdx.x % kWarp);
  }
}

}  // namespace

// Two blocks a multiprocessor, whatever they share it with: no more than 32 registers a thread.
extern "C" __global__ void __launch_bounds__(kvferry::kCopyThreads, 2)
    copy_pages_16(const __grid_constant__ kvferry::PageCopy copy) {
  copy_pages<uint4>(copy);
}

extern "C" __global__ void __launch_bounds__(kvferry::kCopyThreads, 2)
    copy_pages_4(const __grid_constant__ kvferry::PageCopy copy) {
  copy_pages<uint32_t>(copy);
}

extern "C" __global__ void __launch_bounds__(kvferry::kCopyThreads, 2)
    copy_pages_1(const __grid_constant__ kvferry::PageCopy copy) {
  copy_pages<uint8_t>(copy);
}

extern "C" __global__ void __launch_bounds__(kvferry::kCopyThreads, 2)
    copy_list_16(const __grid_constant__ kvferry::ListCopy copy) {
  copy_list<uint4>(copy);
}

extern "C" __global__ void __launch_bounds__(kvferry::kCopyThreads, 2)
    copy_list_4(const __grid_constant__ kvferry::ListCopy copy) {
  copy_list<uint32_t>(copy);
}

extern "C" __global__ void __launch_bounds__(kvferry::kCopyThreads, 2)
    copy_list_1(const __grid_constant__ kvferry::ListCopy copy) {
  copy_list<uint8_t>(copy);
}

#include "cuda/kernels/part_kernels.cuh"
