// What every function of the C ABI needs: the thread's last error, structs of other versions, and
// the handles behind the opaque types.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "libclient/acquire.h"
#include "libclient/attend.h"
#include "libclient/document.h"
#include "libclient/lease.h"
#include "libclient/publisher.h"
#include "libclient/session.h"
#include "polykv/polykv.h"

namespace polykv::lib {

/// Keeps the message for polykv_last_error() and passes the code on.
polykv_status report(const Status& status) noexcept;

/// Runs the body of a function of the ABI, which returns a Status: no exception leaves the library.
template <typename Body>
polykv_status guarded(Body body) noexcept {
  try {
    return report(body());
  } catch (const std::bad_alloc&) {
    return report({POLYKV_ERR_NO_MEMORY, "out of memory"});
  } catch (...) {
    return report({POLYKV_ERR_INTERNAL, "an exception that nobody caught; please report it"});
  }
}

/// A required pointer argument.
Status require(const void* pointer, const char* operation, const char* argument);

/// Reads a struct of the caller's version into ours: what it lacks is 0, what it has beyond ours
/// must be 0. `smallest`: the size of the struct's first published version.
template <typename T>
Status read_struct(const T* given, size_t smallest, const char* name, T& out) {
  POLYKV_RETURN_IF_ERROR(require(given, name, "the struct"));
  const size_t size = given->struct_size;
  if (size < smallest) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("%s: struct_size is %zu; call %s_init first", name, size, name)};
  }
  const auto* bytes = reinterpret_cast<const uint8_t*>(given);
  for (size_t i = sizeof(T); i < size && size < (1U << 16); ++i) {
    if (bytes[i] != 0) {
      return {POLYKV_ERR_VERSION,
              format("%s: a field is set that this library (version %s) does not know", name,
                     polykv_version_text())};
    }
  }
  std::memset(&out, 0, sizeof out);
  std::memcpy(&out, given, std::min(size, sizeof out));
  return Status::ok();
}

/// Writes as much of `value` as the caller's version of the struct has, and leaves its struct_size.
template <typename T>
Status write_struct(const T& value, size_t smallest, const char* name, T* out) {
  POLYKV_RETURN_IF_ERROR(require(out, name, "the struct"));
  const size_t size = out->struct_size;
  if (size < smallest) {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            format("%s: struct_size is %zu; call %s_init first", name, size, name)};
  }
  std::memcpy(out, &value, std::min(size, sizeof value));
  out->struct_size = size;
  return Status::ok();
}

/// What an _init function begins with: everything 0 but the size field; NULL is ignored.
template <typename T>
T* init(T* value) {
  if (value == nullptr) return nullptr;
  std::memset(value, 0, sizeof *value);
  value->struct_size = sizeof *value;
  return value;
}

/// The number in an enum of the ABI. A caller may have put any there, and to load one that is no
/// enumerator is undefined in C++, so it is copied as bytes.
template <typename Enum>
uint32_t number_of(const Enum& given) {
  uint32_t number = 0;
  static_assert(std::is_enum_v<Enum> && sizeof number == sizeof given);
  std::memcpy(&number, &given, sizeof number);
  return number;
}

Result<ModelIdentity> from_c(const polykv_model& model);
Result<Dtype> dtype_from_c(const polykv_dtype& dtype);
/// Not checked: profile_name() and the daemon know which exist.
inline Profile profile_from_c(const polykv_profile& profile) {
  return static_cast<Profile>(number_of(profile));
}
inline Strides from_c(const polykv_strides& strides) {
  return {strides.kv_head, strides.token, strides.dim};
}
inline Strides from_c(const polykv_query_strides& strides) {
  return {strides.head, strides.query, strides.dim};
}
Result<KvSource> from_c(const polykv_kv_source* source);
Result<DecodeRequest> from_c(const polykv_decode_options* options);
Result<AttendRequest> from_c(const polykv_attend_options* options);
inline std::string text_of(const char* text) {
  return text == nullptr ? "" : text;
}
inline polykv_layer_geometry to_c(const LayerGeometry& layer) {
  return {layer.kv_head_count, layer.k_head_dim, layer.v_head_dim, layer.sliding_window};
}

/// A record as the C struct, whose pointers live as long as this and the record.
class DocumentView {
 public:
  explicit DocumentView(const DocumentRecord& record);
  DocumentView(const DocumentView&) = delete;
  DocumentView& operator=(const DocumentView&) = delete;
  const polykv_document_info& info() const { return info_; }

 private:
  std::vector<const char*> names_;
  std::vector<polykv_layer_geometry> layers_;
  std::vector<polykv_layer_quality> qualities_;
  polykv_model model_{};
  polykv_document_info info_{};
};

}  // namespace polykv::lib

struct polykv_session {
  std::shared_ptr<polykv::lib::Session> session;
};

struct polykv_lease {
  explicit polykv_lease(std::unique_ptr<polykv::lib::Lease> from)
      : lease(std::move(from)), view(lease->document()) {}
  std::unique_ptr<polykv::lib::Lease> lease;
  polykv::lib::DocumentView view;
};

struct polykv_publisher {
  std::shared_ptr<polykv::lib::Publisher> publisher;
};

struct polykv_segment {
  std::unique_ptr<polykv::lib::OpenSegment> segment;
};

namespace polykv::lib {

/// A lease that is there, in the process that acquired it.
inline Status check_lease(const polykv_lease* lease, const char* operation) {
  POLYKV_RETURN_IF_ERROR(require(lease, operation, "lease"));
  return lease->lease->session().check_process(operation);
}

}  // namespace polykv::lib
