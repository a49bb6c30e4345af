// How many pages of a pitched copy go by fragments beside it, so that the GPU waits for no thread that issues them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

namespace kvferry {

class Stopwatch {
 public:
  double lap_us() {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::micro>(now - std::exchange(last_, now)).count();
  }

 private:
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
};

// What one direction's copies cost: learned from each of them, since processors and drivers differ several times over.
class ApartShare {
 public:
  // Of `count` pages of `fragments` each, `bytes` in all: at most `most`, and at least a sixteenth of these, to go on learning.
  size_t pages(size_t count, size_t fragments, size_t bytes, size_t most) const {
    if (fragment_us_ == 0 || page_us_ == 0 || us_per_byte_ == 0) return most;
    const double room = kOfCopy * us_per_byte_ * double(bytes) - page_us_ * double(count);
    const double each = std::max(fragment_us_ * double(fragments) - page_us_, 1e-3);
    return size_t(std::clamp(room / each, double((most + 15) / 16), double(most)));
  }

  // The issuing thread took so long for so many. A shorter time counts at once: one that was interrupted says little.
  void note_fragments(size_t count, double us) { learn(&fragment_us_, us / double(count), 1); }
  void note_pages(size_t count, double us) { learn(&page_us_, us / double(count), 1); }
  // So long ran a pitched copy of so many bytes on the GPU, or waited for what its thread had not issued yet.
  void note_copy(double bytes, double us) { learn(&us_per_byte_, us / bytes, kWeight); }

 private:
  static constexpr double kOfCopy = 0.85;  // of its time for issuing it
  static constexpr double kWeight = 0.25;

  static void learn(double* known, double seen, double if_less) {
    *known = *known == 0 ? seen : *known + (seen < *known ? if_less : kWeight) * (seen - *known);
  }

  double fragment_us_ = 0, page_us_ = 0, us_per_byte_ = 0;  // 0: not known yet
};

}  // namespace kvferry
