#include "cuda/parts.h"

#include <algorithm>
#include <cstring>

#include "copies/page_layout.h"

namespace kvferry {
namespace {

constexpr uint64_t kWordBytes[] = {16, 4, 1};
const char* const kCopyNames[] = {"copy_part_16", "copy_part_4", "copy_part_1"};
const char* const kMoveNames[] = {"move_rows_16", "move_rows_4", "move_rows_1"};
const char* const kZeroNames[] = {"zero_pages_16", "zero_pages_4", "zero_pages_1"};

struct LaunchRefused : GpuError {
  using GpuError::GpuError;
};

size_t width_of(uint64_t alignment) {
  size_t width = 0;
  while (alignment % kWordBytes[width] != 0) ++width;
  return width;
}

}  // namespace

GpuParts::GpuParts(std::shared_ptr<GpuDevice> device, std::shared_ptr<const GpuKernels> kernels, const PartTuning& tuning)
    : device_(std::move(device)),
      driver_(device_->driver()),
      kernels_(std::move(kernels)),
      tuning_(tuning),
      lanes_{Lane{{device_, OwnStream::Priority::kGreatest}, {}, {}, 0, {}},
             Lane{{device_, OwnStream::Priority::kGreatest}, {}, {}, 0, {}}} {
  if (!kernels_->loaded()) return;
  const GpuDevice::Use use(*device_);
  for (size_t i = 0; i < kWidths; ++i) {
    copies_[i] = kernels_->get(kCopyNames[i]);
    moves_[i] = kernels_->get(kMoveNames[i]);
    zeros_[i] = kernels_->get(kZeroNames[i]);
  }
  summed_copy_ = kernels_->get("copy_part_summed_16");
  sum_ = kernels_->get("sum_part");
  put_header_ = kernels_->get("put_header");
}

GpuParts::~GpuParts() {
  for (const Lane& lane : lanes_) lane.stream.drain();
}

std::shared_ptr<SumCells> GpuParts::sums() {
  if (!has_kernels()) throw GpuError("checksum: this driver takes no kernels, and nothing else adds up on the device");
  const std::lock_guard<std::mutex> hold(sums_mutex_);
  if (sums_ == nullptr) sums_ = std::make_shared<SumCells>(device_);
  return sums_;
}

PartCount GpuParts::count(PartDirection direction) const {
  const Lane& lane = lanes_[size_t(direction)];
  const std::lock_guard<std::mutex> hold(lane.mutex);
  return lane.count;
}

uint64_t GpuParts::zeroed() const {
  const Lane& lane = lanes_[size_t(PartDirection::kScatter)];
  const std::lock_guard<std::mutex> hold(lane.mutex);
  return lane.zeroed;
}

std::map<std::string, uint64_t> GpuParts::fallbacks() const {
  std::map<std::string, uint64_t> all;
  for (const Lane& lane : lanes_) {
    const std::lock_guard<std::mutex> hold(lane.mutex);
    for (const auto& [reason, count] : lane.fallbacks) all[reason] += count;
  }
  return all;
}

void GpuParts::copy(const GpuPages& pages, const int64_t* ids, const PartRange& part, GpuAddress slot,
                    PartDirection direction, GpuStream stream, SumCells::Held* sum, const PartLabel& label) {
  Lane& lane = lanes_[size_t(direction)];
  const std::lock_guard<std::mutex> hold(lane.mutex);
  const GpuDevice::Use use(*device_);
  if (stream == nullptr) stream = lane.stream.get();
  try {
    bool launched = false;
    if (has_kernels()) {
      try {
        launch_copies(lane, pages, ids, part, slot, direction, stream, sum);
        launched = true;
      } catch (const LaunchRefused&) {
        ++lane.fallbacks["the driver refused a kernel"];
        if (sum != nullptr) throw;
      }
    } else {
      ++lane.fallbacks["the driver takes no kernels"];
    }
    if (!launched) copy_by_driver(lane, pages, ids, part, slot, direction, stream);
    if (label.size > 0) put(label, slot, stream, sum);
  } catch (...) {
    drain_stream(*device_, stream);  // the caller learns of no copy: none may run on
    throw;
  }
  lane.count.parts += 1;
  lane.count.bytes += part.bytes;
}

void GpuParts::launch_copies(Lane& lane, const GpuPages& pages, const int64_t* ids, const PartRange& part, GpuAddress slot,
                             PartDirection direction, GpuStream stream, SumCells::Held* sum) {
  const PageLayout& layout = pages.layout();
  const size_t width = width_of(layout.alignment() | part.offset | part.bytes | part.last_bytes | slot);
  const uint64_t word = kWordBytes[width], row_words = layout.row_bytes() / word, words = part.bytes / word;
  const bool summed = sum != nullptr && width == 0;
  PartCopy copy{};
  copy.bases = reinterpret_cast<const uint64_t*>(pages.bases());
  copy.strides = reinterpret_cast<const int64_t*>(pages.strides());
  copy.piece_stride = layout.piece_stride;
  copy.row_words = FastDivisor(uint32_t(row_words));
  copy.fragment_words = FastDivisor(uint32_t(layout.fragment_bytes / word));
  copy.pieces = FastDivisor(layout.pieces);
  copy.to_slot = direction == PartDirection::kGather;
  copy.in_blocks = layout.in_blocks;
  copy.last_words = uint32_t(part.last_bytes / word);
  const bool tail = part.last_bytes < layout.tensor_bytes();
  const uint64_t last = (part.offset + part.bytes - 1) / layout.row_bytes(), most_rows = kPagesPerPart / layout.ids_a_page();
  if (sum != nullptr && !summed && direction == PartDirection::kScatter) launch_sum(slot, part.bytes, stream, *sum);
  uint32_t all_blocks = 0;
  for (uint64_t done = 0; done < words;) {
    const uint64_t at = part.offset / word + done, row = at / row_words;
    copy.first = uint32_t(at % row_words);
    copy.words = uint32_t(std::min({words - done, uint64_t(kWordsPerLaunch), most_rows * row_words - copy.first}));
    copy.slot = slot + done * word;
    copy.first_sum = done * word / sizeof(uint64_t);
    const uint64_t rows = (copy.first + uint64_t(copy.words) - 1) / row_words + 1;
    copy.last_row = tail && last < row + rows ? uint32_t(last - row) : kNotHere;
    std::copy_n(ids + row * layout.ids_a_page(), rows * layout.ids_a_page(), copy.page_ids);
    const unsigned blocks = blocks_for(copy.words, kPartLoads);
    done += copy.words;
    all_blocks += blocks;
    if (summed) copy.sum = sum->into(done == words ? all_blocks : 0);
    launch(summed ? summed_copy_ : copies_[width], blocks, tuning_.threads, stream, &copy);
    ++lane.count.launches;
  }
  if (sum != nullptr && !summed && direction == PartDirection::kGather) launch_sum(slot, part.bytes, stream, *sum);
}

// Behind the part on its stream; nobody waits here. Without kernels byte by byte, which no sum is added to: GpuError where
// the part has one, and they were refused since it was launched.
void GpuParts::put(const PartLabel& label, GpuAddress slot, GpuStream stream, const SumCells::Held* sum) {
  PutHeader header{slot - label.size, sum != nullptr ? sum->result() : nullptr, label.size, {}};
  std::copy_n(label.bytes.begin(), label.size, header.bytes);
  if (sum != nullptr) {
    uint64_t last;
    uint8_t* const end = header.bytes + label.size - sizeof last;
    std::memcpy(&last, end, sizeof last);
    last = part_sum(last, sum->nbytes());
    std::memcpy(end, &last, sizeof last);
  }
  if (sum != nullptr && !has_kernels()) throw GpuError("header: its sum cannot be added, since the driver takes no kernels");
  if (has_kernels()) {
    try {
      return launch(put_header_, 1, kMaxHeaderBytes, stream, &header);
    } catch (const LaunchRefused&) {
      if (sum != nullptr) throw;
    }
  }
  for (uint32_t i = 0; i < label.size; ++i) {
    device_->check(driver_.set_bytes(header.address + i, header.bytes[i], 1, stream), "header");
  }
}

void GpuParts::add_up(GpuAddress address, uint64_t nbytes, PartDirection direction, GpuStream stream, SumCells::Held& sum) {
  Lane& lane = lanes_[size_t(direction)];
  const std::lock_guard<std::mutex> hold(lane.mutex);
  const GpuDevice::Use use(*device_);
  launch_sum(address, nbytes, stream == nullptr ? lane.stream.get() : stream, sum);
}

void GpuParts::launch_sum(GpuAddress address, uint64_t nbytes, GpuStream stream, SumCells::Held& sum) {
  const unsigned blocks = blocks_for((nbytes + sizeof(uint64_t) - 1) / sizeof(uint64_t), kPartLoads);
  PartSum parameters{address, nbytes, sum.into(blocks)};
  launch(sum_, blocks, tuning_.threads, stream, &parameters);
}

void GpuParts::copy_by_driver(Lane& lane, const GpuPages& pages, const int64_t* ids, const PartRange& part, GpuAddress slot,
                              PartDirection direction, GpuStream stream) {
  CopyDescriptors list;
  const bool to_slot = direction == PartDirection::kGather;
  const auto move = [&](uint64_t on_page, size_t bytes) {
    to_slot ? list.add(slot, on_page, bytes) : list.add(on_page, slot, bytes);
    slot += bytes;
  };
  walk_part(pages.layout(), ids, part, 0, part.bytes, move, [&](size_t bytes) {
    if (to_slot) device_->check(driver_.set_bytes(slot, 0, bytes, stream), "zeros");
    slot += bytes;
  });
  issue_list(lane, list, stream);
}

void GpuParts::move_by_driver(Lane& lane, const PageLayout& from, const int64_t* from_ids, const PageLayout& to,
                              const int64_t* to_ids, size_t count, GpuStream stream) {
  CopyDescriptors list;
  for (size_t i = 0; i < count; ++i) {
    for (uint32_t f = 0; f < from.fragments(); ++f) {
      list.append(to.address(to_ids + i, f), from.address(from_ids + i, f), from.fragment_bytes);
    }
  }
  issue_list(lane, list, stream);
}

void GpuParts::issue_list(Lane& lane, const CopyDescriptors& list, GpuStream stream) {
  constexpr size_t kBatch = 4096;
  size_t done = 0;
  if (driver_.copy_batch == nullptr || batch_refused_) ++lane.fallbacks["the driver has no batch"];
  while (driver_.copy_batch != nullptr && !batch_refused_ && done < list.size()) {
    const BatchAttributes attributes{SourceOrder::kStream, {}, {}, 0};
    const size_t count = std::min(kBatch, list.size() - done), first = 0;
    size_t failed = 0;
    const GpuStatus status = driver_.copy_batch(list.dst.data() + done, list.src.data() + done, list.sizes.data() + done,
                                                count, &attributes, &first, 1, &failed, stream);
    if (status == kGpuNotSupported || status == kGpuInvalidValue) {
      ++lane.fallbacks["the driver refused a batch"];
      if (status == kGpuNotSupported) batch_refused_ = true;
      break;
    }
    device_->check(status, "batch of copies");
    done += count;
  }
  for (; done < list.size(); ++done) {
    device_->check(driver_.copy_on_device(list.dst[done], list.src[done], list.sizes[done], stream), "copy");
  }
}

void GpuParts::move(const GpuPages& from, const int64_t* from_ids, const GpuPages& to, const int64_t* to_ids, size_t count,
                    GpuStream stream) {
  Lane& lane = lanes_[size_t(PartDirection::kScatter)];
  const std::lock_guard<std::mutex> hold(lane.mutex);
  const GpuDevice::Use use(*device_);
  if (stream == nullptr) stream = lane.stream.get();
  try {
    bool launched = false;
    if (has_kernels()) {
      try {
        launch_moves(lane, from, from_ids, to, to_ids, count, stream);
        launched = true;
      } catch (const LaunchRefused&) {
        ++lane.fallbacks["the driver refused a kernel"];
      }
    } else {
      ++lane.fallbacks["the driver takes no kernels"];
    }
    if (!launched) move_by_driver(lane, from.layout(), from_ids, to.layout(), to_ids, count, stream);
  } catch (...) {
    drain_stream(*device_, stream);
    throw;
  }
  lane.count.parts += 1;
  lane.count.bytes += count * from.layout().row_bytes();
}

void GpuParts::launch_moves(Lane& lane, const GpuPages& from, const int64_t* from_ids, const GpuPages& to,
                            const int64_t* to_ids, size_t count, GpuStream stream) {
  const PageLayout &source = from.layout(), &target = to.layout();
  const size_t width = width_of(source.alignment() | target.alignment());
  const uint64_t word = kWordBytes[width], row_words = source.row_bytes() / word;
  RowMove move{};
  move.from_bases = reinterpret_cast<const uint64_t*>(from.bases());
  move.to_bases = reinterpret_cast<const uint64_t*>(to.bases());
  move.from_strides = reinterpret_cast<const int64_t*>(from.strides());
  move.to_strides = reinterpret_cast<const int64_t*>(to.strides());
  move.from_piece_stride = source.piece_stride;
  move.to_piece_stride = target.piece_stride;
  move.row_words = FastDivisor(uint32_t(row_words));
  move.fragment_words = FastDivisor(uint32_t(source.fragment_bytes / word));
  move.pieces = FastDivisor(source.pieces);
  const size_t most = std::max<size_t>(1, std::min<size_t>(kRowsPerMove, kWordsPerLaunch / row_words));
  for (size_t done = 0; done < count;) {
    const size_t now = std::min(most, count - done);
    move.words = uint32_t(now * row_words);
    std::copy_n(from_ids + done, now, move.from_ids);
    std::copy_n(to_ids + done, now, move.to_ids);
    launch(moves_[width], blocks_for(move.words, kPartLoads), tuning_.threads, stream, &move);
    ++lane.count.launches;
    done += now;
  }
}

void GpuParts::zero(const GpuPages& pages, const int64_t* ids, size_t count, uint32_t first_piece, uint32_t start,
                    GpuStream stream) {
  Lane& lane = lanes_[size_t(PartDirection::kScatter)];
  const std::lock_guard<std::mutex> hold(lane.mutex);
  const GpuDevice::Use use(*device_);
  const PageLayout& layout = pages.layout();
  if (stream == nullptr) stream = lane.stream.get();
  if (start == layout.fragment_bytes || first_piece == layout.pieces) return;
  try {
    bool launched = false;
    if (has_kernels()) {
      try {
        launch_zeros(pages, ids, count, first_piece, start, stream);
        launched = true;
      } catch (const LaunchRefused&) {
        ++lane.fallbacks["the driver refused a kernel"];
      }
    } else {
      ++lane.fallbacks["the driver takes no kernels"];
    }
    if (!launched) zero_by_driver(pages, ids, count, first_piece, start, stream);
  } catch (...) {
    drain_stream(*device_, stream);
    throw;
  }
  lane.zeroed += count;
}

void GpuParts::zero_by_driver(const GpuPages& pages, const int64_t* ids, size_t count, uint32_t first_piece, uint32_t start,
                              GpuStream stream) {
  const PageLayout& layout = pages.layout();
  for (size_t i = 0; i < count; ++i) {
    for (uint32_t f = 0; f < layout.fragments(); ++f) {
      if (f % layout.pieces < first_piece) continue;
      device_->check(driver_.set_bytes(layout.address(ids + i, f) + start, 0, layout.fragment_bytes - start, stream), "zeros");
    }
  }
}

void GpuParts::launch_zeros(const GpuPages& pages, const int64_t* ids, size_t count, uint32_t first_piece, uint32_t start,
                            GpuStream stream) {
  const PageLayout& layout = pages.layout();
  const size_t width = width_of(layout.alignment() | start);
  const uint32_t word = uint32_t(kWordBytes[width]), words = (layout.fragment_bytes - start) / word;
  const uint32_t tensor_words = words * (layout.pieces - first_piece), page_words = tensor_words * uint32_t(layout.bases.size());
  ZeroPages zero{};
  zero.bases = reinterpret_cast<const uint64_t*>(pages.bases());
  zero.strides = reinterpret_cast<const int64_t*>(pages.strides());
  zero.piece_stride = layout.piece_stride;
  zero.first_piece = first_piece;
  zero.first = start / word;
  zero.page_words = FastDivisor(page_words);
  zero.tensor_words = FastDivisor(tensor_words);
  zero.words = FastDivisor(words);
  const size_t most = std::max<size_t>(1, std::min<size_t>(kPagesPerPart, kWordsPerLaunch / page_words));
  for (size_t done = 0; done < count;) {
    const size_t pages_now = std::min(most, count - done);
    zero.total = uint32_t(pages_now * page_words);
    for (size_t i = 0; i < pages_now; ++i) zero.page_ids[i] = uint32_t(ids[done + i]);
    launch(zeros_[width], blocks_for(zero.total, 1), tuning_.threads, stream, &zero);
    done += pages_now;
  }
}

unsigned GpuParts::blocks_for(uint64_t words, unsigned words_a_thread) const {
  const uint64_t a_block = uint64_t(tuning_.threads) * words_a_thread;
  return unsigned(std::clamp<uint64_t>((words + a_block - 1) / a_block, 1, tuning_.blocks));
}

void GpuParts::launch(GpuFunction kernel, unsigned blocks, unsigned threads, GpuStream stream, void* parameters) {
  void* arguments[] = {parameters};
  const GpuStatus status = driver_.launch(kernel, blocks, 1, 1, threads, 1, 1, 0, stream, arguments, nullptr);
  if (status == kGpuNotSupported) {
    kernels_->refuse();
    throw LaunchRefused("kernel: the driver does not support its launch");
  }
  device_->check(status, "kernel");
}

}  // namespace kvferry
