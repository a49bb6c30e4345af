// Page layouts and page ids as Python gives them, checked.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/types.h"
#include "copies/page_layout.h"

namespace kvferry {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr int64_t kMaxRowBytes = int64_t(1) << 30;
constexpr int64_t kMaxPages = int64_t(1) << 31;

// A layout whose tensors begin at `begins`, each at least `lowest`, which are called `field`.
PageLayout checked_layout(const char* field, const Integers& begins, int64_t lowest, const Integers& strides,
                          int64_t fragment_bytes, int64_t pages, int64_t pieces, int64_t piece_stride, bool in_blocks);

// IndexError names the first that is not in [lowest, count).
void check_ids(const char* field, const Integers& ids, int64_t count, int64_t lowest = 0);

// Ids of whole pages, how many. ValueError: some of the last one's blocks are not named; IndexError: an id out of bounds,
// where kNoBlock is none if pages are in blocks that `may_lack` some.
int64_t checked_pages(const PageLayout& layout, const Integers& page_ids, bool may_lack);

// ValueError names one that is there twice, kNoBlock aside.
void check_distinct(const char* field, const Integers& ids);

// ValueError: pages in blocks.
void check_not_in_blocks(const char* field, const PageLayout& layout);

// A part of these pages' rows that touches every one of them; last_bytes: of each tensor of the last, all if none.
PartRange checked_part(const PageLayout& layout, const Integers& page_ids, int64_t byte_offset, int64_t nbytes,
                       std::optional<int64_t> last_bytes = std::nullopt);

}  // namespace kvferry
