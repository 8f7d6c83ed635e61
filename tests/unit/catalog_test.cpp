// The catalog, the accounting of segments and the handles, without sockets.
#include <catch2/catch.hpp>

#include "daemon/documents.h"
#include "daemon/handles.h"
#include "daemon/message_rules.h"
#include "tests/support/require_ok.h"

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
    catalog.append(*document, segment, {}, false);
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
  REQUIRE_OK(f.catalog.give_name(*document, "text", false, kNamesMax));
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
  REQUIRE_OK(f.catalog.give_name(*old, "text", false, kNamesMax));
  CHECK_OK(f.catalog.give_name(*old, "text", false, kNamesMax));
  CHECK(f.catalog.give_name(*fresh, "text", false, kNamesMax).code() == POLYKV_ERR_ALREADY_EXISTS);
  REQUIRE_OK(f.catalog.give_name(*fresh, "text", true, kNamesMax));
  CHECK(f.catalog.find(1000, named("text")) == fresh);
  CHECK(old->state == DocumentState::retiring);
  CHECK(f.catalog.find(1000, digest_of(1)) == nullptr);
}

TEST_CASE("a document has a bounded number of names and retires with the last") {
  Fixture f;
  const auto document = f.add(1);
  for (const char* name : {"a", "b", "c", "d"})
    REQUIRE_OK(f.catalog.give_name(*document, name, false, kNamesMax));
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
  CHECK(f.catalog.listed_count() == 1);
  f.catalog.end_lease(*document);
  CHECK(f.catalog.listed_count() == 0);
}

TEST_CASE("a listing has a user's own documents and the public ones, in order, page by page") {
  Fixture f;
  const auto one = f.add(1, 1000);
  f.add(2, 1001);
  const auto three = f.add(3, kPublicDomain);
  const auto four = f.add(4, 1000);
  CHECK(f.catalog.list(1000, 0, 10) == std::vector{one, three, four});
  CHECK(f.catalog.list(1000, 0, 2) == std::vector{one, three});
  CHECK(f.catalog.list(1000, three->serial, 2) == std::vector{four});
  CHECK(f.catalog.list(1000, four->serial, 2).empty());
  CHECK(f.catalog.list(1002, 0, 10) == std::vector{three});
}

TEST_CASE("a retired segment stays charged until every process has let go of it") {
  Fixture f;
  const auto document = f.add(1);
  Process first;
  Process second;
  f.segments.hold(first, document->parts[0].segment);
  f.segments.hold(first, document->parts[0].segment);
  f.segments.hold(second, document->parts[0].segment);
  CHECK(f.segments.stored_bytes() == 100);
  f.catalog.retire(*document);
  CHECK(f.segments.stored_bytes() == 0);
  CHECK(f.segments.retiring_bytes() == 100);
  f.segments.release(first, *document->parts[0].segment);
  f.segments.release_all(second);
  CHECK(f.segments.retiring_bytes() == 100);
  f.segments.release(first, *document->parts[0].segment);
  CHECK(f.segments.charged_bytes() == 0);
  CHECK(f.segments.segment_count() == 0);
  CHECK(document->parts[0].segment->state == SegmentState::gone);
}

TEST_CASE("a reservation given back before its memory came leaves no charge") {
  Segments segments;
  const auto segment = segments.reserve(0, 3, 100);
  CHECK(segments.unallocated_bytes() == 100);
  segments.retire(*segment);
  CHECK(segments.unallocated_bytes() == 0);
  CHECK(segments.charged_bytes() == 0);
}

TEST_CASE("eviction takes the least recently used, and no more than is needed") {
  Fixture f;
  const auto first = f.add(1);
  const auto second = f.add(2);
  const auto third = f.add(3);
  f.catalog.lease(*first);
  f.catalog.end_lease(*first);  // used last
  const auto one = f.catalog.choose_evictions({50, 0});
  CHECK(one.documents == std::vector{second});
  CHECK(one.freed.bytes == 100);
  const auto two = f.catalog.choose_evictions({101, 0});
  CHECK(two.documents == std::vector{second, third});
  CHECK(f.catalog.choose_evictions({0, 2}).documents == std::vector{second, third});
  const auto all = f.catalog.choose_evictions({301, 0});
  CHECK(all.freed.bytes == 300);
  CHECK_FALSE(all.freed.covers({301, 0}));
}

TEST_CASE("a leased document is never evicted, and one that others hold or use is not worth it") {
  Fixture f;
  const auto leased = f.add(1);
  const auto held = f.add(2);
  const auto shared = f.add(3);
  const auto sharing = std::make_shared<Document>();
  sharing->serial = f.catalog.next_serial();
  sharing->key = {1000, Digest{4}, Profile::k8v8};
  sharing->tokens = shared->tokens;
  Catalog::start_with(*sharing, shared->parts);
  f.catalog.add(sharing);
  const auto last = f.add(5);
  f.catalog.lease(*leased);
  Process process;
  f.segments.hold(process, held->parts[0].segment);
  CHECK(f.catalog.choose_evictions({100, 1}).documents == std::vector{shared, sharing});
  f.catalog.lease(*sharing);
  CHECK(f.catalog.choose_evictions({100, 1}).documents == std::vector{last});
  CHECK(f.catalog.choose_evictions({200, 1}).freed.bytes == 100);
  CHECK(shared->shared_bytes() == 100);
  f.catalog.retire(*shared);
  CHECK(f.segments.stored_bytes() == 400);
  CHECK(sharing->shared_bytes() == 0);
  f.catalog.end_lease(*sharing);
  f.catalog.retire(*sharing);
  CHECK(f.segments.stored_bytes() == 300);
  f.segments.release_all(process);
}

TEST_CASE("an incomplete document is kept, continued, evicted and removed") {
  Fixture f;
  const auto document = std::make_shared<Document>();
  document->serial = f.catalog.next_serial();
  document->key = {1000, Digest{1}, Profile::k8v8};
  document->tokens = std::make_shared<const std::vector<uint32_t>>(6, 1);
  auto segment = f.segments.reserve(0, 3, 100);
  f.segments.fill(*segment, nullptr);
  f.segments.seal(*segment, UniqueFd());
  f.catalog.append(*document, segment, {}, false);
  f.catalog.keep_incomplete(document);
  CHECK(f.catalog.find(1000, digest_of(1)) == nullptr);
  CHECK(f.catalog.find_incomplete(1000, digest_of(1)) == document);
  CHECK(f.catalog.find_incomplete(1001, digest_of(1)) == nullptr);
  CHECK(f.catalog.listed_count() == 1);
  CHECK(f.catalog.choose_evictions({100, 0}).documents == std::vector{document});
  SECTION("continued") {
    CHECK(f.catalog.take_incomplete(document->key) == document);
    CHECK(f.catalog.take_incomplete(document->key) == nullptr);
    CHECK(f.catalog.listed_count() == 0);
    CHECK(f.catalog.choose_evictions({100, 0}).documents.empty());
    CHECK(document->end_token() == 3);
    f.catalog.drop(*document);
  }
  SECTION("removed") {
    f.catalog.retire(*document);
    CHECK(f.catalog.listed_count() == 0);
  }
  CHECK(f.segments.charged_bytes() == 0);
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
