#!/usr/bin/env bash
# Builds the core with the faults of csrc/fault.h, which the crash rig plants one by one: [FOLDER].
# Needs the tools of .venv first in PATH.
set -euo pipefail

folder=${1:-build/faults}
cmake -S . -B "$folder" -G Ninja -DTCXL_FAULTS=ON -DCMAKE_BUILD_TYPE=Release \
  -DSKBUILD=ON -DSKBUILD_STATE=faults -DPython_EXECUTABLE="$(command -v python)" \
  -Dnanobind_ROOT="$(python -m nanobind --cmake_dir)" >/dev/null
cmake --build "$folder" -- --quiet
