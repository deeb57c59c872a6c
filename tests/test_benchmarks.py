"""The benchmarks' plumbing and arithmetic, on the CPU with fake timers: no speed is asserted anywhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import admit, common, models, ops, rivals
from zoo.common import ops as ours
from zoo.common.ops import CONTRACTS
from zoo.common.program import ALIGNED_CUDA, UNALIGNED_CUDA, resolve
from zoo.qwen3 import SIZES, Qwen3ForRL, Qwen3ForServing
from zoo.testing import LawBroken
from zoo.verify.qualify import Target

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)


class FakeTimer:
    """Contenders take 10, 20, 30 ... microseconds, in their order; each is called once."""

    def compare(self, contenders: Mapping[str, common.Calls]) -> dict[str, float]:
        for calls in contenders.values():
            calls[0]()
        return {name: 10.0 * (i + 1) for i, name in enumerate(contenders)}


def test_a_budget_skips_what_does_not_fit_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    budget = common.Budget(10, lambda: now[0])
    assert budget.allows("first", 9)
    now[0] = 5.0
    assert not budget.allows("second", 6) and budget.allows("third", 4)
    assert budget.skipped == ["second"]
    assert "second: skipped: budget" in capsys.readouterr().out


def test_rows_are_flushed_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    record = common.Recorder(path, {"device": "fake"})
    for us in (1.23456789, float("nan")):
        record.add({"kind": "op", "us": us, "others": {"triton": 2.3456789}})
        assert json.loads(path.read_text().splitlines()[-1])["device"] == "fake"
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["us"] == 1.2346 and first["others"] == {"triton": 2.3457}
    assert second["us"] is None, "NaN is not JSON"


def test_smoke_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not written"):
        common.Recorder(tmp_path / "rows.jsonl", {}, smoke=True)
    assert models.main(["qwen3", "--size", "tiny", "--device", "cpu", "--smoke", "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert not list(tmp_path.iterdir())


def test_the_ratio_is_ours_over_the_fastest_rival() -> None:
    found = common.verdict(30.0, {"slow": 60.0, "fast": 20.0}, "")
    assert (found["rival"], found["rival_us"], found["ratio"], found["bytes"]) == ("fast", 20.0, 1.5, "equal")
    assert common.verdict(30.0, {}, "")["ratio"] is None


def test_no_ratio_where_bytes_differ() -> None:
    found = common.verdict(30.0, {"fast": 20.0}, "row law: 1 of 9 elements differ")
    assert found["ratio"] is None and found["rival_us"] == 20.0 and found["bytes"].startswith("red: row law")


def test_rates_and_cold_sets() -> None:
    assert common.rates(2.0, 4e6, 8e3) == {"tflops": 2.0, "gbps": 4.0}
    assert common.rates(1.0, 0.0, 1e3)["tflops"] is None
    assert common.sets_for(1 << 30) == 1 and common.sets_for(1 << 26) == 2 and common.sets_for(10) == common.MOST_SETS


def test_relative_error() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert common.relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)


@pytest.mark.parametrize("text", ["1,x", "0", "", "1,-2"])
def test_bad_numbers_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="not a positive integer"):
        common.numbers(text)


def test_geometry_cuts_layers_and_their_kinds() -> None:
    config, trainer, _ = common.geometry("qwen3_5_moe", "35b-a3b", 8)
    assert config.layers == len(config.full) == 8 and trainer.__name__ == "Qwen35ForRL"
    for arguments, message in ((("qwen9", "8b"), "unknown"), (("qwen3", "9b"), "no size"), (("qwen3", "8b", 37), "1 to 36")):
        with pytest.raises(ValueError, match=message):
            common.geometry(*arguments)


def test_every_op_is_one_of_ours() -> None:
    assert set(ops.OPS) <= set(CONTRACTS)


@pytest.mark.parametrize("name", ["linear", "experts", "attention", "gated_delta"])
def test_an_op_gives_whole_rows(name: str) -> None:
    torch.manual_seed(0)
    place = ops.Place(torch.device("cpu"), ALIGNED, None, contexts=(20,), tiny=True)
    work = next(ops.OPS[name](place, 3))
    row = ops.measure(work, FakeTimer(), ALIGNED)
    assert {
        "kind",
        "op",
        "shape",
        "rows",
        "us",
        "rival",
        "rival_us",
        "ratio",
        "gbps",
        "tflops",
        "error_vs_fp64",
        "provider",
    } <= set(row)
    assert row["us"] == 10.0 and row["bytes"] == "equal" and row["rows"] == 3
    assert row["error_vs_fp64"] is None or row["error_vs_fp64"] < 0.02
    assert name in ops.lines([row])


def _broken(work: ops.Work) -> ops.Work:
    def law() -> None:
        raise LawBroken("planted")

    return ops.Work(**{**vars(work), "law": law})


def test_a_red_law_takes_the_ratio_away() -> None:
    place = ops.Place(torch.device("cpu"), ALIGNED, None, contexts=(20,), tiny=True)
    work = next(ops.OPS["attention"](place, 3))  # SDPA runs on the CPU too
    assert ops.measure(work, FakeTimer(), ALIGNED)["ratio"] == 0.5
    row = ops.measure(_broken(work), FakeTimer(), ALIGNED)
    assert row["ratio"] is None and row["bytes"] == "red: planted"


def test_the_quick_row_law_sees_a_sum_that_depends_on_the_batch() -> None:
    x = torch.randn(9, 5)
    ops.subset_law(lambda: x * 2, lambda i: x[i] * 2, 9, x.device)()
    with pytest.raises(LawBroken):
        ops.subset_law(lambda: x + x.sum(), lambda i: x[i] + x[i].sum(), 9, x.device)()


def test_a_rival_that_fails_is_named_and_left_out() -> None:
    def fails(i: int) -> Any:
        raise ImportError("no such library\nat all")

    work = ops.Work("linear", "any", 1, {"aligned": lambda i: torch.ones(2)}, {"lost": fails}, 1.0, 1.0)
    row = ops.measure(work, FakeTimer(), ALIGNED)
    assert row["rival"] is None and row["failed"] == {"lost": "ImportError: no such library"}


def test_a_provider_with_other_bytes_is_red() -> None:
    ours = {"aligned": lambda i: torch.ones(2), "other": lambda i: torch.full((2,), 1.0000001)}
    row = ops.measure(ops.Work("linear", "any", 1, ours, {}, 1.0, 1.0), FakeTimer(), ALIGNED)
    assert row["bytes"].startswith("red: other against aligned")


def test_ops_smoke_runs_and_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main(["linear", "--device", "cpu", "--smoke", "--rows", "2", "--shapes", "qwen3-8b o"], FakeTimer()) == 0
    out = capsys.readouterr().out
    assert "smoke run: these times mean nothing" in out and "qwen3-8b o" in out and "qkv" not in out
    assert ops.main(["linear", "--device", "cpu"]) == 2 and ops.main(["nonsense"]) == 2


def test_models_smoke_compares_engines(capsys: pytest.CaptureFixture[str]) -> None:
    size = "--size tiny --layers 1 --device cpu --smoke --batches 2 --contexts 9 --documents 1 --length 20 --lengths 12"
    arguments = f"{size} --what ladder,decode,score"
    assert models.main(["qwen3", *arguments.split()]) == 0
    out = capsys.readouterr().out
    assert "15 log-probabilities of trainer, prefill and decode compared, 0 differ" in out and "smoke run" in out


def test_a_red_ladder_takes_the_model_s_ratio_away() -> None:
    config = common.geometry("qwen3", "tiny", 1)[0]
    source = Qwen3ForRL.from_config(config, device="cpu")
    record = common.Recorder(None, {})
    bench = models.Bench("qwen3", "tiny", config, ALIGNED, None, source, Qwen3ForRL, Qwen3ForServing, common.Budget(9), record)
    bench.row("decode", {"aligned": 100.0, "unaligned": 80.0}, 8)
    bench.broken = "1 of 15 differ"
    bench.row("decode", {"aligned": 100.0, "unaligned": 80.0}, 8)
    green, red = record.rows
    assert green["ratio"] == 1.25 and green["aligned_tokens_per_s"] == 80000 and green["unaligned_tokens_per_s"] == 100000
    assert red["ratio"] is None and red["bytes"] == "red: 1 of 15 differ"


def test_the_ladder_sees_a_server_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    config = common.geometry("qwen3", "tiny", 1)[0]
    source = Qwen3ForRL.from_config(config, device="cpu")
    bench = models.Bench(
        "qwen3", "tiny", config, ALIGNED, None, source, Qwen3ForRL, Qwen3ForServing, common.Budget(9), common.Recorder(None, {})
    )
    whole = models.twin

    def spoiled(source: Any, made: Any, program: Any) -> Any:
        model = whole(source, made, program)
        if made is Qwen3ForServing:
            model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight * 1.01, requires_grad=False)
        return model

    assert models.prove(bench, (12,))[1] == 0
    monkeypatch.setattr(models, "twin", spoiled)
    assert models.prove(bench, (12,))[1] > 0


def test_a_twin_shares_its_parameters() -> None:
    source = Qwen3ForRL.from_config(SIZES["tiny"], device="cpu")
    made = models.twin(source, Qwen3ForServing, ALIGNED)
    theirs = dict(source.named_parameters())
    assert all(p.data_ptr() == theirs[name].data_ptr() and not p.requires_grad for name, p in made.named_parameters())
    assert made.model.rotary.table_PC2 is source.model.rotary.table_PC2


def test_a_mixed_program_switches_one_op() -> None:
    program = models.mixed(["attention"])
    assert program.byte_class("attention") == ALIGNED_CUDA["attention"] and program.key_segment(128) == 2048
    assert program.byte_class("linear") == UNALIGNED_CUDA["linear"]
    assert models.mixed(["linear"]).key_segment(128) is None
    assert len({models.mixed(["linear"]), models.mixed(["experts"]), resolve("unaligned", "cuda", torch.bfloat16)}) == 3
    assert models.switchable(["linear", "rms_norm", "experts"]) == ["linear", "experts"]


def test_shares_add_up() -> None:
    found = {f["op"]: f for f in models.shares(100.0, {"linear": 103.0, "attention": 105.0}, 110.0)}
    assert [found[op]["added_us"] for op in found] == [3.0, 5.0, 2.0]
    assert sum(f["share"] for f in found.values()) == pytest.approx(1.0)
    assert all(f["share"] is None for f in models.shares(100.0, {"linear": 103.0}, 100.0))


def test_targets_are_spelled_and_read_back() -> None:
    target = Target("linear", (6144, 4096, 1))
    assert admit.parsed(admit.spelled(target)) == target
    with pytest.raises(ValueError, match="is not op:NxK"):
        admit.parsed("linear")


def test_rivals_compute_what_our_ops_do() -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((5, 48), (5, 48), (48,)))
    expected = ours.add_rms_norm(x, residual, weight, 1e-6, program=ALIGNED)
    for rival in (rivals.add_rms_norm, rivals.add_rms_norm_torch):
        torch.testing.assert_close(rival(x, residual, weight, 1e-6), expected)
    qkv, gain, positions = torch.randn(5, 8 * 128).bfloat16(), torch.rand(128).bfloat16(), torch.randint(64, (5,))
    turn = ours.rope_table(64, 128, 1e6)
    expected = ours.norm_rope(qkv, gain, gain, turn, positions, heads=4, kv_heads=2, eps=1e-6, program=ALIGNED)
    torch.testing.assert_close(rivals.norm_rope(qkv, gain, gain, turn, positions, 4, 2, 1e-6), expected)
    logits, gate_up = torch.randn(5, 16), torch.randn(5, 64).bfloat16()
    torch.testing.assert_close(rivals.route(logits, 4), ours.route(logits, 4, True, program=ALIGNED))
    torch.testing.assert_close(rivals.swiglu(gate_up), ours.swiglu(gate_up, program=ALIGNED), rtol=0.02, atol=0.02)
    hidden, head, targets = torch.randn(5, 16), torch.randn(300, 16), torch.randint(300, (5,))
    scored = ours.log_prob(hidden.bfloat16(), head.bfloat16(), targets, program=ALIGNED).log_prob_R
    torch.testing.assert_close(rivals.log_prob(hidden.bfloat16(), head.bfloat16(), targets), scored, rtol=0.02, atol=0.05)
