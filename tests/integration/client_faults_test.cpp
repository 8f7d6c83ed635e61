// What a client sees when something dies, forks, or tries to write. Numbers are rows of the failure
// checklist.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cerrno>
#include <functional>
#include <thread>
#include <vector>

#include "libclient/acquire.h"
#include "libclient/cuda/device_segment.h"
#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"
#include "tests/support/synthetic_document.h"

using namespace polykv;
using namespace polykv::test;

namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

polykv_status code_of(const auto& result) {
  return result.ok() ? POLYKV_OK : result.error().status;
}

/// The lease's segments as a reader's own library maps them.
std::unique_ptr<lib::Lease> acquire_inside(const std::string& socket_path, const char* name) {
  auto session = lib::Session::connect({socket_path, "test", 10'000});
  REQUIRE_OK(session);
  lib::AcquireRequest request;
  request.name = name;
  auto acquired = lib::acquire(*session, request);
  REQUIRE_OK(acquired);
  return std::move(acquired->lease);
}

}  // namespace

TEST_CASE("rows 2 and 3: a document whose producer is killed is never visible") {
  const DaemonProcess daemon;
  const SyntheticDocument document(600);
  ChildProcess producer([&](const Channel& parent) {
    client::ConnectOptions options;
    options.socket_path = daemon.socket_path().c_str();
    auto session = client::Session::connect(options);
    const client::Model model = document.model();
    auto acquired = session->acquire_or_produce(document.options(model, "torn"));
    auto& publisher = std::get<client::Publisher>(*acquired);
    auto first = publisher.begin_segment(300);
    if (!document.encode_all(*first, 0, 300) || !first->commit()) return;
    auto second = publisher.begin_segment(300);  // reserved and written in part, never committed
    const std::vector<float> values = document.values(false, 0, 300, 300);
    client::KvSource source;
    source.k = values.data();
    source.v = values.data();
    if (!second->encode_layer(0, source)) return;
    parent.say("half way");
    parent.hear();
  });
  REQUIRE(producer.hear() == "half way");

  client::Session session = connect_to(daemon.socket_path());
  const auto nothing_visible = [&] {
    CHECK(code_of(session.acquire("torn")) == POLYKV_ERR_BUSY);  // somebody produces it
    REQUIRE_OK(session.list([](const polykv_document_info& info) {
      CHECK(std::string(info.state) != "sealed");
      return true;
    }));
  };
  nothing_visible();
  CHECK(producer.kill().was_killed);
  // Whoever waits becomes the producer once the daemon has seen the death; from token 0 on.
  const client::Model model = document.model();
  client::AcquireOptions options = document.options(model, "torn");
  options.flags = POLYKV_ACQUIRE_WAIT;
  auto acquired = session.acquire_or_produce(options);
  REQUIRE_OK(acquired);
  REQUIRE(std::holds_alternative<client::Publisher>(*acquired));
  nothing_visible();
  auto& publisher = std::get<client::Publisher>(*acquired);
  while (publisher.next_token() < publisher.token_count()) document.publish_segment(publisher, 300);
  const auto lease = publisher.finish_with_lease();
  REQUIRE_OK(lease);
  CHECK(document.worst_error(*lease) == 0);
}

TEST_CASE("row 6: after fork every handle answers FORKED in the child, and the parent goes on") {
  const DaemonProcess daemon;
  const SyntheticDocument document(300);
  const SyntheticDocument other(300, 2);
  client::Session session = connect_to(daemon.socket_path());
  client::Lease lease = document.publish(session, "shared");
  client::Publisher publisher = other.become_producer(session);
  auto segment = publisher.begin_segment();
  REQUIRE_OK(segment);
  const std::vector<float> values = other.values(false, 0, 0, 300);
  client::AttendOptions attend;
  std::vector<float> q(2 * document.layers[0].k_head_dim, 1.0F);
  std::vector<float> output(2 * document.layers[0].v_head_dim);
  attend.token_count = 300;
  attend.query_count = 1;
  attend.head_count = 2;
  attend.q = q.data();
  attend.output = output.data();
  // Starts threads, which the child does not have. Not with a sanitizer: a thread that is just
  // starting may hold its allocator's lock when the process forks, and the child waits for ever.
  attend.thread_count = kSanitized ? 1 : 3;
  REQUIRE_OK(lease.attend(0, attend));

  ChildProcess child([&](const Channel&) {
    const auto need = [](polykv_status status, const char* what) {
      if (status != POLYKV_ERR_FORKED) throw std::runtime_error(what);
    };
    need(code_of(session.acquire("shared")), "acquire");
    need(code_of(session.daemon_status()), "status");
    need(code_of(session.remove("shared")), "remove");
    need(code_of(session.list([](const polykv_document_info&) { return true; })), "list");
    client::IngestOptions ingest;
    ingest.model_name = "m";
    ingest.text_fd = 0;
    need(code_of(session.ingest(ingest)), "ingest");
    client::DocumentInfo info;
    need(polykv_lease_info(lease.get(), &info), "info");
    need(code_of(lease.tokens(0, 1)), "tokens");
    need(code_of(lease.layer_view(0, 0)), "layer_view");
    need(code_of(lease.verify()), "verify");
    client::DecodeOptions options;
    need(code_of(lease.decode(0, options)), "decode");
    need(code_of(lease.attend(0, attend)), "attend");
    uint64_t next = 0;
    need(polykv_publisher_position(publisher.get(), &next, nullptr), "position");
    need(code_of(publisher.progress(1)), "progress");
    need(code_of(publisher.begin_segment()), "begin");
    client::KvSource source;
    source.k = values.data();
    source.v = values.data();
    need(code_of(segment->encode_layer(0, source)), "encode");
    // Freeing is allowed, and must reach neither the daemon nor threads of the child's own, which
    // may have got the memory of those that stayed in the parent.
    std::thread([] {}).join();
    std::atomic<bool> is_released{false};
    std::vector<std::thread> waiting;
    for (int i = 0; i < 4; ++i) waiting.emplace_back([&] { is_released.wait(false); });
    need(code_of(lease.release()), "release");
    { const client::Lease freed = std::move(lease); }
    is_released = true;
    is_released.notify_all();
    for (std::thread& thread : waiting) thread.join();
    { const client::Segment freed = std::move(*segment); }
    { const client::Publisher freed = std::move(publisher); }
    { const client::Session closed = std::move(session); }
    // A child connects anew.
    client::ConnectOptions connect;
    connect.socket_path = daemon.socket_path().c_str();
    auto own = client::Session::connect(connect);
    if (!own || !own->acquire("shared")) throw std::runtime_error("its own connection");
  });
  REQUIRE(child.succeeds());

  CHECK(document.worst_error(lease) == 0);
  REQUIRE_OK(other.encode_all(*segment, 0, 300));
  REQUIRE_OK(segment->commit());
  CHECK_OK(publisher.finish());
  CHECK_OK(lease.release());
}

TEST_CASE("row 6: a child that lives on does not keep the parent from committing") {
  const DaemonProcess daemon;
  const SyntheticDocument document(300);
  client::Session session = connect_to(daemon.socket_path());
  client::Publisher publisher = document.become_producer(session, "text");
  auto segment = publisher.begin_segment();
  REQUIRE_OK(segment);
  REQUIRE_OK(document.encode_all(*segment, 0, 300));
  ChildProcess child([&](const Channel& channel) {
    const OwnMemory own;
    channel.say("forked");
    channel.hear();
    { const client::Segment freed = std::move(*segment); }
    own.write();
  });
  REQUIRE(child.hear() == "forked");
  REQUIRE_OK(segment->commit());
  child.say("committed");
  CHECK(child.succeeds());
  const auto lease = publisher.finish_with_lease();
  REQUIRE_OK(lease);
  CHECK(document.worst_error(*lease) == 0);
}

TEST_CASE("row 9: a second release is STALE and changes nothing") {
  const DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  client.publish(TestDocument(), "a");
  const auto kept = client.lease("a");
  const auto released = client.lease("a");
  CHECK(client.release(released.lease).code() == POLYKV_OK);
  CHECK(client.release(released.lease).code() == POLYKV_ERR_STALE);
  const wire::Handle later(released.lease.epoch(), kept.lease.slot(), kept.lease.generation() + 1);
  CHECK(client.release(later).code() == POLYKV_ERR_STALE);
  CHECK(client.status().as<wire::StatusReply>().lease_count() == 1);
  CHECK(client.release(kept.lease).code() == POLYKV_OK);
}

TEST_CASE("row 13: a killed daemon answers every call with DAEMON_GONE; what is mapped stays") {
  DaemonProcess daemon;
  const SyntheticDocument document(600);
  const SyntheticDocument other(100, 2);
  client::Session session = connect_to(daemon.socket_path());
  client::Session waiting = connect_to(daemon.socket_path());
  client::Lease lease = document.publish(session, "a", 256);
  client::Publisher publisher = other.become_producer(session);
  auto segment = publisher.begin_segment();
  REQUIRE_OK(segment);

  // One call waits in the daemon when it dies.
  polykv_status waited = POLYKV_OK;
  std::thread waiter([&] {
    const client::Model model = other.model();
    client::AcquireOptions options = other.options(model);
    options.flags = POLYKV_ACQUIRE_WAIT;
    options.timeout_ms = -1;
    waited = code_of(waiting.acquire(options));
  });
  daemon.kill();
  waiter.join();
  CHECK(waited == POLYKV_ERR_DAEMON_GONE);

  CHECK(code_of(session.daemon_status()) == POLYKV_ERR_DAEMON_GONE);
  CHECK(code_of(session.acquire("a")) == POLYKV_ERR_DAEMON_GONE);
  CHECK(code_of(publisher.progress(1)) == POLYKV_ERR_DAEMON_GONE);
  CHECK(code_of(publisher.begin_segment()) != POLYKV_OK);
  REQUIRE_OK(other.encode_all(*segment, 0, 100));  // private memory until the commit
  CHECK(code_of(segment->commit()) == POLYKV_ERR_DAEMON_GONE);
  client::ConnectOptions options;
  options.socket_path = daemon.socket_path().c_str();
  CHECK(code_of(client::Session::connect(options)) == POLYKV_ERR_DAEMON_UNREACHABLE);

  // What device memory of a dead exporter holds is undefined: nothing is read from it.
  const bool is_mapped = !TestDevice::is_wanted();
  CHECK(document.worst_error(lease) == (is_mapped ? 0 : INFINITY));
  CHECK(code_of(lease.verify()) == (is_mapped ? POLYKV_OK : POLYKV_ERR_DAEMON_GONE));
  CHECK(*lease.tokens() == document.tokens);
  CHECK(code_of(lease.release()) == POLYKV_ERR_DAEMON_GONE);
}

TEST_CASE("row 17: handles of an earlier daemon are STALE to the next one") {
  DaemonProcess daemon;
  wire::Handle lease;
  {
    RawClient before(daemon.socket_path());
    before.publish(TestDocument(), "a");
    lease = before.lease("a").lease;
  }
  daemon.restart();
  RawClient after(daemon.socket_path());
  after.publish(document_number(5), "b");
  const auto own = after.lease("b");
  CHECK(own.lease.epoch() != lease.epoch());
  const Reply reply = after.release(lease);
  CHECK(reply.code() == POLYKV_ERR_STALE);
  CHECK(reply.message().find("earlier") != std::string::npos);
  CHECK(after.status().as<wire::StatusReply>().lease_count() == 1);
}

TEST_CASE("row 39: a reader cannot truncate, write or make its mapping writable") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  const client::Lease published = document.publish(session, "a");
  RawClient raw(daemon.socket_path());
  const auto leased = raw.lease("a");
  const int fd = leased.fds.at(0).get();
  const size_t size = leased.sizes_bytes.at(0);
  const auto fails_with = [](int result, std::initializer_list<int> allowed) {
    return result != 0 && std::find(allowed.begin(), allowed.end(), errno) != allowed.end();
  };
  CHECK(fails_with(::ftruncate(fd, 0), {EPERM, EINVAL}));
  CHECK(fails_with(::ftruncate(fd, static_cast<off_t>(size) * 2), {EPERM, EINVAL}));
  CHECK(fails_with(static_cast<int>(::write(fd, "x", 1)), {EPERM, EBADF}));
  CHECK(fails_with(::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096),
                   {EPERM, EBADF}));
  CHECK(fails_with(::fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), {EPERM}));
  CHECK(::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED);
  CHECK((errno == EPERM || errno == EACCES));

  const auto lease = acquire_inside(daemon.socket_path(), "a");
  const auto& segment = *(*lease->segments())[0];
  // Of a segment in device memory what is in the file: its payload is a private copy.
  const std::span<const uint8_t> mapped =
      (segment.device ? segment.device->bytes() : segment.mapping.bytes()).first(size);
  CHECK(fails_with(
      ::mprotect(const_cast<uint8_t*>(mapped.data()), mapped.size(), PROT_READ | PROT_WRITE),
      {EACCES, EPERM}));
  CHECK(document.worst_error(published) == 0);
  CHECK_OK(lease->release());
}

TEST_CASE("row 40: reopening a segment read-write through /proc gives no way to write") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(300);
  const client::Lease published = document.publish(session, "a");
  RawClient raw(daemon.socket_path());
  const auto leased = raw.lease("a");
  const auto try_to_write = [&] {
    const std::string path = format("/proc/self/fd/%d", leased.fds.at(0).get());
    for (const int flags : {O_RDWR, O_WRONLY, O_RDWR | O_TRUNC}) {
      const UniqueFd again(::open(path.c_str(), flags | O_CLOEXEC));
      if (!again) continue;  // refused already: the file's mode is 0400
      if (::write(again.get(), "x", 1) >= 0) throw std::runtime_error("write works");
      if (::ftruncate(again.get(), 0) == 0) throw std::runtime_error("truncate works");
      if (::fallocate(again.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096) == 0)
        throw std::runtime_error("punching a hole works");
      if (::mmap(nullptr, 4096, PROT_WRITE, MAP_SHARED, again.get(), 0) != MAP_FAILED)
        throw std::runtime_error("a writable mapping works");
    }
  };
  try_to_write();
  ChildProcess unprivileged([&](const Channel&) {
    if (::getuid() == 0) become_user(12345);
    try_to_write();
  });
  CHECK(unprivileged.succeeds());
  CHECK(document.worst_error(published) == 0);
  CHECK_OK(published.verify());
}

TEST_CASE("a reservation beyond the budget is refused with needed and free bytes") {
  const DaemonProcess daemon({"--budget", "4MiB"});
  client::Session session = connect_to(daemon.socket_path());
  const SyntheticDocument document(4096);
  client::Publisher publisher = document.become_producer(session);
  const auto segment = publisher.begin_segment();
  REQUIRE(!segment.ok());
  CHECK(segment.error().status == POLYKV_ERR_BUDGET);
  INFO(segment.error().message);
  CHECK(segment.error().message.find("need") != std::string::npos);
  CHECK(segment.error().message.find("free") != std::string::npos);
  // The ticket is still good for less.
  document.publish_segment(publisher, 100);
  CHECK(publisher.next_token() == 100);
}
