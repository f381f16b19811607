#!/usr/bin/env bash
# Makes .venv-peers: what the benchmarks compare with (FBGEMM, TorchRec, torchsnapshot), beside
# trainingcxl itself, which stays that of .venv. Where they do not install it says so and exits
# with 0: the benchmarks then leave those comparisons out. Needs .venv (make set-up).
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
unset PYTHONPATH PYTHONHOME
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1

readonly venv=.venv-peers torch=2.13.0
# FBGEMM and TorchRec pin what they do not need on a CPU: their requirements are named here.
readonly peers=(fbgemm-gpu-cpu==1.8.0 torchrec==1.8.0)
readonly required=(tensordict pyvers pyre-extensions typing-inspect mypy-extensions iopath
  portalocker torchmetrics lightning-utilities tqdm psutil cloudpickle importlib-metadata zipp
  packaging orjson)
readonly snapshots=(torchsnapshot==0.1.0)

say() { printf 'bench-peers: %s\n' "$*"; }

skip() { # what failed
  rm -rf "$venv"
  say "skipped: $1; the benchmarks leave these comparisons out"
  exit 0
}

install() { # what to say when it fails, arguments of pip
  local what=$1 log=build/bench-peers.log
  shift
  "$venv/bin/python" -m pip install -q --progress-bar off "$@" >>"$log" 2>&1 ||
    skip "$what does not install here (details: $log)"
}

key() { { printf '%s\n' "$PWD"; cat "${BASH_SOURCE[0]}" .venv/pyvenv.cfg; } | sha256sum; }

if [ "$(cat "$venv/made" 2>/dev/null)" = "$(key)" ]; then
  say "$venv is there"
  exit 0
fi
rm -rf "$venv"
mkdir -p build
: >build/bench-peers.log
.venv/bin/python -m venv "$venv"
site() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
# Behind its own packages come those of .venv: trainingcxl as it is built there, numpy, torch.
printf "import site; site.addsitedir('%s')\n" "$(site .venv)" \
  >"$(site "$venv")/trainingcxl_venv.pth"
if [[ "$("$venv/bin/python" -c 'import torch; print(torch.__version__)')" != "$torch"* ]]; then
  install "torch $torch" "torch==$torch"
fi
install "${peers[*]}" --no-deps "${peers[@]}"
install "what ${peers[*]} require" "${required[@]}"
install "${snapshots[*]}" "${snapshots[@]}"
"$venv/bin/python" -W ignore -c '
import fbgemm_gpu.split_table_batched_embeddings_ops_training, torchrec, torchsnapshot
import trainingcxl' >>build/bench-peers.log 2>&1 ||
  skip "the peers do not import (details: build/bench-peers.log)"
key >"$venv/made"
say "made $venv: torch $torch, ${peers[*]}, ${snapshots[*]}"
