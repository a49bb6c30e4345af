// The tree of csrc/radix/radix_tree.h as Python has it. How it works as a whole: the docstring of radix/tree.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>

#include "bindings/bindings.h"
#include "bindings/ids.h"
#include "bindings/types.h"
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

using TreeReference = nb::typed<nb::object, TreeObject>;

struct LockObject {
  Lock lock;
  TreeReference tree;  // lives as long as its locks

  const RadixTree& core() const { return nb::inst_ptr<TreeObject>(tree)->tree; }
};

struct InsertObject {
  uint32_t existing;
  IntList duplicates;
  Match match;
};

struct CopyObject {
  uint64_t id;
  int kind;
  IntList device, host;
  nb::bytes digests, parents, outputs;
};

using MaybeCopy = nb::typed<nb::object, std::optional<CopyObject>>;

struct EvictedObject {
  IntList freed;
  uint32_t dropped;
  MaybeCopy spill;
};

struct FinishedObject {
  IntList freed, readable, lost, removed;
};

nb::bytes bytes_of(const std::vector<uint8_t>& data) { return nb::bytes(data.data(), data.size()); }

nb::bytes bytes_of(const DigestKey& digest) { return nb::bytes(digest.data(), digest.size()); }

std::optional<CopyObject> copy_object(const std::optional<CopyPlan>& plan) {
  if (!plan) return std::nullopt;
  return CopyObject{plan->id, int(plan->kind), list_of(plan->device), list_of(plan->host), bytes_of(plan->digests),
                    bytes_of(plan->parents), bytes_of(plan->outputs)};
}

std::optional<std::pair<int, double>> next_out(const std::optional<NextOut>& next) {
  if (!next) return std::nullopt;
  return std::pair(next->group, next->value);
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

Match match(const TreeObject& self, DigestsArgument digests) {
  const DigestBuffer buffer(digests, "digests");
  return self.tree.match(buffer.data(), buffer.count());
}

LockObject lock(nb::handle self, const Match& match, int32_t priority) {
  return {nb::cast<TreeObject&>(self).tree.lock(match, priority), nb::borrow<TreeReference>(self)};
}

using Insertion = Inserted (RadixTree::*)(const uint8_t*, uint32_t, const PageIds&, uint32_t, bool, int32_t);

InsertObject insert_into(TreeObject& self, Insertion insertion, const char* field, nb::handle digests, const PageIds& ids,
                         int64_t start, int64_t kind, int32_t priority) {
  const DigestBuffer buffer(digests, "digests");
  if (start < 0 || uint64_t(start) + ids.size() != buffer.count()) {
    refuse(std::string(field) + " has " + std::to_string(ids.size()) + " entries from start " + std::to_string(start) +
           "; digests has " + std::to_string(buffer.count()));
  }
  check_range("kind", kind, kPrompt, kOutput);
  const Inserted done = (self.tree.*insertion)(buffer.data(), buffer.count(), ids, uint32_t(start), kind == kOutput, priority);
  return {done.existing, list_of(done.duplicates), done.match};
}

InsertObject insert(TreeObject& self, DigestsArgument digests, PagesArgument pages, int64_t start, int64_t kind,
                    int32_t priority) {
  const PageIds ids = read_page_ids(pages, self.tree.device());
  return insert_into(self, &RadixTree::insert, "pages", digests, ids, start, kind, priority);
}

InsertObject insert_host(TreeObject& self, DigestsArgument digests, PagesArgument rows, int64_t start, int64_t kind,
                         int32_t priority) {
  if (self.tree.host() == nullptr) refuse("rows: the tree has no host pool");
  const PageIds ids = read_page_ids(rows, *self.tree.host());
  return insert_into(self, &RadixTree::insert_host, "rows", digests, ids, start, kind, priority);
}

IntList prune(TreeObject& self, LockObject& lock, int64_t start) {
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
  return {list_of(done.freed), done.dropped, nb::borrow<MaybeCopy>(nb::cast(copy_object(done.spill)))};
}

FinishedObject finish_copy(TreeObject& self, uint64_t copy_id, PagesArgument failed) {
  const Finished done = self.tree.finish_copy(copy_id, read_page_ids(failed, self.tree.device()));
  return {list_of(done.freed), list_of(done.readable), list_of(done.lost), list_of(done.removed)};
}

Recovered recover(TreeObject& self, DigestsArgument digests, DigestsArgument parents, PagesArgument host_pages,
                  BufferArgument outputs) {
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
  nb::class_<Match>(m, "Match", "The longest held prefix of a list of digests. Good until the tree's next change of structure.")
      .def_ro("pages", &Match::pages, "Pages on the device or the host; arriving ones count.")
      .def_ro("device_pages", &Match::device_pages, "The leading ones that have a page on the device.");
  nb::class_<LockObject>(m, "Lock", "Holds a path from the root, `pages` pages long.")
      .def_prop_ro("pages", [](const LockObject& self) { return self.lock.pages; })
      .def_prop_ro("device_pages", [](const LockObject& self) { return self.core().device_pages(self.lock); },
                   "The leading ones that have a page on the device now: grows when they are restored.")
      .def_prop_ro("released", [](const LockObject& self) { return self.lock.released; })
      .def_ro("tree", &LockObject::tree);
  nb::class_<InsertObject>(m, "InsertResult")
      .def_ro("existing", &InsertObject::existing, "Leading pages of the whole list that had a device page before.")
      .def_ro("duplicates", &InsertObject::duplicates,
              "Of the caller's pages, those whose digests had one: the caller frees them.")
      .def_ro("match", &InsertObject::match, nb::rv_policy::copy, "Match of the whole list.");
  nb::class_<CopyObject>(m, "Copy", R"(
      What the caller is to copy between the tiers, page by page, and then to end by `finish_copy`.)")
      .def_ro("id", &CopyObject::id)
      .def_ro("kind", &CopyObject::kind, "SPILL and BACKUP: device to host. RESTORE: host to device.")
      .def_ro("device", &CopyObject::device)
      .def_ro("host", &CopyObject::host, "In the order of `device`.")
      .def_ro("digests", &CopyObject::digests, "32 bytes a page.")
      .def_ro("parents", &CopyObject::parents,
              "32 bytes a page: the digest of the page before it; zeros for the first of a prompt.")
      .def_ro("outputs", &CopyObject::outputs, "1 byte a page: 1 for output.");
  nb::class_<EvictedObject>(m, "Evicted")
      .def_ro("freed", &EvictedObject::freed, "Device pages, FREE.")
      .def_ro("dropped", &EvictedObject::dropped,
              "Of the freed pages, how many had no host page: what they held is lost.")
      .def_ro("spill", &EvictedObject::spill,
              "Device pages that are FREE when this copy has ended, if nobody locks them before.");
  nb::class_<FinishedObject>(m, "Finished")
      .def_ro("freed", &FinishedObject::freed, "Device pages that are FREE now.")
      .def_ro("readable", &FinishedObject::readable, "Restored device pages.")
      .def_ro("lost", &FinishedObject::lost, "Device pages whose restore failed and that others wait for: ARRIVING.")
      .def_ro("removed", &FinishedObject::removed, R"(
              Device pages that left the tree, since theirs or one before them failed and nobody waits for it; in the
              state they have, the caller's to free.)");
  nb::class_<Flushed>(m, "Flushed")
      .def_ro("device", &Flushed::device, "Device pages freed.")
      .def_ro("host", &Flushed::host, "Host pages freed.")
      .def_ro("skipped", &Flushed::skipped, "Pages of nodes that stay.");
  nb::class_<Recovered>(m, "Recovered", "How many of the pages given are in the tree, kept as orphans, and freed.")
      .def_ro("attached", &Recovered::attached)
      .def_ro("orphans", &Recovered::orphans)
      .def_ro("dropped", &Recovered::dropped);
  nb::class_<NodeView>(m, "NodeView")
      .def_ro("depth", &NodeView::depth, "Pages before it; of an orphan, some of those.")
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

void bind_policies(nb::module_& m) {
  using namespace nb::literals;
  m.def("policy_names", &policy_names);
  nb::class_<Clock>(m, "Clock", "Shared by the trees of one side.")
      .def(nb::init<>())
      .def_rw("now", &Clock::now, "Seconds; set by the owner. 0.0 at first.")
      .def_ro("tick", &Clock::tick,
              "Grows with every lock, unlock and insert of a tree that has this clock: the order of use is exact.");
  nb::class_<PolicyObject>(m, "Policy", R"(
      An eviction policy, to be shared by trees that are compared. ValueError: unknown name or parameter.)")
      .def("__init__", &init_policy, "name"_a, "evict_output_first"_a = false, "params"_a,
           nb::sig("def __init__(self, name: str, evict_output_first: bool = False, **params: float) -> None"))
      .def("on_pool", [](PolicyObject& self, uint64_t pages) { self.policy->on_pool(pages); }, "pages"_a,
           "Pages that its trees are over, in both tiers, where that is more than when they were made.")
      .def_prop_ro("name", [](const PolicyObject& self) { return self.policy->name; })
      .def_prop_ro("evict_output_first", [](const PolicyObject& self) { return self.policy->evict_output_first; });
}

using TreeClass = nb::class_<TreeObject>;

void bind_paths(TreeClass& tree) {
  using namespace nb::literals;
  tree.def("match", &match, "digests"_a, "The longest held prefix, on either tier. Changes nothing.")
      .def("match_pages",
           [](const TreeObject& self, const Match& match) { return list_of(self.tree.match_pages(match)); }, "match"_a, R"(
           Device page ids of the match, in order: `match.device_pages` of them. It must be of this tree as it is now.
           Changes nothing.)")
      .def("lock", &lock, "match"_a, "priority"_a = 0, R"(
           Holds the matched path. The match must be of this tree as it is now. A node's priority is the least given.)")
      .def("unlock", [](TreeObject& self, LockObject& lock) { self.tree.unlock(lock.lock); }, "lock"_a,
           "Gives a lock up. No page may be ARRIVING that it was the last to hold: that is `prune`.")
      .def("relock", [](TreeObject& self, LockObject& lock, const Match& longer) { self.tree.relock(lock.lock, longer); },
           "lock"_a, "longer"_a, R"(
           Moves a lock on to a longer match behind its end, such as what its holder inserted. This is no hit.)")
      .def("path_pages",
           [](const TreeObject& self, const LockObject& lock) { return list_of(self.tree.path_pages(lock.lock)); }, "lock"_a,
           "Device page ids of the locked path, in order: `lock.device_pages` of them.")
      .def("path_rows",
           [](const TreeObject& self, const LockObject& lock) { return list_of(self.tree.path_rows(lock.lock)); }, "lock"_a,
           "Host page ids of the locked path, in order; an AssertionError where a page of it is not on the host.")
      .def("insert", &insert, "digests"_a, "pages"_a, "start"_a = 0, "kind"_a = kPrompt, "priority"_a = 0, R"(
           pages[i] is of digest start + i; digests before `start` must be held on the device, else ValueError. What is
           held on the device wins; a node that is on the host only takes the page given.

           New LEASED pages become CACHED. New ARRIVING pages stay so, and the caller locks them before anything else
           happens; one for a page that the host holds is an AssertionError: that is `restore`. Duplicates keep their
           state. kind: PROMPT or OUTPUT, of new nodes.)")
      .def("insert_host", &insert_host, "digests"_a, "rows"_a, "start"_a = 0, "kind"_a = kPrompt, "priority"_a = 0, R"(
           rows[i], a LEASED page of the host, is of digest start + i: CACHED from now on, and its page on the host alone.
           Digests before `start` must be held, else ValueError. What is held already wins, whatever tier it is in, and
           duplicates stay LEASED. kind: PROMPT or OUTPUT, of new nodes.)")
      .def("arrived",
           [](TreeObject& self, PagesArgument pages) { self.tree.arrived(read_page_ids(pages, self.tree.device())); },
           "pages"_a, "ARRIVING -> CACHED: their bytes are there and verified.")
      .def("prune", &prune, "lock"_a, "start"_a, R"(
           Releases the lock and takes what only it held, from page index `start` of its path on, out of the tree.

           Returns the device pages, path order first, in the state they had, for the caller to free; those that a copy
           names are freed when it ends. Host copies are freed. No page before `start` may be ARRIVING that this lock
           was the last to hold.)");
}

void bind_tiers(TreeClass& tree) {
  using namespace nb::literals;
  tree.def("evict", &evict<WhenHostIsFull::kDrop>, "pages"_a, "host_room"_a = nb::none(), R"(
           Up to `pages` device pages of unlocked leaves, in the policy's order, cutting a long leaf at its tail:
           exactly that many if so many can go.

           What has a host copy is freed at once. What has none is spilled if the host has free pages for it, and no
           more than `host_room` are spilled with it; else it is freed at once, with what hangs below.)")
      .def("evict_with_room", &evict<WhenHostIsFull::kStop>, "pages"_a, "host_room"_a = nb::none(),
           "As `evict`, but it ends where a leaf would have to be dropped that more room on the host could save.")
      .def("evict_host", [](TreeObject& self, int64_t pages) { return self.tree.evict_host(count_of("pages", pages)); },
           "pages"_a, R"(
           Frees up to `pages` host pages: first copies of what is on the device, then host leaves. Returns how many.)")
      .def("oldest", [](const TreeObject& self) { return next_out(self.tree.oldest()); },
           "(group, value) of what `evict` would take next: least first among trees of one policy and clock.")
      .def("oldest_host", [](const TreeObject& self) { return next_out(self.tree.oldest_host()); },
           "The same of `evict_host`; group -1 is a copy of what is on the device.")
      .def("backups", [](TreeObject& self, int64_t pages) { return copy_object(self.tree.backups(count_of("pages", pages))); },
           "pages"_a, R"(
           Copies to the host what was locked `write_through_hits` times and has no host copy, at most `pages` pages,
           and only into FREE ones.)")
      .def("backups_ahead",
           [](TreeObject& self, int64_t pages, int64_t ahead) {
             return copy_object(self.tree.backups_ahead(count_of("pages", pages), count_of("ahead", ahead)));
           },
           "pages"_a, "ahead"_a, R"(
           Copies to the host what it lacks of the next `ahead` pages that `evict` would take, at most `pages` pages, and
           only into FREE ones.)")
      .def("restore",
           [](TreeObject& self, const LockObject& lock, PagesArgument pages) {
             return copy_object(self.tree.restore(lock.lock, read_page_ids(pages, self.tree.device())));
           },
           "lock"_a, "pages"_a, R"(
           Gives LEASED device pages to the host-only pages of the path, as many as there are. The copy holds the path
           until it ends. None if there are none.)")
      .def("finish_copy", &finish_copy, "copy_id"_a, "failed"_a = nb::make_tuple(),
           "The copy has ended. failed: device ids of the copy whose bytes are not right.")
      .def("flush", [](TreeObject& self) { return self.tree.flush(); },
           "Takes away what is unlocked, not under a copy, and has nothing below that stays.")
      .def("forget_device", [](TreeObject& self) { return self.tree.forget_device(); }, R"(
           The device's memory is gone: pages with a host copy are on the host only, others are freed, and what hung
           below those are orphans. Nothing may be locked, arriving or under a copy. Returns how many pages it held.)")
      .def("begin_recovery", [](TreeObject& self) { self.tree.begin_recovery(); }, R"(
           From now on pages are found by their digests, which is what `recover` does. Called of a tree that is empty, this
           costs nothing; the first `recover` does it, too.)")
      .def("end_recovery", [](TreeObject& self) { self.tree.end_recovery(); },
           "Lets go of what `recover` finds pages by, some 30 bytes a page.")
      .def("recover", &recover, "digests"_a, "parents"_a, "host_pages"_a, "outputs"_a.sig("b''") = nb::bytes("", 0), R"(
           LEASED host pages become CACHED ones of the tree. parents: the digest before each page, zeros for the first
           of a prompt. The order is of no matter. What is there already, or has no beginning, is freed.)");
}

void bind_state(TreeClass& tree) {
  using namespace nb::literals;
  tree.def("dump", [](const TreeObject& self, int64_t limit) { return self.tree.dump(count_of("limit", limit)); }, "limit"_a,
           "At most `limit` nodes, depth first.")
      .def("check", [](const TreeObject& self) { self.tree.check(); }, "Recounts everything; for tests.")
      .def_prop_ro("device", [](const TreeObject& self) -> PagePool& { return self.tree.device(); }, nb::rv_policy::reference)
      .def_prop_ro("host", [](const TreeObject& self) { return self.tree.host(); }, nb::rv_policy::reference,
                   nb::sig("def host(self) -> PagePool | None"))
      .def_prop_ro("write_through_hits", [](const TreeObject& self) { return self.tree.write_through_hits(); })
      .def_prop_ro("pages", [](const TreeObject& self) { return self.tree.pages(); }, "Pages on the device.")
      .def_prop_ro("cached", [](const TreeObject& self) { return self.tree.cached(); }, "Device pages that are readable.")
      .def_prop_ro("arriving", [](const TreeObject& self) { return self.tree.arriving(); })
      .def_prop_ro("restoring", [](const TreeObject& self) { return self.tree.restoring(); })
      .def_prop_ro("version", [](const TreeObject& self) { return self.tree.version(); }, "Another one after each change of structure.")
      .def_prop_ro("evictable", [](const TreeObject& self) { return self.tree.evictable(); },
                   "Device pages of unlocked nodes, also those under a copy.")
      .def_prop_ro("spilling", [](const TreeObject& self) { return self.tree.spilling(); },
                   "Device pages that would be freed if every spill ended now.")
      .def_prop_ro("host_pages", [](const TreeObject& self) { return self.tree.host_pages(); })
      .def_prop_ro("host_evictable", [](const TreeObject& self) { return self.tree.host_evictable(); },
                   "Host pages that `evict_host` could free.")
      .def_prop_ro("orphans", [](const TreeObject& self) { return self.tree.orphans(); },
                   "Host pages whose parent is not known.")
      .def_prop_ro("nodes", [](const TreeObject& self) { return self.tree.nodes(); }, "Nodes without the root.")
      .def_prop_ro("locks", [](const TreeObject& self) { return self.tree.locks(); }, "Handles that are not released.")
      .def_prop_ro("copies", [](const TreeObject& self) { return self.tree.copies(); }, "Copies in flight.")
      .def_prop_ro("index_bytes", [](const TreeObject& self) { return self.tree.index_bytes(); },
                   "Memory that the index holds, about.");
}

}  // namespace

void bind_tree(nb::module_& m) {
  using namespace nb::literals;
  m.attr("PROMPT") = kPrompt;
  m.attr("OUTPUT") = kOutput;
  m.attr("SPILL") = int(CopyKind::kSpill);
  m.attr("BACKUP") = int(CopyKind::kBackup);
  m.attr("RESTORE") = int(CopyKind::kRestore);
  bind_policies(m);
  bind_values(m);
  TreeClass tree(m, "PagedRadixTree", R"(
      One namespace's pages over a device pool and, maybe, a host pool. No policy: LRU. No clock: one of its own. How it
      works as a whole, and what it raises: `kvferry.radix.tree`.

      write_through_hits: locks after which `backups` copies a node to the host; 0: never.)");
  tree.def("__init__", &init_tree, "device"_a, "host"_a.none() = nb::none(), "policy"_a.none() = nb::none(),
           "clock"_a.none() = nb::none(), "write_through_hits"_a = 0, nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(),
           nb::keep_alive<1, 4>(), nb::keep_alive<1, 5>());
  bind_paths(tree);
  bind_tiers(tree);
  bind_state(tree);
}

}  // namespace kvferry
