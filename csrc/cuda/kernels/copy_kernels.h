// The copy kernels' parameters, as the GPU reads them, and the kernels as PTX, which the driver compiles when it loads it.
#pragma once

#include <cstdint>

#include "copies/page_layout.h"

namespace kvferry {

constexpr uint32_t kNotHere = ~uint32_t(0);  // as an id: a block that is not there
static_assert(uint32_t(kNoBlock) == kNotHere);

// One launch takes its page ids as parameters (4 KiB at most): nothing has to be uploaded before it, or kept until it ends.
constexpr uint32_t kPagesPerLaunch = 480;
static_assert(kPagesPerLaunch >= kMostBlocksAPage);

// A page is `fragments` fragments of fragment_bytes bytes. Fragment f = tensor * pieces + piece of page p lies at
// bases[tensor] + p * strides[tensor] + piece * piece_stride; in row r it lies at rows + r * row_stride + f * fragment_bytes.
// In blocks there are `pieces` ids a page, each in the place of p for one piece, of which kNotHere is left out.
struct PageCopy {
  const uint64_t* bases;   // on the device, one a tensor
  const int64_t* strides;  // on the device, one a tensor: bytes from a page to the next
  int64_t piece_stride;
  uint64_t rows;       // address of row 0 as the device sees it
  int64_t row_stride;
  uint32_t pieces;          // a tensor
  uint32_t fragment_bytes;
  uint32_t first_fragment;  // of those copied of each page
  uint32_t fragments;       // copied of each page
  uint32_t pages;
  uint32_t to_rows;  // 1: fragments to rows; 0: rows to fragments
  uint32_t in_blocks;
  uint32_t page_ids[kPagesPerLaunch];
  uint32_t row_ids[kPagesPerLaunch];
};

// Fragments that lie anywhere: number i is the sizes[i] bytes from sources[i] to targets[i], as the device sees them.
constexpr uint32_t kFragmentsPerLaunch = 170;
struct ListCopy {
  uint32_t fragments;
  uint32_t tiles;                            // of all
  uint32_t first_tiles[kFragmentsPerLaunch];  // of each
  uint32_t sizes[kFragmentsPerLaunch];
  uint64_t targets[kFragmentsPerLaunch];
  uint64_t sources[kFragmentsPerLaunch];
};
static_assert(sizeof(PageCopy) <= 4096 && sizeof(ListCopy) <= 4096, "the parameters of a launch");

constexpr uint32_t kCopyThreads = 1024;  // a block
constexpr uint32_t kTileBytes = 2048;    // copied by a warp between two computations of an address

// Entry points copy_pages_16, _4 and _1, and copy_list_16, _4 and _1: bytes moved by one access, all addresses and sizes are multiples of it.
extern const char kCopyKernels[];

}  // namespace kvferry
