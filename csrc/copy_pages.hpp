// The CPU path of the copy engine: a move is first resolved into pieces, with every bound checked, then run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry {

struct Memory {
  unsigned char* data;
  std::size_t size;
};

struct Piece {
  unsigned char* dst;
  const unsigned char* src;
  std::size_t size;
};

// The pages named by `ids`, in order, form a virtual byte string; this is a range of it.
struct PageRange {
  std::vector<std::int64_t> ids;
  std::int64_t page_bytes;
  std::int64_t byte_offset;
  std::int64_t nbytes;
};

constexpr int kMaxThreads = 64;

// The resolvers throw std::out_of_range (IndexError) for what lies outside a memory or the page list and
// std::invalid_argument (ValueError) for what can be no argument at all; both name the field.
std::vector<Piece> resolve_gather(Memory dst, std::int64_t dst_offset, Memory pool, const PageRange& range);
std::vector<Piece> resolve_scatter(Memory pool, const PageRange& range, Memory src, std::int64_t src_offset);
std::vector<Piece> resolve_list(const std::vector<std::int64_t>& dst_addresses,
                                const std::vector<std::int64_t>& src_addresses,
                                const std::vector<std::int64_t>& sizes);

// The last bytes of each of several fragments of one page.
struct FragmentTails {
  std::int64_t offset, fragments, stride, fragment_bytes, start;
};

void check_fragment_tails(Memory dst, const FragmentTails& tails);
void zero_fragment_tails(Memory dst, const FragmentTails& tails);

void check_threads(int threads);

// Copies all pieces; `threads` share the bytes evenly, the calling thread being one of them.
void run_pieces(const std::vector<Piece>& pieces, int threads);

}  // namespace kvferry
