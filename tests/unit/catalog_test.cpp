// The catalog, the accounting of segments and the handles, without sockets.
#include <catch2/catch.hpp>

#include "daemon/documents.h"
#include "daemon/handles.h"
#include "daemon/message_rules.h"

using namespace polykv;
using namespace polykv::daemon;

namespace {

constexpr size_t kNamesMax = 4;

struct Fixture {
  Segments segments;
  Catalog catalog{segments};

  /// A sealed document of one segment of 100 bytes.
  std::shared_ptr<Document> add(uint8_t number, Domain domain = 1000,
                                Profile profile = Profile::k8v8) {
    auto document = std::make_shared<Document>();
    document->serial = catalog.next_serial();
    document->key = {domain, Digest{number}, profile};
    document->tokens = std::make_shared<const std::vector<uint32_t>>(3, number);
    auto segment = segments.reserve(0, 3, 100);
    segments.fill(*segment, nullptr);
    segments.seal(*segment, UniqueFd());
    document->segments.push_back(segment);
    catalog.add(document);
    return document;
  }
};

Selector named(const std::string& name) {
  Selector selector;
  selector.name = name;
  return selector;
}

Selector digest_of(uint8_t number, Profile profile = Profile::any) {
  Selector selector;
  selector.digest = Digest{number};
  selector.profile = profile;
  return selector;
}

}  // namespace

TEST_CASE("a document is found in its own domain only") {
  Fixture f;
  const auto document = f.add(1, 1000);
  CHECK(f.catalog.find(1000, digest_of(1)) == document);
  CHECK(f.catalog.find(1001, digest_of(1)) == nullptr);
  CHECK(f.catalog.find(kPublicDomain, digest_of(1)) == nullptr);
  REQUIRE(f.catalog.give_name(*document, "text", false, kNamesMax).is_ok());
  CHECK(f.catalog.find(1000, named("text")) == document);
  CHECK(f.catalog.find(1001, named("text")) == nullptr);
}

TEST_CASE("profiles of one digest are different documents, and any finds whichever is there") {
  Fixture f;
  const auto exact = f.add(1, 1000, Profile::exact);
  const auto k8v8 = f.add(1, 1000, Profile::k8v8);
  CHECK(f.catalog.find(1000, digest_of(1, Profile::k8v8)) == k8v8);
  CHECK(f.catalog.find(1000, digest_of(1, Profile::exact)) == exact);
  CHECK(f.catalog.find(1000, digest_of(1)) != nullptr);
  CHECK(f.catalog.find(1000, digest_of(1, Profile::k4v3)) == nullptr);
  CHECK(f.catalog.find_all(1000, Digest{1}).size() == 2);
}

TEST_CASE("an equal digest with other tokens is no hit") {
  Fixture f;
  f.add(1);
  Selector selector = digest_of(1);
  selector.tokens = std::make_shared<const std::vector<uint32_t>>(3, 1);
  CHECK(f.catalog.find(1000, selector) != nullptr);
  selector.tokens = std::make_shared<const std::vector<uint32_t>>(3, 2);
  CHECK(f.catalog.find(1000, selector) == nullptr);
}

TEST_CASE("a name of another document is taken only with replace, which retires a nameless one") {
  Fixture f;
  const auto old = f.add(1);
  const auto fresh = f.add(2);
  REQUIRE(f.catalog.give_name(*old, "text", false, kNamesMax).is_ok());
  CHECK(f.catalog.give_name(*old, "text", false, kNamesMax).is_ok());
  CHECK(f.catalog.give_name(*fresh, "text", false, kNamesMax).code() == POLYKV_ERR_ALREADY_EXISTS);
  REQUIRE(f.catalog.give_name(*fresh, "text", true, kNamesMax).is_ok());
  CHECK(f.catalog.find(1000, named("text")) == fresh);
  CHECK(old->state == DocumentState::retiring);
  CHECK(f.catalog.find(1000, digest_of(1)) == nullptr);
}

TEST_CASE("a document has a bounded number of names and retires with the last") {
  Fixture f;
  const auto document = f.add(1);
  for (const char* name : {"a", "b", "c", "d"})
    REQUIRE(f.catalog.give_name(*document, name, false, kNamesMax).is_ok());
  CHECK(f.catalog.give_name(*document, "e", false, kNamesMax).code() == POLYKV_ERR_LIMIT);
  for (const char* name : {"a", "b", "c"}) f.catalog.take_name(*document, name);
  CHECK(document->state == DocumentState::sealed);
  f.catalog.take_name(*document, "d");
  CHECK(document->state == DocumentState::retiring);
}

TEST_CASE("a retired document is listed until its last lease ends") {
  Fixture f;
  const auto document = f.add(1);
  f.catalog.lease(*document);
  f.catalog.retire(*document);
  CHECK(f.catalog.listed().size() == 1);
  f.catalog.end_lease(*document);
  CHECK(f.catalog.listed().empty());
}

TEST_CASE("a retired segment stays charged until every process has let go of it") {
  Fixture f;
  const auto document = f.add(1);
  Process first;
  Process second;
  f.segments.hold(first, document->segments[0]);
  f.segments.hold(first, document->segments[0]);
  f.segments.hold(second, document->segments[0]);
  CHECK(f.segments.stored_bytes() == 100);
  f.catalog.retire(*document);
  CHECK(f.segments.stored_bytes() == 0);
  CHECK(f.segments.retiring_bytes() == 100);
  f.segments.release(first, *document->segments[0]);
  f.segments.release_all(second);
  CHECK(f.segments.retiring_bytes() == 100);
  f.segments.release(first, *document->segments[0]);
  CHECK(f.segments.charged_bytes() == 0);
  CHECK(f.segments.segment_count() == 0);
  CHECK(document->segments[0]->state == SegmentState::gone);
}

TEST_CASE("a reservation given back before its memory came leaves no charge") {
  Segments segments;
  const auto segment = segments.reserve(0, 3, 100);
  CHECK(segments.unallocated_bytes() == 100);
  segments.retire(*segment);
  CHECK(segments.unallocated_bytes() == 0);
  CHECK(segments.charged_bytes() == 0);
}

TEST_CASE("eviction sees leases, holders and the order of use") {
  Fixture f;
  const auto oldest = f.add(1);
  const auto leased = f.add(2);
  const auto held = f.add(3);
  f.catalog.lease(*leased);
  Process process;
  f.segments.hold(process, held->segments[0]);
  f.catalog.lease(*oldest);
  f.catalog.end_lease(*oldest);  // used last
  const auto candidates = f.catalog.eviction_candidates();
  REQUIRE(candidates.size() == 3);
  for (const EvictionCandidate& candidate : candidates) {
    CHECK(candidate.is_leased == (candidate.document == leased->serial));
    CHECK(candidate.freeable_bytes == (candidate.document == held->serial ? 0U : 100U));
    CHECK(candidate.freeable_segments == (candidate.document == held->serial ? 0U : 1U));
    if (candidate.document != oldest->serial) CHECK(candidate.last_use < oldest->last_use);
  }
  f.segments.release_all(process);
}

TEST_CASE("a handle finds its object and nothing else") {
  HandleTable<int> leases(HandleKind::lease, 77);
  HandleTable<int> tickets(HandleKind::ticket, 77);
  const Handle handle = leases.insert(std::make_shared<int>(5));
  tickets.insert(std::make_shared<int>(6));
  REQUIRE(leases.find(handle) != nullptr);
  CHECK(*leases.find(handle) == 5);
  CHECK(tickets.find(handle) == nullptr);
  CHECK(leases.find({78, handle.slot, handle.generation}) == nullptr);
  CHECK(leases.find({77, handle.slot, handle.generation + 1}) == nullptr);
  CHECK(leases.find({77, handle.slot + 1, 1}) == nullptr);
  CHECK(leases.find({}) == nullptr);
}

TEST_CASE("a slot that is used again does not answer to the old handle") {
  HandleTable<int> table(HandleKind::lease, 77);
  const Handle old = table.insert(std::make_shared<int>(5));
  table.erase(old);
  const Handle fresh = table.insert(std::make_shared<int>(6));
  CHECK(fresh.slot == old.slot);
  CHECK(table.find(old) == nullptr);
  CHECK(*table.find(fresh) == 6);
  CHECK(table.stale("release", old).code() == POLYKV_ERR_STALE);
  CHECK(table.live_count() == 1);
}

TEST_CASE("messages are for their sender only, with a request id and their descriptors") {
  const auto check = [](auto make, uint64_t id, SessionKind sender, size_t fd_count) {
    flatbuffers::FlatBufferBuilder builder;
    const auto bytes = make_packet(builder, id, make(builder));
    return check_message(*wire::GetPacket(bytes.data()), sender, fd_count).code();
  };
  const auto list = [](auto& builder) { return wire::CreateList(builder); };
  CHECK(check(list, 1, SessionKind::client, 0) == POLYKV_OK);
  CHECK(check(list, 0, SessionKind::client, 0) == POLYKV_ERR_PROTOCOL);
  CHECK(check(list, 1, SessionKind::client, 1) == POLYKV_ERR_PROTOCOL);
  CHECK(check(list, 1, SessionKind::worker, 0) == POLYKV_ERR_PROTOCOL);
  const auto acquire = [](auto& builder) {
    wire::AcquireBuilder acquire_builder(builder);
    acquire_builder.add_has_model_fd(true);
    acquire_builder.add_token_count(5);
    return acquire_builder.Finish();
  };
  CHECK(check(acquire, 1, SessionKind::client, 2) == POLYKV_OK);
  CHECK(check(acquire, 1, SessionKind::worker, 2) == POLYKV_OK);
  CHECK(check(acquire, 1, SessionKind::client, 1) == POLYKV_ERR_PROTOCOL);
  const auto job_done = [](auto& builder) { return wire::CreateJobDone(builder); };
  CHECK(check(job_done, 0, SessionKind::worker, 0) == POLYKV_OK);
  CHECK(check(job_done, 1, SessionKind::client, 0) == POLYKV_ERR_PROTOCOL);
  const auto welcome = [](auto& builder) { return wire::CreateWelcome(builder); };
  CHECK(check(welcome, 1, SessionKind::client, 0) == POLYKV_ERR_PROTOCOL);
}
