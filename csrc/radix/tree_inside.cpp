// How nodes are made, cut and taken away, and what they count as.
#include <algorithm>
#include <stdexcept>

#include "checks.h"
#include "radix/radix_tree.h"

namespace kvferry {
namespace {

// Of all trees of the process together: a match of one tree is never taken for a match of another.
uint64_t next_version() {
  static uint64_t versions = 0;
  return ++versions;
}

}  // namespace

RadixTree::RadixTree(PagePool& device, PagePool* host, Policy& policy, Clock& clock, uint32_t write_through_hits)
    : device_(device),
      host_(host),
      policy_(policy),
      clock_(clock),
      write_through_hits_(write_through_hits),
      version_(next_version()),
      device_index_(policy, clock),
      host_index_(policy, clock) {
  if (host == &device) throw std::invalid_argument("host: the same pool as device, must be another");
  policy.on_pool(uint64_t(device.pages()) + (host == nullptr ? 0 : host->pages()));
}

RadixTree::~RadixTree() {
  std::vector<Node*> nodes = all_nodes();
  for (const auto& [id, record] : copies_) {
    for (Node* node : record->nodes) {
      if (node->detached) nodes.push_back(node);
    }
  }
  for (const Node* node : nodes) {
    if (!is_root(*node)) delete node;
  }
}

void RadixTree::changed() { version_ = next_version(); }

// -- what a node counts as ----------------------------------------------------------------------------------------------

uint8_t RadixTree::roles_of(const Node& node) const {
  if (is_root(node)) return 0;
  uint8_t roles = 0;
  const bool device = node.on_device(), host = node.on_host(), idle = node.copy == nullptr;
  if (device && node.locks == 0 && !node.may_arrive) {
    roles |= kEvictable;
    if (idle && node.device_children == 0) roles |= kDeviceLeaf;
    // Not a leaf yet, if what is below it is spilled too: it was split after the copy began.
    const bool spilled = !idle && node.copy->kind == CopyKind::kSpill && !node.keep;
    if (spilled && node.device_children == node.leaving_children) roles |= kSpillEnds;
  }
  if (host && idle) {
    if (device) roles |= kRedundant;
    if (!device && node.locks == 0) roles |= node.children.empty() ? kHostOnlyIdle | kHostLeaf : kHostOnlyIdle;
  }
  if (device && !host && idle && host_ != nullptr && write_through_hits_ > 0 && node.hits >= write_through_hits_ &&
      !node.no_spill) {
    roles |= kBackupWanted;
  }
  return roles;
}

void RadixTree::set_roles(Node& node, uint8_t roles) {
  const uint8_t lost = node.roles & ~roles, gained = roles & ~node.roles;
  if (lost == 0 && gained == 0) return;
  const uint64_t size = node.size;
  node.roles = roles;
  if (lost & kEvictable) counts_.evictable -= size;
  if (lost & kSpillEnds) counts_.spilling -= size;
  if (lost & (kRedundant | kHostOnlyIdle)) counts_.host_evictable -= size;
  if (lost & kDeviceLeaf) device_index_.leave(&node);
  if (lost & kHostLeaf) host_index_.leave(&node);
  if (lost & kRedundant) redundant_.remove(&node);
  if (lost & kBackupWanted) backups_wanted_.remove(&node);

  if (gained & kEvictable) counts_.evictable += size;
  if (gained & kSpillEnds) counts_.spilling += size;
  if (gained & (kRedundant | kHostOnlyIdle)) counts_.host_evictable += size;
  if (gained & kDeviceLeaf) device_index_.enter(&node);
  if (gained & kHostLeaf) host_index_.enter(&node);
  if (gained & kRedundant) redundant_.add(&node);
  if (gained & kBackupWanted) backups_wanted_.add(&node);

  if ((lost | gained) & kSpillEnds && node.parent != nullptr) {
    if (lost & kSpillEnds) --node.parent->leaving_children;
    if (gained & kSpillEnds) ++node.parent->leaving_children;
    if (node.parent->copy != nullptr) settle(*node.parent);
  }
}

void RadixTree::rekey(Node& node) {
  if (node.roles & kDeviceLeaf) device_index_.rekey(&node);
  if (node.roles & kHostLeaf) host_index_.rekey(&node);
}

// -- structure ----------------------------------------------------------------------------------------------------------

void RadixTree::add_child(Node& parent, Node& child) {
  counts_.child_slots -= parent.children.capacity();
  parent.children.add(&child);
  counts_.child_slots += parent.children.capacity();
  child.parent = &parent;
  if (child.on_device()) ++parent.device_children;
}

void RadixTree::remove_child(Node& parent, Node& child) {
  counts_.child_slots -= parent.children.capacity();
  parent.children.remove(&child);
  counts_.child_slots += parent.children.capacity();
  child.parent = nullptr;
  if (child.on_device()) --parent.device_children;
}

// Cuts `node` after its first `pages` pages. The upper part is a new node; `node` stays the lower part.
Node* RadixTree::split(Node& node, uint32_t pages) {
  check_that(pages > 0 && pages < node.size, "a split outside of the node");
  set_roles(node, 0);
  Node* const upper = new Node();
  upper->created = node.created, upper->accessed = node.accessed;
  upper->created_s = node.created_s, upper->accessed_s = node.accessed_s;
  upper->locks = node.locks, upper->hits = node.hits, upper->priority = node.priority;
  upper->mark = node.mark;
  upper->may_arrive = node.may_arrive, upper->output = node.output, upper->orphan = node.orphan;
  upper->keep = node.keep, upper->no_spill = node.no_spill;
  upper->serial = ++serials_;
  upper->depth = node.depth;
  upper->above = node.above;
  upper->size = pages;
  if (spots_) spots_->hand_over(node, *upper, pages);
  const uint32_t rest = node.size - pages;

  FlatArray<uint8_t> tail(node.digest(pages), size_t(rest) * kPageDigestBytes);
  const auto halve = [&](FlatArray<uint32_t>& lower, FlatArray<uint32_t>& above) {
    if (!lower) return;
    FlatArray<uint32_t> behind(lower.get() + pages, rest);
    above = std::move(lower);
    above.shrink(pages);
    lower = std::move(behind);
  };
  halve(node.device, upper->device);
  halve(node.host, upper->host);
  upper->parent = node.parent;
  if (node.parent != nullptr) {
    node.parent->children.replace(&node, upper);
  } else {  // the top of an orphan
    const DigestKey parent = orphan_parents_.at(&node);
    forget_orphan(node);
    keep_orphan(*upper, parent.data());
  }
  upper->digests = std::move(node.digests);
  upper->digests.shrink(size_t(pages) * kPageDigestBytes);
  node.digests = std::move(tail);
  node.size = rest;
  node.depth += pages;
  node.above += pages;
  add_child(*upper, node);
  if (node.copy != nullptr) join_copy(*node.copy, *upper);
  ++counts_.nodes;
  settle(*upper);
  settle(node);
  changed();
  return upper;
}

// The pages behind the first `keep`, of a node without children, go; their ids are the caller's.
void RadixTree::cut_tail(Node& node, uint32_t keep) {
  check_that(keep > 0 && keep < node.size && node.children.empty() && node.copy == nullptr, "a node that cannot be cut");
  const uint8_t roles = node.roles;
  const uint32_t cut = node.size - keep;
  if (roles & kEvictable) counts_.evictable -= cut;
  if (roles & (kRedundant | kHostOnlyIdle)) counts_.host_evictable -= cut;
  if (node.on_device()) counts_.pages -= cut;
  if (node.on_host()) counts_.host_pages -= cut;
  if (node.orphan) counts_.orphans -= cut;
  counts_.held -= cut;
  if (spots_) spots_->remove(node, keep);
  node.digests.shrink(size_t(keep) * kPageDigestBytes);
  if (node.device) node.device.shrink(keep);
  if (node.host) node.host.shrink(keep);
  node.size = keep;
  rekey(node);  // a policy may look at the size
  changed();
}

// A new child, or the top of an orphan; roles are for the caller to settle, once it has said the rest of it.
Node* RadixTree::add_run(Node* parent, const uint8_t* digests, uint32_t n, const uint32_t* device, const uint32_t* host) {
  Node* const node = new Node();
  node->digests = FlatArray<uint8_t>(digests, size_t(n) * kPageDigestBytes);
  node->size = n;
  node->depth = parent == nullptr ? 0 : parent->depth + parent->size;
  node->serial = ++serials_;
  node->created = node->accessed = clock_.tick;
  node->created_s = node->accessed_s = clock_.now;
  if (device != nullptr) {
    node->device = FlatArray<uint32_t>(device, n);
    counts_.pages += n;
  }
  if (host != nullptr) {
    node->host = FlatArray<uint32_t>(host, n);
    counts_.host_pages += n;
  }
  counts_.held += n;
  ++counts_.nodes;
  if (spots_) spots_->add(*node);
  if (parent != nullptr) add_child(*parent, *node);
  changed();
  return node;
}

void RadixTree::give_device(Node& node, const uint32_t* pages) {
  node.device = FlatArray<uint32_t>(pages, node.size);
  counts_.pages += node.size;
  ++node.parent->device_children;
  settle(node);
  settle(*node.parent);
  changed();
}

void RadixTree::give_host(Node& node, const uint32_t* pages) {
  node.host = FlatArray<uint32_t>(pages, node.size);
  counts_.host_pages += node.size;
  settle(node);
}

PageIds RadixTree::take_device(Node& node) {
  PageIds pages(node.device.get(), node.device.get() + node.size);
  counts_.pages -= node.size;
  node.device.reset();
  if (!node.detached) {
    --node.parent->device_children;
    settle(node);
    settle(*node.parent);
    changed();
  }
  return pages;
}

void RadixTree::free_host(Node& node) {
  host_->free_pages(PageIds(node.host.get(), node.host.get() + node.size));
  counts_.host_pages -= node.size;
  node.host.reset();
  settle(node);
}

// Takes `top` and all below it out of the tree. Appends the device pages to `device` in the state they have, first those
// of the path from `top` to `bottom`, but for those that a copy names: they wait for its end, and so do its host pages.
void RadixTree::remove_subtree(Node& top, Node* bottom, PageIds& device) {
  std::vector<Node*> order;
  for (Node* step = bottom; step != nullptr; step = step == &top ? nullptr : step->parent) order.push_back(step);
  if (bottom == nullptr) order.push_back(&top);
  std::reverse(order.begin(), order.end());
  check_that(order.front() == &top, "a path does not lead to its end");
  const size_t path = order.size();
  for (size_t i = 0; i < order.size(); ++i) {
    check_that(order[i]->locks == 0, "a locked node is taken out of the tree");
    order[i]->children.each([&](Node* child) {
      if (i + 1 >= path || child != order[i + 1]) order.push_back(child);
    });
  }
  for (auto node = order.rbegin(); node != order.rend(); ++node) set_roles(**node, 0);  // parents look at their children
  if (Node* const parent = top.parent) {
    remove_child(*parent, top);
    settle(*parent);
  } else {
    forget_orphan(top);
  }
  PageIds host;
  for (Node* node : order) {
    const uint32_t n = node->size;
    counts_.held -= n;
    if (spots_) spots_->remove(*node, 0);
    counts_.child_slots -= node->children.capacity();
    --counts_.nodes;
    if (node->orphan) counts_.orphans -= n;
    if (node->on_device()) {
      counts_.pages -= n;
      if (node->may_arrive) counts_.arriving -= device_.count(node->device.get(), n, PageState::kArriving);
    }
    if (node->on_host()) counts_.host_pages -= n;
    if (node->copy != nullptr) {
      node->detached = true;
      node->parent = nullptr;
      ChildTable().swap(node->children);
      node->device_children = 0;
      continue;
    }
    if (node->on_device()) device.insert(device.end(), node->device.get(), node->device.get() + n);
    if (node->on_host()) host.insert(host.end(), node->host.get(), node->host.get() + n);
    delete node;
  }
  if (!host.empty()) host_->free_pages(host);
  changed();
}

std::vector<Node*> RadixTree::all_nodes() const {
  std::vector<Node*> nodes{const_cast<Node*>(&root_)};
  for (const auto& [parent, tops] : orphans_by_parent_) nodes.insert(nodes.end(), tops.begin(), tops.end());
  for (size_t i = 0; i < nodes.size(); ++i) {
    nodes[i]->children.each([&](Node* child) { nodes.push_back(child); });
  }
  return nodes;
}

}  // namespace kvferry
