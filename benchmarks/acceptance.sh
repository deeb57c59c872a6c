#!/usr/bin/env bash
# Everything that is measured and proven on one H200, in three calls of 380, 440 and 500 s by default, most valuable stages first.
#   benchmarks/acceptance.sh 1|2|3 PYTHON OUT [SECONDS]
# 1: compilers side by side, ladders, GPU tests. 2: whole models and SGLang's speed. 3: SGLang proofs, other families, ops.
# PYTHON has torch, triton, flash_attn, deep_gemm and (calls 2, 3) sglang importable. OUT gets summary.txt, logs.txt and rows; a call that
# is cut short keeps what was finished. Calls on one machine share what was compiled; on a fresh one each compiles what it needs.
set -uo pipefail
call=${1:?1, 2 or 3} py=${2:?a python} out=${3:?a folder}
[[ $call == [123] ]] || { echo "the calls are 1, 2 and 3, not $call" >&2; exit 2; }
defaults=(0 380 440 500) # 22 minutes in all
limit=${4:-${defaults[call]}}
cd "$(dirname "$0")/.."
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d) summary=$out/summary.txt rows=$out/rows_$call.jsonl
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=${FLASH_ATTENTION_CUTE_DSL_CACHE_DIR:-$HOME/.cache/aligned-zoo/fa4}
export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$HOME/.cache/deep_gemm}
export SGLANG_DG_CACHE_DIR=$DG_JIT_CACHE_DIR # SGLang would move it elsewhere
export PYTHONPATH=$work/site:$PWD${PYTHONPATH:+:$PYTHONPATH}

# a checkout that is not installed has no entry point for SGLang to find
if ! "$py" -c 'import importlib.metadata as m; m.distribution("aligned-zoo")' 2>/dev/null; then
  info=$work/site/aligned_zoo-0.1.0.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: aligned-zoo\nVersion: 0.1.0\n' > "$info/METADATA"
  printf '[sglang.srt.plugins]\nzoo = zoo.sglang_plugin:register\n' > "$info/entry_points.txt"
fi

left() { echo $((limit - SECONDS)); }
said() { echo "$@" | tee -a "$summary"; }

# job NAME SECONDS COMMAND...: its log is $work/NAME.log. Status 124: stopped, or not started for want of time.
job() {
  local name=$1 most=$2 status=0 begin=$SECONDS
  shift 2
  [ "$most" -le "$(left)" ] || most=$(left)
  if [ "$most" -lt 8 ]; then status=124; echo "not started: no time left" > "$work/$name.log"
  else timeout -k 5 "$most" "$@" > "$work/$name.log" 2>&1 || status=$?; fi
  echo "$name status $status in $((SECONDS - begin)) s" >> "$work/statuses"
  return $status
}

# stage TITLE LINES NAME...: the ends of the named logs, and what became of the jobs
stage() {
  local title=$1 lines=$2 name
  shift 2
  said "== $title, $SECONDS s"
  for name in "$@"; do
    said "-- $(grep -m1 "^$name status" "$work/statuses" || echo "$name: no status")"
    tail -n "$lines" "$work/$name.log" | cut -c1-190 | tee -a "$summary"
    { echo "== $name"; tail -c 400000 "$work/$name.log"; } >> "$out/logs_$call.txt"
  done
}

# ladder NAME SECONDS ARCHITECTURE...: rung 3; its JSON is replaced row by row
ladder() {
  local name=$1 most=$2
  shift 2
  job "$name" "$most" "$py" -m zoo.verify "$@" --device cuda --rungs 3 --json "$work/$name.json"
}

# every finished or partial ladder as one JSON line each
ladders() {
  "$py" - "$out/ladders_$call.jsonl" "$work"/ladder_*.json <<'END' || true
import json, sys
with open(sys.argv[1], "w") as out:
    for path in sys.argv[2:]:
        try:
            print(json.dumps({"run": path.rsplit("/", 1)[-1][:-5], **json.load(open(path))}), file=out)
        except (OSError, ValueError) as error:
            print(path, error)
END
}

# admit NAME SECONDS ARCHITECTURE:SIZE...: all their shapes in one pool of workers
admit() {
  local name=$1 most=$2
  shift 2
  job "$name" "$most" "$py" -c '
import sys
from zoo.verify import qualify
targets = [t for pair in sys.argv[1:] for t in qualify.targets_of_sizes(pair.split(":")[0], [pair.split(":")[1]])]
qualify.qualify(targets, lambda text: print(text, flush=True))' "$@"
}

# warm NAME BATCHES ARCHITECTURE...: every kernel of decode and score once, few layers, untimed
warm() {
  local name=$1 batches=$2
  shift 2
  job "$name" 90 "$py" -m benchmarks.models "$@" --compile-only --what decode,score --batches "$batches" --documents 4 --contexts 600
}

# tested NAME PYTEST-ARGUMENTS...: GPU tests in a process of their own
tested() {
  local name=$1
  shift
  job "$name" 200 "$py" -m pytest -q -m gpu --tb=line -p no:cacheprovider "$@"
}

# tests SLOTS: a process per test function, and per op of the laws, since an error on the device fails all that follows in its process
tests() {
  local page function name
  "$py" -m pytest --collect-only -q -m gpu -p no:cacheprovider tests > "$work/collected" 2>&1
  for page in zoo/common/ops/*/cases.py; do
    name=$(basename "$(dirname "$page")")
    tested "law_$name" tests/ops/test_laws.py::test_law -k "bfloat16-$name-" &
    while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do wait -n; done
  done
  for function in $(grep -o '^tests/[^[ ]*::[A-Za-z_0-9:]*' "$work/collected" | sort -u | grep -v 'test_laws.py::test_law$'); do
    name=${function##*/}
    tested "${name//[.:]/_}" "$function" &
    while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do wait -n; done
  done
  wait
}

if [ "$call" = 1 ]; then
  dense=(qwen3 --size 8b) moe=(qwen3_moe --size 30b-a3b) moe35=(qwen3_5_moe --size 35b-a3b) qwen35=(qwen3_5 --size 4b)
  tests 6 & # nothing is timed in this call
  testing=$!
  admit admit 150 qwen3:8b qwen3_moe:30b-a3b qwen3_5_moe:35b-a3b qwen3_5:4b
  stage "providers" 34 admit
  # few layers have every shape: what they compile lands on the disk
  ladder ladder_warm_dense 100 "${dense[@]}" --layers 1 --lengths 600,4096 & warming=($!)
  ladder ladder_warm_moe 100 "${moe[@]}" --layers 1 --lengths 600,4096 & warming+=($!)
  ladder ladder_warm_moe35 100 "${moe35[@]}" --layers 4 --lengths 600,4096 & warming+=($!)
  ladder ladder_warm_qwen35 100 "${qwen35[@]}" --layers 4 --lengths 600,4096 & warming+=($!)
  wait "${warming[@]}"
  ladders
  stage "compiled; ladders of one to four layers" 3 ladder_warm_dense ladder_warm_moe ladder_warm_moe35 ladder_warm_qwen35
  ladder ladder_dense 120 "${dense[@]}" --lengths 600,4096 & climbing=$!
  ladder ladder_moe35 100 "${moe35[@]}" --layers 8 --lengths 600,4096
  wait $climbing
  ladder ladder_moe 80 "${moe[@]}" --layers 8 --lengths 600,4096 & climbing=$!
  ladder ladder_qwen35 100 "${qwen35[@]}" --lengths 600,4096
  wait $climbing
  stage "ladders: Qwen3-8B whole, 35B-A3B and 30B-A3B of 8 layers, Qwen3.5-4B whole" 16 ladder_dense ladder_moe35 ladder_moe ladder_qwen35
  ladders
  wait $testing
  said "== GPU tests, $SECONDS s"
  for log in "$work"/law_*.log "$work"/test_*.log; do
    name=$(basename "$log" .log)
    said "$(grep -m1 "^$name status" "$work/statuses"): $(tail -n 1 "$log" | cut -c1-110)"
    grep -E '^(FAILED|ERROR)' "$log" | cut -c1-210 | head -n 4 | tee -a "$summary"
    { echo "== $name"; tail -c 40000 "$log"; } >> "$out/logs_$call.txt"
  done
elif [ "$call" = 2 ]; then
  shared=(--documents 4 --length 4096 --contexts 600 --out "$rows")
  admit admit 90 qwen3:8b &
  for batch in 1 8 64; do warm "warm_dense$batch" "$batch" qwen3 --size 8b & done
  job warm_train 90 "$py" -m benchmarks.models qwen3 --size 8b --compile-only --what train --documents 4 &
  wait
  stage "compiled" 9 admit
  stage "" 1 warm_dense1 warm_dense8 warm_dense64 warm_train
  job dense 100 "$py" -m benchmarks.models qwen3 --size 8b --what decode,score --ablate --profile --budget 92 "${shared[@]}"
  stage "Qwen3-8B: decode, score" 12 dense
  job speed 200 "$py" -m benchmarks.sglang qwen3 --size 8b --loads 1x128,32x128,64x128,64x1024 --profile --budget 190 --logs "$work/engines" --out "$rows"
  stage "SGLang, Qwen3-8B: tokens/s" 14 speed
  job long 60 "$py" -m benchmarks.models qwen3 --size 8b --what long --budget 55 "${shared[@]}"
  job train 50 "$py" -m benchmarks.models qwen3 --size 8b --layers 8 --what train --budget 45 "${shared[@]}"
  stage "Qwen3-8B: one document of 32768 tokens whole; train step of 8 layers" 5 long train
else
  shared=(--documents 4 --length 4096 --contexts 600 --out "$rows")
  proof() {
    local name=$1
    shift
    job "$name" 240 "$py" -m benchmarks.sglang_proof "$@" --out "$rows"
  }
  admit admit 130 qwen3:8b qwen3_5_moe:35b-a3b qwen3_moe:30b-a3b qwen3_5:4b
  stage "providers" 34 admit
  # engines idle while trainers score: the GPU holds two of these models, the disk all three
  proof proof_dense qwen3 --size 8b &
  (
    proof proof_moe35 qwen3_5_moe --size 35b-a3b --layers 8 --no-http
    proof proof_moe qwen3_moe --size 30b-a3b --layers 8 --no-http
  ) &
  warm warm_moe35 1,8,32 qwen3_5_moe --size 35b-a3b &
  warm warm_moe 1,8,64 qwen3_moe --size 30b-a3b &
  warm warm_qwen35 1,8,32 qwen3_5 --size 4b &
  wait
  stage "stock SGLang against the trainer" 7 proof_dense proof_moe proof_moe35
  job moe35 64 "$py" -m benchmarks.models qwen3_5_moe --size 35b-a3b --layers 8 --what decode,prefill,score --ablate --profile --budget 56 "${shared[@]}"
  job moe 58 "$py" -m benchmarks.models qwen3_moe --size 30b-a3b --layers 12 --what decode,score --ablate --profile --budget 50 "${shared[@]}"
  job qwen35 52 "$py" -m benchmarks.models qwen3_5 --size 4b --what decode,prefill --profile --budget 46 "${shared[@]}"
  stage "35B-A3B, 30B-A3B, Qwen3.5-4B: decode, prefill, score" 8 moe35 moe qwen35
  others=$("$py" -c 'from benchmarks.ops import OPS; print(*(n for n in OPS if n != "linear"))')
  # shellcheck disable=SC2086
  job ops "$(left)" "$py" -m benchmarks.ops $others --warm 12 --budget "$(($(left) - 10))" --out "$rows"
  stage "the other ops" 70 ops
fi
said "== call $call done, $SECONDS s"
! grep -qv ' status 0 ' "$work/statuses"
