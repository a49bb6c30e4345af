// Finds what the fake device was given in no order: two accesses to the same bytes, one of them a write, of which neither
// comes before the other. It is a detector of data races, by vector clocks; the device itself does everything at once.
//
// Actors are the streams, other processes by name, and the host: one for all threads of this process, so what one thread
// has waited for orders what any other issues later. A stream's operations follow each other, and what the host knew when
// it issued them. Host memory counts as pinned, that is, as read and written in the order of the stream. What the host
// itself reads and writes is only known where a test says so.
//
// A thread that must wait for no device is found when it makes a call that waits, or may, though the fake never does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fake_gpu {

// What a stream was given by one call: issued when this is destroyed. Its parts are in no order with each other.
class Operation {
 public:
  enum class Source { kInOrder, kAtAnyTime };  // any time: from its issue on, whatever the stream has before it

  Operation(std::string name, const void* stream) : name_(std::move(name)), stream_(stream) {}
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  void copy(void* to, const void* from, size_t bytes, Source source = Source::kInOrder);
  void set(void* to, unsigned char value, size_t bytes);
  void reads(const void* from, size_t bytes) { add(reads_, from, bytes); }
  void writes(const void* to, size_t bytes) { add(writes_, to, bytes); }

 private:
  struct Range {
    uint64_t begin, end;
  };
  static void add(std::vector<Range>& ranges, const void* at, size_t bytes);

  const std::string name_;
  const void* const stream_;
  std::vector<Range> reads_, early_reads_, writes_;
};

void stream_created(const void* stream);
void stream_destroyed(const void* stream);  // what it was given runs on
void stream_waits(const void* stream, const void* event);
void stream_synchronized(const void* stream);

void event_created(const void* event);
void event_destroyed(const void* event);
void event_recorded(const void* event, const void* stream);
// Whether it has come to pass: then the host knows what was before it.
bool event_seen(const void* event);
void event_synchronized(const void* event);

void thread_waits(const std::string& call);

void memory_allocated(uint64_t address, size_t bytes);
// cuMemFree waits for the streams of its process. What it waits for the host does not count as having waited for itself:
// CUDA names that wait only in passing (where it must not be, `thread_waits` finds it). Other processes must have let go
// of the memory.
void memory_freed(uint64_t address, size_t bytes);
// cuMemHostUnregister, cuIpcCloseMemHandle: CUDA speaks of no wait. No stream may use the memory any more.
void memory_let_go(const char* call, uint64_t address, size_t bytes);

}  // namespace fake_gpu
