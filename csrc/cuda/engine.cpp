#include "cuda/engine.h"

#include <algorithm>

namespace kvferry {
namespace {

const char* const kKernelNames[] = {"copy_pages_16", "copy_pages_4", "copy_pages_1"};
const char* const kListKernelNames[] = {"copy_list_16", "copy_list_4", "copy_list_1"};
constexpr double kMuchLonger = 1.3, kWait = 0.15;  // than at the best rate seen; ms: a staged copy's kernels waited

}  // namespace

GpuCopyEngine::GpuCopyEngine(std::shared_ptr<GpuDevice> device, std::shared_ptr<const GpuKernels> kernels,
                             const CopyTuning& tuning)
    : device_(std::move(device)), driver_(device_->driver()), tuning_(tuning), module_(std::move(kernels)) {
  const GpuDevice::Use use(*device_);
  int least = 0, greatest = 0;
  device_->check(driver_.stream_priorities(&least, &greatest), "priorities");
  device_->check(driver_.stream_create(&stream_, kGpuStreamNonBlocking, least), "stream");
  for (Lane& lane : lanes_) {
    device_->check(driver_.stream_create(&lane.stream, kGpuStreamNonBlocking, greatest), "stream");
    device_->check(driver_.stream_create(&lane.apart, kGpuStreamNonBlocking, least), "stream");
    device_->check(driver_.event_create(&lane.begun, kGpuEventDisableTiming), "event");
    device_->check(driver_.event_create(&lane.ended, kGpuEventDisableTiming), "event");
    device_->check(driver_.event_create(&lane.from, 0), "event");
    device_->check(driver_.event_create(&lane.to, 0), "event");
  }
  probe_ = std::make_unique<BusyProbe>(*device_);
  if (!module_->loaded()) return;
  for (size_t i = 0; i < kernels_.size(); ++i) {
    kernels_[i] = module_->get(kKernelNames[i]);
    list_kernels_[i] = module_->get(kListKernelNames[i]);
  }
}

GpuCopyEngine::~GpuCopyEngine() {
  const GpuDevice::Use use(*device_);
  drain_stream(*device_, stream_);
  for (Lane& lane : lanes_) {
    drain_stream(*device_, lane.stream);
    drain_stream(*device_, lane.apart);
    release(lane.ring);
    for (const GpuEvent event : {lane.begun, lane.ended, lane.from, lane.to}) driver_.event_destroy(event);
    for (const GpuStream own : {lane.stream, lane.apart}) driver_.stream_destroy(own);
  }
  probe_.reset();
  driver_.stream_destroy(stream_);
}

bool GpuCopyEngine::can(CopyStrategy strategy) const {
  if (strategy == CopyStrategy::kBatch) return driver_.copy_batch != nullptr && !batch_refused_;
  if (strategy == CopyStrategy::kPitched) return driver_.copy_pitched != nullptr;
  return strategy == CopyStrategy::kLoop || module_->loaded();
}

bool GpuCopyEngine::busy() {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (!module_->loaded()) return false;
  const GpuDevice::Use use(*device_);
  learn_waits();
  return probe_->busy(kernels_[0]);
}

// A copy that waited for the end of another kernel has its successor ask just then, when the GPU seems idle to the probe.
// Events around the kernel itself do not show its wait: its stream records the first of them only when the kernel may run.
void GpuCopyEngine::learn_waits() {
  for (Lane& lane : lanes_) {
    if (!lane.timing || driver_.event_query(lane.to) != kGpuSuccess) continue;
    float milliseconds = 0;
    device_->check(driver_.event_elapsed(&milliseconds, lane.from, lane.to), "event");
    if (milliseconds > 0) lane.best_rate = std::max(lane.best_rate, lane.timed_bytes / double(milliseconds));
    const double expected = lane.best_rate > 0 ? lane.timed_bytes / lane.best_rate : 0;
    if (lane.timed == CopyStrategy::kStaged && milliseconds > kMuchLonger * expected + kWait) probe_->note_busy();
    if (lane.timed == CopyStrategy::kPitched) lane.share.note_copy(lane.timed_bytes, 1e3 * double(milliseconds));
    lane.timing = false;
  }
}

std::array<StrategyCount, kStrategies> GpuCopyEngine::counts() const {
  const std::lock_guard<std::mutex> hold(counts_mutex_);
  return counts_;
}

std::map<std::string, uint64_t> GpuCopyEngine::fallbacks() const {
  const std::lock_guard<std::mutex> hold(counts_mutex_);
  return fallbacks_;
}

void GpuCopyEngine::fall_back(const char* reason) {
  const std::lock_guard<std::mutex> hold(counts_mutex_);
  ++fallbacks_[reason];
}

void GpuCopyEngine::count(CopyStrategy strategy, uint64_t descriptors, uint64_t bytes) {
  const std::lock_guard<std::mutex> hold(counts_mutex_);
  StrategyCount& counted = counts_[size_t(strategy)];
  counted.copies += 1;
  counted.descriptors += descriptors;
  counted.bytes += bytes;
}

Issued GpuCopyEngine::copy_pages(const GpuPages& pages, const int64_t* ids, const PageRows& rows, const int64_t* row_ids,
                                 size_t count, CopyDirection direction, GpuStream stream, CopyStrategy strategy) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const GpuDevice::Use use(*device_);
  const Pages copy{pages, ids, rows, row_ids, count, direction, stream == nullptr};
  if (stream == nullptr) stream = stream_;
  if (count == 0) return {strategy, stream};
  GpuAddress rows_on_device = 0;
  strategy = usable(strategy, copy, &rows_on_device);
  size_t descriptors = count * pages.layout().fragments();
  // These are chosen by whether the GPU is busy: how they fare is of use to the next choice.
  const bool chosen_by_it = strategy == CopyStrategy::kStaged || strategy == CopyStrategy::kPitched;
  Lane& lane = lanes_[size_t(direction)];
  const bool timed = chosen_by_it && !lane.timing;
  try {
    if (timed) device_->check(driver_.event_record(lane.from, stream), "event");
    bool issued = false;  // otherwise the driver refused it, and fragments move what may have moved in part
    if (strategy == CopyStrategy::kStaged) issued = run_staged(copy, &stream);
    if (strategy == CopyStrategy::kKernel) issued = run_kernel(copy, rows_on_device, stream);
    if (strategy == CopyStrategy::kPitched) issued = run_pitched(copy, stream, &descriptors);
    if (!issued) {
      if (strategy != CopyStrategy::kLoop) strategy = CopyStrategy::kBatch;
      descriptors = run_fragments(copy, stream, &strategy);
    }
    if (timed) device_->check(driver_.event_record(lane.to, stream), "event");
    if (chosen_by_it && module_->loaded()) probe_->launch(kernels_[0]);
  } catch (...) {
    drain_stream(*device_, stream);  // the caller learns of no copy: none may run on
    drain_stream(*device_, lane.stream);
    drain_stream(*device_, lane.apart);
    throw;
  }
  this->count(strategy, descriptors, count * pages.layout().row_bytes());
  if (timed) {
    lane.timing = true;
    lane.timed = strategy;
    lane.timed_bytes = double(count * pages.layout().row_bytes());
  }
  return {strategy, stream};
}

CopyStrategy GpuCopyEngine::copy_list(const CopyDescriptors& list, CopyDirection direction, GpuStream stream,
                                      CopyStrategy strategy) {
  const std::lock_guard<std::mutex> hold(mutex_);
  const GpuDevice::Use use(*device_);
  if (stream == nullptr) stream = stream_;
  try {
    size_t done = 0;
    if (strategy == CopyStrategy::kKernel) done = run_list_kernel(list, direction, stream);
    if (strategy != CopyStrategy::kKernel || done < list.size()) {
      strategy = issue(list, direction, stream, strategy != CopyStrategy::kLoop, done);
    }
  } catch (...) {
    drain_stream(*device_, stream);
    throw;
  }
  uint64_t bytes = 0;
  for (const size_t size : list.sizes) bytes += size;
  count(strategy, list.size(), bytes);
  return strategy;
}

// The strategy that will be used in place of the one asked for: itself if nothing is in its way.
CopyStrategy GpuCopyEngine::usable(CopyStrategy strategy, const Pages& copy, GpuAddress* rows_on_device) {
  if (strategy == CopyStrategy::kKernel || strategy == CopyStrategy::kStaged) {
    if (!module_->loaded()) {
      fall_back("the driver takes no kernels");
      return CopyStrategy::kBatch;
    }
  }
  if (strategy == CopyStrategy::kPitched && (!can(strategy) || copy.pages.runs().empty())) {
    fall_back("no pitched copies of these pages");
    return CopyStrategy::kBatch;
  }
  if (strategy == CopyStrategy::kKernel && !find_rows(copy, rows_on_device)) {
    fall_back("rows are not pinned");
    return CopyStrategy::kBatch;
  }
  if (strategy == CopyStrategy::kStaged) {
    if (copy.pages.layout().fragment_bytes > tuning_.buffer_bytes) {
      fall_back("a fragment is larger than a staging buffer");
      return CopyStrategy::kBatch;
    }
    if (!prepare(lanes_[size_t(copy.direction)].ring, tuning_.buffers)) {
      fall_back("no memory for staging");
      return CopyStrategy::kBatch;
    }
  }
  return strategy;
}

// Where the device would see row 0. False: some of the rows named are not pinned.
bool GpuCopyEngine::find_rows(const Pages& copy, GpuAddress* rows_on_device) const {
  const auto [first, last] = std::minmax_element(copy.row_ids, copy.row_ids + copy.count);
  const size_t bytes = size_t((*last - *first) * copy.rows.stride) + copy.pages.layout().row_bytes();
  const GpuAddress seen = device_->seen_at(copy.rows.of(*first), bytes);
  *rows_on_device = seen - uint64_t(*first * copy.rows.stride);
  return seen != 0;
}

void GpuCopyEngine::release(Ring& ring) const {
  for (const Buffer& buffer : ring.buffers) {
    driver_.event_synchronize(buffer.emptied);  // a copy on a caller's stream may still read it
    driver_.event_destroy(buffer.filled);
    driver_.event_destroy(buffer.emptied);
    driver_.mem_free(buffer.address);
  }
  ring.buffers.clear();
}

// So many buffers, or as many as there is memory for. False: those are not two.
bool GpuCopyEngine::prepare(Ring& ring, unsigned count) {
  while (ring.buffers.size() < count && !ring.refused) {
    Buffer buffer;
    const bool had = driver_.mem_alloc(&buffer.address, tuning_.buffer_bytes) == kGpuSuccess;
    ring.refused = !had && ring.buffers.size() >= 2;
    if (!had) break;
    device_->check(driver_.event_create(&buffer.filled, kGpuEventDisableTiming), "event");
    device_->check(driver_.event_create(&buffer.emptied, kGpuEventDisableTiming), "event");
    ring.buffers.push_back(buffer);
  }
  return ring.buffers.size() >= 2;
}

// Buffers go round: while one is on the bus the next is gathered, or the one before scattered. A buffer's event that was
// never recorded holds nobody up. False: the driver refused a kernel; what went before it is ordered on `stream`, which
// becomes the one that the copy ends on: a copy in no order with others holds up none behind it until it is scattered, and
// is gathered while those before it are on the bus. So kernels that wait for room make a few copies late, and no more.
bool GpuCopyEngine::run_staged(const Pages& copy, GpuStream* on) {
  const GpuStream stream = *on;
  const bool to_host = copy.direction == CopyDirection::kToHost;
  const PageLayout& layout = copy.pages.layout();
  Lane& lane = lanes_[size_t(copy.direction)];
  if (to_host && !copy.alone) {
    device_->check(driver_.event_record(lane.begun, stream), "event");
    device_->check(driver_.stream_wait(lane.stream, lane.begun, 0), "wait");
  }
  Buffer* last = nullptr;
  bool launched = true;
  // Behind others: no small parts, which are for a bus that has nothing else to do.
  const size_t most = tuning_.buffer_bytes;
  const bool behind = copy.alone && lane.backlog.bytes() > most;
  if (behind || copy.count * layout.row_bytes() > tuning_.buffers * most) prepare(lane.ring, tuning_.deep_buffers);
  const size_t small = behind ? most : tuning_.small_bytes, piece = behind && probe_->lately() ? tuning_.deep_piece_bytes : most;
  for (const PageChunk& chunk : staged_chunks(layout, copy.count, most, small, tuning_.growth, to_host)) {
    Buffer& buffer = *(last = &lane.ring.buffers[lane.ring.next++ % lane.ring.buffers.size()]);
    const size_t inside = size_t(chunk.first) * layout.fragment_bytes;
    const size_t bytes = size_t(chunk.count) * layout.fragment_bytes;
    // Row i of the chunk is row i of the buffer; a chunk of one page begins at its first fragment.
    const GpuAddress staged = buffer.address;
    scratch_.clear();
    for (size_t i = chunk.begin; i < chunk.end; ++i) {
      const uint64_t on_host = copy.rows.of(copy.row_ids[i]) + inside;
      const uint64_t on_device = staged + (i - chunk.begin) * bytes;
      if (piece == most) {  // neighbours go as one
        to_host ? scratch_.add(on_host, on_device, bytes) : scratch_.add(on_device, on_host, bytes);
        continue;
      }
      for (size_t at = 0; at < bytes; at += piece) {
        const size_t some = std::min(piece, bytes - at);
        to_host ? scratch_.append(on_host + at, on_device + at, some) : scratch_.append(on_device + at, on_host + at, some);
      }
    }
    const GpuStream first = to_host ? lane.stream : stream, second = to_host ? stream : lane.stream;
    device_->check(driver_.stream_wait(first, buffer.emptied, 0), "wait");
    if (to_host) {
      launched = launch(copy, chunk, staged - inside, true, first);
    } else {
      issue(scratch_, copy.direction, first, true);
    }
    device_->check(driver_.event_record(buffer.filled, first), "event");
    device_->check(driver_.stream_wait(second, buffer.filled, 0), "wait");
    if (!to_host) {
      launched = launch(copy, chunk, staged - inside, true, second);
    } else if (launched) {
      issue(scratch_, copy.direction, second, true);
    }
    device_->check(driver_.event_record(buffer.emptied, second), "event");
    if (!launched) break;
  }
  if (!to_host && copy.alone && launched) *on = lane.stream;
  else if (!to_host) device_->check(driver_.stream_wait(stream, last->emptied, 0), "wait");
  return launched;
}

// False: the driver refused it.
bool GpuCopyEngine::run_kernel(const Pages& copy, GpuAddress rows_on_device, GpuStream stream) {
  const PageLayout& layout = copy.pages.layout();
  const size_t most = pages_per_launch(layout);
  for (size_t begin = 0; begin < copy.count; begin += most) {
    const size_t end = std::min(begin + most, copy.count);
    if (!launch(copy, {begin, end, 0, layout.fragments()}, rows_on_device, false, stream)) return false;
  }
  return true;
}

size_t GpuCopyEngine::run_fragments(const Pages& copy, GpuStream stream, CopyStrategy* strategy) {
  scratch_.clear();
  scratch_.reserve(copy.count * copy.pages.layout().fragments());
  for (size_t i = 0; i < copy.count; ++i) add_fragments(copy, i);
  *strategy = issue(scratch_, copy.direction, stream, *strategy == CopyStrategy::kBatch);
  return scratch_.size();
}

void GpuCopyEngine::add_fragments(const Pages& copy, size_t page) {
  const PageLayout& layout = copy.pages.layout();
  const bool to_host = copy.direction == CopyDirection::kToHost;
  uint64_t in_row = copy.rows.of(copy.row_ids[page]);
  const int64_t* const ids = copy.ids_of(page);
  for (uint32_t f = 0; f < layout.fragments(); ++f, in_row += layout.fragment_bytes) {
    if (layout.id_of(ids, f) == kNoBlock) continue;
    const uint64_t on_device = layout.address(ids, f);
    scratch_.add(to_host ? in_row : on_device, to_host ? on_device : in_row, layout.fragment_bytes);
  }
}

// From list[done] on, by calls of at most batch_descriptors if `batch`, or else, or where the driver refuses them, one by one.
CopyStrategy GpuCopyEngine::issue(const CopyDescriptors& list, CopyDirection direction, GpuStream stream, bool batch,
                                  size_t done) {
  const bool to_host = direction == CopyDirection::kToHost;
  if (batch && list.size() > 1) {
    if (!can(CopyStrategy::kBatch)) fall_back("the driver has no batch");
    // Host memory does not change under a copy to the device, so it may be read ahead of the stream; the GPU's does.
    const BatchAttributes attributes{to_host ? SourceOrder::kStream : SourceOrder::kAny, {}, {}, tuning_.batch_flags};
    while (can(CopyStrategy::kBatch) && done < list.size()) {
      const size_t count = std::min(tuning_.batch_descriptors, list.size() - done), first = 0;
      size_t failed = 0;
      const GpuStatus status = driver_.copy_batch(list.dst.data() + done, list.src.data() + done,
                                                  list.sizes.data() + done, count, &attributes, &first, 1, &failed, stream);
      if (status == kGpuNotSupported || status == kGpuInvalidValue) {
        fall_back("the driver refused a batch");
        batch_refused_ = status == kGpuNotSupported;
        break;
      }
      device_->check(status, "batch of copies");
      done += count;
    }
    if (done == list.size()) return CopyStrategy::kBatch;
  }
  for (; done < list.size(); ++done) {
    const uint64_t to = list.dst[done], from = list.src[done];
    const size_t bytes = list.sizes[done];
    device_->check(to_host ? driver_.copy_to_host(reinterpret_cast<void*>(to), from, bytes, stream)
                           : driver_.copy_to_device(to, reinterpret_cast<const void*>(from), bytes, stream),
                   "copy");
  }
  return batch && list.size() <= 1 ? CopyStrategy::kBatch : CopyStrategy::kLoop;
}

bool GpuCopyEngine::launch(const Pages& copy, const PageChunk& chunk, GpuAddress rows, bool rows_are_staged,
                           GpuStream stream) {
  const PageLayout& layout = copy.pages.layout();
  PageCopy parameters;
  parameters.bases = reinterpret_cast<const uint64_t*>(copy.pages.bases());
  parameters.strides = reinterpret_cast<const int64_t*>(copy.pages.strides());
  parameters.piece_stride = layout.piece_stride;
  parameters.rows = rows;
  parameters.row_stride = rows_are_staged ? int64_t(layout.row_bytes()) : copy.rows.stride;
  parameters.pieces = layout.pieces;
  parameters.fragment_bytes = layout.fragment_bytes;
  parameters.first_fragment = chunk.first;
  parameters.fragments = chunk.count;
  parameters.pages = uint32_t(chunk.end - chunk.begin);
  parameters.to_rows = copy.direction == CopyDirection::kToHost;
  parameters.in_blocks = layout.in_blocks;
  std::copy(copy.ids_of(chunk.begin), copy.ids_of(chunk.end), parameters.page_ids);
  for (size_t i = chunk.begin; i < chunk.end; ++i) {
    parameters.row_ids[i - chunk.begin] = rows_are_staged ? uint32_t(i - chunk.begin) : uint32_t(copy.row_ids[i]);
  }
  const uint64_t alignment = layout.alignment() | rows | uint64_t(parameters.row_stride);
  const uint64_t tiles = uint64_t(parameters.pages) * chunk.count * ((layout.fragment_bytes + kTileBytes - 1) / kTileBytes);
  return launch_tiles(kernels_[kernel_width(alignment)], tiles, !rows_are_staged, stream, &parameters);
}

}  // namespace kvferry
