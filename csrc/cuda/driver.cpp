#include "cuda/driver.h"

#include <dlfcn.h>

#include <cstring>

namespace kvferry {
namespace {

// Where an entry point goes in the table, and what it is called. cuda_version is the oldest that has this signature.
struct Name {
  size_t offset;
  const char* cuda;
  int cuda_version;
  const char* hip;
  bool needed;
};

#define ENTRY(member) offsetof(GpuDriver, member)

const Name kNames[] = {
    {ENTRY(init), "cuInit", 2000, "hipInit", true},
    {ENTRY(driver_version), "cuDriverGetVersion", 2020, "hipDriverGetVersion", true},
    {ENTRY(error_name), "cuGetErrorName", 6000, "hipDrvGetErrorName", true},
    {ENTRY(device_get), "cuDeviceGet", 2000, "hipDeviceGet", true},
    {ENTRY(device_count), "cuDeviceGetCount", 2000, "hipGetDeviceCount", true},
    {ENTRY(device_uuid), "cuDeviceGetUuid", 11040, "hipDeviceGetUuid", true},
    {ENTRY(device_attribute), "cuDeviceGetAttribute", 2000, nullptr, false},
    {ENTRY(context_retain), "cuDevicePrimaryCtxRetain", 7000, "hipDevicePrimaryCtxRetain", true},
    {ENTRY(context_release), "cuDevicePrimaryCtxRelease", 11000, "hipDevicePrimaryCtxRelease", true},
    {ENTRY(context_push), "cuCtxPushCurrent", 4000, "hipCtxPushCurrent", true},
    {ENTRY(context_pop), "cuCtxPopCurrent", 4000, "hipCtxPopCurrent", true},
    {ENTRY(context_state), "cuDevicePrimaryCtxGetState", 7000, nullptr, false},
    {ENTRY(context_limit), "cuCtxSetLimit", 3010, nullptr, false},
    {ENTRY(stream_priorities), "cuCtxGetStreamPriorityRange", 5050, "hipDeviceGetStreamPriorityRange", true},
    {ENTRY(stream_create), "cuStreamCreateWithPriority", 5050, "hipStreamCreateWithPriority", true},
    {ENTRY(stream_destroy), "cuStreamDestroy", 4000, "hipStreamDestroy", true},
    {ENTRY(stream_wait), "cuStreamWaitEvent", 3020, "hipStreamWaitEvent", true},
    {ENTRY(stream_synchronize), "cuStreamSynchronize", 2000, "hipStreamSynchronize", true},
    {ENTRY(event_create), "cuEventCreate", 2000, "hipEventCreateWithFlags", true},
    {ENTRY(event_destroy), "cuEventDestroy", 4000, "hipEventDestroy", true},
    {ENTRY(event_record), "cuEventRecord", 2000, "hipEventRecord", true},
    {ENTRY(event_query), "cuEventQuery", 2000, "hipEventQuery", true},
    {ENTRY(event_synchronize), "cuEventSynchronize", 2000, "hipEventSynchronize", true},
    {ENTRY(event_elapsed), "cuEventElapsedTime", 2000, "hipEventElapsedTime", true},
    {ENTRY(mem_alloc), "cuMemAlloc", 3020, "hipMalloc", true},
    {ENTRY(mem_free), "cuMemFree", 3020, "hipFree", true},
    {ENTRY(mem_info), "cuMemGetInfo", 3020, "hipMemGetInfo", true},
    {ENTRY(mem_address_range), "cuMemGetAddressRange", 3020, "hipMemGetAddressRange", true},
    {ENTRY(host_register), "cuMemHostRegister", 6050, "hipHostRegister", true},
    {ENTRY(host_unregister), "cuMemHostUnregister", 4000, "hipHostUnregister", true},
    {ENTRY(host_device_address), "cuMemHostGetDevicePointer", 3020, "hipHostGetDevicePointer", true},
    {ENTRY(copy_to_host), "cuMemcpyDtoHAsync", 3020, "hipMemcpyDtoHAsync", true},
    {ENTRY(copy_to_device), "cuMemcpyHtoDAsync", 3020, "hipMemcpyHtoDAsync", true},
    {ENTRY(copy_on_device), "cuMemcpyDtoDAsync", 3020, "hipMemcpyDtoDAsync", true},
    {ENTRY(set_bytes), "cuMemsetD8Async", 3020, "hipMemsetD8Async", true},
    {ENTRY(ipc_export), "cuIpcGetMemHandle", 4010, "hipIpcGetMemHandle", false},
    {ENTRY(ipc_open), "cuIpcOpenMemHandle", 11000, "hipIpcOpenMemHandle", false},
    {ENTRY(ipc_close), "cuIpcCloseMemHandle", 4010, "hipIpcCloseMemHandle", false},
    {ENTRY(copy_pitched), "cuMemcpy2DAsync", 3020, "hipMemcpyParam2DAsync", false},
    {ENTRY(copy_pitched_batch), "cuMemcpy3DBatchAsync", 13000, nullptr, false},
    {ENTRY(copy_batch), "cuMemcpyBatchAsync", 12080, "hipMemcpyBatchAsync", false},
    {ENTRY(module_load), "cuModuleLoadData", 2000, "hipModuleLoadData", false},
    {ENTRY(module_unload), "cuModuleUnload", 2000, "hipModuleUnload", false},
    {ENTRY(module_function), "cuModuleGetFunction", 2000, "hipModuleGetFunction", false},
    {ENTRY(launch), "cuLaunchKernel", 4000, "hipModuleLaunchKernel", false},
};
static_assert(sizeof(kNames) / sizeof(kNames[0]) == sizeof(GpuDriver) / sizeof(void*), "a name for each entry point");

// cuGetProcAddress_v2: CUDA 12.
using Resolve = GpuStatus (*)(const char* name, void** address, int version, uint64_t flags, int* found);

}  // namespace

std::shared_ptr<const GpuDriver> open_gpu_driver(const std::string& library, GpuApi api) {
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw GpuUnavailable(std::string("no GPU driver: ") + dlerror());
  Resolve resolve = nullptr;
  if (api == GpuApi::kCuda) {
    resolve = reinterpret_cast<Resolve>(dlsym(handle, "cuGetProcAddress_v2"));
    if (resolve == nullptr) throw GpuUnavailable(library + ": a driver older than CUDA 12 (no cuGetProcAddress_v2)");
  }
  auto driver = std::make_shared<GpuDriver>();
  for (const Name& name : kNames) {
    const char* symbol = api == GpuApi::kCuda ? name.cuda : name.hip;
    void* address = nullptr;
    if (symbol == nullptr) {
      // this vendor has none
    } else if (resolve == nullptr) {
      address = dlsym(handle, symbol);
    } else if (int found = 0; resolve(symbol, &address, name.cuda_version, 0, &found) != kGpuSuccess) {
      address = nullptr;
    }
    if (address == nullptr && name.needed) throw GpuUnavailable(library + ": has no " + symbol);
    std::memcpy(reinterpret_cast<char*>(driver.get()) + name.offset, &address, sizeof address);
  }
  const GpuStatus status = driver->init(0);
  if (status != kGpuSuccess) {
    const char* text = nullptr;
    driver->error_name(status, &text);
    throw GpuUnavailable(library + ": " + (text == nullptr ? "error " + std::to_string(status) : text));
  }
  return driver;
}

void check_gpu(const GpuDriver& driver, GpuStatus status, const char* what) {
  if (status == kGpuSuccess) return;
  const char* text = nullptr;
  driver.error_name(status, &text);
  throw GpuError(std::string(what) + ": " + (text == nullptr ? "error " + std::to_string(status) : text));
}

}  // namespace kvferry
