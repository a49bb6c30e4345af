#include "digests/sha256.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define KVFERRY_SHA_NI 1
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace kvferry {
namespace {

constexpr uint32_t kInitial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

inline uint32_t rotate_right(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

inline uint32_t load_big_endian(const uint8_t* p) {
  return uint32_t(p[0]) << 24 | uint32_t(p[1]) << 16 | uint32_t(p[2]) << 8 | uint32_t(p[3]);
}

inline void store_big_endian(uint8_t* p, uint32_t v) {
  p[0] = uint8_t(v >> 24);
  p[1] = uint8_t(v >> 16);
  p[2] = uint8_t(v >> 8);
  p[3] = uint8_t(v);
}

}  // namespace

size_t pad_message(uint8_t* message, size_t length) {
  const size_t blocks = padded_blocks(length);
  const size_t end = blocks * kBlockBytes;
  message[length] = 0x80;
  std::memset(message + length + 1, 0, end - 8 - (length + 1));
  const uint64_t bits = uint64_t(length) * 8;
  store_big_endian(message + end - 8, uint32_t(bits >> 32));
  store_big_endian(message + end - 4, uint32_t(bits));
  return blocks;
}

namespace {

void begin_portable(Sha256State& state) { std::memcpy(state.words, kInitial, sizeof kInitial); }

void compress_portable(Sha256State& state, const uint8_t* blocks, size_t count) {
  uint32_t* s = state.words;
  for (; count > 0; --count, blocks += kBlockBytes) {
    uint32_t w[64];
    for (int t = 0; t < 16; ++t) w[t] = load_big_endian(blocks + 4 * t);
    for (int t = 16; t < 64; ++t) {
      const uint32_t s0 = rotate_right(w[t - 15], 7) ^ rotate_right(w[t - 15], 18) ^ (w[t - 15] >> 3);
      const uint32_t s1 = rotate_right(w[t - 2], 17) ^ rotate_right(w[t - 2], 19) ^ (w[t - 2] >> 10);
      w[t] = w[t - 16] + s0 + w[t - 7] + s1;
    }
    uint32_t a = s[0], b = s[1], c = s[2], d = s[3], e = s[4], f = s[5], g = s[6], h = s[7];
    for (int t = 0; t < 64; ++t) {
      const uint32_t sum1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
      const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kRound[t] + w[t];
      const uint32_t sum0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
      const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    s[0] += a, s[1] += b, s[2] += c, s[3] += d, s[4] += e, s[5] += f, s[6] += g, s[7] += h;
  }
}

void finish_portable(const Sha256State& state, uint8_t* digest) {
  for (int i = 0; i < 8; ++i) store_big_endian(digest + 4 * i, state.words[i]);
}

}  // namespace

const Sha256 kSha256Portable = {begin_portable, compress_portable, finish_portable};

#ifdef KVFERRY_SHA_NI

namespace {

// Only these functions are compiled for more than the base instruction set; they run only where the processor was asked.
#define KVFERRY_TARGET_SHA __attribute__((target("sha,sse4.1,ssse3")))

bool has_sha_ni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const bool ssse3 = c & (1u << 9), sse41 = c & (1u << 19);
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return ssse3 && sse41 && (b & (1u << 29));
}

KVFERRY_TARGET_SHA inline __m128i swap_mask() { return _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL); }

// The state as the instructions want it: words F, E, B, A, then H, G, D, C.
void begin_sha_ni(Sha256State& state) {
  static constexpr int order[8] = {5, 4, 1, 0, 7, 6, 3, 2};
  for (int i = 0; i < 8; ++i) state.words[i] = kInitial[order[i]];
}

KVFERRY_TARGET_SHA void compress_sha_ni(Sha256State& state, const uint8_t* blocks, size_t count) {
  __m128i* vectors = reinterpret_cast<__m128i*>(state.words);
  __m128i abef = _mm_load_si128(vectors), cdgh = _mm_load_si128(vectors + 1);
  for (; count > 0; --count, blocks += kBlockBytes) {
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i w[4];  // a ring of the last 16 schedule words
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i < 4) {
        w[i] = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks + 16 * i)), swap_mask());
      } else {
        const __m128i last = w[(i + 3) & 3], middle = _mm_alignr_epi8(last, w[(i + 2) & 3], 4);
        w[i & 3] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]), middle), last);
      }
      const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + 4 * i));
      const __m128i wk = _mm_add_epi32(w[i & 3], k);
      cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
      abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
    }
    abef = _mm_add_epi32(abef, abef_before);
    cdgh = _mm_add_epi32(cdgh, cdgh_before);
  }
  _mm_store_si128(vectors, abef);
  _mm_store_si128(vectors + 1, cdgh);
}

KVFERRY_TARGET_SHA void finish_sha_ni(const Sha256State& state, uint8_t* digest) {
  const __m128i* vectors = reinterpret_cast<const __m128i*>(state.words);
  const __m128i abef = _mm_shuffle_epi32(_mm_load_si128(vectors), 0x1b);
  const __m128i cdgh = _mm_shuffle_epi32(_mm_load_si128(vectors + 1), 0x1b);
  const __m128i abcd = _mm_unpacklo_epi64(abef, cdgh), efgh = _mm_unpackhi_epi64(abef, cdgh);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(digest), _mm_shuffle_epi8(abcd, swap_mask()));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(digest + 16), _mm_shuffle_epi8(efgh, swap_mask()));
}

constexpr Sha256 kSha256ShaNi = {begin_sha_ni, compress_sha_ni, finish_sha_ni};

}  // namespace

const Sha256* sha256_sha_ni() {
  static const bool available = has_sha_ni();
  return available ? &kSha256ShaNi : nullptr;
}

#else

const Sha256* sha256_sha_ni() { return nullptr; }

#endif

}  // namespace kvferry
