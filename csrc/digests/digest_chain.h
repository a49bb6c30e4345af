// The digest chain: digest = SHA256(canonical CBOR of [parent, [token, ...], extra]), one digest a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "digests/sha256.h"

namespace kvferry {

// What every page of a call has as its third CBOR item, already encoded.
struct Extras {
  std::string common;                   // of each page that is not named in `by_page`
  std::map<size_t, std::string> by_page;  // page index in this call -> encoded item

  const std::string& of(size_t page) const;
  size_t longest() const;
};

// Hashes `pages` pages of `page_size` tokens each; writes pages * 32 bytes to `digests`. Touches no Python object.
void chain_digests(const uint32_t* tokens, size_t pages, size_t page_size, const uint8_t* parent, const Extras& extras,
                   const Sha256& sha256, uint8_t* digests);

}  // namespace kvferry
