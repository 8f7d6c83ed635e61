#!/bin/sh
# run_with_report.sh REPORT COMMAND...: what the command prints goes to the file REPORT, and is shown only when it fails.
report=$1
shift
"$@" >"$report" 2>&1 || {
  status=$?
  cat "$report"
  exit "$status"
}
