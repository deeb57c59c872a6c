"""Measurements that freeze DECISIONS (zoo/common/program.py), for one H200.

  python -m benchmarks.decisions            all sections: parallel compile pass, then each section alone in a process
  python -m benchmarks.decisions A1 D       only these   (A1 decode, A2 training forward, A3 backward, A4 head dim 256, B, C, D, E, F)
Environment: NOWARM=1 skips the compile pass, BUDGET seconds in all (230), OUT folder of decisions.jsonl.
Times named `graph` are of CUDA-graph replays (several calls in one graph, L2 warm); `bench` are triton do_bench medians.
The measurements stand as they were run: attention A1 and A4, training A2 and A3, experts B, products C, D and F, norm E.
"""
import os

OUT = os.environ.get("OUT", ".")
