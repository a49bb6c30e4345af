#include "kernels.h"

#include <cstdlib>
#include <cstring>

#include "cuda/kernels/copy_kernels.h"
#include "cuda/kernels/part_kernels.h"
#include "orders.h"

namespace fake_gpu {
namespace {

using namespace kvferry;

void copy_list(const ListCopy& copy, size_t width, Operation& operation) {
  uint32_t tiles = 0;
  for (uint32_t i = 0; i < copy.fragments; ++i) {
    if (copy.first_tiles[i] != tiles || copy.sizes[i] == 0 || copy.fragments > kFragmentsPerLaunch) abort();
    tiles += (copy.sizes[i] - 1) / kTileBytes + 1;
    if ((copy.targets[i] | copy.sources[i] | copy.sizes[i]) % width != 0) abort();
    operation.copy(reinterpret_cast<void*>(copy.targets[i]), reinterpret_cast<void*>(copy.sources[i]), copy.sizes[i]);
  }
  if (tiles != copy.tiles) abort();
}

void reads_tables(Operation& operation, const uint64_t* bases, const int64_t* strides, uint32_t tensors) {
  operation.reads(bases, tensors * sizeof *bases);
  operation.reads(strides, tensors * sizeof *strides);
}

void copy_word_by_word(const PageCopy& copy, size_t width, Operation& operation) {
  if (copy.pages > 0) {
    reads_tables(operation, copy.bases, copy.strides, (copy.first_fragment + copy.fragments - 1) / copy.pieces + 1);
  }
  for (uint32_t p = 0; p < copy.pages; ++p) {
    for (uint32_t f = copy.first_fragment; f < copy.first_fragment + copy.fragments; ++f) {
      const uint32_t tensor = f / copy.pieces, piece = f % copy.pieces, at = copy.in_blocks ? p * copy.pieces + piece : p;
      if (at >= kPagesPerLaunch) abort();
      if (copy.page_ids[at] == kNotHere) continue;
      char* device = reinterpret_cast<char*>(copy.bases[tensor]) + int64_t(copy.page_ids[at]) * copy.strides[tensor] +
                     int64_t(piece) * copy.piece_stride;
      char* row = reinterpret_cast<char*>(copy.rows) + int64_t(copy.row_ids[p]) * copy.row_stride +
                  size_t(f) * copy.fragment_bytes;
      if ((reinterpret_cast<uint64_t>(device) | reinterpret_cast<uint64_t>(row) | copy.fragment_bytes) % width != 0) abort();
      operation.copy(copy.to_rows ? row : device, copy.to_rows ? device : row, copy.fragment_bytes);
    }
  }
}

uint64_t load(const char* bytes, size_t count) {
  uint64_t word = 0;
  std::memcpy(&word, bytes, count);
  return word;
}

void add_up(const SumInto& into, unsigned blocks, uint64_t sum, Operation& operation) {
  operation.writes(into.cell, sizeof *into.cell);
  into.cell->sum += sum;
  into.cell->blocks += blocks;
  if (into.cell->blocks != into.blocks) return;
  operation.writes(into.result, sizeof *into.result);
  *into.result = into.cell->sum;
  *into.cell = {};
}

char* fragment_at(const uint64_t* bases, const int64_t* strides, int64_t piece_stride, uint32_t page, uint32_t tensor,
                  uint32_t piece) {
  return reinterpret_cast<char*>(bases[tensor]) + int64_t(page) * strides[tensor] + int64_t(piece) * piece_stride;
}

void copy_part(const PartCopy& copy, size_t width, bool summed, unsigned blocks, Operation& operation) {
  uint64_t sum = 0;
  const uint32_t fragments = copy.row_words.divisor / copy.fragment_words.divisor;
  reads_tables(operation, copy.bases, copy.strides, fragments / copy.pieces.divisor);
  for (uint32_t i = 0; i < copy.words; ++i) {
    const uint32_t at = copy.first + i, row = at / copy.row_words.divisor, in_row = at % copy.row_words.divisor;
    if (copy.row_words.divide(at) != row) abort();
    const uint32_t fragment = in_row / copy.fragment_words.divisor, inside = in_row % copy.fragment_words.divisor;
    if (copy.fragment_words.divide(in_row) != fragment) abort();
    const uint32_t piece = fragment % copy.pieces.divisor, id = copy.in_blocks ? row * copy.pieces.divisor + piece : row;
    if (id >= kPagesPerPart) abort();
    const bool behind = row == copy.last_row && piece * copy.fragment_words.divisor + inside >= copy.last_words;
    char* in_slot = reinterpret_cast<char*>(copy.slot) + size_t(i) * width;
    if (behind || copy.page_ids[id] == kNotHere) {
      copy.to_slot ? operation.set(in_slot, 0, width) : operation.reads(in_slot, width);
    } else {
      char* on_page = fragment_at(copy.bases, copy.strides, copy.piece_stride, copy.page_ids[id],
                                  fragment / copy.pieces.divisor, piece) + size_t(inside) * width;
      if ((reinterpret_cast<uint64_t>(on_page) | reinterpret_cast<uint64_t>(in_slot)) % width != 0) abort();
      operation.copy(copy.to_slot ? in_slot : on_page, copy.to_slot ? on_page : in_slot, width);
    }
    if (!summed) continue;
    for (uint32_t half = 0; half < 2; ++half) sum += mixed_word(load(in_slot + 8 * half, 8), copy.first_sum + 2 * i + half);
  }
  if (summed) add_up(copy.sum, blocks, sum, operation);
}

void move_rows(const RowMove& move, size_t width, Operation& operation) {
  const uint32_t fragments = move.row_words.divisor / move.fragment_words.divisor, tensors = fragments / move.pieces.divisor;
  reads_tables(operation, move.from_bases, move.from_strides, tensors);
  reads_tables(operation, move.to_bases, move.to_strides, tensors);
  if (move.words % move.row_words.divisor != 0) abort();
  for (uint32_t i = 0; i < move.words; ++i) {
    const uint32_t row = i / move.row_words.divisor, in_row = i % move.row_words.divisor;
    if (row >= kRowsPerMove || move.row_words.divide(i) != row) abort();
    const uint32_t fragment = in_row / move.fragment_words.divisor, inside = in_row % move.fragment_words.divisor;
    const uint32_t tensor = fragment / move.pieces.divisor, piece = fragment % move.pieces.divisor;
    char* from = fragment_at(move.from_bases, move.from_strides, move.from_piece_stride, move.from_ids[row], tensor, piece);
    char* to = fragment_at(move.to_bases, move.to_strides, move.to_piece_stride, move.to_ids[row], tensor, piece);
    if ((reinterpret_cast<uint64_t>(from) | reinterpret_cast<uint64_t>(to)) % width != 0) abort();
    operation.copy(to + size_t(inside) * width, from + size_t(inside) * width, width);
  }
}

void sum_part(const PartSum& part, unsigned blocks, Operation& operation) {
  uint64_t sum = 0;
  operation.reads(reinterpret_cast<const void*>(part.address), part.nbytes);
  for (uint64_t at = 0; at < part.nbytes; at += 8) {
    sum += mixed_word(load(reinterpret_cast<const char*>(part.address) + at, part.nbytes - at < 8 ? part.nbytes - at : 8), at / 8);
  }
  add_up(part.sum, blocks, sum, operation);
}

void put_header(const PutHeader& header, Operation& operation) {
  uint8_t bytes[kMaxHeaderBytes];
  std::memcpy(bytes, header.bytes, header.size);
  if (header.sum != nullptr) {
    operation.reads(header.sum, sizeof *header.sum);
    uint8_t* const end = bytes + header.size - sizeof(uint64_t);
    const uint64_t last = load(reinterpret_cast<char*>(end), sizeof(uint64_t)) + *header.sum;
    std::memcpy(end, &last, sizeof last);
  }
  operation.writes(reinterpret_cast<void*>(header.address), header.size);
  std::memcpy(reinterpret_cast<void*>(header.address), bytes, header.size);
}

void zero_pages(const ZeroPages& zero, size_t width, Operation& operation) {
  reads_tables(operation, zero.bases, zero.strides, zero.page_words.divisor / zero.tensor_words.divisor);
  for (uint32_t i = 0; i < zero.total; ++i) {
    const uint32_t page = i / zero.page_words.divisor, in_page = i % zero.page_words.divisor;
    const uint32_t tensor = in_page / zero.tensor_words.divisor, in_tensor = in_page % zero.tensor_words.divisor;
    char* fragment = fragment_at(zero.bases, zero.strides, zero.piece_stride, zero.page_ids[page], tensor,
                                 zero.first_piece + in_tensor / zero.words.divisor);
    char* word = fragment + (zero.first + size_t(in_tensor % zero.words.divisor)) * width;
    if (reinterpret_cast<uint64_t>(word) % width != 0) abort();
    operation.set(word, 0, width);
  }
}

size_t width_of(const std::string& name) { return std::strtoul(name.c_str() + name.rfind('_') + 1, nullptr, 10); }

bool begins(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

}  // namespace

bool run_kernel(const std::string& name, const void* parameters, unsigned blocks, unsigned threads, const void* stream) {
  const bool of_copies = begins(name, "copy_pages") || begins(name, "copy_list");
  if (blocks == 0 || threads % 32 != 0 || threads > (of_copies ? kCopyThreads : kPartThreads)) return false;
  Operation operation(name, stream);
  if (begins(name, "copy_pages")) {
    copy_word_by_word(*static_cast<const PageCopy*>(parameters), width_of(name), operation);
  } else if (begins(name, "copy_list")) {
    copy_list(*static_cast<const ListCopy*>(parameters), width_of(name), operation);
  } else if (begins(name, "copy_part")) {
    copy_part(*static_cast<const PartCopy*>(parameters), width_of(name), begins(name, "copy_part_summed"), blocks, operation);
  } else if (begins(name, "move_rows")) {
    move_rows(*static_cast<const RowMove*>(parameters), width_of(name), operation);
  } else if (name == "sum_part") {
    sum_part(*static_cast<const PartSum*>(parameters), blocks, operation);
  } else if (name == "put_header") {
    put_header(*static_cast<const PutHeader*>(parameters), operation);
  } else if (begins(name, "zero_pages")) {
    zero_pages(*static_cast<const ZeroPages*>(parameters), width_of(name), operation);
  } else {
    abort();
  }
  return true;
}

}  // namespace fake_gpu
