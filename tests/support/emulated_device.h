// A test's emulated GPU: a folder for its state, what to put into the environment of the processes
// that are to see it, faults, and what was done wrong.
//
// It is stricter than CUDA where CUDA promises nothing: what a program may not do is written down as
// a violation, and a test ends with has_no_violation().
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <memory>
#include <new>
#include <vector>

#include "common/fd.h"
#include "tests/support/emulated_state.h"
#include "tests/support/temporary_folder.h"

namespace polykv::test {

class EmulatedDevice {
 public:
  explicit EmulatedDevice(uint64_t device_bytes = uint64_t{1} << 30, uint32_t device_count = 1) {
    {
      const UniqueFd file(::open((path() + "/state").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
      ::fchmod(file.get(), 0666);
      if (::ftruncate(file.get(), sizeof(EmulatedState)) != 0)
        throw std::runtime_error("cannot make an emulated device");
    }
    ::chmod(path().c_str(), 0777);
    EmulatedStateFile file(path());
    EmulatedStateFile::Guard state(file);
    new (&*state) EmulatedState;
    state->device_bytes = device_bytes;
    state->device_count = device_count;
    std::ofstream(path() + "/violations");
    ::chmod((path() + "/violations").c_str(), 0666);
  }

  const std::string& path() const { return folder_.path(); }
  /// For a daemon's or an agent's process.
  std::vector<std::string> environment() const {
    return {std::string(kEmulationFolder) + "=" + path(),
            std::string("POLYKV_CUDA_LIBRARY=") + POLYKV_EMULATED_LIBRARY};
  }
  /// For this process, before it opens anything.
  void use_here() const {
    ::setenv(kEmulationFolder, path().c_str(), 1);
    ::setenv("POLYKV_CUDA_LIBRARY", POLYKV_EMULATED_LIBRARY, 1);
  }
  /// polykvd's flags: `more`, and what an emulated GPU needs besides.
  static std::vector<std::string> flags(std::vector<std::string> more = {},
                                        const std::string& backing = "cuda") {
    const auto add = [&](const std::string& flag, const std::string& value) {
      if (std::find(more.begin(), more.end(), flag) != more.end()) return;
      more.push_back(flag);
      more.push_back(value);
    };
    add("--backing", backing);
    add("--cuda-library", POLYKV_EMULATED_LIBRARY);
    add("--cuda-reserve", "0");
    return more;
  }

  /// Takes effect with the next call of any process; "" ends them.
  void set_faults(const std::string& words) const {
    const std::string temporary = path() + "/faults.new";
    std::ofstream(temporary) << words;
    ::chmod(temporary.c_str(), 0644);
    std::filesystem::rename(temporary, path() + "/faults");
  }
  /// A copy of what there is.
  std::unique_ptr<EmulatedState> state() const {
    EmulatedStateFile file(path());
    EmulatedStateFile::Guard guard(file);
    return std::make_unique<EmulatedState>(*guard);
  }
  template <typename Change>
  void change(Change change) const {
    EmulatedStateFile file(path());
    EmulatedStateFile::Guard guard(file);
    change(*guard);
  }
  std::string violations() const {
    std::ifstream file(path() + "/violations");
    return {std::istreambuf_iterator<char>(file), {}};
  }
  /// Writes where an allocation is, as a process that has it open can.
  void damage(uint64_t id, uint64_t offset) const {
    std::fstream file(memory_file(id), std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(offset));
    const char byte = static_cast<char>(~file.get());
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(byte);
  }
  std::string memory_file(uint64_t id) const { return path() + "/memory-" + std::to_string(id); }

 private:
  TemporaryFolder folder_;
};

/// Faults that this process alone has, until this is destroyed: daemons that it started before do without.
struct OwnFaults {
  explicit OwnFaults(const char* words) { ::setenv(kEmulatedFaults, words, 1); }
  ~OwnFaults() { ::unsetenv(kEmulatedFaults); }
  OwnFaults(const OwnFaults&) = delete;
  OwnFaults& operator=(const OwnFaults&) = delete;
};

/// The emulated GPU of a whole test program, for the tests that run on every backing. A violation is
/// the program's failure.
class TestDevice {
 public:
  static bool is_wanted() {
    const char* backing = std::getenv("POLYKV_TEST_BACKING");
    return backing != nullptr && std::string(backing) == "cuda";
  }
  static const EmulatedDevice& get() {
    static const TestDevice device;
    return device.device_;
  }

 private:
  TestDevice() : owner_(::getpid()) { device_.use_here(); }
  ~TestDevice() {
    const std::string violations = device_.violations();
    if (::getpid() != owner_ || violations.empty()) return;
    std::fprintf(stderr, "the emulated GPU was misused:\n%s", violations.c_str());
    std::_Exit(1);
  }

  EmulatedDevice device_;
  pid_t owner_;
};

}  // namespace polykv::test
