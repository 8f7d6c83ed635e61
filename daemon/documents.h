// The catalog: which documents there are, under which names, in which domain. No sockets, no
// files; for the loop's thread.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/digest.h"
#include "daemon/admission.h"
#include "daemon/prefixes.h"
#include "daemon/segments.h"

namespace polykv::daemon {

struct DocumentKey {
  Domain domain = 0;
  Digest digest{};  // the last of the chain: model and tokens
  Profile profile = Profile::any;
  // NOLINTNEXTLINE(modernize-use-nullptr): it takes the generated comparison with 0 for one
  auto operator<=>(const DocumentKey&) const = default;
};

/// filling: somebody produces it. incomplete: its producer was lost, what was sealed stays until
/// somebody goes on or memory is needed. sealed: complete. retiring: found no more.
enum class DocumentState { filling, incomplete, sealed, retiring };
const char* document_state_name(DocumentState state);

struct Document : std::enable_shared_from_this<Document> {
  uint64_t serial = 0;  // never used again; the order of listings
  DocumentKey key;
  uid_t owner = 0;                                // of a public document: who had it computed
  std::shared_ptr<const ModelIdentity> identity;  // of Catalog::share_identity
  Digest root{};
  std::shared_ptr<const std::vector<uint32_t>> tokens;
  std::shared_ptr<const std::vector<Digest>> chain;
  DocumentState state = DocumentState::filling;
  std::set<std::string> names;
  std::vector<SegmentPart> parts;  // in token order, without a gap; perhaps shared with others
  uint64_t prefix_tokens = 0;      // of these, from other documents
  bool is_view = false;            // see Catalog::make_view
  uint32_t lease_count = 0;
  std::optional<std::list<std::shared_ptr<Document>>::iterator> idle;  // of the catalog's list
  int64_t created_unix_ms = 0;

  /// The first token that has no sealed segment.
  uint64_t end_token() const { return end_of(parts); }
  /// Of all its segments, those included that it shares.
  uint64_t stored_bytes() const;
  uint64_t shared_bytes() const;
  /// decoded if any of its segments attended to decoded tokens, else recomputed if any was computed
  /// behind a prefix that was computed again.
  PrefixTreatment prefix_treatment() const;
  uint64_t bf16_bytes() const;
  /// Of each layer.
  std::vector<LayerQuality> layers() const;
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

  /// One object for all documents of a model (and of a name for it): with many documents, what is
  /// told of each of them is then mostly the same few lines of memory.
  std::shared_ptr<const ModelIdentity> share_identity(const Digest& root,
                                                      const ModelIdentity& identity);

  /// Sealed segments as the document's first parts: they stay while it is there.
  static void start_with(Document& document, std::vector<SegmentPart> parts);
  /// A segment that was sealed for the document becomes its next part, and can be found as a prefix
  /// where the profile allows that.
  void append(Document& document, const std::shared_ptr<Segment>& segment,
              std::vector<Digest> digests, bool is_shareable);
  /// A document that is not to be: its parts go unless others use them.
  void drop(Document& document);

  /// A document that has all its segments becomes sealed and can be found.
  void add(const std::shared_ptr<Document>& document);
  /// filling -> incomplete. It can be listed, continued, evicted and removed.
  void keep_incomplete(std::shared_ptr<Document> document);
  /// incomplete -> filling; null: there is none.
  std::shared_ptr<Document> take_incomplete(const DocumentKey& key);
  std::shared_ptr<Document> find_incomplete(Domain domain, const Selector& selector) const;

  const PrefixIndex& prefixes() const { return prefixes_; }
  /// Sealed parts as a document that nobody can find and nobody keeps: for a single lease, which
  /// must follow.
  static void make_view(Document& document, std::vector<SegmentPart> parts);

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

  /// Not found any more; memory goes when leases end and processes let go. Of an incomplete or
  /// sealed document.
  void retire(Document& document);

  void lease(Document& document);
  void end_lease(Document& document);

  /// The least recently used unleased documents that together free what is short; those that would
  /// free nothing are left alone. What cannot be freed stays short.
  struct Evictions {
    std::vector<std::shared_ptr<Document>> documents;
    Room freed;
  };
  Evictions choose_evictions(const Room& needed) const;

  /// Sealed, incomplete and retiring documents that a user may see, in order of their serial
  /// numbers: the first `count` behind the serial number `cursor`.
  std::vector<std::shared_ptr<Document>> list(Domain own, uint64_t cursor, size_t count) const;
  size_t listed_count() const { return listed_.size(); }
  uint64_t document_count() const { return sealed_count_; }
  uint64_t next_serial() { return next_serial_++; }

 private:
  struct KeyHash {
    size_t operator()(const std::pair<Domain, Digest>& key) const;
    size_t operator()(const std::pair<Domain, std::string>& key) const;
  };
  const std::vector<std::shared_ptr<Document>>& profiles(Domain domain, const Digest& digest) const;
  void set_idle(const std::shared_ptr<Document>& document);
  void end_idle(Document& document);
  void enlist(const std::shared_ptr<Document>& document);
  void let_go_of_parts(Document& document);
  void drop_part(Segment& segment);
  static void linger(Document& document);
  void end_lingering(Document& document);

  Segments& segments_;
  PrefixIndex prefixes_;
  std::map<std::pair<Digest, std::string>, std::weak_ptr<const ModelIdentity>> identities_;
  size_t identities_to_sweep_ = 16;  // from this many on
  uint64_t next_serial_ = 1;
  uint64_t sealed_count_ = 0;
  std::unordered_map<std::pair<Domain, Digest>, std::vector<std::shared_ptr<Document>>, KeyHash>
      sealed_;  // one for each profile
  std::map<DocumentKey, std::shared_ptr<Document>> incomplete_;
  std::list<std::shared_ptr<Document>> idle_;  // unleased; the least recently used first
  std::map<std::pair<Domain, uint64_t>, std::shared_ptr<Document>> listed_;  // by serial number
  std::unordered_map<std::pair<Domain, std::string>, std::shared_ptr<Document>, KeyHash> names_;
};

}  // namespace polykv::daemon
