#include "examples/fifteen_agents/agent.h"

#include <algorithm>
#include <chrono>
#include <iostream>
#include <nlohmann/json.hpp>
#include <optional>

#include "common/fd.h"
#include "common/files.h"
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

/// Token ids of what follows the document: a question and the tail of the chat template.
struct Prompts {
  static Result<Prompts> tokenize(const Tokenizer& tokenizer, const ChatFrame& frame,
                                  const std::vector<uint32_t>& questions) {
    Prompts prompts;
    for (const uint32_t question : questions) {
      const std::string text = std::string("\n\nQuestion: ") + kQuestions[question] + frame.tail;
      POLYKV_ASSIGN_OR_RETURN(std::vector<uint32_t> ids,
                              tokenizer.encode(text, {.add_bos = false, .parse_special = true}));
      prompts.longest = std::max(prompts.longest, static_cast<uint32_t>(ids.size()));
      prompts.ids.push_back(std::move(ids));
    }
    return prompts;
  }

  std::vector<std::vector<uint32_t>> ids;
  uint32_t longest = 0;
};

/// The model, its tokenizer and its weights, as every agent holds them.
class Agent {
 public:
  static Result<Agent> load(const AgentOptions& options) {
    POLYKV_ASSIGN_OR_RETURN(UniqueFd fd, open_file(options.model_path, "model"));
    POLYKV_ASSIGN_OR_RETURN(Model model, Model::open(fd.get(), options.model_path));
    POLYKV_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::from_gguf(model.gguf()));
    POLYKV_ASSIGN_OR_RETURN(ChatFrame frame, chat_frame_from_gguf(model.gguf()));
    POLYKV_ASSIGN_OR_RETURN(Weights weights,
                            Weights::open_cache(options.weights_path, model.config()));
    auto shared_weights = std::make_shared<const Weights>(std::move(weights));
    POLYKV_ASSIGN_OR_RETURN(const Prompts prompts,
                            Prompts::tokenize(tokenizer, frame, options.questions));
    const uint32_t capacity = options.read == Read::attend ? prompts.longest + options.max_tokens
                                                           : model.config().context_length;
    POLYKV_ASSIGN_OR_RETURN(KvCache cache, KvCache::create(model.config(), capacity));
    set_thread_count(options.thread_count);
    shared_weights->touch();
    return Agent(options, std::move(fd), std::move(model), std::move(tokenizer), prompts.ids,
                 std::move(shared_weights), std::move(cache));
  }

  /// The document in the pool. The lease is kept.
  Status attach() {
    const auto start = Clock::now();
    POLYKV_ASSIGN_OR_RETURN(session_, connect(options_.socket_path));
    POLYKV_ASSIGN_OR_RETURN(lease_, acquire(session_.get(), options_.document_name));
    POLYKV_RETURN_IF_ERROR(
        require_model(lease_.get(), model_identity(model_.config(), weights_->fingerprint())));
    acquire_ms_ = ms_since(start);
    if (options_.read == Read::attend) {
      POLYKV_ASSIGN_OR_RETURN(prefix_, PooledPrefix::wait_for(lease_.get()));
      last_sealed_ = Clock::now();
    } else {
      POLYKV_ASSIGN_OR_RETURN(last_sealed_,
                              decode_into(lease_.get(), cache_, options_.thread_count));
    }
    document_ms_ = ms_since(start);
    return Status::ok();
  }

  /// The same KV without the pool.
  Status prefill_alone() {
    const auto start = Clock::now();
    POLYKV_ASSIGN_OR_RETURN(const std::string text,
                            read_file(options_.document_path, "text", kMaxTextBytes));
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
  Status answer(size_t index, Clock::time_point start, bool is_first) {
    const uint32_t own_tokens = cache_.token_count();
    ForwardOptions forward;
    forward.prefix = prefix_ ? &*prefix_ : nullptr;
    std::vector<uint32_t> next = prompts_[index];
    std::vector<float> logits(model_.config().vocab_size);
    std::vector<uint32_t> ids;
    std::vector<double> gaps;      // between the two best logits
    std::vector<double> token_ms;  // of each token after the first
    double first_token_ms = 0;
    double after_sealed_ms = 0;
    while (true) {
      const auto step = Clock::now();
      POLYKV_RETURN_IF_ERROR(transformer_.forward(next, cache_, logits, forward));
      const uint32_t id = argmax(logits);
      if (ids.empty()) {
        first_token_ms = ms_since(start);
        after_sealed_ms = ms_since(last_sealed_);
      } else {
        token_ms.push_back(ms_since(step));
      }
      ids.push_back(id);
      const float best = logits[id];
      logits[id] = -std::numeric_limits<float>::infinity();
      gaps.push_back(best - *std::max_element(logits.begin(), logits.end()));
      if (ids.size() >= options_.max_tokens) break;
      if (tokenizer_.is_end_of_generation(id) && !options_.ignore_end) break;
      next.assign(1, id);
    }
    cache_.set_token_count(own_tokens);
    nlohmann::json line = {{"event", "answer"}, {"question", options_.questions[index]},
                           {"ids", ids},        {"text", tokenizer_.decode(ids)},
                           {"gaps", gaps},      {"token_ms", token_ms}};
    line["document_tokens"] = own_tokens + (prefix_ ? prefix_->token_count() : 0);
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
      POLYKV_RETURN_IF_ERROR(answer(i, start, i == 0));
    }
    tell({{"event", "holding"}});
    return wait_for("exit");
  }

 private:
  Agent(const AgentOptions& options, UniqueFd fd, Model model, Tokenizer tokenizer,
        std::vector<std::vector<uint32_t>> prompts, std::shared_ptr<const Weights> weights,
        KvCache cache)
      : options_(options),
        model_fd_(std::move(fd)),
        model_(std::move(model)),
        tokenizer_(std::move(tokenizer)),
        prompts_(std::move(prompts)),
        weights_(std::move(weights)),
        cache_(std::move(cache)),
        transformer_(weights_) {}

  AgentOptions options_;
  UniqueFd model_fd_;  // the Model borrows it
  Model model_;
  Tokenizer tokenizer_;
  std::vector<std::vector<uint32_t>> prompts_;  // what follows the document, for each question
  std::shared_ptr<const Weights> weights_;
  KvCache cache_;
  Transformer transformer_;
  SessionHandle session_;
  LeaseHandle lease_;                   // after session_: released before the session closes
  std::optional<PooledPrefix> prefix_;  // of lease_; set when the document is read in place
  double acquire_ms_ = 0;
  Clock::time_point last_sealed_;  // when the last of the document could be read
  double document_ms_ = 0;
};

}  // namespace

Status prepare_weights(const std::string& model_path, const std::string& weights_path,
                       uint32_t thread_count) {
  POLYKV_ASSIGN_OR_RETURN(UniqueFd fd, open_file(model_path, "model"));
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
