// A caller's tokens in the integer width that they come in: checked, narrowed and compared without a copy of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvferry {

enum class TokenWidth : uint8_t { kUint32, kInt32, kInt64, kUint64 };

struct Tokens {
  const void* data = nullptr;  // aligned to its width
  size_t count = 0;
  TokenWidth width = TokenWidth::kUint32;

  Tokens part(size_t begin, size_t end) const;
};

constexpr size_t kNoToken = size_t(-1);

// Copies tokens to `out`. Returns the index of the first that is not in [0, 2^32), or kNoToken: all are.
size_t narrow(const Tokens& tokens, uint32_t* out);

// The token at `index`, as a decimal number.
std::string decimal(const Tokens& tokens, size_t index);

// How many leading tokens are the same as those at `held`, of which there are `count`. A token out of range is never.
size_t common(const Tokens& tokens, const uint32_t* held, size_t count);

}  // namespace kvferry
