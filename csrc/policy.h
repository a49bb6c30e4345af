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

  // For policies that learn. A hit: a lock touches a node, whose use is not yet updated.
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
