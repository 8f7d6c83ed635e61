// polykvctl's commands, each with the options that the command line sets.
#pragma once

#include <string>

#include "libclient/cli/command.h"

namespace polykv::cli {

struct PutOptions {
  std::string file;    // "-": standard input
  std::string name;    // empty: put takes the file's own, without folders; extend the document's
  std::string extend;  // the document that the text continues: its name or digest
  std::string model;
  std::string codec = "k5v4";
  std::string before;
  std::string share;  // "" or "public"
  bool bos = false;
  bool parse_special = false;
  bool chat_head = false;
  bool replace = false;
  bool recompute_prefix = false;
};
Status put(const Global& global, const PutOptions& options);
Status extend(const Global& global, const PutOptions& options);

Status list(const Global& global);
Status show(const Global& global, const std::string& document, const std::string& codec);
Status remove(const Global& global, const std::string& document);
Status verify(const Global& global, const std::string& document, const std::string& codec);
Status daemon_status(const Global& global);

struct TokenizeArguments {
  std::string model;
  std::string file = "-";
  std::string text;
  bool has_text = false;
  std::string before;
  bool bos = false;
  bool parse_special = false;
  bool chat_head = false;
};
Status tokenize(const TokenizeArguments& arguments);

Status doctor(const Global& global);

}  // namespace polykv::cli
