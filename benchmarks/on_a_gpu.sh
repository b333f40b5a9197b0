#!/usr/bin/env bash
# All that a short loan of a GPU should tell, the most important first, each step bounded, results as they come.
#     benchmarks/on_a_gpu.sh OUT [torch_harmonics-0.8.0.tar.gz]
# Needs nvcc, PyTorch with CUDA, scikit-build-core, pytest and hypothesis, and nothing from the network. The peer's
# source (pip download torch-harmonics==0.8.0 --no-binary torch-harmonics --no-deps --no-build-isolation) is built while
# the tests run. Some 8 minutes at most: 2.5 + 3 + 2.5, less where a step ends early.
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "$1") peer=${2:+$(realpath "$2")}
mkdir -p "$out"
export PYTHONUNBUFFERED=1

step() { # name, seconds, command...
    local name=$1 seconds=$2 begin=$SECONDS
    timeout "$seconds" "${@:3}" >"$out/$name.log" 2>&1
    echo "$name: exit $? after $((SECONDS - begin)) s" | tee -a "$out/steps.txt"
    tail -n 30 "$out/$name.log"
}

nvidia-smi | tee "$out/steps.txt"
step build 150 python3 -m pip install --no-build-isolation --no-deps .
if [ -n "$peer" ]; then
    folder=$(mktemp -d) && tar xzf "$peer" -C "$folder" --strip-components 1
    peer=$folder
    # Its attention alone: the rest of it takes many minutes.
    step peer 200 python3 - "$peer" <<'PYTHON' &
import sys
from pathlib import Path
from torch.utils.cpp_extension import load

sources = map(str, sorted(Path(sys.argv[1], "torch_harmonics/csrc/attention").glob("*.cu")))
load("attention_cuda_extension", list(sources), extra_cuda_cflags=["-O3", "-DNDEBUG"], build_directory=sys.argv[1])
PYTHON
fi
step tests 180 python3 -m pytest -m gpu -q --durations=10 -p no:cacheprovider
wait
measure() { # name, seconds, arguments...
    step "$1" "$2" env PYTHONPATH="$peer" python3 benchmarks/attention.py --device cuda --csv "$out/$1.csv" "${@:3}"
}
with_peer=$([ -e "$peer/attention_cuda_extension.so" ] && echo --peer)
measure published 60 $with_peer --rows 4 1 --numbers float32 bfloat16
measure others 90 --rows 4 1 3 5 6 7
