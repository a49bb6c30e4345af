#include "bindings/layout.h"

#include <iterator>

namespace nb = nanobind;

namespace kvferry {

PageLayout checked_layout(const char* field, const Integers& begins, int64_t lowest, const Integers& strides,
                          int64_t fragment_bytes, int64_t pages, int64_t pieces, int64_t piece_stride, bool in_blocks) {
  check_range(field, int64_t(begins.size()), 1, 1 << 16);
  check_range("strides", int64_t(strides.size()), int64_t(begins.size()), int64_t(begins.size()));
  check_range("pages", pages, 1, kMaxPages - 1);
  check_range("fragment_bytes", fragment_bytes, 1, kMaxRowBytes);
  const int64_t most = kMaxRowBytes / fragment_bytes / int64_t(begins.size());
  check_range("pieces", pieces, 1, in_blocks ? std::min<int64_t>(most, kMostBlocksAPage) : most);
  const bool apart = pieces > 1 && !in_blocks;
  check_range("piece_stride", piece_stride, apart ? fragment_bytes : 0, in_blocks ? 0 : kMaxInt64 / pieces);
  const int64_t extent = (pieces - 1) * piece_stride + fragment_bytes;
  PageLayout layout;
  for (size_t i = 0; i < begins.size(); ++i) {
    const int64_t begin = begins.data()[i], stride = strides.data()[i];
    check_range(field, begin, lowest, kMaxInt64);
    check_range("strides", stride, fragment_bytes, (kMaxInt64 - begin - extent) / pages);
    layout.bases.push_back(uint64_t(begin));
    layout.strides.push_back(stride);
  }
  layout.piece_stride = piece_stride;
  layout.pieces = uint32_t(pieces);
  layout.fragment_bytes = uint32_t(fragment_bytes);
  layout.pages = pages;
  layout.in_blocks = in_blocks;
  return layout;
}

void check_ids(const char* field, const Integers& ids, int64_t count, int64_t lowest) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids.data()[i] >= lowest && ids.data()[i] < count) continue;
    throw nb::index_error((std::string(field) + "[" + std::to_string(i) + "]: " + std::to_string(ids.data()[i]) +
                           ", must be in [" + std::to_string(lowest) + ", " + std::to_string(count) + ")")
                              .c_str());
  }
}

int64_t checked_pages(const PageLayout& layout, const Integers& page_ids, bool may_lack) {
  const size_t each = layout.ids_a_page();
  if (page_ids.size() % each != 0) {
    refuse("page_ids: " + std::to_string(page_ids.size()) + " ids, must be a multiple of the " + std::to_string(each) +
           " blocks of a page");
  }
  check_ids("page_ids", page_ids, layout.pages, layout.in_blocks && may_lack ? kNoBlock : 0);
  return int64_t(page_ids.size() / each);
}

void check_not_in_blocks(const char* field, const PageLayout& layout) {
  if (layout.in_blocks) refuse(std::string(field) + ": in blocks, must be pages that one id names");
}

void check_distinct(const char* field, const Integers& ids) {
  std::vector<int64_t> sorted;
  sorted.reserve(ids.size());
  std::copy_if(ids.data(), ids.data() + ids.size(), std::back_inserter(sorted), [](int64_t id) { return id != kNoBlock; });
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) refuse(std::string(field) + ": " + std::to_string(*twice) + " would be written twice");
}

PartRange checked_part(const PageLayout& layout, const Integers& page_ids, int64_t byte_offset, int64_t nbytes,
                       std::optional<int64_t> last_bytes) {
  const int64_t row_bytes = int64_t(layout.row_bytes()), count = checked_pages(layout, page_ids, true);
  const int64_t tensor_bytes = int64_t(layout.tensor_bytes());
  check_range("page_ids", count, 1, kMaxInt64 / row_bytes);
  check_range("byte_offset", byte_offset, 0, row_bytes - 1);
  // Neither fewer bytes than reach the last page, nor more than it has.
  check_range("nbytes", nbytes, std::max<int64_t>((count - 1) * row_bytes - byte_offset + 1, 1), count * row_bytes - byte_offset);
  check_range("last_bytes", last_bytes.value_or(tensor_bytes), 1, tensor_bytes);
  return {uint64_t(byte_offset), uint64_t(nbytes), uint64_t(last_bytes.value_or(tensor_bytes))};
}

}  // namespace kvferry
