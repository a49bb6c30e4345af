// The copy engine's path for machines without a GPU: threads and memcpy.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

// All functions: bounds were checked by the caller, regions do not overlap, 1 <= threads.

// The pages named by page_ids, one behind the other, are a virtual byte string; copies [byte_offset, byte_offset + nbytes) of it to dst.
void gather_pages(uint8_t* dst, const uint8_t* pool, const int64_t* page_ids, size_t page_bytes, size_t byte_offset,
                  size_t nbytes, unsigned threads);

// The reverse: src to that range of the virtual byte string.
void scatter_pages(uint8_t* pool, const int64_t* page_ids, size_t page_bytes, size_t byte_offset, const uint8_t* src,
                   size_t nbytes, unsigned threads);

// Copies sizes[i] bytes from src[i] to dst[i], for n items.
void copy_list(const int64_t* dst, const int64_t* src, const int64_t* sizes, size_t n, unsigned threads);

// In each of `fragments` fragments, `stride` bytes apart from `first`: zeroes bytes [start, fragment_bytes).
void zero_ranges(uint8_t* first, size_t fragments, size_t stride, size_t fragment_bytes, size_t start);

}  // namespace kvferry
