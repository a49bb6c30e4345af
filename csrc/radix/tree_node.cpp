#include "radix/tree_node.h"

#include "checks.h"

namespace kvferry {

uint32_t ChildTable::home(const Node* child) const { return uint32_t(hash_of(child->first_digest())) & (capacity_ - 1); }

uint32_t ChildTable::slot_of(const Node* child) const {
  uint32_t at = capacity_ == 0 ? 0 : home(child);
  for (uint32_t probe = 0; probe < capacity_; ++probe, at = (at + 1) & (capacity_ - 1)) {
    if (slots_[at] == child) return at;
  }
  throw BrokenInvariant("a node is not among its parent's children");
}

void ChildTable::place(Node* child) {
  uint32_t at = home(child);
  while (slots_[at] != nullptr) at = (at + 1) & (capacity_ - 1);
  slots_[at] = child;
}

void ChildTable::resize(uint32_t capacity) {
  Node** const old = slots_;
  const uint32_t n = capacity_;
  slots_ = static_cast<Node**>(std::calloc(capacity, sizeof(Node*)));
  if (slots_ == nullptr) {
    slots_ = old;
    throw std::bad_alloc();
  }
  capacity_ = capacity;
  for (uint32_t i = 0; i < n; ++i) {
    if (old[i] != nullptr) place(old[i]);
  }
  std::free(old);
}

void ChildTable::add(Node* child) {
  const bool full = capacity_ <= 4 ? count_ == capacity_ : (count_ + 1) * 4ull > capacity_ * 3ull;
  if (full) resize(capacity_ == 0 ? 1 : capacity_ * 2);
  place(child);
  ++count_;
}

void ChildTable::remove(const Node* child) {
  uint32_t hole = slot_of(child);
  if (--count_ == 0) {
    std::free(slots_);
    slots_ = nullptr;
    capacity_ = 0;
    return;
  }
  slots_[hole] = nullptr;
  // What stands behind the hole moves up if its search would otherwise end there.
  const uint32_t mask = capacity_ - 1;
  for (uint32_t at = (hole + 1) & mask; slots_[at] != nullptr; at = (at + 1) & mask) {
    if (((at - home(slots_[at])) & mask) >= ((at - hole) & mask)) {
      slots_[hole] = std::exchange(slots_[at], nullptr);
      hole = at;
    }
  }
  if (capacity_ > 4 && count_ < capacity_ / 8) resize(capacity_ / 4);
}

void ChildTable::replace(const Node* child, Node* by) { slots_[slot_of(child)] = by; }

void ChildTable::swap(ChildTable& other) {
  std::swap(slots_, other.slots_);
  std::swap(capacity_, other.capacity_);
  std::swap(count_, other.count_);
}

void NodeList::add(Node* node) {
  node->previous = last_;
  node->next = nullptr;
  (last_ != nullptr ? last_->next : first_) = node;
  last_ = node;
}

void NodeList::remove(Node* node) {
  (node->previous != nullptr ? node->previous->next : first_) = node->next;
  (node->next != nullptr ? node->next->previous : last_) = node->previous;
  node->previous = node->next = nullptr;
}

}  // namespace kvferry
