#!/usr/bin/env bash
# Shows on each named set of versions that zerofit works: makes the set's environment and runs tests/versions there.
#
#   versions/test.sh SET ...    a set is versions/SET.txt, or newest, which is constraints.txt in $VENV
#
# Each set has an environment of its own, $VENV-SET, made with the Python that its file names where there is one and
# with $PYTHON elsewhere; what was shown goes into tests/versions/measured/SET.json, and `make docs` into a table.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} venv=${VENV:-.venv}
failed=()

for set in "$@"; do
  where=$venv
  if [ "$set" != newest ]; then
    pins=versions/$set.txt where=$venv-$set
    [ -f "$pins" ] || { echo "test-versions: there is no $pins; there are: newest $(cd versions && echo *.txt)" >&2; exit 2; }
    if [ ! "$where/.installed" -nt "$pins" ] || [ ! "$where/.installed" -nt pyproject.toml ]; then
      wanted=$(sed -n 's/^# Python: /python/p' "$pins")
      if [ -z "$wanted" ]; then
        wanted=$python
      elif ! "$wanted" --version >/dev/null 2>&1; then
        echo "test-versions: no $wanted here, $set takes $python" >&2
        wanted=$python
      fi
      PYTHON=$wanted VENV=$where EXTRA=test CONSTRAINTS=$pins ./setup.sh
    fi
  fi
  echo "test-versions: $set, $("$where/bin/python" --version)"
  "$where/bin/python" -m pytest tests/versions -m versions -n 0 --set="$set" || failed+=("$set")
done

[ ${#failed[@]} = 0 ] || { echo "test-versions: failed: ${failed[*]}" >&2; exit 1; }
