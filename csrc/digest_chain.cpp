#include "digest_chain.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

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

uint8_t* put_array_header(uint8_t* out, size_t items) {
  uint8_t* end = put_token(out, uint32_t(items));
  *out |= 0x80;  // an array's header is an unsigned integer's with major type 4 in place of 0
  return end;
}

// A page's padded message but for the parent, which is known only when the page before has been hashed.
class PageMessage {
 public:
  PageMessage(size_t page_size, size_t longest_extra)
      : bytes_(kBodyOffset + kMaxArrayHeaderBytes + page_size * kMaxTokenBytes + longest_extra + 2 * kBlockBytes) {
    bytes_[0] = 0x83;
    bytes_[1] = 0x58;
    bytes_[2] = kDigestBytes;
  }

  void begin(size_t page_size) { end_ = put_array_header(bytes_.data() + kBodyOffset, page_size); }

  void append(const uint32_t* tokens, size_t count) {
    uint8_t* out = end_;
    for (size_t i = 0; i < count; ++i) out = put_token(out, tokens[i]);
    end_ = out;
  }

  void finish(const std::string& extra) {
    std::memcpy(end_, extra.data(), extra.size());
    blocks_ = pad_message(bytes_.data(), size_t(end_ - bytes_.data()) + extra.size());
  }

  void set_parent(const uint8_t* parent) { std::memcpy(bytes_.data() + kParentOffset, parent, kDigestBytes); }
  size_t blocks() const { return blocks_; }
  const uint8_t* block(size_t i) const { return bytes_.data() + i * kBlockBytes; }

 private:
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
  PageMessage first(page_size, longest_extra), second(page_size, longest_extra);
  PageMessage *now = &first, *next = &second;
  now->begin(page_size);
  now->append(tokens, page_size);
  now->finish(extras.of(0));
  for (size_t page = 0; page < pages; ++page) {
    // Hashing is bound by the latency of its instructions and encoding is not: a share of the next page is encoded behind
    // each block of this one, near enough for the processor to do both at once.
    const uint32_t* next_tokens = tokens + (page + 1) * page_size;
    const size_t blocks = now->blocks();
    const size_t share = (page_size + blocks - 1) / blocks;
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
