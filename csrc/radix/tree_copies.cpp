// Copies between the tiers: what they are to move, and what becomes of their nodes when they end.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checks.h"
#include "radix/radix_tree.h"

namespace kvferry {
namespace {

PageIds ids_of(const FlatArray<uint32_t>& pages, uint32_t n) { return PageIds(pages.get(), pages.get() + n); }

void append(PageIds& to, const PageIds& from) { to.insert(to.end(), from.begin(), from.end()); }

// `failed` is sorted.
bool any_failed(const Node& node, const PageIds& failed) {
  return !failed.empty() && std::any_of(node.device.get(), node.device.get() + node.size, [&](uint32_t page) {
    return std::binary_search(failed.begin(), failed.end(), page);
  });
}

}  // namespace

CopyRecord& RadixTree::begin_copy(CopyKind kind) {
  auto record = std::make_unique<CopyRecord>();
  record->id = ++copy_ids_;
  record->kind = kind;
  return *(copies_[record->id] = std::move(record));
}

void RadixTree::join_copy(CopyRecord& record, Node& node) {
  node.copy = &record;
  record.nodes.push_back(&node);
}

CopyPlan RadixTree::plan_of(const CopyRecord& record) const {
  CopyPlan plan{record.id, record.kind, {}, {}, {}, {}, {}};
  size_t pages = 0;
  for (const Node* node : record.nodes) pages += node->size;
  plan.device.reserve(pages);
  plan.host.reserve(pages);
  plan.digests.reserve(pages * kPageDigestBytes);
  plan.parents.reserve(pages * kPageDigestBytes);
  plan.outputs.reserve(pages);
  for (const Node* node : record.nodes) {
    const size_t bytes = size_t(node->size) * kPageDigestBytes;
    const uint8_t* digests = node->digests.get();
    plan.device.insert(plan.device.end(), node->device.get(), node->device.get() + node->size);
    plan.host.insert(plan.host.end(), node->host.get(), node->host.get() + node->size);
    plan.digests.insert(plan.digests.end(), digests, digests + bytes);
    if (is_root(*node->parent)) {
      plan.parents.insert(plan.parents.end(), kPageDigestBytes, 0);
    } else {
      plan.parents.insert(plan.parents.end(), node->parent->last_digest(), node->parent->last_digest() + kPageDigestBytes);
    }
    plan.parents.insert(plan.parents.end(), digests, digests + bytes - kPageDigestBytes);
    plan.outputs.insert(plan.outputs.end(), node->size, node->output ? 1 : 0);
  }
  return plan;
}

// The nodes of a spill or backup get host pages; there is room for them.
void RadixTree::start_host_copy(CopyRecord& record) {
  PageIds device;
  for (const Node* node : record.nodes) append(device, ids_of(node->device, node->size));
  const PageIds host = host_->allocate(int64_t(device.size()), PageState::kSpilling);
  device_.move(device, PageState::kCached, PageState::kSpilling);
  const uint32_t* next = host.data();
  for (Node* node : record.nodes) {
    node->keep = false;
    give_host(*node, next);
    next += node->size;
  }
}

std::optional<CopyPlan> RadixTree::backups(uint32_t pages) {
  if (backups_wanted_.first() == nullptr) return std::nullopt;
  uint32_t room = std::min(pages, host_->free());
  CopyRecord* record = nullptr;
  for (Node *node = backups_wanted_.first(), *next; node != nullptr && room > 0; node = next) {
    next = node->next;
    if (node->may_arrive) {
      if (node->locks == 0 || arrives(*node, 0, node->size)) continue;
      node->may_arrive = false;
    }
    if (node->size > room) node = split(*node, room);
    room -= node->size;
    if (record == nullptr) record = &begin_copy(CopyKind::kBackup);
    join_copy(*record, *node);
    settle(*node);
  }
  if (record == nullptr) return std::nullopt;
  start_host_copy(*record);
  return plan_of(*record);
}

// What the host lacks of the next `ahead` pages to be evicted: nodes in the order in which they would go, and how many pages
// of the end of each.
std::vector<std::pair<Node*, uint32_t>> RadixTree::unsaved_ahead(uint32_t ahead) const {
  std::vector<std::pair<Node*, uint32_t>> found;
  std::unordered_map<const Node*, uint32_t> gone;  // children of each on the device that would have gone
  uint64_t pages = 0;
  device_index_.walk([&](Node* leaf) {
    for (Node* node = leaf; pages < ahead; node = node->parent) {
      const uint32_t end = uint32_t(std::min<uint64_t>(node->size, ahead - pages));
      if (!node->on_host() && !node->no_spill) found.emplace_back(node, end);
      pages += end;
      Node& parent = *node->parent;
      const bool next = !is_root(parent) && parent.locks == 0 && !parent.may_arrive && parent.copy == nullptr;
      if (!next || ++gone[&parent] < parent.device_children) break;
    }
    return pages < ahead;
  });
  return found;
}

std::optional<CopyPlan> RadixTree::backups_ahead(uint32_t pages, uint32_t ahead) {
  if (host_ == nullptr) return std::nullopt;
  uint32_t room = std::min(pages, host_->free());
  CopyRecord* record = nullptr;
  for (const auto& [node, end] : unsaved_ahead(ahead)) {
    if (room == 0) break;
    const uint32_t take = std::min(end, room);
    if (node->size > take) split(*node, node->size - take);  // `node` is the tail now, which goes first
    room -= take;
    if (record == nullptr) record = &begin_copy(CopyKind::kBackup);
    join_copy(*record, *node);
    settle(*node);
  }
  if (record == nullptr) return std::nullopt;
  start_host_copy(*record);
  return plan_of(*record);
}

std::optional<CopyPlan> RadixTree::restore(const Lock& lock, const PageIds& pages) {
  const uint32_t held = device_pages(lock), missing = lock.pages - held;
  if (pages.size() != missing) {
    throw std::invalid_argument("pages has " + std::to_string(pages.size()) + " entries; the path has " +
                                std::to_string(missing) + " pages on the host only");
  }
  if (missing == 0) return std::nullopt;
  device_.move(pages, PageState::kLeased, PageState::kRestoring);
  CopyRecord& record = begin_copy(CopyKind::kRestore);
  record.end = lock.end;
  std::vector<Node*> path;
  for (Node* step = lock.end; step->depth >= held && !is_root(*step); step = step->parent) path.push_back(step);
  std::reverse(path.begin(), path.end());
  PageIds host;
  for (Node* node : path) {
    join_copy(record, *node);
    append(host, ids_of(node->host, node->size));
    give_device(*node, pages.data() + (node->depth - held));
  }
  host_->move(host, PageState::kCached, PageState::kRestoring);
  counts_.restoring += missing;
  for (Node* step = lock.end; step != nullptr; step = step->parent) ++step->locks;  // was locked already: no role changes
  return plan_of(record);
}

Finished RadixTree::finish_copy(uint64_t id, const PageIds& failed) {
  const auto found = copies_.find(id);
  if (found == copies_.end()) throw std::out_of_range("copy_id is " + std::to_string(id) + "; no such copy is in flight");
  PageIds sorted = failed;
  std::sort(sorted.begin(), sorted.end());
  sorted.erase(std::unique(sorted.begin(), sorted.end()), sorted.end());
  size_t known = 0;
  for (const Node* node : found->second->nodes) {
    if (sorted.empty()) break;
    known += size_t(std::count_if(node->device.get(), node->device.get() + node->size, [&](uint32_t page) {
      return std::binary_search(sorted.begin(), sorted.end(), page);
    }));
  }
  if (known != sorted.size()) {
    throw std::invalid_argument("failed: " + std::to_string(sorted.size() - known) + " of its pages are not of copy " +
                                std::to_string(id));
  }
  const std::unique_ptr<CopyRecord> record = std::move(found->second);
  copies_.erase(found);
  Finished done;
  if (record->kind == CopyKind::kRestore) {
    finish_restore(*record, sorted, done);
  } else {
    finish_host_copy(*record, sorted, done);
  }
  return done;
}

void RadixTree::finish_host_copy(CopyRecord& record, const PageIds& failed, Finished& done) {
  PageIds host_freed, host_readable, device_readable;
  // The deepest first: when it has left, what is above it may be a leaf of the device.
  std::sort(record.nodes.begin(), record.nodes.end(), [](const Node* a, const Node* b) { return a->depth > b->depth; });
  for (Node* node : record.nodes) {
    const PageIds host = ids_of(node->host, node->size);
    if (node->detached) {
      append(host_freed, host);
      append(done.freed, ids_of(node->device, node->size));
      delete node;
      continue;
    }
    const bool bad = any_failed(*node, failed);
    const bool leaves = !bad && (node->roles & kSpillEnds) && node->device_children == 0;
    append(bad ? host_freed : host_readable, host);
    if (bad) {
      node->no_spill = true;
      counts_.host_pages -= node->size;
      node->host.reset();
    }
    node->copy = nullptr;
    node->keep = false;
    if (leaves) {
      append(done.freed, take_device(*node));
    } else {
      append(device_readable, ids_of(node->device, node->size));
      settle(*node);
    }
  }
  host_->move(host_readable, PageState::kSpilling, PageState::kCached);
  host_->free_pages(host_freed);
  device_.move(device_readable, PageState::kSpilling, PageState::kCached);
  device_.free_pages(done.freed);
}

void RadixTree::finish_restore(CopyRecord& record, const PageIds& failed, Finished& done) {
  PageIds lost, host_freed, host_readable, device_readable;
  for (Node* node : record.nodes) {
    counts_.restoring -= node->size;
    node->copy = nullptr;
    const PageIds host = ids_of(node->host, node->size);
    if (!any_failed(*node, failed)) {
      append(host_readable, host);
      append(device_readable, ids_of(node->device, node->size));
      continue;
    }
    for (uint32_t i = 0; i < node->size; ++i) {
      const bool bad = std::binary_search(failed.begin(), failed.end(), node->device[i]);
      (bad ? lost : device_readable).push_back(node->device[i]);
    }
    append(host_freed, host);
    counts_.host_pages -= node->size;
    node->host.reset();
    node->may_arrive = true;
  }
  host_->move(host_readable, PageState::kRestoring, PageState::kCached);
  host_->free_pages(host_freed);
  device_.move(device_readable, PageState::kRestoring, PageState::kCached);
  device_.move(lost, PageState::kRestoring, PageState::kArriving);
  counts_.arriving += lost.size();
  for (Node* node : record.nodes) settle(*node);

  // What no one else waits for goes, from the first node on whose pages will not come.
  Node* top = nullptr;
  for (Node* step = record.end; step->locks == 1 && !is_root(*step); step = step->parent) {
    if (arrives(*step, 0, step->size)) top = step;
  }
  std::vector<const Node*> staying;
  for (const Node* node : record.nodes) {
    if (top == nullptr || node->depth < top->depth) staying.push_back(node);
  }
  std::sort(staying.begin(), staying.end(), [](const Node* a, const Node* b) { return a->depth < b->depth; });
  for (const Node* node : staying) {
    for (uint32_t i = 0; i < node->size; ++i) {
      const bool bad = std::binary_search(failed.begin(), failed.end(), node->device[i]);
      (bad ? done.lost : done.readable).push_back(node->device[i]);
    }
  }
  if (top != nullptr) {
    done.removed = release_and_remove(*record.end, *top);
  } else {
    release(*record.end);
  }
}

}  // namespace kvferry
