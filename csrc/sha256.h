// SHA-256 block compression with a run-time choice of implementation.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

constexpr size_t kDigestBytes = 32;
constexpr size_t kBlockBytes = 64;

// Hashes `blocks` 64-byte blocks that already hold the padding, from the standard initial state; writes the 32-byte digest.
using HashBlocks = void (*)(const uint8_t* padded, size_t blocks, uint8_t* digest);

// True when this processor can run it; hash_blocks_sha_ni must not be called otherwise.
bool sha_ni_available();

void hash_blocks_sha_ni(const uint8_t* padded, size_t blocks, uint8_t* digest);
void hash_blocks_portable(const uint8_t* padded, size_t blocks, uint8_t* digest);

// Writes the padding behind a message of `length` bytes at `message`, in place; returns the number of blocks.
// The buffer must have room up to the next block boundary behind length + 9.
size_t pad_message(uint8_t* message, size_t length);

// Blocks that a message of `length` bytes takes with its padding.
constexpr size_t padded_blocks(size_t length) { return (length + 9 + kBlockBytes - 1) / kBlockBytes; }

}  // namespace kvferry
