// Memory: what is refused, what is evicted, what never is.
#include <sys/resource.h>

#include <catch2/catch.hpp>

#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"

using namespace polykv;
using namespace polykv::test;

namespace {

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

polykv_status find(RawClient& client, const std::string& name) {
  AcquireFields fields;
  fields.name = name;
  const uint64_t id = client.send_acquire(fields);
  const Reply reply = client.receive(id);
  if (reply.code() != POLYKV_OK) return reply.code();
  (void)client.receive(id);  // the segments
  client.release(*reply.as<wire::LeaseGranted>().lease());
  return POLYKV_OK;
}

/// Documents that are all of this size.
uint64_t document_bytes() {
  return document_number(0).segment_bytes(0, 300);
}

/// What one of them takes of the host's memory, on its way to the GPU if that is where it will be.
uint64_t host_bytes() {
  return document_number(0).host_bytes(0, 300);
}

}  // namespace

TEST_CASE("more than the budget is refused with needed and free, and nothing is allocated") {
  DaemonProcess daemon({"--budget", std::to_string(document_bytes() - 1)});
  RawClient client(daemon.socket_path());
  const TestDocument document;
  const wire::Handle ticket = client.become_producer(document);
  const Reply reply = client.reserve(ticket, 0, 300);
  CHECK(reply.code() == POLYKV_ERR_BUDGET);
  CHECK(contains(reply.message(), std::to_string(document_bytes()) + " bytes needed"));
  CHECK(contains(reply.message(), std::to_string(document_bytes() - 1) + " free of the budget"));
  const Reply status = client.status();
  CHECK(status.as<wire::StatusReply>().stored_bytes() == 0);
  CHECK(status.as<wire::StatusReply>().segment_count() == 0);
  // The ticket lives: a smaller segment may still fit, unless it takes as many pages of 2 MiB.
  const bool is_smaller = document.segment_bytes(0, 64) < document_bytes();
  CHECK(client.reserve(ticket, 0, 64).code() == (is_smaller ? POLYKV_OK : POLYKV_ERR_BUDGET));
}

TEST_CASE("the least recently used document is evicted when the budget needs it") {
  DaemonProcess daemon({"--budget", std::to_string(2 * document_bytes())});
  RawClient client(daemon.socket_path());
  client.publish(document_number(1), "one");
  client.publish(document_number(2), "two");
  CHECK(find(client, "one") == POLYKV_OK);  // now "two" is the least recently used
  client.publish(document_number(3), "three");
  CHECK(find(client, "two") == POLYKV_ERR_NOT_FOUND);
  CHECK(find(client, "one") == POLYKV_OK);
  CHECK(find(client, "three") == POLYKV_OK);
  const Reply status = client.status();
  CHECK(status.as<wire::StatusReply>().evicted_documents_total() == 1);
  CHECK(status.as<wire::StatusReply>().stored_bytes() == 2 * document_bytes());
  CHECK(status.as<wire::StatusReply>().budget_bytes() == 2 * document_bytes());
}

TEST_CASE("a leased document is never evicted") {
  DaemonProcess daemon({"--budget", std::to_string(2 * document_bytes())});
  RawClient client(daemon.socket_path());
  client.publish(document_number(1), "one");
  client.publish(document_number(2), "two");
  const auto one = client.lease("one");
  const auto two = client.lease("two");
  const TestDocument third = document_number(3);
  const wire::Handle ticket = client.become_producer(third, "three");
  CHECK(client.reserve(ticket, 0, 300).code() == POLYKV_ERR_BUDGET);
  client.release(two.lease);
  CHECK(client.reserve(ticket, 0, 300).code() == POLYKV_OK);
  CHECK(find(client, "two") == POLYKV_ERR_NOT_FOUND);
  CHECK(client.release(one.lease).code() == POLYKV_OK);
}

TEST_CASE("memory of a removed document that a reader still holds counts against the budget") {
  DaemonProcess daemon({"--budget", std::to_string(document_bytes())});
  RawClient client(daemon.socket_path());
  client.publish(document_number(1), "one");
  const auto one = client.lease("one");
  client.remove("one");
  const wire::Handle ticket = client.become_producer(document_number(2));
  const Reply refused = client.reserve(ticket, 0, 300);
  CHECK(refused.code() == POLYKV_ERR_BUDGET);
  CHECK(contains(refused.message(), "removed documents that processes still hold"));
  client.release(one.lease);
  CHECK(client.reserve(ticket, 0, 300).code() == POLYKV_OK);
}

TEST_CASE("a control group's limit refuses by admission, before memory is touched: v2") {
  const TemporaryFolder fake;
  const std::string self = fake.write("self", "0::/system.slice/polykvd.service\n");
  fake.write("cgroup/system.slice/memory.max", std::to_string(host_bytes() - 1));
  fake.write("cgroup/system.slice/memory.current", "0");
  DaemonProcess daemon({"--cgroup-root", fake.path() + "/cgroup", "--proc-self-cgroup", self,
                        "--memory-reserve", "0"});
  RawClient client(daemon.socket_path());
  const wire::Handle ticket = client.become_producer(TestDocument());
  const Reply refused = client.reserve(ticket, 0, 300);
  CHECK(refused.code() == POLYKV_ERR_BUDGET);
  CHECK(contains(refused.message(), std::to_string(host_bytes()) + " bytes"));
  CHECK(contains(refused.message(), std::to_string(host_bytes() - 1) + " free"));
  CHECK(contains(refused.message(), "control group /system.slice (memory.max)"));
  // Limits are read each time: raised, it fits.
  fake.write("cgroup/system.slice/memory.max", std::to_string(host_bytes()));
  CHECK(client.reserve(ticket, 0, 300).code() == POLYKV_OK);
}

TEST_CASE("a control group's limit refuses by admission, before memory is touched: v1") {
  const TemporaryFolder fake;
  const std::string self = fake.write("self", "9:name=systemd:/\n4:memory:/box/inner\n");
  fake.write("cgroup/memory/box/inner/memory.limit_in_bytes", "9223372036854771712");
  fake.write("cgroup/memory/box/inner/memory.usage_in_bytes", "4096");
  fake.write("cgroup/memory/box/memory.limit_in_bytes", "1048576");
  fake.write("cgroup/memory/box/memory.usage_in_bytes", "1044480");
  DaemonProcess daemon({"--cgroup-root", fake.path() + "/cgroup", "--proc-self-cgroup", self,
                        "--memory-reserve", "0"});
  RawClient client(daemon.socket_path());
  const wire::Handle ticket = client.become_producer(TestDocument());
  const Reply refused = client.reserve(ticket, 0, 300);
  CHECK(refused.code() == POLYKV_ERR_BUDGET);
  CHECK(contains(refused.message(), "4096 free"));
  CHECK(contains(refused.message(), "control group /box (memory.limit_in_bytes)"));
}

TEST_CASE("the machine's memory refuses by admission") {
  const TemporaryFolder fake;
  const std::string meminfo = fake.write("meminfo", "MemAvailable: 1024 kB\n");
  DaemonProcess daemon({"--proc-meminfo", meminfo, "--memory-reserve", "1MiB"});
  RawClient client(daemon.socket_path());
  const Reply refused = client.reserve(client.become_producer(TestDocument()), 0, 300);
  CHECK(refused.code() == POLYKV_ERR_BUDGET);
  CHECK(contains(refused.message(), "0 free of this machine (MemAvailable)"));
}

TEST_CASE("the least recently used document is evicted when there are too many segments") {
  // polykvd derives the number from its limit of descriptors.
  rlimit old{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &old) == 0);
  const rlimit tight{256, 256};
  REQUIRE(setrlimit(RLIMIT_NOFILE, &tight) == 0);
  DaemonProcess daemon;
  setrlimit(RLIMIT_NOFILE, &old);  // root may; others do without
  RawClient client(daemon.socket_path());
  const uint32_t segments = (256 - 64) / 4;
  client.publish(document_number(0), "first");
  const auto leased = client.lease("first");
  for (uint32_t i = 1; i < segments; ++i) client.publish(document_number(i), std::to_string(i));
  CHECK(client.status().as<wire::StatusReply>().evicted_documents_total() == 0);
  client.publish(document_number(segments), "one more");
  CHECK(client.status().as<wire::StatusReply>().evicted_documents_total() == 1);
  CHECK(find(client, "1") == POLYKV_ERR_NOT_FOUND);
  CHECK(find(client, "first") == POLYKV_OK);
  // A document of more segments than there may be evicts nothing in vain.
  const TestDocument longer = document_number(1000, 64 * segments);
  const wire::Handle ticket = client.become_producer(longer, "longer");
  polykv_status status = POLYKV_OK;
  for (uint64_t first = 0; status == POLYKV_OK && first < longer.tokens.size(); first += 64) {
    const Reply reserved = client.reserve(ticket, first, 64);
    status = reserved.code();
    if (status != POLYKV_OK) {
      CHECK(contains(reserved.message(), "its maximum of 48 segments"));
      break;
    }
    RawClient::fill(reserved, longer, first, 64);
    CHECK(client.commit(*reserved.as<wire::SegmentReserved>().segment()).code() == POLYKV_OK);
  }
  CHECK(status == POLYKV_ERR_LIMIT);
  CHECK(find(client, "first") == POLYKV_OK);
}
