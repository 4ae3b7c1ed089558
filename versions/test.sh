#!/usr/bin/env bash
# Shows on each named set of versions that zerofit works: makes the set's environment and runs tests/versions there.
#
#   versions/test.sh [--install] SET ...    --install: only makes the environments
#
# A set is versions/SET.txt; or newest, which is constraints.txt in $VENV; or python-3.13, which is constraints.txt on
# that Python, and is not tested where there is none. Each set but newest has an environment of its own, $VENV-SET,
# made with the Python that its file names where there is one and with $PYTHON elsewhere. The environments are made
# one after the other, the tests of all sets run beside each other, and share the cores. What was shown goes into
# tests/versions/measured/SET.json, and `make docs` into a table.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} venv=${VENV:-.venv}
only_install=
if [ "${1:-}" = --install ]; then only_install=1; shift; fi

find_python() {  # prints an interpreter of version $1: $PYTHON, one on the path, or one of pyenv's
  local found
  for found in "$python" "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if "$found" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null; then
      echo "$found"
      return
    fi
  done
  return 1
}

make_environment() {  # of set $1, as the file $2 pins it, with the interpreter $3
  local where=$venv-$1 file
  for file in "$2" pyproject.toml setup.sh; do
    if [ ! "$where/.installed" -nt "$file" ]; then
      # pip would compile all 13,000 files of Python; the tests import some of them.
      PIP_COMPILE=0 PYTHON=$3 VENV=$where EXTRA=test CONSTRAINTS=$2 OPS=ShareMemCommBuilder ./setup.sh
      return
    fi
  done
}

sets=()
for set in "$@"; do
  case $set in
    newest) ;;
    python-*)
      found=$(find_python "${set#python-}") || {
        echo "test-versions: $set is not tested: no python${set#python-} here" >&2
        continue
      }
      make_environment "$set" constraints.txt "$found" ;;
    *)
      pins=versions/$set.txt
      [ -f "$pins" ] || {
        echo "test-versions: there is no $pins; there are: newest python-3.13 $(cd versions && echo *.txt)" >&2
        exit 2
      }
      wanted=$(sed -n 's/^# Python: //p' "$pins")
      found=$(find_python "${wanted:-any}") || {
        found=$python
        [ -z "$wanted" ] || echo "test-versions: no python$wanted here, $set takes $python" >&2
      }
      make_environment "$set" "$pins" "$found" ;;
  esac
  sets+=("$set")
done
[ -z "$only_install" ] || exit 0

# One worker for each core: those of one set alone would leave cores idle.
workers=$(($(nproc) / (${#sets[@]} ? ${#sets[@]} : 1)))
[ "$workers" -gt 1 ] || workers=0
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
running=()
for set in "${sets[@]}"; do
  where=$venv-$set
  [ "$set" != newest ] || where=$venv
  # Each environment has its own build of DeepSpeed's ops.
  env -u TORCH_EXTENSIONS_DIR "$where/bin/python" -m pytest tests/versions -m versions --set="$set" \
    -n "$workers" --dist worksteal >"$logs/$set" 2>&1 &
  running+=($!)
done
failed=()
for index in "${!sets[@]}"; do
  set=${sets[$index]}
  wait "${running[$index]}" || failed+=("$set")
  echo "test-versions: $set"
  cat "$logs/$set"
done
[ ${#failed[@]} = 0 ] || { echo "test-versions: failed: ${failed[*]}" >&2; exit 1; }
