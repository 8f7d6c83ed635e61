// Progress of an ingest on standard error: a bar on a terminal, else a line now and then.
#pragma once

#include <chrono>
#include <string>

#include "polykv/polykv.h"

namespace polykv::cli {

class ProgressPrinter {
 public:
  explicit ProgressPrinter(std::string subject);
  ~ProgressPrinter();
  ProgressPrinter(const ProgressPrinter&) = delete;
  ProgressPrinter& operator=(const ProgressPrinter&) = delete;

  void update(const polykv_ingest_progress& progress);

 private:
  void draw_bar(const polykv_ingest_progress& progress);
  void print_line(const polykv_ingest_progress& progress);

  const std::string subject_;
  const bool is_terminal_;
  const std::chrono::steady_clock::time_point start_;
  bool bar_drawn_ = false;
  int last_phase_ = -1;
  uint64_t last_tenth_ = 0;
};

}  // namespace polykv::cli
