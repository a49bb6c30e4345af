// A driver whose device is this process: everything is done when a call returns. It has CUDA's names and HIP's. In which
// order a device might have done it is for orders.h to judge.
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "cuda/driver.h"
#include "kernels.h"
#include "orders.h"

using namespace kvferry;
using fake_gpu::Operation;

namespace {

std::recursive_mutex mutex;  // of what follows: engines are called from several threads
using Hold = std::lock_guard<std::recursive_mutex>;
std::map<std::string, long> calls;
std::map<std::string, long> answers;  // of functions that shall not succeed
size_t largest_batch = 0;
int last_source_order = 0;
std::atomic<int> contexts{0}, retained{0};  // current ones; of all devices, which share one here
std::map<GpuAddress, size_t> allocations;  // of this "device", and those of another "process" that are mapped
std::map<GpuAddress, size_t> foreign;      // of another "process"
std::map<void*, size_t> registered;        // host memory

constexpr GpuStatus kInvalidHandle = 400;

// 0 from then on.
long take(const std::string& name) {
  const Hold hold(mutex);
  const auto found = answers.find(name);
  return found == answers.end() ? 0 : std::exchange(found->second, 0);
}

GpuStatus answer(const std::string& name) {
  GpuStatus status = kGpuSuccess;
  {
    const Hold hold(mutex);
    ++calls[name];
    if (const auto found = answers.find(name); found != answers.end()) status = GpuStatus(found->second);
  }
  // Once it takes so long, as if the process stood still behind it.
  if (const long pause = take(name + "_pause_ms")) std::this_thread::sleep_for(std::chrono::milliseconds(pause));
  return status;
}

// Of a call that waits for the device, or may.
GpuStatus waiting_answer(const char* name) {
  fake_gpu::thread_waits(name);
  return answer(name);
}

// Host memory whose address is at or behind that in answers is not pinned, or lies elsewhere for the device.
bool from(const char* name, uint64_t address) {
  const Hold hold(mutex);
  const auto found = answers.find(name);
  return found != answers.end() && address >= uint64_t(found->second);
}

// Counts down in answers, if it is there.
bool none_left(const char* name) {
  const Hold hold(mutex);
  const auto left = answers.find(name);
  return left != answers.end() && left->second-- <= 0;
}

template <class Blocks>
bool lies_in(const Blocks& blocks, typename Blocks::key_type at) {
  const auto after = blocks.upper_bound(at);
  if (after == blocks.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return uint64_t(at) - uint64_t(begin) < bytes;
}

// A copy that has an end in host memory which is not pinned waits.
void copies(const char* name, const void* to, const void* from) {
  const Hold hold(mutex);
  for (void* end : {const_cast<void*>(to), const_cast<void*>(from)}) {
    if (lies_in(allocations, GpuAddress(end)) || lies_in(registered, end)) continue;
    fake_gpu::thread_waits(std::string(name) + " of host memory that is not pinned");
  }
}

GpuStatus copy_at_once(const char* name, void* dst, const void* src, size_t bytes, GpuStream stream) {
  copies(name, dst, src);
  const GpuStatus status = answer(name);
  if (status == kGpuSuccess) Operation(name, stream).copy(dst, src, bytes);
  return status;
}

Operation::Source source_of(SourceOrder order) {
  return order == SourceOrder::kStream ? Operation::Source::kInOrder : Operation::Source::kAtAnyTime;
}

}  // namespace

extern "C" {

// An allocation of another "process": what its handle is made of.
GpuAddress fake_foreign(size_t bytes) {
  const auto address = reinterpret_cast<GpuAddress>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  foreign[address] = bytes;
  fake_gpu::memory_allocated(address, bytes);
  return address;
}
void fake_foreign_ends(GpuAddress address) { foreign.erase(address); }

long fake_calls(const char* name) {
  const Hold hold(mutex);
  return calls[name];
}
void fake_answer(const char* name, long status) {
  const Hold hold(mutex);
  answers[name] = status;
}
void fake_reset() {
  const Hold hold(mutex);
  calls.clear();
  answers.clear();
  largest_batch = 0;
}
size_t fake_largest_batch() { return largest_batch; }
int fake_source_order() { return last_source_order; }
int fake_contexts() { return contexts; }

GpuStatus hipInit(unsigned) { return answer("init"); }
GpuStatus hipDriverGetVersion(int* version) { return *version = 12080, answer("driver_version"); }
GpuStatus hipDrvGetErrorName(GpuStatus status, const char** name) {
  return *name = status == kGpuInvalidValue ? "INVALID_VALUE" : "OTHER", answer("error_name");
}
GpuStatus hipDeviceGet(int* device, int ordinal) { return *device = ordinal, answer("device_get"); }
GpuStatus hipGetDeviceCount(int* count) { return *count = 3, answer("device_count"); }
GpuStatus hipDeviceGetUuid(GpuUuid* uuid, int device) {
  std::memset(uuid->bytes, 0x10 + device, sizeof uuid->bytes);
  return answer("device_uuid");
}
GpuStatus fakeDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 133 && answer("mps") != 0;
  return answer("device_attribute");
}
GpuStatus hipDevicePrimaryCtxRetain(GpuContext* context, int) { return ++retained, *context = &calls, answer("context_retain"); }
GpuStatus hipDevicePrimaryCtxRelease(int) { return --retained, waiting_answer("context_release"); }
GpuStatus cuDevicePrimaryCtxGetState(int, unsigned*, int* active) { return *active = retained > 0, answer("context_state"); }
GpuStatus hipCtxPushCurrent(GpuContext) { return ++contexts, answer("context_push"); }
GpuStatus hipCtxPopCurrent(GpuContext*) { return --contexts, answer("context_pop"); }
// No stacks at all, in a context.
GpuStatus cuCtxSetLimit(int limit, size_t value) {
  return limit == 0 && value == 0 && contexts == 1 ? answer("context_limit") : kGpuInvalidValue;
}
GpuStatus hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, answer("stream_priorities");
}
GpuStatus hipStreamCreateWithPriority(GpuStream* stream, unsigned, int) {
  fake_gpu::stream_created(*stream = std::calloc(1, 1));
  return answer("stream_create");
}
GpuStatus hipStreamDestroy(GpuStream stream) {
  fake_gpu::stream_destroyed(stream);
  return std::free(stream), answer("stream_destroy");
}
GpuStatus hipStreamWaitEvent(GpuStream stream, GpuEvent event, unsigned) {
  const GpuStatus status = answer("stream_wait");
  if (status == kGpuSuccess) fake_gpu::stream_waits(stream, event);
  return status;
}
GpuStatus hipStreamSynchronize(GpuStream stream) {
  const GpuStatus status = waiting_answer("stream_synchronize");
  if (status == kGpuSuccess) fake_gpu::stream_synchronized(stream);
  return status;
}
GpuStatus hipEventCreateWithFlags(GpuEvent* event, unsigned) {
  fake_gpu::event_created(*event = std::calloc(1, 1));
  return answer("event_create");
}
GpuStatus hipEventDestroy(GpuEvent event) {
  fake_gpu::event_destroyed(event);
  return std::free(event), answer("event_destroy");
}
GpuStatus hipEventRecord(GpuEvent event, GpuStream stream) {
  const Hold hold(mutex);
  const auto other = answers.find("stream_of_another_device");
  if (other != answers.end() && reinterpret_cast<long>(stream) == other->second) return kInvalidHandle;
  if (none_left("event_records_left")) return kInvalidHandle;
  const GpuStatus status = answer("event_record");
  if (status == kGpuSuccess) fake_gpu::event_recorded(event, stream);
  return status;
}
GpuStatus hipEventQuery(GpuEvent event) {
  const GpuStatus status = answer("event_query");
  return status == kGpuSuccess && !fake_gpu::event_seen(event) ? kGpuNotReady : status;
}
GpuStatus hipEventSynchronize(GpuEvent event) {
  const GpuStatus status = waiting_answer("event_synchronize");
  if (status == kGpuSuccess) fake_gpu::event_synchronized(event);
  return status;
}
GpuStatus hipEventElapsedTime(float* milliseconds, GpuEvent begin, GpuEvent end) {
  const Hold hold(mutex);
  *milliseconds = float(answers["elapsed_us"]) / 1000;
  const GpuStatus status = answer("event_elapsed");
  return status == kGpuSuccess && !(fake_gpu::event_seen(begin) && fake_gpu::event_seen(end)) ? kGpuNotReady : status;
}
GpuStatus hipMalloc(GpuAddress* address, size_t bytes) {
  const Hold hold(mutex);
  const GpuStatus status = waiting_answer("mem_alloc");
  if (none_left("mem_allocs_left")) return 2;  // no memory
  if (status != kGpuSuccess) return status;
  *address = reinterpret_cast<GpuAddress>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  allocations[*address] = bytes;
  fake_gpu::memory_allocated(*address, bytes);
  return status;
}
GpuStatus hipFree(GpuAddress address) {
  const Hold hold(mutex);
  if (const auto found = allocations.find(address); found != allocations.end()) {
    fake_gpu::memory_freed(address, found->second);
    allocations.erase(found);
  }
  return std::free(reinterpret_cast<void*>(address)), waiting_answer("mem_free");
}
GpuStatus hipMemGetInfo(size_t* free, size_t* total) { return *free = 1000, *total = 2000, answer("mem_info"); }
GpuStatus hipMemGetAddressRange(GpuAddress* base, size_t* size, GpuAddress address) {
  const Hold hold(mutex);
  const GpuStatus status = answer("mem_address_range");
  if (status != kGpuSuccess) return status;
  auto found = allocations.upper_bound(address);
  if (found == allocations.begin() || address >= (--found)->first + found->second) return kGpuInvalidValue;
  return *base = found->first, *size = found->second, kGpuSuccess;
}
GpuStatus hipMemsetD8Async(GpuAddress address, unsigned char value, size_t bytes, GpuStream stream) {
  const GpuStatus status = answer("set_bytes");
  if (status == kGpuSuccess) Operation("set_bytes", stream).set(reinterpret_cast<void*>(address), value, bytes);
  return status;
}
GpuStatus hipIpcGetMemHandle(GpuIpcHandle* handle, GpuAddress address) {
  std::memset(handle->bytes, 0x5A, sizeof handle->bytes);
  std::memcpy(handle->bytes, &address, sizeof address);
  return answer("ipc_export");
}
GpuStatus hipIpcOpenMemHandle(GpuAddress* address, GpuIpcHandle handle, unsigned) {
  const Hold hold(mutex);
  const GpuStatus status = waiting_answer("ipc_open");
  if (status != kGpuSuccess) return status;
  std::memcpy(address, handle.bytes, sizeof *address);
  const auto found = foreign.find(*address);
  if (found == foreign.end()) return kGpuInvalidValue;
  allocations[found->first] = found->second;
  return kGpuSuccess;
}
GpuStatus hipIpcCloseMemHandle(GpuAddress address) {
  const Hold hold(mutex);
  if (const auto found = allocations.find(address); found != allocations.end()) {
    fake_gpu::memory_let_go("ipc_close", address, found->second);
    allocations.erase(found);
  }
  return waiting_answer("ipc_close");
}
GpuStatus hipHostRegister(void* memory, size_t bytes, unsigned) {
  const Hold hold(mutex);
  registered[memory] = bytes;
  return waiting_answer("host_register");
}
GpuStatus hipHostUnregister(void* memory) {
  const Hold hold(mutex);
  fake_gpu::memory_let_go("host_unregister", reinterpret_cast<GpuAddress>(memory), registered[memory]);
  registered.erase(memory);
  return waiting_answer("host_unregister");
}
GpuStatus hipHostGetDevicePointer(GpuAddress* address, void* host, unsigned) {
  *address = reinterpret_cast<GpuAddress>(host);
  if (from("not_pinned_from", *address)) return kGpuInvalidValue;
  if (from("seen_elsewhere_from", *address)) *address += 4096;
  return answer("host_device_address");
}
GpuStatus hipMemcpyDtoHAsync(void* dst, GpuAddress src, size_t bytes, GpuStream stream) {
  return copy_at_once("copy_to_host", dst, reinterpret_cast<void*>(src), bytes, stream);
}
GpuStatus hipMemcpyHtoDAsync(GpuAddress dst, const void* src, size_t bytes, GpuStream stream) {
  return copy_at_once("copy_to_device", reinterpret_cast<void*>(dst), src, bytes, stream);
}
GpuStatus hipMemcpyDtoDAsync(GpuAddress dst, GpuAddress src, size_t bytes, GpuStream stream) {
  return copy_at_once("copy_on_device", reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), bytes, stream);
}
GpuStatus hipMemcpyBatchAsync(const GpuAddress* dst, const GpuAddress* src, const size_t* sizes, size_t count,
                              const BatchAttributes* attributes, const size_t* first, size_t number, size_t*,
                              GpuStream stream) {
  const GpuStatus status = answer("copy_batch");
  if (status != kGpuSuccess) return status;
  if (stream == nullptr || count == 0 || number != 1 || first[0] != 0) return kGpuInvalidValue;
  const Hold hold(mutex);
  if (count > largest_batch) largest_batch = count;
  last_source_order = int(attributes->source_order);
  Operation operation("copy_batch", stream);
  for (size_t i = 0; i < count; ++i) {
    copies("copy_batch", reinterpret_cast<void*>(dst[i]), reinterpret_cast<void*>(src[i]));
    operation.copy(reinterpret_cast<void*>(dst[i]), reinterpret_cast<void*>(src[i]), sizes[i],
                   source_of(attributes->source_order));
  }
  return kGpuSuccess;
}
GpuStatus hipMemcpyParam2DAsync(const PitchedCopy* copy, GpuStream stream) {
  const GpuStatus status = answer("copy_pitched");
  if (status != kGpuSuccess) return status;
  const auto memory = [](const PitchedSide& side) {
    return side.memory_type == kHostMemory ? static_cast<const char*>(side.host) : reinterpret_cast<const char*>(side.device);
  };
  if (stream == nullptr || copy->src.memory_type == copy->dst.memory_type) return kGpuInvalidValue;
  if (copy->src.pitch < copy->width || copy->dst.pitch < copy->width) return kGpuInvalidValue;
  copies("copy_pitched", memory(copy->dst), memory(copy->src));
  Operation operation("copy_pitched", stream);
  for (size_t line = 0; line < copy->height; ++line) {
    operation.copy(const_cast<char*>(memory(copy->dst)) + line * copy->dst.pitch,
                   memory(copy->src) + line * copy->src.pitch, copy->width);
  }
  return kGpuSuccess;
}
GpuStatus cuMemcpy3DBatchAsync(size_t count, const PitchedOperation* operations, uint64_t, GpuStream stream) {
  const GpuStatus status = answer("copy_pitched_batch");
  if (status != kGpuSuccess) return status;
  if (stream == nullptr || count == 0) return kGpuInvalidValue;
  Operation operation("copy_pitched_batch", stream);
  for (const PitchedOperation* at = operations; at < operations + count; ++at) {
    if (at->src.type != kAddressOperand || at->dst.type != kAddressOperand || at->depth != 1) return kGpuInvalidValue;
    if (at->src.location.type == at->dst.location.type || at->src.pitch < at->width || at->dst.pitch < at->width) {
      return kGpuInvalidValue;
    }
    const bool from_host = at->src.location.type == kHostLocation;
    if (at->source_order != (from_host ? SourceOrder::kAny : SourceOrder::kStream)) return kGpuInvalidValue;
    copies("copy_pitched_batch", reinterpret_cast<void*>(at->dst.address), reinterpret_cast<void*>(at->src.address));
    for (size_t line = 0; line < at->height; ++line) {
      operation.copy(reinterpret_cast<char*>(at->dst.address) + line * at->dst.pitch,
                     reinterpret_cast<const char*>(at->src.address) + line * at->src.pitch, at->width,
                     source_of(at->source_order));
    }
  }
  return kGpuSuccess;
}
GpuStatus hipModuleLoadData(GpuModule* module, const void*) { return *module = &calls, answer("module_load"); }
GpuStatus hipModuleUnload(GpuModule) { return answer("module_unload"); }
GpuStatus hipModuleGetFunction(GpuFunction* function, GpuModule, const char* name) {
  *function = const_cast<char*>(name);
  return answer("module_function");
}
GpuStatus hipModuleLaunchKernel(GpuFunction function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                                unsigned, unsigned, GpuStream stream, void** parameters, void**) {
  const GpuStatus status = answer("launch");
  if (status != kGpuSuccess) return status;
  if (none_left("launches_left")) return kInvalidHandle;
  const std::string name = static_cast<const char*>(function);  // it is its handle
  if (!fake_gpu::run_kernel(name, parameters[0], blocks, threads, stream)) return kGpuInvalidValue;
  if (name.rfind("copy_list", 0) == 0) {
    const Hold hold(mutex);
    ++calls[name];
  }
  return kGpuSuccess;
}

GpuStatus cuGetProcAddress_v2(const char* symbol, void** address, int version, uint64_t, int* found) {
  static const std::map<std::string, void*> table = {
      {"cuInit", (void*)hipInit},
      {"cuDriverGetVersion", (void*)hipDriverGetVersion},
      {"cuGetErrorName", (void*)hipDrvGetErrorName},
      {"cuDeviceGet", (void*)hipDeviceGet},
      {"cuDeviceGetCount", (void*)hipGetDeviceCount},
      {"cuDeviceGetUuid", (void*)hipDeviceGetUuid},
      {"cuDeviceGetAttribute", (void*)fakeDeviceGetAttribute},
      {"cuMemGetInfo", (void*)hipMemGetInfo},
      {"cuMemGetAddressRange", (void*)hipMemGetAddressRange},
      {"cuMemsetD8Async", (void*)hipMemsetD8Async},
      {"cuIpcGetMemHandle", (void*)hipIpcGetMemHandle},
      {"cuIpcOpenMemHandle", (void*)hipIpcOpenMemHandle},
      {"cuIpcCloseMemHandle", (void*)hipIpcCloseMemHandle},
      {"cuDevicePrimaryCtxRetain", (void*)hipDevicePrimaryCtxRetain},
      {"cuDevicePrimaryCtxRelease", (void*)hipDevicePrimaryCtxRelease},
      {"cuCtxPushCurrent", (void*)hipCtxPushCurrent},
      {"cuCtxPopCurrent", (void*)hipCtxPopCurrent},
      {"cuDevicePrimaryCtxGetState", (void*)cuDevicePrimaryCtxGetState},
      {"cuCtxSetLimit", (void*)cuCtxSetLimit},
      {"cuCtxGetStreamPriorityRange", (void*)hipDeviceGetStreamPriorityRange},
      {"cuStreamCreateWithPriority", (void*)hipStreamCreateWithPriority},
      {"cuStreamDestroy", (void*)hipStreamDestroy},
      {"cuStreamWaitEvent", (void*)hipStreamWaitEvent},
      {"cuStreamSynchronize", (void*)hipStreamSynchronize},
      {"cuEventCreate", (void*)hipEventCreateWithFlags},
      {"cuEventDestroy", (void*)hipEventDestroy},
      {"cuEventRecord", (void*)hipEventRecord},
      {"cuEventQuery", (void*)hipEventQuery},
      {"cuEventSynchronize", (void*)hipEventSynchronize},
      {"cuEventElapsedTime", (void*)hipEventElapsedTime},
      {"cuMemAlloc", (void*)hipMalloc},
      {"cuMemFree", (void*)hipFree},
      {"cuMemHostRegister", (void*)hipHostRegister},
      {"cuMemHostUnregister", (void*)hipHostUnregister},
      {"cuMemHostGetDevicePointer", (void*)hipHostGetDevicePointer},
      {"cuMemcpyDtoHAsync", (void*)hipMemcpyDtoHAsync},
      {"cuMemcpyHtoDAsync", (void*)hipMemcpyHtoDAsync},
      {"cuMemcpyDtoDAsync", (void*)hipMemcpyDtoDAsync},
      {"cuMemcpy2DAsync", (void*)hipMemcpyParam2DAsync},
      {"cuMemcpy3DBatchAsync", (void*)cuMemcpy3DBatchAsync},
      {"cuMemcpyBatchAsync", (void*)hipMemcpyBatchAsync},
      {"cuModuleLoadData", (void*)hipModuleLoadData},
      {"cuModuleUnload", (void*)hipModuleUnload},
      {"cuModuleGetFunction", (void*)hipModuleGetFunction},
      {"cuLaunchKernel", (void*)hipModuleLaunchKernel},
  };
  const auto entry = table.find(symbol);
  const std::string name = symbol;
  const bool old_driver =
      answers.count("old_driver") != 0 && (name == "cuMemcpyBatchAsync" || name == "cuMemcpy3DBatchAsync");
  if (name == "cuMemcpy3DBatchAsync" && version < 13000) abort();  // a form with `failed`
  if (name == "cuMemcpyBatchAsync" && version >= 13000) abort();  // the form without `failed`
  if (entry == table.end() || old_driver) return *found = 1, kGpuInvalidValue;
  return *address = entry->second, *found = 0, kGpuSuccess;
}

}  // extern "C"
