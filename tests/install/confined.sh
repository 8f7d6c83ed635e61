#!/usr/bin/env bash
# confined.sh CONFINED UNIT PROGRAM ARGUMENT...: the program works under the system call filter of the
# unit, without memory that is writable and executable, and with no socket but a local one.
set -euo pipefail
confined=$1 unit=$2
shift 2
command -v systemd-analyze >/dev/null || {
  echo "skipped: systemd-analyze is not installed"
  exit 77
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# expand NAME: the system calls of a name or of a @set and the sets in it.
expand() {
  local entry
  case "$1" in
    @*)
      systemd-analyze syscall-filter "$1" | awk 'NR > 1 && $1 !~ /^#/ { print $1 }' |
        while read -r entry; do expand "$entry"; done
      ;;
    *) echo "$1" ;;
  esac
}

# As systemd does: each line adds its calls, or takes them away where it begins with ~.
: >"$scratch/permitted"
while read -r line; do
  for name in ${line#\~}; do expand "$name"; done | sort -u >"$scratch/line"
  case "$line" in
    \~*) comm -23 "$scratch/permitted" "$scratch/line" >"$scratch/next" ;;
    *) sort -u "$scratch/permitted" "$scratch/line" >"$scratch/next" ;;
  esac
  mv "$scratch/next" "$scratch/permitted"
done < <(sed -n 's/^SystemCallFilter=//p' "$unit")
grep -q '^MemoryDenyWriteExecute=yes' "$unit" && grep -q '^RestrictAddressFamilies=AF_UNIX$' "$unit"

echo "$(wc -l <"$scratch/permitted") system calls are permitted"
if "$confined" "$scratch/permitted" "$(command -v python3)" -c 'import os; os.chroot("/")' 2>/dev/null; then
  echo "the filter does not hold"
  exit 1
fi
"$confined" "$scratch/permitted" "$@"
