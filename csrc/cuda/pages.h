// Where the bytes of pages lie on a GPU and in page-major rows, and the lists of copies that move them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "copies/page_layout.h"

namespace kvferry {

// Fragments first, first + step, ..., `count` of them, of a page lie `pitch` bytes apart; in blocks they are of one block.
struct PitchedRun {
  uint32_t first, count, step;
  int64_t pitch;
};

// A page's fragments as few runs, each of which a copy engine moves in one piece. Empty: the pitch is more than it takes.
std::vector<PitchedRun> pitched_runs(const PageLayout& layout);

// A page is one row, its fragments one behind the other: fragment f of row r is at address + r * stride + f * fragment_bytes.
struct PageRows {
  uint64_t address = 0;
  int64_t stride = 0;

  uint64_t of(int64_t row) const { return address + uint64_t(row * stride); }
};

// Copies of bytes, not yet issued.
struct CopyDescriptors {
  std::vector<uint64_t> dst, src;
  std::vector<size_t> sizes;

  // One that goes on where the last one ended, at both ends, becomes part of it: for the fragments of a pool.
  void add(uint64_t to, uint64_t from, size_t bytes);
  // Stays as it is: neighbours may lie in two allocations, over whose border no copy may go.
  void append(uint64_t to, uint64_t from, size_t bytes);
  size_t size() const { return sizes.size(); }
  void clear();
  void reserve(size_t count);
};

// Fragments [first, first + count) of pages[begin .. end).
struct PageChunk {
  size_t begin, end;
  uint32_t first, count;
};

// Pages whose ids, and those of their rows, a launch takes.
uint32_t pages_per_launch(const PageLayout& layout);

// The parts of a copy that is staged in buffers of `buffer_bytes`, in order. They begin small, and grow (if `growing`) or
// else shrink: what the first gather, or the last scatter, takes is time in which nothing is on the bus.
std::vector<PageChunk> staged_chunks(const PageLayout& layout, size_t pages, size_t buffer_bytes, size_t small_bytes,
                                     unsigned growth, bool growing);

}  // namespace kvferry
