#include "libclient/cli/progress.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "libclient/cli/command.h"

namespace polykv::cli {

namespace {

constexpr uint64_t kBarCells = 30;

const char* phase_text(int phase) {
  switch (phase) {
    case POLYKV_INGEST_QUEUED:
      return "queued";
    case POLYKV_INGEST_LOADING:
      return "loading the model";
    case POLYKV_INGEST_TOKENIZING:
      return "tokenizing";
    case POLYKV_INGEST_PREFILLING:
      return "prefilling";
    case POLYKV_INGEST_SEALED:
      return "sealed";
    default:
      return "working";
  }
}

}  // namespace

ProgressPrinter::ProgressPrinter(std::string subject)
    : subject_(std::move(subject)),
      is_terminal_(::isatty(STDERR_FILENO) == 1),
      start_(std::chrono::steady_clock::now()) {}

ProgressPrinter::~ProgressPrinter() {
  if (bar_drawn_) std::fputs("\r\033[K", stderr);
}

void ProgressPrinter::update(const polykv_ingest_progress& progress) {
  if (is_terminal_) {
    draw_bar(progress);
  } else {
    print_line(progress);
  }
}

void ProgressPrinter::draw_bar(const polykv_ingest_progress& progress) {
  bar_drawn_ = true;
  if (progress.phase != POLYKV_INGEST_PREFILLING || progress.token_count == 0) {
    std::fprintf(stderr, "\r\033[K%s: %s", subject_.c_str(), phase_text(progress.phase));
    return;
  }
  const uint64_t done = std::min(progress.tokens_done, progress.token_count);
  const auto filled = static_cast<size_t>(kBarCells * done / progress.token_count);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start_;
  std::fprintf(stderr, "\r\033[K%s [%s%s] %llu/%llu tokens, %.0f s", subject_.c_str(),
               std::string(filled, '#').c_str(), std::string(kBarCells - filled, '.').c_str(),
               static_cast<unsigned long long>(done),
               static_cast<unsigned long long>(progress.token_count), seconds.count());
}

void ProgressPrinter::print_line(const polykv_ingest_progress& progress) {
  const bool counts = progress.phase == POLYKV_INGEST_PREFILLING && progress.token_count != 0;
  const uint64_t tenth =
      counts ? 10 * std::min(progress.tokens_done, progress.token_count) / progress.token_count : 0;
  if (progress.phase == last_phase_ && tenth == last_tenth_) return;
  last_phase_ = progress.phase;
  last_tenth_ = tenth;
  std::string line = subject_ + ": " + phase_text(progress.phase);
  if (counts) {
    line += format(", %llu of %llu tokens", static_cast<unsigned long long>(progress.tokens_done),
                   static_cast<unsigned long long>(progress.token_count));
  }
  if (counts && progress.memory_bytes != 0 && tenth == 0) {
    line += ", needs " + human_bytes(progress.memory_bytes);
  }
  std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace polykv::cli
