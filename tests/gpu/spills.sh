#!/usr/bin/env bash
# spills.sh REPORT...: no kernel that reads or attends to a document keeps registers in memory, says ptxas. Without a
# report, skipped: there was no nvcc.
set -euo pipefail

# Lines "kernel: what ptxas says of it" of kernels with a stack frame or spills; exit code 3 when there is no kernel.
spilling_kernels() {
  awk '
    /Compiling entry function/ { kernel = $6; count++ }
    /bytes stack frame/ && !/ 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads/ { print kernel ":" $0 }
    END { if (count == 0) exit 3 }' "$@"
}

if [ $# = 0 ]; then
  echo "skipped: the kernels were not compiled, there is no nvcc in PATH, in CUDA_HOME or in /usr/local/cuda"
  exit 77
fi

# What the check is there for, it finds.
sample="ptxas info    : Compiling entry function 'spilling' for 'sm_90'
    8 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads"
if [ -z "$(spilling_kernels <<<"$sample")" ] || spilling_kernels </dev/null; then
  echo "the check does not find a spill, or takes an empty report"
  exit 1
fi

for report in "$@"; do
  status=0
  found=$(spilling_kernels "$report") || status=$?
  if [ "$status" != 0 ] || [ -n "$found" ]; then
    printf '%s: no kernel in it, or kernels that spill:\n%s\n' "$report" "$found"
    exit 1
  fi
  grep -c 'Compiling entry function' "$report" | sed "s|$| kernels without spills: $report|"
done
