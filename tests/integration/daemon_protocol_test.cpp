// What breaks the protocol ends that connection alone.
#include <sys/resource.h>

#include <catch2/catch.hpp>

#include "tests/support/child_process.h"
#include "tests/support/daemon_process.h"
#include "tests/support/raw_client.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::test;

namespace {

std::vector<uint8_t> list_packet(uint64_t id = 9) {
  flatbuffers::FlatBufferBuilder builder;
  return make_packet(builder, id, wire::CreateList(builder, 0));
}

bool serves(const DaemonProcess& daemon) {
  return RawClient(daemon.socket_path()).status().code() == POLYKV_OK;
}

}  // namespace

TEST_CASE("malformed packets and lengths end that connection alone") {
  DaemonProcess daemon;
  RawClient bystander(daemon.socket_path());
  std::vector<std::vector<uint8_t>> bad;
  bad.push_back({0});
  bad.push_back({0xff, 0xff, 0xff, 0xff});
  bad.push_back(std::vector<uint8_t>(kMaxPacketBytes, 0xff));
  bad.push_back(std::vector<uint8_t>(kMaxPacketBytes, 0));
  for (const uint32_t root : {uint32_t{0}, uint32_t{0xffffffff}, uint32_t{0x7fffffff}}) {
    bad.push_back(list_packet());
    std::memcpy(bad.back().data(), &root, sizeof root);
  }
  bad.push_back(list_packet());
  bad.back().resize(bad.back().size() / 2);
  {
    // A name whose length says one byte more than there is, and 2^32 - 1.
    flatbuffers::FlatBufferBuilder builder;
    const auto name = builder.CreateString("the name");
    const auto packet = make_packet(builder, 9, wire::CreateRemove(builder, name));
    const std::string text = "the name";
    const auto at = std::search(packet.begin(), packet.end(), text.begin(), text.end());
    REQUIRE(at != packet.end());
    const size_t length_at = static_cast<size_t>(at - packet.begin()) - 4;
    for (const uint32_t length : {uint32_t{0xffffffff}, static_cast<uint32_t>(packet.size())}) {
      bad.push_back(packet);
      std::memcpy(bad.back().data() + length_at, &length, sizeof length);
    }
  }
  for (const std::vector<uint8_t>& bytes : bad) {
    RawClient client(daemon.socket_path());
    client.send_bytes(bytes);
    CHECK(client.is_closed_by_daemon());
    CHECK(client.last_error() == POLYKV_ERR_PROTOCOL);
  }
  CHECK(bystander.status().code() == POLYKV_OK);
}

TEST_CASE("a packet of no bytes ends the connection") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  REQUIRE(send(client.socket(), "", 0, 0) == 0);
  CHECK(client.is_closed_by_daemon());
  CHECK(serves(daemon));
}

TEST_CASE("a packet longer than the protocol allows ends the connection") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  const std::vector<uint8_t> bytes(kMaxPacketBytes + 1);
  REQUIRE(send(client.socket(), bytes.data(), bytes.size(), 0) > 0);
  CHECK(client.is_closed_by_daemon());
  CHECK(client.last_error() == POLYKV_ERR_PROTOCOL);
  CHECK(serves(daemon));
}

TEST_CASE("descriptors that do not belong to a message are closed, and the connection with them") {
  DaemonProcess daemon;
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  RawClient bystander(daemon.socket_path());
  const size_t before = daemon.open_descriptor_count();
  {
    RawClient client(daemon.socket_path());
    client.send_bytes(list_packet(), {file.get()});
    CHECK(client.is_closed_by_daemon());
    CHECK(client.last_error() == POLYKV_ERR_PROTOCOL);
  }
  {
    RawClient client(daemon.socket_path());
    client.send_bytes(list_packet(), std::vector<int>(kMaxPacketFds, file.get()));
    CHECK(client.is_closed_by_daemon());
  }
  {
    // An acquire that announces tokens and brings none.
    RawClient client(daemon.socket_path());
    flatbuffers::FlatBufferBuilder builder;
    wire::AcquireBuilder acquire(builder);
    acquire.add_token_count(5);
    client.send(builder, acquire.Finish());
    CHECK(client.is_closed_by_daemon());
  }
  CHECK(bystander.status().code() == POLYKV_OK);
  CHECK(daemon.open_descriptor_count() <= before);
}

TEST_CASE("more descriptors than the protocol allows end the connection and are all closed") {
  DaemonProcess daemon;
  RawClient bystander(daemon.socket_path());
  const size_t before = daemon.open_descriptor_count();
  RawClient client(daemon.socket_path());
  const UniqueFd file(open("/dev/null", O_RDONLY | O_CLOEXEC));
  std::vector<uint8_t> bytes = list_packet();
  const std::vector<int> fds(kMaxPacketFds + 1, file.get());
  std::vector<uint8_t> control(CMSG_SPACE(sizeof(int) * fds.size()));
  iovec part{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  cmsghdr* header = CMSG_FIRSTHDR(&message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int) * fds.size());
  std::memcpy(CMSG_DATA(header), fds.data(), sizeof(int) * fds.size());
  REQUIRE(sendmsg(client.socket(), &message, 0) > 0);
  CHECK(client.is_closed_by_daemon());
  CHECK(client.last_error() == POLYKV_ERR_PROTOCOL);
  CHECK(bystander.status().code() == POLYKV_OK);
  CHECK(daemon.open_descriptor_count() <= before);
}

TEST_CASE("an unknown message is answered with both versions") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  flatbuffers::FlatBufferBuilder builder;
  const auto body = wire::CreateList(builder, 0);
  builder.Finish(wire::CreatePacket(builder, 9, static_cast<wire::Body>(200), body.Union()));
  client.send_bytes({builder.GetBufferPointer(), builder.GetBufferPointer() + builder.GetSize()});
  const Reply reply = client.receive();
  CHECK(reply.code() == POLYKV_ERR_VERSION);
  CHECK(reply.message().find("message type 200") != std::string::npos);
  CHECK(reply.message().find("this is polykvd") != std::string::npos);
  CHECK(reply.message().find(format("you speak protocol %u", kProtocolVersion)) !=
        std::string::npos);
  CHECK(client.is_closed_by_daemon());
}

TEST_CASE("versions that do not overlap are refused with both") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path(), false);
  client.send_hello(99, 98, own_pidfd());
  const Reply reply = client.receive();
  CHECK(reply.code() == POLYKV_ERR_VERSION);
  CHECK(reply.message().find(format("protocol 1 to %u", kProtocolVersion)) != std::string::npos);
  CHECK(reply.message().find("98 to 99") != std::string::npos);
  CHECK(client.is_closed_by_daemon());
  RawClient newer(daemon.socket_path(), false);
  newer.shake_hands(99, 1);
  CHECK(newer.status().code() == POLYKV_OK);
}

TEST_CASE(
    "anything before Hello, a second Hello, and the daemon's own messages end the connection") {
  DaemonProcess daemon;
  RawClient early(daemon.socket_path(), false);
  early.send_bytes(list_packet());
  CHECK(early.is_closed_by_daemon());
  CHECK(early.last_error() == POLYKV_ERR_PROTOCOL);
  RawClient twice(daemon.socket_path());
  twice.send_hello(1, 1, own_pidfd());
  CHECK(twice.is_closed_by_daemon());
  RawClient role(daemon.socket_path());
  flatbuffers::FlatBufferBuilder builder;
  role.send(builder, wire::CreateDone(builder));
  CHECK(role.is_closed_by_daemon());
  CHECK(role.last_error() == POLYKV_ERR_PROTOCOL);
  RawClient worker_only(daemon.socket_path());
  builder.Clear();
  worker_only.send(builder, wire::CreateJobDone(builder));
  CHECK(worker_only.is_closed_by_daemon());
  RawClient anonymous(daemon.socket_path());
  anonymous.send_bytes(list_packet(0));
  CHECK(anonymous.is_closed_by_daemon());
}

TEST_CASE("a client that never says Hello is dropped at the handshake deadline") {
  DaemonProcess daemon({"--handshake-deadline", "50ms"});
  RawClient silent(daemon.socket_path(), false);
  CHECK(silent.is_closed_by_daemon());
  CHECK(silent.last_error() == POLYKV_ERR_TIMEOUT);
}

TEST_CASE("a client that does not read its replies is dropped, others are served") {
  DaemonProcess daemon({"--output-queue-packets", "8"});
  RawClient deaf(daemon.socket_path());
  bool was_dropped = false;
  for (int i = 0; i < 100'000 && !was_dropped; ++i) {
    const auto sent = packet_send(deaf.socket(), list_packet());
    REQUIRE_OK(sent);
    was_dropped = *sent == SocketResult::closed;
  }
  CHECK(was_dropped);
  CHECK(serves(daemon));
}

TEST_CASE("a stopped client delays nobody, and its queue is bounded") {
  DaemonProcess daemon({"--output-queue-packets", "8"});
  const TestDocument document = document_number(1, 1200);
  RawClient producer(daemon.socket_path());
  const wire::Handle ticket = producer.become_producer(document, "text");
  ChildProcess stopped([&](const Channel& parent) {
    RawClient client(daemon.socket_path());
    AcquireFields waiting;
    waiting.wait = true;
    // Each lease is five packets: the first 64 of 75 segments, since it acknowledges none.
    for (int i = 0; i < 64; ++i) client.send_acquire(waiting, &document);
    // Answered in order: the requests before it are known to be waiting.
    AcquireFields unknown;
    unknown.name = "unknown";
    (void)client.acquire(unknown);
    parent.say("waiting");
    parent.hear();
    if (!client.is_closed_by_daemon()) throw std::runtime_error("it was not dropped");
  });
  REQUIRE(stopped.hear() == "waiting");
  stopped.signal(SIGSTOP);
  for (uint64_t first = 0; first < 1200; first += 16) {
    const uint64_t count = 16;
    const Reply reserved = producer.reserve(ticket, first, count);
    RawClient::fill(reserved, document, first, count);
    CHECK(producer.commit(*reserved.as<wire::SegmentReserved>().segment()).code() == POLYKV_OK);
  }
  RawClient reader(daemon.socket_path());
  CHECK(reader.lease("text").fds.size() == 75);
  const Reply status = reader.status();
  CHECK(status.as<wire::StatusReply>().session_count() == 2);
  CHECK(status.as<wire::StatusReply>().lease_count() == 1);
  stopped.signal(SIGCONT);
  stopped.say("go on");
  CHECK(stopped.succeeds());
}

TEST_CASE("segments travel a bounded number ahead of the acknowledgements") {
  DaemonProcess daemon;
  const TestDocument document = document_number(1, 2000);
  RawClient client(daemon.socket_path());
  client.publish(document, "text", 16);
  AcquireFields by_name;
  by_name.name = "text";
  const uint64_t id = client.send_acquire(by_name);
  const Reply granted = client.receive(id);
  CHECK(granted.as<wire::LeaseGranted>().segment_count() == 125);
  for (int i = 0; i < 4; ++i)
    CHECK(client.receive(id).as<wire::LeaseSegments>().segments()->size() == 16);
  CHECK(client.status().code() == POLYKV_OK);  // and nothing before it
  client.acknowledge(*granted.as<wire::LeaseGranted>().lease(), 16);
  const Reply next = client.receive(id);
  CHECK(next.as<wire::LeaseSegments>().first_index() == 64);
  CHECK(next.received.fds.size() == 16);
  client.acknowledge(*granted.as<wire::LeaseGranted>().lease(), 1000);
  CHECK(client.is_closed_by_daemon());
  CHECK(client.last_error() == POLYKV_ERR_PROTOCOL);
}

TEST_CASE("connections of one user are limited") {
  DaemonProcess daemon({"--connections-per-user", "3"});
  RawClient first(daemon.socket_path());
  RawClient second(daemon.socket_path());
  RawClient third(daemon.socket_path());
  {
    RawClient fourth(daemon.socket_path(), false);
    CHECK(fourth.is_closed_by_daemon());
    CHECK(fourth.last_error() == POLYKV_ERR_LIMIT);
  }
  third.close();
  CHECK(first.status().code() == POLYKV_OK);  // by then the daemon has seen the hang-up
  CHECK(serves(daemon));
}

// Not under the sanitizers: their run-time check of object types opens a pipe, and ends the process when there is none.
#ifndef __SANITIZE_ADDRESS__
TEST_CASE(
    "without a descriptor left a connection is shed with a reason, and later ones are served") {
  DaemonProcess daemon;
  RawClient client(daemon.socket_path());
  rlimit old{};
  REQUIRE(prlimit(daemon.pid(), RLIMIT_NOFILE, nullptr, &old) == 0);
  const rlimit tight{static_cast<rlim_t>(daemon.lowest_free_descriptor()), old.rlim_max};
  REQUIRE(prlimit(daemon.pid(), RLIMIT_NOFILE, &tight, nullptr) == 0);
  for (int i = 0; i < 3; ++i) {
    RawClient shed(daemon.socket_path(), false);
    CHECK(shed.is_closed_by_daemon());
    CHECK(shed.last_error() == POLYKV_ERR_LIMIT);
  }
  INFO(daemon.log());
  CHECK(client.status().code() == POLYKV_OK);
  REQUIRE(prlimit(daemon.pid(), RLIMIT_NOFILE, &old, nullptr) == 0);
  CHECK(serves(daemon));
}
#endif

TEST_CASE("listings are paged") {
  DaemonProcess daemon({"--list-page-documents", "3"});
  RawClient client(daemon.socket_path());
  for (uint32_t i = 0; i < 7; ++i)
    client.publish(document_number(i, 20), "text " + std::to_string(i));
  std::vector<std::string> names;
  uint64_t cursor = 0;
  int pages = 0;
  do {
    const Reply page = client.list(cursor);
    for (const wire::DocumentInfo* info : *page.as<wire::Listing>().documents())
      names.push_back(info->names()->Get(0)->str());
    cursor = page.as<wire::Listing>().next_cursor();
    ++pages;
  } while (cursor != 0);
  CHECK(pages == 3);
  REQUIRE(names.size() == 7);
  for (uint32_t i = 0; i < 7; ++i) CHECK(names[i] == "text " + std::to_string(i));
}
