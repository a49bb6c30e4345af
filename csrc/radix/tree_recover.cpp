// Pages of the host that outlived the tree are put into it again, in whatever order they come; and the orphans among them.
#include <algorithm>
#include <stdexcept>
#include <tuple>

#include "checks.h"
#include "radix/radix_tree.h"

namespace kvferry {
namespace {

constexpr uint32_t kNone = ~uint32_t(0);
constexpr DigestKey kNoParent{};

}  // namespace

// -- orphans: host-only nodes whose parent is not there -----------------------------------------------------------------

void RadixTree::keep_orphan(Node& top, const uint8_t* parent) {
  orphans_by_parent_[key_of(parent)].push_back(&top);
  orphan_parents_[&top] = key_of(parent);
}

void RadixTree::forget_orphan(const Node& top) {
  const auto parent = orphan_parents_.find(&top);
  check_that(parent != orphan_parents_.end(), "a node without a parent is no orphan");
  const auto waiting = orphans_by_parent_.find(parent->second);
  auto& tops = waiting->second;
  tops.erase(std::find(tops.begin(), tops.end(), &top));
  if (tops.empty()) orphans_by_parent_.erase(waiting);
  orphan_parents_.erase(parent);
}

const Node* RadixTree::top_of(const Node& node) {
  const Node* top = &node;
  while (top->parent != nullptr) top = top->parent;
  return top;
}

// Links what waits for the last digest of `parent`, a node that is new.
void RadixTree::adopt_orphans(Node& parent) {
  const DigestKey key = key_of(parent.last_digest());
  const auto waiting = orphans_by_parent_.find(key);
  if (waiting == orphans_by_parent_.end()) return;
  const std::vector<Node*> tops = std::move(waiting->second);
  orphans_by_parent_.erase(waiting);
  const Node* const top = parent.orphan ? top_of(parent) : nullptr;
  for (Node* orphan : tops) {
    if (orphan == top) {  // digests that are no hashes could make a ring
      orphans_by_parent_[key].push_back(orphan);
      continue;
    }
    orphan_parents_.erase(orphan);
    add_child(parent, *orphan);
    if (!parent.orphan) take_home(*orphan);
  }
  settle(parent);
  changed();
}

// It and all below it have a path from the root now. Once in a node's life, although one orphan may adopt the other often.
void RadixTree::take_home(Node& top) {
  std::vector<Node*> family{&top};
  for (size_t i = 0; i < family.size(); ++i) {
    Node& node = *family[i];
    node.depth = node.parent->depth + node.parent->size;
    node.orphan = false;
    counts_.orphans -= node.size;
    rekey(node);
    node.children.each([&](Node* child) { family.push_back(child); });
  }
}

// -- recovering ---------------------------------------------------------------------------------------------------------

class RadixTree::Recovery {
 public:
  Recovery(RadixTree& tree, const uint8_t* digests, const uint8_t* parents, const PageIds& pages, const uint8_t* outputs)
      : tree_(tree), digests_(digests), parents_(parents), pages_(pages), outputs_(outputs), n_(uint32_t(pages.size())) {}

  Recovered run() {
    kinds_.assign(n_, Kind::kNew);
    children_.resize(n_);
    index_given();
    find_held();
    complete_held();
    std::vector<Start> starts = link();
    std::sort(starts.begin(), starts.end(), [](const Start& a, const Start& b) {
      return std::tie(a.spot.node->serial, a.spot.offset, a.first) < std::tie(b.spot.node->serial, b.spot.offset, b.first);
    });
    attach(starts);
    for (const uint32_t first : orphan_starts_) build(nullptr, first);
    for (uint32_t i = 0; i < n_; ++i) {
      if (kinds_[i] == Kind::kNew) drop(i);  // never reached: a ring, or what hangs on one
    }
    tree_.host_->free_pages(dropped_);
    done_.dropped = dropped_.size();
    return done_;
  }

 private:
  enum class Kind : uint8_t { kNew, kHeld, kDone };
  struct Start {
    Spot spot;  // the page that is its parent
    uint32_t first;
  };

  const uint8_t* digest(uint32_t i) const { return digests_ + size_t(i) * kPageDigestBytes; }
  const uint8_t* parent(uint32_t i) const { return parents_ + size_t(i) * kPageDigestBytes; }
  bool output(uint32_t i) const { return outputs_ != nullptr && outputs_[i] != 0; }

  void drop(uint32_t i) {
    kinds_[i] = Kind::kDone;
    dropped_.push_back(pages_[i]);
  }

  void index_given() {
    given_.reserve(n_);
    for (uint32_t i = 0; i < n_; ++i) {
      if (!given_.emplace(key_of(digest(i)), i).second) drop(i);
    }
  }

  // Which of the given pages nodes have already, by node.
  void find_held() {
    std::vector<std::pair<Spot, uint32_t>> found;
    for (uint32_t i = 0; i < n_; ++i) {
      if (kinds_[i] != Kind::kNew) continue;
      if (const auto held = tree_.spots_->find(digest(i))) found.emplace_back(*held, i);
    }
    std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
      return std::tie(a.first.node->serial, a.first.offset) < std::tie(b.first.node->serial, b.first.offset);
    });
    for (const auto& [spot, i] : found) {
      kinds_[i] = Kind::kHeld;
      if (held_.empty() || held_.back().node != spot.node) held_.push_back({spot.node, {}});
      held_.back().given.push_back(i);
    }
  }

  // Of what is there already, only a whole node that has no host copy has use for the pages.
  void complete_held() {
    for (const auto& [node, given] : held_) {
      const bool whole = given.size() == node->size && !node->on_host() && node->copy == nullptr && !node->may_arrive;
      PageIds pages;
      for (const uint32_t i : given) {
        if (whole) {
          pages.push_back(pages_[i]);
        } else {
          drop(i);
        }
        kinds_[i] = Kind::kHeld;
      }
      if (!whole) continue;
      tree_.give_host(*node, pages.data());
      done_.attached += pages.size();
    }
  }

  std::vector<Start> link() {
    std::vector<Start> starts;
    for (uint32_t i = 0; i < n_; ++i) {
      if (kinds_[i] != Kind::kNew) continue;
      const DigestKey key = key_of(parent(i));
      const auto given = given_.find(key);
      if (key == kNoParent) {
        starts.push_back({{&tree_.root_, 0}, i});
      } else if (given != given_.end() && kinds_[given->second] == Kind::kNew) {
        children_[given->second].push_back(i);
      } else if (const auto held = tree_.spots_->find(parent(i))) {
        starts.push_back({*held, i});
      } else {
        orphan_starts_.push_back(i);
      }
    }
    return starts;
  }

  // Spots of one node come in order: a split leaves the lower part its identity, with offsets that count from there.
  void attach(const std::vector<Start>& starts) {
    const Node* last = nullptr;
    Node* parent = nullptr;
    uint32_t last_offset = kNone, shift = 0;
    for (const Start& start : starts) {
      Node* const node = start.spot.node;
      if (node != last) {
        shift = 0;
        last_offset = kNone;
        last = node;
      }
      if (tree_.is_root(*node)) {
        parent = node;
      } else if (start.spot.offset != last_offset) {
        const uint32_t upper = start.spot.offset + 1 - shift;
        parent = upper < node->size ? tree_.split(*node, upper) : node;
        if (parent != node) shift += upper;
        last_offset = start.spot.offset;
      }
      build(parent, start.first);
    }
  }

  // One node for each longest run of pages that have one child, of the same kind, and all that hangs below.
  void build(Node* above, uint32_t start) {
    std::vector<std::pair<Node*, uint32_t>> todo{{above, start}};
    while (!todo.empty()) {
      auto [parent, i] = todo.back();
      todo.pop_back();
      const uint32_t first = i;
      std::vector<uint8_t> digests;
      PageIds pages;
      for (;;) {
        kinds_[i] = Kind::kDone;
        digests.insert(digests.end(), digest(i), digest(i) + kPageDigestBytes);
        pages.push_back(pages_[i]);
        if (children_[i].size() != 1 || output(children_[i][0]) != output(i)) break;
        if (tree_.orphans_by_parent_.count(key_of(digest(i))) > 0) break;
        i = children_[i][0];
      }
      Node* const node = tree_.add_run(parent, digests.data(), uint32_t(pages.size()), nullptr, pages.data());
      node->output = output(first);
      node->orphan = parent == nullptr || parent->orphan;
      if (node->orphan) tree_.counts_.orphans += node->size;
      (node->orphan ? done_.orphans : done_.attached) += node->size;
      if (parent == nullptr) tree_.keep_orphan(*node, this->parent(first));
      tree_.policy_.on_insert(node->use(), tree_.clock_.tick, tree_.clock_.now);
      tree_.settle(*node);
      if (parent != nullptr) tree_.settle(*parent);
      tree_.adopt_orphans(*node);
      for (auto child = children_[i].rbegin(); child != children_[i].rend(); ++child) todo.emplace_back(node, *child);
    }
  }

  struct HeldRun {
    Node* node;
    std::vector<uint32_t> given;  // in the node's order
  };

  RadixTree& tree_;
  const uint8_t *const digests_, *const parents_;
  const PageIds& pages_;
  const uint8_t* const outputs_;
  const uint32_t n_;
  std::unordered_map<DigestKey, uint32_t, DigestHash> given_;
  std::vector<Kind> kinds_;
  std::vector<std::vector<uint32_t>> children_;
  std::vector<HeldRun> held_;
  std::vector<uint32_t> orphan_starts_;
  PageIds dropped_;
  Recovered done_;
};

void RadixTree::begin_recovery() {
  spots_ = std::make_unique<SpotIndex>();
  for (Node* node : all_nodes()) spots_->add(*node);
}

Recovered RadixTree::recover(const uint8_t* digests, const uint8_t* parents, const PageIds& host_pages,
                             const uint8_t* outputs) {
  if (host_ == nullptr) throw std::invalid_argument("host_pages: the tree has no host pool");
  host_->move(host_pages, PageState::kLeased, PageState::kCached);
  if (!spots_) begin_recovery();
  ++clock_.tick;
  return Recovery(*this, digests, parents, host_pages, outputs).run();
}

}  // namespace kvferry
