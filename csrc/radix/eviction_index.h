// The unlocked leaves of one tier in the order in which they are evicted: by group, then class, then key.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "radix/policy.h"
#include "radix/tree_node.h"

namespace kvferry {

class EvictionIndex {
 public:
  static constexpr uint8_t kOrphans = 0, kOutputs = 1, kOthers = 2;

  struct Head {
    Node* node;
    uint8_t group;
    double value;
  };

  EvictionIndex(const Policy& policy, const Clock& clock);

  void enter(Node* leaf);
  void leave(Node* leaf);
  void rekey(Node* leaf);  // after its use has changed
  std::optional<Head> head() const;
  size_t size() const { return size_; }
  void check(const Node* leaf) const;

 private:
  struct Group {
    std::vector<IndexSet> classes;
    uint64_t filled = 0;  // a bit for each class that is not empty
  };

  uint8_t group_of(const Node* leaf) const;

  const Policy& policy_;
  const Clock& clock_;
  std::array<Group, 3> groups_;
  size_t size_ = 0;
};

}  // namespace kvferry
