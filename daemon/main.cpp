// polykvd: keeps documents' compressed KV caches for the agents of this machine.
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

#include "daemon/daemon.h"
#include "daemon/log.h"
#include "device/probe.h"
#include "polykv/version.h"

namespace polykv::daemon {
namespace {

std::string environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): before any thread
  return value == nullptr ? "" : value;
}

/// Whether the service manager started us, whose journal takes stderr.
bool stderr_is_journal() {
  struct stat info {};
  return ::fstat(STDERR_FILENO, &info) == 0 &&
         environment("JOURNAL_STREAM") ==
             std::to_string(info.st_dev) + ":" + std::to_string(info.st_ino);
}

void raise_open_file_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);  // what it became is read in machine_facts()
}

/// SIGTERM and SIGINT as a descriptor; no thread gets them otherwise. SIGPIPE is of no interest.
Result<UniqueFd> signal_descriptor() {
  ::signal(SIGPIPE, SIG_IGN);
  sigset_t set;
  ::sigemptyset(&set);
  ::sigaddset(&set, SIGTERM);
  ::sigaddset(&set, SIGINT);
  if (::sigprocmask(SIG_BLOCK, &set, nullptr) != 0) return system_error("block signals", errno);
  UniqueFd fd(::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!fd) return system_error("make a signal descriptor", errno);
  return fd;
}

/// Tells the service manager's watchdog, from the loop, that the loop still turns.
void feed_watchdog(EventLoop& loop) {
  uint64_t interval_us = 0;
  if (::sd_watchdog_enabled(0, &interval_us) <= 0) return;
  ::sd_notify(0, "WATCHDOG=1");
  loop.add_timer(static_cast<int64_t>(interval_us / 1000 / 3), [&loop] { feed_watchdog(loop); });
}

Result<std::unique_ptr<Listener>> listen(const Options& options) {
  POLYKV_ASSIGN_OR_RETURN(std::unique_ptr<Listener> passed, Listener::from_service_manager());
  if (passed != nullptr) return passed;
  const SocketEnvironment environment_of_socket{environment("XDG_RUNTIME_DIR"), ::geteuid() == 0};
  POLYKV_ASSIGN_OR_RETURN(const std::string path,
                          choose_socket_path(options, environment_of_socket));
  const uint32_t mode = options.socket_mode != 0        ? options.socket_mode
                        : environment_of_socket.is_root ? 0660
                                                        : 0600;
  return Listener::open(path, options.socket_path.empty(), mode);
}

/// Waits at the start; false: a signal says stop. The service manager sees why, and is asked for the
/// time that it takes.
bool pause(const UniqueFd& signals, int64_t duration_ms, const std::string& why) {
  ::sd_notifyf(0, "STATUS=Waiting for the GPU: %s\nEXTEND_TIMEOUT_USEC=%lld", why.c_str(),
               static_cast<long long>(duration_ms + 10'000) * 1000);
  log_info("waiting for the GPU: %s", why.c_str());
  pollfd entry{signals.get(), POLLIN, 0};
  return ::poll(&entry, 1, static_cast<int>(duration_ms)) <= 0;
}

Status run(const Options& options) {
  raise_open_file_limit();
  POLYKV_ASSIGN_OR_RETURN(Limits limits, derive_limits(options, machine_facts()));
  if (options.check_config) {
    std::printf("the configuration is good: budget %llu bytes, %zu models\n",
                static_cast<unsigned long long>(limits.budget_bytes), options.models.size());
    return Status::ok();
  }
  start_log(stderr_is_journal(), options.log_level);
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd signals, signal_descriptor());
  POLYKV_ASSIGN_OR_RETURN(const std::unique_ptr<Listener> listener, listen(options));
  const Result<DeviceChoice> choice =
      choose_device(options, [&](int64_t duration_ms, const std::string& why) {
        return pause(signals, duration_ms, why);
      });
  if (choice.status().code() == POLYKV_ERR_CANCELLED) return Status::ok();
  if (!choice) return choice.status();
  if (choice->device && options.budget_bytes == 0)
    limits.budget_bytes = choice->device->info.total_bytes / 2;
  POLYKV_ASSIGN_OR_RETURN(const std::unique_ptr<Daemon> daemon,
                          Daemon::create(options, limits, *choice));
  POLYKV_RETURN_IF_ERROR(daemon->loop().watch(signals.get(), EPOLLIN, [&](uint32_t) {
    log_info("stopping");
    ::sd_notify(0, "STOPPING=1");
    daemon->stop();
  }));
  feed_watchdog(daemon->loop());
  const std::string where =
      choice->device ? "memory of " + choice->device->info.name : std::string("host memory");
  log_info("polykvd %s serves %s with a budget of %llu bytes of %s", POLYKV_VERSION_TEXT,
           listener->path().c_str(), static_cast<unsigned long long>(limits.budget_bytes),
           where.c_str());
  ::sd_notifyf(0, "READY=1\nSTATUS=Serving %s, budget %llu MiB of %s", listener->path().c_str(),
               static_cast<unsigned long long>(limits.budget_bytes >> 20), where.c_str());
  return daemon->serve(listener->take_socket());
}

int main_function(int argument_count, char** arguments) {
  if (argument_count > 1 && std::string_view(arguments[1]) == device::kProbeFlag)
    return device::run_probe_helper({arguments + 2, arguments + argument_count});
  const OptionSources sources{{arguments + 1, arguments + argument_count},
                              environment("XDG_CONFIG_HOME"),
                              environment("HOME"),
                              ::geteuid() == 0};
  const Result<Options> options = read_options(sources);
  if (options && options->show_help) return std::fputs(options->help_text.c_str(), stdout), 0;
  if (options && options->show_version) return std::puts("polykvd " POLYKV_VERSION_TEXT), 0;
  const Status status = options ? run(*options) : options.status();
  if (status.is_ok()) return 0;
  std::fprintf(stderr, "polykvd: %s\n", status.message().c_str());
  ::sd_notifyf(0, "STATUS=%s", status.message().c_str());
  return static_cast<int>(status.code());
}

}  // namespace
}  // namespace polykv::daemon

int main(int argument_count, char** arguments) {
  return polykv::daemon::main_function(argument_count, arguments);
}
