#!/usr/bin/env bash
# scripts/gpu-probe compiles wherever there is an nvcc. Where there is a device too it prints a row
# for each question; where there is none it says why and exits with 77.
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

status=0
scripts/gpu-probe --compile "$scratch/gpu_probe" || status=$?
[ "$status" = 77 ] && exit 77 # it said why
if [ "$status" != 0 ] || [ ! -x "$scratch/gpu_probe" ]; then
  echo "gpu_probe.cu does not compile"
  exit 1
fi

timeout 60 "$scratch/gpu_probe" >"$scratch/table" 2>&1 || status=$?
cat "$scratch/table"
case "$status" in
  0)
    rows=$(grep -cE '^(IPC handle|cuMemCreate)' "$scratch/table" || true)
    questions=$(grep -cE '^    \{"(IPC handle|cuMemCreate)' scripts/gpu_probe.cu)
    if [ "$questions" = 0 ] || [ "$rows" != "$questions" ]; then
      echo "the table has $rows rows for $questions questions"
      exit 1
    fi
    ;;
  77)
    grep -q '^gpu-probe: unavailable: .*:' "$scratch/table" || {
      echo "exit code 77 without a cause"
      exit 1
    }
    ;;
  *)
    echo "the probe ended with $status"
    exit 1
    ;;
esac
