#include "radix/page_pool.h"

#include <algorithm>
#include <cstring>

#include "checks.h"

namespace kvferry {
namespace {

using S = PageState;

// Free is entered by free_pages only, from any state, and left by allocate and claim only.
constexpr std::pair<S, S> kAllowed[] = {
    {S::kFree, S::kLeased},       {S::kFree, S::kArriving},     {S::kFree, S::kSpilling},     {S::kFree, S::kRestoring},
    {S::kLeased, S::kArriving},   {S::kLeased, S::kCached},     {S::kLeased, S::kRestoring},  {S::kLeased, S::kOrphaned},
    {S::kArriving, S::kCached},   {S::kArriving, S::kOrphaned}, {S::kCached, S::kSpilling},   {S::kSpilling, S::kCached},
    {S::kCached, S::kRestoring},  {S::kRestoring, S::kCached},  {S::kRestoring, S::kArriving},
};

bool allowed(S source, S target) {
  return std::find(std::begin(kAllowed), std::end(kAllowed), std::make_pair(source, target)) != std::end(kAllowed);
}

uint64_t size_key(uint32_t start, uint32_t length) { return uint64_t(length) << 32 | start; }

void check_pages(int64_t pages, int64_t least) {
  if (pages >= least && pages < int64_t(1) << 31) return;
  throw std::invalid_argument("pages is " + std::to_string(pages) + "; it must be " + std::to_string(least) + " to 2^31 - 1");
}

std::string page_name(uint32_t page) { return "page " + std::to_string(page); }

}  // namespace

const char* name_of(PageState state) {
  constexpr const char* names[] = {"FREE", "LEASED", "ARRIVING", "CACHED", "SPILLING", "RESTORING", "ORPHANED"};
  return names[size_t(state)];
}

PagePool::PagePool(int64_t pages, std::string tier) : tier_(std::move(tier)) { grow(pages); }

void PagePool::expect(int64_t pages) {
  check_pages(pages, 0);
  states_.reserve(size_t(pages));
  generations_.reserve(size_t(pages));
  names_.reserve(size_t(pages));
}

void PagePool::grow(int64_t pages) {
  const uint32_t before = this->pages();
  check_pages(pages, before);
  states_.resize(size_t(pages), uint8_t(S::kFree));
  generations_.resize(size_t(pages), 0);
  names_.resize(size_t(pages), 0);
  counts_[size_t(S::kFree)] += uint32_t(pages) - before;
  if (uint32_t(pages) > before) add_free({before, uint32_t(pages) - before});
}

void PagePool::resize(int64_t pages) {
  check_pages(pages, 1);
  if (free() != this->pages()) {
    throw BrokenInvariant(std::to_string(this->pages() - free()) + " " + tier_ + " pages are in use: the pool cannot be resized");
  }
  uint64_t generation = 0;
  for (const uint64_t each : generations_) generation = std::max(generation, each + 1);
  states_.assign(size_t(pages), uint8_t(S::kFree));
  generations_.assign(size_t(pages), generation);
  names_.assign(size_t(pages), 0);
  free_runs_.clear();
  by_size_.clear();
  freed_.clear();
  counts_[size_t(S::kFree)] = uint32_t(pages);
  add_free({0, uint32_t(pages)});
}

size_t PagePool::count(const uint32_t* pages, size_t n, PageState state) const {
  size_t found = 0;
  for (size_t i = 0; i < n; ++i) found += states_[pages[i]] == uint8_t(state);
  return found;
}

PageIds PagePool::allocate(int64_t n, PageState state) {
  if (n < 0) throw std::invalid_argument("n is " + std::to_string(n) + "; it must not be negative");
  if (n > int64_t(free())) {
    throw PoolExhausted(std::to_string(n) + " " + tier_ + " pages are wanted, " + std::to_string(free()) + " of " +
                        std::to_string(pages()) + " are free");
  }
  if (!allowed(S::kFree, state)) throw BrokenInvariant(std::string("a page does not go from FREE to ") + name_of(state));
  std::vector<Run> taken;
  for (uint32_t want = uint32_t(n); want > 0; want -= taken.back().length) {
    auto found = by_size_.lower_bound(size_key(0, want));
    if (found == by_size_.end()) --found;  // none holds them all: the longest
    const Run run{uint32_t(*found), std::min(want, uint32_t(*found >> 32))};
    take_from(free_runs_.find(run.start), run);
    set_state(run, state);
    taken.push_back(run);
  }
  std::sort(taken.begin(), taken.end(), [](Run a, Run b) { return a.start < b.start; });
  PageIds ids;
  ids.reserve(size_t(n));
  for (const Run& run : taken) {
    for (uint32_t page = run.start; page < run.end(); ++page) ids.push_back(page);
  }
  return ids;
}

void PagePool::claim(const PageIds& pages, PageState state) {
  if (state != S::kLeased && state != S::kCached) {
    throw BrokenInvariant(std::string("a page is not claimed as ") + name_of(state));
  }
  const std::vector<Run> runs = runs_of(pages);
  for (const Run& run : runs) {
    for (uint32_t page = run.start; page < run.end(); ++page) {
      if (this->state(page) == S::kFree) continue;
      throw BrokenInvariant(page_name(page) + " is " + name_of(this->state(page)) + ", must be FREE");
    }
  }
  for (const Run& run : runs) {
    take_from(std::prev(free_runs_.upper_bound(run.start)), run);
    set_state(run, state);
  }
}

void PagePool::free_pages(const PageIds& pages) {
  const std::vector<Run> runs = runs_of(pages);
  for (const Run& run : runs) {
    for (uint32_t page = run.start; page < run.end(); ++page) {
      if (state(page) == S::kFree) throw BrokenInvariant(page_name(page) + " is freed twice");
    }
  }
  for (const Run& run : runs) {
    set_state(run, S::kFree);
    for (uint32_t page = run.start; page < run.end(); ++page) {
      ++generations_[page];
      names_[page] = 0;
    }
    add_free(run);
  }
  if (log_frees_) freed_.insert(freed_.end(), pages.begin(), pages.end());
}

void PagePool::move(const PageIds& pages, PageState source, PageState target) {
  if (source == S::kFree || !allowed(source, target)) {
    throw BrokenInvariant(std::string("no page goes ") + name_of(source) + " -> " + name_of(target));
  }
  const std::vector<Run> runs = runs_of(pages);
  for (const Run& run : runs) {
    for (uint32_t page = run.start; page < run.end(); ++page) {
      if (state(page) != source) {
        throw BrokenInvariant(page_name(page) + " is " + name_of(state(page)) + ", must be " + name_of(source));
      }
    }
  }
  for (const Run& run : runs) set_state(run, target);
}

void PagePool::set_log_frees(bool on) {
  log_frees_ = on;
  if (!on) freed_.clear();
}

PageIds PagePool::take_freed() {
  PageIds freed;
  freed.swap(freed_);
  return freed;
}

// The runs of neighbours among `pages`, which need no order.
std::vector<PagePool::Run> PagePool::runs_of(const PageIds& pages) const {
  std::vector<Run> runs;
  if (pages.empty()) return runs;
  PageIds sorted;
  const PageIds* ordered = &pages;
  if (!std::is_sorted(pages.begin(), pages.end())) {
    sorted = pages;
    std::sort(sorted.begin(), sorted.end());
    ordered = &sorted;
  }
  if (ordered->back() >= this->pages()) {
    throw std::out_of_range("page is " + std::to_string(ordered->back()) + "; it must be 0 to " +
                            std::to_string(this->pages() - 1));
  }
  for (const uint32_t page : *ordered) {
    if (!runs.empty() && page == runs.back().end()) {
      ++runs.back().length;
    } else if (!runs.empty() && page < runs.back().end()) {
      throw BrokenInvariant(page_name(page) + " is named twice");
    } else {
      runs.push_back({page, 1});
    }
  }
  return runs;
}

void PagePool::set_log_readable(bool on) {
  log_readable_ = on;
  if (!on) readable_changes_.clear();
}

std::vector<int64_t> PagePool::take_readable() {
  std::vector<int64_t> changes;
  changes.swap(readable_changes_);
  return changes;
}

bool PagePool::readable(uint8_t state) const {
  return state == uint8_t(S::kCached) || state == uint8_t(tier_ == "host" ? S::kRestoring : S::kSpilling);
}

void PagePool::name(const PageIds& pages, const uint8_t* digests, const uint8_t* namespace_id) {
  for (const uint32_t page : pages) {
    if (readable(states_[page])) throw BrokenInvariant(page_name(page) + " is readable under another name");
  }
  for (size_t i = 0; i < pages.size(); ++i) names_[pages[i]] = held_name(digests + 32 * i, namespace_id);
}

void PagePool::publish(HeldIndex* index) {
  if (index_ != nullptr) --index_->publishers;
  index_ = index;
  if (index_ == nullptr) return;
  ++index_->publishers;
  for (uint32_t page = 0; page < this->pages(); ++page) {
    if (readable(states_[page]) && names_[page] != 0) index_->add(names_[page]);
  }
}

void PagePool::tell_index(uint32_t page, bool readable) {
  if (index_ == nullptr || names_[page] == 0) return;
  if (readable) {
    index_->add(names_[page]);
  } else {
    index_->remove(names_[page]);
  }
}

void PagePool::set_state(Run run, PageState state) {
  const bool after = readable(uint8_t(state));
  for (uint32_t page = run.start; page < run.end(); ++page) {
    if (readable(states_[page]) == after) continue;
    if (log_readable_) readable_changes_.push_back(after ? int64_t(page) : ~int64_t(page));
    tell_index(page, after);
  }
  for (uint32_t page = run.start; page < run.end(); ++page) --counts_[states_[page]];
  std::memset(states_.data() + run.start, int(state), run.length);
  counts_[size_t(state)] += run.length;
}

void PagePool::add_free(Run run) {
  auto after = free_runs_.lower_bound(run.start);
  if (after != free_runs_.end() && after->first == run.end()) {
    run.length += after->second;
    by_size_.erase(size_key(after->first, after->second));
    after = free_runs_.erase(after);
  }
  if (after != free_runs_.begin()) {
    const auto before = std::prev(after);
    if (before->first + before->second == run.start) {
      by_size_.erase(size_key(before->first, before->second));
      before->second += run.length;
      by_size_.insert(size_key(before->first, before->second));
      return;
    }
  }
  free_runs_.emplace_hint(after, run.start, run.length);
  by_size_.insert(size_key(run.start, run.length));
}

// `taken` lies in the free run; what is left of that on either side stays free.
void PagePool::take_from(Runs::iterator free_run, Run taken) {
  const uint32_t start = free_run->first, end = start + free_run->second;
  by_size_.erase(size_key(start, end - start));
  auto hint = free_runs_.erase(free_run);
  if (taken.end() < end) {
    hint = free_runs_.emplace_hint(hint, taken.end(), end - taken.end());
    by_size_.insert(size_key(taken.end(), end - taken.end()));
  }
  if (start < taken.start) {
    free_runs_.emplace_hint(hint, start, taken.start - start);
    by_size_.insert(size_key(start, taken.start - start));
  }
}

void PagePool::check() const {
  std::array<uint32_t, kPageStates> counted{};
  for (const uint8_t state : states_) ++counted[state];
  check_that(counted == counts_, "a count of pages by state is wrong");
  uint32_t free_pages = 0;
  int64_t last_end = -1;
  for (const auto& [start, length] : free_runs_) {
    check_that(length > 0 && int64_t(start) > last_end, "free runs touch or overlap");
    check_that(by_size_.count(size_key(start, length)) == 1, "a free run is not among the sizes");
    for (uint32_t page = start; page < start + length; ++page) {
      check_that(state(page) == S::kFree, "a free run holds a page that is not free");
    }
    last_end = int64_t(start) + length;
    free_pages += length;
  }
  check_that(free_pages == free() && by_size_.size() == free_runs_.size(), "free runs do not hold the free pages");
}

}  // namespace kvferry
