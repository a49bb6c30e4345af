#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/ids.h"
#include "bindings/bindings.h"
#include "checks.h"
#include "radix/radix_tree.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

constexpr int64_t kMaxCount = UINT32_MAX;
constexpr int kPrompt = 0, kOutput = 1;

struct PolicyObject {
  std::unique_ptr<Policy> policy;
};

// A tree, with a policy and a clock of its own where it was given none.
struct TreeObject {
  TreeObject(PagePool& device, PagePool* host, PolicyObject* policy, Clock* clock, uint32_t write_through_hits)
      : own_policy(policy == nullptr ? make_policy("lru", false, {}) : nullptr),
        own_clock(clock == nullptr ? std::make_unique<Clock>() : nullptr),
        tree(device, host, policy == nullptr ? *own_policy : *policy->policy, clock == nullptr ? *own_clock : *clock,
             write_through_hits) {}

  std::unique_ptr<Policy> own_policy;
  std::unique_ptr<Clock> own_clock;
  RadixTree tree;
};

struct LockObject {
  Lock lock;
  nb::object tree;  // lives as long as its locks

  const RadixTree& core() const { return nb::inst_ptr<TreeObject>(tree)->tree; }
};

struct InsertObject {
  uint32_t existing;
  nb::list duplicates;
  Match match;
};

struct CopyObject {
  uint64_t id;
  int kind;
  nb::list device, host;
  nb::bytes digests, parents, outputs;
};

struct EvictedObject {
  nb::list freed;
  uint32_t dropped;
  nb::object spill;
};

struct FinishedObject {
  nb::list freed, readable, lost, removed;
};

nb::bytes bytes_of(const std::vector<uint8_t>& data) { return nb::bytes(data.data(), data.size()); }

nb::bytes bytes_of(const DigestKey& digest) { return nb::bytes(digest.data(), digest.size()); }

nb::object copy_object(const std::optional<CopyPlan>& plan) {
  if (!plan) return nb::none();
  return nb::cast(CopyObject{plan->id, int(plan->kind), list_of(plan->device), list_of(plan->host), bytes_of(plan->digests),
                             bytes_of(plan->parents), bytes_of(plan->outputs)});
}

nb::object next_out(const std::optional<NextOut>& next) {
  if (!next) return nb::none();
  return nb::make_tuple(next->group, next->value);
}

uint32_t count_of(const char* field, int64_t value) {
  check_range(field, value, 0, kMaxCount);
  return uint32_t(value);
}

void init_policy(PolicyObject* self, const std::string& name, bool evict_output_first, const nb::kwargs& parameters) {
  PolicyParameters given;
  for (const auto& [key, value] : parameters) given[nb::cast<std::string>(key)] = nb::cast<double>(value);
  new (self) PolicyObject{make_policy(name, evict_output_first, given)};
}

void init_tree(TreeObject* self, PagePool& device, PagePool* host, PolicyObject* policy, Clock* clock, int64_t hits) {
  new (self) TreeObject(device, host, policy, clock, count_of("write_through_hits", hits));
}

Match match(const TreeObject& self, nb::handle digests) {
  const DigestBuffer buffer(digests, "digests");
  return self.tree.match(buffer.data(), buffer.count());
}

LockObject lock(nb::handle self, const Match& match, int32_t priority) {
  return {nb::cast<TreeObject&>(self).tree.lock(match, priority), nb::borrow(self)};
}

InsertObject insert(TreeObject& self, nb::handle digests, nb::handle pages, int64_t start, int64_t kind, int32_t priority) {
  const DigestBuffer buffer(digests, "digests");
  const PageIds ids = read_page_ids(pages, self.tree.device());
  if (start < 0 || uint64_t(start) + ids.size() != buffer.count()) {
    refuse("pages has " + std::to_string(ids.size()) + " entries from start " + std::to_string(start) + "; digests has " +
           std::to_string(buffer.count()));
  }
  check_range("kind", kind, kPrompt, kOutput);
  const Inserted done =
      self.tree.insert(buffer.data(), buffer.count(), ids, uint32_t(start), kind == kOutput, priority);
  return {done.existing, list_of(done.duplicates), done.match};
}

nb::list prune(TreeObject& self, LockObject& lock, int64_t start) {
  if (start < 0 || start > kMaxCount) {
    throw BrokenInvariant("start is " + std::to_string(start) + "; the lock is over " + std::to_string(lock.lock.pages) +
                          " pages");
  }
  return list_of(self.tree.prune(lock.lock, uint32_t(start)));
}

template <WhenHostIsFull kThen>
EvictedObject evict(TreeObject& self, int64_t pages, std::optional<int64_t> host_room) {
  const uint32_t room = count_of("host_room", host_room.value_or(kMaxCount));
  const Evicted done = self.tree.evict(count_of("pages", pages), room, kThen);
  return {list_of(done.freed), done.dropped, copy_object(done.spill)};
}

FinishedObject finish_copy(TreeObject& self, uint64_t copy_id, nb::handle failed) {
  const Finished done = self.tree.finish_copy(copy_id, read_page_ids(failed, self.tree.device()));
  return {list_of(done.freed), list_of(done.readable), list_of(done.lost), list_of(done.removed)};
}

Recovered recover(TreeObject& self, nb::handle digests, nb::handle parents, nb::handle host_pages, nb::handle outputs) {
  if (self.tree.host() == nullptr) refuse("host_pages: the tree has no host pool");
  const DigestBuffer names(digests, "digests"), above(parents, "parents");
  const Buffer flags(outputs, "outputs", Buffer::Access::kRead);
  const PageIds pages = read_page_ids(host_pages, *self.tree.host());
  const size_t n = names.count();
  const bool fits = above.count() == n && pages.size() == n && (flags.size() == n || flags.size() == 0);
  if (!fits) {
    refuse("digests has " + std::to_string(n) + " entries; parents has " + std::to_string(above.count()) +
           ", host_pages " + std::to_string(pages.size()) + ", outputs " + std::to_string(flags.size()));
  }
  return self.tree.recover(names.data(), above.data(), pages, flags.size() == 0 ? nullptr : flags.data());
}

void bind_values(nb::module_& m) {
  nb::class_<Match>(m, "Match").def_ro("pages", &Match::pages).def_ro("device_pages", &Match::device_pages);
  nb::class_<LockObject>(m, "Lock")
      .def_prop_ro("pages", [](const LockObject& self) { return self.lock.pages; })
      .def_prop_ro("device_pages", [](const LockObject& self) { return self.core().device_pages(self.lock); })
      .def_prop_ro("released", [](const LockObject& self) { return self.lock.released; })
      .def_ro("tree", &LockObject::tree);
  nb::class_<InsertObject>(m, "InsertResult")
      .def_ro("existing", &InsertObject::existing)
      .def_ro("duplicates", &InsertObject::duplicates)
      .def_ro("match", &InsertObject::match, nb::rv_policy::copy);
  nb::class_<CopyObject>(m, "Copy")
      .def_ro("id", &CopyObject::id)
      .def_ro("kind", &CopyObject::kind)
      .def_ro("device", &CopyObject::device)
      .def_ro("host", &CopyObject::host)
      .def_ro("digests", &CopyObject::digests)
      .def_ro("parents", &CopyObject::parents)
      .def_ro("outputs", &CopyObject::outputs);
  nb::class_<EvictedObject>(m, "Evicted")
      .def_ro("freed", &EvictedObject::freed)
      .def_ro("dropped", &EvictedObject::dropped)
      .def_ro("spill", &EvictedObject::spill);
  nb::class_<FinishedObject>(m, "Finished")
      .def_ro("freed", &FinishedObject::freed)
      .def_ro("readable", &FinishedObject::readable)
      .def_ro("lost", &FinishedObject::lost)
      .def_ro("removed", &FinishedObject::removed);
  nb::class_<Flushed>(m, "Flushed")
      .def_ro("device", &Flushed::device)
      .def_ro("host", &Flushed::host)
      .def_ro("skipped", &Flushed::skipped);
  nb::class_<Recovered>(m, "Recovered")
      .def_ro("attached", &Recovered::attached)
      .def_ro("orphans", &Recovered::orphans)
      .def_ro("dropped", &Recovered::dropped);
  nb::class_<NodeView>(m, "NodeView")
      .def_ro("depth", &NodeView::depth)
      .def_ro("pages", &NodeView::pages)
      .def_prop_ro("first_digest", [](const NodeView& self) { return bytes_of(self.first); })
      .def_prop_ro("last_digest", [](const NodeView& self) { return bytes_of(self.last); })
      .def_ro("device", &NodeView::device)
      .def_ro("host", &NodeView::host)
      .def_ro("locks", &NodeView::locks)
      .def_ro("hits", &NodeView::hits)
      .def_ro("priority", &NodeView::priority)
      .def_ro("output", &NodeView::output)
      .def_ro("orphan", &NodeView::orphan)
      .def_ro("copying", &NodeView::copying)
      .def_ro("accessed_s", &NodeView::accessed_s);
}

}  // namespace

void bind_tree(nb::module_& m) {
  using namespace nb::literals;
  m.attr("PROMPT") = kPrompt;
  m.attr("OUTPUT") = kOutput;
  m.attr("SPILL") = int(CopyKind::kSpill);
  m.attr("BACKUP") = int(CopyKind::kBackup);
  m.attr("RESTORE") = int(CopyKind::kRestore);
  m.def("policy_names", &policy_names);
  nb::class_<Clock>(m, "Clock").def(nb::init<>()).def_rw("now", &Clock::now).def_ro("tick", &Clock::tick);
  nb::class_<PolicyObject>(m, "Policy")
      .def("__init__", &init_policy, "name"_a, "evict_output_first"_a = false, "params"_a)
      .def_prop_ro("name", [](const PolicyObject& self) { return self.policy->name; })
      .def_prop_ro("evict_output_first", [](const PolicyObject& self) { return self.policy->evict_output_first; });
  bind_values(m);
  nb::class_<TreeObject>(m, "PagedRadixTree")
      .def("__init__", &init_tree, "device"_a, "host"_a.none() = nb::none(), "policy"_a.none() = nb::none(),
           "clock"_a.none() = nb::none(), "write_through_hits"_a = 0, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>())
      .def("match", &match, "digests"_a)
      .def("lock", &lock, "match"_a, "priority"_a = 0)
      .def("unlock", [](TreeObject& self, LockObject& lock) { self.tree.unlock(lock.lock); }, "lock"_a)
      .def("relock", [](TreeObject& self, LockObject& lock, const Match& longer) { self.tree.relock(lock.lock, longer); },
           "lock"_a, "longer"_a)
      .def("path_pages",
           [](const TreeObject& self, const LockObject& lock) { return list_of(self.tree.path_pages(lock.lock)); }, "lock"_a)
      .def("insert", &insert, "digests"_a, "pages"_a, "start"_a = 0, "kind"_a = kPrompt, "priority"_a = 0)
      .def("arrived", [](TreeObject& self, nb::handle pages) { self.tree.arrived(read_page_ids(pages, self.tree.device())); },
           "pages"_a)
      .def("prune", &prune, "lock"_a, "start"_a)
      .def("evict", &evict<WhenHostIsFull::kDrop>, "pages"_a, "host_room"_a = nb::none())
      .def("evict_with_room", &evict<WhenHostIsFull::kStop>, "pages"_a, "host_room"_a = nb::none())
      .def("evict_host", [](TreeObject& self, int64_t pages) { return self.tree.evict_host(count_of("pages", pages)); },
           "pages"_a)
      .def("oldest", [](const TreeObject& self) { return next_out(self.tree.oldest()); })
      .def("oldest_host", [](const TreeObject& self) { return next_out(self.tree.oldest_host()); })
      .def("backups", [](TreeObject& self, int64_t pages) { return copy_object(self.tree.backups(count_of("pages", pages))); },
           "pages"_a)
      .def("restore",
           [](TreeObject& self, const LockObject& lock, nb::handle pages) {
             return copy_object(self.tree.restore(lock.lock, read_page_ids(pages, self.tree.device())));
           },
           "lock"_a, "pages"_a)
      .def("finish_copy", &finish_copy, "copy_id"_a, "failed"_a = nb::make_tuple())
      .def("flush", [](TreeObject& self) { return self.tree.flush(); })
      .def("forget_device", [](TreeObject& self) { return self.tree.forget_device(); })
      .def("recover", &recover, "digests"_a, "parents"_a, "host_pages"_a, "outputs"_a = nb::bytes("", 0))
      .def("dump", [](const TreeObject& self, int64_t limit) { return self.tree.dump(count_of("limit", limit)); }, "limit"_a)
      .def("check", [](const TreeObject& self) { self.tree.check(); })
      .def_prop_ro("device", [](const TreeObject& self) -> PagePool& { return self.tree.device(); }, nb::rv_policy::reference)
      .def_prop_ro("host", [](const TreeObject& self) { return self.tree.host(); }, nb::rv_policy::reference)
      .def_prop_ro("write_through_hits", [](const TreeObject& self) { return self.tree.write_through_hits(); })
      .def_prop_ro("pages", [](const TreeObject& self) { return self.tree.pages(); })
      .def_prop_ro("cached", [](const TreeObject& self) { return self.tree.cached(); })
      .def_prop_ro("arriving", [](const TreeObject& self) { return self.tree.arriving(); })
      .def_prop_ro("restoring", [](const TreeObject& self) { return self.tree.restoring(); })
      .def_prop_ro("evictable", [](const TreeObject& self) { return self.tree.evictable(); })
      .def_prop_ro("spilling", [](const TreeObject& self) { return self.tree.spilling(); })
      .def_prop_ro("host_pages", [](const TreeObject& self) { return self.tree.host_pages(); })
      .def_prop_ro("host_evictable", [](const TreeObject& self) { return self.tree.host_evictable(); })
      .def_prop_ro("orphans", [](const TreeObject& self) { return self.tree.orphans(); })
      .def_prop_ro("nodes", [](const TreeObject& self) { return self.tree.nodes(); })
      .def_prop_ro("locks", [](const TreeObject& self) { return self.tree.locks(); })
      .def_prop_ro("copies", [](const TreeObject& self) { return self.tree.copies(); })
      .def_prop_ro("index_bytes", [](const TreeObject& self) { return self.tree.index_bytes(); });
}

}  // namespace kvferry
