// polykvd's options: a TOML file, then flags over it. One table of settings serves both.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/result.h"
#include "include/internal/worker_device.h"

namespace polykv::daemon {

/// A line of [models]: name = "path".
struct ConfiguredModel {
  std::string name;
  std::string path;
};

/// Where segments are; automatic: cuda where it works, else memfd.
enum class BackingKind { memfd, cuda, automatic };

enum class PeerPidfd {
  automatic,  // the kernel's, where it knows SO_PEERPIDFD
  client,     // the one sent with Hello, as on kernels before 6.5
};

struct Options {
  std::string socket_path;    // empty: the default of the user
  uint32_t socket_mode = 0;   // 0: 0600 for a user's daemon, 0660 for root's
  uint64_t budget_bytes = 0;  // 0: half of the machine's memory, or of the GPU's
  uint64_t memory_reserve_bytes = uint64_t{64} << 20;
  int64_t stall_deadline_ms = 30'000;
  PeerPidfd peer_pidfd = PeerPidfd::automatic;
  std::string log_level = "info";
  std::string cgroup_root = "/sys/fs/cgroup";
  std::string proc_self_cgroup = "/proc/self/cgroup";
  std::string proc_meminfo = "/proc/meminfo";

  BackingKind backing = BackingKind::memfd;

  // [cuda]
  std::string cuda_library = "libpolykv_cuda.so.0";
  std::string cuda_device;  // a UUID; empty: the first that CUDA tells
  uint64_t cuda_reserve_bytes = uint64_t{512} << 20;
  int64_t cuda_wait_ms = 30'000;

  // [limits]
  uint64_t connections_per_user = 256;
  uint64_t output_queue_packets = 256;
  int64_t handshake_deadline_ms = 10'000;
  uint64_t list_page_documents = 64;
  uint64_t document_tokens = uint64_t{1} << 20;
  uint64_t pool_threads = 0;  // 0: as many as processors, at most 4

  // [worker]
  std::string worker_path;  // empty: polykv-prefill beside polykvd, else in its libexec folder
  uint64_t worker_memory_limit_bytes = 0;  // 0: what the machine has free
  uint64_t worker_threads = 0;             // 0: as many as processors
  int64_t worker_idle_ms = 300'000;
  int64_t worker_start_deadline_ms = 600'000;
  WorkerDevice worker_device = WorkerDevice::automatic;

  std::vector<ConfiguredModel> models;

  // flags alone
  std::string config_path;
  bool check_config = false;
  bool show_version = false;
  bool show_help = false;
  std::string help_text;
};

/// "8GiB", "512 MiB", "4096", "2g" -> bytes (K, M, G, T are powers of 1024, with B or iB behind
/// them or not); "30s", "500ms", "5min", "1h", "250" (ms) -> milliseconds.
Result<uint64_t> parse_bytes(const std::string& text);
Result<int64_t> parse_duration_ms(const std::string& text);

/// Takes settings out of TOML text. Errors name file, line, key and remedy.
Status apply_config(Options& options, const std::string& toml, const std::string& file);

/// The whole of it: flags say which file, the file is applied, then the flags. `environment_*` are
/// those of XDG_CONFIG_HOME and HOME, empty when unset.
struct OptionSources {
  std::vector<std::string> arguments;  // without the program's name
  std::string xdg_config_home;
  std::string home;
  bool is_root = false;
};
Result<Options> read_options(const OptionSources& sources);

}  // namespace polykv::daemon
