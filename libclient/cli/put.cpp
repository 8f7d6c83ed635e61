// put: a text becomes a document. extend: a text continues one.
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "libclient/cli/commands.h"
#include "libclient/cli/files.h"
#include "libclient/cli/progress.h"

namespace polykv::cli {

namespace {

Result<std::string> name_for(const PutOptions& options) {
  if (!options.name.empty()) return options.name;
  if (options.file == "-") {
    return {POLYKV_ERR_INVALID_ARGUMENT,
            "put: a document from standard input needs a name; give --name"};
  }
  return std::filesystem::path(options.file).filename().string();
}

uint32_t flags_of(const PutOptions& options) {
  uint32_t flags = 0;
  if (options.bos) flags |= POLYKV_INGEST_ADD_BOS;
  if (options.parse_special) flags |= POLYKV_INGEST_PARSE_SPECIAL;
  if (options.chat_head) flags |= POLYKV_INGEST_CHAT_HEAD;
  if (options.replace) flags |= POLYKV_INGEST_REPLACE_NAME;
  if (options.share == "public") flags |= POLYKV_INGEST_SHARE_PUBLIC;
  if (options.recompute_prefix) flags |= POLYKV_INGEST_RECOMPUTE_PREFIX;
  return flags;
}

/// `title`: for messages. An empty name leaves it to polykvd.
Status ingest_file(const Global& global, const PutOptions& options, const std::string& name,
                   const std::string& title) {
  client::IngestOptions ingest;
  ingest.profile = POLYKV_PROFILE_ANY;
  if (!options.codec.empty()) {
    POLYKV_ASSIGN_OR_RETURN(ingest.profile, parse_profile(options.codec));
  }
  if (options.file == "-" && options.before == "-") {
    return {POLYKV_ERR_INVALID_ARGUMENT, "text and --before cannot both be standard input"};
  }
  POLYKV_ASSIGN_OR_RETURN(const ModelArgument model, open_model(options.model));
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd text, open_input(options.file, "text"));
  if (size_of(text) == uint64_t{0}) {
    return {POLYKV_ERR_EMPTY_DOCUMENT, "the document has no tokens; give a file with text"};
  }
  UniqueFd before;
  if (!options.before.empty()) {
    POLYKV_ASSIGN_OR_RETURN(before, open_input(options.before, "--before"));
  }
  POLYKV_ASSIGN_OR_RETURN(client::Session session, connect(global));

  const auto digest = parse_digest(options.extend);
  if (digest) {
    ingest.extend_digest = digest->data();
  } else if (!options.extend.empty()) {
    ingest.extend_name = options.extend.c_str();
  }
  ingest.name = name.empty() ? nullptr : name.c_str();
  ingest.model_name = model.name.empty() ? nullptr : model.name.c_str();
  ingest.model_fd = model.file.get();
  ingest.text_fd = text.get();
  ingest.before_fd = before.get();
  ingest.flags = flags_of(options);

  const auto start = std::chrono::steady_clock::now();
  uint64_t memory_bytes = 0;
  bool was_computed = false;
  const client::Result<client::Lease> lease = [&] {
    ProgressPrinter printer(one_line(title));
    return session.ingest(ingest, [&](const polykv_ingest_progress& progress) {
      memory_bytes = std::max(memory_bytes, progress.memory_bytes);
      was_computed = was_computed || progress.phase == POLYKV_INGEST_PREFILLING;
      if (!global.json) printer.update(progress);
      return true;
    });
  }();
  if (!lease) {
    const Status failed = to_status(lease.error());
    // The worker got a descriptor: only here is it known which file that is.
    const bool is_about_model =
        failed.code() == POLYKV_ERR_MODEL_FORMAT || failed.code() == POLYKV_ERR_MODEL_UNSUPPORTED;
    return is_about_model ? failed.with_context("model '" + options.model + "'") : failed;
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  const client::DocumentInfo info = lease->info();
  if (global.json) {
    print({{"document", document_json(info)},
           {"seconds", seconds.count()},
           {"worker_memory_bytes", memory_bytes},
           {"computed", was_computed}});
  } else {
    const std::string layers =
        info.profile == POLYKV_PROFILE_AUTO ? " (" + layer_profiles(info) + ")" : "";
    std::printf("%s: %llu tokens in %s as %s%s%s\n", one_line(title).c_str(),
                static_cast<unsigned long long>(info.token_count),
                human_bytes(info.stored_bytes).c_str(), polykv_profile_name(info.profile),
                layers.c_str(),
                was_computed ? format(", %.1f s", seconds.count()).c_str() : ", was there already");
  }
  return Status::ok();
}

}  // namespace

Status put(const Global& global, const PutOptions& options) {
  POLYKV_ASSIGN_OR_RETURN(const std::string name, name_for(options));
  return ingest_file(global, options, name, name).with_context("put '" + name + "'");
}

Status extend(const Global& global, const PutOptions& options) {
  const std::string title = options.name.empty() ? options.extend : options.name;
  return ingest_file(global, options, options.name, title)
      .with_context("extend '" + options.extend + "'");
}

}  // namespace polykv::cli
