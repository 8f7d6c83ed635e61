// The catalog: which documents there are, under which names, in which domain. No sockets, no
// files; for the loop's thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "common/digest.h"
#include "daemon/admission.h"
#include "daemon/segments.h"

namespace polykv::daemon {

/// Who may see a document: a user id, or everybody.
using Domain = uint64_t;
inline constexpr Domain kPublicDomain = ~Domain{0};

struct DocumentKey {
  Domain domain = 0;
  Digest digest{};  // the last of the chain: model and tokens
  Profile profile = Profile::any;
  auto operator<=>(const DocumentKey&) const = default;
};

enum class DocumentState { filling, sealed, retiring };
const char* document_state_name(DocumentState state);

struct Document {
  uint64_t serial = 0;  // never used again; the order of listings
  DocumentKey key;
  uid_t owner = 0;  // of a public document: who had it computed
  ModelIdentity identity;
  Digest root{};
  std::shared_ptr<const std::vector<uint32_t>> tokens;
  std::shared_ptr<const std::vector<Digest>> chain;
  DocumentState state = DocumentState::filling;
  std::set<std::string> names;
  std::vector<std::shared_ptr<Segment>> segments;  // in token order
  uint32_t lease_count = 0;
  uint64_t last_use = 0;
  int64_t created_unix_ms = 0;

  uint64_t stored_bytes() const;
  uint64_t bf16_bytes() const;
};

/// How a request says which document: by name, by digest, or by digest and the tokens themselves.
struct Selector {
  std::string name;  // or:
  Digest digest{};
  Profile profile = Profile::any;                       // any: whichever is there
  std::shared_ptr<const std::vector<uint32_t>> tokens;  // compared on a hit; may be null

  /// Whether a document (perhaps still filling, under the name it will get) is meant.
  bool matches(const Document& document) const;
};

class Catalog {
 public:
  explicit Catalog(Segments& segments) : segments_(segments) {}

  /// A document that has all its segments becomes sealed and can be found.
  void add(std::shared_ptr<Document> document);
  /// The sealed document of a domain; null: none.
  std::shared_ptr<Document> find(Domain domain, const Selector& selector) const;
  /// All profiles of a digest.
  std::vector<std::shared_ptr<Document>> find_all(Domain domain, const Digest& digest) const;

  /// POLYKV_ERR_ALREADY_EXISTS when another document than `key` has the name and may not lose it.
  Status check_name_free(Domain domain, const std::string& name, bool replace,
                         const DocumentKey& key) const;
  /// Names a sealed document. With replace, the name is taken from another, which retires if that
  /// was its last. POLYKV_ERR_ALREADY_EXISTS, POLYKV_ERR_LIMIT (names of one document).
  Status give_name(Document& document, const std::string& name, bool replace, size_t names_max);
  /// Takes a name away; the last one retires the document.
  void take_name(Document& document, const std::string& name);

  /// Not found any more; memory goes when leases end and processes let go.
  void retire(Document& document);

  void lease(Document& document);
  void end_lease(Document& document);

  /// What eviction may consider: sealed documents.
  std::vector<EvictionCandidate> eviction_candidates() const;
  /// The document of a candidate.
  Document& by_serial(uint64_t serial) const { return *listed_.at(serial); }

  /// Sealed and retiring documents, in order of their serial numbers.
  const std::map<uint64_t, std::shared_ptr<Document>>& listed() const { return listed_; }
  uint64_t document_count() const { return sealed_.size(); }
  uint64_t next_serial() { return next_serial_++; }

 private:
  void end_segments(Document& document);

  Segments& segments_;
  uint64_t next_serial_ = 1;
  uint64_t use_count_ = 0;
  std::map<DocumentKey, std::shared_ptr<Document>> sealed_;
  std::map<uint64_t, std::shared_ptr<Document>> listed_;
  std::map<std::pair<Domain, std::string>, std::shared_ptr<Document>> names_;
};

}  // namespace polykv::daemon
