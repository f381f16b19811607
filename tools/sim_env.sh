#!/usr/bin/env bash
# Runs a command of the simulator, given with its options, from an environment of its own: .venv-sim
# has the packages of the extra "sim" only, neither torch nor anything compiled here.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
unset PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

readonly venv=.venv-sim
readonly requirements_of='
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["sim"], sep="\n")
'

if [ -n "${PYTHON:-}" ] || [ ! -x "$venv/bin/python" ]; then
  python=$(bash tools/preflight.sh --python-only)
else
  python=$venv/bin/python
fi
requirements=$("$python" -c "$requirements_of")
key=$({ "$python" -V && echo "$PWD $requirements" && cat constraints.txt; } | sha256sum)
if [ "$key" != "$(cat "$venv/set-up" 2>/dev/null)" ]; then
  # The interpreter outlives the environment that is about to go.
  python=$("$python" -c 'import sys; print(getattr(sys, "_base_executable", sys.executable))')
  echo "set-up: $venv with $python"
  rm -rf "$venv"
  "$python" -m venv "$venv"
  # shellcheck disable=SC2086 # one argument a requirement
  if ! "$venv/bin/python" -m pip install -q -c constraints.txt $requirements; then
    printf '%s\n' "pip could not install the packages of the simulator" \
      "  where: $PWD/$venv: ${requirements//$'\n'/ }" \
      "  do:    read the lines above; connect this machine, or set PIP_INDEX_URL or PIP_FIND_LINKS" >&2
    exit 1
  fi
  echo "$key" >"$venv/set-up"
fi
PYTHONPATH=src exec "$venv/bin/python" -m trainingcxl "$@"
