#!/usr/bin/env bash
# Checks in about a second that this machine can build TrainingCXL, and prints the Python to use.
# Takes PYTHON and CXX from the environment; says on standard error which packages to install.
# With --python-only a compiler, headers and disk are not asked for.
set -euo pipefail

readonly disk_gb_min=3
missing=()  # what is wrong, one line each
debian=() fedora=() arch=()  # the packages that mend it

need() {
  missing+=("$1")
  [ -z "$2" ] || debian+=("$2")
  [ -z "$3" ] || fedora+=("$3")
  [ -z "$4" ] || arch+=("$4")
}

# Prints version, base interpreter, "venv" and "headers" where present; fails below Python 3.11.
readonly probe='
import importlib.util as util, os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit(1)
print("%d.%d" % sys.version_info[:2])
print(getattr(sys, "_base_executable", None) or sys.executable)
print(all(util.find_spec(name) for name in ("venv", "ensurepip")))
print(os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))
'

check_python() {
  local candidates=(python3 python3.14 python3.13 python3.12 python3.11) candidate
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    mapfile -t found < <("$candidate" -c "$probe" 2>/dev/null)
    [ "${#found[@]}" -lt 4 ] || break
  done
  if [ "${#found[@]}" -lt 4 ]; then
    need "Python 3.11 or newer: '${PYTHON:-python3}' is absent or older (one that lies elsewhere: \
make PYTHON=/path/to/python3.12 ...)" \
      "python3 python3-venv python3-dev" "python3 python3-devel" python
    return
  fi
  local version=${found[0]}
  python=${found[1]}
  [ "${found[2]}" = True ] ||
    need "modules venv and ensurepip of $python" "python$version-venv" python3 python
  [ "${found[3]}" = True ] || $python_only ||
    need "Python.h, the headers of $python" "python$version-dev" python3-devel python
}

# Compiles with what CMake will use.
check_compiler() {
  local compiler=${CXX:-} candidate
  for candidate in c++ g++ clang++; do
    [ -n "$compiler" ] || ! command -v "$candidate" >/dev/null || compiler=$candidate
  done
  local folder
  folder=$(mktemp -d)
  printf '%s\n' '#include <bit>' 'int main() { return std::popcount(6u) - 2; }' >"$folder/probe.cc"
  # shellcheck disable=SC2086  # CXX may carry arguments, as in CXX="ccache g++"
  if [ -z "$compiler" ]; then
    need "a C++ compiler" g++ gcc-c++ gcc
  elif ! $compiler -std=c++20 "$folder/probe.cc" -o "$folder/probe" 2>"$folder/errors"; then
    need "a C++20 compiler (GCC 10, Clang 12 or newer): '$compiler' fails: \
$(head -n 1 "$folder/errors")" g++ gcc-c++ gcc
  fi
  rm -rf "$folder"
}

check_disk() {
  local free_kb
  free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
  [ "$free_kb" -ge $((disk_gb_min * 1024 * 1024)) ] ||
    need "free disk: $((free_kb / 1024)) MB in $PWD, $disk_gb_min GB are needed \
(a CUDA build of torch needs 8)" "" "" ""
}

install_line() {
  local family
  family=$(. /etc/os-release 2>/dev/null && echo "${ID:-} ${ID_LIKE:-}")
  [ "${#debian[@]}" -gt 0 ] || return 0
  case "$family" in
    *debian* | *ubuntu*) echo "  do:    sudo apt install ${debian[*]}" ;;
    *fedora* | *rhel*) echo "  do:    sudo dnf install ${fedora[*]}" ;;
    *arch*) echo "  do:    sudo pacman -S ${arch[*]}" ;;
    *)
      echo "  do:    install: Debian: ${debian[*]}; Fedora: ${fedora[*]}; Arch: ${arch[*]}"
      ;;
  esac
}

python=
python_only=false
[ "${1:-}" != --python-only ] || python_only=true
[ "$(uname -s)" = Linux ] || need "Linux: this is $(uname -s)" "" "" ""
check_python
if ! $python_only; then
  check_compiler
  check_disk
fi
if [ "${#missing[@]}" -gt 0 ]; then
  {
    echo "TrainingCXL cannot be set up on this machine. Missing:"
    printf '  - %s\n' "${missing[@]}"
    install_line
  } >&2
  exit 1
fi
echo "$python"
