#include "orders.h"

#include <cstring>
#include <mutex>

#include "judge.h"

namespace fake_gpu {
namespace {

std::mutex mutex;  // of:
Orders orders;
using Hold = std::lock_guard<std::mutex>;
thread_local bool may_wait = true;

}  // namespace

void Operation::add(std::vector<Range>& ranges, const void* at, size_t bytes) {
  const auto begin = reinterpret_cast<uint64_t>(at);
  if (bytes == 0) return;
  if (!ranges.empty() && ranges.back().end == begin) {
    ranges.back().end += bytes;
  } else {
    ranges.push_back({begin, begin + bytes});
  }
}

void Operation::copy(void* to, const void* from, size_t bytes, Source source) {
  std::memcpy(to, from, bytes);
  add(source == Source::kInOrder ? reads_ : early_reads_, from, bytes);
  add(writes_, to, bytes);
}

void Operation::set(void* to, unsigned char value, size_t bytes) {
  std::memset(to, value, bytes);
  add(writes_, to, bytes);
}

Operation::~Operation() {
  const Hold hold(mutex);
  const size_t actor = orders.stream(stream_);
  Clock& clock = orders.at(actor).clock;
  clock.join(orders.host().clock);
  const StepOf step = orders.step(actor, name_);
  for (const Range& range : reads_) orders.read(range.begin, range.end, step, clock);
  for (const Range& range : early_reads_) orders.read(range.begin, range.end, step, orders.host().clock);
  for (const Range& range : writes_) orders.write(range.begin, range.end, step, clock);
}

void stream_created(const void* stream) {
  const Hold hold(mutex);
  orders.begin_stream(stream);
}

void stream_destroyed(const void* stream) {
  const Hold hold(mutex);
  orders.end_stream(stream);
}

void stream_waits(const void* stream, const void* event) {
  const Hold hold(mutex);
  orders.at(orders.stream(stream)).clock.join(orders.event(event).clock);
}

void stream_synchronized(const void* stream) {
  const Hold hold(mutex);
  orders.host_sees(orders.at(orders.stream(stream)).clock);
}

void event_created(const void* event) {
  const Hold hold(mutex);
  orders.end_event(event);  // of another one that was there
}

void event_destroyed(const void* event) {
  const Hold hold(mutex);
  orders.end_event(event);
}

void event_recorded(const void* event, const void* stream) {
  const Hold hold(mutex);
  Clock& clock = orders.at(orders.stream(stream)).clock;
  clock.join(orders.host().clock);
  orders.event(event) = {clock, orders.lag};
}

bool event_seen(const void* event) {
  const Hold hold(mutex);
  Event& asked = orders.event(event);
  if (!orders.ready(asked)) return false;
  orders.host_sees(asked.clock);
  return true;
}

void event_synchronized(const void* event) {
  const Hold hold(mutex);
  orders.host_sees(orders.event(event).clock);
}

void thread_waits(const std::string& call) {
  if (may_wait) return;
  const Hold hold(mutex);
  orders.found(call + ": it may wait for the device, on a thread that must wait for none");
}

void memory_allocated(uint64_t address, size_t bytes) {
  const Hold hold(mutex);
  orders.forget(address, address + bytes);
}

void memory_freed(uint64_t address, size_t bytes) {
  const Hold hold(mutex);
  orders.end_bytes("mem_free", address, address + bytes, Kind::kProcess);
  orders.forget(address, address + bytes);
}

void memory_let_go(const char* call, uint64_t address, size_t bytes) {
  const Hold hold(mutex);
  orders.end_bytes(call, address, address + bytes, Kind::kStream);
}

}  // namespace fake_gpu

// For tests. A process is one by its name; "host" is this one.
extern "C" {

using namespace fake_gpu;

// Forgets all that was done, and what was found.
void fake_orders_begin() {
  const Hold hold(mutex);
  orders = Orders();
}

// What was found since the last time, a line each; until the next call.
const char* fake_orders_found() {
  static std::string told;
  const Hold hold(mutex);
  told = orders.take();
  return told.c_str();
}

// Of the thread that calls.
void fake_let_wait(int may) { may_wait = may != 0; }

void fake_process_access(const char* name, uint64_t address, uint64_t bytes, int writes) {
  const Hold hold(mutex);
  const size_t actor = orders.process(name);
  const StepOf step = orders.step(actor, "an access");
  const Clock& clock = orders.at(actor).clock;
  writes != 0 ? orders.write(address, address + bytes, step, clock) : orders.read(address, address + bytes, step, clock);
}

// What the process does next comes behind what the host knows to be done; what still runs on streams it does not know.
void fake_tells(const char* name) {
  const Hold hold(mutex);
  orders.at(orders.process(name)).clock.join(orders.host().clock);
}

void fake_told_by(const char* name) {
  const Hold hold(mutex);
  const size_t actor = orders.process(name);
  orders.host().clock.join(orders.at(actor).clock);
}

// What this stream is given from now on (0: any stream) does not end before the release, or before the host waits for it:
// events behind it are not ready.
void fake_hold(uint64_t stream) {
  const Hold hold(mutex);
  if (stream == 0) return orders.hold_all(true);
  orders.hold(orders.stream(reinterpret_cast<const void*>(stream)));
}

void fake_release(uint64_t stream) {
  const Hold hold(mutex);
  if (stream == 0) return orders.hold_all(false);
  orders.release(orders.stream(reinterpret_cast<const void*>(stream)));
}

// Every event that is recorded from now on is not ready when it is first asked for, so often, unless the host knows already
// what is before it.
void fake_lag(long queries) {
  const Hold hold(mutex);
  orders.lag = queries;
}

}  // extern "C"
