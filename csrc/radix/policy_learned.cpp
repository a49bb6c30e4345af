#include "radix/policy_learned.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

namespace kvferry {
namespace {

// What a policy knows of the past of a page: the turn of its conversation (the last counts for all later ones), whether
// the last request brought more than the mean of that turn, and whether the page itself was ever hit.
constexpr uint8_t kTurns = 4;
constexpr int kFeatures = kTurns * 4;
constexpr int kEpochs = kMaxPolicyClasses / kFeatures;  // classes of one feature, by when they were last used

struct Mark {
  uint8_t turn;  // 0: the first
  bool large;

  static Mark of(uint8_t mark) { return {uint8_t(mark & 3), (mark & 4) != 0}; }
  uint8_t packed() const { return uint8_t(turn | (large ? 4 : 0)); }
  Mark next() const { return {uint8_t(std::min(turn + 1, kTurns - 1)), large}; }
  int feature(bool hit) const { return turn * 4 + large * 2 + hit; }
};

// How long pages of each feature rest until they are used again: counts of rests, and of their ends by age, both by the
// epoch in which the rest began. An epoch is as many inserted pages as the pools have; older ones count less.
class RestTimes {
 public:
  void begin(int feature, double pages) { rests_[feature][0] += pages; }
  void undo(int feature, uint64_t since, double pages) {
    const size_t e = age_of(since);
    rests_[feature][e] = std::max(0.0, rests_[feature][e] - pages * std::pow(kKeep, double(e)));
  }
  void end(int feature, uint64_t since, uint64_t tick, double pages) {
    ends_[feature][size_t(bin(tick - since))] += pages * std::pow(kKeep, double(age_of(since)));
  }

  void new_epoch(uint64_t tick) {
    ++epoch_;
    std::copy_backward(starts_.begin(), starts_.end() - 1, starts_.end());
    starts_[0] = tick;
    for (int f = 0; f < kFeatures; ++f) {
      auto& rests = rests_[f];
      rests[kHistory] += rests[kHistory - 1];
      std::copy_backward(rests.begin(), rests.begin() + kHistory - 1, rests.begin() + kHistory);
      rests[0] = 0;
      for (double& count : rests) count *= kKeep;
      for (double& count : ends_[f]) count *= kKeep;
    }
  }

  // Of a page that rests since then: the same number again after kEpochs.
  int slot(uint64_t since) const {
    const uint64_t age = std::min<uint64_t>(age_of(since), kEpochs - 1);
    return int((epoch_ + kEpochs - age) % kEpochs);
  }

  double index(int feature, uint64_t age) const {
    const int i = bin(age);
    if (i + 1 == kBins) return index_[feature][size_t(i)];
    const double part = (double(age) - edge(i)) / (edge(i + 1) - edge(i));
    return index_[feature][size_t(i)] * (1 - part) + index_[feature][size_t(i) + 1] * part;
  }

  void compute(uint64_t tick, double epoch_pages);

 private:
  static constexpr int kPerOctave = 4, kBins = 28 * kPerOctave, kHistory = 32;
  static constexpr double kKeep = 0.966;  // what is left of a count after an epoch: a half after 20
  // Nothing known, a page is taken to return with this chance in all, at equal chances in each bin: then the index falls
  // with age, which is LRU. That weighs as much as this share of an epoch's pages; what is known of all features, in the
  // judgement of one, as that share.
  static constexpr double kReturn = 0.3, kPriorShare = 0.02, kAllShare = 0.1;

  static double edge(int i) {
    static const auto edges = [] {
      std::array<double, kBins + 1> all{};
      for (int j = 1; j <= kBins; ++j) all[size_t(j)] = std::exp2(double(j) / kPerOctave);
      return all;
    }();
    return edges[size_t(i)];
  }
  static int bin(uint64_t age) {
    return age <= 1 ? 0 : std::min(kBins - 1, int(std::log2(double(age)) * kPerOctave));
  }
  size_t age_of(uint64_t since) const {
    size_t e = 0;
    while (e < kHistory && since < starts_[e]) ++e;
    return e;
  }

  using Bins = std::array<double, kBins + 1>;
  Bins old_enough(int feature, uint64_t tick) const;
  static void gittins(const Bins& alive, Bins& index);

  uint64_t epoch_ = 0;
  std::array<uint64_t, kHistory> starts_{};                          // of epochs, newest first
  std::array<std::array<double, kHistory + 1>, kFeatures> rests_{};  // pages, by epoch; all that are older last
  std::array<Bins, kFeatures> ends_{};                               // pages, by age
  std::array<Bins, kFeatures> index_{};
};

// Pages whose rest began long enough ago to have reached the start of each bin of ages, used since or not.
RestTimes::Bins RestTimes::old_enough(int feature, uint64_t tick) const {
  Bins bins;
  const auto& rests = rests_[feature];
  double older = rests[kHistory];
  int e = kHistory - 1;
  for (int i = kBins; i >= 0; --i) {
    double part = 0;
    for (; e >= 0; --e) {
      const double first = double(tick - starts_[size_t(e)]), last = e == 0 ? 0 : double(tick - starts_[size_t(e) - 1]);
      if (first < edge(i)) break;
      if (last < edge(i) && first > last) {
        part = rests[size_t(e)] * (first - edge(i)) / (first - last);
        break;
      }
      older += rests[size_t(e)];
    }
    bins[size_t(i)] = older + part;
  }
  return bins;
}

// For a page of each age: over all times that it could be kept for, the best ratio of its chance to be used within that
// time to the mean time until then. That is the steepest line from a point (mean time, chance) to a later one.
void RestTimes::gittins(const Bins& alive, Bins& index) {
  std::array<double, kBins + 1> time{};
  for (int i = 0; i < kBins; ++i) {
    time[size_t(i) + 1] = time[size_t(i)] + (alive[size_t(i)] + alive[size_t(i) + 1]) / 2 * (edge(i + 1) - edge(i));
  }
  std::array<int, kBins + 1> hull;  // of the points behind i, nearest last
  int size = 0;
  const auto slope = [&](int from, int to) {
    const double span = time[size_t(to)] - time[size_t(from)];
    return span > 0 ? (alive[size_t(from)] - alive[size_t(to)]) / span : 0.0;
  };
  hull[size_t(size++)] = kBins;
  for (int i = kBins - 1; i >= 0; --i) {
    while (size > 1 && slope(i, hull[size_t(size) - 1]) <= slope(i, hull[size_t(size) - 2])) --size;
    index[size_t(i)] = slope(i, hull[size_t(size) - 1]);
    hull[size_t(size++)] = i;
  }
}

// Chances to be used again by age (Kaplan and Meier's estimate, which counts at each age only what could have reached it),
// those of a feature drawn towards those of all.
void RestTimes::compute(uint64_t tick, double epoch_pages) {
  const double prior_pages = kPriorShare * epoch_pages, all_pages = kAllShare * epoch_pages;
  std::array<Bins, kFeatures> old;
  Bins all_old{}, all_ends{}, all_chance{};
  for (int f = 0; f < kFeatures; ++f) {
    old[size_t(f)] = old_enough(f, tick);
    for (size_t i = 0; i < kBins; ++i) {
      all_old[i] += old[size_t(f)][i];
      all_ends[i] += ends_[size_t(f)][i];
    }
  }
  const auto chance = [](double ends, double alive) { return std::min(0.95, ends / std::max(alive, ends)); };
  double alive = 1;
  for (size_t i = 0; i < kBins; ++i) {
    const double share = kReturn / kBins;
    all_chance[i] = chance(all_ends[i] + prior_pages * share, all_old[i] * alive + prior_pages * (1 - share * double(i)));
    alive *= 1 - all_chance[i];
  }
  for (size_t f = 0; f < kFeatures; ++f) {
    Bins left;
    double all = 1;
    left[0] = 1;
    for (size_t i = 0; i < kBins; ++i) {
      const double ends = ends_[f][i] + all_pages * all * all_chance[i];
      left[i + 1] = left[i] * (1 - chance(ends, old[f][i] * left[i] + all_pages * all));
      all *= 1 - all_chance[i];
    }
    gittins(left, index_[f]);
  }
}

// Where the prompts of recent requests ended, found again when a prompt goes on behind one whose pages are gone. Of every
// prompt the pages 1, 2, 4, 8 ... before its end stand here: the next one may leave it some pages earlier. In buckets of
// a cache line's keys, the oldest of which goes.
class RecentEnds {
 public:
  struct End {
    uint64_t tick;
    uint32_t base;  // Growth::base of that request
    uint8_t mark;
  };

  // Room for about `wanted` ends; what was known is forgotten.
  void resize(uint64_t wanted) {
    size_t buckets = 1;
    while (buckets * kWays < wanted) buckets *= 2;
    keys_.assign(buckets * kWays, 0);
    ends_.assign(buckets * kWays, End{});
  }

  const End* find(const uint8_t* digest) const {
    const uint64_t key = key_of(digest);
    const size_t first = bucket(key);
    for (size_t i = first; i < first + kWays; ++i) {
      if (keys_[i] == key) return &ends_[i];
    }
    return nullptr;
  }

  void add(const uint8_t* digest, const End& end) {
    const uint64_t key = key_of(digest);
    const size_t first = bucket(key);
    size_t at = first;
    for (size_t i = first; i < first + kWays; ++i) {
      if (keys_[i] == key) {
        at = i;
        break;
      }
      if (ends_[i].tick < ends_[at].tick) at = i;
    }
    keys_[at] = key;
    ends_[at] = end;
  }

 private:
  static constexpr size_t kWays = 8;

  static uint64_t key_of(const uint8_t* digest) {
    uint64_t words[4];
    std::memcpy(words, digest, sizeof words);
    uint64_t mixed = words[0] + words[1] * 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 32) * 0xff51afd7ed558ccdu + words[2] + words[3] * 0xc4ceb9fe1a85ec53u;
    return (mixed ^ mixed >> 29) * 0x9e3779b97f4a7c15u | 1;  // 0: empty
  }
  size_t bucket(uint64_t key) const { return size_t(key >> 20) * kWays & (keys_.size() - 1); }

  std::vector<uint64_t> keys_;
  std::vector<End> ends_;
};

class Learned : public Policy {
 public:
  Learned() { ends_.resize(kLeastEnds); }

  int classes() const override { return kFeatures * kEpochs; }
  Place place(const Use& use) const override {
    return {uint8_t(feature_of(use) * kEpochs + times_.slot(use.accessed)), double(use.accessed)};
  }
  // In steps of a fifth: classes that do not differ by more go by last access.
  double value(int klass, double head_key, uint64_t tick, double) const override {
    const double index = times_.index(klass / kEpochs, tick - uint64_t(head_key));
    return std::floor(4 * std::log2(std::max(index, 1e-300)));
  }

  void on_pool(uint64_t pages) override {
    if (pages <= pages_) return;
    pages_ = pages;
    ends_.resize(std::clamp<uint64_t>(pages, kLeastEnds, kMostEnds));
  }
  void on_rest(const Use& use, uint64_t, double) override { times_.begin(feature_of(use), use.pages); }
  void on_insert(const Use& use, uint64_t, double) override { times_.begin(feature_of(use), use.pages); }
  void on_hold(const Use& use, uint64_t, double) override {
    if (use.locks == 0) times_.undo(feature_of(use), use.accessed, use.pages);
  }
  void on_hit(const Use& use, uint64_t tick, double) override {
    if (use.locks == 0) times_.end(feature_of(use), use.accessed, tick, use.pages);
  }
  uint8_t on_lock(const Use& end, const uint8_t* last_digest, uint64_t tick, double) override {
    if (last_digest == nullptr || end.locks > 0) return end.mark;
    Mark mark = Mark::of(end.mark).next();
    mark.large = false;  // so far
    ends_.add(last_digest, {tick, end.depth + end.pages, mark.packed()});
    return mark.packed();
  }
  uint8_t on_grow(const Use& end, const Growth& growth, uint64_t tick, double) override {
    const uint8_t mark = growth.output ? end.mark : mark_of(end, growth, tick).packed();
    for (uint64_t back = 1; back <= growth.pages; back *= 2) {
      ends_.add(digest(growth, growth.pages - uint32_t(back)), {tick, growth.base, mark});
    }
    count(growth.pages - growth.held, tick);
    return mark;
  }

 private:
  static constexpr uint64_t kLeastEnds = 1 << 14, kMostEnds = 1 << 19;
  static constexpr double kRequestsOfMean = 1000;
  static constexpr uint32_t kStepsPerEpoch = 32, kGrowthsPerStep = 16;

  struct Mean {
    double requests = 0, pages = 0;

    bool exceeded_by(double more) {
      const bool large = more > pages;
      requests = std::min(requests + 1, kRequestsOfMean);
      pages += (more - pages) / requests;
      return large;
    }
  };

  static const uint8_t* digest(const Growth& growth, uint32_t page) { return growth.digests + size_t(page) * 32; }
  static int feature_of(const Use& use) { return Mark::of(use.mark).feature(use.hits > 0); }

  // A prompt is a conversation's next turn if at least half of it is known, by pages that are held or by an end.
  Mark mark_of(const Use& end, const Growth& growth, uint64_t tick) {
    Mark mark = Mark::of(end.mark);  // its lock has made this the next turn
    uint32_t known = growth.base;
    for (uint32_t page = growth.pages; page-- > growth.held;) {
      const RecentEnds::End* const found = ends_.find(digest(growth, page));
      if (found == nullptr) continue;
      const Mark before = Mark::of(found->mark);
      const uint32_t hit = std::clamp(found->base, growth.held, page + 1);
      times_.end(before.feature(true), found->tick, tick, hit - growth.held);
      times_.end(before.feature(false), found->tick, tick, page + 1 - hit);
      mark = before.next();
      known = page + 1;
      break;
    }
    if (known * uint64_t(2) < growth.pages) {
      mark.turn = 0;
      known = 0;
    }
    mark.large = means_[mark.turn].exceeded_by(growth.pages - known);
    return mark;
  }

  void count(uint64_t pages, uint64_t tick) {
    epoch_pages_ += pages;
    step_pages_ += pages;
    ++step_growths_;
    if (epoch_pages_ >= pages_) {
      epoch_pages_ = 0;
      times_.new_epoch(tick);
    }
    if (step_growths_ >= kGrowthsPerStep && step_pages_ * kStepsPerEpoch >= pages_) {
      step_growths_ = step_pages_ = 0;
      times_.compute(tick, double(pages_));
    }
  }

  RestTimes times_;
  RecentEnds ends_;
  std::array<Mean, kTurns> means_;
  uint64_t pages_ = 0;  // of the pools
  uint64_t epoch_pages_ = 0, step_pages_ = 0, step_growths_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_learned_policy() { return std::make_unique<Learned>(); }

}  // namespace kvferry
