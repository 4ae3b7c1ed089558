#!/usr/bin/env bash
# Builds wheel and sdist into dist/, has twine check them, and runs the wheel from an empty environment and folder.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/build"
"$folder/build/bin/pip" install --quiet --disable-pip-version-check build twine
rm -rf dist && "$folder/build/bin/python" -m build --outdir dist . >/dev/null
"$folder/build/bin/twine" check --strict dist/*.whl dist/*.tar.gz

"$python" -m venv "$folder/run"
# DeepSpeed comes as source, and asks the installed torch for its version while it is built.
pins=$root/constraints.txt
install=("$folder/run/bin/pip" install --quiet --disable-pip-version-check --constraint "$pins")
"${install[@]}" torch setuptools wheel ninja
DS_BUILD_OPS=0 "${install[@]}" --no-build-isolation dist/*.whl
cd "$folder"
# README shows a plan of a model, with the line that it prints: the wheel says the same.
readme=$root/README.md
command=$(grep -m 1 '^\$ zerofit plan --gpus 1xRTX4090 --model ' "$readme")
read -ra words <<<"${command#\$ zerofit }"
answer=$(COLUMNS=120 "$folder/run/bin/zerofit" "${words[@]}")
echo "$answer"
grep -qxF "$(grep -F -A 1 "$command" "$readme" | tail -n 1)" <<<"$answer" || {
  echo "check_dist: the wheel's answer is not README's" >&2
  exit 1
}
echo '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}' > ds_config.json
code=0
"$folder/run/bin/zerofit" check ds_config.json || code=$?
[ "$code" = 1 ] || { echo "check_dist: zerofit check ended with $code, not with 1" >&2; exit 1; }
echo "the wheel plans and checks"
