"""The entry: without torch, the driver that gives sections their processes; behind `--section`, those sections in this one."""
import json
import os
import subprocess
import sys
import time

from benchmarks.decisions import OUT

T0 = time.time()
ALL = ["A1", "A2", "A3", "A4", "B", "D", "C", "E", "F"]


def driver(names):
    end = T0 + float(os.environ.get("BUDGET", "230"))
    me = [sys.executable, "-m", "benchmarks.decisions", "--section"]
    open(os.path.join(OUT, "decisions.jsonl"), "w").close()
    if os.environ.get("NOWARM") != "1":
        ps = []
        for n in names:
            env = dict(os.environ, DECISIONS_DRY="1", DECISIONS_DEADLINE=str(time.time() + 85))
            ps.append((n, subprocess.Popen(me + [n], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
        stop = time.time() + 95
        for n, p in ps:
            try:
                p.communicate(timeout=max(0.1, stop - time.time()))
            except subprocess.TimeoutExpired:
                p.kill()
                p.communicate()
            print(f"# compile pass {n}: rc {p.returncode} at {time.time() - T0:.0f} s", flush=True)
    group = [n for n in names if n[0] == "A"], [n for n in names if n[0] == "B"], [n for n in names if n[0] not in "AB"]
    for g in group:
        left = end - time.time()
        if not g or left < 8:
            continue
        rest = any(group[group.index(g) + 1:])
        left *= 0.55 if rest else 1.0   # no group may eat the later ones' time
        env = dict(os.environ, DECISIONS_DRY="0", DECISIONS_DEADLINE=str(time.time() + left - 4))
        p = subprocess.Popen(me + g, env=env)
        try:
            p.wait(timeout=left)
        except subprocess.TimeoutExpired:
            p.kill()
        print(f"# {g}: rc {p.poll()} at {time.time() - T0:.0f} s", flush=True)
    print("\n==== table ====")
    for line in open(os.path.join(OUT, "decisions.jsonl")):
        r = json.loads(line)
        print(" ".join([r.pop("section"), r.pop("what")] + [f"{k}={v}" for k, v in r.items()]))
    print(f"total {time.time() - T0:.0f} s")


if __name__ == "__main__":
    if "--section" in sys.argv:
        from benchmarks.decisions.sections import run

        run(sys.argv[sys.argv.index("--section") + 1:])
    elif set(sys.argv[1:]) - set(ALL):
        sys.exit(f"python -m benchmarks.decisions [SECTION ...], of {' '.join(ALL)}; all by default")
    else:
        driver(sys.argv[1:] or ALL)
