// SHA-256 block compression with a run-time choice of implementation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

constexpr size_t kDigestBytes = 32;
constexpr size_t kBlockBytes = 64;

struct alignas(16) Sha256State {
  uint32_t words[8];  // in the order of the implementation that it was begun with
};

// One implementation. `compress` takes whole blocks, the last with its padding; `finish` writes 32 bytes.
struct Sha256 {
  void (*begin)(Sha256State& state);
  void (*compress)(Sha256State& state, const uint8_t* blocks, size_t count);
  void (*finish)(const Sha256State& state, uint8_t* digest);
};

extern const Sha256 kSha256Portable;

// With the processor's SHA instructions; null where it has none.
const Sha256* sha256_sha_ni();

// Writes the padding behind a message of `length` bytes at `message`, in place; returns the number of blocks.
// The buffer must have room up to the next block boundary behind length + 9.
size_t pad_message(uint8_t* message, size_t length);

// Blocks that a message of `length` bytes takes with its padding.
constexpr size_t padded_blocks(size_t length) { return (length + 9 + kBlockBytes - 1) / kBlockBytes; }

}  // namespace kvferry
