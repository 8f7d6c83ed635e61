// The puppet of gpu_probe.cu: a process that does with CUDA what the coordinator tells it over a
// socket pair, one request and one reply at a time, and reports what the driver said. It ends with
// its socket.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <grp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

constexpr int kPuppetSocket = 3;
constexpr uint64_t kKiB = 1024, kMiB = 1024 * kKiB;

enum class Op : uint32_t {
  kDevice,     // -> text, bytes: device memory
  kAllocate,   // bytes, byte -> pointer, handle
  kOpen,       // handle -> pointer
  kClose,      // pointer
  kRead,       // pointer -> byte
  kFill,       // pointer, bytes, byte
  kFreeBytes,  // -> bytes
  kCreate,     // bytes, byte -> pointer, a descriptor
  kImport,     // bytes, writable, a descriptor -> pointer
};

struct Request {
  Op op;
  uint32_t byte;
  uint64_t pointer;
  uint64_t bytes;
  uint64_t writable;
  cudaIpcMemHandle_t handle;
};

struct Reply {
  uint32_t failed;
  uint32_t byte;
  uint64_t pointer;
  uint64_t bytes;
  cudaIpcMemHandle_t handle;
  char text[512];  // what failed and why, or the device's description
};

// One packet with at most one descriptor. False: the peer is gone.
inline bool send_packet(int socket, const void* data, size_t bytes, int fd) {
  iovec part{const_cast<void*>(data), bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

inline bool receive_packet(int socket, void* data, size_t bytes, int* fd) {
  iovec part{data, bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  *fd = -1;
  if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != static_cast<ssize_t>(bytes)) return false;
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  if (header != nullptr && header->cmsg_type == SCM_RIGHTS)
    memcpy(fd, CMSG_DATA(header), sizeof *fd);
  return true;
}

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error));
}

// The driver's own interface, by name: the probe links nothing that a machine without a driver
// lacks.
template <typename Function>
Function driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW);
  void* function = library != nullptr ? dlsym(library, name) : nullptr;
  if (function == nullptr) throw std::runtime_error(std::string(name) + ": the driver lacks it");
  return reinterpret_cast<Function>(function);
}

inline void check_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* name = nullptr;
  driver<CUresult (*)(CUresult, const char**)>("cuGetErrorName")(result, &name);
  throw std::runtime_error(std::string(what) + ": " + (name != nullptr ? name : "unknown error"));
}
#define DRIVER(function, ...) \
  check_driver(driver<decltype(&(function))>(#function)(__VA_ARGS__), #function)

void* to_pointer(uint64_t value) {
  return reinterpret_cast<void*>(static_cast<uintptr_t>(value));
}
inline uint64_t to_value(void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

inline void fill(uint64_t pointer, uint32_t byte, uint64_t bytes) {
  check(cudaMemset(to_pointer(pointer), static_cast<int>(byte), bytes), "cudaMemset");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

inline CUmemAllocationProp shareable_memory() {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 0;
  return properties;
}

inline CUdeviceptr map_memory(CUmemGenericAllocationHandle memory, uint64_t bytes, bool writable) {
  CUdeviceptr address = 0;
  DRIVER(cuMemAddressReserve, &address, bytes, 0, 0, 0);
  DRIVER(cuMemMap, address, bytes, 0, memory, 0);
  CUmemAccessDesc access{};
  access.location = shareable_memory().location;
  access.flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ;
  DRIVER(cuMemSetAccess, address, bytes, &access, 1);
  return address;
}

inline void create_shareable(const Request& request, Reply& reply, int* fd) {
  const CUmemAllocationProp properties = shareable_memory();
  size_t granularity = 0;
  DRIVER(cuMemGetAllocationGranularity, &granularity, &properties,
         CU_MEM_ALLOC_GRANULARITY_MINIMUM);
  reply.bytes = (request.bytes + granularity - 1) / granularity * granularity;
  CUmemGenericAllocationHandle memory = 0;
  DRIVER(cuMemCreate, &memory, reply.bytes, &properties, 0);
  DRIVER(cuMemExportToShareableHandle, fd, memory, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  reply.pointer = map_memory(memory, reply.bytes, true);
  fill(reply.pointer, request.byte, reply.bytes);
}

inline void describe_device(Reply& reply) {
  cudaDeviceProp properties{};
  int runtime = 0, driver_version = 0, device_count = 0;
  check(cudaGetDeviceCount(&device_count), "cudaGetDeviceCount");
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  check(cudaDriverGetVersion(&driver_version), "cudaDriverGetVersion");
  reply.bytes = properties.totalGlobalMem;
  snprintf(reply.text, sizeof reply.text,
           "%s, %" PRIu64 " MiB, sm_%d%d, CUDA driver %d, runtime %d, %d device(s)",
           properties.name, reply.bytes / kMiB, properties.major, properties.minor, driver_version,
           runtime, device_count);
}

inline void obey(const Request& request, Reply& reply, int received_fd, int* fd_to_send) {
  void* opened = nullptr;
  size_t free_bytes = 0, total_bytes = 0;
  CUmemGenericAllocationHandle memory = 0;
  switch (request.op) {
    case Op::kDevice:
      return describe_device(reply);
    case Op::kAllocate:
      check(cudaMalloc(&opened, request.bytes), "cudaMalloc");
      reply.pointer = to_value(opened);
      fill(reply.pointer, request.byte, request.bytes);
      return check(cudaIpcGetMemHandle(&reply.handle, opened), "cudaIpcGetMemHandle");
    case Op::kOpen:
      check(cudaIpcOpenMemHandle(&opened, request.handle, cudaIpcMemLazyEnablePeerAccess),
            "cudaIpcOpenMemHandle");
      reply.pointer = to_value(opened);
      return;
    case Op::kClose:
      return check(cudaIpcCloseMemHandle(to_pointer(request.pointer)), "cudaIpcCloseMemHandle");
    case Op::kRead:
      return check(cudaMemcpy(&reply.byte, to_pointer(request.pointer), 1, cudaMemcpyDeviceToHost),
                   "cudaMemcpy");
    case Op::kFill:
      return fill(request.pointer, request.byte, request.bytes);
    case Op::kFreeBytes:
      check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo");
      reply.bytes = free_bytes;
      return;
    case Op::kCreate:
      return create_shareable(request, reply, fd_to_send);
    case Op::kImport:
      check(cudaFree(nullptr), "context");
      DRIVER(cuMemImportFromShareableHandle, &memory,
             to_pointer(static_cast<uint64_t>(received_fd)),
             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
      reply.pointer = map_memory(memory, request.bytes, request.writable != 0);
      return;
  }
}

inline int run_puppet(unsigned user) {
  // Before the first call of CUDA: the driver looks at the user once.
  if (user != 0 && (setgroups(0, nullptr) != 0 || setgid(user) != 0 || setuid(user) != 0)) return 1;
  Request request;
  int received_fd = -1;
  while (receive_packet(kPuppetSocket, &request, sizeof request, &received_fd)) {
    Reply reply{};
    int fd_to_send = -1;
    try {
      obey(request, reply, received_fd, &fd_to_send);
    } catch (const std::exception& error) {
      reply.failed = 1;
      snprintf(reply.text, sizeof reply.text, "%s", error.what());
    }
    if (received_fd >= 0) close(received_fd);
    send_packet(kPuppetSocket, &reply, sizeof reply, fd_to_send);
    if (fd_to_send >= 0) close(fd_to_send);
  }
  return 0;
}
