// Parts of pages in host memory, whatever their layout: threads and memcpy.
#pragma once

#include <cstddef>
#include <cstdint>

#include "copies/page_layout.h"

namespace kvferry {

// All functions: bounds were checked by the caller, slot and pages do not overlap, 1 <= threads. A layout's bases are addresses.
// What a page has not (PartRange, kNoBlock) is gathered as zeros, and is left out by a scatter; a sum is that of the slot.

void gather_part(uint8_t* slot, const PageLayout& layout, const int64_t* ids, const PartRange& part, unsigned threads);
void scatter_part(const PageLayout& layout, const int64_t* ids, const PartRange& part, const uint8_t* slot, unsigned threads);

// The same, and what part_sum gives for the part.
uint64_t gather_part_summed(uint8_t* slot, const PageLayout& layout, const int64_t* ids, const PartRange& part,
                            unsigned threads);
uint64_t scatter_part_summed(const PageLayout& layout, const int64_t* ids, const PartRange& part, const uint8_t* slot,
                             unsigned threads);

// In the fragments of pieces [first_piece, pieces) of a page that is not in blocks: zeroes bytes [start, fragment_bytes).
void zero_page(const PageLayout& layout, int64_t page, uint32_t first_piece, uint32_t start);

}  // namespace kvferry
