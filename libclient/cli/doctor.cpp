#include "libclient/cli/doctor.h"

#include <cstdio>
#include <fstream>

#include "libclient/cli/commands.h"

namespace polykv::cli {

namespace {

const char* health_text(Health health) {
  switch (health) {
    case Health::good:
      return "ok";
    case Health::info:
      return "info";
    case Health::warning:
      return "warning";
    default:
      return "problem";
  }
}

}  // namespace

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

Status doctor(const Global& global) {
  std::vector<Finding> findings = check_machine();
  for (Finding& finding : check_gpu()) findings.push_back(std::move(finding));
  for (Finding& finding : check_polykv(global)) findings.push_back(std::move(finding));

  Json checks = Json::array();
  std::string problems;
  int problem_count = 0;
  int warning_count = 0;
  polykv_status code = POLYKV_OK;
  for (const Finding& finding : findings) {
    checks.push_back({{"check", finding.check},
                      {"health", health_text(finding.health)},
                      {"detail", finding.detail},
                      {"remedy", finding.remedy}});
    warning_count += finding.health == Health::warning ? 1 : 0;
    if (finding.health != Health::problem) continue;
    if (problem_count++ == 0) code = finding.code;
    problems += (problems.empty() ? "" : ", ") + finding.check;
  }
  if (global.json) {
    print({{"problem_count", problem_count}, {"warning_count", warning_count}, {"checks", checks}});
  } else {
    for (const Finding& finding : findings) {
      std::printf("%-8s %-14s %s\n", health_text(finding.health), finding.check.c_str(),
                  one_line(finding.detail).c_str());
      if (!finding.remedy.empty()) {
        std::printf("%-8s %-14s -> %s\n", "", "", one_line(finding.remedy).c_str());
      }
    }
    std::printf("%d problems, %d warnings\n", problem_count, warning_count);
  }
  if (problem_count == 0) return Status::ok();
  return {code, format("doctor: %d problems: %s; each has its remedy above", problem_count,
                       problems.c_str())};
}

}  // namespace polykv::cli
