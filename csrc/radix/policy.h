// In which order unlocked leaves are evicted. A policy gives each leaf a class and a key; see PolicyKind in policy.cpp for
// how one is added.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace kvferry {

// Shared by the trees of one side: `tick` grows with every lock, unlock and insert, so the order of use is exact.
struct Clock {
  double now = 0.0;  // seconds, set by the owner
  uint64_t tick = 0;
};

// What a policy may look at.
struct Use {
  uint64_t created, accessed;  // ticks
  double created_s, accessed_s;
  uint32_t hits;   // locks ever taken on it or below it
  uint32_t pages;  // of the node
  uint32_t depth;  // pages before it
  int32_t priority;
  bool output, orphan;
  uint8_t mark = 0;    // of the policy, see on_lock
  uint32_t locks = 0;  // on it or below it now
};

// An insert that goes on behind what is held, for policies that tell requests apart.
struct Growth {
  const uint8_t* digests;  // of the whole list, 32 bytes a page
  uint32_t pages;          // of the whole list
  uint32_t held;           // leading ones that were there
  uint32_t base;           // leading ones that were there before this request brought its first page
  bool output;
};

// Where a leaf stands: inside a class the smallest key goes first, then the least recently used. Static until the leaf is
// touched or changes its pages.
struct Place {
  uint8_t klass;  // < Policy::classes()
  double key;
};

constexpr int kMaxPolicyClasses = 64;

enum class Tier : uint8_t { kDevice, kHost };

class Policy {
 public:
  virtual ~Policy() = default;

  virtual Place place(const Use& use) const = 0;
  virtual int classes() const { return 1; }
  // Of the first leaf of a class; the class with the lowest value goes first. Also compares trees with one policy and clock.
  virtual double value(int /*klass*/, double head_key, uint64_t /*tick*/, double /*now*/) const { return head_key; }

  // For policies that learn. A node rests from the insert, or the unlock, that leaves it unlocked. A hit: a lock touches a
  // node, whose use is not yet updated. A hold: a lock moves down over what its own request has inserted.
  virtual void on_pool(uint64_t /*pages*/) {}  // its trees are over so many pages, of both tiers
  virtual void on_rest(const Use&, uint64_t /*tick*/, double /*now*/) {}
  virtual void on_hold(const Use&, uint64_t /*tick*/, double /*now*/) {}
  // The mark that all nodes of a path get, the new ones too: when a lock takes a path, and when an insert makes it longer.
  // `end` is the last node that was there, before its use is updated; of the root nothing but the mark has a meaning.
  // `last_digest` is that of its last page, null for the root.
  virtual uint8_t on_lock(const Use& end, const uint8_t* /*last_digest*/, uint64_t /*tick*/, double /*now*/) { return end.mark; }
  virtual uint8_t on_grow(const Use& end, const Growth&, uint64_t /*tick*/, double /*now*/) { return end.mark; }
  virtual void on_hit(const Use&, uint64_t /*tick*/, double /*now*/) {}
  virtual void on_insert(const Use&, uint64_t /*tick*/, double /*now*/) {}
  virtual void on_evict(const Use&, Tier /*from*/, uint64_t /*tick*/, double /*now*/) {}

  std::string name;
  bool evict_output_first = false;
};

using PolicyParameters = std::map<std::string, double>;

std::vector<std::string> policy_names();

// std::invalid_argument: unknown name or parameter.
std::unique_ptr<Policy> make_policy(const std::string& name, bool evict_output_first, const PolicyParameters& parameters);

}  // namespace kvferry
