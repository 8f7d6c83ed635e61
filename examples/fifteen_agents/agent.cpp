#include "examples/fifteen_agents/agent.h"

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "common/fd.h"
#include "daemon/prefill/model/model.h"
#include "daemon/prefill/transformer/transformer.h"
#include "examples/fifteen_agents/pool.h"
#include "examples/fifteen_agents/questions.h"

namespace polykv::example {

namespace {

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void tell(const nlohmann::json& line) {
  // A token may end inside a UTF-8 character: replace such bytes instead of failing.
  std::cout << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << '\n'
            << std::flush;
}

Status wait_for(const char* word) {
  std::string line;
  if (!std::getline(std::cin, line))
    return {POLYKV_ERR_CANCELLED, "wait for the driver: it is gone"};
  if (line != word)
    return {POLYKV_ERR_PROTOCOL, format("wait for '%s': the driver said '%s'", word, line.c_str())};
  return Status::ok();
}

Result<UniqueFd> open_file(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return system_error("open '" + path + "'", errno, "check the path");
  return fd;
}

Result<std::string> read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  if (!file && text.empty())
    return {POLYKV_ERR_INVALID_ARGUMENT, "read '" + path + "': cannot be read; check the path"};
  return text;
}

/// The model, its tokenizer and its weights, as every agent holds them.
class Agent {
 public:
  static Result<Agent> load(const AgentOptions& options) {
    POLYKV_ASSIGN_OR_RETURN(UniqueFd fd, open_file(options.model_path));
    POLYKV_ASSIGN_OR_RETURN(Model model, Model::open(fd.get(), options.model_path));
    POLYKV_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::from_gguf(model.gguf()));
    POLYKV_ASSIGN_OR_RETURN(ChatFrame frame, chat_frame_from_gguf(model.gguf()));
    POLYKV_ASSIGN_OR_RETURN(Weights weights,
                            Weights::open_cache(options.weights_path, model.config()));
    auto shared_weights = std::make_shared<const Weights>(std::move(weights));
    POLYKV_ASSIGN_OR_RETURN(KvCache cache,
                            KvCache::create(model.config(), model.config().context_length));
    set_thread_count(options.thread_count);
    shared_weights->touch();
    return Agent(options, std::move(fd), std::move(model), std::move(tokenizer), std::move(frame),
                 std::move(shared_weights), std::move(cache));
  }

  /// The document's KV from the pool. The lease is kept.
  Status attach() {
    const auto start = Clock::now();
    POLYKV_ASSIGN_OR_RETURN(session_, connect(options_.socket_path));
    POLYKV_ASSIGN_OR_RETURN(lease_, acquire(session_.get(), options_.document_name));
    POLYKV_RETURN_IF_ERROR(require_model(lease_.get(), weights_->fingerprint()));
    acquire_ms_ = ms_since(start);
    POLYKV_ASSIGN_OR_RETURN(last_sealed_, decode_into(lease_.get(), cache_, options_.thread_count));
    document_ms_ = ms_since(start);
    return Status::ok();
  }

  /// The same KV without the pool.
  Status prefill_alone() {
    const auto start = Clock::now();
    POLYKV_ASSIGN_OR_RETURN(const std::string text, read_text(options_.document_path));
    DocumentText document;
    document.text = text;
    document.chat_head = true;
    POLYKV_ASSIGN_OR_RETURN(const std::vector<uint32_t> ids,
                            tokenize_document(tokenizer_, model_.gguf(), document));
    POLYKV_RETURN_IF_ERROR(transformer_.forward(ids, cache_, {}));
    document_ms_ = ms_since(start);
    return Status::ok();
  }

  /// Greedy. `start`: from when the time to the first token counts.
  Status answer(uint32_t question, Clock::time_point start, bool is_first) {
    const uint32_t document_tokens = cache_.token_count();
    const std::string text = std::string("\n\nQuestion: ") + kQuestions[question] + frame_.tail;
    POLYKV_ASSIGN_OR_RETURN(std::vector<uint32_t> next,
                            tokenizer_.encode(text, {.add_bos = false, .parse_special = true}));
    std::vector<float> logits(model_.config().vocab_size);
    std::vector<uint32_t> ids;
    std::vector<double> gaps;  // between the two best logits
    double first_token_ms = 0;
    double after_sealed_ms = 0;
    while (true) {
      POLYKV_RETURN_IF_ERROR(transformer_.forward(next, cache_, logits));
      const uint32_t id = argmax(logits);
      if (ids.empty()) {
        first_token_ms = ms_since(start);
        after_sealed_ms = ms_since(last_sealed_);
      }
      ids.push_back(id);
      const float best = logits[id];
      logits[id] = -std::numeric_limits<float>::infinity();
      gaps.push_back(best - *std::max_element(logits.begin(), logits.end()));
      if (ids.size() >= options_.max_tokens || tokenizer_.is_end_of_generation(id)) break;
      next.assign(1, id);
    }
    cache_.set_token_count(document_tokens);
    nlohmann::json line = {{"event", "answer"}, {"question", question},
                           {"ids", ids},        {"text", tokenizer_.decode(ids)},
                           {"gaps", gaps},      {"document_tokens", document_tokens}};
    if (is_first) {
      line["acquire_ms"] = acquire_ms_;
      line["document_ms"] = document_ms_;
      line["first_token_ms"] = first_token_ms;
      if (lease_ != nullptr) line["after_sealed_ms"] = after_sealed_ms;
    }
    tell(line);
    return Status::ok();
  }

  Status run() {
    tell({{"event", "ready"}});
    POLYKV_RETURN_IF_ERROR(wait_for("go"));
    const auto start = Clock::now();
    POLYKV_RETURN_IF_ERROR(options_.document_name.empty() ? prefill_alone() : attach());
    for (size_t i = 0; i < options_.questions.size(); ++i) {
      POLYKV_RETURN_IF_ERROR(answer(options_.questions[i], start, i == 0));
    }
    tell({{"event", "holding"}});
    return wait_for("exit");
  }

 private:
  Agent(const AgentOptions& options, UniqueFd fd, Model model, Tokenizer tokenizer, ChatFrame frame,
        std::shared_ptr<const Weights> weights, KvCache cache)
      : options_(options),
        model_fd_(std::move(fd)),
        model_(std::move(model)),
        tokenizer_(std::move(tokenizer)),
        frame_(std::move(frame)),
        weights_(std::move(weights)),
        cache_(std::move(cache)),
        transformer_(weights_) {}

  AgentOptions options_;
  UniqueFd model_fd_;  // the Model borrows it
  Model model_;
  Tokenizer tokenizer_;
  ChatFrame frame_;
  std::shared_ptr<const Weights> weights_;
  KvCache cache_;
  Transformer transformer_;
  SessionHandle session_;
  LeaseHandle lease_;  // after session_: released before the session closes
  double acquire_ms_ = 0;
  Clock::time_point last_sealed_;  // when the last of the document could be read
  double document_ms_ = 0;
};

}  // namespace

Status prepare_weights(const std::string& model_path, const std::string& weights_path,
                       uint32_t thread_count) {
  POLYKV_ASSIGN_OR_RETURN(UniqueFd fd, open_file(model_path));
  POLYKV_ASSIGN_OR_RETURN(const Model model, Model::open(fd.get(), model_path));
  const Result<Weights> cached = Weights::open_cache(weights_path, model.config(), true);
  if (cached.is_ok()) {
    // The file may be of another model of the same shape.
    POLYKV_ASSIGN_OR_RETURN(const Digest fingerprint, model_fingerprint(model));
    if (cached->fingerprint() == fingerprint) return Status::ok();
  }
  POLYKV_ASSIGN_OR_RETURN(const Weights weights, Weights::load(model, thread_count));
  return weights.save_cache(weights_path);
}

Status run_agent(const AgentOptions& options) {
  const Status status = [&]() -> Status {
    POLYKV_ASSIGN_OR_RETURN(Agent agent, Agent::load(options));
    return agent.run();
  }();
  if (!status.is_ok()) tell({{"event", "error"}, {"message", status.message()}});
  return status;
}

}  // namespace polykv::example
