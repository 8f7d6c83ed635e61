// polykvctl: the person's tool. Exit codes are status numbers (docs/exit-codes.md).
#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <iostream>
#include <string_view>

#include "device/probe.h"
#include "libclient/cli/commands.h"
#include "polykv/version.h"

namespace polykv::cli {

namespace {

/// POLYKV_ERR_SYSTEM when what was printed did not get out: a full disk, a closed pipe.
Status flush_output() {
  errno = 0;
  const bool is_written = std::fflush(stdout) == 0 && std::ferror(stdout) == 0;
  if (is_written && std::cout.flush().good()) return Status::ok();
  return system_error("write to standard output", errno == 0 ? EIO : errno,
                      "check what it goes to");
}

int report(Status status, bool json) {
  if (status.is_ok()) status = flush_output();
  if (status.is_ok()) return 0;
  const std::string message = one_line(status.message());
  if (json) {
    const Json error = {{"error",
                         {{"code", static_cast<int>(status.code())},
                          {"status", status_name(status.code())},
                          {"message", message}}}};
    std::fprintf(stderr, "%s\n",
                 error.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  } else {
    std::fprintf(stderr, "polykvctl: %s\n", message.c_str());
  }
  return static_cast<int>(status.code());
}

std::string not_empty(const std::string& name) {
  return name.empty() || name.size() > 255 ? "a name has 1 to 255 bytes" : "";
}

/// All of the command line; `run` is set to the chosen command.
struct CommandLine {
  CLI::App app{"Puts documents into polykvd and looks after them.", "polykvctl"};
  Global global;
  PutOptions put_options;
  PutOptions extend_options;
  TokenizeArguments tokenize_arguments;
  std::string document;
  std::string codec;
  std::function<Status()> run;

  CommandLine();

 private:
  CLI::App* command(const char* name, const char* description, std::function<Status()> body) {
    CLI::App* added = app.add_subcommand(name, description);
    added->callback([this, body = std::move(body)] { run = body; });
    return added;
  }
  void add_document(CLI::App* target, bool with_codec) {
    target->add_option("document", document, "its name, or its digest (64 hexadecimal digits)")
        ->required();
    if (with_codec) target->add_option("--codec", codec, "the one in this codec profile");
  }
  void add_put();
  void add_extend();
  static void add_recompute_prefix(CLI::App* target, PutOptions& options);
  void add_tokenize();
};

CommandLine::CommandLine() {
  app.require_subcommand(1);
  app.fallthrough();
  app.set_version_flag("--version", "polykvctl " POLYKV_VERSION_TEXT);
  app.add_option("--socket", global.socket_path,
                 "polykvd's socket (otherwise POLYKV_SOCKET, then the usual places)");
  app.add_flag("--json", global.json, "results and errors as JSON");
  app.footer("Exit codes: 0, or the number of the status that ended it (docs/exit-codes.md).");
  add_put();
  add_extend();
  command("ls", "list documents", [this] { return list(global); });
  add_document(command("show", "tell all about a document",
                       [this] { return show(global, document, codec); }),
               true);
  add_document(command("rm", "take a document's name away; without names it is freed",
                       [this] { return remove(global, document); }),
               false);
  add_document(command("verify", "recompute every checksum of a document",
                       [this] { return verify(global, document, codec); }),
               true);
  command("status", "tell how polykvd is", [this] { return daemon_status(global); });
  add_tokenize();
  command("doctor", "tell what this machine can do and what is misconfigured",
          [this] { return doctor(global); });
}

void CommandLine::add_put() {
  CLI::App* put_command =
      command("put", "compute a text's KV cache", [this] { return put(global, put_options); });
  PutOptions& o = put_options;
  put_command->add_option("file", o.file, "UTF-8 text; - is standard input")->required();
  put_command->add_option("--model", o.model, "a GGUF file, or a name of polykvd's [models]")
      ->required();
  put_command->add_option("--name", o.name, "the document's name (otherwise the file's)")
      ->check(not_empty);
  put_command
      ->add_option("--codec", o.codec,
                   "codec profile: k5v4, k6v5, k8v8, k8v3, k4v3, auto, exact, paper-k8v3")
      ->capture_default_str();
  put_command->add_option("--before", o.before, "a file whose text is put in front");
  put_command->add_option("--share", o.share, "public: every user may read it")
      ->check(CLI::IsMember({"public"}));
  put_command->add_flag("--bos", o.bos, "begin with the model's BOS token");
  put_command->add_flag("--parse-special", o.parse_special,
                        "special tokens written in the text become tokens (trusted text only)");
  put_command->add_flag("--chat-head", o.chat_head, "put the chat template's head in front");
  put_command->add_flag("--replace", o.replace, "take the name from another document of yours");
  add_recompute_prefix(put_command, o);
}

void CommandLine::add_extend() {
  CLI::App* extend_command = command("extend", "compute a text that continues a document",
                                     [this] { return extend(global, extend_options); });
  PutOptions& o = extend_options;
  o.codec.clear();
  extend_command->add_option("document", o.extend, "its name, or its digest")->required();
  extend_command->add_option("file", o.file, "UTF-8 text; - is standard input")->required();
  extend_command
      ->add_option("--model", o.model, "the document's own: a GGUF file, or a name of [models]")
      ->required();
  extend_command
      ->add_option("--name", o.name,
                   "the longer document's name (otherwise the document's moves to it)")
      ->check(not_empty);
  extend_command->add_option("--codec", o.codec, "which of the document's, if there are several");
  extend_command->add_flag("--parse-special", o.parse_special,
                           "special tokens written in the text become tokens (trusted text only)");
  extend_command->add_flag("--replace", o.replace, "take the name from another document of yours");
  add_recompute_prefix(extend_command, o);
}

void CommandLine::add_recompute_prefix(CLI::App* target, PutOptions& options) {
  target->add_flag("--recompute-prefix", options.recompute_prefix,
                   "compute what other documents share with it again, so that the rest attends to "
                   "exact K and V; it is not stored twice");
}

void CommandLine::add_tokenize() {
  TokenizeArguments& o = tokenize_arguments;
  CLI::App* tokenize_command = command("tokenize", "print a text's token ids as JSON", [this] {
    tokenize_arguments.has_text = app.get_subcommand("tokenize")->count("--text") > 0;
    return tokenize(tokenize_arguments);
  });
  tokenize_command->add_option("--model", o.model, "a GGUF file")->required();
  CLI::Option* file =
      tokenize_command->add_option("file", o.file, "UTF-8 text; - is standard input")
          ->capture_default_str();
  tokenize_command->add_option("--text", o.text, "the text itself")->excludes(file);
  tokenize_command->add_option("--before", o.before, "a file whose text is put in front");
  tokenize_command->add_flag("--bos", o.bos, "begin with the model's BOS token");
  tokenize_command->add_flag("--parse-special", o.parse_special,
                             "special tokens written in the text become tokens");
  tokenize_command->add_flag("--chat-head", o.chat_head, "put the chat template's head in front");
}

int main(int argument_count, char** arguments) {
  CommandLine line;
  try {
    line.app.parse(argument_count, arguments);
  } catch (const CLI::ParseError& error) {
    // --help and --version end the parsing as well.
    if (error.get_exit_code() == 0) {
      line.app.exit(error);
      return report(Status::ok(), false);
    }
    bool json = false;
    for (int i = 1; i < argument_count; ++i) {
      json = json || std::string_view(arguments[i]) == "--json";
    }
    std::string cause = error.what();
    const std::vector<std::string> unknown = line.app.remaining();
    if (line.app.get_subcommands().empty() && !unknown.empty())
      cause = "there is no command '" + unknown.front() + "'";
    return report({POLYKV_ERR_INVALID_ARGUMENT, cause + "; see `polykvctl --help`"}, json);
  }
  try {
    return report(line.run(), line.global.json);
  } catch (const std::exception& error) {
    return report({POLYKV_ERR_INTERNAL, error.what()}, line.global.json);
  }
}

}  // namespace

}  // namespace polykv::cli

int main(int argument_count, char** arguments) {
  if (argument_count > 1 && std::string_view(arguments[1]) == polykv::device::kProbeFlag)
    return polykv::device::run_probe_helper({arguments + 2, arguments + argument_count});
  return polykv::cli::main(argument_count, arguments);
}
