// The client's side of ingest and of waiting acquires: callbacks, cancelling, deadlines.
#include <catch2/catch.hpp>
#include <thread>

#include "libclient/acquire.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/require_ok.h"

using namespace polykv;
using namespace polykv::lib;
using polykv::test::FakeDaemon;
using polykv::test::Request;

namespace {

void send_progress(FakeDaemon& daemon, uint64_t id, uint64_t tokens_done) {
  flatbuffers::FlatBufferBuilder builder;
  daemon.send(builder, id,
              wire::CreateIngestProgress(builder, POLYKV_INGEST_PREFILLING, tokens_done, 100, 5));
}

IngestRequest text_request() {
  IngestRequest request;
  request.model_name = "m";
  request.text_fd = 0;
  request.want_lease = false;
  return request;
}

}  // namespace

TEST_CASE("ingest sends what was asked for and calls back on the calling thread") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  const uint32_t tokens[] = {1, 2, 3};
  Request seen;
  std::thread peer([&] {
    seen = daemon.receive();
    send_progress(daemon, seen.id(), 7);
    daemon.send_done(seen.id());
  });
  IngestRequest request;
  request.name = "doc";
  request.model_name = "m";
  request.tokens = tokens;
  request.before_fd = 0;
  request.profile = Profile::exact;
  request.add_bos = true;
  request.chat_head = true;
  request.want_lease = false;
  const auto caller = std::this_thread::get_id();
  std::vector<uint64_t> done;
  bool same_thread = true;
  request.on_progress = [&](const polykv_ingest_progress& progress) {
    same_thread = same_thread && std::this_thread::get_id() == caller;
    CHECK(progress.struct_size == sizeof progress);
    CHECK(progress.memory_bytes == 5);
    done.push_back(progress.tokens_done);
    return true;
  };
  const auto lease = ingest(session, request);
  peer.join();
  REQUIRE_OK(lease);
  CHECK(*lease == nullptr);
  CHECK(done == std::vector<uint64_t>{7});
  CHECK(same_thread);
  const auto* body = seen.as<wire::Ingest>();
  CHECK(body->name()->str() == "doc");
  CHECK(body->model_name()->str() == "m");
  CHECK(body->token_count() == 3);
  CHECK(seen.received.fds.size() == 2);  // the token list and --before
  CHECK(body->profile() == static_cast<uint32_t>(Profile::exact));
  CHECK((body->add_bos() && body->chat_head() && body->has_before_fd()));
  CHECK((!body->parse_special() && !body->has_text_fd() && !body->has_model_fd()));
  CHECK((!body->want_lease() && !body->replace_name() && !body->share_public()));
}

TEST_CASE("a callback that says no cancels the ingest") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  std::thread peer([&] {
    const Request asked = daemon.receive();
    send_progress(daemon, asked.id(), 1);
    const Request cancel = daemon.receive();
    if (cancel.packet->body_as_Cancel()->target_request_id() != asked.id()) return;
    send_progress(daemon, asked.id(), 2);
    daemon.send_done(cancel.id());
    daemon.send_error(asked.id(), POLYKV_ERR_CANCELLED, "ingest: cancelled");
  });
  IngestRequest request = text_request();
  int calls = 0;
  request.on_progress = [&](const polykv_ingest_progress&) { return ++calls, false; };
  CHECK(ingest(session, request).status().code() == POLYKV_ERR_CANCELLED);
  CHECK(calls == 1);
  peer.join();
}

TEST_CASE("a deadline cancels the ingest and is POLYKV_ERR_TIMEOUT") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  std::thread peer([&] {
    const Request asked = daemon.receive();
    const Request cancel = daemon.receive();
    daemon.send_done(cancel.id());
    daemon.send_error(asked.id(), POLYKV_ERR_CANCELLED, "ingest: cancelled");
  });
  IngestRequest request = text_request();
  request.timeout_ms = 10;
  const auto result = ingest(session, request);
  CHECK(result.status().code() == POLYKV_ERR_TIMEOUT);
  CHECK(result.status().message().find("deadline") != std::string::npos);
  peer.join();
}

TEST_CASE("a document that is ready when the cancel arrives is not lost") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  std::thread peer([&] {
    const Request asked = daemon.receive();
    const Request cancel = daemon.receive();
    daemon.send_done(asked.id());
    daemon.send_done(cancel.id());
  });
  IngestRequest request = text_request();
  request.timeout_ms = 10;
  CHECK_OK(ingest(session, request));
  peer.join();
}

TEST_CASE("an ingest that fails has the daemon's code and message") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  std::thread peer([&] {
    const Request asked = daemon.receive();
    daemon.send_error(asked.id(), POLYKV_ERR_CONTEXT_EXCEEDED, "ingest: 9000 tokens; at most 8192");
  });
  const auto result = ingest(session, text_request());
  peer.join();
  CHECK(result.status().code() == POLYKV_ERR_CONTEXT_EXCEEDED);
  CHECK(result.status().message() == "ingest: 9000 tokens; at most 8192");
}

TEST_CASE("a hang-up ends an ingest without a deadline") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  std::thread peer([&] {
    send_progress(daemon, daemon.receive().id(), 1);
    daemon.hang_up();
  });
  CHECK(ingest(session, text_request()).status().code() == POLYKV_ERR_DAEMON_GONE);
  peer.join();
}

TEST_CASE("a ticket that does not fit what was asked for is POLYKV_ERR_PROTOCOL") {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  ModelIdentity model;
  model.layers = {{1, 8, 8, 0}};
  const uint32_t tokens[] = {1, 2, 3};
  std::thread peer([&] {
    const Request asked = daemon.receive();
    const wire::Handle handle(42, 1, 1);
    flatbuffers::FlatBufferBuilder builder;
    const auto wire_model = to_wire(builder, model);
    daemon.send(builder, asked.id(), wire::CreateTicketGranted(builder, &handle, wire_model, 3, 3));
  });
  AcquireRequest request;
  request.model = &model;
  request.tokens = tokens;
  request.profile = Profile::exact;
  request.may_produce = true;
  CHECK(acquire(session, request).status().code() == POLYKV_ERR_PROTOCOL);
  peer.join();
}
