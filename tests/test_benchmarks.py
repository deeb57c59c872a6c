"""The benchmarks' plumbing and arithmetic, on the CPU with fake timers: no speed is asserted anywhere."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common, engines, models, models_accuracy, models_parts, ops, rivals, sglang, sglang_phases, sglang_proof, start
from benchmarks.models_float64 import Widened, float64_of, next_log_prob
from benchmarks.work import OPS, Place, Work, subset_law
from zoo.common import ops as ours
from zoo.common.ops import CONTRACTS
from zoo.common.program import PROGRAMS, Program, resolve
from zoo.common.registry import architectures, find
from zoo.qwen3 import SIZES, Qwen3ForRL, Qwen3ForServing
from zoo.testing import LawBroken

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


def test_launches_in_a_trace() -> None:
    args = {"grid": [4, 2, 1], "block": [128, 1, 1], "registers per thread": 90, "shared memory": 512}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "dur": 5.0, "args": args}
    found = common.launches_in([{"ph": "X", "cat": "cuda_runtime", "name": "launch", "dur": 9}, {**kernel, "dur": 2.0}, kernel])
    assert [k["us"] for k in found] == [5.0, 2.0]
    assert (found[0]["blocks"], found[0]["threads"], found[0]["registers"], found[0]["shared_bytes"]) == (8, 128, 90, 512)


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


@pytest.mark.parametrize(
    "name",
    [
        "linear",
        "experts",
        "packed_experts",
        "attention",
        "gated_delta",
        "layer_norm",
        "head_linear",
        "biased_route",
        "select",
        "sparse_attention",
    ],
)
def test_an_op_gives_whole_rows(name: str) -> None:
    torch.manual_seed(0)
    place = Place(torch.device("cpu"), ALIGNED, None, contexts=(20,), tiny=True)
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


@pytest.mark.parametrize(("rows", "short"), [(257, False), (512, False), (513, True)])
def test_documents_of_the_gated_delta_rule(rows: int, short: bool) -> None:
    """One document, and from SHORT + 1 rows on short ones, the last of what is left: here of one row."""
    torch.manual_seed(0)
    works = list(ops.OPS["gated_delta"](Place(torch.device("cpu"), ALIGNED, None, contexts=(20,), tiny=True), rows))
    shapes = [work.shape for work in works]
    assert len(set(shapes)) == len(shapes) and sum("documents" in shape for shape in shapes) == short * len(shapes) // 2
    works[-1].law()


@pytest.mark.parametrize("name", ["select", "sparse_attention"])
def test_latent_attention_of_one_document(name: str) -> None:
    """Prefill's quick law, and its rival's numbers beside ours."""
    torch.manual_seed(0)
    [work] = OPS[name](Place(torch.device("cpu"), ALIGNED, None, contexts=(20,), tiny=True), 257)
    work.law()
    found = work.ours["aligned"](0)
    other = work.rivals["torch"](0)
    if name == "select":
        assert all(set(a[a >= 0].tolist()) <= set(b.tolist()) for a, b in zip(found[:4], other))
    else:
        assert common.relative_error(found, other.double()) < 0.02 < common.relative_error(found.roll(1, 0), other.double())


def _broken(work: Work) -> Work:
    def law() -> None:
        raise LawBroken("planted")

    return Work(**{**vars(work), "law": law})


def test_a_red_law_takes_the_ratio_away() -> None:
    place = Place(torch.device("cpu"), ALIGNED, None, contexts=(20,), tiny=True)
    work = next(ops.OPS["attention"](place, 3))  # SDPA runs on the CPU too
    assert ops.measure(work, FakeTimer(), ALIGNED)["ratio"] == 0.5
    row = ops.measure(_broken(work), FakeTimer(), ALIGNED)
    assert row["ratio"] is None and row["bytes"] == "red: planted"


def test_the_quick_row_law_sees_a_sum_that_depends_on_the_batch() -> None:
    x = torch.randn(9, 5)
    subset_law(lambda: x * 2, lambda i: x[i] * 2, 9, x.device)()
    with pytest.raises(LawBroken):
        subset_law(lambda: x + x.sum(), lambda i: x[i] + x[i].sum(), 9, x.device)()
    one = x[:1]  # of one row only a larger batch says anything
    subset_law(lambda: one * 2, lambda i: one[i] * 2, 1, x.device)()
    with pytest.raises(LawBroken, match="1 rows inside 129"):
        subset_law(lambda: one + one.sum(), lambda i: one[i] + one[i].sum(), 1, x.device)()


def test_a_rival_that_fails_is_named_and_left_out() -> None:
    def fails(i: int) -> Any:
        raise ImportError("no such library\nat all")

    work = Work("linear", "any", 1, {"aligned": lambda i: torch.ones(2)}, {"lost": fails}, 1.0, 1.0, lambda: None)
    row = ops.measure(work, FakeTimer(), ALIGNED)
    assert row["rival"] is None and row["failed"] == {"lost": "ImportError: no such library"}


def test_a_provider_with_other_bytes_is_red() -> None:
    ours = {"aligned": lambda i: torch.ones(2), "other": lambda i: torch.full((2,), 1.0000001)}
    row = ops.measure(Work("linear", "any", 1, ours, {}, 1.0, 1.0, lambda: None), FakeTimer(), ALIGNED)
    assert row["bytes"].startswith("red: other against aligned")


def test_ops_smoke_runs_and_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert ops.main(["linear", "--device", "cpu", "--smoke", "--rows", "2", "--shapes", "qwen3-8b o"], FakeTimer()) == 0
    out = capsys.readouterr().out
    assert "smoke run: these times mean nothing" in out and "qwen3-8b o" in out and "qkv" not in out
    assert ops.main(["linear", "--device", "cpu"]) == 2 and ops.main(["nonsense"]) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("main", [lambda: ops.main([], FakeTimer()), lambda: models.main(["qwen3"])], ids=["ops", "models"])
def test_without_a_gpu_one_sentence(main: Callable[[], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: --device cuda: torch ") and "sees no GPU here" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize("main", [models.main, sglang.main, sglang_proof.main], ids=["models", "sglang", "proof"])
@pytest.mark.parametrize("arch", list(architectures()))
def test_a_size_that_was_not_asked_for_is_one_that_there_is(
    monkeypatch: pytest.MonkeyPatch, main: Callable[[list[str]], int], arch: str
) -> None:
    class Asked(Exception):
        pass

    def geometry(arch: str, size: str, layers: int | None) -> None:
        common.geometry(arch, size, layers)
        raise Asked(size)

    for module in (models, sglang, sglang_phases):
        monkeypatch.setattr(module, "geometry", geometry)
    if main is models.main or find(arch)[0].sglang:
        with pytest.raises(Asked, match=f"^{common.USUAL_SIZES[arch]}$"):
            main([arch])
        with pytest.raises(Asked, match="^tiny$"):
            main([arch, "--size", "tiny"])


def test_models_smoke_compares_engines(capsys: pytest.CaptureFixture[str]) -> None:
    size = "--layers 1 --device cpu --smoke --batches 2 --contexts 9 --documents 1 --length 20 --lengths 12"
    arguments = f"{size} --what ladder,accuracy,decode,score"
    assert models.main(["qwen3", *arguments.split()]) == 0
    out = capsys.readouterr().out
    assert "accuracy: error_vs_fp64 0.00" in out and "rival_error_vs_fp64 None" in out
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


def trained(monkeypatch: pytest.MonkeyPatch, path: Path, **fails: Exception) -> list[dict[str, Any]]:
    """The rows of a train part, plain and checkpointed, whose steps take no time; who is named in `fails` raises it."""
    config = common.geometry("qwen3", "tiny", 1)[0]
    source = Qwen3ForRL.from_config(config, device="cpu")
    record = common.Recorder(path, {})
    bench = models.Bench("qwen3", "tiny", config, ALIGNED, ALIGNED, source, Qwen3ForRL, Qwen3ForServing, common.Budget(99), record)

    def step(bench: Any, program: Any, ids: Any, starts: Any, checkpointed: bool, peaks: dict[str, float], name: str) -> Any:
        def call() -> None:
            if name == "unaligned":
                written = rows_of(path)[-1]
                assert written["checkpointing"] == checkpointed and written["us"] > 0, "ours is written before the rival begins"
            if name in fails and not (checkpointed and isinstance(fails[name], torch.OutOfMemoryError)):
                raise fails[name]
            peaks[name] = 1.0

        return call

    monkeypatch.setattr(models_parts, "_step", step)
    models_parts.train(bench, 1, 9, rounds=2)
    return rows_of(path)


def test_a_train_step_of_ours_is_written_before_its_rival_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = trained(monkeypatch, tmp_path / "rows.jsonl")
    assert [(row["checkpointing"], row["turns"], row["rival"]) for row in rows] == [
        (False, 1, None),
        (False, 2, "unaligned"),
        (True, 1, None),
        (True, 2, "unaligned"),
    ]
    assert [row["ratio"] is None for row in rows] == [True, False, True, False] and "unaligned_peak_gib" in rows[1]


def test_a_rival_that_can_t_train_is_named_in_our_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = trained(monkeypatch, tmp_path / "rows.jsonl", unaligned=RuntimeError("install TileLang\nor a later Triton"))
    assert [row["turns"] for row in rows] == [1, 2, 1, 2] and all(row["us"] > 0 and row["ratio"] is None for row in rows)
    assert [row.get("failed") for row in rows] == [None, {"unaligned": "RuntimeError: install TileLang"}] * 2
    assert "equal; unaligned failed: RuntimeError: install TileLang" in models.lines([rows[1]])


def test_memory_that_runs_out_without_checkpoints_leaves_the_step_with_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = trained(monkeypatch, tmp_path / "rows.jsonl", aligned=torch.OutOfMemoryError("tried to allocate"))
    assert rows[0]["error"] == "OutOfMemoryError: tried to allocate" and [row.get("turns") for row in rows] == [None, 1, 2]


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
    monkeypatch.setattr(models_parts, "twin", spoiled)
    assert models.prove(bench, (12,))[1] > 0


LAYERS = {"qwen3": 2, "qwen3_moe": 2, "qwen3_5": 4, "qwen3_5_moe": 4, "glm5": 3}  # every kind of layer
MIXTURES = {"qwen3_moe": 2, "qwen3_5_moe": 4, "glm5": 2}


class Wide(Program):
    """The references in float64."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64


WIDE = Wide("aligned", "cpu", "float64", key_segments=PROGRAMS["aligned"].key_segments["cpu"])


def bench_of(arch: str, rival: Program | None = None) -> models.Bench:
    config, trainer, server = common.geometry(arch, "tiny", LAYERS[arch])
    source = trainer.from_config(config, device="cpu")
    return models.Bench(arch, "tiny", config, ALIGNED, rival, source, trainer, server, common.Budget(99), common.Recorder(None, {}))


@torch.no_grad()
def widened(bench: models.Bench) -> Any:
    """The bench's trainer over the references in float64: BF16 parameters widened, FP32 ones FP32."""
    with torch.device("meta"):
        model = bench.trainer(bench.config, WIDE)
    state = bench.source.state_dict()
    model.load_state_dict({n: p.double() if p.dtype == torch.bfloat16 else p for n, p in state.items()}, assign=True)
    return model.eval()


@pytest.mark.parametrize("arch", LAYERS)
@torch.no_grad()
def test_the_float64_model_is_the_references_in_float64(arch: str) -> None:
    """Up to the FP32 cosines of a rotation's table. One BF16 step in one vector is seen."""
    bench = bench_of(arch)
    ids = torch.randint(bench.config.vocabulary, (150,), generator=torch.Generator().manual_seed(1))
    seen: list[str] = []
    with ours.watch(lambda contract, arguments, result: seen.append(contract.name)):
        found = next_log_prob(float64_of(bench.source).logits(ids), ids)
    assert not seen and found.dtype == torch.float64, "torch alone"
    model = widened(bench)
    bounds = torch.tensor([0, 150])
    wanted = model.score(ids, bounds)[:-1]
    assert wanted.dtype == torch.float64 and wanted.std() > 0.1
    assert (found - wanted).abs().max() < 2e-6
    weight = model.model.layers[0].post_norm.weight
    weight.mul_(1 + 2**-8)
    assert (model.score(ids, bounds)[:-1] - found).abs().max() > 1e-4


@pytest.mark.parametrize("arch", LAYERS)
def test_the_float64_model_stays_on_its_device(arch: str) -> None:
    """On `meta` every operation that meets a tensor of another device raises."""
    config, trainer, _ = common.geometry(arch, "tiny", LAYERS[arch])
    with torch.device("meta"):
        model = trainer(config, ALIGNED)
    assert float64_of(model).logits(torch.zeros(70, dtype=torch.long, device="meta")).shape == (70, config.vocabulary)


def test_weights_are_widened_one_by_one() -> None:
    source = bench_of("qwen3_5").source
    wide = Widened(source)
    assert list(wide) == [name for name, _ in source.named_parameters()] and len(wide) == len(list(wide))
    for name, parameter in source.named_parameters():
        assert wide[name].dtype == torch.float64 and torch.equal(wide[name].to(parameter.dtype), parameter)
        assert wide[name] is not wide[name]


def one_step_off(model: Any) -> Any:
    """Every matrix of layer 0 one BF16 step further from zero."""
    for name, parameter in list(model.model.layers[0].named_parameters()):
        if parameter.dim() > 1 and parameter.dtype == torch.bfloat16:
            at, _, leaf = name.rpartition(".")
            moved = (parameter.detach().view(torch.int16) + 1).view(torch.bfloat16)
            setattr(model.model.layers[0].get_submodule(at), leaf, torch.nn.Parameter(moved, requires_grad=False))
    return model


@pytest.mark.parametrize("arch", LAYERS)
def test_accuracy_against_float64(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row, twice the same; with weights one BF16 step off in one layer the error is larger, in a mixture that of the same experts."""
    bench = bench_of(arch)
    bench.row("decode", {"aligned": 100.0}, 8)
    models_accuracy.accuracy(bench, 70)
    models_accuracy.accuracy(bench, 70)
    bench.row("decode", {"aligned": 100.0}, 8)
    before, row, again, after = bench.record.rows
    assert row == again and (row["what"], row["tokens"], row["rival"]) == ("accuracy", 70, None)
    assert 1e-4 < row["error_vs_fp64"] < 0.1 and row["rival_error_vs_fp64"] is None and row["max_error_vs_fp64"] > 1e-3
    assert "error_vs_fp64" not in before and after["error_vs_fp64"] == pytest.approx(row["error_vs_fp64"], rel=1e-4)
    assert after["rival_error_vs_fp64"] is None and models.lines([row]) == models.lines([])
    whole = models_accuracy.twin
    monkeypatch.setattr(models_accuracy, "twin", lambda *given: one_step_off(whole(*given)))
    models_accuracy.accuracy(bench, 70)
    spoiled = bench.record.rows[-1]
    if bench.config.experts:
        kept = "same_experts_error_vs_fp64"
        assert row["routed"] == 70 * MIXTURES[arch] and row["rerouted"] < row["routed"] // 4 and row["rerouted"] != spoiled["rerouted"]
        assert 1e-4 < row[kept] < spoiled[kept]
        assert row["error_vs_fp64"] > 2 * row[kept] if row["rerouted"] else row["error_vs_fp64"] == row[kept]
    else:
        assert "routed" not in row and spoiled["error_vs_fp64"] > row["error_vs_fp64"]


def test_accuracy_of_a_rival_stands_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("qwen3_moe", rival=ALIGNED)
    whole = models_accuracy.twin
    calls = []

    def second_spoiled(*given: Any) -> Any:
        calls.append(given)
        return whole(*given) if len(calls) == 1 else one_step_off(whole(*given))

    monkeypatch.setattr(models_accuracy, "twin", second_spoiled)
    models_accuracy.accuracy(bench, 70)
    bench.row("score", {"aligned": 100.0, "unaligned": 80.0}, 8)
    row, scored = bench.record.rows
    assert row["rival"] == "unaligned" and row["rival_error_vs_fp64"] > row["error_vs_fp64"] > 0
    assert row["rival_max_error_vs_fp64"] != row["max_error_vs_fp64"] and row["rival_rerouted"] != row["rerouted"]
    assert 0 < row["rival_differs"] < 70
    assert row["rival_same_experts_error_vs_fp64"] > row["same_experts_error_vs_fp64"] > 0
    assert all(scored[key] == row[key] for key in ("error_vs_fp64", "rival_error_vs_fp64"))


def test_a_rival_that_can_t_score_is_named_in_the_row_of_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of("qwen3", rival=ALIGNED)
    whole = models_accuracy.log_prob_of
    calls = []

    def fails(*given: Any) -> Any:
        calls.append(given)
        if len(calls) != 1:
            raise RuntimeError("no kernel\nfor this")
        return whole(*given)

    monkeypatch.setattr(models_accuracy, "log_prob_of", fails)
    models_accuracy.accuracy(bench, 20)
    row = bench.record.rows[0]
    assert row["error_vs_fp64"] > 0 and row["rival_error_vs_fp64"] is None and row["failed"] == {"unaligned": "RuntimeError: no kernel"}
    with pytest.raises(RuntimeError, match="no kernel"):  # ours
        models_accuracy.accuracy(bench, 20)


def test_a_document_of_one_token_has_nothing_to_score(capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["qwen3", "--device", "cpu", "--smoke", "--tokens", "1"]) == 2
    assert "--tokens 1:" in capsys.readouterr().err


def test_a_twin_shares_its_parameters() -> None:
    source = Qwen3ForRL.from_config(SIZES["tiny"], device="cpu")
    made = models.twin(source, Qwen3ForServing, ALIGNED)
    theirs = dict(source.named_parameters())
    assert all(p.data_ptr() == theirs[name].data_ptr() and not p.requires_grad for name, p in made.named_parameters())
    assert made.model.rotary.table_PC2 is source.model.rotary.table_PC2


def test_a_mixed_program_switches_one_op() -> None:
    program = models.mixed(["attention"])
    assert program.byte_class("attention") == PROGRAMS["aligned"].classes["cuda"]["attention"] and program.key_segment(128) == 2048
    assert program.byte_class("linear") == PROGRAMS["unaligned"].classes["cuda"]["linear"]
    assert models.mixed(["linear"]).key_segment(128) is None
    assert len({models.mixed(["linear"]), models.mixed(["experts"]), resolve("unaligned", "cuda", torch.bfloat16)}) == 3
    assert models.switchable(["linear", "rms_norm", "experts"]) == ["linear", "experts"]


def test_shares_add_up() -> None:
    found = {f["op"]: f for f in models.shares(100.0, {"linear": 103.0, "attention": 105.0}, 110.0)}
    assert [found[op]["added_us"] for op in found] == [3.0, 5.0, 2.0]
    assert sum(f["share"] for f in found.values()) == pytest.approx(1.0)
    assert all(f["share"] is None for f in models.shares(100.0, {"linear": 103.0}, 100.0))


def test_rivals_compute_what_our_ops_do() -> None:
    torch.manual_seed(0)
    x, residual, weight = (torch.randn(*shape).bfloat16() for shape in ((5, 48), (5, 48), (48,)))
    expected = ours.add_rms_norm(x, residual, weight, 1e-6, program=ALIGNED)
    for rival in (rivals.add_rms_norm, rivals.add_rms_norm_torch):
        torch.testing.assert_close(rival(x, residual, weight, 1e-6), expected)
    qkv = torch.randn(5, 8 * 128).bfloat16()
    gain = torch.rand(128).bfloat16()
    positions = torch.randint(64, (5,))
    turn = ours.rope_table(64, 128, 1e6)
    expected = ours.norm_rope(qkv, gain, gain, turn, positions, heads=4, kv_heads=2, eps=1e-6, program=ALIGNED)
    torch.testing.assert_close(rivals.norm_rope(qkv, gain, gain, turn, positions, 4, 2, 1e-6), expected)
    logits = torch.randn(5, 16)
    gate_up = torch.randn(5, 64).bfloat16()
    torch.testing.assert_close(rivals.route(logits, 4), ours.route(logits, 4, True, program=ALIGNED))
    torch.testing.assert_close(rivals.swiglu(gate_up), ours.swiglu(gate_up, program=ALIGNED), rtol=0.02, atol=0.02)
    hidden = torch.randn(5, 16)
    head = torch.randn(300, 16)
    targets = torch.randint(300, (5,))
    scored = ours.log_prob(hidden.bfloat16(), head.bfloat16(), targets, program=ALIGNED).log_prob_R
    torch.testing.assert_close(rivals.log_prob(hidden.bfloat16(), head.bfloat16(), targets), scored, rtol=0.02, atol=0.05)


class FakeEngine:
    """Draws what it is asked for, at once; the profiler leaves the trace of two kernels."""

    def __init__(self, short: int = 0, backend: str = "fa3") -> None:
        self.calls: list[tuple[int, int]] = []
        self.filters: list[float] = []
        self.short = short
        self.backend = backend
        self.folder = Path()
        self.ended = False

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any], return_logprob: bool) -> list[dict[str, Any]]:
        new = sampling_params["max_new_tokens"]
        self.calls.append((len(input_ids), new))
        self.filters.append(sampling_params["top_p"])
        if self.folder != Path():
            events = [
                {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": 40.0}
                for name, ts in (("product", 0.0), ("attention", 20.0), ("product", 120.0))
            ]
            for stage, some in (("EXTEND", events[:2]), ("DECODE", events)):
                with gzip.open(self.folder / f"decode-TP-0-{stage}.trace.json.gz", "wt") as file:
                    json.dump({"traceEvents": [*some, {"ph": "X", "cat": "cpu_op", "name": "mm", "ts": 0.0, "dur": 900.0}]}, file)
        return [{"meta_info": {"completion_tokens": new - self.short}} for _ in input_ids]

    def flush_cache(self) -> None:
        pass

    def start_profile(self, output_dir: str, **options: Any) -> None:
        self.folder = Path(output_dir)

    def get_server_info(self) -> dict[str, Any]:
        return {"attention_backend": self.backend}

    def shutdown(self) -> None:
        self.ended = True


class FakeEntrant:
    """Ready once `settle` has looked `late` times; `speeds` are tokens/s, or ms, by label; a str fails."""

    def __init__(self, name: str, speeds: dict[str, float | str], late: int = 0, why: str = "", took: float = 10.0) -> None:
        self.name = name
        self.speeds = speeds
        self.late = late
        self.why = why
        self.took = took
        self.ready: dict[str, Any] | None = {"ready": True, "start_s": 1.0}
        self.log: list[str] = []
        self.still = False
        if name == sglang.ZOO:
            self.ready |= {"qualification": "qualified"}

    @property
    def state(self) -> str:
        if self.why:
            return "failed"
        self.late -= 1
        return "ready" if self.late < 0 else "starting"

    def start(self) -> None:
        self.log.append("start")

    def ask(self, measure: engines.Measure, seconds: float) -> dict[str, Any]:
        assert not self.still, "nobody answers who stands still"
        self.log.append(measure.label)
        if measure.kind.endswith(" profile"):
            return {"step_us": 9.0, "busy": 0.5, "launches": 2.0, "kernels": []}
        value = self.speeds[measure.label]
        if isinstance(value, str):
            raise ValueError(value)
        return {measure.unit: value, "took_s": self.took, "warm_s": 1.0}

    def pause(self) -> None:
        self.still = True
        self.log.append("pause")

    def resume(self) -> None:
        self.still = False
        self.log.append("resume")

    def close(self) -> None:
        self.log.append("close")

    def tail(self) -> str:
        return "its last words"


def a_race(tmp_path: Path, seconds: float = 1e6, turns: int = 1) -> tuple[sglang.Race, Path, list[float]]:
    """A race on a clock that moves by what its sleeps take."""
    now = [0.0]
    record = common.Recorder(tmp_path / "rows.jsonl", {"device": "fake"})

    def sleep(duration: float) -> None:
        now[0] += duration

    budget = common.Budget(seconds, lambda: now[0])
    return sglang.Race(record, budget, {"arch": "qwen3"}, lambda text: None, turns, sleep), tmp_path / "rows.jsonl", now


MEASURES = sglang.plan(sglang.parse_loads("64x128,1x128"))
SPEEDS: dict[str, float | str] = {"64x128": 4000.0, "prefill": 5e4, "first token": 20.0, "1x128": 180.0}


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_first_load_is_measured_first() -> None:
    assert [m.label for m in sglang.plan(sglang.parse_loads(sglang.LOADS))][:3] == ["64x128", "prefill", "first token"]
    everything = ["zoo", "stock", "eager-prefill", "deterministic"]
    assert list(sglang.contenders(["fa3", "triton"], everything)) == [
        "zoo",
        "stock fa3",
        "stock triton",
        "eager-prefill fa3",
        "eager-prefill triton",
        "deterministic fa3",
        "deterministic triton",
    ]
    assert list(sglang.contenders(["fa3"], ["stock", "zoo"])) == ["zoo", "stock fa3"]
    assert "cuda_graph_backend_prefill" not in sglang.contenders(["fa3"], everything)["stock fa3"]  # as it comes
    with pytest.raises(ValueError, match="--contenders 'stocks': there are zoo, stock, eager-prefill, deterministic"):
        sglang.contenders(["fa3"], ["zoo", "stocks"])
    for text in ("64", "64x", "x128", "0x128", "64x128,", "64x128@", "64x128@0", "64x128@0.0", "64x128@1.5", "64x128@x"):
        with pytest.raises(ValueError, match="is not batch x new"):
            sglang.parse_loads(text)


def test_engines_share_context_graphs_and_slots() -> None:
    loads = sglang.parse_loads("64x128,1x128,64x1024,32x128")
    found = sglang.engine_arguments("w", loads, None, hybrid=False)
    assert found["context_length"] == 2048 and found["cuda_graph_bs_decode"] == [1, 32, 64] and found["max_running_requests"] == 65
    assert found["max_total_tokens"] >= 64 * 1536 and found["max_total_tokens"] % 80 == found["max_total_tokens"] % 128 == 0
    assert "load_format" not in found and "max_mamba_cache_size" not in found
    assert sglang.engine_arguments("w", sglang.parse_loads("2x4096"), None, hybrid=True)["context_length"] == 6144
    assert sglang.engine_arguments("w", loads, 4096, hybrid=True)["max_mamba_cache_size"] == 192


def test_rows_come_as_they_are_measured_with_the_zoo_s_speed_over_each(tmp_path: Path) -> None:
    race, path, _ = a_race(tmp_path)
    seen: list[int] = []

    class Watching(FakeEntrant):
        def ask(self, measure: engines.Measure, seconds: float) -> dict[str, Any]:
            seen.append(len(rows_of(path)) if path.exists() else 0)
            return super().ask(measure, seconds)

    slower: dict[str, float | str] = {"64x128": 3200.0, "prefill": 4e4, "first token": 25.0, "1x128": 200.0}
    race.together([Watching("zoo", SPEEDS), Watching("stock fa3", slower), Watching("deterministic fa3", slower)], MEASURES)
    assert seen == list(range(12)), "each measurement is written before the next one begins"
    rows = rows_of(path)
    assert [(row["contender"], row["what"]) for row in rows[:4]] == [
        ("zoo", "64x128"),
        ("stock fa3", "64x128"),
        ("deterministic fa3", "64x128"),
        ("zoo", "prefill"),
    ]
    assert rows[0]["zoo_over_it"] is None and all(row["qualification"] == "qualified" for row in rows)
    over = {row["what"]: row["zoo_over_it"] for row in rows if row["contender"] == "stock fa3"}
    assert over == {"64x128": 1.25, "prefill": 1.25, "first token": 1.25, "1x128": 0.9}
    assert [m.label for m in race.missed(MEASURES, 0.97)] == ["1x128"] and not race.missed(MEASURES, 0.9)
    assert [m.label for m in race.missed(MEASURES, 1.3)] == ["64x128", "prefill", "1x128"]
    race.ratios(MEASURES)
    assert [row["rival"] for row in rows_of(path)[12:]] == ["stock fa3", "deterministic fa3"]
    assert "zoo over stock fa3" in race.summary(MEASURES)


class Starting(FakeEntrant):
    """Ready after so many seconds, not counting those in which it stands still; the race's clock runs while one is measured."""

    def __init__(self, name: str, after: float, now: list[float], field: list[Starting]) -> None:
        super().__init__(name, dict(SPEEDS), took=4.0)
        self.after = after
        self.now = now
        self.field = field
        field.append(self)

    @property
    def state(self) -> str:
        return "starting" if self.now[0] < self.after else "ready"

    def ask(self, measure: engines.Measure, seconds: float) -> dict[str, Any]:
        late = [e for e in self.field if e.state == "starting"]
        assert self not in late, "nobody answers who still starts"
        self.now[0] += 5.0
        for entrant in late:
            entrant.after += 5.0 if entrant.still else 0.0
        self.speeds["1x128"] = 90.0 if late else 180.0  # the host compiles: one request is slow
        return super().ask(measure, seconds)


def measured(race: sglang.Race, now: list[float], **after: float) -> list[tuple[str, str]]:
    """(contender, measure) in order, of a race between contenders that need so many seconds to start."""
    field: list[Starting] = []
    for name, seconds in after.items():
        Starting(name if name == "zoo" else f"{name} fa3", seconds, now, field)
    race.together(field, MEASURES)
    return [(row["contender"].split()[0], row["what"]) for row in race.record.rows if "failed" not in row]


def test_who_is_late_stands_still_and_is_measured_beside_the_others_again(tmp_path: Path) -> None:
    race, _, now = a_race(tmp_path, seconds=500, turns=2)
    found = measured(race, now, zoo=100, stock=80, deterministic=150)
    assert [name for name, what in found if what == "prefill"] == [
        "zoo",
        "stock",
        "stock",
        "zoo",
        "deterministic",
        "zoo",
        "stock",
        "stock",
        "zoo",
        "deterministic",
    ]
    assert {found["1x128"] for found in race.best.values()} == {180.0}, "the noisy window gave nobody its number"
    assert [race.zoo_over(name, MEASURES[-1]) for name in ("stock fa3", "deterministic fa3")] == [1.0, 1.0]


def test_nothing_is_compared_before_the_zoo_and_stock_are_there(tmp_path: Path) -> None:
    for late in ("zoo", "stock"):
        race, _, now = a_race(tmp_path, seconds=500)
        found = measured(race, now, **{"zoo": 20, "stock": 20, late: 400})
        assert found[0] == ({"zoo": "stock", "stock": "zoo"}[late], "64x128"), "once, in case the other never comes"
        assert [name for name, what in found[1:] if what == "64x128"] == ["zoo", "stock"] and len(found) == 9
        assert race.zoo_over("stock fa3", MEASURES[-1]) == 1.0


def test_engines_slower_than_the_first_wait_are_measured_all_the_same(tmp_path: Path) -> None:
    race, _, now = a_race(tmp_path, seconds=140)
    found = measured(race, now, zoo=103, stock=106, deterministic=138)
    assert found[:3] == [("zoo", "64x128"), ("zoo", "64x128"), ("stock", "64x128")] and race.zoo_over("stock fa3", MEASURES[0]) == 1.0
    for after in (100, 134, 137):
        for name in ("zoo", "stock", "deterministic"):
            race, _, now = a_race(tmp_path, seconds=140)
            found = measured(race, now, **{"zoo": 999, "stock": 999, "deterministic": 999, name: after})
            assert found and {who for who, _ in found} == {name}, f"{name}, ready after {after} s of 140"


def test_stock_and_the_zoo_go_before_a_deterministic_one(tmp_path: Path) -> None:
    race, _, now = a_race(tmp_path, seconds=300)
    found = measured(race, now, zoo=205, stock=210, deterministic=170)
    assert [name for name, what in found if what == "64x128"] == ["deterministic", "zoo", "stock", "deterministic"]
    race, _, now = a_race(tmp_path, seconds=400)
    found = measured(race, now, zoo=20, stock=30, eager=280, deterministic=245)
    assert [name for name, what in found if what == "64x128"] == ["zoo", "stock", "eager", "deterministic", "zoo", "stock"]


def test_a_contender_that_never_comes_leaves_the_others_their_rows(tmp_path: Path) -> None:
    race, path, now = a_race(tmp_path, seconds=300)
    race.together([FakeEntrant("zoo", SPEEDS, late=1 << 30), FakeEntrant("stock fa3", SPEEDS, took=2.0)], MEASURES)
    rows = rows_of(path)
    assert [row["contender"] for row in rows] == ["stock fa3"] * 5 + ["zoo"] and "budget" in rows[-1]["failed"]
    assert rows[0]["what"] == rows[1]["what"] == "64x128", "once before the zoo was waited for"
    assert 290 < now[0] < 310


def test_failures_are_rows_and_stop_nobody_else(tmp_path: Path) -> None:
    race, path, _ = a_race(tmp_path)
    one = {**SPEEDS, "prefill": "out of memory"}
    race.together([FakeEntrant("zoo", SPEEDS), FakeEntrant("stock fa3", one), FakeEntrant("stock triton", {}, why="no nvcc")], MEASURES)
    failed = [(row["contender"], row.get("what"), row["failed"]) for row in rows_of(path) if "failed" in row]
    assert failed == [("stock fa3", "prefill", "out of memory"), ("stock triton", None, "no nvcc")]
    assert len(rows_of(path)) == 9


def test_what_does_not_fit_the_budget_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    race, path, _ = a_race(tmp_path, seconds=20)
    race.together([FakeEntrant("zoo", SPEEDS, took=30.0), FakeEntrant("stock fa3", SPEEDS)], MEASURES[:1])
    assert [row["contender"] for row in rows_of(path)] == ["zoo"], "the second has no time for what took the first 31 seconds"
    assert "stock fa3 64x128: skipped: budget" in capsys.readouterr().out


def test_the_best_turn_counts(tmp_path: Path) -> None:
    race, path, _ = a_race(tmp_path, turns=2)
    entrant = FakeEntrant("zoo", dict(SPEEDS))
    race.turn([entrant], MEASURES[:1])
    entrant.speeds["64x128"] = 3000.0
    race.turn([entrant], MEASURES[:1])
    assert race.best["zoo"]["64x128"] == 4000.0 and [row["turn"] for row in rows_of(path)] == [0, 1, 0, 1]


def test_who_is_not_measured_stands_still(tmp_path: Path) -> None:
    race, _, _ = a_race(tmp_path)
    both: list[FakeEntrant] = []

    class Watching(FakeEntrant):
        def ask(self, measure: engines.Measure, seconds: float) -> dict[str, Any]:
            assert [e.still for e in both] == [e is not self for e in both]
            return super().ask(measure, seconds)

    both += [Watching("zoo", SPEEDS), Watching("stock fa3", SPEEDS), Watching("deterministic fa3", SPEEDS, late=40)]
    race.together(both, MEASURES)
    race.profile(both, MEASURES)
    assert not any(e.still for e in both), "they can end"
    assert all("64x128" in e.log for e in both) and "prefill profile" in both[1].log


def test_every_other_turn_is_in_the_other_order(tmp_path: Path) -> None:
    race, path, _ = a_race(tmp_path, turns=3)
    race.turn([FakeEntrant("zoo", SPEEDS), FakeEntrant("stock fa3", SPEEDS)], MEASURES[:1])
    assert [row["contender"] for row in rows_of(path)] == ["zoo", "stock fa3", "stock fa3", "zoo", "zoo", "stock fa3"]


def test_one_by_one_ends_each_before_the_next(tmp_path: Path) -> None:
    race, path, _ = a_race(tmp_path)
    order: list[FakeEntrant] = []

    def enter() -> Any:
        for name in ("zoo", "stock fa3"):
            assert all(e.log[-1] == "close" for e in order)
            order.append(FakeEntrant(name, SPEEDS))
            yield order[-1]

    race.one_by_one(enter(), MEASURES, profile=True)
    log = [line for line in order[0].log if line not in ("pause", "resume")]
    assert log == ["start", *SPEEDS, "decode profile", "decode profile", "prefill profile", "close"]
    assert [row["batch"] for row in rows_of(path) if row["what"] == "decode profile"] == [1, 64, 1, 64]
    assert [row["batch"] for row in rows_of(path) if row["what"] == "prefill profile"] == [64, 64]


def test_a_bench_warms_each_batch_once_and_checks_the_count() -> None:
    engine = FakeEngine()
    bench = engines.Bench(engine, 100)
    for measure in MEASURES:
        found = bench.measure(measure)
        assert found[measure.unit] > 0
    assert engine.calls == [(64, 8), (64, 128), (64, 1), (64, 1), (1, 8), (1, 1), (1, 1), (1, 1), (1, 128)]
    with pytest.raises(ValueError, match="7 tokens came back, 8 were asked for"):
        engines.Bench(FakeEngine(short=1), 100).measure(MEASURES[0])


def test_a_load_with_top_p_is_warmed_and_named_apart() -> None:
    engine = FakeEngine()
    bench = engines.Bench(engine, 100)
    loads = sglang.parse_loads("64x128,64x128@0.95,64x128@.5")
    assert [load.label for load in loads] == ["64x128", "64x128@0.95", "64x128@0.5"]
    for load in loads:
        bench.measure(load)
    assert engine.calls == [(64, 8), (64, 128)] * 3
    assert engine.filters == [1.0, 1.0, 0.95, 0.95, 0.5, 0.5]


def test_a_profile_sums_kernels_and_gaps() -> None:
    found = engines.Bench(FakeEngine(), 100).measure(engines.Measure("decode profile", 2))
    steps = engines.PROFILED_STEPS
    assert found["step_us"] == 160 / steps and found["busy"] == pytest.approx(100 / 160) and found["launches"] == 3 / steps
    assert [(k["kernel"], k["us"]) for k in found["kernels"]] == [("product", 80 / steps), ("attention", 40 / steps)]
    whole = engines.Bench(FakeEngine(), 100).measure(engines.Measure("prefill profile", 2))
    assert whole["step_us"] == 60 and whole["launches"] == 2, "a prefill is one step, and of its own trace"
    with pytest.raises(ValueError, match="no kernels"):
        engines.kernels_of([], 1)


def test_a_contender_s_side_answers_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    lines = ["start\n", json.dumps({"kind": "first", "batch": 1}), json.dumps({"kind": "load", "batch": 2, "new": 4})]
    engines.serve(lambda: engine, 100, lines, [2])
    told = [json.loads(line[3:]) for line in capsys.readouterr().out.splitlines() if line.startswith(engines.MARK)]
    assert ["progress" in message for message in told] == [True, True, False, False, False]
    assert told[2]["backend"] == "fa3" and "ms" in told[3] and told[4]["warm_s"] == 0.0 and engine.ended
    engines.serve(lambda: pytest.fail("nobody asked for an engine"), 100, [])


CHILD = """
import json, sys
print("noise before", flush=True)
for line in sys.stdin:
    if line.strip() == "start":
        print('@@ {"progress": "half way"}', flush=True)
        print('@@ {"ready": true, "start_s": 1.0}', flush=True)
    elif json.loads(line)["batch"] == 3:
        sys.exit("out of memory: tried everything")
    else:
        print('@@ {"tokens_per_s": 5.0, "took_s": 1.0, "warm_s": 0.0}', flush=True)
"""


def test_a_process_answers_and_its_end_is_explained(tmp_path: Path) -> None:
    said: list[str] = []
    contender = engines.Contender("child", [sys.executable, "-c", CHILD], tmp_path / "child.log", said.append)
    try:
        contender.pause()
        contender.start()
        contender.resume()
        assert contender.ask(engines.Measure("load", 2, 4), 60)["tokens_per_s"] == 5.0
        assert contender.state == "ready" and "child: half way" in said
        with pytest.raises(ValueError, match="out of memory: tried everything"):
            contender.ask(engines.Measure("load", 3, 4), 60)
        assert contender.state == "failed" and "noise before" in contender.tail()
    finally:
        contender.close()
    assert contender.process.returncode is not None


def test_models_hands_a_server_s_benchmark_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[list[str]] = []
    monkeypatch.setattr(sglang, "main", lambda argv: passed.append(argv) or 0)
    assert models.main(["qwen3_5", "--size", "4b", "--layers", "8", "--engine", "sglang", "--budget", "300", "--profile"]) == 0
    given = sglang.parser().parse_args(passed[0])
    assert (given.arch, given.size, given.layers, given.budget, given.profile) == ("qwen3_5", "4b", 8, 300.0, True)


def test_a_server_s_benchmark_refuses_what_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert sglang.main(["qwen3", "--size", "9b"]) == 2 and sglang.main(["qwen3", "--loads", "64"]) == 2
    assert sglang.main(["qwen3_5", "--size", "4b", "--layers", "2"]) == 2
    assert "full attention" in capsys.readouterr().err


@pytest.mark.parametrize("installed", [False, True])
def test_without_sglang_nothing_starts(installed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    started: list[Any] = []
    monkeypatch.setattr(sglang, "_run", lambda *given: started.append(given) or 0)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sglang.main(["qwen3"]) == (0 if installed else 2) and len(started) == installed
    said = capsys.readouterr().err
    assert not said if installed else said.startswith("error: sglang is not installed: ") and said.count("\n") == 1


def test_a_start_is_measured_and_odd_requests_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start, "ODD", ((5, 2, {"top_p": 0.9}),))
    words = ["qwen3", "--size", "tiny", "--chunk", "64", "--batch", "2", "--device", "cpu"]
    assert start.main([*words, "--case", "again"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compiled_after"] == 0 and found["late"] == [] and found["seconds"] > 0

    def given(words: Any, case: str, folder: Path) -> dict[str, Any]:
        return {**found, "compiled_after": int(case == "again"), "late": ["triton _linear: late"] if case == "again" else []}

    monkeypatch.setattr(start, "in_a_process", given)
    assert start.main(words) == 1  # the control: one that is compiled while requests wait
    assert "again: compiled after the rehearsal: triton _linear: late" in capsys.readouterr().out


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="alone: .*qwen3 has no size .none."):
        start.in_a_process(["qwen3", "--size", "none", "--device", "cpu"], "alone", tmp_path)
