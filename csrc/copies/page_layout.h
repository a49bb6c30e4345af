// Where the bytes of pages lie, on a GPU or in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvferry {

// Fragment f = tensor * pieces + piece of page p: bases[tensor] + p * strides[tensor] + piece * piece_stride. In blocks it is
// bases[tensor] + id * strides[tensor], where id is the block that the page has as this piece: an engine's blocks are smaller
// than a page, and its page is of any of them. So a page is named by one id, or in blocks by one a piece, in order.
struct PageLayout {
  std::vector<uint64_t> bases;
  std::vector<int64_t> strides;
  int64_t piece_stride = 0;
  uint32_t pieces = 1;
  uint32_t fragment_bytes = 0;
  int64_t pages = 0;  // ids are 0 .. pages - 1: of blocks, where pages are in blocks
  bool in_blocks = false;

  uint32_t ids_a_page() const { return in_blocks ? pieces : 1; }
  uint32_t fragments() const { return uint32_t(bases.size()) * pieces; }
  size_t row_bytes() const { return size_t(fragments()) * fragment_bytes; }
  size_t tensor_bytes() const { return size_t(pieces) * fragment_bytes; }  // of a row
  // Of the page that begins at `ids`: the id by which a fragment is found, and where it is.
  int64_t id_of(const int64_t* ids, uint32_t fragment) const { return ids[in_blocks ? fragment % pieces : 0]; }
  uint64_t address(const int64_t* ids, uint32_t fragment) const {
    const uint32_t tensor = fragment / pieces;
    return bases[tensor] + uint64_t(id_of(ids, fragment) * strides[tensor]) +
           uint64_t(int64_t(fragment % pieces) * piece_stride);
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

constexpr int64_t kNoBlock = -1;              // the id of a block that is not there
constexpr uint32_t kMostBlocksAPage = 256;

// Bytes [offset, offset + bytes) of the rows of some pages laid end to end; a row is a page's fragments one behind the other.
// Of the last of these pages each tensor has last_bytes; what would be behind them is somebody else's.
struct PartRange {
  uint64_t offset, bytes, last_bytes;
};

// Of a fragment that is piece `piece` of a tensor of which the page has `given` bytes: [inside, inside + bytes).
template <class Move, class Lack>
void walk_fragment(const PageLayout& layout, uint64_t address, uint32_t piece, uint64_t given, uint64_t inside, uint64_t bytes,
                   const Move& move, const Lack& lack) {
  const uint64_t before = uint64_t(piece) * layout.fragment_bytes + inside;
  const uint64_t left = before < given ? given - before : 0, known = left < bytes ? left : bytes;
  if (known > 0) move(address + inside, size_t(known));
  if (known < bytes) lack(size_t(bytes - known));
}

// Calls move(address, bytes), in order, for the fragments, or parts of them, that [begin, end) of the part consists of, and
// lack(bytes) for those that the page has not: they are zeros in a slot, and go nowhere from one.
template <class Move, class Lack>
void walk_part(const PageLayout& layout, const int64_t* ids, const PartRange& part, uint64_t begin, uint64_t end,
               const Move& move, const Lack& lack) {
  const uint64_t row_bytes = layout.row_bytes(), at = part.offset + begin;
  const size_t last = size_t((part.offset + part.bytes - 1) / row_bytes);
  uint64_t left = end - begin;
  size_t row = size_t(at / row_bytes);
  uint32_t fragment = uint32_t(at % row_bytes / layout.fragment_bytes);
  uint64_t inside = at % layout.fragment_bytes;
  uint32_t tensor = fragment / layout.pieces, piece = fragment % layout.pieces;
  for (; left > 0; ++row, tensor = 0) {
    const int64_t* const row_ids = ids + row * layout.ids_a_page();
    const uint64_t given = row == last ? part.last_bytes : layout.tensor_bytes();
    const bool whole = !layout.in_blocks && given == layout.tensor_bytes();
    for (; left > 0 && tensor < layout.bases.size(); ++tensor, piece = 0) {
      const uint64_t base = layout.bases[tensor];
      uint64_t address = base + uint64_t(*row_ids * layout.strides[tensor]) + uint64_t(int64_t(piece) * layout.piece_stride);
      for (; left > 0 && piece < layout.pieces; ++piece, inside = 0, address += uint64_t(layout.piece_stride)) {
        const uint64_t there = layout.fragment_bytes - inside, bytes = there < left ? there : left;
        if (whole) {
          move(address + inside, size_t(bytes));
        } else {
          const int64_t id = row_ids[layout.in_blocks ? piece : 0];
          const uint64_t from = layout.in_blocks ? base + uint64_t(id * layout.strides[tensor]) : address;
          walk_fragment(layout, from, piece, id == kNoBlock ? 0 : given, inside, bytes, move, lack);
        }
        left -= bytes;
      }
    }
  }
}

}  // namespace kvferry
