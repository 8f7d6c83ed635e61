// What the processes of an emulated machine share: a file of plain structs in a folder, under a lock.
// Written by libpolykv_cuda_emulated.so, looked at by tests.
//
// The folder, named by POLYKV_EMULATED_DEVICE:
//   state         State below, mapped by everybody
//   memory-<id>   an allocation's bytes; 0600, as the driver lets nobody else import it
//   faults        words; see Faults
//   violations    a line for each thing that a program may not do with a GPU
#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>

namespace polykv::test {

inline constexpr const char* kEmulationFolder = "POLYKV_EMULATED_DEVICE";
inline constexpr const char* kEmulatedFaults = "POLYKV_EMULATED_FAULTS";

/// A process, told apart from a later one with its PID.
struct EmulatedProcess {
  int32_t pid = 0;
  uint64_t start_time = 0;

  /// Field 22 of /proc/PID/stat; 0 when there is none, or only what is left of one that has ended.
  static uint64_t start_time_of(int32_t pid) {
    std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
    std::string line;
    std::getline(file, line);
    const size_t name_end = line.rfind(')');
    if (name_end == std::string::npos) return 0;
    std::istringstream fields(line.substr(name_end + 1));
    std::string word;
    fields >> word;
    if (word == "Z" || word == "X") return 0;
    for (int field = 3; field < 22; ++field) fields >> word;
    return std::strtoull(word.c_str(), nullptr, 10);
  }
  static EmulatedProcess self() { return {::getpid(), start_time_of(::getpid())}; }
  bool is_alive() const { return pid != 0 && start_time_of(pid) == start_time; }
  bool operator==(const EmulatedProcess&) const = default;
};

struct EmulatedImporter {
  EmulatedProcess process;
  uint32_t open_count = 0;
};

struct EmulatedAllocation {
  uint64_t id = 0;  // 0: no allocation
  uint64_t nonce = 0;
  uint64_t size_bytes = 0;
  uint32_t device = 0;
  uint32_t owner_uid = 0;
  EmulatedProcess owner;
  bool is_freed = false;  // by its owner, or with it; importers may still pin the memory
  EmulatedImporter importers[32];

  uint32_t importer_count() const {
    uint32_t count = 0;
    for (const EmulatedImporter& importer : importers) {
      count += importer.open_count > 0 && importer.process.is_alive() ? 1 : 0;
    }
    return count;
  }
};

inline constexpr uint32_t kEmulatedDeviceMax = 4;
inline constexpr uint32_t kEmulatedAllocationMax = 512;

struct EmulatedState {
  uint32_t device_count = 1;
  uint64_t device_bytes = uint64_t{1} << 30;
  uint64_t foreign_bytes = 0;  // what programs that are not ours use of device 0
  uint64_t next_id = 1;
  uint64_t allocated_total = 0;       // allocations so far
  uint64_t open_total = 0;            // handles opened so far
  uint64_t missing_total = 0;         // times that a program looked for a driver that was not there
  uint64_t refused_export_total = 0;  // times that a program wanted to export what cannot be
  EmulatedAllocation allocations[kEmulatedAllocationMax];

  uint64_t live_count() const {
    uint64_t count = 0;
    for (const EmulatedAllocation& allocation : allocations) count += allocation.id != 0 ? 1 : 0;
    return count;
  }
};

/// Words of the file `faults`, and what they make happen:
///   no_driver         there is no device, as before the kernel's module is loaded
///   ipc_unsupported   memory cannot be exported
///   private_memory    neither can it, being another kind of memory: that of an allocator of expandable segments
///   open_fails        what was exported cannot be opened
///   out_of_memory     nothing can be allocated
///   device_lost       every call fails
///   no_peer_access    devices cannot reach each other's memory
///   memory_unknown    how much memory is free cannot be asked
///   other_driver      the driver's version is another one
///   no_driver_in_sandbox   no_driver, in a polykv-prefill from when it has closed its sandbox on
/// Words of POLYKV_EMULATED_FAULTS, which are a process's own, have the same effect there alone.
struct EmulatedFaults {
  std::set<std::string> words;

  static EmulatedFaults read(const std::string& folder) {
    EmulatedFaults faults;
    const auto add = [&](std::istream&& text) {
      for (std::string word; text >> word;) faults.words.insert(word);
    };
    add(std::ifstream(folder + "/faults"));
    if (const char* own = std::getenv(kEmulatedFaults)) add(std::istringstream(own));
    return faults;
  }
  bool has(const char* word) const { return words.contains(word); }
};

/// The shared state, mapped. Locked while a Guard is there.
class EmulatedStateFile {
 public:
  explicit EmulatedStateFile(const std::string& folder) {
    const std::string path = folder + "/state";
    fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd_ < 0) throw std::runtime_error("no emulated device in " + folder);
    void* memory =
        ::mmap(nullptr, sizeof(EmulatedState), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("cannot map " + path);
    state_ = static_cast<EmulatedState*>(memory);
  }
  ~EmulatedStateFile() {
    ::munmap(state_, sizeof *state_);
    ::close(fd_);
  }
  EmulatedStateFile(const EmulatedStateFile&) = delete;
  EmulatedStateFile& operator=(const EmulatedStateFile&) = delete;

  class Guard {
   public:
    explicit Guard(EmulatedStateFile& file) : file_(file), lock_(file.mutex_) {
      ::flock(file_.fd_, LOCK_EX);
    }
    ~Guard() { ::flock(file_.fd_, LOCK_UN); }
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;
    EmulatedState* operator->() { return file_.state_; }
    EmulatedState& operator*() { return *file_.state_; }

   private:
    EmulatedStateFile& file_;
    const std::lock_guard<std::mutex> lock_;  // threads of a process share the file's lock
  };

 private:
  int fd_ = -1;
  EmulatedState* state_ = nullptr;
  std::mutex mutex_;
};

}  // namespace polykv::test
