#include "cuda/pages.h"

#include <algorithm>

#include "cuda/driver.h"
#include "cuda/kernels/copy_kernels.h"

namespace kvferry {

std::vector<PitchedRun> pitched_runs(const PageLayout& layout) {
  std::vector<PitchedRun> runs;
  const uint32_t tensors = uint32_t(layout.bases.size());
  if (layout.pieces > 1 && !layout.in_blocks) {
    if (layout.piece_stride > kMaxPitch) return {};
    for (uint32_t t = 0; t < tensors; ++t) runs.push_back({t * layout.pieces, layout.pieces, 1, layout.piece_stride});
    return runs;
  }
  const uint32_t step = layout.pieces;  // of a block, or of a page that is of one piece, tensor after tensor
  for (uint32_t first = 0; first < tensors;) {
    const auto pitch_after = [&](uint32_t t) {
      if (t + 1 >= tensors || layout.strides[t + 1] != layout.strides[t]) return int64_t(-1);
      return int64_t(layout.bases[t + 1]) - int64_t(layout.bases[t]);
    };
    const int64_t pitch = pitch_after(first);
    uint32_t count = 1;
    if (pitch >= int64_t(layout.fragment_bytes) && pitch <= kMaxPitch) {
      while (pitch_after(first + count - 1) == pitch) ++count;
    }
    for (uint32_t piece = 0; piece < layout.pieces; ++piece) {
      runs.push_back({first * step + piece, count, step, count > 1 ? pitch : int64_t(layout.fragment_bytes)});
    }
    first += count;
  }
  return runs;
}

void CopyDescriptors::add(uint64_t to, uint64_t from, size_t bytes) {
  if (!sizes.empty() && dst.back() + sizes.back() == to && src.back() + sizes.back() == from) {
    sizes.back() += bytes;
    return;
  }
  append(to, from, bytes);
}

void CopyDescriptors::append(uint64_t to, uint64_t from, size_t bytes) {
  dst.push_back(to);
  src.push_back(from);
  sizes.push_back(bytes);
}

void CopyDescriptors::clear() {
  dst.clear();
  src.clear();
  sizes.clear();
}

void CopyDescriptors::reserve(size_t count) {
  dst.reserve(count);
  src.reserve(count);
  sizes.reserve(count);
}

uint32_t pages_per_launch(const PageLayout& layout) { return kPagesPerLaunch / layout.ids_a_page(); }

std::vector<PageChunk> staged_chunks(const PageLayout& layout, size_t pages, size_t buffer_bytes, size_t small_bytes,
                                     unsigned growth, bool growing) {
  std::vector<PageChunk> chunks;
  const uint32_t fragments = layout.fragments();
  if (layout.row_bytes() > buffer_bytes) {  // a part of a page at a time
    const uint32_t most = uint32_t(buffer_bytes / layout.fragment_bytes);
    for (size_t page = 0; page < pages; ++page) {
      for (uint32_t first = 0; first < fragments; first += most) {
        chunks.push_back({page, page + 1, first, std::min(most, fragments - first)});
      }
    }
    return chunks;
  }
  std::vector<size_t> lengths;
  size_t bytes = std::min(small_bytes, buffer_bytes);
  for (size_t left = pages; left > 0; left -= lengths.back()) {
    const size_t wanted = std::clamp<size_t>(bytes / layout.row_bytes(), 1, pages_per_launch(layout));
    lengths.push_back(std::min(wanted, left));
    bytes = std::min(bytes * growth, buffer_bytes);
  }
  if (!growing) std::reverse(lengths.begin(), lengths.end());
  size_t begin = 0;
  for (const size_t length : lengths) {
    chunks.push_back({begin, begin + length, 0, fragments});
    begin += length;
  }
  return chunks;
}

}  // namespace kvferry
