// What goes when pages are needed: leaves of each tier in the policy's order, a long one cut so that no more than needed goes.
#include <algorithm>

#include "checks.h"
#include "radix/radix_tree.h"

namespace kvferry {

// At most `host_room` pages are spilled. What more of the host's pages could save is dropped, or ends it.
Evicted RadixTree::evict(uint32_t pages, uint32_t host_room, WhenHostIsFull then) {
  Evicted done;
  CopyRecord* spill = nullptr;
  uint32_t got = 0, spilled = 0;
  while (got < pages) {
    const auto head = device_index_.head();
    if (!head) break;
    Node& leaf = *head->node;
    const uint32_t take = std::min(leaf.size, pages - got);
    const bool room = host_ != nullptr && !leaf.no_spill && std::min(host_->free(), host_room) >= spilled + take;
    const bool could_spill = host_ != nullptr && !leaf.no_spill && !leaf.on_host();
    if (could_spill && !room && then == WhenHostIsFull::kStop) {
      const uint32_t left = std::min(host_->free(), host_room) - spilled;
      if (left == 0) break;
      split(leaf, leaf.size - left);  // the tail, which is the next head, has room
      continue;
    }
    policy_.on_evict(leaf.use(), Tier::kDevice, clock_.tick, clock_.now);
    if (!leaf.on_host() && !room) {
      drop(leaf, take, done.freed);
      done.dropped += take;
    } else {
      if (take < leaf.size) split(leaf, leaf.size - take);  // `leaf` is the tail now
      if (leaf.on_host()) {
        const PageIds freed = take_device(leaf);
        done.freed.insert(done.freed.end(), freed.begin(), freed.end());
      } else {
        if (spill == nullptr) spill = &begin_copy(CopyKind::kSpill);
        join_copy(*spill, leaf);
        settle(leaf);
        spilled += take;
      }
    }
    got += take;
  }
  check_that(device_.count(done.freed.data(), done.freed.size(), PageState::kCached) == done.freed.size(),
             "an evictable page is not CACHED");
  device_.free_pages(done.freed);
  if (spill != nullptr) {
    start_host_copy(*spill);
    done.spill = plan_of(*spill);
  }
  return done;
}

// The last `pages` pages of a device leaf go, and what hangs below, which is on the host only.
void RadixTree::drop(Node& leaf, uint32_t pages, PageIds& freed) {
  if (pages == leaf.size) {
    remove_subtree(leaf, nullptr, freed);
    return;
  }
  std::vector<Node*> below;
  leaf.children.each([&](Node* child) { below.push_back(child); });
  for (Node* child : below) remove_subtree(*child, nullptr, freed);
  const uint32_t keep = leaf.size - pages;
  freed.insert(freed.end(), leaf.device.get() + keep, leaf.device.get() + leaf.size);
  cut_tail(leaf, keep);
}

uint32_t RadixTree::evict_host(uint32_t pages) {
  uint32_t got = 0;
  // The youngest first: the older ones are about to leave the device, and would be copied again.
  while (got < pages && redundant_.last() != nullptr) {
    Node& node = *redundant_.last();
    const uint32_t take = std::min(node.size, pages - got);
    if (take < node.size) split(node, node.size - take);
    free_host(node);
    got += take;
  }
  while (got < pages) {
    const auto head = host_index_.head();
    if (!head) break;
    Node& leaf = *head->node;
    const uint32_t take = std::min(leaf.size, pages - got), keep = leaf.size - take;
    policy_.on_evict(leaf.use(), Tier::kHost, clock_.tick, clock_.now);
    if (keep == 0) {
      PageIds device;
      remove_subtree(leaf, nullptr, device);
      check_that(device.empty(), "a leaf of the host was on the device");
    } else {
      host_->free_pages(PageIds(leaf.host.get() + keep, leaf.host.get() + leaf.size));
      cut_tail(leaf, keep);
    }
    got += take;
  }
  return got;
}

std::optional<NextOut> RadixTree::oldest() const {
  const auto head = device_index_.head();
  if (!head) return std::nullopt;
  return NextOut{head->group, head->value};
}

std::optional<NextOut> RadixTree::oldest_host() const {
  if (const Node* node = redundant_.last()) return NextOut{-1, double(node->accessed)};
  const auto head = host_index_.head();
  if (!head) return std::nullopt;
  return NextOut{head->group, head->value};
}

Flushed RadixTree::flush() {
  Flushed done;
  PageIds freed;
  const std::vector<Node*> nodes = all_nodes();
  for (auto step = nodes.rbegin(); step != nodes.rend(); ++step) {  // children before parents
    Node& node = **step;
    if (is_root(node)) continue;
    if (node.locks > 0 || node.may_arrive || node.copy != nullptr || !node.children.empty()) {
      done.skipped += node.size;
      continue;
    }
    if (node.on_device()) done.device += node.size;
    if (node.on_host()) done.host += node.size;
    remove_subtree(node, nullptr, freed);
  }
  device_.free_pages(freed);
  return done;
}

// The device's memory is gone: what has a host page keeps that, what has none goes. Returns how many device pages were freed.
uint64_t RadixTree::forget_device() {
  check_that(locks_ == 0 && copies_.empty() && counts_.arriving == 0, "the device's pages are in use");
  PageIds freed;
  const std::vector<Node*> nodes = all_nodes();
  for (auto step = nodes.rbegin(); step != nodes.rend(); ++step) {  // children before parents
    Node& node = **step;
    if (is_root(node) || !node.on_device()) continue;
    if (node.on_host()) {
      const PageIds taken = take_device(node);
      freed.insert(freed.end(), taken.begin(), taken.end());
      continue;
    }
    std::vector<Node*> below;
    node.children.each([&](Node* child) { below.push_back(child); });
    for (Node* child : below) orphan(*child);
    remove_subtree(node, nullptr, freed);
  }
  device_.free_pages(freed);
  return freed.size();
}

// Host-only pages whose parent goes: they wait for one with its digest.
void RadixTree::orphan(Node& child) {
  Node& parent = *child.parent;
  remove_child(parent, child);
  keep_orphan(child, parent.last_digest());
  std::vector<Node*> family{&child};
  for (size_t i = 0; i < family.size(); ++i) {
    Node& node = *family[i];
    node.depth = node.parent == nullptr ? 0 : node.parent->depth + node.parent->size;
    node.orphan = true;
    counts_.orphans += node.size;
    rekey(node);
    node.children.each([&](Node* below) { family.push_back(below); });
  }
  settle(parent);
  changed();
}

}  // namespace kvferry
