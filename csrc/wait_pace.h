// How to wait for what can only be asked whether it is done: at once at first, then with longer and longer sleeps.
#pragma once

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>

namespace kvferry {

class WaitPace {
 public:
  // 0: ask again at once.
  std::chrono::microseconds next() const {
    const auto waited = std::chrono::steady_clock::now() - begin_;
    if (waited < kSpin) return std::chrono::microseconds(0);
    return waited < kShortly ? kShortSleep : kLongSleep;
  }

 private:
  static constexpr std::chrono::microseconds kSpin{30}, kShortly{3000}, kShortSleep{10}, kLongSleep{60};
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

// Of a deadline: a standstill of this process, whose clock goes on, uses up one of them.
constexpr int kSlices = 8;

// For how long somebody has waited who looks again and again, with this deadline.
class OwnTime {
 public:
  explicit OwnTime(std::chrono::nanoseconds deadline) : deadline_(deadline) {}

  bool over() {
    const auto now = std::chrono::steady_clock::now();
    passed_ += std::min<std::chrono::nanoseconds>(now - last_, slice_);
    last_ = now;
    return passed_ >= deadline_;
  }

 private:
  const std::chrono::nanoseconds deadline_;
  const std::chrono::nanoseconds slice_ = std::max(deadline_ / kSlices, std::chrono::nanoseconds(1));
  std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  std::chrono::nanoseconds passed_{0};
};

// As long as this lives, the thread's sleeps end within microseconds of their time, not within 50 of them.
class FineTimer {
 public:
  FineTimer() : slack_(prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) { prctl(PR_SET_TIMERSLACK, 1000ul, 0, 0, 0); }
  ~FineTimer() {
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_), 0, 0, 0);
  }
  FineTimer(const FineTimer&) = delete;
  FineTimer& operator=(const FineTimer&) = delete;

 private:
  int slack_;
};

}  // namespace kvferry
