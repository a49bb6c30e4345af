// The radix tree's one class and what its calls return; above each group of methods, the file that has them. How the tree
// works as a whole: the docstring of radix/tree.py. What each call does and what the results' members mean: the docstrings
// in bindings/tree.cpp, which has the same names. Here is what Python does not see.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "radix/eviction_index.h"
#include "radix/page_pool.h"
#include "radix/spot_index.h"
#include "radix/policy.h"
#include "radix/tree_node.h"

namespace kvferry {

struct Match {
  Node* node;
  uint32_t offset;  // pages of `node` that match
  uint32_t pages, device_pages;
  uint64_t version;  // of the tree's structure
};

struct Lock {
  const void* tree;
  Node* end;
  uint32_t pages;
  bool released;
};

struct Inserted {
  uint32_t existing;
  PageIds duplicates;
  Match match;
};

enum class CopyKind : uint8_t { kSpill, kBackup, kRestore };

// As Python gets it: `Copy`.
struct CopyPlan {
  uint64_t id;
  CopyKind kind;
  PageIds device, host;
  std::vector<uint8_t> digests, parents, outputs;
};

struct CopyRecord {
  uint64_t id;
  CopyKind kind;
  std::vector<Node*> nodes;  // splits add to them
  Node* end = nullptr;       // of the lock that a restore holds
};

enum class WhenHostIsFull { kDrop, kStop };  // kStop: `evict_with_room`

struct Evicted {
  PageIds freed;
  uint32_t dropped = 0;
  std::optional<CopyPlan> spill;
};

struct Finished {
  PageIds freed, readable, lost, removed;
};

struct Flushed {
  uint64_t device = 0, host = 0, skipped = 0;
};

struct Recovered {
  uint64_t attached = 0, orphans = 0, dropped = 0;
};

struct NextOut {
  int group;
  double value;
};

struct NodeView {
  uint32_t depth, pages;
  DigestKey first, last;
  bool device, host;
  uint32_t locks, hits;
  int32_t priority;
  bool output, orphan, copying;
  double accessed_s;
};

// Digests come as n * 32 bytes. Broken invariants throw BrokenInvariant before anything has changed.
class RadixTree {
 public:
  RadixTree(PagePool& device, PagePool* host, Policy& policy, Clock& clock, uint32_t write_through_hits);
  ~RadixTree();
  RadixTree(const RadixTree&) = delete;
  RadixTree& operator=(const RadixTree&) = delete;

  // radix_tree.cpp
  Match match(const uint8_t* digests, uint32_t n) const;
  PageIds match_pages(const Match& match) const;
  Lock lock(const Match& match, int32_t priority);
  void unlock(Lock& lock);
  void relock(Lock& lock, const Match& longer);
  PageIds path_pages(const Lock& lock) const;
  PageIds path_rows(const Lock& lock) const;
  uint32_t device_pages(const Lock& lock) const;
  Inserted insert(const uint8_t* digests, uint32_t n, const PageIds& pages, uint32_t start, bool output, int32_t priority);
  Inserted insert_host(const uint8_t* digests, uint32_t n, const PageIds& rows, uint32_t start, bool output, int32_t priority);
  void arrived(const PageIds& pages);
  PageIds prune(Lock& lock, uint32_t start);

  // tree_evict.cpp
  Evicted evict(uint32_t pages, uint32_t host_room, WhenHostIsFull then);
  uint32_t evict_host(uint32_t pages);
  std::optional<NextOut> oldest() const;
  std::optional<NextOut> oldest_host() const;
  Flushed flush();
  uint64_t forget_device();

  // tree_copies.cpp
  std::optional<CopyPlan> backups(uint32_t pages);
  std::optional<CopyPlan> backups_ahead(uint32_t pages, uint32_t ahead);
  std::optional<CopyPlan> restore(const Lock& lock, const PageIds& pages);
  Finished finish_copy(uint64_t id, const PageIds& failed);

  // tree_recover.cpp
  void begin_recovery();
  void end_recovery() { spots_.reset(); }
  Recovered recover(const uint8_t* digests, const uint8_t* parents, const PageIds& host_pages, const uint8_t* outputs);

  // tree_check.cpp
  std::vector<NodeView> dump(size_t limit) const;
  void check() const;
  uint64_t index_bytes() const;

  PagePool& device() const { return device_; }
  uint64_t version() const { return version_; }
  PagePool* host() const { return host_; }
  uint32_t write_through_hits() const { return write_through_hits_; }
  uint64_t pages() const { return counts_.pages; }
  uint64_t cached() const { return counts_.pages - counts_.arriving - counts_.restoring; }
  uint64_t arriving() const { return counts_.arriving; }
  uint64_t restoring() const { return counts_.restoring; }
  uint64_t evictable() const { return counts_.evictable; }
  uint64_t spilling() const { return counts_.spilling; }
  uint64_t host_pages() const { return counts_.host_pages; }
  uint64_t host_evictable() const { return counts_.host_evictable; }
  uint64_t orphans() const { return counts_.orphans; }
  uint64_t nodes() const { return counts_.nodes; }
  uint64_t locks() const { return locks_; }
  uint64_t copies() const { return copies_.size(); }

 private:
  struct Counts {
    uint64_t pages = 0, arriving = 0, restoring = 0, evictable = 0, spilling = 0;  // of the device
    uint64_t host_pages = 0, host_evictable = 0, orphans = 0;
    uint64_t nodes = 0, held = 0;  // held: pages of all nodes
    uint64_t child_slots = 0;

    bool operator==(const Counts& o) const {
      return pages == o.pages && arriving == o.arriving && restoring == o.restoring && evictable == o.evictable &&
             spilling == o.spilling && host_pages == o.host_pages && host_evictable == o.host_evictable &&
             orphans == o.orphans && nodes == o.nodes && held == o.held && child_slots == o.child_slots;
    }
  };

  // tree_inside.cpp: roles and lists
  uint8_t roles_of(const Node& node) const;
  void set_roles(Node& node, uint8_t roles);
  void settle(Node& node) { set_roles(node, roles_of(node)); }
  void rekey(Node& node);
  // ... structure
  void add_child(Node& parent, Node& child);
  void remove_child(Node& parent, Node& child);
  Node* split(Node& node, uint32_t pages);  // the new upper part
  void cut_tail(Node& node, uint32_t keep);
  Node* add_run(Node* parent, const uint8_t* digests, uint32_t n, const uint32_t* device, const uint32_t* host);
  void give_device(Node& node, const uint32_t* pages);
  void give_host(Node& node, const uint32_t* pages);
  PageIds take_device(Node& node);  // the ids keep their state
  void free_host(Node& node);
  void remove_subtree(Node& top, Node* bottom, PageIds& device);
  std::vector<Node*> all_nodes() const;  // parents before children
  bool is_root(const Node& node) const { return &node == &root_; }
  void changed();

  // radix_tree.cpp
  void check_lock(const Lock& lock) const;
  uint32_t device_pages_to(const Node& end) const;
  bool arrives(const Node& node, uint32_t begin, uint32_t end) const;
  void release(Node& end);
  PageIds release_and_remove(Node& end, Node& top);
  void touch(Node& end, uint8_t mark);
  void insert_behind(Node* node, const uint8_t* digests, uint32_t n, uint32_t held, const PageIds& fresh, bool output,
                     int32_t priority, Match& match);

  // tree_evict.cpp
  void drop(Node& leaf, uint32_t pages, PageIds& freed);
  void orphan(Node& child);

  // tree_copies.cpp
  CopyRecord& begin_copy(CopyKind kind);
  void join_copy(CopyRecord& record, Node& node);
  CopyPlan plan_of(const CopyRecord& record) const;
  void start_host_copy(CopyRecord& record);
  std::vector<std::pair<Node*, uint32_t>> unsaved_ahead(uint32_t ahead) const;
  void finish_host_copy(CopyRecord& record, const std::vector<uint32_t>& failed, Finished& done);
  void finish_restore(CopyRecord& record, const std::vector<uint32_t>& failed, Finished& done);

  // tree_recover.cpp
  class Recovery;
  void adopt_orphans(Node& parent);
  void take_home(Node& top);
  void keep_orphan(Node& top, const uint8_t* parent);
  void forget_orphan(const Node& top);
  static const Node* top_of(const Node& node);

  PagePool& device_;
  PagePool* const host_;
  Policy& policy_;
  Clock& clock_;
  const uint32_t write_through_hits_;
  Node root_;
  uint64_t version_;
  uint64_t serials_ = 0, copy_ids_ = 0;
  uint64_t locks_ = 0;  // handles that are not released
  Counts counts_;
  EvictionIndex device_index_, host_index_;
  NodeList redundant_, backups_wanted_;
  std::unordered_map<uint64_t, std::unique_ptr<CopyRecord>> copies_;
  std::unordered_map<DigestKey, std::vector<Node*>, DigestHash> orphans_by_parent_;
  std::unordered_map<const Node*, DigestKey> orphan_parents_;
  std::unique_ptr<SpotIndex> spots_;  // while pages are recovered
};

}  // namespace kvferry
