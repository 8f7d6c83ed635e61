#include "daemon/documents.h"

namespace polykv::daemon {

const char* document_state_name(DocumentState state) {
  switch (state) {
    case DocumentState::filling:
      return "filling";
    case DocumentState::sealed:
      return "sealed";
    case DocumentState::retiring:
      return "retiring";
  }
  return "unknown";
}

uint64_t Document::stored_bytes() const {
  uint64_t bytes = 0;
  for (const auto& segment : segments) bytes += segment->size_bytes;
  return bytes;
}

uint64_t Document::bf16_bytes() const {
  uint64_t bytes_per_token = 0;
  for (const LayerGeometry& layer : identity.layers) {
    bytes_per_token +=
        uint64_t{2} * layer.kv_head_count * (uint64_t{layer.k_head_dim} + layer.v_head_dim);
  }
  return bytes_per_token * tokens->size();
}

bool Selector::matches(const Document& document) const {
  if (profile != Profile::any && profile != document.key.profile) return false;
  if (!name.empty()) return document.names.contains(name);
  // The digest is a hash; what answers a request must be the very same tokens.
  return digest == document.key.digest && (tokens == nullptr || *tokens == *document.tokens);
}

void Catalog::add(std::shared_ptr<Document> document) {
  assert(document->state == DocumentState::filling && !sealed_.contains(document->key));
  document->state = DocumentState::sealed;
  document->last_use = ++use_count_;
  sealed_.emplace(document->key, document);
  listed_.emplace(document->serial, document);
}

std::shared_ptr<Document> Catalog::find(Domain domain, const Selector& selector) const {
  if (!selector.name.empty()) {
    const auto found = names_.find({domain, selector.name});
    return found != names_.end() && selector.matches(*found->second) ? found->second : nullptr;
  }
  // Profiles of one digest are neighbours.
  for (auto at = sealed_.lower_bound({domain, selector.digest, selector.profile});
       at != sealed_.end() && at->first.domain == domain && at->first.digest == selector.digest;
       ++at) {
    if (selector.matches(*at->second)) return at->second;
  }
  return nullptr;
}

std::vector<std::shared_ptr<Document>> Catalog::find_all(Domain domain,
                                                         const Digest& digest) const {
  std::vector<std::shared_ptr<Document>> found;
  for (auto at = sealed_.lower_bound({domain, digest, Profile::any});
       at != sealed_.end() && at->first.domain == domain && at->first.digest == digest; ++at) {
    found.push_back(at->second);
  }
  return found;
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
  names_.emplace(std::pair(document.key.domain, name), sealed_.at(document.key));
  return Status::ok();
}

void Catalog::take_name(Document& document, const std::string& name) {
  names_.erase({document.key.domain, name});
  document.names.erase(name);
  if (document.names.empty()) retire(document);
}

void Catalog::retire(Document& document) {
  assert(document.state == DocumentState::sealed);
  const std::shared_ptr<Document> keep = sealed_.at(document.key);
  for (const std::string& name : document.names) names_.erase({document.key.domain, name});
  document.names.clear();
  sealed_.erase(document.key);
  document.state = DocumentState::retiring;
  for (const auto& segment : document.segments) segments_.retire(*segment);
  if (document.lease_count == 0) end_segments(document);
}

void Catalog::lease(Document& document) {
  ++document.lease_count;
  document.last_use = ++use_count_;
}

void Catalog::end_lease(Document& document) {
  assert(document.lease_count > 0);
  document.last_use = ++use_count_;
  if (--document.lease_count == 0 && document.state == DocumentState::retiring)
    end_segments(document);
}

void Catalog::end_segments(Document& document) {
  // Nobody can be sent these any more. Our descriptors go now, so that the memory is free as soon
  // as those who hold it let go, even where they cannot tell us.
  for (const auto& segment : document.segments) segment->readable.reset();
  listed_.erase(document.serial);  // may be the last owner
}

std::vector<EvictionCandidate> Catalog::eviction_candidates() const {
  std::vector<EvictionCandidate> candidates;
  candidates.reserve(sealed_.size());
  for (const auto& [key, document] : sealed_) {
    EvictionCandidate candidate{document->serial, document->last_use, 0, document->lease_count > 0};
    for (const auto& segment : document->segments) {
      if (segment->holder_count > 0) continue;
      candidate.freeable_bytes += segment->size_bytes;
      ++candidate.freeable_segments;
    }
    candidates.push_back(candidate);
  }
  return candidates;
}

}  // namespace polykv::daemon
