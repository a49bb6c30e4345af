// A driver whose device is this process: everything is done when a call returns. It has CUDA's names and HIP's.
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

#include "../../csrc/cuda_driver.h"
#include "../../csrc/cuda_kernels.h"

using namespace kvferry;

namespace {

std::map<std::string, long> calls;
std::map<std::string, long> answers;  // of functions that shall not succeed
size_t largest_batch = 0;
int last_source_order = 0;
int contexts = 0;

GpuStatus answer(const char* name) {
  ++calls[name];
  const auto found = answers.find(name);
  return found == answers.end() ? kGpuSuccess : GpuStatus(found->second);
}

void copy_word_by_word(const PageCopy& copy, size_t width) {
  for (uint32_t p = 0; p < copy.pages; ++p) {
    for (uint32_t f = copy.first_fragment; f < copy.first_fragment + copy.fragments; ++f) {
      const uint32_t tensor = f / copy.pieces;
      char* device = reinterpret_cast<char*>(copy.bases[tensor]) + int64_t(copy.page_ids[p]) * copy.strides[tensor] +
                     int64_t(f % copy.pieces) * copy.piece_stride;
      char* row = reinterpret_cast<char*>(copy.rows) + int64_t(copy.row_ids[p]) * copy.row_stride +
                  size_t(f) * copy.fragment_bytes;
      if ((reinterpret_cast<uint64_t>(device) | reinterpret_cast<uint64_t>(row) | copy.fragment_bytes) % width != 0) abort();
      std::memcpy(copy.to_rows ? row : device, copy.to_rows ? device : row, copy.fragment_bytes);
    }
  }
}

}  // namespace

extern "C" {

long fake_calls(const char* name) { return calls[name]; }
void fake_answer(const char* name, long status) { answers[name] = status; }
void fake_reset() {
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
GpuStatus hipDevicePrimaryCtxRetain(GpuContext* context, int) { return *context = &calls, answer("context_retain"); }
GpuStatus hipDevicePrimaryCtxRelease(int) { return answer("context_release"); }
GpuStatus hipCtxPushCurrent(GpuContext) { return ++contexts, answer("context_push"); }
GpuStatus hipCtxPopCurrent(GpuContext*) { return --contexts, answer("context_pop"); }
GpuStatus hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return *least = 0, *greatest = -5, answer("stream_priorities");
}
GpuStatus hipStreamCreateWithPriority(GpuStream* stream, unsigned, int) {
  return *stream = std::malloc(1), answer("stream_create");
}
GpuStatus hipStreamDestroy(GpuStream stream) { return std::free(stream), answer("stream_destroy"); }
GpuStatus hipStreamWaitEvent(GpuStream, GpuEvent, unsigned) { return answer("stream_wait"); }
GpuStatus hipEventCreateWithFlags(GpuEvent* event, unsigned) { return *event = std::malloc(1), answer("event_create"); }
GpuStatus hipEventDestroy(GpuEvent event) { return std::free(event), answer("event_destroy"); }
GpuStatus hipEventRecord(GpuEvent, GpuStream) { return answer("event_record"); }
GpuStatus hipEventQuery(GpuEvent) { return answer("event_query"); }
GpuStatus hipEventSynchronize(GpuEvent) { return answer("event_synchronize"); }
GpuStatus hipEventElapsedTime(float* milliseconds, GpuEvent, GpuEvent) {
  return *milliseconds = float(answers["elapsed_us"]) / 1000, answer("event_elapsed");
}
GpuStatus hipMalloc(GpuAddress* address, size_t bytes) {
  const GpuStatus status = answer("mem_alloc");
  if (status == kGpuSuccess) *address = reinterpret_cast<GpuAddress>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  return status;
}
GpuStatus hipFree(GpuAddress address) { return std::free(reinterpret_cast<void*>(address)), answer("mem_free"); }
GpuStatus hipHostRegister(void*, size_t, unsigned) { return answer("host_register"); }
GpuStatus hipHostUnregister(void*) { return answer("host_unregister"); }
GpuStatus hipHostGetDevicePointer(GpuAddress* address, void* host, unsigned) {
  return *address = reinterpret_cast<GpuAddress>(host), answer("host_device_address");
}
GpuStatus hipMemcpyDtoHAsync(void* dst, GpuAddress src, size_t bytes, GpuStream) {
  return std::memcpy(dst, reinterpret_cast<void*>(src), bytes), answer("copy_to_host");
}
GpuStatus hipMemcpyHtoDAsync(GpuAddress dst, const void* src, size_t bytes, GpuStream) {
  return std::memcpy(reinterpret_cast<void*>(dst), src, bytes), answer("copy_to_device");
}
GpuStatus hipMemcpyDtoDAsync(GpuAddress dst, GpuAddress src, size_t bytes, GpuStream) {
  return std::memcpy(reinterpret_cast<void*>(dst), reinterpret_cast<void*>(src), bytes), answer("copy_on_device");
}
GpuStatus hipMemcpyBatchAsync(const GpuAddress* dst, const GpuAddress* src, const size_t* sizes, size_t count,
                              const BatchAttributes* attributes, const size_t* first, size_t number, size_t*,
                              GpuStream stream) {
  const GpuStatus status = answer("copy_batch");
  if (status != kGpuSuccess) return status;
  if (stream == nullptr || count == 0 || number != 1 || first[0] != 0) return kGpuInvalidValue;
  if (count > largest_batch) largest_batch = count;
  last_source_order = int(attributes->source_order);
  for (size_t i = 0; i < count; ++i) {
    std::memcpy(reinterpret_cast<void*>(dst[i]), reinterpret_cast<void*>(src[i]), sizes[i]);
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
  for (size_t line = 0; line < copy->height; ++line) {
    std::memcpy(const_cast<char*>(memory(copy->dst)) + line * copy->dst.pitch, memory(copy->src) + line * copy->src.pitch,
                copy->width);
  }
  return kGpuSuccess;
}
GpuStatus hipModuleLoadData(GpuModule* module, const void*) { return *module = &calls, answer("module_load"); }
GpuStatus hipModuleUnload(GpuModule) { return answer("module_unload"); }
GpuStatus hipModuleGetFunction(GpuFunction* function, GpuModule, const char* name) {
  *function = reinterpret_cast<GpuFunction>(uint64_t(std::strtoul(name + std::strlen("copy_pages_"), nullptr, 10)));
  return answer("module_function");
}
GpuStatus hipModuleLaunchKernel(GpuFunction function, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned,
                                unsigned, unsigned, GpuStream, void** parameters, void**) {
  const GpuStatus status = answer("launch");
  if (status != kGpuSuccess) return status;
  if (blocks == 0 || threads % 32 != 0 || threads > kCopyThreads) return kGpuInvalidValue;
  copy_word_by_word(*static_cast<const PageCopy*>(parameters[0]), reinterpret_cast<uint64_t>(function));
  return kGpuSuccess;
}

GpuStatus cuGetProcAddress_v2(const char* symbol, void** address, int version, uint64_t, int* found) {
  static const std::map<std::string, void*> table = {
      {"cuInit", (void*)hipInit},
      {"cuDriverGetVersion", (void*)hipDriverGetVersion},
      {"cuGetErrorName", (void*)hipDrvGetErrorName},
      {"cuDeviceGet", (void*)hipDeviceGet},
      {"cuDevicePrimaryCtxRetain", (void*)hipDevicePrimaryCtxRetain},
      {"cuDevicePrimaryCtxRelease", (void*)hipDevicePrimaryCtxRelease},
      {"cuCtxPushCurrent", (void*)hipCtxPushCurrent},
      {"cuCtxPopCurrent", (void*)hipCtxPopCurrent},
      {"cuCtxGetStreamPriorityRange", (void*)hipDeviceGetStreamPriorityRange},
      {"cuStreamCreateWithPriority", (void*)hipStreamCreateWithPriority},
      {"cuStreamDestroy", (void*)hipStreamDestroy},
      {"cuStreamWaitEvent", (void*)hipStreamWaitEvent},
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
      {"cuMemcpyBatchAsync", (void*)hipMemcpyBatchAsync},
      {"cuModuleLoadData", (void*)hipModuleLoadData},
      {"cuModuleUnload", (void*)hipModuleUnload},
      {"cuModuleGetFunction", (void*)hipModuleGetFunction},
      {"cuLaunchKernel", (void*)hipModuleLaunchKernel},
  };
  const auto entry = table.find(symbol);
  const bool old_driver = answers.count("old_driver") != 0 && std::string(symbol) == "cuMemcpyBatchAsync";
  if (std::string(symbol) == "cuMemcpyBatchAsync" && version >= 13000) abort();  // the form without `failed`
  if (entry == table.end() || old_driver) return *found = 1, kGpuInvalidValue;
  return *address = entry->second, *found = 0, kGpuSuccess;
}

}  // extern "C"
