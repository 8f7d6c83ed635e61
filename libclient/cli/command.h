// What polykvctl's commands share: the global options, results as text or JSON, errors.
//
// A command prints its result to standard output and returns a Status; main() turns a failing one
// into one line on standard error (or one JSON object with --json) and into the exit code.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "common/result.h"
#include "polykv/polykv.hpp"

namespace polykv::cli {

using Json = nlohmann::ordered_json;

struct Global {
  std::string socket_path;  // empty: the library looks for it
  bool json = false;
};

/// `document` of a command line: 64 hexadecimal digits are a digest, everything else is a name.
struct DocumentArgument {
  std::string text;
  polykv_profile profile = POLYKV_PROFILE_ANY;
};

Result<client::Session> connect(const Global& global);
Status to_status(const client::Error& error);
/// POLYKV_ERR_INVALID_ARGUMENT lists what there is.
Result<polykv_profile> parse_profile(const std::string& name);
/// The 32 bytes of 64 hexadecimal digits.
std::optional<std::array<uint8_t, 32>> parse_digest(const std::string& text);
Result<client::Lease> acquire(client::Session& session, const DocumentArgument& document);

Json document_json(const polykv_document_info& info);
/// "21 k5v4, 9 exact": with which profiles a document's layers are stored, and how many with each.
std::string layer_profiles(const polykv_document_info& info);
/// `document_json` with the model's geometry, and how each layer is stored.
Json document_details_json(const polykv_document_info& info);

void print(const Json& json);
/// "12.3 MiB"
std::string human_bytes(uint64_t bytes);
/// "3 min 12 s"
std::string human_duration(int64_t milliseconds);
std::string hex(std::span<const uint8_t> bytes);
/// Where the daemon keeps documents, in one line.
std::string describe_backing(const polykv_daemon_status& status);
/// "13.0" of 13000.
std::string cuda_version(uint32_t number);
/// One line, whatever somebody else put into it: control bytes become '?'.
std::string one_line(const std::string& text);

/// Left-aligned columns, two spaces apart; numbers are the caller's texts.
class Table {
 public:
  explicit Table(std::vector<std::string> header) { rows_.push_back(std::move(header)); }
  void add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  void print() const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace polykv::cli
