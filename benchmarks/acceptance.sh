#!/usr/bin/env bash
# What is measured and proven on one H200, by stages:
#   benchmarks/acceptance.sh PYTHON OUT SECONDS STAGE...
# `a+b` runs stages side by side, `+a` beside all that follow. Nothing is timed in
#   admit, tests, laws, attention, warm, compile, live (or live_dense, _moe, _moe35, _sglang of it), whole, rungs (or rungs_dense,
#   _moe, _moe35, _qwen35), ladders (or ladder_dense, _moe, _moe35, _qwen35 of them), proofs (or proof_dense, _moe, _moe35, _qwen35,
#   and by HTTP proof_http, _http_moe, _http35, _http_qwen35).
# GLM-5.2's layers with experts are 19 GB each, so a stage of it is best alone. Nothing is timed in
#   glm_admit, glm_tiny, glm_ladder, glm_rungs, glm_live, glm_compile.
# The others have the GPU alone, faster once `compile` or `glm_compile` has been:
#   dense, speed, speed35, speed_moe, speed_qwen35, speed_triton, long, train, train35, train_qwen35, moe35, moe, qwen35, linear,
#   ops, glm, glm_train, glm_ops.
# PYTHON has torch, triton, flash_attn, deep_gemm and (speed, proofs, live) sglang importable. OUT gets summary.txt, logs.txt and rows;
# a run that is cut short keeps what was finished. Stages and runs on one machine share what was compiled.
set -uo pipefail
[ $# -ge 4 ] || { sed -n "2,14s/^# //p" "$0" >&2; exit 2; }
py=$1 out=$2 limit=$3
shift 3
[[ $py != */* || $py == /* ]] || py=$PWD/$py
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
work=$(mktemp -d) summary=$out/summary.txt rows=$out/rows.jsonl
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=${FLASH_ATTENTION_CUTE_DSL_CACHE_DIR:-$HOME/.cache/aligned-zoo/fa4}
export DG_JIT_CACHE_DIR=${DG_JIT_CACHE_DIR:-$HOME/.cache/deep_gemm}
export SGLANG_DG_CACHE_DIR=$DG_JIT_CACHE_DIR # SGLang would move it elsewhere
export PYTHONPATH=$work/site:$PWD${PYTHONPATH:+:$PYTHONPATH}

# a checkout that is not installed has no entry point for SGLang to find
if ! "$py" -c 'import importlib.metadata as m; m.distribution("aligned-zoo")' 2>/dev/null; then
  version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
  info=$work/site/aligned_zoo-$version.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: aligned-zoo\nVersion: %s\n' "$version" > "$info/METADATA"
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
    { echo "== $name"; tail -c 400000 "$work/$name.log"; } >> "$out/logs.txt"
  done
}

# climb NAME SECONDS RUNGS ARCHITECTURE...: its JSON is replaced row by row
climb() {
  local name=$1 most=$2 rungs=$3
  shift 3
  job "$name" "$most" "$py" -m zoo.verify "$@" --device cuda --rungs "$rungs" --json "$work/$name.json"
}

# ladder NAME SECONDS ARCHITECTURE...: rung 3
ladder() { climb "$1" "$2" 3 "${@:3}"; }

# every finished or partial ladder as one JSON line each
ladders() {
  "$py" - "$out/ladders.jsonl" "$work"/ladder_*.json <<'END' || true
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

# warm NAME BATCHES PARTS ARCHITECTURE...: every kernel of these parts once, few layers, untimed
warm() {
  local name=$1 batches=$2 parts=$3
  shift 3
  job "$name" 240 "$py" -m benchmarks.models "$@" --compile-only --what "$parts" --batches "$batches" --documents 4 --contexts 600
}

# tested NAME PYTEST-ARGUMENTS...: GPU tests in a process of their own
tested() {
  local name=$1
  shift
  job "$name" 400 "$py" -m pytest -q -m gpu --tb=line -p no:cacheprovider "$@"
}

# in_turns SLOTS: waits until fewer jobs than that run
in_turns() { while [ "$(jobs -rp | wc -l)" -ge "$1" ]; do wait -n; done; }

# tested_report PATTERN: the last line of each test job's log, and what failed
tested_report() {
  local log name
  for log in "$work"/$1*.log; do
    name=$(basename "$log" .log)
    said "$(grep -m1 "^$name status" "$work/statuses"): $(tail -n 1 "$log" | cut -c1-110)"
    grep -E '^(FAILED|ERROR)' "$log" | cut -c1-210 | head -n 4 | tee -a "$summary"
    { echo "== $name"; tail -c 40000 "$log"; } >> "$out/logs.txt"
  done
}

stage_admit() {
  admit admit 130 qwen3:8b qwen3_moe:30b-a3b qwen3_5_moe:35b-a3b qwen3_5:4b
  stage "providers" 34 admit
}

# a process per op, since an error on the device fails all that follows in its process
stage_laws() {
  local page name
  for page in zoo/common/ops/*/cases.py; do
    name=$(basename "$(dirname "$page")")
    [ "$name" = attention ] || tested "law_$name" tests/ops/test_laws.py::test_law -k "bfloat16-$name-" &
    in_turns 12
  done
  wait
  said "== laws on the GPU, $SECONDS s"
  tested_report law_
}

# attention's laws compile many variants
stage_attention() {
  local law shapes
  for law in row split place shard repeat; do
    for shapes in qwen3-8b qwen3-30b "not qwen3"; do
      tested "attention_${law}_${shapes// /_}" tests/ops/test_laws.py::test_law -k "bfloat16-attention-$law- and $shapes" &
    done
  done
  wait
  said "== attention's laws on the GPU, $SECONDS s"
  tested_report attention_
}

# the other GPU tests, a process per test function
stage_tests() {
  local function name
  job collect 90 "$py" -m pytest --collect-only -q -m gpu -p no:cacheprovider tests || tail -n 5 "$work/collect.log"
  for function in $(grep -o '^tests/[^[ ]*::[A-Za-z_0-9:]*' "$work/collect.log" | sort -u | grep -v 'test_laws.py::test_law$'); do
    name=${function##*/}
    tested "${name//[.:]/_}" "$function" &
    in_turns 12
  done
  wait
  said "== GPU tests, $SECONDS s"
  tested_report test_
}

# few layers have every shape: what they compile lands on the disk
stage_warm() {
  ladder ladder_warm_dense 150 qwen3 --size 8b --layers 1 --lengths 600,4096 &
  ladder ladder_warm_moe 150 qwen3_moe --size 30b-a3b --layers 1 --lengths 600,4096 &
  ladder ladder_warm_moe35 150 qwen3_5_moe --size 35b-a3b --layers 4 --lengths 600,4096 &
  ladder ladder_warm_qwen35 150 qwen3_5 --size 4b --layers 4 --lengths 600,4096 &
  wait
  stage "ladders of one to four layers" 9 ladder_warm_dense ladder_warm_moe ladder_warm_moe35 ladder_warm_qwen35
  ladders
}

# third NAME SECONDS ARCHITECTURE...: rung 3 across the segment's edge
third() {
  ladder "ladder_$1" "$2" "${@:3}" --lengths 600,4096
  stage "rung 3 of ${*:3}" 14 "ladder_$1"
  ladders
}
stage_ladder_dense() { third dense 240 qwen3 --size 8b; }
stage_ladder_moe() { third moe 240 qwen3_moe --size 30b-a3b --layers 8; }
stage_ladder_moe35() { third moe35 240 qwen3_5_moe --size 35b-a3b --layers 8; }
stage_ladder_qwen35() { third qwen35 400 qwen3_5 --size 4b; }

# one after another: decode of 64 sequences holds the most
stage_ladders() { for name in moe35 qwen35 moe dense; do "stage_ladder_$name"; done; }

# the trainer alone, its gradients too: up to 80 GB
first() {
  climb "ladder_rungs_$1" 300 "$2" "${@:3}" --lengths 600,4096
  stage "rungs $2 of ${*:3}" 18 "ladder_rungs_$1"
  ladders
}
stage_rungs_dense() { first dense 1,2,4 qwen3 --size 8b; }
stage_rungs_moe() { first moe 1,2,4 qwen3_moe --size 30b-a3b --layers 8; }
stage_rungs_moe35() { first moe35 1,2 qwen3_5_moe --size 35b-a3b --layers 8; }
stage_rungs_qwen35() { first qwen35 1,2,4 qwen3_5 --size 4b; }
stage_rungs() { for name in dense moe moe35 qwen35; do "stage_rungs_$name"; done; }

# an engine samples, another process scores; then again after optimizer steps
lived() {
  climb "ladder_live_$1" 400 4,5 "${@:2}" --lengths 130,600
  stage "rungs 4 and 5 of ${*:2}" 60 "ladder_live_$1"
  ladders
}
stage_live_dense() { lived dense qwen3 --size 8b --layers 4; }
stage_live_moe() { lived moe qwen3_moe --size 30b-a3b --layers 8; }
stage_live_moe35() { lived moe35 qwen3_5_moe --size 35b-a3b --layers 4; }
stage_live_sglang() { lived sglang qwen3 --size 8b --layers 4 --engine sglang; }
stage_live() { for name in dense moe moe35 sglang; do "stage_live_$name"; done; }
# trainer, server, gradients and AdamW's averages at once: the GPU alone
stage_whole() { lived whole qwen3 --size 8b; }

# proof NAME ARCHITECTURE...: its weights, up to 17 GB, lie on the disk meanwhile
proof() {
  local name=$1
  shift
  job "$name" 420 "$py" -m benchmarks.sglang_proof "$@" --folder "$work/$name" --out "$rows"
  rm -rf "${work:?}/$name"
  stage "stock SGLang against the trainer, $*" 24 "$name"
}
stage_proof_dense() { proof proof_dense qwen3 --size 8b --no-http; }
stage_proof_http() { proof proof_http qwen3 --size 8b --no-engine; }
stage_proof_http_moe() { proof proof_http_moe qwen3_moe --size 30b-a3b --layers 8 --no-engine; }
stage_proof_http_qwen35() { proof proof_http_qwen35 qwen3_5 --size 4b --no-engine; }
stage_proof_http35() { proof proof_http35 qwen3_5_moe --size 35b-a3b --layers 8 --no-engine; }
stage_proof_moe() { proof proof_moe qwen3_moe --size 30b-a3b --layers 8 --no-http; }
stage_proof_moe35() { proof proof_moe35 qwen3_5_moe --size 35b-a3b --layers 8 --no-http; }
stage_proof_qwen35() { proof proof_qwen35 qwen3_5 --size 4b --no-http; }

# more than two engines at once run out of memory in an update
stage_proofs() {
  stage_proof_dense &
  stage_proof_moe
  wait
  stage_proof_moe35 &
  stage_proof_qwen35
  wait
  stage_proof_http
  stage_proof_http_moe &
  stage_proof_http35
  wait
}

glm=(glm5 --size 5.2)
stage_glm_admit() {
  admit glm_admit 300 glm5:tiny glm5:5.2
  stage "providers of GLM-5.2" 20 glm_admit
}
stage_glm_tiny() {
  climb ladder_glm_tiny 400 1-5 glm5
  stage "all rungs of tiny GLM-5" 60 ladder_glm_tiny
  ladders
}
# documents of more than 2048 tokens, of which a row reads a choice; three dense layers and one with experts: 26 GB a model
stage_glm_ladder() {
  ladder ladder_glm 400 "${glm[@]}" --layers 4 --lengths 65,2300,4096
  stage "rung 3 of ${glm[*]}, 4 layers" 14 ladder_glm
  ladders
}
# 52 GB of models, 26 GB of gradients and what is compared of them: up to 120 GB
stage_glm_rungs() {
  climb ladder_glm_rungs 400 1,2,4 "${glm[@]}" --layers 4 --lengths 65,2300,4096
  stage "rungs 1,2,4 of ${glm[*]}, 4 layers" 24 ladder_glm_rungs
  ladders
}
# the dense layers alone: AdamW's averages of a layer with experts would be 39 GB more
stage_glm_live() {
  climb ladder_glm_live 400 4,5 "${glm[@]}" --layers 3 --lengths 65,2300
  stage "rungs 4 and 5 of ${glm[*]}, 3 layers" 60 ladder_glm_live
  ladders
}

shared=(--documents 4 --length 4096 --out "$rows")

# what the timed stages compile, by a process each
stage_compile() {
  local part batch names=()
  made() { names+=("$1"); warm "$@" & in_turns 6; }
  for batch in 1 8 32; do made "warm_moe35_$batch" "$batch" decode,score qwen3_5_moe --size 35b-a3b; done
  made warm_train35 1 train qwen3_5_moe --size 35b-a3b
  # its byte check too
  made warm_train_qwen35 1 ladder,train qwen3_5 --size 4b --lengths 130,65,600
  made warm_prefill35 1 prefill qwen3_5_moe --size 35b-a3b
  made warm_moe 1,8,64 decode,score qwen3_moe --size 30b-a3b
  made warm_qwen35 1,8,32 decode,prefill,score qwen3_5 --size 4b
  for part in 0 1 2 3 4 5; do
    names+=("warm_ops$part")
    # shellcheck disable=SC2046
    job "warm_ops$part" 240 "$py" -m benchmarks.ops $(other_ops) --shapes '^(?!glm)' --compile-only "$part/6" &
    in_turns 6
  done
  for batch in 1 8 64; do made "warm_dense$batch" "$batch" decode,score qwen3 --size 8b; done
  wait
  stage "compiled" 1 "${names[@]}"
}

stage_dense() {
  job dense 150 "$py" -m benchmarks.models qwen3 --size 8b --what accuracy,decode,score --profile --budget 140 --contexts 600,4096 "${shared[@]}"
  stage "Qwen3-8B: decode, score" 12 dense
}

# speed NAME SECONDS ARCHITECTURE...: SGLang as it comes, deterministic, and with the plugin
speed() {
  local name=$1 most=$2
  shift 2
  job "$name" "$most" "$py" -m benchmarks.sglang "$@" --profile --budget "$((most - 10))" --logs "$out/engines" --out "$rows"
  stage "SGLang, $*: tokens/s" 14 "$name"
}

stage_speed() { speed speed 300 qwen3 --size 8b; }
stage_speed35() { speed speed35 240 qwen3_5_moe --size 35b-a3b --layers 8; }
stage_speed_qwen35() { speed speed_qwen35 240 qwen3_5 --size 4b; }
stage_speed_triton() { speed speed_triton 240 qwen3 --size 8b --contenders zoo,stock --backends triton; }
stage_speed_moe() { speed speed_moe 240 qwen3_moe --size 30b-a3b --layers 8; }

stage_long() {
  job long 80 "$py" -m benchmarks.models qwen3 --size 8b --what long --budget 75 "${shared[@]}"
  stage "Qwen3-8B: one document of 32768 tokens whole" 5 long
}

stage_train() {
  job train 80 "$py" -m benchmarks.models qwen3 --size 8b --layers 8 --what train --budget 75 "${shared[@]}"
  stage "train step of 8 layers" 5 train
}

stage_train35() {
  job train35 75 "$py" -m benchmarks.models qwen3_5_moe --size 35b-a3b --layers 4 --what accuracy,train --budget 65 "${shared[@]}"
  stage "35B-A3B: train step of 4 layers" 5 train35
}

stage_train_qwen35() {
  job train_qwen35 180 "$py" -m benchmarks.models qwen3_5 --size 4b --what accuracy,train --profile --budget 170 "${shared[@]}"
  stage "Qwen3.5-4B: train step" 5 train_qwen35
}

stage_moe35() {
  job moe35 95 "$py" -m benchmarks.models qwen3_5_moe --size 35b-a3b --layers 8 --what accuracy,decode,prefill,score --contexts 600 --profile \
    --budget 90 "${shared[@]}"
  stage "35B-A3B: decode, prefill, score" 12 moe35
}

stage_moe() {
  job moe 90 "$py" -m benchmarks.models qwen3_moe --size 30b-a3b --layers 12 --what accuracy,decode,score --contexts 600,4096 --profile \
    --budget 85 "${shared[@]}"
  stage "30B-A3B: decode, score" 12 moe
}

stage_qwen35() {
  job qwen35 90 "$py" -m benchmarks.models qwen3_5 --size 4b --what accuracy,decode,prefill,score --contexts 600 --profile \
    --budget 85 "${shared[@]}"
  stage "Qwen3.5-4B: decode, prefill, score" 12 qwen35
}

stage_glm_compile() {
  warm warm_glm 1,8,64 decode,prefill,score "${glm[@]}"
  # shellcheck disable=SC2046
  job warm_glm_ops 240 "$py" -m benchmarks.ops $(all_ops) --shapes glm-5.2 --compile-only 0/1
  stage "compiled for GLM-5.2" 1 warm_glm warm_glm_ops
}

stage_glm() {
  job glm 240 "$py" -m benchmarks.models "${glm[@]}" --layers 4 --what ladder,accuracy,decode,prefill,score --contexts 600,4096 --profile \
    --lengths 65,2300 --budget 230 "${shared[@]}"
  stage "GLM-5.2: decode, prefill, score" 16 glm
}

stage_glm_train() {
  job glm_train 150 "$py" -m benchmarks.models "${glm[@]}" --layers 4 --what train --documents 1 --length 4096 --budget 140 --out "$rows"
  stage "GLM-5.2: train step of 4 layers" 5 glm_train
}

stage_glm_ops() {
  # shellcheck disable=SC2046
  job glm_ops 300 "$py" -m benchmarks.ops $(all_ops) --shapes glm-5.2 --budget 290 --out "$rows"
  stage "ops of GLM-5.2" 90 glm_ops
}

all_ops() { "$py" -c 'from benchmarks.ops import OPS; print(*OPS)'; }
other_ops() { "$py" -c 'from benchmarks.ops import OPS; print(*(n for n in OPS if n != "linear"))'; }

stage_linear() {
  job linear 55 "$py" -m benchmarks.ops linear --shapes qwen3-8b --budget 50 --out "$rows"
  stage "products of Qwen3-8B" 50 linear
}

stage_ops() {
  # shellcheck disable=SC2046
  job ops "$(left)" "$py" -m benchmarks.ops $(other_ops) --shapes '^(?!glm)' --budget "$(($(left) - 10))" --out "$rows"
  stage "the other ops" 90 ops
}

for wanted in "$@"; do
  for name in ${wanted//+/ }; do
    declare -F "stage_$name" > /dev/null || { echo "there is no stage $name" >&2; exit 2; }
  done
done
for wanted in "$@"; do
  started=()
  for name in ${wanted//+/ }; do
    "stage_$name" &
    started+=($!)
  done
  [[ $wanted == +* ]] || wait "${started[@]}"
done
wait
said "== done, $SECONDS s"
[ -s "$work/statuses" ] && ! grep -qv ' status 0 ' "$work/statuses"
status=$?
rm -rf "$work"
exit $status
