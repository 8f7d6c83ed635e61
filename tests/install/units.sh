#!/usr/bin/env bash
# units.sh BUILD-FOLDER PROGRAM: systemd accepts the units of the build and finds the services well
# sandboxed. PROGRAM stands in for the installed polykvd, which `systemd-analyze verify` wants to
# exist.
set -euo pipefail
build=$1 program=$2
command -v systemd-analyze >/dev/null || {
  echo "skipped: systemd-analyze is not installed"
  exit 77
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failures=0
# --user expands %t, which not every caller has.
export XDG_RUNTIME_DIR=$scratch/runtime
mkdir -m 0700 "$XDG_RUNTIME_DIR"

# Highest exposure allowed, in tenths. A user's service manager cannot enforce what needs
# privileges.
threshold_of() { case "$1" in system) echo 10 ;; user) echo 62 ;; esac; }

for scope in system user; do
  mkdir "$scratch/$scope"
  for unit in service socket; do
    sed "s#^ExecStart=[^ ]*#ExecStart=$program#" "$build/systemd/$scope/polykvd.$unit" >"$scratch/$scope/polykvd.$unit"
    grep -q '@[A-Z_]*@' "$scratch/$scope/polykvd.$unit" && {
      echo "$scope/polykvd.$unit: a placeholder was not filled in"
      failures=1
    }
  done
  # verify reports unknown settings and missing programs as lines, not always as its exit status.
  if ! complaints=$(systemd-analyze verify --man=no "--$scope" "$scratch/$scope"/polykvd.{service,socket} 2>&1) ||
    grep -q polykvd <<<"$complaints"; then
    echo "systemd-analyze verify --$scope: $complaints"
    failures=1
  fi
  systemd-analyze security --no-pager --offline=true "--threshold=$(threshold_of $scope)" \
    "$scratch/$scope/polykvd.service" >"$scratch/exposure" 2>&1 || {
    cat "$scratch/exposure"
    failures=1
  }
  echo "$scope: $(grep -o 'Overall exposure level.*' "$scratch/exposure")"
done
exit $failures
