// Where each page of a tree stands, by its digest: kept while pages are recovered, which know no more than their parents' digests.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "radix/tree_node.h"

namespace kvferry {

struct Spot {
  Node* node;
  uint32_t offset;  // in the node
};

// Open addressing in many shards: none of them is so large that to double it, or to let it go, takes long.
class SpotIndex {
 public:
  void add(Node& node);
  void remove(const Node& node, uint32_t first);                  // its pages from there on
  void hand_over(const Node& node, Node& upper, uint32_t pages);  // its first pages are those of `upper` from now on
  std::optional<Spot> find(const uint8_t* digest) const;
  bool holds(const Node& node, uint32_t offset) { return slot_of(node, offset) != nullptr; }
  uint64_t size() const { return size_; }
  uint64_t bytes() const;

 private:
  struct Slot {
    Node* node;
    uint32_t page;  // node->above and on, so that a split changes none of the lower part
    uint32_t hash;  // its lower bits
  };
  struct Shard {
    std::vector<Slot> slots;  // a power of two, or none
    uint32_t used = 0;
  };
  static constexpr size_t kShardBits = 10;

  static size_t shard_of(uint64_t hash) { return size_t(hash >> (64 - kShardBits)); }
  static void place(std::vector<Slot>& slots, const Slot& slot);
  static void widen(Shard& shard);
  Slot* slot_of(const Node& node, uint32_t offset);
  void erase(Shard& shard, size_t hole);

  std::array<Shard, size_t(1) << kShardBits> shards_;
  uint64_t size_ = 0;
};

}  // namespace kvferry
