// Kernels over parts. Every word finds its own address: fragments may be of any size, and lanes of a warp stay busy.
#pragma once

#include "cuda/kernels/part_kernels.h"

namespace {

using namespace kvferry;

// Null: the page has no such word; where all pages are whole they have every one.
template <class Word, bool kWhole>
__device__ char* page_word(const PartCopy& copy, uint32_t word) {
  const uint32_t at = copy.first + word;
  const uint32_t row = copy.row_words.divide(at);
  const uint32_t in_row = at - row * copy.row_words.divisor;
  const uint32_t fragment = copy.fragment_words.divide(in_row);
  const uint32_t inside = in_row - fragment * copy.fragment_words.divisor;
  const uint32_t tensor = copy.pieces.divide(fragment);
  const uint32_t piece = fragment - tensor * copy.pieces.divisor;
  uint32_t at_id = row;
  if constexpr (!kWhole) {
    if (row == copy.last_row && piece * copy.fragment_words.divisor + inside >= copy.last_words) return nullptr;
    if (copy.in_blocks) at_id = row * copy.pieces.divisor + piece;
    if (copy.page_ids[at_id] == kNotHere) return nullptr;
  }
  return reinterpret_cast<char*>(copy.bases[tensor]) + int64_t(copy.page_ids[at_id]) * copy.strides[tensor] +
         int64_t(piece) * copy.piece_stride + uint64_t(inside) * sizeof(Word);
}

// The block's sum goes to the cell; the last block of the last launch hands the cell's on, and leaves it as it was.
__device__ void add_to_cell(const SumInto& into, uint64_t sum) {
  __shared__ unsigned long long total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  for (uint32_t lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_down_sync(0xFFFFFFFF, sum, lanes);
  if (threadIdx.x % 32 == 0) atomicAdd(&total, static_cast<unsigned long long>(sum));
  __syncthreads();
  if (threadIdx.x != 0) return;
  atomicAdd(&into.cell->sum, total);
  __threadfence();
  if (atomicAdd(&into.cell->blocks, 1u) + 1 != into.blocks) return;
  __threadfence();
  *into.result = atomicExch(&into.cell->sum, 0ull);
  into.cell->blocks = 0;
}

template <class Word, bool kSummed, bool kWhole>
__device__ uint64_t copy_part_words(const PartCopy& copy) {
  const uint32_t step = gridDim.x * blockDim.x * kPartLoads;
  uint64_t sum = 0;
  for (uint32_t begin = blockIdx.x * blockDim.x * kPartLoads + threadIdx.x; begin < copy.words; begin += step) {
    Word words[kPartLoads];
    char* on_page[kPartLoads];
#pragma unroll
    for (uint32_t i = 0; i < kPartLoads; ++i) {
      const uint32_t word = begin + i * blockDim.x;
      if (word >= copy.words) continue;
      on_page[i] = page_word<Word, kWhole>(copy, word);
      const char* from = copy.to_slot ? on_page[i] : reinterpret_cast<const char*>(copy.slot) + uint64_t(word) * sizeof(Word);
      if (kWhole || from != nullptr) words[i] = __ldcs(reinterpret_cast<const Word*>(from));
      else words[i] = Word{};
    }
#pragma unroll
    for (uint32_t i = 0; i < kPartLoads; ++i) {
      const uint32_t word = begin + i * blockDim.x;
      if (word >= copy.words) continue;
      char* to = copy.to_slot ? reinterpret_cast<char*>(copy.slot) + uint64_t(word) * sizeof(Word) : on_page[i];
      if (kWhole || to != nullptr) *reinterpret_cast<Word*>(to) = words[i];
      if constexpr (kSummed) {
        const uint64_t index = copy.first_sum + uint64_t(word) * 2;
        sum += mixed_word(uint64_t(words[i].y) << 32 | words[i].x, index);
        sum += mixed_word(uint64_t(words[i].w) << 32 | words[i].z, index + 1);
      }
    }
  }
  return sum;
}

// One branch a launch: whole pages are found as fast as if there were no others.
template <class Word, bool kSummed>
__device__ uint64_t copy_part(const PartCopy& copy) {
  if (copy.in_blocks || copy.last_row != kNotHere) return copy_part_words<Word, kSummed, false>(copy);
  return copy_part_words<Word, kSummed, true>(copy);
}

template <class Word>
__device__ void move_words(const RowMove& move) {
  const uint32_t step = gridDim.x * blockDim.x * kPartLoads;
  for (uint32_t begin = blockIdx.x * blockDim.x * kPartLoads + threadIdx.x; begin < move.words; begin += step) {
    Word words[kPartLoads];
    char* to[kPartLoads];
#pragma unroll
    for (uint32_t i = 0; i < kPartLoads; ++i) {
      const uint32_t word = begin + i * blockDim.x;
      if (word >= move.words) continue;
      const uint32_t row = move.row_words.divide(word), in_row = word - row * move.row_words.divisor;
      const uint32_t fragment = move.fragment_words.divide(in_row);
      const uint64_t inside = uint64_t(in_row - fragment * move.fragment_words.divisor) * sizeof(Word);
      const uint32_t tensor = move.pieces.divide(fragment), piece = fragment - tensor * move.pieces.divisor;
      const char* from = reinterpret_cast<const char*>(move.from_bases[tensor]) +
                         int64_t(move.from_ids[row]) * move.from_strides[tensor] +
                         int64_t(piece) * move.from_piece_stride + inside;
      to[i] = reinterpret_cast<char*>(move.to_bases[tensor]) + int64_t(move.to_ids[row]) * move.to_strides[tensor] +
              int64_t(piece) * move.to_piece_stride + inside;
      words[i] = __ldcs(reinterpret_cast<const Word*>(from));
    }
#pragma unroll
    for (uint32_t i = 0; i < kPartLoads; ++i) {
      if (begin + i * blockDim.x < move.words) *reinterpret_cast<Word*>(to[i]) = words[i];
    }
  }
}

__device__ void sum_part_words(const PartSum& part) {
  const uint64_t words = (part.nbytes + 7) / 8, step = uint64_t(gridDim.x) * blockDim.x;
  const unsigned char* bytes = reinterpret_cast<const unsigned char*>(part.address);
  uint64_t sum = 0;
  for (uint64_t i = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    uint64_t word = 0;
    const uint32_t count = part.nbytes - i * 8 < 8 ? uint32_t(part.nbytes - i * 8) : 8;
    if (count == 8 && part.address % 8 == 0) {
      word = *reinterpret_cast<const uint64_t*>(bytes + i * 8);
    } else {
      for (uint32_t b = 0; b < count; ++b) word |= uint64_t(bytes[i * 8 + b]) << (8 * b);
    }
    sum += mixed_word(word, i);
  }
  add_to_cell(part.sum, sum);
}

__device__ void put_header_bytes(const PutHeader& header) {
  constexpr uint32_t kLast = sizeof(uint64_t);
  const uint32_t i = threadIdx.x;
  if (i >= header.size) return;
  uint8_t byte = header.bytes[i];
  if (header.sum != nullptr && i + kLast >= header.size) {
    uint64_t last = 0;
    for (uint32_t b = 0; b < kLast; ++b) last |= uint64_t(header.bytes[header.size - kLast + b]) << (8 * b);
    last += *static_cast<const volatile unsigned long long*>(header.sum);
    byte = uint8_t(last >> (8 * (i + kLast - header.size)));
  }
  reinterpret_cast<uint8_t*>(header.address)[i] = byte;
}

template <class Word>
__device__ void zero_words(const ZeroPages& zero) {
  const uint32_t step = gridDim.x * blockDim.x;
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < zero.total; i += step) {
    const uint32_t page = zero.page_words.divide(i), in_page = i - page * zero.page_words.divisor;
    const uint32_t tensor = zero.tensor_words.divide(in_page), in_tensor = in_page - tensor * zero.tensor_words.divisor;
    const uint32_t piece = zero.words.divide(in_tensor), word = in_tensor - piece * zero.words.divisor;
    char* fragment = reinterpret_cast<char*>(zero.bases[tensor]) + int64_t(zero.page_ids[page]) * zero.strides[tensor] +
                     int64_t(zero.first_piece + piece) * zero.piece_stride;
    *reinterpret_cast<Word*>(fragment + uint64_t(zero.first + word) * sizeof(Word)) = Word{};
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    copy_part_16(const __grid_constant__ kvferry::PartCopy copy) {
  copy_part<uint4, false>(copy);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    copy_part_4(const __grid_constant__ kvferry::PartCopy copy) {
  copy_part<uint32_t, false>(copy);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    copy_part_1(const __grid_constant__ kvferry::PartCopy copy) {
  copy_part<uint8_t, false>(copy);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    copy_part_summed_16(const __grid_constant__ kvferry::PartCopy copy) {
  add_to_cell(copy.sum, copy_part<uint4, true>(copy));
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    move_rows_16(const __grid_constant__ kvferry::RowMove move) {
  move_words<uint4>(move);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    move_rows_4(const __grid_constant__ kvferry::RowMove move) {
  move_words<uint32_t>(move);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    move_rows_1(const __grid_constant__ kvferry::RowMove move) {
  move_words<uint8_t>(move);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    sum_part(const __grid_constant__ kvferry::PartSum part) {
  sum_part_words(part);
}

extern "C" __global__ void __launch_bounds__(kvferry::kMaxHeaderBytes)
    put_header(const __grid_constant__ kvferry::PutHeader header) {
  put_header_bytes(header);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    zero_pages_16(const __grid_constant__ kvferry::ZeroPages zero) {
  zero_words<uint4>(zero);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    zero_pages_4(const __grid_constant__ kvferry::ZeroPages zero) {
  zero_words<uint32_t>(zero);
}

extern "C" __global__ void __launch_bounds__(kvferry::kPartThreads)
    zero_pages_1(const __grid_constant__ kvferry::ZeroPages zero) {
  zero_words<uint8_t>(zero);
}
