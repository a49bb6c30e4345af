#include "radix/policy.h"

#include <algorithm>
#include <stdexcept>

#include "radix/policy_learned.h"

namespace kvferry {
namespace {

// A number that counts first, with the tick of last access behind the point: for numbers under 256 that is exact up to
// 2^44 ticks. Beyond it only trees are compared less exactly: inside a tree equal keys go by last access.
double then_least_recent(double first, const Use& use) { return first + double(use.accessed) * 0x1p-44; }

class LeastRecentlyUsed : public Policy {
  Place place(const Use& use) const override { return {0, double(use.accessed)}; }
};

class LeastFrequentlyUsed : public Policy {
  Place place(const Use& use) const override { return {0, then_least_recent(use.hits, use)}; }
};

class FirstInFirstOut : public Policy {
  Place place(const Use& use) const override { return {0, double(use.created)}; }
};

// A smaller number is more important.
class LeastImportant : public Policy {
  Place place(const Use& use) const override { return {0, then_least_recent(-double(use.priority), use)}; }
};

template <class P>
std::unique_ptr<Policy> make(const PolicyParameters&) {
  return std::make_unique<P>();
}

std::unique_ptr<Policy> make_learned(const PolicyParameters&) { return make_learned_policy(); }

// A new policy is a class above and a line in `kinds`.
struct PolicyKind {
  const char* name;
  std::vector<std::string> parameters;
  std::unique_ptr<Policy> (*make)(const PolicyParameters&);
};

const std::vector<PolicyKind>& kinds() {
  static const std::vector<PolicyKind> all = {
      {"lru", {}, make<LeastRecentlyUsed>},
      {"lfu", {}, make<LeastFrequentlyUsed>},
      {"fifo", {}, make<FirstInFirstOut>},
      {"priority", {}, make<LeastImportant>},
      {"learned", {}, make_learned},
  };
  return all;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

}  // namespace

std::vector<std::string> policy_names() {
  std::vector<std::string> names;
  for (const PolicyKind& kind : kinds()) names.emplace_back(kind.name);
  return names;
}

std::unique_ptr<Policy> make_policy(const std::string& name, bool evict_output_first, const PolicyParameters& parameters) {
  for (const PolicyKind& kind : kinds()) {
    if (name != kind.name) continue;
    for (const auto& [parameter, value] : parameters) {
      (void)value;
      const auto& known = kind.parameters;
      if (std::find(known.begin(), known.end(), parameter) == known.end()) {
        throw std::invalid_argument("policy " + name + " has no parameter '" + parameter + "'; it has: " + joined(known));
      }
    }
    auto policy = kind.make(parameters);
    policy->name = name;
    policy->evict_output_first = evict_output_first;
    return policy;
  }
  throw std::invalid_argument("policy: '" + name + "', must be one of: " + joined(policy_names()));
}

}  // namespace kvferry
