#include "digests/tokens.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace kvferry {
namespace {

// Long enough for the loop inside to be done in vectors, short enough for a difference to cost little.
constexpr size_t kRun = 128;

// Calls `body` with a null pointer of the tokens' type.
template <class Body>
auto by_width(TokenWidth width, Body body) {
  switch (width) {
    case TokenWidth::kInt32: return body(static_cast<const int32_t*>(nullptr));
    case TokenWidth::kInt64: return body(static_cast<const int64_t*>(nullptr));
    case TokenWidth::kUint64: return body(static_cast<const uint64_t*>(nullptr));
    case TokenWidth::kUint32: break;
  }
  return body(static_cast<const uint32_t*>(nullptr));
}

// 0 exactly for a token in [0, 2^32).
template <class T>
inline uint64_t outside(T token) {
  if constexpr (std::is_same_v<T, int32_t>) return uint32_t(token) >> 31;
  return uint64_t(token) >> 32;
}

template <class T>
size_t narrow_as(const T* tokens, size_t count, uint32_t* out) {
  for (size_t at = 0; at < count; at += kRun) {
    const size_t end = std::min(at + kRun, count);
    uint64_t wrong = 0;
    for (size_t i = at; i < end; ++i) {
      out[i] = uint32_t(tokens[i]);
      wrong |= outside(tokens[i]);
    }
    if (wrong == 0) continue;
    while (outside(tokens[at]) == 0) ++at;
    return at;
  }
  return kNoToken;
}

// Both sides as the wider of the two types: a negative token or one above 32 bits equals nothing that is held.
template <class T>
inline uint64_t difference(T token, uint32_t held) {
  if constexpr (std::is_same_v<T, int32_t>) return (uint32_t(token) ^ held) | (uint32_t(token) >> 31);
  return uint64_t(token) ^ uint64_t(held);
}

template <class T>
size_t common_as(const T* tokens, const uint32_t* held, size_t count) {
  size_t at = 0;
  for (; at + kRun <= count; at += kRun) {
    uint64_t different = 0;
    for (size_t i = 0; i < kRun; ++i) different |= difference(tokens[at + i], held[at + i]);
    if (different != 0) break;
  }
  while (at < count && difference(tokens[at], held[at]) == 0) ++at;
  return at;
}

}  // namespace

Tokens Tokens::part(size_t begin, size_t end) const {
  return by_width(width, [&](auto* type) {
    return Tokens{static_cast<decltype(type)>(data) + begin, end - begin, width};
  });
}

size_t narrow(const Tokens& tokens, uint32_t* out) {
  if (tokens.width == TokenWidth::kUint32) {
    if (tokens.count != 0) std::memcpy(out, tokens.data, tokens.count * sizeof *out);
    return kNoToken;
  }
  return by_width(tokens.width, [&](auto* type) {
    return narrow_as(static_cast<decltype(type)>(tokens.data), tokens.count, out);
  });
}

std::string decimal(const Tokens& tokens, size_t index) {
  return by_width(tokens.width, [&](auto* type) {
    return std::to_string(static_cast<decltype(type)>(tokens.data)[index]);
  });
}

size_t common(const Tokens& tokens, const uint32_t* held, size_t count) {
  count = std::min(count, tokens.count);
  return by_width(tokens.width, [&](auto* type) {
    return common_as(static_cast<decltype(type)>(tokens.data), held, count);
  });
}

}  // namespace kvferry
