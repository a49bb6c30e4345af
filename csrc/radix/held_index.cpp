#include "radix/held_index.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace kvferry {
namespace {

constexpr uint64_t kMagic = 0x31646c656866766bu;  // "kvfheld1"
constexpr size_t kHeaderBytes = 64, kHeaderWords = kHeaderBytes / 8, kWays = 8, kDigestBytes = 32;
constexpr size_t kAhead = 8;  // pages whose buckets are fetched before they are looked at

uint64_t load(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
void store(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }

uint64_t* place_of(uint64_t* bucket, uint64_t name) {
  for (size_t way = 0; way < kWays; ++way) {
    if (load(bucket + way) == name) return bucket + way;
  }
  return nullptr;
}

void check_size(size_t nbytes, uint64_t buckets) {
  if (buckets != 0 && (buckets & (buckets - 1)) == 0 && buckets <= (uint64_t(1) << 32) &&
      nbytes >= kHeaderBytes + buckets * kWays * 8) {
    return;
  }
  throw std::invalid_argument("memory: " + std::to_string(nbytes) + " bytes are no index of " + std::to_string(buckets) + " buckets");
}

}  // namespace

uint64_t held_name(const uint8_t* digest, const uint8_t* namespace_id) {
  uint64_t name, space;
  std::memcpy(&name, digest, 8);
  std::memcpy(&space, namespace_id, 8);
  name ^= space;
  return name != 0 ? name : 1;
}

size_t HeldIndex::bytes_for(int64_t pages) {
  if (pages < 1 || pages >= int64_t(1) << 32) {
    throw std::invalid_argument("pages is " + std::to_string(pages) + "; it must be 1 to 2^32 - 1");
  }
  uint64_t buckets = 1;
  while (buckets * kWays < uint64_t(pages) * 4) buckets *= 2;
  return kHeaderBytes + buckets * kWays * 8;
}

HeldIndex HeldIndex::make(uint8_t* memory, size_t nbytes) {
  uint64_t buckets = 1;
  while (kHeaderBytes + buckets * 2 * kWays * 8 <= nbytes) buckets *= 2;
  check_size(nbytes, buckets);
  std::memset(memory, 0, kHeaderBytes + buckets * kWays * 8);
  auto* words = reinterpret_cast<uint64_t*>(memory);
  words[1] = buckets;
  store(words, kMagic);
  return HeldIndex(words, buckets);
}

HeldIndex HeldIndex::read(const uint8_t* memory, size_t nbytes) {
  if (nbytes < kHeaderBytes) check_size(nbytes, 0);
  auto* words = reinterpret_cast<uint64_t*>(const_cast<uint8_t*>(memory));  // only read from here on
  if (load(words) != kMagic) throw std::invalid_argument("memory: it is no index of held pages");
  check_size(nbytes, words[1]);
  return HeldIndex(words, words[1]);
}

uint64_t* HeldIndex::bucket(uint64_t name, int which) const {
  const uint64_t hash = which == 0 ? name : name >> 32 | name << 32;
  return words_ + kHeaderWords + (hash & (buckets_ - 1)) * kWays;
}

void HeldIndex::add(uint64_t name) {
  uint64_t* buckets[] = {bucket(name, 0), bucket(name, 1)};
  const auto used = [](const uint64_t* at) { return kWays - size_t(std::count(at, at + kWays, uint64_t(0))); };
  uint64_t* chosen = used(buckets[1]) < used(buckets[0]) ? buckets[1] : buckets[0];
  if (uint64_t* place = place_of(chosen, 0)) store(place, name);
}

void HeldIndex::remove(uint64_t name) {
  uint64_t* place = place_of(bucket(name, 0), name);
  if (place == nullptr) place = place_of(bucket(name, 1), name);
  if (place != nullptr) store(place, 0);
}

void HeldIndex::beat(int64_t now) { store(words_ + 2, uint64_t(now)); }

int64_t HeldIndex::last_beat() const { return int64_t(load(words_ + 2)); }

bool HeldIndex::has(uint64_t name) const {
  return place_of(bucket(name, 0), name) != nullptr || place_of(bucket(name, 1), name) != nullptr;
}

size_t HeldIndex::held(const uint8_t* digests, size_t pages, const uint8_t* namespace_id) const {
  for (size_t page = 0; page < pages; ++page) {
    if (page % kAhead == 0) {
      for (size_t next = page; next < std::min(pages, page + kAhead); ++next) {
        const uint64_t name = held_name(digests + next * kDigestBytes, namespace_id);
        __builtin_prefetch(bucket(name, 0));
        __builtin_prefetch(bucket(name, 1));
      }
    }
    if (!has(held_name(digests + page * kDigestBytes, namespace_id))) return page;
  }
  return pages;
}

}  // namespace kvferry
