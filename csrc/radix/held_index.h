// The digests whose pages are readable, in memory that other processes of this host map: they look a prompt up without
// asking. One writer; readers take no lock, and what they read may be over when they use it.
//
// Layout, little-endian: magic, buckets (a power of two), the writer's last beat (nanoseconds of CLOCK_MONOTONIC, 0: it
// has ended), and at byte 64 the buckets of eight names. A page's name is the first 8 bytes of its digest, mixed with
// its namespace's: it lies in one of two buckets, once for each tier that holds the page. Where both are full it is left
// out. With four times as many places as pages that does not happen, and two names meet once in 2^64.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvferry {

constexpr size_t kNamespaceBytes = 32;

uint64_t held_name(const uint8_t* digest, const uint8_t* namespace_id);  // never 0

class HeldIndex {
 public:
  static size_t bytes_for(int64_t pages);  // std::invalid_argument

  // Of `nbytes` at `memory`, aligned to 64. Writing: empty from now on. Reading: std::invalid_argument where it is none.
  static HeldIndex make(uint8_t* memory, size_t nbytes);
  static HeldIndex read(const uint8_t* memory, size_t nbytes);

  void add(uint64_t name);
  void remove(uint64_t name);
  void beat(int64_t now);
  int64_t last_beat() const;
  bool has(uint64_t name) const;

  // The first pages of a prompt that are held.
  size_t held(const uint8_t* digests, size_t pages, const uint8_t* namespace_id) const;

  int publishers = 0;  // pools that tell it of their pages

 private:
  HeldIndex(uint64_t* words, uint64_t buckets) : words_(words), buckets_(buckets) {}
  uint64_t* bucket(uint64_t name, int which) const;

  uint64_t* words_;
  uint64_t buckets_;
};

}  // namespace kvferry
