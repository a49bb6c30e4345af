// A node of the radix tree: a run of pages with their digests, and page ids on the device, on the host, or both.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <type_traits>
#include <utility>

#include "radix/policy.h"

namespace kvferry {

constexpr uint32_t kPageDigestBytes = 32;

using DigestKey = std::array<uint8_t, kPageDigestBytes>;

inline DigestKey key_of(const uint8_t* digest) {
  DigestKey key;
  std::memcpy(key.data(), digest, kPageDigestBytes);
  return key;
}

inline bool same_digest(const uint8_t* a, const uint8_t* b) { return std::memcmp(a, b, kPageDigestBytes) == 0; }

inline uint64_t hash_of(const uint8_t* digest) {
  uint64_t words[4];
  std::memcpy(words, digest, sizeof words);
  uint64_t mixed = (words[0] ^ words[2] * 0xff51afd7ed558ccdu) + (words[1] ^ words[3] * 0xc4ceb9fe1a85ec53u);
  mixed *= 0x9e3779b97f4a7c15u;
  return mixed ^ mixed >> 32;
}

struct DigestHash {
  size_t operator()(const DigestKey& key) const { return size_t(hash_of(key.data())); }
};

// A plain array whose length its owner knows: most nodes are small, and a vector's two further words would show.
template <class T>
class FlatArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  FlatArray() = default;
  FlatArray(const T* from, size_t n) : data_(static_cast<T*>(std::malloc(n * sizeof(T)))) {
    if (data_ == nullptr) throw std::bad_alloc();
    std::memcpy(data_, from, n * sizeof(T));
  }
  FlatArray(FlatArray&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  FlatArray& operator=(FlatArray&& other) noexcept {
    std::swap(data_, other.data_);
    return *this;
  }
  ~FlatArray() { std::free(data_); }

  explicit operator bool() const { return data_ != nullptr; }
  T* get() const { return data_; }
  T operator[](size_t i) const { return data_[i]; }

  // The head of an array stays where it is, so that a cut costs no more than what goes.
  void shrink(size_t n) {
    if (void* moved = std::realloc(data_, n * sizeof(T))) data_ = static_cast<T*>(moved);
  }
  void reset() {
    std::free(data_);
    data_ = nullptr;
  }

 private:
  T* data_ = nullptr;
};

struct Node;
struct CopyRecord;

// The children of a node by their first digest: open addressing, nothing allocated while there are none.
class ChildTable {
 public:
  ChildTable() = default;
  ChildTable(const ChildTable&) = delete;
  ChildTable& operator=(const ChildTable&) = delete;
  ~ChildTable() { std::free(slots_); }

  bool empty() const { return count_ == 0; }
  uint32_t count() const { return count_; }
  uint32_t capacity() const { return capacity_; }
  Node* find(const uint8_t* digest) const;
  void add(Node* child);
  void remove(const Node* child);
  void replace(const Node* child, Node* by);  // with the same first digest
  void swap(ChildTable& other);

  template <class Visit>
  void each(Visit visit) const {
    for (uint32_t i = 0; i < capacity_; ++i) {
      if (slots_[i] != nullptr) visit(slots_[i]);
    }
  }

 private:
  uint32_t home(const Node* child) const;
  uint32_t slot_of(const Node* child) const;
  void place(Node* child);
  void resize(uint32_t capacity);

  Node** slots_ = nullptr;
  uint32_t capacity_ = 0;  // a power of two, or 0
  uint32_t count_ = 0;
};

struct IndexEntry {
  double key;
  uint64_t accessed;
  Node* node;
};

struct IndexOrder {
  bool operator()(const IndexEntry& a, const IndexEntry& b) const;
};

using IndexSet = std::set<IndexEntry, IndexOrder>;

// What a node counts as; kept by RadixTree::settle alone.
enum Role : uint8_t {
  kEvictable = 1,        // device pages that no lock holds
  kSpillEnds = 2,        // device pages that are free when the spills end, if nothing else happens
  kDeviceLeaf = 4,       // in the device's eviction index
  kHostLeaf = 8,         // in the host's eviction index
  kRedundant = 16,       // host pages of a node that is on the device; in the list of those
  kHostOnlyIdle = 32,    // host pages that an eviction of the host would reach
  kBackupWanted = 64,    // in the list of those
};

struct Node {
  Node* parent = nullptr;  // null: the root, the top of an orphan, or detached
  FlatArray<uint8_t> digests;
  FlatArray<uint32_t> device, host;  // all pages or none
  ChildTable children;
  CopyRecord* copy = nullptr;  // in flight
  Node *previous = nullptr, *next = nullptr;  // in the list of redundant nodes, or that of wanted backups
  IndexSet::iterator entry;                   // while a leaf of either tier
  uint64_t serial = 0;
  uint64_t created = 0, accessed = 0;
  double created_s = 0.0, accessed_s = 0.0;
  uint32_t size = 0;   // pages
  uint32_t depth = 0;  // pages before it; of an orphan, some of those
  uint32_t above = 0;  // pages of the run as it was made that splits took from before it
  uint32_t locks = 0;  // on it or a descendant
  uint32_t hits = 0;
  uint32_t device_children = 0;
  uint32_t leaving_children = 0;  // of those, the ones that are kSpillEnds
  int32_t priority = 0;
  uint8_t roles = 0;
  uint8_t group = 0, klass = 0;  // of its entry
  uint8_t mark = 0;              // the policy's
  bool may_arrive : 1;           // pages may be ARRIVING: from insert, split or a failed restore to the last unlock
  bool output : 1;
  bool orphan : 1;
  bool keep : 1;      // locked while it was spilled
  bool no_spill : 1;  // a copy of it to the host failed
  bool detached : 1;  // taken out of the tree; its copy still names the pages

  Node() : may_arrive(false), output(false), orphan(false), keep(false), no_spill(false), detached(false) {}

  const uint8_t* digest(uint32_t page) const { return digests.get() + size_t(page) * kPageDigestBytes; }
  const uint8_t* first_digest() const { return digests.get(); }
  const uint8_t* last_digest() const { return digest(size - 1); }
  bool on_device() const { return bool(device); }
  bool on_host() const { return bool(host); }

  Use use() const {
    return {created, accessed, created_s, accessed_s, hits, size, depth, priority, output, orphan, mark, locks};
  }

  // How many leading digests equal those at `data`, of which there are `n` and the first is equal. Chained digests are
  // equal at a page only if they are equal at all pages before it, so this bisects; first the whole.
  uint32_t common_pages(const uint8_t* data, uint32_t n) const {
    uint32_t low = 1, high = size < n ? size : n, middle = high;
    while (low < high) {
      if (same_digest(digest(middle - 1), data + size_t(middle - 1) * kPageDigestBytes)) {
        low = middle;
      } else {
        high = middle - 1;
      }
      middle = (low + high + 1) / 2;
    }
    return low;
  }
};

inline Node* ChildTable::find(const uint8_t* digest) const {
  if (count_ == 0) return nullptr;
  const uint32_t mask = capacity_ - 1;
  uint32_t at = uint32_t(hash_of(digest)) & mask;
  for (uint32_t probe = 0; probe < capacity_; ++probe, at = (at + 1) & mask) {  // a small table may be full
    Node* child = slots_[at];
    if (child == nullptr) return nullptr;
    if (same_digest(child->first_digest(), digest)) return child;
  }
  return nullptr;
}

// Nodes through their `previous` and `next`, in the order in which they came.
class NodeList {
 public:
  Node* first() const { return first_; }
  Node* last() const { return last_; }
  void add(Node* node);
  void remove(Node* node);

 private:
  Node *first_ = nullptr, *last_ = nullptr;
};

}  // namespace kvferry
