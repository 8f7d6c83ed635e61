#!/usr/bin/env bash
# confined.sh BUILD-FOLDER UNIT: as the service manager would run it — with the unit's system call
# filter, without memory that is writable and executable, on a socket that was there before the
# daemon — polykvd serves, and its worker computes a document.
set -euo pipefail
build=$1 unit=$2
for tool in systemd-analyze systemd-socket-activate; do
  command -v "$tool" >/dev/null || {
    echo "skipped: $tool is not installed"
    exit 77
  }
done

scratch=$(mktemp -d)
activator=
finish() {
  local status=$?
  # After the first connection the activator has become polykvd.
  if [ -n "$activator" ]; then
    kill -TERM "$activator" 2>/dev/null || true
    wait "$activator" 2>/dev/null || true
  fi
  [ $status = 0 ] || cat "$scratch/log" 2>/dev/null || true
  rm -rf "$scratch"
  exit $status
}
trap finish EXIT

calls=$scratch/permitted confined=$build/tests/confined
"$(dirname "${BASH_SOURCE[0]}")/permitted_calls.sh" "$unit" >"$calls"
# What `confined` applies without being asked.
grep -q '^MemoryDenyWriteExecute=yes$' "$unit"
grep -q '^RestrictAddressFamilies=AF_UNIX$' "$unit"
if "$confined" "$calls" "$(command -v chroot)" / true 2>/dev/null; then
  echo "the filter does not hold"
  exit 1
fi
if [ -x "$build/bin/polykv-prefill" ]; then
  "$confined" "$calls" "$build/bin/polykv-prefill" --self-check
fi

export POLYKV_SOCKET=$scratch/polykv.sock
systemd-socket-activate --seqpacket --listen="$POLYKV_SOCKET" \
  "$confined" "$calls" "$build/bin/polykvd" --budget 256MiB >"$scratch/log" 2>&1 &
activator=$!
for _ in $(seq 100); do
  [ -S "$POLYKV_SOCKET" ] && break
  sleep 0.1
done
ctl=$build/bin/polykvctl
"$ctl" status
[ -S "$POLYKV_SOCKET" ]

if [ -z "${POLYKV_TEST_MODEL:-}" ] || [ ! -x "$build/bin/polykv-prefill" ]; then
  echo "no document is computed: POLYKV_TEST_MODEL is not set, or polykv-prefill was not built"
  exit 0
fi
echo 'A daemon computes this once.' >"$scratch/note.txt"
"$ctl" put --model "$POLYKV_TEST_MODEL" --name note --codec k8v8 "$scratch/note.txt"
"$ctl" verify note
"$ctl" rm note

# The socket is the service manager's: the daemon leaves it behind.
kill -TERM "$activator"
wait "$activator"
activator=
[ -S "$POLYKV_SOCKET" ]
