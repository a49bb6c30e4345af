// The pages of one tier: states, generations, and free runs from which neighbours are given out together.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "radix/held_index.h"

namespace kvferry {

using PageIds = std::vector<uint32_t>;

// Every page is in exactly one. The numbers are those of Python's PageState.
enum class PageState : uint8_t { kFree, kLeased, kArriving, kCached, kSpilling, kRestoring, kOrphaned };
constexpr size_t kPageStates = 7;

const char* name_of(PageState state);

// Fewer pages are free than were asked for; nothing was taken.
class PoolExhausted : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Pages are named 0 to pages - 1; a page's generation grows each time it is freed. What is refused changes nothing.
class PagePool {
 public:
  PagePool(int64_t pages, std::string tier);  // std::invalid_argument: pages
  ~PagePool() { publish(nullptr); }
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  uint32_t pages() const { return uint32_t(states_.size()); }
  const std::string& tier() const { return tier_; }
  uint32_t free() const { return counts_[size_t(PageState::kFree)]; }
  const std::array<uint32_t, kPageStates>& counts() const { return counts_; }
  PageState state(uint32_t page) const { return PageState(states_[page]); }
  uint64_t generation(uint32_t page) const { return generations_[page]; }
  size_t count(const uint32_t* pages, size_t n, PageState state) const;

  // `n` pages, ascending: the smallest run that holds them all, else as few runs as can be.
  PageIds allocate(int64_t n, PageState state);
  void claim(const PageIds& pages, PageState state);  // these free pages -> leased or cached
  void free_pages(const PageIds& pages);              // any state but free -> free
  void move(const PageIds& pages, PageState source, PageState target);

  // Has room for so many pages, so that to grow up to them moves nothing.
  void expect(int64_t pages);

  // More pages behind those that there are, free. std::invalid_argument: pages, which is how many there are then.
  void grow(int64_t pages);

  // Another number of pages, all free; none may be in use now. Generations go on where the greatest one was.
  void resize(int64_t pages);

  // While on, freed ids are collected until `take_freed`.
  bool log_frees() const { return log_frees_; }
  void set_log_frees(bool on);
  PageIds take_freed();

  // While on, pages that become readable and pages that cease to be are collected, in order, until `take_readable`. Readable on
  // the device are cached and spilling pages, on the host cached and restoring ones.
  bool log_readable() const { return log_readable_; }
  void set_log_readable(bool on);
  std::vector<int64_t> take_readable();  // a page that became readable, or ~page

  // What the digests of these pages are, of which none is readable now: an index tells others of them while they are.
  void name(const PageIds& pages, const uint8_t* digests, const uint8_t* namespace_id);

  // The index hears of all that is readable and has a name from now on. nullptr: none. It is the caller's.
  void publish(HeldIndex* index);

  void check() const;  // recounts everything; for tests

 private:
  struct Run {
    uint32_t start, length;
    uint32_t end() const { return start + length; }
  };
  using Runs = std::map<uint32_t, uint32_t>;  // start -> length; no two are adjacent

  std::vector<Run> runs_of(const PageIds& pages) const;
  void set_state(Run run, PageState state);
  void add_free(Run run);  // joins it with its neighbours
  void take_from(Runs::iterator free_run, Run taken);

  bool readable(uint8_t state) const;
  void tell_index(uint32_t page, bool readable);

  std::string tier_;
  std::vector<uint8_t> states_;
  std::vector<uint64_t> generations_;
  std::array<uint32_t, kPageStates> counts_{};
  Runs free_runs_;
  std::set<uint64_t> by_size_;  // length << 32 | start of each free run
  PageIds freed_;
  bool log_frees_ = false;
  std::vector<int64_t> readable_changes_;
  bool log_readable_ = false;
  std::vector<uint64_t> names_;  // as in the index, by page; 0: none
  HeldIndex* index_ = nullptr;
};

}  // namespace kvferry
