// Where the bytes of pages lie, on a GPU or in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry {

// Fragment f = tensor * pieces + piece of page p: bases[tensor] + p * strides[tensor] + piece * piece_stride.
struct PageLayout {
  std::vector<uint64_t> bases;
  std::vector<int64_t> strides;
  int64_t piece_stride = 0;
  uint32_t pieces = 1;
  uint32_t fragment_bytes = 0;
  int64_t pages = 0;

  uint32_t fragments() const { return uint32_t(bases.size()) * pieces; }
  size_t row_bytes() const { return size_t(fragments()) * fragment_bytes; }
  uint64_t address(int64_t page, uint32_t fragment) const {
    const uint32_t tensor = fragment / pieces;
    return bases[tensor] + uint64_t(page * strides[tensor]) + uint64_t(int64_t(fragment % pieces) * piece_stride);
  }
  // From a page's first byte in a tensor to the end of its last.
  int64_t extent() const { return int64_t(pieces - 1) * piece_stride + fragment_bytes; }

  // All addresses and sizes are multiples of the largest power of two that divides this.
  uint64_t alignment() const {
    uint64_t bits = fragment_bytes | uint64_t(piece_stride);
    for (const uint64_t base : bases) bits |= base;
    for (const int64_t stride : strides) bits |= uint64_t(stride);
    return bits;
  }
};

// Bytes [offset, offset + bytes) of the rows of some pages laid end to end; a row is a page's fragments one behind the other.
struct PartRange {
  uint64_t offset = 0, bytes = 0;
};

// Calls move(address, bytes), in order, for the fragments, or parts of them, that [begin, end) of the part consists of.
template <class Move>
void walk_part(const PageLayout& layout, const int64_t* ids, const PartRange& part, uint64_t begin, uint64_t end,
               const Move& move) {
  const uint64_t row_bytes = layout.row_bytes(), at = part.offset + begin;
  uint64_t left = end - begin;
  size_t row = size_t(at / row_bytes);
  uint32_t fragment = uint32_t(at % row_bytes / layout.fragment_bytes);
  uint64_t inside = at % layout.fragment_bytes;
  uint32_t tensor = fragment / layout.pieces, piece = fragment % layout.pieces;
  for (; left > 0; ++row, tensor = 0) {
    for (; left > 0 && tensor < layout.bases.size(); ++tensor, piece = 0) {
      uint64_t address = layout.bases[tensor] + uint64_t(ids[row] * layout.strides[tensor]) +
                         uint64_t(int64_t(piece) * layout.piece_stride);
      for (; left > 0 && piece < layout.pieces; ++piece, inside = 0, address += uint64_t(layout.piece_stride)) {
        const uint64_t there = layout.fragment_bytes - inside, bytes = there < left ? there : left;
        move(address + inside, size_t(bytes));
        left -= bytes;
      }
    }
  }
}

}  // namespace kvferry
