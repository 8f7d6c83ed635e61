// The emulated GPU has CUDA's rules, and finds what breaks them: otherwise the tests that stand on it
// would prove nothing. And what the client makes of them.
#include <dlfcn.h>

#include <catch2/catch.hpp>
#include <cstring>
#include <thread>

#include "device/library.h"
#include "libclient/cuda/opened_memory.h"
#include "tests/support/child_process.h"
#include "tests/support/emulated_device.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uint64_t kBytes = device::kGranularityBytes;

/// One emulated GPU for the program; clean for each test case.
struct Bench {
  Bench() {
    device().set_faults("");
    std::ofstream(device().path() + "/violations");
  }
  static const EmulatedDevice& device() {
    static const EmulatedDevice device(16 * kBytes, 2);
    return device;
  }
  /// Whether exactly this was done wrong.
  static bool has_one_violation(const std::string& what) {
    const std::string text = device().violations();
    return text.find(what) == 0 && text.find('\n') == text.size() - 1;
  }
};

device::Runtime& runtime() {
  Bench::device().use_here();
  const auto loaded = device::load_runtime(POLYKV_EMULATED_LIBRARY);
  if (!loaded) throw std::runtime_error(loaded.status().message());
  if (!(*loaded)->use_device(0).is_ok()) throw std::runtime_error("use_device");
  return **loaded;
}

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

/// A process that exports one allocation, until it is told otherwise.
struct Exporter {
  explicit Exporter(uint8_t byte)
      : process([byte](const Channel& parent) {
          device::Runtime& gpu = runtime();
          const auto pointer = gpu.allocate(kBytes);
          expect(pointer.is_ok() && gpu.zero(*pointer, kBytes).is_ok(), "allocate");
          expect(gpu.copy_to_device(*pointer, &byte, 1).is_ok(), "copy");
          const auto handle = gpu.export_handle(*pointer);
          expect(handle.is_ok(), "export");
          parent.say(std::string(handle->begin(), handle->end()));
          if (parent.hear() == "free") expect(gpu.free(*pointer).is_ok(), "free");
          parent.say("done");
          parent.hear();
        }) {
    const std::string text = process.hear();
    std::memcpy(handle.data(), text.data(), handle.size());
  }
  ChildProcess process;
  device::IpcHandle handle{};
};

// Run in a child each: the test's own process forks, and must not have used the GPU before.
template <typename Body>
bool in_child(Body body) {
  ChildProcess child([&](const Channel&) { body(); });
  return child.succeeds();
}

}  // namespace

TEST_CASE("what one process exports another opens, reads and writes") {
  const Bench bench;
  Exporter exporter(42);
  CHECK(in_child([&] {
    device::Runtime& gpu = runtime();
    const auto pointer = gpu.open(exporter.handle);
    expect(pointer.is_ok(), "open");
    uint8_t byte = 0;
    expect(gpu.copy_to_host(&byte, *pointer, 1).is_ok() && byte == 42, "read");
    expect(gpu.close(*pointer).is_ok(), "close");
    expect(!gpu.close(*pointer).is_ok(), "close what is not open");
  }));
  CHECK(Bench::has_one_violation("close: it is not open"));
}

TEST_CASE("row 27: the exporting process cannot open its own handle, and is told so") {
  const Bench bench;
  CHECK(in_child([&] {
    device::Runtime& gpu = runtime();
    const auto pointer = gpu.allocate(kBytes);
    const auto handle = gpu.export_handle(*pointer);
    expect(gpu.open(*handle).status().code() == POLYKV_ERR_INVALID_ARGUMENT, "open");
    const auto found = lib::find_gpu(gpu, (*gpu.devices())[0].uuid);
    const auto opened = lib::OpenedMemory::open(*found, {*handle, found->info.uuid, kBytes, 1});
    expect(opened.status().code() == POLYKV_ERR_INVALID_ARGUMENT, "open as a client");
    expect(gpu.free(*pointer).is_ok(), "free");
  }));
  CHECK(Bench::device().violations() == "");
}

TEST_CASE("row 26: a client opens once and counts, whatever the order of closing") {
  const Bench bench;
  Exporter exporter(1);
  CHECK(in_child([&] {
    device::Runtime& gpu = runtime();
    const uint64_t before = Bench::device().state()->open_total;
    const auto found = lib::find_gpu(gpu, (*gpu.devices())[0].uuid);
    const lib::RemoteMemory memory{exporter.handle, found->info.uuid, kBytes, 1};
    auto first = lib::OpenedMemory::open(*found, memory);
    auto second = lib::OpenedMemory::open(*found, memory);
    expect(first.is_ok() && second.is_ok() && first->pointer() == second->pointer(), "open");
    expect(Bench::device().state()->open_total == before + 1, "once");
    expect(first->close().is_ok() && first->close().is_ok(), "closing twice is closing once");
    uint8_t byte = 0;
    expect(gpu.copy_to_host(&byte, second->pointer(), 1).is_ok() && byte == 1, "still open");
    std::thread other([&] { expect(second->close().is_ok(), "close on another thread"); });
    other.join();
  }));
  CHECK(Bench::device().violations() == "");
}

TEST_CASE(
    "memory that is freed while it is open elsewhere is a violation, and its bytes are spoilt") {
  const Bench bench;
  Exporter exporter(7);
  CHECK(in_child([&] {
    device::Runtime& gpu = runtime();
    const auto pointer = gpu.open(exporter.handle);
    exporter.process.say("free");
    expect(exporter.process.hear() == "done", "freed");
    uint8_t byte = 0;
    expect(gpu.copy_to_host(&byte, *pointer, 1).is_ok() && byte != 7, "spoilt");
    expect(gpu.close(*pointer).is_ok(), "close");
    expect(!gpu.open(exporter.handle).is_ok(), "it is gone");
  }));
  const std::string violations = Bench::device().violations();
  CHECK(violations.find("free: another process has it open") != std::string::npos);
  CHECK(violations.find("its exporter is gone") != std::string::npos);
}

TEST_CASE("a killed exporter's memory stays with those who have it open, and is spoilt") {
  const Bench bench;
  Exporter exporter(9);
  CHECK(in_child([&] {
    device::Runtime& gpu = runtime();
    const auto pointer = gpu.open(exporter.handle);
    ::kill(exporter.process.pid(), SIGKILL);
    while (Bench::device().state()->allocations[0].owner.is_alive()) std::this_thread::yield();
    uint8_t byte = 0;
    expect(gpu.copy_to_host(&byte, *pointer, 1).is_ok() && byte != 9, "spoilt");
    expect(gpu.memory()->free_bytes == 15 * kBytes, "pinned");
    expect(gpu.close(*pointer).is_ok(), "close");
    expect(gpu.memory()->free_bytes == 16 * kBytes, "free");
    expect(!gpu.open(exporter.handle).is_ok(), "it is gone");
  }));
  CHECK(Bench::has_one_violation("copy from the device: its exporter is gone"));
}

TEST_CASE("a thread without a device, a call after fork and a wrong size are violations") {
  const Bench bench;
  CHECK(in_child([&] {
    device::Runtime& gpu = runtime();
    std::thread other([&] { expect(!gpu.memory().is_ok(), "no device on this thread"); });
    other.join();
  }));
  CHECK(Bench::has_one_violation("memory: no device was chosen on this thread"));
  std::ofstream(Bench::device().path() + "/violations");
  CHECK(in_child([&] {
    device::Runtime& gpu = runtime();
    expect(in_child([&] { expect(!gpu.memory().is_ok(), "after fork"); }), "the child");
  }));
  CHECK(Bench::has_one_violation("memory: used after fork"));
  std::ofstream(Bench::device().path() + "/violations");
  CHECK(in_child([&] { expect(runtime().allocate(4096).is_ok(), "it is given out"); }));
  CHECK(Bench::has_one_violation("allocate: 4096 is no multiple of 2 MiB"));
}

TEST_CASE("closing what a stream still reads is a violation; a client waits for the streams") {
  const Bench bench;
  Exporter exporter(1);
  CHECK(in_child([&] {
    device::Runtime& gpu = runtime();
    const auto keep = reinterpret_cast<void (*)(void*, const void*)>(::dlsym(
        ::dlopen(POLYKV_EMULATED_LIBRARY, RTLD_NOW | RTLD_NOLOAD), "polykv_emulated_keep_busy"));
    const auto stream = gpu.create_stream();
    const auto found = lib::find_gpu(gpu, (*gpu.devices())[0].uuid);
    auto opened = lib::OpenedMemory::open(*found, {exporter.handle, found->info.uuid, kBytes, 1});
    keep(*stream, opened->pointer());
    expect(opened->close().is_ok(), "close");
    expect(Bench::device().violations().empty(), "it waited");
    const auto pointer = gpu.open(exporter.handle);
    keep(*stream, *pointer);
    expect(gpu.close(*pointer).is_ok(), "close at once");
  }));
  CHECK(Bench::has_one_violation("close: a stream still uses it"));
}

TEST_CASE("memory of another user cannot be opened") {
  if (::geteuid() != 0) return;  // only root can become another user
  const Bench bench;
  Exporter exporter(1);
  CHECK(in_child([&] {
    become_user(12345);
    expect(runtime().open(exporter.handle).status().code() == POLYKV_ERR_PERMISSION, "open");
  }));
}

TEST_CASE("faults have their types") {
  const Bench bench;
  const std::vector<std::pair<const char*, polykv_status>> faults = {
      {"out_of_memory", POLYKV_ERR_NO_MEMORY}, {"device_lost", POLYKV_ERR_DEVICE_LOST}};
  for (const auto& [fault, code] : faults) {
    CHECK(in_child([&, fault = fault, code = code] {
      device::Runtime& gpu = runtime();
      Bench::device().set_faults(fault);
      expect(gpu.allocate(kBytes).status().code() == code, fault);
    }));
    Bench::device().set_faults("");
  }
}
