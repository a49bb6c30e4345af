// A GPU driver's entry points, found when the program runs: building takes no toolkit, and a machine without a GPU none either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace kvferry {

using GpuStatus = int;
using GpuAddress = uint64_t;
using GpuContext = void*;
using GpuStream = void*;
using GpuEvent = void*;
using GpuModule = void*;
using GpuFunction = void*;

// The same numbers in CUDA and HIP.
constexpr GpuStatus kGpuSuccess = 0;
constexpr GpuStatus kGpuInvalidValue = 1;
constexpr GpuStatus kGpuNotReady = 600;
constexpr GpuStatus kGpuNotSupported = 801;
constexpr unsigned kGpuStreamNonBlocking = 1;
constexpr unsigned kGpuEventBlockingSync = 1;
constexpr unsigned kGpuEventDisableTiming = 2;
constexpr unsigned kGpuIpcEnablePeerAccess = 1;  // between devices, when it is first needed

// How the copies of a batch may read their sources.
enum class SourceOrder : int { kStream = 1, kAny = 3 };

struct MemLocation {
  int type, id;
};

struct BatchAttributes {
  SourceOrder source_order;
  MemLocation source, destination;  // hints, for managed memory only
  unsigned flags;
};

// A copy of `height` lines of `width` bytes, `pitch` apart: CUDA_MEMCPY2D.
struct PitchedSide {
  size_t x, y;
  int memory_type;  // kHostMemory or kDeviceMemory
  const void* host;
  GpuAddress device;
  void* array;
  size_t pitch;
};
struct PitchedCopy {
  PitchedSide src, dst;
  size_t width, height;
};
constexpr int kHostMemory = 1, kDeviceMemory = 2;

// The same as one of many that are issued together: CUDA_MEMCPY3D_BATCH_OP.
struct PitchedOperand {
  int type;  // kAddressOperand
  GpuAddress address;
  size_t pitch, lines;
  MemLocation location;
};
struct PitchedOperation {
  PitchedOperand src, dst;
  size_t width, height, depth;
  SourceOrder source_order;
  unsigned flags;
};
static_assert(offsetof(PitchedOperand, address) == 8 && offsetof(PitchedOperand, pitch) == 16 &&
                  offsetof(PitchedOperand, lines) == 24 && offsetof(PitchedOperand, location) == 32,
              "CUmemcpy3DOperand, as in cuda.h");
static_assert(offsetof(PitchedOperation, dst) == 40 && offsetof(PitchedOperation, width) == 80 &&
                  offsetof(PitchedOperation, source_order) == 104 && sizeof(PitchedOperation) == 112,
              "CUDA_MEMCPY3D_BATCH_OP, as in cuda.h");
constexpr int kAddressOperand = 1;
constexpr int kDeviceLocation = 1, kHostLocation = 2;
constexpr int64_t kMaxPitch = (int64_t(1) << 31) - 1;

// Names memory or an event to other processes: CUipcMemHandle, CUipcEventHandle. Passed by value.
struct GpuIpcHandle {
  char bytes[64];
};

struct GpuUuid {
  char bytes[16];
};

// One table for every vendor: CUDA's driver has these signatures, and HIP took them over. What may be missing in an older
// or another driver is null, and what is built on it is not offered.
struct GpuDriver {
  GpuStatus (*init)(unsigned flags);
  GpuStatus (*driver_version)(int* version);
  GpuStatus (*error_name)(GpuStatus, const char** name);
  GpuStatus (*device_get)(int* device, int ordinal);
  GpuStatus (*device_count)(int* count);
  GpuStatus (*device_uuid)(GpuUuid*, int device);
  GpuStatus (*device_attribute)(int* value, int attribute, int device);  // their numbers are each vendor's own
  GpuStatus (*context_retain)(GpuContext*, int device);
  GpuStatus (*context_release)(int device);
  GpuStatus (*context_push)(GpuContext);
  GpuStatus (*context_pop)(GpuContext*);
  GpuStatus (*context_state)(int device, unsigned* flags, int* active);  // these two are CUDA's alone
  GpuStatus (*context_limit)(int limit, size_t value);                   // of the current one
  GpuStatus (*stream_priorities)(int* least, int* greatest);
  GpuStatus (*stream_create)(GpuStream*, unsigned flags, int priority);
  GpuStatus (*stream_destroy)(GpuStream);
  GpuStatus (*stream_wait)(GpuStream, GpuEvent, unsigned flags);
  GpuStatus (*stream_synchronize)(GpuStream);
  GpuStatus (*event_create)(GpuEvent*, unsigned flags);
  GpuStatus (*event_destroy)(GpuEvent);
  GpuStatus (*event_record)(GpuEvent, GpuStream);
  GpuStatus (*event_query)(GpuEvent);
  GpuStatus (*event_synchronize)(GpuEvent);
  GpuStatus (*event_elapsed)(float* milliseconds, GpuEvent begin, GpuEvent end);
  GpuStatus (*mem_alloc)(GpuAddress*, size_t);
  GpuStatus (*mem_free)(GpuAddress);
  GpuStatus (*mem_info)(size_t* free, size_t* total);
  GpuStatus (*mem_address_range)(GpuAddress* base, size_t* size, GpuAddress);
  GpuStatus (*host_register)(void*, size_t, unsigned flags);
  GpuStatus (*host_unregister)(void*);
  GpuStatus (*host_device_address)(GpuAddress*, void*, unsigned flags);
  GpuStatus (*copy_to_host)(void* dst, GpuAddress src, size_t, GpuStream);
  GpuStatus (*copy_to_device)(GpuAddress dst, const void* src, size_t, GpuStream);
  GpuStatus (*copy_on_device)(GpuAddress dst, GpuAddress src, size_t, GpuStream);
  GpuStatus (*set_bytes)(GpuAddress, unsigned char value, size_t, GpuStream);

  // Memory and events of other processes.
  GpuStatus (*ipc_export)(GpuIpcHandle*, GpuAddress);
  GpuStatus (*ipc_open)(GpuAddress*, GpuIpcHandle, unsigned flags);
  GpuStatus (*ipc_close)(GpuAddress);

  GpuStatus (*copy_pitched)(const PitchedCopy*, GpuStream);
  // CUDA 13. HIP's has another signature.
  GpuStatus (*copy_pitched_batch)(size_t count, const PitchedOperation*, uint64_t flags, GpuStream);

  // CUDA 12.8. In CUDA 13 the plain name stands for a form without `failed`, so the version is asked for by number.
  GpuStatus (*copy_batch)(const GpuAddress* dst, const GpuAddress* src, const size_t* sizes, size_t count,
                          const BatchAttributes*, const size_t* first_of_attributes, size_t attributes, size_t* failed,
                          GpuStream);
  GpuStatus (*module_load)(GpuModule*, const void* image);
  GpuStatus (*module_unload)(GpuModule);
  GpuStatus (*module_function)(GpuFunction*, GpuModule, const char* name);
  GpuStatus (*launch)(GpuFunction, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                      unsigned block_z, unsigned shared_bytes, GpuStream, void** parameters, void** extra);
};

enum class GpuApi { kCuda, kHip };

// The library could not be opened, lacks an entry point that is needed, or finds no device: what() says which.
class GpuUnavailable : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A call of the driver failed.
class GpuError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The entry points of `library`, initialised. It stays open for the life of the process: streams may outlive every engine.
std::shared_ptr<const GpuDriver> open_gpu_driver(const std::string& library, GpuApi api);

// Throws GpuError unless `status` is success.
void check_gpu(const GpuDriver& driver, GpuStatus status, const char* what);

}  // namespace kvferry
