// ls, show, rm, verify, status.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <ctime>

#include "libclient/cli/commands.h"

namespace polykv::cli {

namespace {

std::string names_of(const Json& document) {
  std::string names;
  for (const Json& name : document["names"]) {
    names += (names.empty() ? "" : ", ") + one_line(name.get<std::string>());
  }
  return names.empty() ? "-" : names;
}

std::string ratio_of(const Json& document) {
  const auto stored = document["stored_bytes"].get<double>();
  return stored == 0 ? "-" : format("%.2f", document["bf16_bytes"].get<double>() / stored);
}

std::string number(const Json& value) {
  return std::to_string(value.get<uint64_t>());
}

std::string state_of(const Json& document) {
  return document["state"].get<std::string>() + (document["public"] == true ? ",public" : "") +
         (document["backing"] == "cuda" ? ",gpu" : "");
}

std::string tokens_of(const Json& document) {
  const bool is_complete = document["sealed_token_count"] == document["token_count"];
  return (is_complete ? "" : number(document["sealed_token_count"]) + " of ") +
         number(document["token_count"]);
}

std::string utc(int64_t unix_ms) {
  const std::time_t seconds = unix_ms / 1000;
  std::tm parts{};
  char text[32];
  ::gmtime_r(&seconds, &parts);
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text;
}

/// "k5v4", or "auto (21 k5v4, 9 exact)".
std::string codec_of(const Json& document) {
  const auto profile = document["profile"].get<std::string>();
  if (profile != "auto") return profile;
  return profile + " (" + document["layer_profiles"].get<std::string>() + ")";
}

void print_details(const Json& document) {
  const auto line = [](const char* label, const std::string& value) {
    std::printf("%-12s %s\n", label, value.c_str());
  };
  const Json& model = document["model_details"];
  line("names", names_of(document));
  line("digest", document["digest"].get<std::string>());
  line("model", one_line(model["name"].get<std::string>()));
  line("fingerprint", model["fingerprint"].get<std::string>());
  if (!model["layers"].empty()) {
    const Json& first = model["layers"][0];
    line("layers",
         format("%s; the first has %s kv_heads of head_dim %s (K) and %s (V)",
                number(model["layer_count"]).c_str(), number(first["kv_head_count"]).c_str(),
                number(first["k_head_dim"]).c_str(), number(first["v_head_dim"]).c_str()));
  }
  line("codec", codec_of(document));
  if (const Json& certificate = document["certificate"]; !certificate.is_null()) {
    line("certificate",
         format("relative error of attention: %.3g in the mean of the layers, %.3g in the worst",
                certificate["relative_error_mean"].get<double>(),
                certificate["relative_error_worst"].get<double>()));
  }
  line("tokens", tokens_of(document) + " in " + number(document["segment_count"]) + " segments");
  line("stored", human_bytes(document["stored_bytes"]) + "; as bf16 " +
                     human_bytes(document["bf16_bytes"]) + ", " + ratio_of(document) +
                     " times as much");
  if (document["shared_bytes"] != 0)
    line("shared", human_bytes(document["shared_bytes"]) + " of it with other documents");
  if (document["prefix"] != "none") line("prefix", document["prefix"]);
  line("leases", number(document["lease_count"]));
  line("state", state_of(document));
  line("memory", document["backing"] == "cuda" ? "of a GPU" : "of the host");
  line("created", utc(document["created_unix_ms"]));
}

Result<DocumentArgument> document_argument(const std::string& document, const std::string& codec) {
  DocumentArgument argument{document, POLYKV_PROFILE_ANY};
  if (!codec.empty()) {
    POLYKV_ASSIGN_OR_RETURN(argument.profile, parse_profile(codec));
  }
  return argument;
}

}  // namespace

Status list(const Global& global) {
  POLYKV_ASSIGN_OR_RETURN(client::Session session, connect(global));
  Json documents = Json::array();
  const auto listed = session.list([&](const polykv_document_info& info) {
    documents.push_back(document_json(info));
    return true;
  });
  if (!listed) return to_status(listed.error());
  if (global.json) {
    print({{"documents", documents}});
    return Status::ok();
  }
  Table table(
      {"NAME", "CODEC", "TOKENS", "SEGMENTS", "SIZE", "RATIO", "LEASES", "STATE", "DIGEST"});
  for (const Json& document : documents) {
    table.add({names_of(document), codec_of(document), tokens_of(document),
               number(document["segment_count"]), human_bytes(document["stored_bytes"]),
               ratio_of(document), number(document["lease_count"]), state_of(document),
               document["digest"].get<std::string>().substr(0, 12)});
  }
  table.print();
  return Status::ok();
}

Status show(const Global& global, const std::string& document, const std::string& codec) {
  POLYKV_ASSIGN_OR_RETURN(const DocumentArgument argument, document_argument(document, codec));
  POLYKV_ASSIGN_OR_RETURN(client::Session session, connect(global));
  const auto digest = parse_digest(document);
  const auto is_meant = [&](const polykv_document_info& info) {
    if (argument.profile != POLYKV_PROFILE_ANY && info.profile != argument.profile) return false;
    if (digest) return std::equal(digest->begin(), digest->end(), info.digest);
    return std::any_of(info.names, info.names + info.name_count,
                       [&](const char* name) { return document == name; });
  };
  // Listed and not acquired: looking at a document must not make it look used.
  Json found;
  const auto listed = session.list([&](const polykv_document_info& info) {
    // The caller's own comes before a public one of the same name, as in an acquire.
    if (is_meant(info) && (found.is_null() || (found["public"] == true && info.is_public == 0))) {
      found = document_details_json(info);
    }
    return true;
  });
  if (!listed) return to_status(listed.error());
  if (found.is_null()) {
    return {POLYKV_ERR_NOT_FOUND,
            format("show '%s': no document of that name or digest%s; "
                   "`polykvctl ls` lists them",
                   document.c_str(), codec.empty() ? "" : (" in " + codec).c_str())};
  }
  if (global.json) {
    print({{"document", found}});
  } else {
    print_details(found);
  }
  return Status::ok();
}

Status remove(const Global& global, const std::string& document) {
  POLYKV_ASSIGN_OR_RETURN(client::Session session, connect(global));
  const auto digest = parse_digest(document);
  const auto removed = digest ? session.remove(*digest) : session.remove(document);
  if (!removed) return to_status(removed.error());
  if (global.json) {
    print({{"removed", document}});
  } else {
    std::printf("removed %s\n", one_line(document).c_str());
  }
  return Status::ok();
}

Status verify(const Global& global, const std::string& document, const std::string& codec) {
  POLYKV_ASSIGN_OR_RETURN(const DocumentArgument argument, document_argument(document, codec));
  POLYKV_ASSIGN_OR_RETURN(client::Session session, connect(global));
  const std::string what = "verify '" + one_line(document) + "'";
  const Result<client::Lease> lease = acquire(session, argument);
  if (!lease.is_ok()) return lease.status().with_context(what);
  const auto start = std::chrono::steady_clock::now();
  if (const auto verified = lease->verify(); !verified) {
    return to_status(verified.error()).with_context(what);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const Json json = document_json(lease->info());
  if (global.json) {
    print({{"verified", true}, {"seconds", seconds.count()}, {"document", json}});
  } else {
    std::printf("%s: every checksum of %s segments, %s, is right\n", one_line(document).c_str(),
                number(json["segment_count"]).c_str(), human_bytes(json["stored_bytes"]).c_str());
  }
  return Status::ok();
}

Status daemon_status(const Global& global) {
  POLYKV_ASSIGN_OR_RETURN(client::Session session, connect(global));
  const auto status = session.daemon_status();
  if (!status) return to_status(status.error());
  if (global.json) {
    print({{"daemon",
            {{"version", status->version},
             {"epoch", status->epoch},
             {"pid", status->pid},
             {"uptime_ms", status->uptime_ms},
             {"budget_bytes", status->budget_bytes},
             {"stored_bytes", status->stored_bytes},
             {"retiring_bytes", status->retiring_bytes},
             {"document_count", status->document_count},
             {"segment_count", status->segment_count},
             {"lease_count", status->lease_count},
             {"session_count", status->session_count},
             {"worker_count", status->worker_count},
             {"tokens_prefilled_total", status->tokens_prefilled_total},
             {"tokens_committed_total", status->tokens_committed_total},
             {"evicted_documents_total", status->evicted_documents_total},
             {"fingerprint_cache_hits_total", status->fingerprint_cache_hits_total},
             {"fingerprint_cache_misses_total", status->fingerprint_cache_misses_total},
             {"backing", status->backing},
             {"backing_note", status->backing_note},
             {"device_name", status->device_name},
             {"device_uuid", status->device_uuid},
             {"device_total_bytes", status->device_total_bytes},
             {"device_free_bytes", status->device_free_bytes},
             {"device_reserve_bytes", status->device_reserve_bytes},
             {"device_driver", status->device_driver},
             {"device_runtime", status->device_runtime}}}});
    return Status::ok();
  }
  const auto count = [](uint64_t value) { return static_cast<unsigned long long>(value); };
  std::printf("polykvd %s, process %lld, up %s, epoch %016llx\n", one_line(status->version).c_str(),
              static_cast<long long>(status->pid), human_duration(status->uptime_ms).c_str(),
              count(status->epoch));
  std::printf("memory     %s of %s, %s of removed documents still held\n",
              human_bytes(status->stored_bytes).c_str(), human_bytes(status->budget_bytes).c_str(),
              human_bytes(status->retiring_bytes).c_str());
  std::printf("backing    %s\n", describe_backing(*status).c_str());
  std::printf("documents  %llu in %llu segments, %llu evicted so far\n",
              count(status->document_count), count(status->segment_count),
              count(status->evicted_documents_total));
  std::printf("clients    %llu sessions, %llu leases, %llu workers\n", count(status->session_count),
              count(status->lease_count), count(status->worker_count));
  std::printf("tokens     %llu prefilled here, %llu committed by all producers\n",
              count(status->tokens_prefilled_total), count(status->tokens_committed_total));
  return Status::ok();
}

}  // namespace polykv::cli
