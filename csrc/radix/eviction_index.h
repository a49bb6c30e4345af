// The unlocked leaves of one tier in the order in which they are evicted: by group, then class, then key.
#pragma once

#include <array>
#include <cstddef>
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

  // The leaves from the head on, as they would go if nothing changed, until `visit` says false.
  template <class Visit>
  void walk(Visit visit) const {
    for (const Group& group : groups_) {
      std::vector<Front> fronts;
      for (size_t klass = 0; klass < group.classes.size(); ++klass) {
        if (!group.classes[klass].empty()) fronts.push_back(front(int(klass), group.classes[klass].begin(), group.classes[klass].end()));
      }
      while (!fronts.empty()) {
        const size_t least = least_of(fronts);
        Front& first = fronts[least];
        if (!visit(first.at->node)) return;
        if (++first.at == first.end) {
          fronts.erase(fronts.begin() + std::ptrdiff_t(least));
        } else {
          first = front(first.klass, first.at, first.end);
        }
      }
    }
  }
  size_t size() const { return size_; }
  void check(const Node* leaf) const;

 private:
  struct Front {  // of a class: its next leaf
    int klass;
    double value;
    IndexSet::const_iterator at, end;
  };
  Front front(int klass, IndexSet::const_iterator at, IndexSet::const_iterator end) const;
  static size_t least_of(const std::vector<Front>& fronts);

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
