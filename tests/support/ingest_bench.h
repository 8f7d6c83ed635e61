// A real polykvd with workers of the test's choice, one model file, and short ways to ingest. Throws
// std::runtime_error with what failed.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "libclient/acquire.h"
#include "libclient/document.h"
#include "tests/support/daemon_process.h"
#include "tests/support/text_file.h"

namespace polykv::test {

template <typename T>
T must(Result<T> result) {
  if (!result.is_ok()) throw std::runtime_error(result.status().message());
  return std::move(result).value();
}

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

using IngestResult = Result<std::unique_ptr<lib::Lease>>;

class IngestBench {
 public:
  /// `worker`: the program that stands for polykv-prefill.
  IngestBench(const std::string& worker, const std::string& model_path,
              std::vector<std::string> flags = {})
      : model_path_(model_path), polykvd_(with_worker(worker, std::move(flags))) {}

  const DaemonProcess& polykvd() const { return polykvd_; }

  std::shared_ptr<lib::Session> connect() const {
    lib::ConnectOptions options;
    options.socket_path = polykvd_.socket_path();
    options.client_name = "test";
    return must(lib::Session::connect(options));
  }
  UniqueFd open_model() const {
    UniqueFd model(::open(model_path_.c_str(), O_RDONLY | O_CLOEXEC));
    if (!model) throw std::runtime_error("cannot open " + model_path_);
    return model;
  }

  /// With the bench's model file unless the request names a configured model, in a session of its
  /// own unless one is given.
  IngestResult ingest(lib::IngestRequest request, const std::string& text,
                      std::shared_ptr<lib::Session> session = {}) const {
    const UniqueFd model = open_model();
    const UniqueFd input = text_file(text);
    if (request.model_name.empty()) request.model_fd = model.get();
    request.text_fd = input.get();
    if (session == nullptr) session = connect();
    return lib::ingest(session, request);
  }
  IngestResult ingest(const std::string& text) const { return ingest({}, text); }

  polykv_daemon_status status() const {
    polykv_daemon_status result{};
    const auto session = connect();
    const Status status = lib::read_daemon_status(*session, result);
    if (!status.is_ok()) throw std::runtime_error(status.message());
    return result;
  }
  /// Until the last worker process is gone.
  void wait_until_no_worker() const {
    while (status().worker_count != 0) std::this_thread::yield();
  }

 private:
  static std::vector<std::string> with_worker(const std::string& worker,
                                              std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"--worker", worker, "--log-level", "debug"});
    return flags;
  }

  std::string model_path_;
  DaemonProcess polykvd_;
};

}  // namespace polykv::test
