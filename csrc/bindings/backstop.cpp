// The end of a process that nothing in Python may be able to end.
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "bindings/bindings.h"
#include "wait_pace.h"

namespace nb = nanobind;

namespace kvferry {
namespace {

constexpr int64_t kMostMilliseconds = 3600 * 1000;

void end_process_later(int64_t milliseconds, int signal) {
  check_range("milliseconds", milliseconds, 1, kMostMilliseconds);
  check_range("signal", signal, 1, SIGRTMAX);
  const std::chrono::nanoseconds time = std::chrono::milliseconds(milliseconds);
  std::thread([time, signal] {
    for (int i = 0; i < kSlices; ++i) std::this_thread::sleep_for(time / kSlices);
    raise(signal);  // to this thread
    _exit(1);
  }).detach();
}

}  // namespace

void bind_backstop(nb::module_& m) {
  using namespace nb::literals;
  m.def("end_process_later", &end_process_later, "milliseconds"_a, "signal"_a, R"(
        For good: after so long a thread that needs nothing of the interpreter raises the signal, whose handler may say
        something, and ends the process with status 1. A standstill of the process counts for an eighth of it at most.)");
}

}  // namespace kvferry
