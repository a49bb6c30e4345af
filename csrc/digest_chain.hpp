// The digest chain: digest = SHA256(canonical CBOR of [parent, [token, ...], extra]), one digest a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "sha256.hpp"

namespace kvferry {

// A page's extra keys, already in canonical CBOR.
struct Extra {
  const unsigned char* data;
  std::size_t size;
};

struct PageExtra {
  std::size_t page;
  Extra extra;
};

// Hashes `pages` pages of `page_size` tokens each; writes pages * 32 bytes to `out`. `exceptions` are in ascending
// order of page and stand for `extra` on the pages that they name.
void hash_chain(const std::uint32_t* tokens, std::size_t pages, std::size_t page_size,
                const unsigned char parent[kDigestBytes], Extra extra, const std::vector<PageExtra>& exceptions,
                Sha256Compress compress, unsigned char* out);

}  // namespace kvferry
