// The strategy `pitched`: a page's runs of fragments as copies of lines, and some pages by fragments beside them.
#include <algorithm>

#include "cuda/engine.h"

namespace kvferry {
namespace {

constexpr size_t kLongRun = 1 << 20;         // bytes: a gap after it is short
constexpr size_t kSlowFragment = 8 << 10;  // bytes: under this fragments are as slow as what they would fill gaps of
constexpr size_t kApart = 16;  // pages between two calls

PitchedSide side(const PitchedOperand& operand) {
  const bool on_host = operand.location.type == kHostLocation;
  PitchedSide made{};
  made.memory_type = on_host ? kHostMemory : kDeviceMemory;
  if (on_host) made.host = reinterpret_cast<const void*>(operand.address);
  else made.device = operand.address;
  made.pitch = operand.pitch;
  return made;
}

}  // namespace

// A copy engine stands still for some 2.5 us after each pitched copy, and goes over fragments meanwhile if it has them. It is
// slower on fragments alone, and this thread is, so a copy that nobody is before is sooner done without.
size_t GpuCopyEngine::pages_apart(const Pages& copy, const Lane& lane) const {
  const PageLayout& layout = copy.pages.layout();
  if (!can(CopyStrategy::kBatch) || layout.row_bytes() >= copy.pages.runs().size() * kLongRun) return 0;
  if (!lane.pitched || driver_.event_query(lane.ended) != kGpuNotReady) return 0;
  if (layout.fragment_bytes < kSlowFragment) return 0;
  const size_t most = copy.count * tuning_.apart_percent / 100;
  return lane.share.pages(copy.count, layout.fragments(), copy.count * layout.row_bytes(), most);
}

// False: the driver refused one; what went before it may be copied again.
bool GpuCopyEngine::run_pitched(const Pages& copy, GpuStream stream, size_t* descriptors) {
  Lane& lane = lanes_[size_t(copy.direction)];
  const size_t apart = pages_apart(copy, lane);
  if (apart > 0) {
    device_->check(driver_.event_record(lane.begun, stream), "event");
    device_->check(driver_.stream_wait(lane.apart, lane.begun, 0), "wait");
  }
  const bool issued = issue_pitched(copy, apart, stream, descriptors);
  if (apart > 0) {
    device_->check(driver_.event_record(lane.begun, lane.apart), "event");
    device_->check(driver_.stream_wait(stream, lane.begun, 0), "wait");
  }
  device_->check(driver_.event_record(lane.ended, stream), "event");
  lane.pitched = true;
  return issued;
}

bool GpuCopyEngine::issue_pitched(const Pages& copy, size_t apart, GpuStream stream, size_t* descriptors) {
  *descriptors = 0;
  scratch_.clear();
  runs_.clear();
  ApartShare& share = lanes_[size_t(copy.direction)].share;
  size_t whole = 0;
  Stopwatch watch;
  double pages_us = 0, fragments_us = 0;  // of the pages since the last calls
  for (size_t i = 0; i < copy.count; ++i) {
    if ((i + 1) * apart / copy.count > i * apart / copy.count) {
      pages_us += watch.lap_us();
      add_fragments(copy, i);
      fragments_us += watch.lap_us();
    } else {
      add_runs(copy, i);
      ++whole;
    }
    if ((i + 1) % kApart != 0 && i + 1 != copy.count) continue;
    if (!issue_runs(stream)) return false;
    *descriptors += runs_.size();
    runs_.clear();
    pages_us += watch.lap_us();
    if (whole > 0) share.note_pages(whole, pages_us);
    if (scratch_.size() > 0) {
      issue(scratch_, copy.direction, lanes_[size_t(copy.direction)].apart, true);
      share.note_fragments(scratch_.size(), fragments_us + watch.lap_us());
      *descriptors += scratch_.size();
      scratch_.clear();
    }
    whole = 0;
    pages_us = fragments_us = 0;
  }
  return true;
}

// Long runs in several copies: while the engine stands still between them, the bus and HBM are others'. Blocks that are not
// there are left out.
void GpuCopyEngine::add_runs(const Pages& copy, size_t page) {
  const PageLayout& layout = copy.pages.layout();
  const bool to_host = copy.direction == CopyDirection::kToHost;
  const size_t width = layout.fragment_bytes;
  const int64_t* const ids = copy.ids_of(page);
  for (const PitchedRun& run : copy.pages.runs()) {
    const size_t most = tuning_.pitched_bytes, copies = std::min<size_t>((run.count * width + most - 1) / most, run.count);
    if (layout.id_of(ids, run.first) == kNoBlock) continue;
    for (size_t i = 0; i < copies; ++i) {
      const uint32_t begin = uint32_t(run.count * i / copies), end = uint32_t(run.count * (i + 1) / copies);
      const uint32_t first = run.first + begin * run.step;
      const PitchedOperand on_device{kAddressOperand, layout.address(ids, first), size_t(run.pitch), end - begin,
                                     {kDeviceLocation, device_->number()}};
      const PitchedOperand in_row{kAddressOperand, copy.rows.of(copy.row_ids[page]) + first * width, run.step * width,
                                  end - begin, {kHostLocation, 0}};
      // As in a batch of fragments: host memory may be read ahead of the stream.
      runs_.push_back({to_host ? on_device : in_row, to_host ? in_row : on_device, width, end - begin, 1,
                       to_host ? SourceOrder::kStream : SourceOrder::kAny, 0});
    }
  }
}

// In one call, or else, or where the driver refuses it, one by one. False: it refused one.
bool GpuCopyEngine::issue_runs(GpuStream stream) {
  if (runs_.size() > 1 && driver_.copy_pitched_batch != nullptr && !pitched_batch_refused_) {
    const GpuStatus status = driver_.copy_pitched_batch(runs_.size(), runs_.data(), 0, stream);
    if (status == kGpuSuccess) return true;
    if (status != kGpuNotSupported && status != kGpuInvalidValue) device_->check(status, "batch of pitched copies");
    fall_back("the driver refused a batch of pitched copies");
    pitched_batch_refused_ = status == kGpuNotSupported;
  }
  for (const PitchedOperation& run : runs_) {
    const PitchedCopy one{side(run.src), side(run.dst), run.width, run.height};
    const GpuStatus status = driver_.copy_pitched(&one, stream);
    if (status == kGpuNotSupported || status == kGpuInvalidValue) {
      fall_back("the driver refused a pitched copy");
      return false;
    }
    device_->check(status, "pitched copy");
  }
  return true;
}

}  // namespace kvferry
