// Assertions of the core: they stay on in release builds, and Python sees them as AssertionError.
#pragma once

#include <stdexcept>
#include <string>

namespace kvferry {

class BrokenInvariant : public std::logic_error {
  using std::logic_error::logic_error;
};

inline void check_that(bool holds, const char* message) {
  if (!holds) throw BrokenInvariant(message);
}

}  // namespace kvferry
