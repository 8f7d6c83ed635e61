// tokenize: what ids a document would have, without the daemon.
#include "daemon/prefill/model/model.h"
#include "libclient/cli/commands.h"
#include "libclient/cli/files.h"

namespace polykv::cli {

Status tokenize(const TokenizeArguments& arguments) {
  POLYKV_ASSIGN_OR_RETURN(const UniqueFd model, open_model_file(arguments.model));
  std::string text = arguments.text;
  if (!arguments.has_text) {
    POLYKV_ASSIGN_OR_RETURN(text, read_input(arguments.file, "text", kMaxTextBytes));
  }
  std::string before;
  if (!arguments.before.empty()) {
    POLYKV_ASSIGN_OR_RETURN(before, read_input(arguments.before, "--before", kMaxTextBytes));
  }
  DocumentText document;
  document.text = text;
  document.before = before;
  document.chat_head = arguments.chat_head;
  document.options.add_bos = arguments.bos;
  document.options.parse_special = arguments.parse_special;
  POLYKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> ids,
                          tokenize_document(model.get(), arguments.model, document));
  const Json json = {{"token_count", ids.size()}, {"ids", ids}};
  std::puts(json.dump().c_str());
  return Status::ok();
}

}  // namespace polykv::cli
