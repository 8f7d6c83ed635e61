#!/usr/bin/env bash
# The verdict of scripts/test counts what really happened: a test that cannot be run is a failure, one
# that says "skipped" is not.
set -euo pipefail
repository=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cat >"$scratch/CTestTestfile.cmake" <<'TESTS'
add_test(passes "true")
add_test(passes_too "true")
add_test(fails "false")
add_test(is_not_there "./no-such-program")
add_test(hangs "sleep" "60")
set_tests_properties(hangs PROPERTIES TIMEOUT 1)
add_test(says_skipped "sh" "-c" "exit 77")
set_tests_properties(says_skipped PROPERTIES SKIP_RETURN_CODE 77)
TESTS
(cd "$scratch" && ctest --output-junit "$scratch/report.xml" >"$scratch/log" 2>&1) || true
counts=$(python3 "$repository/scripts/junit_counts.py" "$scratch/report.xml" 2>"$scratch/names")
if [ "$counts" != "2 3 1" ]; then
  echo "counted '$counts', not 2 passed, 3 failed, 1 skipped"
  cat "$scratch/log" "$scratch/names"
  exit 1
fi
[ "$(python3 "$repository/scripts/junit_counts.py")" = "0 0 0" ]
