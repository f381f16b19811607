#!/usr/bin/env bash
# Builds the C++ unit tests in a folder and runs them: [--build-only] FOLDER [options of cmake].
set -euo pipefail

run=true
if [ "$1" = --build-only ]; then
  run=false
  shift
fi
folder=$1
shift
cmake -S . -B "$folder" -G Ninja -DTCXL_TESTS=ON "$@" >/dev/null
cmake --build "$folder" -- --quiet
if $run; then
  ctest --test-dir "$folder" --output-on-failure --timeout 120 --parallel 2
fi
