// What the library accepts as a lease, and how it answers bad ones, against a scripted daemon.
#include "libclient/lease.h"

#include <fcntl.h>
#include <unistd.h>

#include <catch2/catch.hpp>

#include "common/digest.h"
#include "common/memfd.h"
#include "libclient/acquire.h"
#include "tests/support/fake_daemon.h"
#include "tests/support/require_ok.h"
#include "tests/support/segments.h"

using namespace polykv;
using namespace polykv::lib;
using namespace polykv::test;

namespace {

const ModelIdentity kModel = test_model({{2, 16, 16, 0}});
constexpr uint64_t kTokens = 300;
constexpr uint64_t kFirstTokens = 256;  // of the first of two segments

std::vector<uint32_t> ids_from(uint64_t first, uint64_t count) {
  const std::vector<uint32_t> all = test_ids(kTokens);
  return {all.begin() + static_cast<ptrdiff_t>(first),
          all.begin() + static_cast<ptrdiff_t>(first + count)};
}

std::vector<uint8_t> segment_bytes(uint64_t first, uint64_t count, const ModelIdentity& model,
                                   uint32_t token_offset = 0) {
  SegmentSpec spec = test_spec(model, Profile::k8v8, count);
  spec.first_token = first;
  spec.digest_count = segment_digest_count(first, count, first + count == kTokens);
  std::vector<uint8_t> bytes(*segment_size_bytes(spec) + 64);
  AlignedBytes aligned(*segment_size_bytes(spec));
  std::vector<uint32_t> ids = ids_from(first, count);
  for (uint32_t& id : ids) id += token_offset;
  const std::vector<Digest> digests(spec.digest_count);
  const SegmentContents contents{ids, chain_root(model), digests, PrefixTreatment::none};
  SegmentWriter writer = std::move(SegmentWriter::create(spec, contents, aligned.span())).value();
  REQUIRE_OK(writer.encode_layer(0, random_values(model.layers[0], count, 1).source()));
  REQUIRE_OK(writer.finish());
  return {aligned.span().begin(), aligned.span().end()};
}

UniqueFd memfd_of(const std::vector<uint8_t>& bytes, int seals) {
  auto fd = memfd_create_sealable("test");
  REQUIRE_OK(fd);
  REQUIRE(::write(fd->get(), bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
  REQUIRE(::fcntl(fd->get(), F_ADD_SEALS, seals) == 0);
  return std::move(*fd);
}

/// What the daemon says about a document of two segments; tests break one thing.
struct Offer {
  ModelIdentity model = kModel;
  Digest digest = chain_digests(chain_root(kModel), test_ids(kTokens)).back();
  Profile profile = Profile::k8v8;
  uint64_t token_count = kTokens;
  uint32_t segment_count = 2;
  int seals = F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW;
  std::vector<std::vector<uint8_t>> segments = {segment_bytes(0, kFirstTokens, kModel),
                                                segment_bytes(256, 44, kModel)};
  std::vector<wire::SegmentInfo> infos = {{0, kFirstTokens, segments[0].size()},
                                          {256, 44, segments[1].size()}};
  uint32_t first_index = 0;
};

void send_offer(FakeDaemon& daemon, uint64_t id, const Offer& offer) {
  const wire::Handle handle(42, 1, 1);
  flatbuffers::FlatBufferBuilder builder;
  const auto model = to_wire(builder, offer.model);
  const wire::Digest digest = to_wire(offer.digest);
  wire::DocumentInfoBuilder info(builder);
  info.add_digest(&digest);
  info.add_model(model);
  info.add_profile(static_cast<uint32_t>(offer.profile));
  info.add_token_count(offer.token_count);
  info.add_segment_count(offer.segment_count);
  const auto document = info.Finish();
  daemon.send(builder, id,
              wire::CreateLeaseGranted(builder, &handle, document, offer.segment_count));
  std::vector<UniqueFd> owners;
  std::vector<int> fds;
  for (const auto& bytes : offer.segments) {
    owners.push_back(memfd_of(bytes, offer.seals));
    fds.push_back(owners.back().get());
  }
  flatbuffers::FlatBufferBuilder event;
  const auto infos = event.CreateVectorOfStructs(offer.infos);
  daemon.send(event, id, wire::CreateLeaseSegments(event, &handle, offer.first_index, infos), fds);
}

struct Outcome {
  Status status;
  std::unique_ptr<Lease> lease;
  bool was_released = false;
  uint32_t acknowledged = 0;
};

Outcome acquire_offer(const Offer& offer) {
  FakeDaemon daemon;
  const auto session = daemon.connect();
  Outcome outcome;
  std::thread peer([&] {
    const Request asked = daemon.receive();
    if (asked.packet == nullptr) return;
    send_offer(daemon, asked.id(), offer);
    for (Request next = daemon.receive(); next.packet != nullptr; next = daemon.receive()) {
      if (const auto* ack = next.packet->body_as_SegmentAck()) {
        outcome.acknowledged = ack->received_count();
      }
      if (next.packet->body_as_Release() == nullptr) continue;
      outcome.was_released = true;
      daemon.send_done(next.id());
    }
  });
  AcquireRequest request;
  request.name = "a";
  Result<Acquired> acquired = acquire(session, request);
  outcome.status = acquired.status();
  if (acquired.is_ok()) outcome.lease = std::move(acquired->lease);
  session->close();
  peer.join();
  return outcome;
}

}  // namespace

TEST_CASE("a whole document is mapped, acknowledged and readable") {
  const Outcome outcome = acquire_offer({});
  INFO(outcome.status.message());
  REQUIRE(outcome.lease != nullptr);
  CHECK(outcome.acknowledged == 2);
  CHECK(!outcome.was_released);
  std::vector<uint32_t> ids(kTokens);
  REQUIRE_OK(outcome.lease->copy_tokens(0, kTokens, ids.data()));
  CHECK(ids == test_ids(kTokens));
  CHECK_OK(outcome.lease->verify());
}

TEST_CASE("a document may use the beginning of a segment") {
  Offer offer;
  offer.token_count = 100;
  offer.segment_count = 1;
  offer.segments.pop_back();
  offer.infos = {{0, 100, offer.segments[0].size()}};
  offer.digest = chain_digests(chain_root(kModel), ids_from(0, 100)).back();
  const Outcome outcome = acquire_offer(offer);
  INFO(outcome.status.message());
  REQUIRE(outcome.lease != nullptr);
  DecodeRequest request;
  request.token_count = 100;
  CHECK_OK(outcome.lease->decode(0, request));
  request.token_count = 101;
  CHECK(outcome.lease->decode(0, request).code() == POLYKV_ERR_INVALID_ARGUMENT);
}

TEST_CASE("a segment or document that is not what it should be is refused and given back") {
  Offer offer;
  polykv_status code = POLYKV_ERR_CORRUPT;
  std::string with;
  SECTION("not sealed against writing") {
    offer.seals = F_SEAL_SHRINK | F_SEAL_GROW;
    with = "sealed";
  }
  SECTION("not sealed against shrinking, which would be SIGBUS") {
    offer.seals = F_SEAL_WRITE | F_SEAL_GROW;
    with = "sealed";
  }
  SECTION("another size than announced") {
    offer.infos[1] = {256, 44, offer.segments[1].size() - 4096};
    with = "announced";
  }
  SECTION("bytes that are no segment") {
    std::fill(offer.segments[0].begin(), offer.segments[0].begin() + 8, uint8_t{0});
    with = "segment 0";
  }
  SECTION("a gap between segments") {
    offer.infos[0] = {0, 200, offer.segments[0].size()};
    with = "200 was next";
  }
  SECTION("more tokens than the segment has") {
    offer.infos[1] = {256, 45, offer.segments[1].size()};
    with = "45 of its 44";
  }
  SECTION("another model's segment") {
    ModelIdentity other = kModel;
    other.fingerprint[5] ^= 1;
    offer.segments[1] = segment_bytes(256, 44, other);
    with = "model";
  }
  SECTION("another profile than the document's") {
    offer.profile = Profile::exact;
    with = "profile";
  }
  SECTION("other token ids than the digest's") {
    offer.segments[1] = segment_bytes(256, 44, kModel, 1);
    with = "token ids";
  }
  SECTION("fewer tokens than the document has") {
    offer.segment_count = 1;
    offer.segments.pop_back();
    offer.infos.pop_back();
    with = "add up";
  }
  SECTION("segments that come out of order") {
    offer.first_index = 1;
    code = POLYKV_ERR_PROTOCOL;
    with = "from 1 on";
  }
  SECTION("more segments than were promised") {
    offer.segment_count = 1;
    code = POLYKV_ERR_PROTOCOL;
    with = "2 segments";
  }
  SECTION("an impossible model") {
    offer.model.layers[0].k_head_dim = 0;
    code = POLYKV_ERR_PROTOCOL;
    with = "head_dim";
  }
  const Outcome outcome = acquire_offer(offer);
  INFO(outcome.status.message());
  CHECK(outcome.lease == nullptr);
  CHECK(outcome.status.code() == code);
  CHECK(outcome.status.message().find(with) != std::string::npos);
  CHECK(outcome.was_released);
}
