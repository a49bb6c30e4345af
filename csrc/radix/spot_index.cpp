#include "radix/spot_index.h"

#include <utility>

#include "checks.h"

namespace kvferry {

void SpotIndex::place(std::vector<Slot>& slots, const Slot& slot) {
  const size_t mask = slots.size() - 1;
  size_t at = slot.hash & mask;
  while (slots[at].node != nullptr) at = (at + 1) & mask;
  slots[at] = slot;
}

void SpotIndex::widen(Shard& shard) {
  std::vector<Slot> wider(shard.slots.empty() ? 8 : shard.slots.size() * 2);
  for (const Slot& slot : shard.slots) {
    if (slot.node != nullptr) place(wider, slot);
  }
  shard.slots = std::move(wider);
}

void SpotIndex::add(Node& node) {
  for (uint32_t i = 0; i < node.size; ++i) {
    const uint64_t hash = hash_of(node.digest(i));
    Shard& shard = shards_[shard_of(hash)];
    if ((shard.used + 1) * 4ull > shard.slots.size() * 3ull) widen(shard);
    place(shard.slots, {&node, node.above + i, uint32_t(hash)});
    ++shard.used;
    ++size_;
  }
}

SpotIndex::Slot* SpotIndex::slot_of(const Node& node, uint32_t offset) {
  const uint64_t hash = hash_of(node.digest(offset));
  std::vector<Slot>& slots = shards_[shard_of(hash)].slots;
  for (size_t at = uint32_t(hash), left = slots.size(); left > 0; ++at, --left) {
    Slot& slot = slots[at & (slots.size() - 1)];
    if (slot.node == nullptr) break;
    if (slot.node == &node && slot.page == node.above + offset) return &slot;
  }
  return nullptr;
}

void SpotIndex::remove(const Node& node, uint32_t first) {
  for (uint32_t i = first; i < node.size; ++i) {
    const Slot* const slot = slot_of(node, i);
    check_that(slot != nullptr, "a page is in no spot");
    Shard& shard = shards_[shard_of(hash_of(node.digest(i)))];
    erase(shard, size_t(slot - shard.slots.data()));
  }
}

// What stands behind the hole moves up if its search would otherwise end there.
void SpotIndex::erase(Shard& shard, size_t hole) {
  std::vector<Slot>& slots = shard.slots;
  const size_t mask = slots.size() - 1;
  slots[hole].node = nullptr;
  for (size_t at = (hole + 1) & mask; slots[at].node != nullptr; at = (at + 1) & mask) {
    if (((at - slots[at].hash) & mask) >= ((at - hole) & mask)) {
      slots[hole] = std::exchange(slots[at], Slot{});
      hole = at;
    }
  }
  --shard.used;
  --size_;
}

void SpotIndex::hand_over(const Node& node, Node& upper, uint32_t pages) {
  for (uint32_t i = 0; i < pages; ++i) {
    Slot* const slot = slot_of(node, i);
    check_that(slot != nullptr, "a page is in no spot");
    slot->node = &upper;
  }
}

std::optional<Spot> SpotIndex::find(const uint8_t* digest) const {
  const uint64_t hash = hash_of(digest);
  const std::vector<Slot>& slots = shards_[shard_of(hash)].slots;
  for (size_t at = uint32_t(hash), left = slots.size(); left > 0; ++at, --left) {
    const Slot& slot = slots[at & (slots.size() - 1)];
    if (slot.node == nullptr) break;
    const uint32_t offset = slot.page - slot.node->above;
    if (slot.hash == uint32_t(hash) && same_digest(slot.node->digest(offset), digest)) return Spot{slot.node, offset};
  }
  return std::nullopt;
}

uint64_t SpotIndex::bytes() const {
  uint64_t slots = 0;
  for (const Shard& shard : shards_) slots += shard.slots.capacity();
  return sizeof(SpotIndex) + slots * sizeof(Slot);
}

}  // namespace kvferry
