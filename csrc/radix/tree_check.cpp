// What a tree says of itself: views of its nodes, memory, and a recount of everything for tests.
#include <unordered_set>

#include "checks.h"
#include "radix/radix_tree.h"

namespace kvferry {

std::vector<NodeView> RadixTree::dump(size_t limit) const {
  std::vector<NodeView> views;
  std::vector<const Node*> todo;
  for (const auto& [parent, tops] : orphans_by_parent_) todo.insert(todo.end(), tops.begin(), tops.end());
  todo.push_back(&root_);
  while (!todo.empty() && views.size() < limit) {
    const Node& node = *todo.back();
    todo.pop_back();
    if (!is_root(node)) {
      views.push_back({node.depth, node.size, key_of(node.first_digest()), key_of(node.last_digest()), node.on_device(),
                       node.on_host(), node.locks, node.hits, node.priority, node.output, node.orphan, node.copy != nullptr,
                       node.accessed_s});
    }
    node.children.each([&](const Node* child) { todo.push_back(child); });
  }
  return views;
}

uint64_t RadixTree::index_bytes() const {
  constexpr uint64_t kBlock = 16;  // what an allocation takes beside its bytes
  const uint64_t arrays = counts_.nodes * 3;  // digests, page ids, children
  const uint64_t entries = device_index_.size() + host_index_.size();
  return sizeof(RadixTree) + counts_.nodes * (sizeof(Node) + kBlock) + arrays * kBlock +
         counts_.held * kPageDigestBytes + (counts_.pages + counts_.host_pages) * sizeof(uint32_t) +
         counts_.child_slots * sizeof(Node*) + entries * (sizeof(IndexEntry) + 4 * sizeof(void*) + kBlock) +
         orphan_parents_.size() * (2 * sizeof(DigestKey) + 8 * sizeof(void*)) +
         (spots_ ? spots_->bytes() : 0);
}

void RadixTree::check() const {
  Counts counted;
  std::unordered_set<uint32_t> device_seen, host_seen;
  size_t device_leaves = 0, host_leaves = 0, redundant = 0, wanted = 0;
  uint64_t internal_locks = 0;
  std::unordered_set<const Node*> copied;
  for (const auto& [id, record] : copies_) {
    check_that(record->id == id && !record->nodes.empty(), "a copy of nothing");
    if (record->kind == CopyKind::kRestore) ++internal_locks;
    for (const Node* node : record->nodes) {
      check_that(node->copy == record.get() && copied.insert(node).second, "a node of a copy is another's");
      check_that(node->on_device() && node->on_host(), "a copy without both pages");
      const bool up = record->kind == CopyKind::kRestore;
      const PageState state = up ? PageState::kRestoring : PageState::kSpilling;
      check_that(device_.count(node->device.get(), node->size, state) == node->size &&
                     host_->count(node->host.get(), node->size, state) == node->size,
                 "a page of a copy is in another state");
      check_that(!node->detached || (node->parent == nullptr && node->children.empty()), "a detached node in the tree");
    }
  }
  for (const Node* step : all_nodes()) {
    const Node& node = *step;
    uint32_t device_children = 0, leaving_children = 0, children = 0;
    uint64_t child_locks = 0;
    node.children.each([&](const Node* child) {
      check_that(child->parent == &node, "a child of another node");
      check_that(child->orphan || child->depth == node.depth + node.size, "a node has another depth");
      check_that(node.children.find(child->first_digest()) == child, "a child is not found");
      check_that(child->orphan == node.orphan, "an orphan below what is none");
      device_children += child->on_device();
      leaving_children += (child->roles & kSpillEnds) != 0;
      child_locks += child->locks;
      ++children;
    });
    check_that(children == node.children.count(), "children are miscounted");
    check_that(device_children == node.device_children && leaving_children == node.leaving_children,
               "children on the device are miscounted");
    check_that(node.locks >= child_locks, "a lock below is not counted");
    counted.child_slots += node.children.capacity();
    if (is_root(node)) {
      check_that(node.locks == locks_ + internal_locks && node.roles == 0 && node.size == 0, "the root is wrong");
      continue;
    }
    const uint32_t n = node.size;
    check_that(n > 0 && !node.detached && (node.on_device() || node.on_host()), "an empty node");
    check_that(!node.on_device() || is_root(*node.parent) || node.parent->on_device(), "on the device below what is not");
    check_that((node.parent == nullptr) == (orphan_parents_.count(&node) == 1), "a node without a parent");
    check_that(!node.orphan || (!node.on_device() && node.locks == 0 && node.copy == nullptr), "an orphan is in use");
    check_that((node.copy != nullptr) == (copied.count(&node) == 1), "a copy does not know its node");
    check_that(!node.keep || (node.copy != nullptr && node.copy->kind == CopyKind::kSpill), "kept without a spill");
    ++counted.nodes;
    counted.held += n;
    if (node.orphan) counted.orphans += n;
    for (uint32_t i = 0; spots_ && i < n; ++i) check_that(spots_->holds(node, i), "a page is in no spot");
    const bool idle = node.copy == nullptr;
    if (node.on_device()) {
      counted.pages += n;
      const uint32_t* pages = node.device.get();
      for (uint32_t i = 0; i < n; ++i) check_that(device_seen.insert(pages[i]).second, "a page is in two nodes");
      const size_t coming = device_.count(pages, n, PageState::kArriving);
      check_that(node.may_arrive || coming == 0, "pages arrive where none may");
      check_that(coming == 0 || idle, "pages arrive that are copied");
      check_that(!idle || coming + device_.count(pages, n, PageState::kCached) == n, "a page is neither ARRIVING nor CACHED");
      counted.arriving += coming;
      if (!idle && node.copy->kind == CopyKind::kRestore) counted.restoring += n;
    }
    if (node.on_host()) {
      counted.host_pages += n;
      for (uint32_t i = 0; i < n; ++i) check_that(host_seen.insert(node.host[i]).second, "a host page is in two nodes");
      check_that(!idle || host_->count(node.host.get(), n, PageState::kCached) == n, "a host page is not CACHED");
    }
    const uint8_t roles = roles_of(node);
    check_that(roles == node.roles, "a node counts as what it is not");
    if (roles & kEvictable) counted.evictable += n;
    if (roles & kSpillEnds) counted.spilling += n;
    if (roles & (kRedundant | kHostOnlyIdle)) counted.host_evictable += n;
    if (roles & kRedundant) ++redundant;
    if (roles & kBackupWanted) ++wanted;
    if (roles & kDeviceLeaf) {
      ++device_leaves;
      device_index_.check(&node);
    }
    if (roles & kHostLeaf) {
      ++host_leaves;
      host_index_.check(&node);
    }
  }
  check_that(counted == counts_, "a count of the tree is wrong");
  check_that(!spots_ || spots_->size() == counts_.held, "a spot without a page");
  check_that(device_leaves == device_index_.size() && host_leaves == host_index_.size(), "an index holds other leaves");
  for (const Node* node = redundant_.first(); node != nullptr; node = node->next) --redundant;
  for (const Node* node = backups_wanted_.first(); node != nullptr; node = node->next) --wanted;
  check_that(redundant == 0 && wanted == 0, "a list holds other nodes");
}

}  // namespace kvferry
