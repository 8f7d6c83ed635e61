#!/usr/bin/env bash
# Runs scripts/quickstart as a reader of the README does, and checks what it must have printed: the real model's answers,
# the times, the memory. usage: quickstart.sh SOURCE_DIR BINARY_DIR
set -euo pipefail
source_dir=$1
binary_dir=$2
if [ "$binary_dir" != "$source_dir/build/release" ]; then
  echo "skipped: scripts/quickstart builds and runs build/release, this is $binary_dir"
  exit 77
fi
if [ -z "${POLYKV_TEST_MODEL:-}" ]; then
  echo "skipped: POLYKV_TEST_MODEL is not set; export POLYKV_TEST_MODEL=\$(scripts/fetch-model)"
  exit 77
fi
output=$(mktemp)
trap 'rm -f "$output"' EXIT
# Shorter answers than a reader gets: they are most of the time, and say the same.
POLYKV_ANSWER_TOKENS=12 POLYKV_ATTEND_TOKENS=12 "$source_dir/scripts/quickstart" 2>&1 | tee "$output"

expect() {
  grep -qE "$1" "$output" || {
    echo "quickstart did not print: $1" >&2
    exit 1
  }
}
expect '[0-9]+ tokens: [0-9.]+ s of prefill'
expect 'first token [0-9.]+ s after the last segment was sealed'
expect 'with the pool, decoding it +[0-9.]+ s, then +[0-9.]+ ms a token'
expect 'with the pool, attending to it +[0-9.]+ s, then +[0-9.]+ ms a token'
expect 'without the pool +[0-9.]+ s'
expect 'decoding: first token after: fastest [0-9.]+ s, median [0-9.]+ s, slowest [0-9.]+ s'
expect 'attending: first token after: fastest [0-9.]+ s, median [0-9.]+ s, slowest [0-9.]+ s'
expect 'everything counted'
expect 'private pages of its mappings in them +0\.0 MiB'
expect 'attending +[0-9.]+ MiB \(12 tokens\)'
expect 'sum of PSS .* (0\.9[89]|1\.0[012])[0-9]* of one mapping'
[ "$(grep -cE '^ +agent +[0-9]+ ' "$output")" = 15 ] || {
  echo "quickstart did not show 15 answers" >&2
  exit 1
}
# The answers speak of the document. A codec can tip a single token, so no one sentence is asked for.
speaking=$(grep -A1 -E '^ +agent +[0-9]+ ' "$output" | grep -vE '^ +agent |^--' |
  grep -ciE 'licen[sc]e|program|gpl|gnu|source code|object code|propagate|user product' || true)
[ "$speaking" -ge 8 ] || {
  echo "quickstart's answers do not speak of the GPL: only $speaking of 15 do" >&2
  exit 1
}
