// Users: daemon and agents under unprivileged user ids. Needs root to become them.
#include <catch2/catch.hpp>
#include <cstdio>

#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"

using namespace polykv;
using namespace polykv::test;

namespace {

constexpr uid_t kDaemonUser = 60'001;
constexpr uid_t kAlice = 60'002;
constexpr uid_t kBob = 60'003;

void skip_unless_root() {
  if (geteuid() == 0) return;
  std::puts("skipped: only root can start programs under other user ids; run this test as root");
  std::fflush(stdout);
  std::_Exit(77);
}

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

std::string message_of(const Reply& reply) {
  return std::to_string(reply.code()) + " " + reply.message();
}

}  // namespace

TEST_CASE("one user's documents are to another as if they were not there", "[memfd]") {
  skip_unless_root();
  DaemonProcess daemon({"--peer-pidfd", GENERATE(as<std::string>(), "auto", "client")}, {},
                       kDaemonUser);
  const TestDocument document;
  ChildProcess alice([&](const Channel& test) {
    become_user(kAlice);
    RawClient client(daemon.socket_path());
    client.publish(document, "secret");
    const auto leased = client.lease("secret");
    test.say(std::string(reinterpret_cast<const char*>(&leased.lease), sizeof leased.lease));
    test.hear();
    expect(client.release(leased.lease).code() == POLYKV_OK, "the lease is still there");
    expect(client.lease("secret").fds.size() == 1, "the document is still there");
  });
  wire::Handle alices_lease;
  const std::string handle = alice.hear();
  REQUIRE(handle.size() == sizeof alices_lease);
  std::memcpy(static_cast<void*>(&alices_lease), handle.data(), sizeof alices_lease);

  ChildProcess bob([&](const Channel&) {
    become_user(kBob);
    RawClient client(daemon.socket_path());
    const TestDocument never = document_number(77);
    // The same answers as for what was never there, to the letter.
    expect(message_of(client.acquire({}, &document)) == message_of(client.acquire({}, &never)),
           "tokens: the same answer as for a miss");
    AcquireFields secret;
    secret.digest = chain_digests(chain_root(document.model), document.tokens).back();
    AcquireFields nothing;
    nothing.digest = chain_digests(chain_root(never.model), never.tokens).back();
    expect(message_of(client.acquire(secret)) == message_of(client.acquire(nothing)),
           "digest: the same answer as for a miss");
    expect(client.acquire(secret).code() == POLYKV_ERR_NOT_FOUND, "not found by digest");
    AcquireFields by_name;
    by_name.name = "secret";
    expect(client.acquire(by_name).code() == POLYKV_ERR_NOT_FOUND, "not found by name");
    expect(client.remove("secret").code() == POLYKV_ERR_NOT_FOUND, "not removed by name");
    expect(client.remove("", &*secret.digest).code() == POLYKV_ERR_NOT_FOUND,
           "not removed by digest");
    expect(client.list().as<wire::Listing>().documents()->size() == 0, "not listed");
    expect(client.release(alices_lease).code() == POLYKV_ERR_STALE, "a stranger's lease");
    // He may have the same text, and the same name, of his own.
    client.publish(document, "secret");
    expect(client.lease("secret").fds.size() == 1, "his own");
    expect(client.remove("secret").code() == POLYKV_OK, "removes his own alone");
  });
  CHECK(bob.succeeds());
  alice.say("go on");
  CHECK(alice.succeeds());
}

TEST_CASE("a client cannot publish for everybody, nor for a job") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const TestDocument document;
  AcquireFields fields;
  fields.may_produce = true;
  fields.is_public = true;
  CHECK(client.acquire(fields, &document).code() == POLYKV_ERR_PERMISSION);
}

TEST_CASE("the overflow user is refused") {
  skip_unless_root();
  DaemonProcess daemon;
  ChildProcess nobody([&](const Channel&) {
    become_user(65'534);
    RawClient client(daemon.socket_path(), false);
    const Reply reply = client.receive();
    expect(reply.code() == POLYKV_ERR_PERMISSION, "refused");
    expect(reply.message().find("65534") != std::string::npos, "with the reason");
    expect(client.is_closed_by_daemon(), "closed");
  });
  CHECK(nobody.succeeds());
}

TEST_CASE("one user's connections do not keep another out") {
  skip_unless_root();
  DaemonProcess daemon({"--connections-per-user", "2"}, {}, kDaemonUser);
  ChildProcess alice([&](const Channel& test) {
    become_user(kAlice);
    RawClient first(daemon.socket_path());
    RawClient second(daemon.socket_path());
    RawClient third(daemon.socket_path(), false);
    expect(third.is_closed_by_daemon() && third.last_error() == POLYKV_ERR_LIMIT, "limited");
    test.say("full");
    test.hear();
  });
  REQUIRE(alice.hear() == "full");
  ChildProcess bob([&](const Channel&) {
    become_user(kBob);
    RawClient client(daemon.socket_path());
    expect(client.status().code() == POLYKV_OK, "served");
  });
  CHECK(bob.succeeds());
}

TEST_CASE("a pidfd of another process is refused where the kernel cannot tell") {
  DaemonProcess daemon({"--peer-pidfd", "client"});
  RawClient client(daemon.socket_path(), false);
  const UniqueFd daemons(static_cast<int>(syscall(SYS_pidfd_open, daemon.pid(), 0)));
  client.send_hello(1, 1, daemons);
  CHECK(client.is_closed_by_daemon());
  CHECK(client.last_error() == POLYKV_ERR_PERMISSION);
  RawClient second(daemon.socket_path(), false);
  second.send_hello(1, 1, UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC)));
  CHECK(second.is_closed_by_daemon());
  CHECK(second.last_error() == POLYKV_ERR_PERMISSION);
}
