// The CUDA runtime behind Runtime; the whole of libpolykv_cuda.so but for the kernels.
#include <cuda_runtime_api.h>
#include <unistd.h>

#include <cstring>
#include <mutex>

#include "device/runtime.h"

namespace polykv::device {

namespace {

/// The text says CUDA's name of the error, which is what people look for.
Status failed(const char* operation, cudaError_t error) {
  const std::string message = std::string(operation) + ": " + cudaGetErrorString(error) + " (" +
                              cudaGetErrorName(error) + ")";
  // An error that is not sticky would be reported by the next call as well.
  static_cast<void>(cudaGetLastError());
  switch (error) {
    case cudaErrorMemoryAllocation:
      return {POLYKV_ERR_NO_MEMORY, message + "; free device memory"};
    case cudaErrorInvalidDevice:
    case cudaErrorDeviceUninitialized:
    case cudaErrorPeerAccessUnsupported:
      return {POLYKV_ERR_WRONG_DEVICE, message + "; see CUDA_VISIBLE_DEVICES"};
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalAddress:
    case cudaErrorIllegalInstruction:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorMisalignedAddress:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorAssert:
    case cudaErrorUnknown:
    case cudaErrorContained:
    case cudaErrorMpsConnectionFailed:
    case cudaErrorExternalDevice:
      return {POLYKV_ERR_DEVICE_LOST, message + "; see the kernel's log (Xid) and nvidia-smi"};
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
    case cudaErrorMapBufferObjectFailed:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorOperatingSystem:
      return {POLYKV_ERR_UNSUPPORTED, message};
    case cudaErrorNoDevice:
    case cudaErrorInsufficientDriver:
    case cudaErrorInitializationError:
    case cudaErrorSystemNotReady:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
      return {POLYKV_ERR_UNSUPPORTED, message + "; see nvidia-smi"};
    default:
      return {POLYKV_ERR_INVALID_ARGUMENT, message};
  }
}

Status check(const char* operation, cudaError_t error) {
  return error == cudaSuccess ? Status::ok() : failed(operation, error);
}

/// Looked at without CUDA: once it has failed to initialise in a process it need not try again there,
/// and a driver's module may be loaded after us.
Status check_driver_is_loaded() {
  for (const char* path :
       {"/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvmap"}) {
    if (::access(path, F_OK) == 0) return Status::ok();
  }
  return {POLYKV_ERR_UNSUPPORTED,
          "look for a GPU: no NVIDIA driver is loaded (no /dev/nvidiactl); see nvidia-smi"};
}

cudaStream_t stream_of(void* stream) {
  return static_cast<cudaStream_t>(stream);
}

Result<Versions> ask_versions() {
  POLYKV_RETURN_IF_ERROR(check_driver_is_loaded());
  Versions versions;
  POLYKV_RETURN_IF_ERROR(
      check("ask for the driver's version", cudaDriverGetVersion(&versions.driver)));
  POLYKV_RETURN_IF_ERROR(
      check("ask for the CUDA runtime's version", cudaRuntimeGetVersion(&versions.runtime)));
  if (versions.driver == 0) {
    return {POLYKV_ERR_UNSUPPORTED,
            "ask for the driver's version: no NVIDIA driver is loaded; see nvidia-smi"};
  }
  return versions;
}

Result<std::vector<DeviceInfo>> describe_devices() {
  POLYKV_RETURN_IF_ERROR(check_driver_is_loaded());
  int count = 0;
  POLYKV_RETURN_IF_ERROR(check("count GPUs", cudaGetDeviceCount(&count)));
  std::vector<DeviceInfo> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    POLYKV_RETURN_IF_ERROR(check("describe a GPU", cudaGetDeviceProperties(&properties, i)));
    DeviceInfo info;
    static_assert(sizeof properties.uuid.bytes == sizeof info.uuid);
    std::memcpy(info.uuid.data(), properties.uuid.bytes, info.uuid.size());
    info.name = properties.name;
    info.total_bytes = properties.totalGlobalMem;
    devices.push_back(std::move(info));
  }
  return devices;
}

class CudaRuntime final : public Runtime {
 public:
  /// Asked for whenever memory is opened, also where files cannot be looked at any more.
  Result<Versions> versions() override {
    const std::lock_guard lock(mutex_);
    if (versions_.driver == 0) {
      POLYKV_ASSIGN_OR_RETURN(versions_, ask_versions());
    }
    return versions_;
  }

  /// Asked for at each call that names a GPU; describing them takes the driver milliseconds, and in a process they
  /// stay the same.
  Result<std::vector<DeviceInfo>> devices() override {
    const std::lock_guard lock(mutex_);
    if (devices_.empty()) {
      POLYKV_ASSIGN_OR_RETURN(devices_, describe_devices());
    }
    return devices_;
  }

  Status use_device(int index) override { return check("choose a GPU", cudaSetDevice(index)); }

  Result<MemoryInfo> memory() override {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    POLYKV_RETURN_IF_ERROR(
        check("ask for free device memory", cudaMemGetInfo(&free_bytes, &total_bytes)));
    return MemoryInfo{free_bytes, total_bytes};
  }

  Result<void*> allocate(uint64_t size_bytes) override {
    void* pointer = nullptr;
    POLYKV_RETURN_IF_ERROR(check("allocate device memory", cudaMalloc(&pointer, size_bytes)));
    return pointer;
  }
  Status free(void* pointer) override { return check("free device memory", cudaFree(pointer)); }

  Status zero(void* pointer, uint64_t size_bytes) override {
    POLYKV_RETURN_IF_ERROR(check("zero device memory", cudaMemset(pointer, 0, size_bytes)));
    return check("zero device memory", cudaStreamSynchronize(nullptr));
  }
  Status copy_to_device(void* target, const void* source, uint64_t size_bytes) override {
    POLYKV_RETURN_IF_ERROR(check("copy to device memory",
                                 cudaMemcpy(target, source, size_bytes, cudaMemcpyHostToDevice)));
    // A copy from pageable memory may return while its last piece is on the way.
    return check("copy to device memory", cudaStreamSynchronize(nullptr));
  }
  Status copy_to_host(void* target, const void* source, uint64_t size_bytes) override {
    return check("copy from device memory",
                 cudaMemcpy(target, source, size_bytes, cudaMemcpyDeviceToHost));
  }

  Result<IpcHandle> export_handle(void* pointer) override {
    cudaIpcMemHandle_t handle{};
    POLYKV_RETURN_IF_ERROR(check("export device memory", cudaIpcGetMemHandle(&handle, pointer)));
    IpcHandle bytes;
    static_assert(sizeof handle == sizeof bytes);
    std::memcpy(bytes.data(), &handle, bytes.size());
    return bytes;
  }
  Result<void*> open(const IpcHandle& bytes) override {
    cudaIpcMemHandle_t handle{};
    std::memcpy(&handle, bytes.data(), bytes.size());
    void* pointer = nullptr;
    POLYKV_RETURN_IF_ERROR(
        check("open device memory of another process",
              cudaIpcOpenMemHandle(&pointer, handle, cudaIpcMemLazyEnablePeerAccess)));
    return pointer;
  }
  Status close(void* pointer) override {
    return check("close device memory of another process", cudaIpcCloseMemHandle(pointer));
  }

  Result<void*> create_stream() override {
    cudaStream_t stream = nullptr;
    POLYKV_RETURN_IF_ERROR(
        check("make a stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking)));
    return static_cast<void*>(stream);
  }
  Status destroy_stream(void* stream) override {
    return check("end a stream", cudaStreamDestroy(stream_of(stream)));
  }
  Status synchronize_stream(void* stream) override {
    return check("wait for a stream", cudaStreamSynchronize(stream_of(stream)));
  }
  Result<void*> record_event(void* stream) override {
    cudaEvent_t event = nullptr;
    POLYKV_RETURN_IF_ERROR(
        check("make an event", cudaEventCreateWithFlags(&event, cudaEventDisableTiming)));
    const Status recorded = check("record an event", cudaEventRecord(event, stream_of(stream)));
    if (!recorded.is_ok()) {
      static_cast<void>(cudaEventDestroy(event));
      return recorded;
    }
    return static_cast<void*>(event);
  }
  Status synchronize_event(void* event) override {
    return check("wait for an event", cudaEventSynchronize(static_cast<cudaEvent_t>(event)));
  }
  Status destroy_event(void* event) override {
    return check("end an event", cudaEventDestroy(static_cast<cudaEvent_t>(event)));
  }
  Status synchronize_device() override { return check("wait for a GPU", cudaDeviceSynchronize()); }

  Result<bool> can_access_peer(int peer) override {
    int current = 0;
    int can = 0;
    POLYKV_RETURN_IF_ERROR(check("ask for the current GPU", cudaGetDevice(&current)));
    if (current == peer) return true;
    POLYKV_RETURN_IF_ERROR(
        check("ask for peer access", cudaDeviceCanAccessPeer(&can, current, peer)));
    return can != 0;
  }
  Status enable_peer_access(int peer) override {
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) return check("enable peer access", error);
    static_cast<void>(cudaGetLastError());
    return Status::ok();
  }

 private:
  std::mutex mutex_;  // guards what follows, which is empty until somebody asked with success
  Versions versions_;
  std::vector<DeviceInfo> devices_;
};

}  // namespace

extern "C" __attribute__((visibility("default"))) Runtime* polykv_device_runtime(uint32_t version) {
  static auto* const runtime = new CudaRuntime;  // threads may use it while the process ends
  return version == kRuntimeVersion ? runtime : nullptr;
}

}  // namespace polykv::device
