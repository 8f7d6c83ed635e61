// A publisher that has queries: certificates, `auto` documents, and what is refused.
#include <catch2/catch.hpp>
#include <limits>

#include "tests/support/daemon_process.h"
#include "tests/support/require_ok.h"
#include "tests/support/synthetic_document.h"

using namespace polykv;
using namespace polykv::test;

namespace {

bool contains(const std::string& text, const std::string& part) {
  INFO(text);
  return text.find(part) != std::string::npos;
}

void publish_examined(const SyntheticDocument& document, client::Publisher& publisher,
                      uint64_t token_count) {
  REQUIRE_OK(document.examine_all(publisher, token_count));
  document.publish_segment(publisher, token_count);
}

}  // namespace

TEST_CASE("a publisher's queries become certificates, the worst of all segments") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(900);
  document.profile = POLYKV_PROFILE_K5V4;
  client::Publisher publisher = document.become_producer(session, "judged");
  document.publish_segment(publisher, 300);
  publish_examined(document, publisher, 300);
  publish_examined(document, publisher, 300);
  auto lease = publisher.finish_with_lease();
  REQUIRE_OK(lease);
  REQUIRE_OK(lease->verify());
  const client::DocumentInfo info = lease->info();
  for (uint32_t i = 0; i < 2; ++i) {
    CHECK(info.layers[i].profiles == 1U << POLYKV_PROFILE_K5V4);
    CHECK(info.layers[i].query_count == 2);
    CHECK(info.layers[i].relative_error > 0.001);
    CHECK(info.layers[i].relative_error < 1);
  }
  CHECK(document.worst_error(*lease) < 0.6);
}

TEST_CASE("an auto document's layers have profiles of their own, and it is found as auto") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(700);
  document.layers = {{1, 64, 64, 0}, {1, 20, 6, 0}};  // the second one cannot be rotated
  document.profile = POLYKV_PROFILE_AUTO;
  {
    client::Publisher publisher = document.become_producer(session, "mixed");
    publish_examined(document, publisher, 400);
    publish_examined(document, publisher, 300);
    REQUIRE_OK(publisher.finish());
  }
  auto lease = session.acquire("mixed", POLYKV_PROFILE_AUTO);
  REQUIRE_OK(lease);
  CHECK(lease->info().profile == POLYKV_PROFILE_AUTO);
  CHECK(lease->info().layers[1].profiles == 1U << POLYKV_PROFILE_K8V8);
  for (uint32_t segment = 0; segment < 2; ++segment) {
    auto view = lease->layer_view(segment, 1);
    REQUIRE_OK(view);
    CHECK(view->profile == POLYKV_PROFILE_K8V8);
    CHECK((lease->info().layers[0].profiles >> lease->layer_view(segment, 0)->profile & 1) == 1);
  }
  CHECK(document.worst_error(*lease) < 0.6);
  CHECK(session.acquire("mixed", POLYKV_PROFILE_K5V4).ok() == false);

  SECTION("a document that continues it shares its segments") {
    SyntheticDocument longer = document;
    for (uint32_t i = 0; i < 100; ++i) longer.tokens.push_back(i);
    client::Publisher publisher = longer.become_producer(session, "longer");
    CHECK(publisher.next_token() == 512);
    publish_examined(longer, publisher, longer.tokens.size() - 512);
    auto both = publisher.finish_with_lease();
    REQUIRE_OK(both);
    CHECK(both->info().shared_bytes > 0);
  }
}

TEST_CASE("what was not examined, or for another segment, is refused and can be done again") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(600);
  document.profile = POLYKV_PROFILE_AUTO;
  client::Publisher publisher = document.become_producer(session);
  auto segment = publisher.begin_segment(600);
  REQUIRE(!segment.ok());
  CHECK(segment.error().status == POLYKV_ERR_INVALID_ARGUMENT);
  CHECK(contains(segment.error().message, "0 of 2 layers were examined"));

  REQUIRE_OK(document.examine_all(publisher, 300));
  segment = publisher.begin_segment(600);
  REQUIRE(!segment.ok());
  CHECK(contains(segment.error().message, "0 of 2 layers were examined for 600 tokens"));

  publish_examined(document, publisher, 600);
  CHECK_OK(publisher.finish());
}

TEST_CASE("queries that are no numbers or of another shape are refused by layer") {
  const DaemonProcess daemon;
  client::Session session = connect_to(daemon.socket_path());
  SyntheticDocument document(300);
  document.profile = POLYKV_PROFILE_K5V4;
  client::Publisher publisher = document.become_producer(session);
  std::vector<float> k = document.values(false, 0, 0, 300);
  std::vector<float> v = document.values(true, 0, 0, 300);
  std::vector<float> q(size_t{2} * 4 * 64, 0.5F);
  client::KvSource source;
  source.k = k.data();
  source.v = v.data();
  client::LayerQueries queries;
  queries.query_count = 2;
  queries.head_count = 4;
  queries.q = q.data();
  const auto refusal = [&](uint64_t token_count = 300, uint32_t layer = 0) {
    const auto examined = publisher.examine_layer(token_count, layer, source, queries);
    REQUIRE(!examined.ok());
    CHECK(examined.error().status == POLYKV_ERR_INVALID_ARGUMENT);
    return examined.error().message;
  };
  CHECK(contains(refusal(301), "300 are left"));
  CHECK(contains(refusal(300, 2), "the model has 2 layers"));
  queries.head_count = 3;
  CHECK(contains(refusal(), "examine layer 0: judge by queries: 3 heads"));
  queries.head_count = 4;
  queries.query_count = 301;
  CHECK(contains(refusal(), "301 rows"));
  queries.query_count = 2;
  q[64 * 4 + 3] = std::numeric_limits<float>::quiet_NaN();
  CHECK(contains(refusal(), "row 1 of head 0 holds nan"));
  q[64 * 4 + 3] = 0;
  v[5] = std::numeric_limits<float>::infinity();
  CHECK(contains(refusal(), "V of token 0, kv_head 0 is inf"));
  v[5] = 0;
  queries.q = nullptr;
  CHECK(contains(refusal(), "missing"));
  queries.q = q.data();
  source.k = nullptr;
  CHECK(contains(refusal(), "K or V is missing"));
  source.k = k.data();
  CHECK_OK(publisher.examine_layer(300, 0, source, queries));
  // One layer of two.
  const auto segment = publisher.begin_segment(300);
  REQUIRE(!segment.ok());
  CHECK(contains(segment.error().message, "1 of 2 layers"));
}
