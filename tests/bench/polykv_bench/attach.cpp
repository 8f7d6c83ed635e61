#include <sys/wait.h>

#include <algorithm>

#include "common/memfd.h"
#include "common/packet_socket.h"
#include "tests/bench/polykv_bench/commands.h"
#include "tests/bench/polykv_bench/measure.h"
#include "tests/bench/polykv_bench/pool.h"

namespace polykv::bench {

namespace {

constexpr uint8_t kEchoByte[] = {1};

/// Another process that answers each packet with one that carries a descriptor: what the kernel
/// alone takes of an attach.
class DescriptorEcho {
 public:
  DescriptorEcho() {
    auto pair = packet_socketpair().value();
    socket_ = std::move(pair.first);
    child_ = ::fork();
    if (child_ < 0) throw std::runtime_error("cannot fork");
    if (child_ == 0) {
      socket_.reset();
      serve(pair.second.get());
    }
  }
  ~DescriptorEcho() {
    socket_.reset();  // its end of file ends the child
    ::waitpid(child_, nullptr, 0);
  }
  DescriptorEcho(const DescriptorEcho&) = delete;
  DescriptorEcho& operator=(const DescriptorEcho&) = delete;

  void ask() const {
    ReceivedPacket packet;
    if (!packet_send(socket_.get(), kEchoByte).is_ok() ||
        !packet_receive(socket_.get(), packet).is_ok() || packet.fds.size() != 1) {
      throw std::runtime_error("the echo passed no descriptor");
    }
  }

 private:
  [[noreturn]] static void serve(int socket) {
    const Result<UniqueFd> file = memfd_create_sealable("echo");
    ReceivedPacket packet;
    for (;;) {
      const Result<SocketResult> received = packet_receive(socket, packet);
      if (!file.is_ok() || !received.is_ok() || *received != SocketResult::done) ::_exit(0);
      const int fds[] = {file->get()};
      if (!packet_send(socket, kEchoByte, fds).is_ok()) ::_exit(1);
    }
  }

  UniqueFd socket_;
  pid_t child_ = -1;
};

double percentile_us(std::vector<double> seconds, double percent) {
  std::sort(seconds.begin(), seconds.end());
  const auto last = static_cast<double>(seconds.size() - 1);
  return seconds[static_cast<size_t>(last * percent / 100)] * 1e6;
}

/// One attach: its view has to be of the layer that was published.
void attach(client::Session& session, const std::string& name, const Shape& shape, bool spoils,
            std::vector<double>& seconds) {
  std::optional<client::Lease> lease;
  client::LayerView view;
  seconds.push_back(seconds_of(1, [&] {
    lease.emplace(session.acquire(name).value_or_throw());
    view = lease->layer_view(0, 0).value_or_throw();
  }));
  const uint32_t wanted_dim = spoils ? shape.head_dim + 1 : shape.head_dim;
  if (view.payload == nullptr || view.geometry.k_head_dim != wanted_dim)
    throw std::runtime_error("the view is not of the layer that was published");
}

}  // namespace

void bench_attach(const Options& options, Report& report) {
  report.set_columns({"codec", "head_dim", "tokens", "layers", "rounds", "p50_us", "p99_us",
                      "echo_p50_us", "echo_p99_us", "p50_over_echo"});
  // Before there are threads: it forks.
  const DescriptorEcho echo;
  for (const uint32_t head_dim : options.head_dims) {
    for (const std::string& codec : options.codecs) {
      const Shape shape = shape_of(options, profile_from_name(codec).value(), head_dim);
      Pool pool(budget_for(shape));
      const client::Lease kept = pool.publish(shape, codec);
      Rounds rounds;
      std::vector<double> echo_s;
      for (uint32_t i = 0; i < options.attaches; ++i) {
        attach(pool.session(), codec, shape, options.spoils, rounds.seconds);
        echo_s.push_back(seconds_of(1, [&] { echo.ask(); }));
      }
      Json row = make_row("attach", shape, 1, rounds);
      row["ns_per_token_kv_head"] = nullptr;
      row["p50_us"] = percentile_us(rounds.seconds, 50);
      row["p99_us"] = percentile_us(rounds.seconds, 99);
      row["echo_p50_us"] = percentile_us(echo_s, 50);
      row["echo_p99_us"] = percentile_us(echo_s, 99);
      row["p50_over_echo"] = percentile_us(rounds.seconds, 50) / percentile_us(echo_s, 50);
      report.add(std::move(row));
    }
  }
}

}  // namespace polykv::bench
