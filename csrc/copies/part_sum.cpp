#include "copies/part_sum.h"

#include <cstring>

// Twice as fast with AVX2, of which the program finds out when it starts.
#if defined(__x86_64__) && defined(__gnu_linux__) && (!defined(__clang__) || __clang_major__ >= 14)
#define KVFERRY_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KVFERRY_CLONES
#endif

namespace kvferry {
namespace {

constexpr size_t kWord = sizeof(uint64_t);

uint64_t rest_of(const uint8_t* bytes, size_t nbytes, uint64_t first_word) {
  if (nbytes % kWord == 0) return 0;
  uint64_t word = 0;
  std::memcpy(&word, bytes + nbytes / kWord * kWord, nbytes % kWord);
  return mixed_word(word, first_word + nbytes / kWord);
}

KVFERRY_CLONES uint64_t sum_whole(const uint8_t* bytes, size_t words, uint64_t key) {
  uint64_t sum = 0;
  for (size_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, bytes + i * kWord, kWord);
    sum += keyed_word(word, key + i * kPositionKey);
  }
  return sum;
}

KVFERRY_CLONES uint64_t copy_whole(uint8_t* __restrict dst, const uint8_t* __restrict src, size_t words, uint64_t key) {
  uint64_t sum = 0;
  for (size_t i = 0; i < words; ++i) {
    uint64_t word;
    std::memcpy(&word, src + i * kWord, kWord);
    std::memcpy(dst + i * kWord, &word, kWord);
    sum += keyed_word(word, key + i * kPositionKey);
  }
  return sum;
}

}  // namespace

uint64_t sum_words(const uint8_t* bytes, size_t nbytes, uint64_t first_word) {
  return sum_whole(bytes, nbytes / kWord, (first_word + 1) * kPositionKey) + rest_of(bytes, nbytes, first_word);
}

uint64_t copy_words(uint8_t* dst, const uint8_t* src, size_t nbytes, uint64_t first_word) {
  const uint64_t sum = copy_whole(dst, src, nbytes / kWord, (first_word + 1) * kPositionKey);
  if (nbytes % kWord == 0) return sum;
  uint64_t rest = 0;  // read once, like the words: the source may change meanwhile
  std::memcpy(&rest, src + nbytes / kWord * kWord, nbytes % kWord);
  std::memcpy(dst + nbytes / kWord * kWord, &rest, nbytes % kWord);
  return sum + mixed_word(rest, first_word + nbytes / kWord);
}

}  // namespace kvferry
