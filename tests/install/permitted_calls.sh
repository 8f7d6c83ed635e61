#!/usr/bin/env bash
# permitted_calls.sh UNIT: the system calls that SystemCallFilter= of the unit permits, one a line.
set -euo pipefail
unit=$1
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
cat "$scratch/permitted"
