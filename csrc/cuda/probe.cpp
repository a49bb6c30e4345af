#include "cuda/probe.h"

#include <algorithm>
#include <utility>

#include "cuda/kernels/copy_kernels.h"

namespace kvferry {
namespace {

constexpr std::chrono::microseconds kWait(50);  // on an idle GPU a kernel takes 5 to 10
constexpr std::chrono::milliseconds kGoodFor(5), kMoment(5), kRemember(1000);  // that nobody had to wait; that somebody had
constexpr unsigned kThreads = 32;

}  // namespace

BusyProbe::BusyProbe(const GpuDevice& device) : device_(device), driver_(device.driver()) {
  int least = 0, greatest = 0;
  device_.check(driver_.stream_priorities(&least, &greatest), "priorities");
  device_.check(driver_.stream_create(&stream_, kGpuStreamNonBlocking, greatest), "stream");
  device_.check(driver_.event_create(&begin_, 0), "event");
  device_.check(driver_.event_create(&end_, 0), "event");
}

BusyProbe::~BusyProbe() {
  if (running_) driver_.event_synchronize(end_);
  driver_.event_destroy(begin_);
  driver_.event_destroy(end_);
  driver_.stream_destroy(stream_);
}

bool BusyProbe::busy(GpuFunction kernel) {
  if ((running_ && !ended() && Clock::now() - launched_ > kWait) || lately()) return true;
  if (!running_ && Clock::now() - launched_ > kGoodFor) launch(kernel);
  while (running_ && !ended()) {
    if (Clock::now() - launched_ <= kWait) continue;
    if (!std::exchange(told_, true)) note_busy();
    return true;
  }
  return lately();
}

void BusyProbe::note_busy() {
  const Clock::time_point now = Clock::now();
  const bool again = now - slow_ < kRemember / 4 && now - slow_ > kMoment;  // of one wait the probe and a copy may both tell
  busy_until_ = std::max(busy_until_, now + (again ? kRemember : kMoment));
  slow_ = now;
}

void BusyProbe::launch(GpuFunction kernel) {
  if (running_ && !ended()) return;
  PageCopy nothing{};
  nothing.pieces = nothing.fragment_bytes = 1;
  void* arguments[] = {&nothing};
  device_.check(driver_.event_record(begin_, stream_), "probe");
  const GpuStatus status = driver_.launch(kernel, 1, 1, 1, kThreads, 1, 1, 0, stream_, arguments, nullptr);
  if (status == kGpuNotSupported || status == kGpuInvalidValue) return;  // as a copy's would be, which falls back
  device_.check(status, "probe");
  device_.check(driver_.event_record(end_, stream_), "probe");
  launched_ = Clock::now();
  running_ = true;
  told_ = false;
}

bool BusyProbe::ended() {
  const GpuStatus status = driver_.event_query(end_);
  if (status == kGpuNotReady) return false;
  device_.check(status, "probe");
  float milliseconds = 0;
  device_.check(driver_.event_elapsed(&milliseconds, begin_, end_), "probe");
  if (std::chrono::duration<float, std::milli>(milliseconds) > kWait && !told_) note_busy();
  running_ = false;
  return true;
}

}  // namespace kvferry
