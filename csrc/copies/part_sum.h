// A 64-bit sum over the bytes of a part, the same on a GPU and on the host, whatever order its words are taken in.
//
// The part, with zeros behind it up to a multiple of 8 bytes, is words 0, 1, ... (little endian); the sum is that of
// mixed_word(word, index), and of its length times kLengthKey, modulo 2^64. What it finds: any change within one aligned
// group of 4 bytes, always (the product's factors change by less than 2^32, and what they are multiplied with lies between 1
// and 2^33). Other changes, words that changed places, and bytes that were never written: missed about once in 2^64 times
// if the bytes are as good as random, and not once in less than 2^32 times if they are fixed and the key were drawn at
// random. The key is fixed: this finds accidents, it does not stop somebody who looks for bytes with the same sum.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define KVFERRY_ON_BOTH __host__ __device__
#else
#define KVFERRY_ON_BOTH
#endif

namespace kvferry {

constexpr uint64_t kPositionKey = 0x9E3779B97F4A7C15u, kLengthKey = 0xC2B2AE3D27D4EB4Fu;

KVFERRY_ON_BOTH inline uint64_t keyed_word(uint64_t word, uint64_t key) {
  const uint64_t mixed = word ^ key;
  const uint64_t low = uint32_t(mixed), high = mixed >> 32;
  return low * high + (low << 32 | high);
}

KVFERRY_ON_BOTH inline uint64_t mixed_word(uint64_t word, uint64_t index) {
  return keyed_word(word, (index + 1) * kPositionKey);
}

// Of `nbytes` bytes that begin with word first_word of their part, without the length.
uint64_t sum_words(const uint8_t* bytes, size_t nbytes, uint64_t first_word);

// The same, and copies them on the way: nearly as fast as memcpy.
uint64_t copy_words(uint8_t* dst, const uint8_t* src, size_t nbytes, uint64_t first_word);

// Of a whole part.
inline uint64_t part_sum(uint64_t words, uint64_t nbytes) { return words + nbytes * kLengthKey; }

}  // namespace kvferry
