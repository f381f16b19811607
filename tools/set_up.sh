#!/usr/bin/env bash
# Makes .venv with all that the project needs and builds the core into it; returns at once when
# nothing has changed since.
#
#   PYTHON  Python 3.11 or newer (default: the one .venv has, else python3)
#   TORCH   what pip installs as torch, options allowed (default: what .venv has, else the line of
#           constraints.txt)
#
# .venv/set-up says how far it got. A set-up that was killed is begun anew. A .venv that something
# else made is used, but never removed.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1
trap 'exit 130' INT
trap 'exit 143' TERM

readonly venv=.venv state=.venv/set-up
readonly version_of='import sys; print("%d.%d" % sys.version_info[:2])'
readonly requirements_of='
import tomllib
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
for group in (project["dependencies"], *project["optional-dependencies"].values()):
    print(*(line for line in group if not line.startswith(project["name"])), sep="\n")
'

say() { printf 'set-up: %s\n' "$*"; }

fail() { # what, where, what to do
  printf '%s\n  where: %s\n  do:    %s\n' "$1" "$2" "$3" >&2
  exit 1
}

saved() { cat "$state/$1" 2>/dev/null || true; }

default_torch() { sed -n 's/^\(torch==[^ #]*\).*/\1/p' constraints.txt; }

packages_key() {
  { printf '%s\n' "$PWD" "$torch" && cat constraints.txt pyproject.toml; } | sha256sum
}

core_key() {
  { packages_key && find csrc CMakeLists.txt -type f -print0 | sort -z | xargs -0 sha256sum; } |
    sha256sum
}

# Runs pip install; on failure says which of the usual reasons it was.
pip_install() {
  local log=$state/pip.log output=(-q --progress-bar off)
  [ ! -t 1 ] || output=()
  rm -f "$log"
  ! "$venv/bin/python" -m pip install "${output[@]}" --no-compile --log "$log" "$@" || return 0
  rm -f "$state/busy" # pip ended by itself and left no half-written package
  if grep -qE 'name resolution|not known|unreachable|new connection|ProxyError|timed out' "$log"
  then
    fail "pip has no connection to a package index" "pip install $*" \
      "connect this machine, or set PIP_INDEX_URL (mirror) or PIP_FIND_LINKS (folder of wheels)"
  elif grep -q 'No space left on device' "$log"; then
    fail "the disk is full" "$PWD/$venv or ${TMPDIR:-/tmp}" "free 3 GB, or set TMPDIR elsewhere"
  elif grep -qE 'No matching distribution|ResolutionImpossible' "$log"; then
    fail "a package has no release for this Python and machine" "pip install $*" \
      "read the lines above; try another PYTHON= or TORCH="
  fi
  fail "pip install failed" "pip install $*" "read the lines above; all details are in $log"
}

adopt_venv() {
  "$venv/bin/python" -m pip --version >/dev/null 2>&1 ||
    fail "the virtual environment does not work" "$PWD/$venv" "remove that folder, run again"
  say "using the $venv that is there already"
  mkdir -p "$state"
  echo other >"$state/maker"
  echo "$PWD $("$venv/bin/python" -c "$version_of")" >"$state/python"
}

# Makes the virtual environment; removes one of ours that is half made, moved or of another Python.
make_venv() {
  local python=$1 home
  home="$PWD $("$python" -c "$version_of")"
  [ ! -d "$venv" ] || [ -f "$state/maker" ] || adopt_venv
  if [ "$(saved maker)" = other ]; then
    [ "$(saved python)" = "$home" ] ||
      fail "the virtual environment is for '$(saved python)', not for '$home'" "$PWD/$venv" \
        "remove that folder, run again"
  elif [ "$(saved python)" != "$home" ] || [ -f "$state/busy" ]; then
    rm -rf "$venv" build
    mkdir -p "$state"
    touch "$state/busy"
    echo ours >"$state/maker"
    say "$venv with $python"
    "$python" -m venv "$venv"
    echo "$home" >"$state/python"
  fi
}

install_packages() {
  local python constraints=$state/constraints.txt before
  [ -n "${PYTHON:-}" ] || [ ! -x "$venv/bin/python" ] || export PYTHON="$PWD/$venv/bin/python"
  python=$(bash tools/preflight.sh)
  make_venv "$python"
  touch "$state/busy"
  rm -f "$state/packages"
  before=$(saved torch)
  if [ -n "$before" ] && [ "$before" != "$torch" ]; then
    "$venv/bin/python" -m pip uninstall -q -y torch
  fi
  if [ "$torch" = "$(default_torch)" ]; then
    cp constraints.txt "$constraints"
  else # another torch brings requirements of its own
    sed '/^# Torch and what it requires/,$d' constraints.txt >"$constraints"
  fi
  say "$torch"
  # shellcheck disable=SC2086 # TORCH may carry options of pip
  pip_install -c "$constraints" $torch
  echo "$torch" >"$state/torch"
  say "other packages"
  "$venv/bin/python" -c "$requirements_of" >"$state/requirements.txt"
  pip_install -c "$constraints" -r "$state/requirements.txt"
  # pip compiles no bytecode (half of its time); the modules that a run imports are compiled here.
  env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -W ignore -c "import torch" ||
    fail "torch does not import" "$torch in $PWD/$venv" "try another PYTHON= or TORCH="
  packages_key >"$state/packages"
  rm -f "$state/busy"
}

build_core() {
  say "building the core"
  rm -f "$state/core"
  pip_install --no-deps --no-build-isolation -e .
  core_key >"$state/core"
}

exec 9<constraints.txt
! command -v flock >/dev/null || flock 9

torch=${TORCH:-$(saved torch)}
torch=${torch:-$(default_torch)}
start=$SECONDS
if [ ! -x "$venv/bin/python" ] || [ "$(packages_key)" != "$(saved packages)" ] ||
  [[ -n "${PYTHON:-}" && "$PWD $("$PYTHON" -c "$version_of" || :)" != "$(saved python)" ]]; then
  install_packages
fi
if [ ! -x "$venv/bin/trainingcxl" ] || [ "$(core_key)" != "$(saved core)" ]; then
  build_core
  say "done in $((SECONDS - start)) s"
fi
