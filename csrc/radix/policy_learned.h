// The policy `learned`: by how soon pages of each kind were used again, counted while it runs. docs/eviction.md says why.
#pragma once

#include <memory>

#include "radix/policy.h"

namespace kvferry {

std::unique_ptr<Policy> make_learned_policy();

}  // namespace kvferry
