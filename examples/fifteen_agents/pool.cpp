#include "examples/fifteen_agents/pool.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <thread>

namespace polykv::example {

Status check(polykv_status status) {
  return status == POLYKV_OK ? Status::ok() : Status(status, polykv_last_error());
}

Result<SessionHandle> connect(const std::string& socket_path) {
  polykv_connect_options options;
  polykv_connect_options_init(&options);
  if (!socket_path.empty()) options.socket_path = socket_path.c_str();
  options.client_name = "fifteen_agents";
  polykv_session* session = nullptr;
  POLYKV_RETURN_IF_ERROR(check(polykv_session_connect(&options, &session)));
  return SessionHandle(session);
}

Result<LeaseHandle> acquire(polykv_session* session, const std::string& name) {
  polykv_acquire_options options;
  polykv_acquire_options_init(&options);
  options.name = name.c_str();
  options.flags = POLYKV_ACQUIRE_WAIT | POLYKV_ACQUIRE_STREAM;
  polykv_lease* lease = nullptr;
  POLYKV_RETURN_IF_ERROR(check(polykv_document_acquire(session, &options, &lease, nullptr)));
  return LeaseHandle(lease);
}

namespace {

Result<polykv_document_info> info_of(const polykv_lease* lease) {
  polykv_document_info info;
  polykv_document_info_init(&info);
  POLYKV_RETURN_IF_ERROR(check(polykv_lease_info(lease, &info)));
  return info;
}

}  // namespace

Status require_model(const polykv_lease* lease, const ModelIdentity& identity) {
  POLYKV_ASSIGN_OR_RETURN(const polykv_document_info info, info_of(lease));
  const polykv_model& model = *info.model;
  const auto refuse = [](const std::string& cause) {
    return Status(
        POLYKV_ERR_INVALID_ARGUMENT,
        "use a document: " + cause + "; give the agent the model that the document was put with");
  };
  if (std::memcmp(model.fingerprint, identity.fingerprint.data(), identity.fingerprint.size()) != 0)
    return refuse("another model computed it");
  if (model.layer_count != identity.layers.size())
    return refuse(
        format("it has %u layers, the model %zu", model.layer_count, identity.layers.size()));
  for (uint32_t i = 0; i < model.layer_count; ++i) {
    const polykv_layer_geometry& its = model.layers[i];
    const LayerGeometry& ours = identity.layers[i];
    if (its.sliding_window != ours.sliding_window) {
      return refuse(format("its layer %u has a sliding window of %u tokens, the model %u", i,
                           its.sliding_window, ours.sliding_window));
    }
    if (its.kv_head_count != ours.kv_head_count || its.k_head_dim != ours.k_head_dim ||
        its.v_head_dim != ours.v_head_dim) {
      return refuse(format("its layer %u has another shape than the model's", i));
    }
  }
  return Status::ok();
}

namespace {

/// Tokens [first, end), which must be sealed.
Status decode_range(const polykv_lease* lease, uint64_t first, uint64_t end, KvCache& cache,
                    uint32_t thread_count) {
  std::atomic<uint32_t> next_layer{
      0};  // relaxed: it only hands out numbers; join() orders the rest
  std::mutex mutex;
  Status first_error;  // guarded by mutex
  const auto work = [&] {
    for (uint32_t layer;
         (layer = next_layer.fetch_add(1, std::memory_order_relaxed)) < cache.layer_count();) {
      polykv_decode_options options;
      polykv_decode_options_init(&options);
      options.first_token = first;
      options.token_count = end - first;
      options.dtype = POLYKV_F32;
      options.k = cache.k(layer) + first * cache.token_stride();
      options.v = cache.v(layer) + first * cache.token_stride();
      options.k_strides = {static_cast<int64_t>(cache.head_stride()),
                           static_cast<int64_t>(cache.token_stride()), 1};
      options.v_strides = options.k_strides;
      const Status status = check(polykv_layer_decode(lease, layer, &options));
      if (!status.is_ok()) {
        const std::lock_guard lock(mutex);
        if (first_error.is_ok()) first_error = status;
        return;
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint32_t i = 1; i < std::max(1U, thread_count); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  return first_error;
}

}  // namespace

Result<std::chrono::steady_clock::time_point> decode_into(polykv_lease* lease, KvCache& cache,
                                                          uint32_t thread_count) {
  POLYKV_ASSIGN_OR_RETURN(polykv_document_info info, info_of(lease));
  if (info.token_count > cache.capacity_tokens()) {
    return {POLYKV_ERR_LIMIT,
            format("decode a document of %llu tokens: the cache has room for %u",
                   static_cast<unsigned long long>(info.token_count), cache.capacity_tokens())};
  }
  std::chrono::steady_clock::time_point last_sealed;
  for (uint64_t done = 0; done < info.token_count; done = info.sealed_token_count) {
    POLYKV_RETURN_IF_ERROR(check(polykv_lease_wait(lease, done + 1, -1)));
    last_sealed = std::chrono::steady_clock::now();
    POLYKV_ASSIGN_OR_RETURN(info, info_of(lease));
    POLYKV_RETURN_IF_ERROR(decode_range(lease, done, info.sealed_token_count, cache, thread_count));
  }
  cache.set_token_count(static_cast<uint32_t>(info.token_count));
  return last_sealed;
}

Result<PooledPrefix> PooledPrefix::wait_for(polykv_lease* lease) {
  POLYKV_ASSIGN_OR_RETURN(const polykv_document_info info, info_of(lease));
  POLYKV_RETURN_IF_ERROR(check(polykv_lease_wait(lease, info.token_count, -1)));
  return PooledPrefix(lease, static_cast<uint32_t>(info.token_count),
                      info.model->layers[0].k_head_dim);
}

Status PooledPrefix::attend(const PrefixQueries& queries, float* output, float* log_sum_exp) const {
  polykv_attend_options options;
  polykv_attend_options_init(&options);
  options.token_count = token_count_;
  options.query_count = queries.row_count;
  options.head_count = queries.head_count;
  options.q = queries.q;
  options.q_strides = {static_cast<int64_t>(queries.q_stride), static_cast<int64_t>(head_dim_), 1};
  options.output = output;
  options.log_sum_exp = log_sum_exp;
  options.thread_count = queries.thread_count;
  return check(polykv_layer_attend(lease_, queries.layer, &options));
}

}  // namespace polykv::example
