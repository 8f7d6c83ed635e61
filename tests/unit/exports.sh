#!/usr/bin/env bash
# exports.sh LIBRARY INCLUDE...: the library exports exactly the functions that polykv/polykv.h and polykv/cuda.h declare, and names itself
# libpolykv.so.0.
set -euo pipefail
library=$1
shift
includes=()
for folder in "$@"; do includes+=("-I$folder"); done

declared=$(echo '#include "polykv/cuda.h"' | "${CC:-cc}" -std=c11 -E -P "${includes[@]}" -x c - |
  grep -oE '\bpolykv_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u)
exported=$(nm -D --defined-only "$library" | awk '$2 != "A" { sub("@.*", "", $3); print $3 }' | sort -u)
[ -n "$declared" ]
diff <(echo "$declared") <(echo "$exported") || {
  echo "the header (<) and the exported symbols (>) differ; see libclient/polykv.map"
  exit 1
}
readelf -d "$library" | grep -q 'SONAME.*\[libpolykv\.so\.0\]'
