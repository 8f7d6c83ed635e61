#!/usr/bin/env bash
# rules.sh RULE: checks one house rule on the files that git tracks, in the repository of the
# current folder. Prints each violation; exit code 1 when there is one, 77 when a tool is missing.
set -euo pipefail

skip() {
  echo "skipped: $*"
  exit 77
}

git rev-parse --is-inside-work-tree >/dev/null 2>&1 || skip "this is no git checkout"

tracked() { git ls-files -z --cached --others --exclude-standard -- "$@"; }
sources() { tracked '*.c' '*.h' '*.hpp' '*.cpp' '*.cu' '*.cuh' '*.py' '*.fbs'; }
scripts() { tracked .ci 'scripts/*' 'tests/*.sh' ':!*.py' ':!*.cu'; }

# report WHAT: reads violations from standard input; none is good.
report() {
  local found
  found=$(cat)
  [ -z "$found" ] && return 0
  printf '%s\n%s\n' "$1" "$found"
  return 1
}

files_are_short() {
  { sources; scripts; } | xargs -0r awk 'FNR == 501 { print FILENAME }' |
    report "more than 500 lines; one concept each:"
}

nothing_is_left_unfinished() {
  { { sources; tracked '*.md' '*CMakeLists.txt' '*.cmake'; scripts; } |
    xargs -0r grep -nIE '\b(T[O]DO|F[I]XME|X[X]X)\b' || true; } | report "finish it or leave it out:"
}

no_path_of_this_machine() {
  local checkout
  checkout=$(dirname "$PWD")
  # A checkout directly beneath / or in a common folder would match anything.
  case "$checkout" in / | /usr | /usr/* | /opt | /tmp) checkout= ;; esac
  { tracked | xargs -0r grep -nIE "(^|[^[:alnum:]_.}/-])(/(home|root|Users)/${checkout:+|$checkout/})" || true; } |
    report "paths of somebody's machine:"
}

# forbid FOLDER PATTERN [EXCEPT-FOLDER]: no source in FOLDER includes a header that PATTERN matches.
forbid() {
  local files=("$1/*.h" "$1/*.hpp" "$1/*.cpp" "$1/*.c")
  [ -z "${3:-}" ] || files+=(":!$3")
  tracked "${files[@]}" | xargs -0r grep -nE "^ *# *include [<\"]($2)" || true
}

dependencies_go_down() {
  {
    forbid common '(device|kernels|libclient|daemon|examples|tests)/'
    forbid include '(common|device|kernels|libclient|daemon|examples|tests)/'
    forbid device '(kernels|libclient|daemon|examples|tests)/'
    forbid kernels '(libclient|daemon|examples|tests)/'
    # polykvctl tokenizes with the model library, which needs neither torch nor the daemon.
    forbid libclient '(daemon|examples|tests)/' libclient/cli
    forbid libclient/cli '(examples|tests|daemon/[a-z_]+\.h|daemon/prefill/[^m])'
    forbid daemon '(examples|tests)/'
    # The daemon must not die of a model file, nor carry a tensor library; neither may an agent's
    # library.
    forbid daemon '(torch|ATen|c10)/' daemon/prefill
    forbid libclient '(torch|ATen|c10)/'
    forbid include '(torch|ATen|c10|boost)/'
  } | report "includes that go up:"
}

sources_are_formatted() {
  command -v clang-format-14 >/dev/null || skip "clang-format-14 is not installed"
  { tracked '*.c' '*.h' '*.hpp' '*.cpp' '*.cu' '*.cuh' |
    xargs -0r clang-format-14 --dry-run -Werror --ferror-limit=1 2>&1 || true; } |
    report "run clang-format-14 -i on these:"
}

public_headers_compile_alone_as_c_and_cpp() {
  local header failures=0 includes=(-Iinclude "-I$BUILD/include")
  while IFS= read -r -d '' header; do
    header=${header#include/}
    header=${header%.in}
    case "$header" in
      *.h) printf '#include <%s>\nextern int not_empty;\n' "$header" | "$CC" -std=c11 -pedantic-errors -Wall -Werror -fsyntax-only "${includes[@]}" -x c - || failures=1 ;;
    esac
    echo "#include <$header>" | "$CXX" -std=c++20 -pedantic-errors -Wall -Werror -fsyntax-only "${includes[@]}" -x c++ - || failures=1
  done < <(tracked 'include/polykv/*')
  return $failures
}

headers_compile_alone() {
  local header failures=0 includes=(-I. -Iinclude "-I$BUILD/include" "-I$BUILD")
  # torch's own include folders, as CMake found them.
  if [ -f "$BUILD/compile_commands.json" ]; then
    while IFS= read -r header; do includes+=("$header"); done < <(
      grep -oE -- '-isystem [^ "]+' "$BUILD/compile_commands.json" | sort -u | sed 's/-isystem /-isystem/'
    )
  fi
  while IFS= read -r -d '' header; do
    case "$header" in *internal/protocol*) continue ;; esac
    echo "#include \"$header\"" | "$CXX" -std=c++20 -fsyntax-only "${includes[@]}" -x c++ - || {
      echo "does not compile alone: $header"
      failures=1
    }
  done < <(tracked 'common/*.h' 'device/*.h' 'kernels/*.h' 'libclient/*.h' 'daemon/*.h' 'examples/*.h' 'include/internal/*.h')
  return $failures
}

exit_code_table_equals_status_header() {
  # Both as lines "number|text".
  diff \
    <(sed -nE 's/^ *X\(([A-Z_]+), ([0-9]+), "(.*)"\).*$/\2|POLYKV_\1|\3/p' include/polykv/status.h) \
    <(# shellcheck disable=SC2016  # backquotes of Markdown
      sed -nE 's/^\| *([0-9]+) *\| *`([A-Z_]+)` *\| *(.*[^ ]) *\|$/\1|\2|\3/p' docs/exit-codes.md) |
    report "docs/exit-codes.md (>) and include/polykv/status.h (<) differ:"
}

links_in_documents_lead_somewhere() {
  local document target
  while IFS= read -r -d '' document; do
    while IFS= read -r target; do
      [ -e "$(dirname "$document")/$target" ] || echo "$document: $target"
    done < <(grep -oE '\]\([^)#]+' "$document" | sed 's/^](//' | grep -vE '^[a-z]+:' || true)
  done < <(tracked '*.md') | report "links to what is not there:"
}

scripts_are_clean() {
  command -v shellcheck >/dev/null || skip "shellcheck is not installed"
  { scripts | xargs -0r grep -lZE '^#!.*\b(ba)?sh\b' | xargs -0r shellcheck || true; } | report "shellcheck says:"
}

packages_are_named_in_one_place() {
  # scripts/debootstrap-check only makes the bare system; what polykv needs, scripts/packages
  # installs.
  { tracked '.ci/*' 'scripts/*' ':!scripts/packages' 'tests/*' ':!tests/house/*' |
    xargs -0r grep -nE 'apt(-get)? +(-[^ ]+ +)*install' || true; } | report "name packages in scripts/packages:"
}

# A scratch repository that breaks the rules: each must say so.
# shellcheck disable=SC2016  # nothing is to be expanded in the samples
rules_find_violations() {
  local scratch rule rules failures=0
  rules=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/rules.sh
  scratch=$(mktemp -d)
  # shellcheck disable=SC2064  # the name as it is now
  trap "rm -rf '$scratch'" EXIT
  cd "$scratch"
  git init -q .
  mkdir -p common kernels docs include/polykv scripts
  seq 600 | sed 's/.*/int x&;/' >common/long.h
  printf '// T%s: later\n' ODO >kernels/unfinished.h
  printf 'const char* kModel = "%s/somebody/model";\n' /home >kernels/path.h
  printf '#include "daemon/server.h"\n' >common/up.h
  printf 'int  x ;\n' >common/unformatted.cpp
  printf 'typedef size_t broken;\n' >include/polykv/broken.h
  printf '  X(OK, 0, "success")\n' >include/polykv/status.h
  printf '| 0 | `POLYKV_OK` | failure |\n' >docs/exit-codes.md
  printf '[it](nowhere.md)\n' >docs/links.md
  printf '#!/bin/bash\nrm -rf $1/x\n' >scripts/careless
  printf 'apt-get -y %s cmake\n' install >>scripts/careless
  export CC=${CC:-cc} CXX=${CXX:-c++} BUILD=$scratch
  for rule in files_are_short nothing_is_left_unfinished no_path_of_this_machine dependencies_go_down \
    sources_are_formatted public_headers_compile_alone_as_c_and_cpp exit_code_table_equals_status_header \
    links_in_documents_lead_somewhere scripts_are_clean packages_are_named_in_one_place; do
    if "$rules" "$rule" >/dev/null 2>&1; then
      echo "$rule did not find the violation made for it"
      failures=1
    fi
  done
  return $failures
}

case "${1:-}" in
  "" | skip | tracked | sources | scripts | report | forbid)
    echo "usage: rules.sh RULE" >&2
    exit 2
    ;;
  *) "$@" ;;
esac
