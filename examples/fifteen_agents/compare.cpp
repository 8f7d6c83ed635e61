#include <cstdio>
#include <numeric>

#include "examples/fifteen_agents/batch.h"
#include "examples/fifteen_agents/documents.h"
#include "examples/fifteen_agents/driver.h"
#include "examples/fifteen_agents/questions.h"

namespace polykv::example {

namespace {

Status report(const char* what, const Comparison& comparison) {
  std::printf("%s: %u answers equal, %u differ first at a near tie, %u differ\n", what,
              comparison.equal, comparison.near_ties, comparison.different);
  if (comparison.different == 0) return Status::ok();
  return {POLYKV_ERR_INTERNAL,
          format("compare answers: %u of %s differ", comparison.different, what)};
}

}  // namespace

Status compare_answers(const CompareOptions& options) {
  const RunOptions& run = options.run;
  POLYKV_RETURN_IF_ERROR(prepare_weights(run.model_path, run.weights_path, run.thread_count));
  POLYKV_ASSIGN_OR_RETURN(const PutResult put, put_document(run));
  Task task;
  task.document_name = run.document_name;
  task.thread_count = run.thread_count;
  task.max_tokens = run.max_tokens;
  task.questions.resize(std::min<size_t>(options.question_count, kQuestions.size()));
  std::iota(task.questions.begin(), task.questions.end(), 0);
  std::printf("%zu questions over %llu tokens, %s\n", task.questions.size(),
              static_cast<unsigned long long>(put.token_count), run.codec.c_str());
  POLYKV_ASSIGN_OR_RETURN(const Batch decoded, run_batch(run, {task}));
  task.read = Read::attend;
  POLYKV_ASSIGN_OR_RETURN(const Batch attended, run_batch(run, {task}));
  const Status same_by_both_ways =
      report("attended to against decoded", compare(attended, decoded, options.near_tie));
  if (run.codec != "exact") return same_by_both_ways;
  task.document_name.clear();
  POLYKV_ASSIGN_OR_RETURN(const Batch alone, run_batch(run, {task}));
  POLYKV_RETURN_IF_ERROR(
      report("decoded against no pool", compare(decoded, alone, options.near_tie)));
  POLYKV_RETURN_IF_ERROR(
      report("attended to against no pool", compare(attended, alone, options.near_tie)));
  return same_by_both_ways;
}

}  // namespace polykv::example
