#include "daemon/documents.h"

#include <algorithm>
#include <cassert>
#include <cstring>

namespace polykv::daemon {

const char* document_state_name(DocumentState state) {
  switch (state) {
    case DocumentState::filling:
      return "filling";
    case DocumentState::incomplete:
      return "incomplete";
    case DocumentState::sealed:
      return "sealed";
    case DocumentState::retiring:
      return "retiring";
  }
  return "unknown";
}

uint64_t Document::stored_bytes() const {
  uint64_t bytes = 0;
  for (const SegmentPart& part : parts) bytes += part.segment->charged_bytes;
  return bytes;
}

uint64_t Document::shared_bytes() const {
  uint64_t bytes = 0;
  for (const SegmentPart& part : parts) {
    if (part.segment->document_count > 1) bytes += part.segment->charged_bytes;
  }
  return bytes;
}

PrefixTreatment Document::prefix_treatment() const {
  PrefixTreatment strongest = PrefixTreatment::none;
  for (const SegmentPart& part : parts) strongest = stronger(strongest, part.segment->prefix);
  return strongest;
}

uint64_t Document::bf16_bytes() const {
  uint64_t bytes_per_token = 0;
  for (const LayerGeometry& layer : identity->layers) {
    bytes_per_token +=
        uint64_t{2} * layer.kv_head_count * (uint64_t{layer.k_head_dim} + layer.v_head_dim);
  }
  return bytes_per_token * tokens->size();
}

std::vector<LayerQuality> Document::layers() const {
  std::vector<LayerQuality> layers(identity->layers.size());
  for (const SegmentPart& part : parts) {
    assert(part.segment->layers.size() <= layers.size());
    for (size_t i = 0; i < part.segment->layers.size(); ++i) {
      const LayerQuality& other = part.segment->layers[i];
      layers[i].profiles |= other.profiles;
      if (other.query_count == 0) continue;
      if (layers[i].query_count == 0 || other.relative_error > layers[i].relative_error) {
        layers[i].query_count = other.query_count;
        layers[i].relative_error = other.relative_error;
      }
    }
  }
  return layers;
}

bool Selector::matches(const Document& document) const {
  if (profile != Profile::any && profile != document.key.profile) return false;
  if (!name.empty()) return document.names.contains(name);
  // The digest is a hash; what answers a request must be the very same tokens.
  return digest == document.key.digest && (tokens == nullptr || *tokens == *document.tokens);
}

std::shared_ptr<const ModelIdentity> Catalog::share_identity(const Digest& root,
                                                             const ModelIdentity& identity) {
  auto& known = identities_[{root, identity.name}];
  if (auto shared = known.lock()) return shared;
  auto shared = std::make_shared<const ModelIdentity>(identity);
  known = shared;
  if (identities_.size() >= identities_to_sweep_) {
    std::erase_if(identities_, [](const auto& entry) { return entry.second.expired(); });
    identities_to_sweep_ = std::max<size_t>(16, 2 * identities_.size());
  }
  return shared;
}

// ---- parts -------------------------------------------------------------------------------------

void Catalog::start_with(Document& document, std::vector<SegmentPart> parts) {
  assert(document.parts.empty());
  document.parts = std::move(parts);
  document.prefix_tokens = document.end_token();
  for (const SegmentPart& part : document.parts) ++part.segment->document_count;
}

void Catalog::append(Document& document, const std::shared_ptr<Segment>& segment,
                     std::vector<Digest> digests, bool is_shareable) {
  assert(segment->state == SegmentState::sealed && segment->first_token == document.end_token());
  ++segment->document_count;
  if (is_shareable) {
    if (!document.parts.empty()) segment->parent = document.parts.back().segment;
    segment->domain = document.key.domain;
    segment->profile = document.key.profile;
    segment->tokens = document.tokens;
    const uint64_t chunks_before = segment->first_token / kChunkTokens;
    segment->start = chunks_before == 0 ? document.root : (*document.chain)[chunks_before - 1];
    // The tail of a document that ends here is its own affair.
    digests.resize(segment->end_token() / kChunkTokens - chunks_before);
    segment->digests = std::move(digests);
    prefixes_.add(segment);
  }
  document.parts.push_back({segment, segment->token_count});
}

void Catalog::drop_part(Segment& segment) {
  assert(segment.document_count > 0);
  if (--segment.document_count > 0) return;
  if (segment.tokens != nullptr) prefixes_.erase(segment);
  segments_.retire(segment);
  // Our descriptor goes as soon as nobody can be sent it any more, so that the memory is free when
  // those who hold it let go, even where they cannot tell us.
  if (segment.lingering_count == 0) segment.readable.reset();
}

void Catalog::linger(Document& document) {
  for (const SegmentPart& part : document.parts) ++part.segment->lingering_count;
}

void Catalog::end_lingering(Document& document) {
  for (const SegmentPart& part : document.parts) {
    if (--part.segment->lingering_count == 0 && part.segment->document_count == 0)
      part.segment->readable.reset();
  }
  listed_.erase({document.key.domain, document.serial});  // may be the last owner
}

void Catalog::drop(Document& document) {
  assert(document.state == DocumentState::filling);
  let_go_of_parts(document);
}

void Catalog::let_go_of_parts(Document& document) {
  document.state = DocumentState::retiring;
  if (document.lease_count > 0) linger(document);
  for (const SegmentPart& part : document.parts) drop_part(*part.segment);
}

void Catalog::make_view(Document& document, std::vector<SegmentPart> parts) {
  assert(document.parts.empty() && document.lease_count == 0);
  document.parts = std::move(parts);
  document.state = DocumentState::retiring;
  document.is_view = true;
  linger(document);
}

// ---- documents ---------------------------------------------------------------------------------

size_t Catalog::KeyHash::operator()(const std::pair<Domain, Digest>& key) const {
  size_t hash = 0;  // a digest is as random as any hash
  std::memcpy(&hash, key.second.data(), sizeof hash);
  return hash ^ (key.first * 0x9e3779b97f4a7c15U);
}

size_t Catalog::KeyHash::operator()(const std::pair<Domain, std::string>& key) const {
  return std::hash<std::string>()(key.second) ^ (key.first * 0x9e3779b97f4a7c15U);
}

void Catalog::set_idle(const std::shared_ptr<Document>& document) {
  document->idle = idle_.insert(idle_.end(), document);
}

void Catalog::end_idle(Document& document) {
  if (!document.idle) return;
  const std::shared_ptr<Document> keep = **document.idle;  // it may be the last owner
  idle_.erase(*document.idle);
  document.idle.reset();
}

void Catalog::enlist(const std::shared_ptr<Document>& document) {
  listed_.emplace(std::pair(document->key.domain, document->serial), document);
  if (document->lease_count == 0) set_idle(document);
}

void Catalog::add(const std::shared_ptr<Document>& document) {
  assert(document->state == DocumentState::filling);
  document->state = DocumentState::sealed;
  sealed_[{document->key.domain, document->key.digest}].push_back(document);
  ++sealed_count_;
  enlist(document);
}

void Catalog::keep_incomplete(std::shared_ptr<Document> document) {
  assert(document->state == DocumentState::filling && !incomplete_.contains(document->key));
  document->state = DocumentState::incomplete;
  incomplete_.emplace(document->key, document);
  enlist(document);
}

std::shared_ptr<Document> Catalog::take_incomplete(const DocumentKey& key) {
  const auto found = incomplete_.find(key);
  if (found == incomplete_.end()) return nullptr;
  std::shared_ptr<Document> document = found->second;
  incomplete_.erase(found);
  listed_.erase({document->key.domain, document->serial});
  end_idle(*document);
  document->state = DocumentState::filling;
  return document;
}

std::shared_ptr<Document> Catalog::find_incomplete(Domain domain, const Selector& selector) const {
  for (auto at = incomplete_.lower_bound({domain, {}, Profile::any});
       at != incomplete_.end() && at->first.domain == domain; ++at) {
    if (selector.matches(*at->second)) return at->second;
  }
  return nullptr;
}

std::shared_ptr<Document> Catalog::find(Domain domain, const Selector& selector) const {
  if (!selector.name.empty()) {
    const auto found = names_.find({domain, selector.name});
    return found != names_.end() && selector.matches(*found->second) ? found->second : nullptr;
  }
  const auto& all = profiles(domain, selector.digest);
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const auto& document) { return selector.matches(*document); });
  return found == all.end() ? nullptr : *found;
}

const std::vector<std::shared_ptr<Document>>& Catalog::profiles(Domain domain,
                                                                const Digest& digest) const {
  static const std::vector<std::shared_ptr<Document>> none;
  const auto found = sealed_.find({domain, digest});
  return found == sealed_.end() ? none : found->second;
}

std::vector<std::shared_ptr<Document>> Catalog::find_all(Domain domain,
                                                         const Digest& digest) const {
  return profiles(domain, digest);
}

Status Catalog::check_name_free(Domain domain, const std::string& name, bool replace,
                                const DocumentKey& key) const {
  const auto found = names_.find({domain, name});
  if (found == names_.end() || replace || found->second->key == key) return Status::ok();
  return {POLYKV_ERR_ALREADY_EXISTS,
          "name '" + name + "': another document has it; choose another name, or replace it"};
}

Status Catalog::give_name(Document& document, const std::string& name, bool replace,
                          size_t names_max) {
  assert(document.state == DocumentState::sealed);
  POLYKV_RETURN_IF_ERROR(check_name_free(document.key.domain, name, replace, document.key));
  if (document.names.contains(name)) return Status::ok();
  if (document.names.size() >= names_max) {
    return {POLYKV_ERR_LIMIT,
            format("name '%s': the document has its maximum of %zu names; take one away "
                   "(polykvctl rm)",
                   name.c_str(), names_max)};
  }
  const auto found = names_.find({document.key.domain, name});
  if (found != names_.end()) {
    const std::shared_ptr<Document> other = found->second;
    take_name(*other, name);
  }
  document.names.insert(name);
  names_.emplace(std::pair(document.key.domain, name), document.shared_from_this());
  return Status::ok();
}

void Catalog::take_name(Document& document, const std::string& name) {
  names_.erase({document.key.domain, name});
  document.names.erase(name);
  if (document.names.empty()) retire(document);
}

void Catalog::retire(Document& document) {
  assert(document.state == DocumentState::sealed || document.state == DocumentState::incomplete);
  const std::shared_ptr<Document> keep = document.shared_from_this();
  if (document.state == DocumentState::sealed) {
    for (const std::string& name : document.names) names_.erase({document.key.domain, name});
    const auto found = sealed_.find({document.key.domain, document.key.digest});
    std::erase(found->second, keep);
    if (found->second.empty()) sealed_.erase(found);
    --sealed_count_;
  } else {
    incomplete_.erase(document.key);
  }
  document.names.clear();
  end_idle(document);
  let_go_of_parts(document);
  if (document.lease_count == 0) listed_.erase({document.key.domain, document.serial});
}

void Catalog::lease(Document& document) {
  end_idle(document);
  ++document.lease_count;
}

void Catalog::end_lease(Document& document) {
  assert(document.lease_count > 0);
  if (--document.lease_count > 0) return;
  if (document.state == DocumentState::retiring) return end_lingering(document);
  if (document.state != DocumentState::filling) set_idle(document.shared_from_this());
}

std::vector<std::shared_ptr<Document>> Catalog::list(Domain own, uint64_t cursor,
                                                     size_t count) const {
  std::vector<std::shared_ptr<Document>> found;
  auto mine = listed_.upper_bound({own, cursor});
  auto shared = listed_.upper_bound({kPublicDomain, cursor});
  const auto is_of = [&](const auto& at, Domain domain) {
    return at != listed_.end() && at->first.first == domain;
  };
  while (found.size() < count) {
    const bool has_mine = is_of(mine, own);
    const bool has_shared = is_of(shared, kPublicDomain);
    if (!has_mine && !has_shared) break;
    auto& next =
        !has_shared || (has_mine && mine->first.second < shared->first.second) ? mine : shared;
    found.push_back(next->second);
    ++next;
  }
  return found;
}

Catalog::Evictions Catalog::choose_evictions(const Room& needed) const {
  Evictions evictions;
  std::map<const Segment*, uint32_t> dropped;  // by how many of the documents
  const auto frees = [&](const Segment& segment) {
    return dropped[&segment] == segment.document_count && segment.holder_count == 0;
  };
  for (const auto& document : idle_) {
    if (evictions.freed.covers(needed)) break;
    evictions.documents.push_back(document);
    for (const SegmentPart& part : document->parts) {
      ++dropped[part.segment.get()];
      if (!frees(*part.segment)) continue;
      evictions.freed.bytes += part.segment->charged_bytes;
      ++evictions.freed.segments;
    }
  }
  // Those whose every segment somebody else uses or holds are evicted for nothing.
  std::erase_if(evictions.documents, [&](const auto& document) {
    return std::none_of(document->parts.begin(), document->parts.end(),
                        [&](const SegmentPart& part) { return frees(*part.segment); });
  });
  return evictions;
}

}  // namespace polykv::daemon
