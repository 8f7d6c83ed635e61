#include "daemon/options.h"

#include <toml++/toml.h>
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <functional>
#include <iterator>
#include <map>
#include <vector>

#include "common/files.h"
#include "common/wire.h"
#include "polykv/version.h"

namespace polykv::daemon {

namespace {

Status bad(std::string why) {
  return {POLYKV_ERR_INVALID_ARGUMENT, std::move(why)};
}

/// A number with a unit behind it, for example "5min".
struct Quantity {
  uint64_t number = 0;
  std::string unit;  // lower case
};

Result<Quantity> parse_quantity(const std::string& text) {
  Quantity quantity;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), quantity.number);
  if (error == std::errc::result_out_of_range) return bad("'" + text + "' is too large");
  if (error != std::errc()) return bad("'" + text + "' does not begin with a whole number");
  std::string_view rest(end, static_cast<size_t>(text.data() + text.size() - end));
  while (rest.starts_with(' ')) rest.remove_prefix(1);
  std::transform(rest.begin(), rest.end(), std::back_inserter(quantity.unit),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return quantity;
}

using Apply = std::function<Status(Options&, const std::string&)>;

Apply text_into(std::string Options::*field) {
  return [field](Options& options, const std::string& text) {
    options.*field = text;
    return Status::ok();
  };
}

Apply bytes_into(uint64_t Options::*field) {
  return [field](Options& options, const std::string& text) -> Status {
    POLYKV_ASSIGN_OR_RETURN(options.*field, parse_bytes(text));
    return Status::ok();
  };
}

Apply duration_into(int64_t Options::*field) {
  return [field](Options& options, const std::string& text) -> Status {
    POLYKV_ASSIGN_OR_RETURN(const int64_t value, parse_duration_ms(text));
    if (value == 0) return bad("it must be longer than 0");
    options.*field = value;
    return Status::ok();
  };
}

Apply count_into(uint64_t Options::*field, uint64_t minimum, uint64_t maximum) {
  return [=](Options& options, const std::string& text) -> Status {
    POLYKV_ASSIGN_OR_RETURN(const Quantity value, parse_quantity(text));
    if (!value.unit.empty() || value.number < minimum || value.number > maximum) {
      return bad(format("'%s' is not a number from %llu to %llu", text.c_str(),
                        static_cast<unsigned long long>(minimum),
                        static_cast<unsigned long long>(maximum)));
    }
    options.*field = value.number;
    return Status::ok();
  };
}

Status apply_mode(Options& options, const std::string& text) {
  uint32_t mode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), mode, 8);
  if (error != std::errc() || *end != '\0' || mode == 0 || mode > 0777)
    return bad("'" + text + "' is not an octal mode such as 0660");
  options.socket_mode = mode;
  return Status::ok();
}

Status apply_peer_pidfd(Options& options, const std::string& text) {
  if (text != "auto" && text != "client") return bad("'" + text + "' is not 'auto' or 'client'");
  options.peer_pidfd = text == "auto" ? PeerPidfd::automatic : PeerPidfd::client;
  return Status::ok();
}

Status apply_backing(Options& options, const std::string& text) {
  if (text == "memfd") {
    options.backing = BackingKind::memfd;
  } else if (text == "cuda") {
    options.backing = BackingKind::cuda;
  } else if (text == "auto") {
    options.backing = BackingKind::automatic;
  } else {
    return bad("'" + text + "' is not memfd, cuda or auto");
  }
  return Status::ok();
}

Status apply_worker_device(Options& options, const std::string& text) {
  if (text == "auto") {
    options.worker_device = WorkerDevice::automatic;
  } else if (text == "cpu") {
    options.worker_device = WorkerDevice::cpu;
  } else if (text == "cuda") {
    options.worker_device = WorkerDevice::cuda;
  } else {
    return bad("'" + text + "' is not auto, cpu or cuda");
  }
  return Status::ok();
}

Status apply_log_level(Options& options, const std::string& text) {
  constexpr std::array kLevels = {"trace", "debug", "info", "warn", "error", "off"};
  if (std::find(kLevels.begin(), kLevels.end(), text) == kLevels.end())
    return bad("'" + text + "' is not trace, debug, info, warn, error or off");
  options.log_level = text;
  return Status::ok();
}

struct Setting {
  const char* key;  // in the file, with its table
  const char* flag;
  const char* help;
  Apply apply;
};

const std::vector<Setting>& settings() {
  static const std::vector<Setting> table = {
      {"socket", "--socket", "path of the socket", text_into(&Options::socket_path)},
      {"socket_mode", "--socket-mode", "its mode, octal", apply_mode},
      {"budget", "--budget", "memory for documents, for example 8GiB; 0: half of the machine's",
       bytes_into(&Options::budget_bytes)},
      {"backing", "--backing", "where documents are: memfd, cuda, or auto: cuda where it works",
       apply_backing},
      {"cuda.library", "--cuda-library", "polykv's CUDA library",
       text_into(&Options::cuda_library)},
      {"cuda.device", "--cuda-device", "UUID of the GPU, as nvidia-smi -L prints it",
       text_into(&Options::cuda_device)},
      {"cuda.reserve", "--cuda-reserve", "device memory to leave free for other programs",
       bytes_into(&Options::cuda_reserve_bytes)},
      {"cuda.wait", "--cuda-wait", "how long to wait for the GPU's driver at the start",
       duration_into(&Options::cuda_wait_ms)},
      {"memory_reserve", "--memory-reserve", "memory to leave free on the machine",
       bytes_into(&Options::memory_reserve_bytes)},
      {"stall_deadline", "--stall-deadline", "a producer silent for so long loses its ticket",
       duration_into(&Options::stall_deadline_ms)},
      {"peer_pidfd", "--peer-pidfd", "auto, or client: as on kernels before 6.5", apply_peer_pidfd},
      {"log_level", "--log-level", "trace, debug, info, warn, error, off", apply_log_level},
      {"cgroup_root", "--cgroup-root", "where control groups are mounted",
       text_into(&Options::cgroup_root)},
      {"proc_self_cgroup", "--proc-self-cgroup", "file that names the daemon's own control groups",
       text_into(&Options::proc_self_cgroup)},
      {"proc_meminfo", "--proc-meminfo", "file that tells the machine's memory",
       text_into(&Options::proc_meminfo)},
      {"limits.connections_per_user", "--connections-per-user", "connections of one user id",
       count_into(&Options::connections_per_user, 1, 1'000'000)},
      {"limits.output_queue_packets", "--output-queue-packets",
       "unread packets after which a client is dropped",
       count_into(&Options::output_queue_packets, 1, 65'536)},
      {"limits.handshake_deadline", "--handshake-deadline", "time for a client to say Hello",
       duration_into(&Options::handshake_deadline_ms)},
      {"limits.list_page_documents", "--list-page-documents", "documents on a page of a listing",
       count_into(&Options::list_page_documents, 1, 1024)},
      {"limits.document_tokens", "--document-tokens", "tokens of the longest document",
       count_into(&Options::document_tokens, 1, uint64_t{1} << 24)},
      {"limits.pool_threads", "--pool-threads", "threads that seal and verify; 0: by processors",
       count_into(&Options::pool_threads, 0, 64)},
      {"worker.path", "--worker", "the polykv-prefill program", text_into(&Options::worker_path)},
      {"worker.memory_limit", "--worker-memory-limit", "of polykv-prefill; 0: what is free",
       bytes_into(&Options::worker_memory_limit_bytes)},
      {"worker.threads", "--worker-threads", "of polykv-prefill; 0: by processors",
       count_into(&Options::worker_threads, 0, 1024)},
      {"worker.device", "--worker-device",
       "what polykv-prefill computes with: cpu, cuda, or auto: a GPU where its libtorch has one",
       apply_worker_device},
      {"worker.idle", "--worker-idle", "polykv-prefill exits after so long without work",
       duration_into(&Options::worker_idle_ms)},
      {"worker.start_deadline", "--worker-start-deadline",
       "polykv-prefill has so long to read and hash its model's file",
       duration_into(&Options::worker_start_deadline_ms)},
  };
  return table;
}

Status add_model(Options& options, ConfiguredModel model) {
  POLYKV_RETURN_IF_ERROR(check_name(model.name));
  if (model.path.empty() || model.path[0] != '/')
    return bad("the path of model '" + model.name + "' is not absolute; write all of it");
  std::erase_if(options.models, [&](const ConfiguredModel& old) { return old.name == model.name; });
  options.models.push_back(std::move(model));
  return Status::ok();
}

// ---- the file ----------------------------------------------------------------------------------

Status at(const std::string& file, const toml::node& node, const std::string& key,
          const std::string& why) {
  return bad(format("read the configuration: %s, line %u, key '%s': %s", file.c_str(),
                    static_cast<unsigned>(node.source().begin.line), key.c_str(), why.c_str()));
}

Result<std::string> scalar_text(const toml::node& node) {
  if (const auto text = node.value_exact<std::string>()) return *text;
  if (const auto number = node.value_exact<int64_t>(); number && *number >= 0)
    return std::to_string(*number);
  return bad("give text in quotes or a whole number");
}

Status apply_node(Options& options, const std::string& file, const std::string& key,
                  const toml::node& node) {
  for (const Setting& setting : settings()) {
    if (key != setting.key) continue;
    const Result<std::string> text = scalar_text(node);
    const Status status = text ? setting.apply(options, *text) : text.status();
    return status.is_ok() ? status : at(file, node, key, status.message());
  }
  std::string known;
  for (const Setting& setting : settings())
    known += std::string(known.empty() ? "" : ", ") + setting.key;
  return at(file, node, key, "no such key; known are " + known + ", and [models]");
}

constexpr uint64_t kMaxConfigBytes = uint64_t{1} << 20;

/// The first of these that is there.
std::vector<std::string> default_config_paths(const OptionSources& sources) {
  const std::string base = !sources.xdg_config_home.empty() ? sources.xdg_config_home
                           : !sources.home.empty()          ? sources.home + "/.config"
                                                            : std::string();
  std::vector<std::string> paths;
  if (!sources.is_root && !base.empty()) paths.push_back(base + "/polykv/polykvd.toml");
  paths.emplace_back("/etc/polykv/polykvd.toml");
  return paths;
}

Status apply_file(Options& options, const OptionSources& sources) {
  const bool is_default = options.config_path.empty();
  const std::vector<std::string> paths =
      is_default ? default_config_paths(sources) : std::vector<std::string>{options.config_path};
  for (const std::string& path : paths) {
    const Result<std::string> text = read_file(path, "configuration", kMaxConfigBytes);
    if (is_default && text.status().code() == POLYKV_ERR_NOT_FOUND) continue;
    if (!text) return bad("read the configuration: " + text.status().message());
    return apply_config(options, *text, path);
  }
  return Status::ok();
}

}  // namespace

Result<uint64_t> parse_bytes(const std::string& text) {
  POLYKV_ASSIGN_OR_RETURN(Quantity quantity, parse_quantity(text));
  std::string unit = quantity.unit;
  if (unit.ends_with("ib"))
    unit.resize(unit.size() - 2);
  else if (unit.ends_with("b"))
    unit.resize(unit.size() - 1);
  static const std::map<std::string, unsigned> shifts = {
      {"", 0}, {"k", 10}, {"m", 20}, {"g", 30}, {"t", 40}};
  const auto shift = shifts.find(unit);
  if (shift == shifts.end()) return bad("'" + text + "' is no size; write for example 512MiB");
  if (quantity.number > (UINT64_MAX >> 1 >> shift->second))
    return bad("'" + text + "' is too large");
  return quantity.number << shift->second;
}

Result<int64_t> parse_duration_ms(const std::string& text) {
  POLYKV_ASSIGN_OR_RETURN(Quantity quantity, parse_quantity(text));
  static const std::map<std::string, uint64_t> factors = {
      {"", 1}, {"ms", 1}, {"s", 1000}, {"min", 60'000}, {"h", 3'600'000}};
  const auto factor = factors.find(quantity.unit);
  if (factor == factors.end()) return bad("'" + text + "' is no duration; write for example 30s");
  // A year is longer than any deadline, and its milliseconds fit everywhere.
  if (quantity.number > uint64_t{366} * 24 * 3'600'000 / factor->second)
    return bad("'" + text + "' is too long");
  return static_cast<int64_t>(quantity.number * factor->second);
}

Status apply_config(Options& options, const std::string& toml, const std::string& file) {
  toml::table root;
  try {
    root = toml::parse(toml, file);
  } catch (const toml::parse_error& error) {
    return bad(format("read the configuration: %s, line %u: %s; correct the TOML syntax",
                      file.c_str(), static_cast<unsigned>(error.source().begin.line),
                      std::string(error.description()).c_str()));
  }
  for (const auto& [name, node] : root) {
    const std::string key(name.str());
    const toml::table* table = node.as_table();
    if (table == nullptr) {
      POLYKV_RETURN_IF_ERROR(apply_node(options, file, key, node));
      continue;
    }
    for (const auto& [inner_name, inner] : *table) {
      const std::string inner_key = key + "." + std::string(inner_name.str());
      if (key != "models") {
        POLYKV_RETURN_IF_ERROR(apply_node(options, file, inner_key, inner));
        continue;
      }
      const Result<std::string> path = scalar_text(inner);
      const Status status =
          path ? add_model(options, {std::string(inner_name.str()), *path}) : path.status();
      if (!status.is_ok()) return at(file, inner, inner_key, status.message());
    }
  }
  return Status::ok();
}

Result<Options> read_options(const OptionSources& sources) {
  Options options;
  CLI::App app("polykvd: keeps documents' compressed KV caches for the agents of this machine",
               "polykvd");
  app.set_help_flag();  // handled below: nothing here prints or exits
  app.add_flag("-h,--help", options.show_help, "print this text");
  app.add_option("--config", options.config_path, "configuration file (TOML)");
  app.add_flag("--check-config", options.check_config, "check the configuration, then exit");
  app.add_flag("--version", options.show_version, "print the version, then exit");
  std::vector<std::string> model_texts;
  app.add_option("--model", model_texts, "NAME=PATH: a model that clients may name; repeatable");
  std::map<std::string, std::string> given;  // flag -> text
  for (const Setting& setting : settings()) {
    app.add_option_function<std::string>(
        setting.flag,
        [&given, flag = setting.flag](const std::string& text) { given[flag] = text; },
        setting.help);
  }
  try {
    std::vector<std::string> reversed(sources.arguments.rbegin(), sources.arguments.rend());
    app.parse(reversed);
  } catch (const CLI::ParseError& error) {
    return bad(std::string("read the flags: ") + error.what() + "; polykvd --help lists them");
  }
  options.help_text = app.help();
  if (options.show_help || options.show_version) return options;
  POLYKV_RETURN_IF_ERROR(apply_file(options, sources));
  for (const Setting& setting : settings()) {
    const auto text = given.find(setting.flag);
    if (text == given.end()) continue;
    const Status status = setting.apply(options, text->second);
    if (!status.is_ok()) return bad("read the flags: " + text->first + ": " + status.message());
  }
  for (const std::string& text : model_texts) {
    const size_t equals = text.find('=');
    const Status status =
        equals == std::string::npos
            ? bad("write NAME=PATH")
            : add_model(options, {text.substr(0, equals), text.substr(equals + 1)});
    if (!status.is_ok()) return bad("read the flags: --model " + text + ": " + status.message());
  }
  return options;
}

}  // namespace polykv::daemon
