#include "radix/eviction_index.h"

#include <tuple>

#include "checks.h"

namespace kvferry {
namespace {

// Of the first leaves of two classes, by their values.
bool before(double value, const Node& leaf, double others_value, const Node& other) {
  if (value != others_value) return value < others_value;
  return std::tie(leaf.accessed, leaf.serial) < std::tie(other.accessed, other.serial);
}

}  // namespace

bool IndexOrder::operator()(const IndexEntry& a, const IndexEntry& b) const {
  if (a.key != b.key) return a.key < b.key;
  if (a.accessed != b.accessed) return a.accessed < b.accessed;
  return a.node->serial < b.node->serial;
}

EvictionIndex::EvictionIndex(const Policy& policy, const Clock& clock) : policy_(policy), clock_(clock) {
  const int classes = policy.classes();
  check_that(classes >= 1 && classes <= kMaxPolicyClasses, "a policy has too many classes");
  for (Group& group : groups_) group.classes.resize(size_t(classes));
}

uint8_t EvictionIndex::group_of(const Node* leaf) const {
  if (leaf->orphan) return kOrphans;
  return leaf->output && policy_.evict_output_first ? kOutputs : kOthers;
}

void EvictionIndex::enter(Node* leaf) {
  const Place place = policy_.place(leaf->use());
  leaf->group = group_of(leaf);
  leaf->klass = place.klass;
  Group& group = groups_[leaf->group];
  IndexSet& leaves = group.classes.at(place.klass);
  // Most policies put what was used last at the end: then this costs no search.
  leaf->entry = leaves.emplace_hint(leaves.end(), IndexEntry{place.key, leaf->accessed, leaf});
  group.filled |= uint64_t(1) << place.klass;
  ++size_;
}

void EvictionIndex::leave(Node* leaf) {
  Group& group = groups_[leaf->group];
  IndexSet& leaves = group.classes[leaf->klass];
  leaves.erase(leaf->entry);
  if (leaves.empty()) group.filled &= ~(uint64_t(1) << leaf->klass);
  --size_;
}

void EvictionIndex::rekey(Node* leaf) {
  const Place place = policy_.place(leaf->use());
  if (place.klass == leaf->klass && group_of(leaf) == leaf->group && place.key == leaf->entry->key &&
      leaf->accessed == leaf->entry->accessed) {
    return;
  }
  leave(leaf);
  enter(leaf);
}

std::optional<EvictionIndex::Head> EvictionIndex::head() const {
  for (uint8_t g = 0; g < groups_.size(); ++g) {
    std::optional<Head> best;
    for (uint64_t rest = groups_[g].filled; rest != 0; rest &= rest - 1) {
      const int klass = __builtin_ctzll(rest);
      const IndexEntry& first = *groups_[g].classes[size_t(klass)].begin();
      const double value = policy_.value(klass, first.key, clock_.tick, clock_.now);
      if (!best || before(value, *first.node, best->value, *best->node)) best = Head{first.node, g, value};
    }
    if (best) return best;
  }
  return std::nullopt;
}

EvictionIndex::Front EvictionIndex::front(int klass, IndexSet::const_iterator at, IndexSet::const_iterator end) const {
  return {klass, policy_.value(klass, at->key, clock_.tick, clock_.now), at, end};
}

size_t EvictionIndex::least_of(const std::vector<Front>& fronts) {
  size_t least = 0;
  for (size_t i = 1; i < fronts.size(); ++i) {
    const Front &a = fronts[i], &b = fronts[least];
    if (before(a.value, *a.at->node, b.value, *b.at->node)) least = i;
  }
  return least;
}

void EvictionIndex::check(const Node* leaf) const {
  check_that(leaf->entry->node == leaf && leaf->entry->accessed == leaf->accessed, "a leaf's entry is not its own");
  check_that(leaf->group == group_of(leaf), "a leaf stands in another group's order");
}

}  // namespace kvferry
