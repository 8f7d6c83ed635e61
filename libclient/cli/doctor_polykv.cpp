#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>

#include "common/fd.h"
#include "libclient/cli/doctor.h"
#include "libclient/deadline.h"
#include "libclient/session.h"
#include "polykv/version.h"

extern char** environ;

namespace polykv::cli {

namespace {

std::string describe_socket(const std::string& path) {
  struct stat info;
  if (::stat(path.c_str(), &info) != 0) {
    return path + ": " +
           (errno == ENOENT ? "not there" : "not reachable (permissions of a folder)");
  }
  if (!S_ISSOCK(info.st_mode)) return path + ": is no socket";
  return format("%s: owner %u:%u, mode %04o", path.c_str(), info.st_uid, info.st_gid,
                info.st_mode & 07777U);
}

Finding check_socket(const Global& global) {
  const std::vector<std::string> paths =
      global.socket_path.empty() ? lib::default_socket_paths() : std::vector{global.socket_path};
  std::string detail;
  for (const std::string& path : paths) {
    detail += (detail.empty() ? "" : " | ") + describe_socket(path);
  }
  return {"socket", Health::info, detail, ""};
}

Finding check_daemon(const Global& global) {
  Result<client::Session> session = connect(global);
  if (!session.is_ok()) {
    const bool refused = session.status().code() == POLYKV_ERR_PERMISSION;
    return {"daemon", Health::problem, session.status().message(),
            refused ? "join the group that owns the socket, then log in again"
                    : "enable its socket: systemctl --user enable --now polykvd.socket",
            session.status().code()};
  }
  const auto status = session->daemon_status();
  if (!status) {
    return {"daemon", Health::problem, status.error().message, "see polykvd's log",
            status.error().status};
  }
  const bool same = std::strcmp(status->version, POLYKV_VERSION_TEXT) == 0;
  return {
      "daemon", same ? Health::good : Health::warning,
      format("polykvd %s answers, process %lld, epoch %016llx, budget %s", status->version,
             static_cast<long long>(status->pid), static_cast<unsigned long long>(status->epoch),
             human_bytes(status->budget_bytes).c_str()),
      same ? "" : "polykvctl is " POLYKV_VERSION_TEXT "; install the same version of both"};
}

/// Where the daemon keeps documents; nothing when there is none to ask.
std::vector<Finding> check_backing(const Global& global) {
  Result<client::Session> session = connect(global);
  if (!session.is_ok()) return {};
  const auto status = session->daemon_status();
  if (!status) return {};
  const bool fell_back = status->backing_note[0] != '\0';
  return {{"backing", fell_back ? Health::warning : Health::good, describe_backing(*status),
           fell_back ? "mend it and restart polykvd, or set backing = \"memfd\"" : ""}};
}

/// Beside this program, as in a build tree, or where the installation puts it.
std::string find_prefill() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return "";
  const std::filesystem::path folder = self.parent_path();
  for (const auto& path : {folder / "polykv-prefill",
                           folder.parent_path() / "libexec" / "polykv" / "polykv-prefill"}) {
    if (::access(path.c_str(), X_OK) == 0) return path;
  }
  return "";
}

/// What `program --self-check` prints, at most 64 KiB; empty when it cannot be started or takes
/// longer than half a minute.
std::string run_self_check(const std::string& program) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return "";
  const UniqueFd from_child(ends[0]);
  UniqueFd to_parent(ends[1]);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, to_parent.get(), STDOUT_FILENO);
  std::string name = program;
  std::string argument = "--self-check";
  char* const arguments[] = {name.data(), argument.data(), nullptr};
  pid_t child = -1;
  const int spawned = ::posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  to_parent.reset();
  if (spawned != 0) return "";
  std::string output;
  const lib::Deadline deadline = lib::deadline_after_ms(30'000);
  bool ended = false;
  while (!ended && output.size() < (1U << 16)) {
    pollfd entry{from_child.get(), POLLIN, 0};
    if (::poll(&entry, 1, lib::poll_timeout_ms(deadline)) <= 0) break;
    char buffer[4096];
    const ssize_t got = ::read(from_child.get(), buffer, sizeof buffer);
    ended = got <= 0;
    if (got > 0) output.append(buffer, static_cast<size_t>(got));
  }
  if (!ended) ::kill(child, SIGKILL);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  return ended ? output : "";
}

std::vector<Finding> check_prefill() {
  const std::string program = find_prefill();
  if (program.empty()) {
    return {
        {"prefill", Health::warning, "polykv-prefill is not installed",
         "without it polykvd computes nothing itself; build with libtorch (POLYKV_WITH_TORCH)"}};
  }
  const Json facts = Json::parse(run_self_check(program), nullptr, false);
  if (!facts.is_object()) {
    return {{"prefill", Health::problem, program + " --self-check gives no answer",
             "run it by hand to see why; is libtorch installed?", POLYKV_ERR_WORKER}};
  }
  const bool sandbox = facts.value("sandbox_is_good", false);
  const bool blas = facts.value("blas_is_good", false);
  return {
      {"prefill", sandbox ? Health::good : Health::problem,
       program + format(", %llu threads",
                        static_cast<unsigned long long>(facts.value("thread_count", uint64_t{0}))),
       sandbox ? "" : facts.value("sandbox_remedy", std::string("its sandbox fails")),
       POLYKV_ERR_WORKER},
      {"prefill device", Health::info, facts.value("computes_on", std::string("unknown")), ""},
      {"blas", blas ? Health::good : Health::warning, facts.value("blas", std::string("unknown")),
       blas ? "" : facts.value("blas_remedy", std::string("install libopenblas0-openmp"))}};
}

}  // namespace

std::vector<Finding> check_polykv(const Global& global) {
  std::vector<Finding> findings{check_socket(global), check_daemon(global)};
  for (Finding& finding : check_backing(global)) findings.push_back(std::move(finding));
  for (Finding& finding : check_prefill()) findings.push_back(std::move(finding));
  return findings;
}

}  // namespace polykv::cli
