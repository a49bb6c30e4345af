#include "digests/digest_chain.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#define KVFERRY_SSE41 1
#include <immintrin.h>
#endif

namespace kvferry {
namespace {

constexpr size_t kParentOffset = 3;                           // behind: array of 3, byte string of 32
constexpr size_t kBodyOffset = kParentOffset + kDigestBytes;  // the token array's header
constexpr size_t kMaxTokenBytes = 5;
constexpr size_t kMaxArrayHeaderBytes = 5;

// One of the four widths of a CBOR unsigned integer below 2^32.
struct Width {
  uint8_t shift;         // moves the value to the top of 64 bits, so that a byte swap puts it in the low bytes, big endian
  uint8_t initial_byte;  // 0: the value itself is the initial byte
  uint8_t bytes;         // with the initial byte
};
constexpr Width kWidths[4] = {{0, 0, 1}, {56, 0x18, 2}, {48, 0x19, 3}, {32, 0x1a, 5}};

// Writes 8 bytes always (of which the item is the first 1, 2, 3 or 5) and has no branch: token sizes are not predictable.
inline uint8_t* put_token(uint8_t* out, uint32_t token) {
  const unsigned kind = unsigned(token > 0x17) + unsigned(token > 0xff) + unsigned(token > 0xffff);
  const Width width = kWidths[kind];
  const uint64_t payload = __builtin_bswap64(uint64_t(token) << width.shift);
  const uint8_t small = kind == 0 ? uint8_t(token) : uint8_t(0);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
  const uint64_t word = payload << 8 | uint64_t(width.initial_byte | small);
#else
  const uint64_t word = __builtin_bswap64(payload << 8 | uint64_t(width.initial_byte | small));
#endif
  std::memcpy(out, &word, sizeof word);
  return out + width.bytes;
}

// Writes `count` tokens' items, and up to 16 bytes behind them; returns the items' end.
using PutTokens = uint8_t* (*)(uint8_t* out, const uint32_t* tokens, size_t count);

uint8_t* put_tokens_portable(uint8_t* out, const uint32_t* tokens, size_t count) {
  for (size_t i = 0; i < count; ++i) out = put_token(out, tokens[i]);
  return out;
}

#ifdef KVFERRY_SSE41

// Two tokens' items are one byte shuffle of [initial byte, token, initial byte, token], little-endian words. There are 16
// such shuffles: bits 0 and 1 of the index are the low bits of the two widths, bits 2 and 3 the high ones.
struct PairShuffles {
  alignas(16) uint8_t bytes[16][16];
  uint8_t length[16];
};

constexpr PairShuffles make_pair_shuffles() {
  PairShuffles made{};
  for (int index = 0; index < 16; ++index) {
    int at = 0;
    for (int token = 0; token < 2; ++token) {
      const int kind = (index >> token & 1) | (index >> (token + 2) & 1) << 1;
      const int payload = kind == 3 ? 4 : kind == 2 ? 2 : 1;
      if (kind != 0) made.bytes[index][at++] = uint8_t(8 * token);
      for (int byte = payload - 1; byte >= 0; --byte) made.bytes[index][at++] = uint8_t(8 * token + 4 + byte);
    }
    made.length[index] = uint8_t(at);
    while (at < 16) made.bytes[index][at++] = 0x80;
  }
  return made;
}
constexpr PairShuffles kPairs = make_pair_shuffles();

__attribute__((target("sse4.1,ssse3"))) inline uint8_t* put_pair(uint8_t* out, __m128i pair, unsigned index) {
  const __m128i shuffle = _mm_load_si128(reinterpret_cast<const __m128i*>(kPairs.bytes[index]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_shuffle_epi8(pair, shuffle));
  return out + kPairs.length[index];
}

__attribute__((target("sse4.1,ssse3"))) uint8_t* put_tokens_sse41(uint8_t* out, const uint32_t* tokens, size_t count) {
  for (; count >= 4; count -= 4, tokens += 4) {
    const __m128i four = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tokens));
    const __m128i over0 = _mm_cmpeq_epi32(_mm_max_epu32(four, _mm_set1_epi32(0x18)), four);
    const __m128i over1 = _mm_cmpeq_epi32(_mm_max_epu32(four, _mm_set1_epi32(0x100)), four);
    const __m128i over2 = _mm_cmpeq_epi32(_mm_max_epu32(four, _mm_set1_epi32(0x10000)), four);
    const __m128i initial = _mm_sub_epi32(_mm_set1_epi32(0x17), _mm_add_epi32(_mm_add_epi32(over0, over1), over2));
    const __m128i odd = _mm_xor_si128(_mm_xor_si128(over0, over1), over2);
    const unsigned low = unsigned(_mm_movemask_ps(_mm_castsi128_ps(odd)));
    const unsigned high = unsigned(_mm_movemask_ps(_mm_castsi128_ps(over1)));
    out = put_pair(out, _mm_unpacklo_epi32(initial, four), (low & 3) | (high & 3) << 2);
    out = put_pair(out, _mm_unpackhi_epi32(initial, four), low >> 2 | (high & 12));
  }
  return put_tokens_portable(out, tokens, count);
}

PutTokens fastest_put_tokens() {
  static const bool available = __builtin_cpu_supports("sse4.1") && __builtin_cpu_supports("ssse3");
  return available ? put_tokens_sse41 : put_tokens_portable;
}

#else

PutTokens fastest_put_tokens() { return put_tokens_portable; }

#endif

uint8_t* put_array_header(uint8_t* out, size_t items) {
  uint8_t* end = put_token(out, uint32_t(items));
  *out |= 0x80;  // an array's header is an unsigned integer's with major type 4 in place of 0
  return end;
}

// A page's padded message but for the parent, which is known only when the page before has been hashed.
class PageMessage {
 public:
  PageMessage(size_t page_size, size_t longest_extra, PutTokens put_tokens)
      : put_tokens_(put_tokens),
        bytes_(kBodyOffset + kMaxArrayHeaderBytes + page_size * kMaxTokenBytes + longest_extra + 2 * kBlockBytes) {
    bytes_[0] = 0x83;
    bytes_[1] = 0x58;
    bytes_[2] = kDigestBytes;
  }

  void begin(size_t page_size) { end_ = put_array_header(bytes_.data() + kBodyOffset, page_size); }

  void append(const uint32_t* tokens, size_t count) { end_ = put_tokens_(end_, tokens, count); }

  void finish(const std::string& extra) {
    std::memcpy(end_, extra.data(), extra.size());
    blocks_ = pad_message(bytes_.data(), size_t(end_ - bytes_.data()) + extra.size());
  }

  void set_parent(const uint8_t* parent) { std::memcpy(bytes_.data() + kParentOffset, parent, kDigestBytes); }
  size_t blocks() const { return blocks_; }
  const uint8_t* block(size_t i) const { return bytes_.data() + i * kBlockBytes; }

 private:
  PutTokens put_tokens_;
  std::vector<uint8_t> bytes_;
  uint8_t* end_ = nullptr;
  size_t blocks_ = 0;
};

}  // namespace

const std::string& Extras::of(size_t page) const {
  if (by_page.empty()) return common;
  const auto found = by_page.find(page);
  return found == by_page.end() ? common : found->second;
}

size_t Extras::longest() const {
  size_t longest = common.size();
  for (const auto& item : by_page) longest = std::max(longest, item.second.size());
  return longest;
}

void chain_digests(const uint32_t* tokens, size_t pages, size_t page_size, const uint8_t* parent, const Extras& extras,
                   const Sha256& sha256, uint8_t* digests) {
  if (pages == 0) return;
  const size_t longest_extra = extras.longest();
  const PutTokens put_tokens = &sha256 == &kSha256Portable ? put_tokens_portable : fastest_put_tokens();
  PageMessage first(page_size, longest_extra, put_tokens), second(page_size, longest_extra, put_tokens);
  PageMessage *now = &first, *next = &second;
  now->begin(page_size);
  now->append(tokens, page_size);
  now->finish(extras.of(0));
  for (size_t page = 0; page < pages; ++page) {
    // Hashing is bound by the latency of its instructions and encoding is not: a share of the next page is encoded behind
    // each block of this one, near enough for the processor to do both at once.
    const uint32_t* next_tokens = tokens + (page + 1) * page_size;
    const size_t blocks = now->blocks();
    const size_t share = ((page_size + blocks - 1) / blocks + 3) & ~size_t(3);  // encoded four at a time
    size_t left = page + 1 < pages ? page_size : 0;
    Sha256State state;
    sha256.begin(state);
    now->set_parent(parent);
    next->begin(page_size);
    for (size_t block = 0; block < blocks; ++block) {
      sha256.compress(state, now->block(block), 1);
      const size_t count = std::min(share, left);
      next->append(next_tokens, count);
      next_tokens += count;
      left -= count;
    }
    uint8_t* digest = digests + page * kDigestBytes;
    sha256.finish(state, digest);
    if (page + 1 < pages) next->finish(extras.of(page + 1));
    parent = digest;
    std::swap(now, next);
  }
}

}  // namespace kvferry
