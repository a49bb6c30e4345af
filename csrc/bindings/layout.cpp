#include "bindings/layout.h"

namespace nb = nanobind;

namespace kvferry {

PageLayout checked_layout(const char* field, const Integers& begins, int64_t lowest, const Integers& strides,
                          int64_t fragment_bytes, int64_t pages, int64_t pieces, int64_t piece_stride) {
  check_range(field, int64_t(begins.size()), 1, 1 << 16);
  check_range("strides", int64_t(strides.size()), int64_t(begins.size()), int64_t(begins.size()));
  check_range("pages", pages, 1, kMaxPages - 1);
  check_range("fragment_bytes", fragment_bytes, 1, kMaxRowBytes);
  check_range("pieces", pieces, 1, kMaxRowBytes / fragment_bytes / int64_t(begins.size()));
  check_range("piece_stride", piece_stride, pieces > 1 ? fragment_bytes : 0, kMaxInt64 / pieces);
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
  return layout;
}

void check_ids(const char* field, const Integers& ids, int64_t count) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids.data()[i] >= 0 && ids.data()[i] < count) continue;
    throw nb::index_error((std::string(field) + "[" + std::to_string(i) + "]: " + std::to_string(ids.data()[i]) +
                           ", must be in [0, " + std::to_string(count) + ")")
                              .c_str());
  }
}

void check_distinct(const char* field, const Integers& ids) {
  std::vector<int64_t> sorted(ids.data(), ids.data() + ids.size());
  std::sort(sorted.begin(), sorted.end());
  const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
  if (twice != sorted.end()) refuse(std::string(field) + ": " + std::to_string(*twice) + " would be written twice");
}

PartRange checked_part(const PageLayout& layout, const Integers& page_ids, int64_t byte_offset, int64_t nbytes) {
  const int64_t row_bytes = int64_t(layout.row_bytes()), count = int64_t(page_ids.size());
  check_range("page_ids", count, 1, kMaxInt64 / row_bytes);
  check_ids("page_ids", page_ids, layout.pages);
  check_range("byte_offset", byte_offset, 0, row_bytes - 1);
  // Neither fewer bytes than reach the last page, nor more than it has.
  check_range("nbytes", nbytes, std::max<int64_t>((count - 1) * row_bytes - byte_offset + 1, 1), count * row_bytes - byte_offset);
  return {uint64_t(byte_offset), uint64_t(nbytes)};
}

}  // namespace kvferry
