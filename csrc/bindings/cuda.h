// The engine as Python has it, for the files that bind its parts.
#pragma once

#include <nanobind/nanobind.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "bindings/layout.h"
#include "cuda/engine.h"
#include "cuda/parts.h"
#include "cuda/small.h"

namespace kvferry {

class Engine;

// 0, 1 and 2 name the default streams: the batch copy refuses them, and nothing could overlap with them.
GpuStream stream_at(std::optional<int64_t> handle);

// To record an event on, or to hold, where a default stream is as good as another.
GpuStream any_stream_at(int64_t handle);

// ValueError: negative, or more than a million.
std::chrono::nanoseconds checked_seconds(double seconds);

// What Python has of T. It ends without the GIL, since the driver may wait for the device then.
template <class T>
class Owned {
 public:
  template <class... Arguments>
  explicit Owned(Arguments&&... arguments) : held_(std::make_unique<T>(std::forward<Arguments>(arguments)...)) {}
  ~Owned() {
    const nanobind::gil_scoped_release release;
    held_.reset();
  }
  Owned(Owned&&) = delete;
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;

  T& operator*() const { return *held_; }
  T* operator->() const { return held_.get(); }

 private:
  std::unique_ptr<T> held_;
};
using OwnedPages = Owned<GpuPages>;

// ValueError: the pages are another device's.
void check_device(Engine& engine, const GpuPages& pages);

// ValueError: an api that is none.
std::shared_ptr<const GpuDriver> driver_of(const std::string& library, const std::string& api);

// A copy that was issued. It keeps alive what the copy uses; who drops it before it is done gives that up.
struct Copying {
  std::shared_ptr<GpuCopy> end;
  const char* strategy;
  nanobind::object uses;
  std::unique_ptr<SumCells::Held> sum;
};

class Engine {
 public:
  Engine(int64_t device, const std::string& library, const std::string& api, const CopyTuning& tuning,
         const PartTuning& part_tuning);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  GpuCopyEngine& get() { return *engine_; }
  GpuParts& parts() { return *parts_; }
  SmallReads& small();  // made when first used: not every driver lets memory be pinned
  const std::shared_ptr<GpuDevice>& device() const { return engine_->device(); }

  // What run() has issued, and where it ends; null: on the stream that issue() was given.
  struct Run {
    Run(const char* name, GpuStream on = nullptr) : strategy(name), end(on) {}
    const char* strategy;
    GpuStream end;
  };

  // Issues by run() what is ordered on `stream`, without the GIL.
  template <class Issue>
  std::unique_ptr<Copying> issue(GpuStream stream, nanobind::object uses, const Issue& run,
                                 std::unique_ptr<SumCells::Held> sum = nullptr) {
    auto copying = std::unique_ptr<Copying>(
        new Copying{std::make_shared<GpuCopy>(device()), "", std::move(uses), std::move(sum)});
    nanobind::gil_scoped_release release;
    copying->end->record(stream);  // refuses another device's stream, which a copy alone would run on
    if (copying->sum != nullptr) copying->sum->spoil_until_issued();
    const Run issued = run(copying->sum.get());
    copying->strategy = issued.strategy;
    const GpuStream end = issued.end != nullptr ? issued.end : stream;
    try {
      copying->end->record(end);
    } catch (...) {
      drain_stream(*device(), end);  // the caller learns of no copy: none may run on
      throw;
    }
    if (copying->sum != nullptr) copying->sum->used_until(copying->end);
    return copying;
  }

 private:
  std::unique_ptr<GpuCopyEngine> engine_;
  std::unique_ptr<GpuParts> parts_;
  std::mutex small_mutex_;
  std::unique_ptr<SmallReads> small_;
};

// Each adds its methods to the engine's class.
void bind_gpu_memory(nanobind::module_& m, nanobind::class_<Engine>& engine);
void bind_gpu_parts(nanobind::module_& m, nanobind::class_<Engine>& engine);

// After GpuCopy.
void bind_gpu_waiter(nanobind::module_& m);

}  // namespace kvferry
