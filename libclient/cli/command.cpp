#include "libclient/cli/command.h"

#include <algorithm>
#include <cstdio>
#include <map>

namespace polykv::cli {

Status to_status(const client::Error& error) {
  return {error.status, error.message};
}

Result<client::Session> connect(const Global& global) {
  client::ConnectOptions options;
  if (!global.socket_path.empty()) options.socket_path = global.socket_path.c_str();
  options.client_name = "polykvctl";
  client::Result<client::Session> session = client::Session::connect(options);
  if (!session) return to_status(session.error());
  return std::move(*session);
}

Result<polykv_profile> parse_profile(const std::string& name) {
  polykv_profile profile = POLYKV_PROFILE_ANY;
  const polykv_status status = polykv_profile_from_name(name.c_str(), &profile);
  if (status != POLYKV_OK) return {status, polykv_last_error()};
  return profile;
}

std::optional<std::array<uint8_t, 32>> parse_digest(const std::string& text) {
  std::array<uint8_t, 32> digest{};
  if (text.size() != 2 * digest.size()) return std::nullopt;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto at = std::string_view("0123456789abcdef").find(text[i]);
    if (at == std::string_view::npos) return std::nullopt;
    digest[i / 2] = static_cast<uint8_t>(digest[i / 2] << 4 | at);
  }
  return digest;
}

Result<client::Lease> acquire(client::Session& session, const DocumentArgument& document) {
  const auto digest = parse_digest(document.text);
  client::AcquireOptions options;
  if (digest) {
    options.digest = digest->data();
  } else {
    options.name = document.text.c_str();
  }
  options.profile = document.profile;
  client::Result<client::Lease> lease = session.acquire(options);
  if (!lease) return to_status(lease.error());
  return std::move(*lease);
}

namespace {

/// "k5v4", or "k5v4+exact" where segments differ; "-": nothing is sealed.
std::string profiles_of(const polykv_layer_quality& layer) {
  std::string text;
  for (uint32_t number = 1; number < 32; ++number) {
    if ((layer.profiles >> number & 1) == 0) continue;
    text += (text.empty() ? "" : "+") +
            std::string(polykv_profile_name(static_cast<polykv_profile>(number)));
  }
  return text.empty() ? "-" : text;
}

std::span<const polykv_layer_quality> layers_of(const polykv_document_info& info) {
  return {info.layers, info.model->layer_count};
}

/// Null where no segment has one.
Json certificate_json(const polykv_document_info& info) {
  double sum = 0;
  float worst = 0;
  uint32_t count = 0;
  for (const polykv_layer_quality& layer : layers_of(info)) {
    if (layer.query_count == 0) continue;
    sum += static_cast<double>(layer.relative_error);
    worst = std::max(worst, layer.relative_error);
    ++count;
  }
  if (count == 0) return nullptr;
  return {{"relative_error_mean", sum / count}, {"relative_error_worst", worst}};
}

Json layer_certificate(const polykv_layer_quality& layer) {
  if (layer.query_count == 0) return nullptr;
  return {{"relative_error", layer.relative_error}, {"query_count", layer.query_count}};
}

}  // namespace

std::string layer_profiles(const polykv_document_info& info) {
  std::map<std::string, uint32_t> counts;
  for (const polykv_layer_quality& layer : layers_of(info)) ++counts[profiles_of(layer)];
  std::string text;
  for (const auto& [profiles, count] : counts)
    text += format("%s%u %s", text.empty() ? "" : ", ", count, profiles.c_str());
  return text;
}

Json document_json(const polykv_document_info& info) {
  Json names = Json::array();
  for (size_t i = 0; i < info.name_count; ++i) names.push_back(info.names[i]);
  constexpr const char* kPrefixes[] = {"none", "decoded", "recomputed"};
  return {{"names", names},
          {"digest", hex(info.digest)},
          {"model", info.model->name},
          {"profile", polykv_profile_name(info.profile)},
          {"token_count", info.token_count},
          {"segment_count", info.segment_count},
          {"stored_bytes", info.stored_bytes},
          {"bf16_bytes", info.bf16_bytes},
          {"lease_count", info.lease_count},
          {"state", info.state},
          {"backing", info.backing},
          {"created_unix_ms", info.created_unix_ms},
          {"public", info.is_public != 0},
          {"sealed_token_count", info.sealed_token_count},
          {"shared_bytes", info.shared_bytes},
          {"prefix",
           kPrefixes[info.prefix_treatment < std::size(kPrefixes) ? info.prefix_treatment : 0]},
          {"layer_profiles", layer_profiles(info)},
          {"certificate", certificate_json(info)}};
}

Json document_details_json(const polykv_document_info& info) {
  const polykv_model& model = *info.model;
  Json layers = Json::array();
  for (uint32_t i = 0; i < model.layer_count; ++i) {
    const polykv_layer_geometry& layer = model.layers[i];
    layers.push_back({{"kv_head_count", layer.kv_head_count},
                      {"k_head_dim", layer.k_head_dim},
                      {"v_head_dim", layer.v_head_dim},
                      {"sliding_window", layer.sliding_window},
                      {"profile", profiles_of(info.layers[i])},
                      {"certificate", layer_certificate(info.layers[i])}});
  }
  constexpr const char* kDtypes[] = {"unknown", "f32", "f16", "bf16"};
  const auto dtype = static_cast<size_t>(model.source_dtype);
  Json json = document_json(info);
  json["model_details"] = {{"name", model.name},
                           {"fingerprint", hex(model.fingerprint)},
                           {"source_dtype", kDtypes[dtype < std::size(kDtypes) ? dtype : 0]},
                           {"rope_theta", model.rope_theta},
                           {"rotary_dim", model.rotary_dim},
                           {"layer_count", model.layer_count},
                           {"layers", layers}};
  return json;
}

void print(const Json& json) {
  std::puts(json.dump(2, ' ', false, Json::error_handler_t::replace).c_str());
}

std::string human_bytes(uint64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return format(unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
}

std::string cuda_version(uint32_t number) {
  return format("%u.%u", number / 1000, number % 1000 / 10);
}

std::string describe_backing(const polykv_daemon_status& status) {
  if (std::string_view(status.backing) != "cuda") {
    const std::string note = one_line(status.backing_note);
    return note.empty() ? "host memory" : "host memory, because: " + note;
  }
  return format(
      "memory of %s (%s), %s of %s free, %s of it for other programs; driver for CUDA %s",
      one_line(status.device_name).c_str(), one_line(status.device_uuid).c_str(),
      human_bytes(status.device_free_bytes).c_str(), human_bytes(status.device_total_bytes).c_str(),
      human_bytes(status.device_reserve_bytes).c_str(), cuda_version(status.device_driver).c_str());
}

std::string human_duration(int64_t milliseconds) {
  const long long seconds = milliseconds / 1000;
  if (seconds < 60) return format("%.1f s", static_cast<double>(milliseconds) / 1000);
  if (seconds < 3600) return format("%lld min %lld s", seconds / 60, seconds % 60);
  if (seconds < 86400) return format("%lld h %lld min", seconds / 3600, seconds % 3600 / 60);
  return format("%lld d %lld h", seconds / 86400, seconds % 86400 / 3600);
}

std::string hex(std::span<const uint8_t> bytes) {
  std::string text;
  for (const uint8_t byte : bytes) text += format("%02x", byte);
  return text;
}

std::string one_line(const std::string& text) {
  std::string line = text;
  std::replace_if(
      line.begin(), line.end(),
      [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }, '?');
  return line;
}

void Table::print() const {
  std::vector<size_t> widths(rows_.front().size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      line += row[i];
      if (i + 1 < row.size()) line.append(widths[i] - row[i].size() + 2, ' ');
    }
    std::puts(line.c_str());
  }
}

}  // namespace polykv::cli
