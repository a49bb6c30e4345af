// What actors know of each other, and who last read and wrote which bytes: see orders.h.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace fake_gpu {

constexpr size_t kHost = 0, kMostMessages = 50;

// What an actor knows: of every actor, how many of its steps come before what it does next.
class Clock {
 public:
  uint64_t of(size_t actor) const { return actor < ticks_.size() ? ticks_[actor] : 0; }
  uint64_t step(size_t actor) {
    if (actor >= ticks_.size()) ticks_.resize(actor + 1);
    return ++ticks_[actor];
  }
  void join(const Clock& other) {
    if (other.ticks_.size() > ticks_.size()) ticks_.resize(other.ticks_.size());
    for (size_t i = 0; i < other.ticks_.size(); ++i) ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
  }
  void keep_only(size_t actor) {
    for (size_t i = 0; i < ticks_.size(); ++i) {
      if (i != actor) ticks_[i] = 0;
    }
  }
  bool holds(const Clock& other) const {
    for (size_t i = 0; i < other.ticks_.size(); ++i) {
      if (of(i) < other.ticks_[i]) return false;
    }
    return true;
  }

 private:
  std::vector<uint64_t> ticks_;
};

enum class Kind { kHost, kStream, kProcess };

struct Actor {
  Kind kind;
  std::string name;
  Clock clock;
  bool held = false;        // a stream: what it was given from a moment on does not end
  uint64_t ended_until = 0;  // the last of its steps that does, if it is held
};

struct Event {
  Clock clock;
  long not_ready = 0;  // times that it is asked for in vain
};

// Something that an actor did.
struct Step {
  std::string what;
  size_t actor;
  uint64_t tick;
};
using StepOf = std::shared_ptr<const Step>;

// Bytes whose last accesses were the same ones.
struct Cell {
  uint64_t end = 0;
  StepOf write;
  std::vector<StepOf> reads;  // since then
};
using Cells = std::map<uint64_t, Cell>;  // by their first byte

std::string text_of(uint64_t begin, uint64_t end) {
  char text[80];
  std::snprintf(text, sizeof text, "%llu bytes at 0x%llx", static_cast<unsigned long long>(end - begin),
                static_cast<unsigned long long>(begin));
  return text;
}

class Orders {
 public:
  Orders() { actors_.push_back({Kind::kHost, "the host", {}}); }

  size_t stream(const void* handle) {
    const auto found = streams_.find(handle);
    return found != streams_.end() ? found->second : begin_stream(handle);
  }
  size_t begin_stream(const void* handle) {
    size_t actor = actors_.size();
    if (idle_.empty()) {
      actors_.push_back({});
    } else {
      actor = idle_.back();
      idle_.pop_back();
    }
    Actor& made = actors_[actor];
    made.kind = Kind::kStream;
    made.name = "stream " + std::to_string(++named_streams_);
    made.held = all_held_;
    made.ended_until = made.clock.of(actor);
    return streams_[handle] = actor;
  }
  void end_stream(const void* handle) {
    const auto found = streams_.find(handle);
    if (found == streams_.end()) return;
    const size_t actor = found->second;
    streams_.erase(found);
    // The host knows all that it did, so whatever a later stream does comes behind it: that one may count on.
    if (host().clock.of(actor) != actors_[actor].clock.of(actor)) return;
    actors_[actor].clock.keep_only(actor);
    idle_.push_back(actor);
  }
  size_t process(const std::string& name) {
    if (name == "host") return kHost;
    const auto [found, is_new] = processes_.try_emplace(name, actors_.size());
    if (is_new) actors_.push_back({Kind::kProcess, "process '" + name + "'", {}});
    return found->second;
  }
  Actor& host() { return actors_[kHost]; }
  Actor& at(size_t actor) { return actors_[actor]; }
  Event& event(const void* handle) {
    auto& found = events_[handle];
    if (found == nullptr) found = std::make_shared<Event>();
    return *found;
  }
  void end_event(const void* handle) { events_.erase(handle); }

  StepOf step(size_t actor, const std::string& what) {
    Actor& by = actors_[actor];
    told_.clear();
    const std::string where = by.kind == Kind::kStream ? " on " : " by ";
    return std::make_shared<const Step>(Step{what + where + by.name, actor, by.clock.step(actor)});
  }

  // `step` touches these bytes, and has behind it what `known` knows.
  void read(uint64_t begin, uint64_t end, const StepOf& step, const Clock& known) {
    split(begin);
    split(end);
    fill(begin, end);
    const auto is_before = [&](const StepOf& read) {
      return read->actor == step->actor || known.of(read->actor) >= read->tick;
    };
    for (auto at = cells_.lower_bound(begin); at != cells_.end() && at->first < end; ++at) {
      std::vector<StepOf>& reads = at->second.reads;
      if (at->second.write != nullptr) compare(*at, at->second.write, "wrote", step, "reads", known);
      reads.erase(std::remove_if(reads.begin(), reads.end(), is_before), reads.end());
      reads.push_back(step);
    }
  }
  void write(uint64_t begin, uint64_t end, const StepOf& step, const Clock& known) {
    split(begin);
    split(end);
    for (auto at = cells_.lower_bound(begin); at != cells_.end() && at->first < end; ++at) {
      if (at->second.write != nullptr) compare(*at, at->second.write, "wrote", step, "writes", known);
      for (const StepOf& read : at->second.reads) compare(*at, read, "reads", step, "writes", known);
    }
    forget(begin, end);
    cells_[begin] = {end, step, {}};
  }

  // Bytes go, which actors of this kind must have done with as far as the host knows.
  void end_bytes(const char* call, uint64_t begin, uint64_t end, Kind kind) {
    const StepOf step = this->step(kHost, call);
    split(begin);
    split(end);
    for (auto at = cells_.lower_bound(begin); at != cells_.end() && at->first < end; ++at) {
      const auto look = [&](const StepOf& earlier, const char* did) {
        if (actors_[earlier->actor].kind == kind) compare(*at, earlier, did, step, "ends", host().clock);
      };
      if (at->second.write != nullptr) look(at->second.write, "wrote");
      for (const StepOf& read : at->second.reads) look(read, "reads");
    }
  }
  void forget(uint64_t begin, uint64_t end) {
    split(begin);
    split(end);
    cells_.erase(cells_.lower_bound(begin), cells_.lower_bound(end));
  }

  void host_sees(const Clock& clock) {
    host().clock.join(clock);
    for (size_t i = 0; i < actors_.size(); ++i) actors_[i].ended_until = std::max(actors_[i].ended_until, clock.of(i));
  }
  bool ready(Event& event) {
    if (host().clock.holds(event.clock)) return true;
    for (size_t i = 0; i < actors_.size(); ++i) {
      if (actors_[i].held && event.clock.of(i) > actors_[i].ended_until) return false;
    }
    return event.not_ready-- <= 0;
  }
  void hold(size_t actor) {
    actors_[actor].held = true;
    actors_[actor].ended_until = actors_[actor].clock.of(actor);
  }
  void hold_all(bool held) {
    all_held_ = held;
    for (const auto& [handle, actor] : streams_) held ? hold(actor) : release(actor);
  }
  void release(size_t actor) { actors_[actor].held = false; }

  void found(const std::string& message) {
    if (++count_ <= kMostMessages) found_ += message + "\n";
  }
  std::string take() {
    count_ = 0;
    return std::exchange(found_, {});
  }

  long lag = 0;  // of every event that is recorded from now on: times that it is asked for in vain

 private:
  // A cell begins here, if there is one around.
  void split(uint64_t at) {
    auto cell = cells_.lower_bound(at);
    if (cell == cells_.begin() || (--cell)->second.end <= at || cell->first == at) return;
    Cell behind = cell->second;
    cell->second.end = at;
    cells_[at] = std::move(behind);
  }
  void fill(uint64_t begin, uint64_t end) {
    for (auto at = cells_.lower_bound(begin); begin < end; begin = at++->second.end) {
      if (at == cells_.end() || at->first > begin) {
        const uint64_t next = at == cells_.end() ? end : std::min(at->first, end);
        at = cells_.insert(at, {begin, {next, nullptr, {}}});
      }
    }
  }

  void compare(const Cells::value_type& cell, const StepOf& earlier, const char* did, const StepOf& later,
               const char* does, const Clock& known) {
    const bool same = earlier == later;
    if (!same && known.of(earlier->actor) >= earlier->tick) return;
    if (!told_.insert(earlier).second) return;
    found(later->what + " " + does + " " + text_of(cell.first, cell.second.end) +
          (same ? " that it also uses otherwise: its parts are in no order with each other"
                : ", which " + earlier->what + " " + did + ": " + missing(*earlier, *later, known)));
  }

  // What would order them.
  std::string missing(const Step& earlier, const Step& later, const Clock& known) const {
    const Actor &first = actors_[earlier.actor], &second = actors_[later.actor];
    if (second.kind == Kind::kProcess) return second.name + " was told nothing by who knew that this had ended";
    if (first.kind == Kind::kProcess) return first.name + " has said nothing since that was heard here";
    const std::string unseen = "the host has not seen the end of this on " + first.name;
    if (second.kind == Kind::kHost) return unseen;
    const bool in_order = second.clock.of(earlier.actor) >= earlier.tick && known.of(earlier.actor) < earlier.tick;
    if (in_order) return "it may do so at any time from its issue on, and " + unseen;
    return second.name + " waits for no event behind this, and " + unseen;
  }

  std::vector<Actor> actors_;  // the host first
  std::map<const void*, size_t> streams_;
  std::map<std::string, size_t> processes_;
  std::vector<size_t> idle_;  // of streams that are gone
  std::map<const void*, std::shared_ptr<Event>> events_;
  Cells cells_;
  std::set<StepOf> told_;  // of the last step: what it was found in no order with
  std::string found_;
  size_t named_streams_ = 0, count_ = 0;  // of messages
  bool all_held_ = false;
};

}  // namespace fake_gpu
