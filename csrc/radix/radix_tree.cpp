// Looking, locking and inserting.
#include "radix/radix_tree.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "checks.h"

namespace kvferry {
namespace {

bool distinct(const PageIds& pages) {
  // A pool gives them in order.
  if (std::adjacent_find(pages.begin(), pages.end(), [](uint32_t a, uint32_t b) { return a >= b; }) == pages.end()) return true;
  PageIds sorted = pages;
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
}

}  // namespace

Match RadixTree::match(const uint8_t* digests, uint32_t n) const {
  Node* node = const_cast<Node*>(&root_);
  uint32_t at = 0, device = 0;
  while (at < n) {
    const uint8_t* here = digests + size_t(at) * kPageDigestBytes;
    Node* const child = node->children.find(here);
    if (child == nullptr) break;
    const uint32_t same = child->common_pages(here, n - at);
    at += same;
    if (child->on_device()) device = at;
    if (same < child->size) return {child, same, at, device, version_};
    node = child;
  }
  return {node, node->size, at, device, version_};
}

PageIds RadixTree::match_pages(const Match& match) const {
  check_that(match.version == version_, "the tree has changed since this match");
  PageIds pages(match.device_pages);
  uint32_t n = match.offset;
  for (const Node* step = match.node; step != &root_; step = step->parent, n = step->size) {
    if (step->on_device()) std::copy_n(step->device.get(), n, pages.begin() + step->depth);
  }
  return pages;
}

// -- locks --------------------------------------------------------------------------------------------------------------

Lock RadixTree::lock(const Match& match, int32_t priority) {
  check_that(match.version == version_, "the tree has changed since this match");
  Node* const end = match.offset < match.node->size ? split(*match.node, match.offset) : match.node;
  const uint64_t tick = ++clock_.tick;
  const uint8_t mark = policy_.on_lock(end->use(), is_root(*end) ? nullptr : end->last_digest(), tick, clock_.now);
  for (Node* step = end; step != nullptr; step = step->parent) {
    if (!is_root(*step)) policy_.on_hit(step->use(), tick, clock_.now);
    ++step->locks;
    ++step->hits;
    step->priority = std::min(step->priority, priority);
    if (step->copy != nullptr && step->copy->kind == CopyKind::kSpill) step->keep = true;
    settle(*step);  // before its use changes, by which its place is found
    step->mark = mark;
    step->accessed = tick;
    step->accessed_s = clock_.now;
  }
  ++locks_;
  return {this, end, match.pages, false};
}

void RadixTree::check_lock(const Lock& lock) const {
  check_that(lock.tree == this && !lock.released, "the lock is released, or of another tree");
}

bool RadixTree::arrives(const Node& node, uint32_t begin, uint32_t end) const {
  return node.may_arrive && device_.count(node.device.get() + begin, end - begin, PageState::kArriving) > 0;
}

void RadixTree::unlock(Lock& lock) {
  check_lock(lock);
  for (const Node* step = lock.end; step != nullptr && step->locks == 1; step = step->parent) {
    check_that(!arrives(*step, 0, step->size), "unlocked over ARRIVING pages: prune them");
  }
  lock.released = true;
  --locks_;
  release(*lock.end);
}

// Takes one from the count of `end` and of all above it.
void RadixTree::release(Node& end) {
  const uint64_t tick = ++clock_.tick;
  for (Node* step = &end; step != nullptr; step = step->parent) {
    check_that(step->locks > 0, "a lock is missing");
    step->accessed = tick;  // it was in use until now
    step->accessed_s = clock_.now;
    if (--step->locks == 0) {
      step->may_arrive = false;
      if (!is_root(*step)) policy_.on_rest(step->use(), tick, clock_.now);
      settle(*step);
    }
  }
}

// The same, where the nodes from `top` to `end` are held by this lock alone: they go, with all that hangs below.
PageIds RadixTree::release_and_remove(Node& end, Node& top) {
  Node* const above = top.parent;
  for (Node* step = &end; step != above; step = step->parent) {
    check_that(step->locks == 1, "a locked node is taken out of the tree");
    step->locks = 0;
    step->may_arrive = true;  // it was not evictable, and must not be counted as if it had been
  }
  PageIds removed;
  remove_subtree(top, &end, removed);
  release(*above);
  return removed;
}

// Moves a lock down, over nodes that are behind its end: what a request adds to its own path. It is no hit.
void RadixTree::relock(Lock& lock, const Match& longer) {
  check_lock(lock);
  check_that(longer.version == version_, "the tree has changed since this match");
  check_that(longer.pages >= lock.pages, "the match is shorter than the lock");
  Node* step = longer.node;
  while (step != lock.end && step != nullptr) step = step->parent;
  check_that(step == lock.end, "the match does not go on where the lock ends");
  if (longer.node == lock.end) return;  // a lock ends with its node
  Node* const end = longer.offset < longer.node->size ? split(*longer.node, longer.offset) : longer.node;
  const uint64_t tick = ++clock_.tick;
  for (step = end; step != lock.end; step = step->parent) {
    policy_.on_hold(step->use(), tick, clock_.now);
    ++step->locks;
    if (step->copy != nullptr && step->copy->kind == CopyKind::kSpill) step->keep = true;
    settle(*step);  // before its use changes, by which its place is found
    step->accessed = tick;
    step->accessed_s = clock_.now;
  }
  lock.end = end;
  lock.pages = longer.pages;
}

uint32_t RadixTree::device_pages_to(const Node& end) const {
  const Node* step = &end;
  while (step != &root_ && !step->on_device()) step = step->parent;
  return step->depth + step->size;
}

uint32_t RadixTree::device_pages(const Lock& lock) const {
  check_lock(lock);
  return device_pages_to(*lock.end);
}

PageIds RadixTree::path_rows(const Lock& lock) const {
  check_lock(lock);
  PageIds rows(lock.pages);
  for (const Node* step = lock.end; step != &root_; step = step->parent) {
    check_that(step->on_host(), "a page of the path has no row");
    std::copy_n(step->host.get(), step->size, rows.begin() + step->depth);
  }
  return rows;
}

PageIds RadixTree::path_pages(const Lock& lock) const {
  PageIds pages(device_pages(lock));
  for (const Node* step = lock.end; step != &root_; step = step->parent) {
    if (step->on_device()) std::copy_n(step->device.get(), step->size, pages.begin() + step->depth);
  }
  return pages;
}

PageIds RadixTree::prune(Lock& lock, uint32_t start) {
  check_lock(lock);
  if (start > lock.pages) {
    throw BrokenInvariant("start is " + std::to_string(start) + "; the lock is over " + std::to_string(lock.pages) + " pages");
  }
  Node* top = nullptr;  // the highest node to go
  for (Node* step = lock.end; step->locks == 1 && !is_root(*step); step = step->parent) {
    if (step->depth + step->size > start) top = step;
    const uint32_t stays = std::min(step->size, std::max(start, step->depth) - step->depth);
    check_that(!arrives(*step, 0, stays), "unlocked over ARRIVING pages: prune them");
  }
  lock.released = true;
  --locks_;
  if (top == nullptr) {
    release(*lock.end);
    return {};
  }
  if (top->depth < start) split(*top, start - top->depth);  // `top` is the lower part now
  return release_and_remove(*lock.end, *top);
}

// -- inserting ----------------------------------------------------------------------------------------------------------

void RadixTree::touch(Node& end, uint8_t mark) {
  const uint64_t tick = ++clock_.tick;
  for (Node* step = &end; step != nullptr; step = step->parent) {
    step->mark = mark;
    step->accessed = tick;
    step->accessed_s = clock_.now;
    rekey(*step);
  }
}

Inserted RadixTree::insert(const uint8_t* digests, uint32_t n, const PageIds& pages, uint32_t start, bool output,
                           int32_t priority) {
  Match match = this->match(digests, n);
  if (match.device_pages < start) {
    throw std::invalid_argument("start is " + std::to_string(start) + "; only " + std::to_string(match.device_pages) +
                                " pages of the path are held on the device");
  }
  const uint32_t existing = match.device_pages;
  const auto first_fresh = pages.begin() + (existing - start);
  Inserted done{existing, PageIds(pages.begin(), first_fresh), match};
  const PageIds fresh(first_fresh, pages.end());
  if (fresh.empty()) {
    touch(*match.node, match.node->mark);
    return done;
  }
  PageIds leased;
  for (size_t i = 0; i < fresh.size(); ++i) {
    if (device_.state(fresh[i]) != PageState::kArriving) {
      leased.push_back(fresh[i]);
    } else if (existing + i < match.pages) {
      throw BrokenInvariant("page " + std::to_string(fresh[i]) + " is ARRIVING for a page that the host holds: restore that");
    }
  }
  check_that(distinct(pages), "a page is named twice");
  device_.move(leased, PageState::kLeased, PageState::kCached);  // the last that may be refused
  counts_.arriving += fresh.size() - leased.size();

  Node* const node = match.offset < match.node->size ? split(*match.node, match.offset) : match.node;
  std::vector<Node*> host_only;
  for (Node* step = node; step != &root_ && !step->on_device(); step = step->parent) host_only.push_back(step);
  for (auto step = host_only.rbegin(); step != host_only.rend(); ++step) {
    (*step)->priority = std::min((*step)->priority, priority);
    give_device(**step, fresh.data() + ((*step)->depth - existing));
  }
  uint32_t base = node->depth + node->size;
  const uint32_t held = base;
  for (const Node* step = node; !is_root(*step) && step->hits == 0; step = step->parent) base = step->depth;
  touch(*node, policy_.on_grow(node->use(), {digests, n, held, base, output}, clock_.tick, clock_.now));
  insert_behind(node, digests, n, existing, fresh, output, priority, match);
  done.match = {match.node, match.node->size, n, n, version_};
  return done;
}

// Pages fresh[i] of digest held + i, from the end of `node` on. New nodes end where an orphan waits for their last digest;
// that is linked there, and where the list goes on in it, it takes the pages.
void RadixTree::insert_behind(Node* node, const uint8_t* digests, uint32_t n, uint32_t held, const PageIds& fresh, bool output,
                              int32_t priority, Match& match) {
  uint32_t at = node->depth + node->size;
  while (at < n) {
    const uint8_t* const here = digests + size_t(at) * kPageDigestBytes;
    const uint32_t* const pages = fresh.data() + (at - held);
    if (Node* next = node->children.find(here)) {
      const uint32_t same = next->common_pages(here, n - at);
      if (same < next->size) next = split(*next, same);
      next->priority = std::min(next->priority, priority);
      next->accessed = clock_.tick;
      next->accessed_s = clock_.now;
      next->may_arrive = device_.count(pages, same, PageState::kArriving) > 0;
      give_device(*next, pages);
      if (next->may_arrive) free_host(*next);  // what is on its way has no second copy
      node = next;
      at += same;
      continue;
    }
    uint32_t end = at + 1;
    if (orphans_by_parent_.empty()) {
      end = n;
    } else {
      while (end < n && orphans_by_parent_.count(key_of(digests + size_t(end - 1) * kPageDigestBytes)) == 0) ++end;
    }
    Node* const fresh_node = add_run(node, here, end - at, pages, nullptr);
    fresh_node->may_arrive = device_.count(pages, end - at, PageState::kArriving) > 0;
    fresh_node->output = output;
    fresh_node->priority = priority;
    fresh_node->mark = node->mark;
    policy_.on_insert(fresh_node->use(), clock_.tick, clock_.now);
    settle(*fresh_node);
    settle(*node);
    if (!orphans_by_parent_.empty()) adopt_orphans(*fresh_node);
    node = fresh_node;
    at = end;
  }
  match.node = node;
}

Inserted RadixTree::insert_host(const uint8_t* digests, uint32_t n, const PageIds& rows, uint32_t start, bool output,
                                int32_t priority) {
  const Match match = this->match(digests, n);
  if (match.pages < start) {
    throw std::invalid_argument("start is " + std::to_string(start) + "; only " + std::to_string(match.pages) +
                                " pages of the path are held");
  }
  check_that(distinct(rows), "a row is named twice");
  check_that(host_->count(rows.data(), rows.size(), PageState::kLeased) == rows.size(), "a row is not LEASED");
  Inserted done{match.pages, PageIds(rows.begin(), rows.begin() + (match.pages - start)), match};
  if (match.pages == n) {
    touch(*match.node, match.node->mark);
    return done;
  }
  Node* node = match.offset < match.node->size ? split(*match.node, match.offset) : match.node;
  uint32_t at = match.pages, base = at;
  for (const Node* step = node; !is_root(*step) && step->hits == 0; step = step->parent) base = step->depth;
  touch(*node, policy_.on_grow(node->use(), {digests, n, at, base, output}, clock_.tick, clock_.now));
  while (at < n) {
    const uint8_t* const here = digests + size_t(at) * kPageDigestBytes;
    const auto first = rows.begin() + (at - start);
    if (Node* next = node->children.find(here)) {  // adopted just now: it has rows
      const uint32_t same = next->common_pages(here, n - at);
      node = same < next->size ? split(*next, same) : next;
      done.duplicates.insert(done.duplicates.end(), first, first + same);
      at += same;
      continue;
    }
    uint32_t end = n;
    if (!orphans_by_parent_.empty()) {
      for (end = at + 1; end < n && orphans_by_parent_.count(key_of(digests + size_t(end - 1) * kPageDigestBytes)) == 0;) ++end;
    }
    const PageIds taken(first, first + (end - at));
    host_->move(taken, PageState::kLeased, PageState::kCached);
    Node* const fresh = add_run(node, here, end - at, nullptr, taken.data());
    fresh->output = output;
    fresh->priority = priority;
    fresh->mark = node->mark;
    policy_.on_insert(fresh->use(), clock_.tick, clock_.now);
    settle(*fresh);
    settle(*node);
    if (!orphans_by_parent_.empty()) adopt_orphans(*fresh);
    node = fresh;
    at = end;
  }
  done.match = {node, node->size, n, device_pages_to(*node), version_};
  return done;
}

void RadixTree::arrived(const PageIds& pages) {
  check_that(pages.size() <= counts_.arriving, "pages of another tree arrived");
  device_.move(pages, PageState::kArriving, PageState::kCached);
  counts_.arriving -= pages.size();
}

}  // namespace kvferry
