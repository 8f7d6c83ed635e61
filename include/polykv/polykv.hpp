/*
 * polykv for C++: owners around the C ABI, header-only, C++20.
 *
 *   auto session = polykv::client::Session::connect();
 *   if (!session) return complain(session.error().message);
 *   auto lease = session->acquire("manual");
 *   polykv::client::DecodeOptions options;
 *   options.token_count = lease->info().token_count;
 *   options.k = k.data();
 *   lease->decode(layer, options);
 *
 * Everything is in namespace polykv::client. What polykv/polykv.h says about each call, about
 * threads, fork() and a daemon that is gone holds here too; the wrapper adds three things:
 *   - Owners. Session, Lease, Publisher and Segment are move-only and give back what they hold when
 *     destroyed. A moved-from or ended one may only be destroyed or assigned to.
 *   - Result<T> instead of codes: a T or an Error. Nothing here throws by itself; value_or_throw()
 *     does, for programs that like that. An exception of a callback of yours passes through.
 *   - Options structs that set themselves up: the C structs, derived, with their _init called.
 */
#ifndef POLYKV_POLYKV_HPP
#define POLYKV_POLYKV_HPP

#include <cassert>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "polykv/polykv.h"

namespace polykv::client {

/// Why a call failed. `message` names operation, object, cause and remedy in one line.
struct Error {
  polykv_status status = POLYKV_ERR_INTERNAL;
  std::string message;
};

class Exception : public std::runtime_error {
 public:
  explicit Exception(const Error& error)
      : std::runtime_error(error.message), status_(error.status) {}
  polykv_status status() const { return status_; }

 private:
  polykv_status status_;
};

/// A T, or why there is none. Result<> carries nothing but success.
template <typename T = std::monostate>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}      // NOLINT(google-explicit-constructor)
  Result(Error error) : error_(std::move(error)) {}  // NOLINT(google-explicit-constructor)

  bool ok() const { return value_.has_value(); }
  explicit operator bool() const { return ok(); }
  /// Only of a failed one, and the others only of one that is ok().
  const Error& error() const { return assert(!ok()), error_; }
  T& operator*() { return assert(ok()), *value_; }
  const T& operator*() const { return assert(ok()), *value_; }
  T* operator->() { return assert(ok()), &*value_; }
  const T* operator->() const { return assert(ok()), &*value_; }
  T value_or_throw() && {
    if (!ok()) throw Exception(error_);
    return std::move(*value_);
  }
  void value_or_throw() const& {
    if (!ok()) throw Exception(error_);
  }

 private:
  std::optional<T> value_;
  Error error_;
};

/// The C structs with their defaults set.
struct Model : polykv_model {
  Model() { polykv_model_init(this); }
};
struct ConnectOptions : polykv_connect_options {
  ConnectOptions() { polykv_connect_options_init(this); }
};
struct AcquireOptions : polykv_acquire_options {
  AcquireOptions() { polykv_acquire_options_init(this); }
};
struct IngestOptions : polykv_ingest_options {
  IngestOptions() { polykv_ingest_options_init(this); }
};
struct DecodeOptions : polykv_decode_options {
  DecodeOptions() { polykv_decode_options_init(this); }
};
struct AttendOptions : polykv_attend_options {
  AttendOptions() { polykv_attend_options_init(this); }
};
struct LayerQueries : polykv_layer_queries {
  LayerQueries() { polykv_layer_queries_init(this); }
};
struct KvSource : polykv_kv_source {
  KvSource() { polykv_kv_source_init(this); }
};
struct DocumentInfo : polykv_document_info {
  DocumentInfo() { polykv_document_info_init(this); }
};
struct LayerView : polykv_layer_view {
  LayerView() { polykv_layer_view_init(this); }
};
struct DaemonStatus : polykv_daemon_status {
  DaemonStatus() { polykv_daemon_status_init(this); }
};

namespace detail {

inline Error last_error(polykv_status status) {
  return {status, polykv_last_error()};
}
inline Result<> checked(polykv_status status) {
  if (status != POLYKV_OK) return last_error(status);
  return std::monostate();
}

template <typename Handle, auto free_handle>
struct Freer {
  void operator()(Handle* handle) const { static_cast<void>(free_handle(handle)); }
};
template <typename Handle, auto free_handle>
using Owner = std::unique_ptr<Handle, Freer<Handle, free_handle>>;

/// A callback of C++ behind one of C: an exception waits until the library has returned.
template <typename Argument>
struct Callback {
  const std::function<bool(const Argument&)>& function;
  std::exception_ptr thrown;

  static int call(void* self, const Argument* argument) {
    auto& callback = *static_cast<Callback*>(self);
    try {
      return callback.function(*argument) ? 0 : 1;
    } catch (...) {
      callback.thrown = std::current_exception();
      return 1;
    }
  }
  void rethrow() const {
    if (thrown) std::rethrow_exception(thrown);
  }
};

}  // namespace detail

/// A document, mapped read-only and ready to decode. Any number of threads may read.
class Lease {
 public:
  explicit Lease(polykv_lease* owned) : lease_(owned) {}

  /// Pointers in it live as long as the lease.
  DocumentInfo info() const {
    DocumentInfo info;
    [[maybe_unused]] const polykv_status status = polykv_lease_info(lease_.get(), &info);
    return info;  // after fork(): all 0
  }
  Result<std::vector<uint32_t>> tokens(uint64_t first, uint64_t count) const {
    std::vector<uint32_t> ids(count);
    const polykv_status status = polykv_lease_tokens(lease_.get(), first, count, ids.data());
    if (status != POLYKV_OK) return detail::last_error(status);
    return ids;
  }
  Result<std::vector<uint32_t>> tokens() const { return tokens(0, info().token_count); }
  Result<> decode(uint32_t layer, const DecodeOptions& options) const {
    return detail::checked(polykv_layer_decode(lease_.get(), layer, &options));
  }
  Result<> attend(uint32_t layer, const AttendOptions& options) const {
    return detail::checked(polykv_layer_attend(lease_.get(), layer, &options));
  }
  Result<LayerView> layer_view(uint32_t segment, uint32_t layer) const {
    LayerView view;
    const polykv_status status = polykv_lease_layer_view(lease_.get(), segment, layer, &view);
    if (status != POLYKV_OK) return detail::last_error(status);
    return view;
  }
  /// While the document is being produced; timeout_ms -1: without limit.
  Result<> wait_for(uint64_t token_count, int64_t timeout_ms = -1) {
    return detail::checked(polykv_lease_wait(lease_.get(), token_count, timeout_ms));
  }
  Result<> verify() const { return detail::checked(polykv_lease_verify(lease_.get())); }
  /// The destructor does the same and drops the answer.
  Result<> release() { return detail::checked(polykv_lease_release(lease_.release())); }
  polykv_lease* get() const { return lease_.get(); }

 private:
  detail::Owner<polykv_lease, polykv_lease_release> lease_;
};

/// Memory for the K and V of consecutive tokens; given back by the destructor unless committed.
class Segment {
 public:
  explicit Segment(polykv_segment* owned) : segment_(owned) {}

  /// Different layers may be encoded by several threads at once.
  Result<> encode_layer(uint32_t layer, const KvSource& source) {
    return detail::checked(polykv_segment_encode_layer(segment_.get(), layer, &source));
  }
  Result<> commit() { return detail::checked(polykv_segment_commit(segment_.release())); }
  polykv_segment* get() const { return segment_.get(); }

 private:
  detail::Owner<polykv_segment, polykv_segment_abort> segment_;
};

/// The right to produce a document; given up by the destructor unless finished.
class Publisher {
 public:
  explicit Publisher(polykv_publisher* owned) : publisher_(owned) {}

  /// For all layers of the next segment or for none, before begin_segment(token_count). Different
  /// layers may be examined by several threads at once.
  Result<> examine_layer(uint64_t token_count, uint32_t layer, const KvSource& source,
                         const LayerQueries& queries) {
    return detail::checked(
        polykv_publisher_examine_layer(publisher_.get(), token_count, layer, &source, &queries));
  }
  uint64_t next_token() const { return position().first; }
  uint64_t token_count() const { return position().second; }
  Result<Segment> begin_segment(uint64_t token_count = 0) {
    polykv_segment* segment = nullptr;
    const polykv_status status = polykv_segment_begin(publisher_.get(), token_count, &segment);
    if (status != POLYKV_OK) return detail::last_error(status);
    return Segment(segment);
  }
  /// What is sealed already, tokens 0 .. next_token().
  Result<Lease> acquire_sealed() {
    polykv_lease* lease = nullptr;
    const polykv_status status = polykv_publisher_acquire_sealed(publisher_.get(), &lease);
    if (status != POLYKV_OK) return detail::last_error(status);
    return Lease(lease);
  }
  Result<> progress(uint64_t tokens_done) {
    return detail::checked(polykv_publisher_progress(publisher_.get(), tokens_done));
  }
  Result<> finish() {
    return detail::checked(polykv_publisher_finish(publisher_.release(), nullptr));
  }
  Result<Lease> finish_with_lease() {
    polykv_lease* lease = nullptr;
    const polykv_status status = polykv_publisher_finish(publisher_.release(), &lease);
    if (status != POLYKV_OK) return detail::last_error(status);
    return Lease(lease);
  }
  polykv_publisher* get() const { return publisher_.get(); }

 private:
  std::pair<uint64_t, uint64_t> position() const {
    std::pair<uint64_t, uint64_t> at{0, 0};
    [[maybe_unused]] const polykv_status status =
        polykv_publisher_position(publisher_.get(), &at.first, &at.second);
    return at;
  }
  detail::Owner<polykv_publisher, polykv_publisher_abort> publisher_;
};

/// One connection to polykvd; any number of threads may use it.
class Session {
 public:
  static Result<Session> connect(const ConnectOptions& options = {}) {
    polykv_session* session = nullptr;
    const polykv_status status = polykv_session_connect(&options, &session);
    if (status != POLYKV_OK) return detail::last_error(status);
    return Session(session);
  }

  Result<Lease> acquire(const std::string& name, polykv_profile profile = POLYKV_PROFILE_ANY) {
    AcquireOptions options;
    options.name = name.c_str();
    options.profile = profile;
    return acquire(options);
  }
  /// Without POLYKV_ACQUIRE_MAY_PRODUCE, which acquire_or_produce() is for.
  Result<Lease> acquire(const AcquireOptions& options) {
    polykv_lease* lease = nullptr;
    AcquireOptions reading = options;
    reading.flags &= ~static_cast<uint32_t>(POLYKV_ACQUIRE_MAY_PRODUCE);
    const polykv_status status = polykv_document_acquire(session_.get(), &reading, &lease, nullptr);
    if (status != POLYKV_OK) return detail::last_error(status);
    return Lease(lease);
  }
  /// The document, or the right to produce it.
  Result<std::variant<Lease, Publisher>> acquire_or_produce(const AcquireOptions& options) {
    polykv_lease* lease = nullptr;
    polykv_publisher* publisher = nullptr;
    AcquireOptions producing = options;
    producing.flags |= POLYKV_ACQUIRE_MAY_PRODUCE;
    const polykv_status status =
        polykv_document_acquire(session_.get(), &producing, &lease, &publisher);
    if (status != POLYKV_OK) return detail::last_error(status);
    if (lease != nullptr) return std::variant<Lease, Publisher>(Lease(lease));
    return std::variant<Lease, Publisher>(Publisher(publisher));
  }
  /// on_progress is called on this thread; false cancels. It takes the place of the options' own.
  Result<Lease> ingest(const IngestOptions& options,
                       const std::function<bool(const polykv_ingest_progress&)>& on_progress = {}) {
    detail::Callback<polykv_ingest_progress> callback{on_progress, {}};
    IngestOptions computing = options;
    if (on_progress) {
      computing.on_progress = detail::Callback<polykv_ingest_progress>::call;
      computing.user = &callback;
    }
    polykv_lease* lease = nullptr;
    const polykv_status status = polykv_document_ingest(session_.get(), &computing, &lease);
    if (callback.thrown && lease != nullptr) static_cast<void>(polykv_lease_release(lease));
    callback.rethrow();
    if (status != POLYKV_OK) return detail::last_error(status);
    return Lease(lease);
  }
  /// `visit` is called for each document; false ends the listing.
  Result<> list(const std::function<bool(const polykv_document_info&)>& visit) {
    detail::Callback<polykv_document_info> callback{visit, {}};
    const polykv_status status = polykv_document_list(
        session_.get(), detail::Callback<polykv_document_info>::call, &callback);
    callback.rethrow();
    return detail::checked(status);
  }
  Result<> remove(const std::string& name) {
    return detail::checked(polykv_document_remove(session_.get(), name.c_str(), nullptr));
  }
  Result<> remove(std::span<const uint8_t, 32> digest) {
    return detail::checked(polykv_document_remove(session_.get(), nullptr, digest.data()));
  }
  Result<DaemonStatus> daemon_status() {
    DaemonStatus daemon;
    const polykv_status status = polykv_session_daemon_status(session_.get(), &daemon);
    if (status != POLYKV_OK) return detail::last_error(status);
    return daemon;
  }
  polykv_session* get() const { return session_.get(); }

 private:
  explicit Session(polykv_session* owned) : session_(owned) {}
  detail::Owner<polykv_session, polykv_session_close> session_;
};

}  // namespace polykv::client

#endif
