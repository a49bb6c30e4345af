// The parameters of the kernels that copy parts and rows, sum parts up, and zero pages, as the GPU reads them: 4 KiB at most a launch.
#pragma once

#include <cstdint>

#include "copies/part_sum.h"
#include "cuda/kernels/copy_kernels.h"

namespace kvferry {

// Divides numbers below 2^31.
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 0, shift = 0;

  FastDivisor() = default;
  explicit FastDivisor(uint32_t of) : divisor(of) {
    while (shift < 31 && (uint64_t(1) << shift) < of) ++shift;
    if (of == 1) return;
    multiplier = uint32_t(((uint64_t(1) << (31 + shift)) + of - 1) / of);
    --shift;
  }

  KVFERRY_ON_BOTH uint32_t divide(uint32_t number) const {
    return divisor == 1 ? number : uint32_t(uint64_t(number) * multiplier >> 32) >> shift;
  }
};
constexpr uint32_t kWordsPerLaunch = uint32_t(1) << 30;  // with what threads reach beyond them: below 2^31

// What the launches of one sum add to; zero before the first of them, and again after the last.
struct SumCell {
  unsigned long long sum;
  unsigned blocks;  // that have ended
  unsigned unused;
};

// A launch whose `blocks` include those of the launches before it. The last block of all writes the sum to *result.
struct SumInto {
  SumCell* cell;
  unsigned long long* result;  // host memory
  uint32_t blocks;             // of this and earlier launches; 0: there are more launches to come
};

constexpr uint32_t kPagesPerPart = 900;
static_assert(kPagesPerPart >= kMostBlocksAPage);

// Words first .. first + words of the rows of `page_ids` laid end to end <-> slot. Bases and strides as in PageLayout; so are
// ids in blocks, with kNotHere for kNoBlock.
struct PartCopy {
  const uint64_t* bases;   // on the device, one a tensor
  const int64_t* strides;  // on the device, one a tensor
  int64_t piece_stride;
  uint64_t slot;        // where word `first` is
  uint64_t first_sum;   // index of word `first` in the part, in units of 8 bytes
  uint32_t first, words;
  FastDivisor row_words, fragment_words, pieces;
  uint32_t to_slot;     // 1: gather; 0: scatter
  uint32_t in_blocks;
  uint32_t last_row;    // of which each tensor has last_words, and zeros behind them; kNotHere: of none
  uint32_t last_words;
  SumInto sum;          // of copy_part_summed_16 only
  uint32_t page_ids[kPagesPerPart];
};

constexpr uint32_t kMaxHeaderBytes = 64;

// What stands before a part in its slot. To its last 8 bytes, little endian, the sum is added where there is one.
struct PutHeader {
  uint64_t address;
  const unsigned long long* sum;  // host memory, written by launches before this one; null: none
  uint32_t size;
  uint8_t bytes[kMaxHeaderBytes];
};

// Sums up bytes that lie one behind the other, and are the whole part.
struct PartSum {
  uint64_t address;
  uint64_t nbytes;
  SumInto sum;
};

// Of every page named, in fragments of pieces [first_piece, first_piece + pieces): words [first, first + words) become zero.
struct ZeroPages {
  const uint64_t* bases;
  const int64_t* strides;
  int64_t piece_stride;
  uint32_t first_piece;
  uint32_t first;
  uint32_t total;  // words of all of them
  FastDivisor page_words, tensor_words, words;  // those to be zeroed of a page, of a tensor, of a fragment
  uint32_t page_ids[kPagesPerPart];
};

constexpr uint32_t kRowsPerMove = 440;

// The rows of `from_ids` of some pages into those of `to_ids` of others, both of so many tensors and pieces of equal fragments.
struct RowMove {
  const uint64_t* from_bases;
  const uint64_t* to_bases;
  const int64_t* from_strides;
  const int64_t* to_strides;
  int64_t from_piece_stride, to_piece_stride;
  uint32_t words;  // of all of them
  FastDivisor row_words, fragment_words, pieces;
  uint32_t from_ids[kRowsPerMove], to_ids[kRowsPerMove];
};

constexpr uint32_t kPartThreads = 256;  // a block, at most
constexpr uint32_t kPartLoads = 4;      // a thread has under way at a time

}  // namespace kvferry
