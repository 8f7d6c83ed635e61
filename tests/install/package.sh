#!/usr/bin/env bash
# package.sh BUILD-FOLDER VERSION: what is installed is enough for somebody else's program, found by
# find_package and by pkg-config, wherever the tree was put; and nothing but the public headers and
# symbols is there.
set -euo pipefail
build=$1 version=$2
consumer=$(cd "$(dirname "${BASH_SOURCE[0]}")/consumer" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
prefix=$scratch/prefix
failures=0
fail() {
  echo "FAILED: $*"
  failures=1
}

cmake --install "$build" --prefix "$prefix" >"$scratch/install.log" || {
  cat "$scratch/install.log"
  exit 1
}
library=$(find "$prefix" -name libpolykv.so)
[ -n "$library" ] || {
  echo "FAILED: no libpolykv.so beneath the prefix"
  exit 1
}
library_folder=$(dirname "$library")

expect_version() {
  local output
  output=$(LD_LIBRARY_PATH=$library_folder "$1") || fail "$1 ended with $?"
  [ "$output" = "$version" ] || fail "$1 printed '$output', not $version"
}

build_consumer() {
  cmake -S "$consumer" -B "$scratch/cmake" -DCMAKE_PREFIX_PATH="$prefix" && cmake --build "$scratch/cmake"
}
if ! build_consumer >"$scratch/log" 2>&1; then
  cat "$scratch/log"
  fail "a program that uses find_package does not build"
fi
grep -q "^polykv_DIR:PATH=$prefix/" "$scratch/cmake/CMakeCache.txt" || fail "find_package found another polykv"
expect_version "$scratch/cmake/consumer_c"
expect_version "$scratch/cmake/consumer_cpp"

export PKG_CONFIG_PATH=$library_folder/pkgconfig
[ "$(pkg-config --modversion polykv)" = "$version" ] || fail "pkg-config tells another version"
# shellcheck disable=SC2046  # words
"${CC:-cc}" -std=c11 -Wall -Werror "$consumer/main.c" $(pkg-config --cflags --libs polykv) -o "$scratch/by_pkg_config"
expect_version "$scratch/by_pkg_config"

# No name of ours but the C ABI is visible.
foreign=$(nm -D --defined-only "$library" | awk '$3 !~ /^polykv_[a-z0-9_]+(@@?.*)?$/ && $2 != "A" { print $3 }')
[ -z "$foreign" ] || fail "libpolykv.so exports what is not its C ABI: $foreign"
# An agent stays thin.
needed=$(readelf -d "$library" | sed -nE 's/.*NEEDED.*\[(.*)\]/\1/p')
case "$needed" in *torch* | *boost* | *cuda*) fail "libpolykv.so needs $needed" ;; esac
while read -r header; do
  case "$header" in
    attend.h | certificate.h | cuda.h | daemon_status.h | polykv.h | polykv.hpp | status.h | version.h) ;;
    *) fail "include/polykv/$header is installed, but is no public header" ;;
  esac
done < <(ls "$prefix/include/polykv")
for file in bin/polykvd bin/polykvctl lib/systemd/system/polykvd.service lib/systemd/user/polykvd.socket \
  lib/sysusers.d/polykv.conf lib/tmpfiles.d/polykv.conf; do
  [ -e "$prefix/$file" ] || fail "$file is not installed"
done
if [ -e "$build/bin/polykv-prefill" ] && [ ! -x "$prefix/libexec/polykv/polykv-prefill" ]; then
  fail "libexec/polykv/polykv-prefill is not installed"
fi
exit $failures
