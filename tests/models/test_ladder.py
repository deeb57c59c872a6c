"""The ladder: it passes on the models as they are, and each planted fault or empty run makes it fail."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import planted
from zoo.verify import live, ways
from zoo.verify.ladder import Ladder, Result
from zoo.verify.report import page
from zoo.verify.run import save
from zoo.verify.samplers import Embedded
from zoo.verify.scored import compare
from zoo.verify.subject import Settings, Subject, build, config_of, settings_for
from zoo.verify.tally import Tally, emptiness, k3_of, shared_pattern

ROOT = Path(__file__).parents[2]
FIELDS = {
    "arch",
    "device",
    "about",
    "values_compared",
    "bytes_compared",
    "bytes_differing",
    "fingerprint",
    "rungs",
    "not_run",
    "first_divergence",
}
SMALL = Settings((1, 65, 130), tail=70, page_sizes=(16,), steps=1, requests=6, drawn=6)


def climbed(subject: Subject, rungs: tuple[int, ...], settings: Settings = SMALL) -> Result:
    return Ladder(subject, settings).climb(rungs)


def built(arch: str = "qwen3") -> Subject:
    return build(arch, checkpoint=None, device="cpu")


@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe"])
def test_all_five_rungs(arch: str) -> None:
    result = climbed(built(arch), (1, 2, 3, 4, 5))
    assert result.ok and {row.rung for row in result.rows} == {1, 2, 3, 4, 5}
    assert all(row.compared > 0 and row.differing == 0 and row.k3 in (None, 0.0) for row in result.rows)
    assert result.first_divergence is None and not result.heat
    assert {line["rung"] for line in result.not_run} == {3, 5}
    assert set(result.to_dict()) == FIELDS
    assert set(result.fingerprint) == {"program", "weights", "toolchain", "realisation"}


FAULTS = [
    (planted.late_rope_table, "norm_rope", "model.layers.0.attention.norm"),
    (planted.stale_page, "attention", "model.layers.1.attention"),
    (planted.twice_rounded_residual, "rms_norm", "model.layers.1.post_norm"),
    (planted.other_k_parts, "linear", "model.layers.1."),
    (planted.narrow_vocabulary_group, "log_prob", "head"),
]


@pytest.mark.parametrize(("fault", "op", "layer"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_fault_in_one_engine_fails_rung_3_and_is_named(fault: Any, op: str, layer: str) -> None:
    subject = built()
    ladder = Ladder(subject, replace(SMALL, lengths=(1, 65, 300), tail=8))
    fault(subject.server)
    result = ladder.climb((3,))
    assert not result.ok and any(row.differing for row in result.rows)
    first = result.first_divergence
    assert first is not None and first["op"] == op and first["layer"].startswith(layer)
    assert first["elements"] > 0 and first["ulp"] > 0 and result.heat
    assert set(first) == {"layer", "op", "sequence", "position", "elements", "ulp"}
    # the row's words name both sides, its sentence names each once
    whats = [row.what for row in result.rows if not row.ok]
    assert whats[0].startswith("training against prefill, pages of ")
    assert result.names == ("the packed batch of training", whats[0].removeprefix("training against "))
    said = page(result, [], 3, 300)
    assert f"<p>The packed batch of training was compared with {result.names[1]}.</p>" in said
    if fault is planted.stale_page:
        assert (first["sequence"], first["position"]) == (1, planted.STALE[1])


def test_a_run_that_is_killed_leaves_what_it_proved(tmp_path: Path) -> None:
    """Rows come through a pipe as they finish, and the JSON file is whole after each of them."""
    out = tmp_path / "ladder.json"
    command = [
        sys.executable,
        "-m",
        "zoo.verify",
        "qwen3",
        "--device",
        "cpu",
        "--rungs",
        "1-3",
        "--lengths",
        "1,65,300",
        "--json",
        str(out),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        first = next(line for line in process.stdout if line.startswith(("equal", "FAILED")))
        second = process.stdout.readline()  # the first row is in the file by now
        process.kill()
    assert first.startswith("equal  1 training forward, twice (") and first.rstrip().endswith(" s)"), first
    assert second.startswith("equal  1 every parameter's gradient, twice (")
    fields = json.loads(out.read_text())
    assert set(fields) == FIELDS
    assert fields["rungs"][0]["what"] == "training forward, twice" and fields["rungs"][0]["ok"]
    assert [line["rung"] for line in fields["not_run"]][-2:] == [2, 3]
    assert all(line["reason"] == "the run has not come to its end" for line in fields["not_run"])


def test_a_link_or_device_gets_the_whole_result_only(tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    link = tmp_path / "link.json"
    real.write_text("")
    link.symlink_to(real)
    result = Result("qwen3", "cpu", {}, unfinished=[{"rung": 3, "what": "", "reason": ""}])
    save(link, result)
    assert real.read_text() == "" and link.is_symlink()
    result.unfinished.clear()
    save(link, result)
    save(real, result)
    assert json.loads(real.read_text())["arch"] == "qwen3" and link.is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_a_fault_in_the_program_is_refused_before_any_rung() -> None:
    subject = built()
    planted.narrow_vocabulary_group(subject.server)
    with pytest.raises(ValueError, match="vocab_group: 256 against 128"):
        Ladder(subject, SMALL)


def test_other_weights_are_refused() -> None:
    subject = built()
    subject.server = build("qwen3", checkpoint=None, device="cpu", seed=1).server
    with pytest.raises(ValueError, match="weights"):
        Ladder(subject, SMALL)


def test_a_parameter_without_a_gradient_is_no_frozen_one() -> None:
    """Only what an architecture's table freezes may have none."""
    subject = built()
    subject.trainer.model.layers[0].mlp.down.weight.requires_grad_(False)
    with pytest.raises(AssertionError, match=r"model\.layers\.0\.mlp\.down\.weight has no gradient"):
        climbed(subject, (1,))


def test_a_trainer_that_depends_on_its_batch_fails_rung_2() -> None:
    subject = built()
    hidden_rows = type(subject.trainer).hidden_rows

    class Leaky(type(subject.trainer)):  # type: ignore[misc]
        """Adds a trace of the batch's first row to every row."""

        def hidden_rows(self, ids_R: Any, rows: Any) -> Any:
            out = hidden_rows(self, ids_R, rows)
            return (out.float() + 2.0**-7 * out[:1].float()).to(out.dtype)

    subject.trainer.__class__ = Leaky
    result = climbed(subject, (1, 2))
    verdicts = {row.what: row.ok for row in result.rows}
    assert verdicts["training forward, twice"] and not verdicts["each document alone against packed"]
    assert result.names == ("the packed batch of training", "training, each document alone")


def test_fresh_memory_is_poisoned() -> None:
    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            out[1:] = x[1:]
            return out

    x = torch.ones(4, requires_grad=True)
    with ways.Poisoned():
        assert Forgetful.apply(x)[0].isnan() and torch.empty(3).isnan().all() and x.new_empty(2).isnan().all()
        assert torch.empty(2, dtype=torch.int64).tolist() == [77, 77]
        assert torch.zeros(3).tolist() == [0.0] * 3
    assert not torch.zeros(4).isnan().any()


def test_the_server_sees_every_token_once() -> None:
    """A hidden re-run would make decode right for the wrong reason: rows that enter the model are counted."""
    subject = built()
    subject.draw((5, 40))
    pushed = []
    hook = subject.server.model.embed.register_forward_pre_hook(lambda module, args: pushed.append(args[0].shape[0]))
    ways.exhaust(ways.decode(subject, ways.Tap(), [0, 1], tail=3))
    hook.remove()
    assert sum(pushed) == 45 and pushed[0] == 2 + 37 and all(count <= 2 for count in pushed[1:])


def test_one_prompt_token_changes_what_follows() -> None:
    subject = built()
    subject.draw((40,))
    before = next(ways.train(subject, ways.Tap(), [0]))
    subject.documents[0][5] = (subject.documents[0][5] + 1) % subject.vocabulary
    after = next(ways.train(subject, ways.Tap(), [0]))
    changed = (before.log_prob_T != after.log_prob_T).nonzero()[:, 0].tolist()
    # row 4 scores another target, every later row reads another token
    assert changed[0] == 4 and len(changed) >= 35


def test_a_run_that_proves_nothing_fails_as_empty() -> None:
    subject = built()
    for model in (subject.trainer, subject.server):
        with torch.no_grad():
            model.model.head.weight.zero_()
    result = climbed(subject, (3,))
    assert not result.ok and not any(row.differing for row in result.rows)
    assert all("empty" in row.what for row in result.rows)


@pytest.mark.parametrize(
    ("log_prob", "entropy", "sentence"),
    [
        (torch.full((10,), -3.0), None, "one bit pattern"),
        (torch.linspace(-1e-4, -9e-4, 10), None, "exceed -0.001"),
        (torch.linspace(-3, -4, 10), torch.full((10,), 6.23), "mean entropy"),
        (torch.tensor([-torch.inf] * 3), None, "no finite"),
        (torch.linspace(-3, -4, 10), torch.full((10,), 4.0), None),
    ],
)
def test_emptiness(log_prob: torch.Tensor, entropy: torch.Tensor | None, sentence: str | None) -> None:
    found = emptiness(log_prob, entropy, 512)
    assert found is None if sentence is None else found is not None and sentence in found


def test_a_cache_of_one_constant_is_empty() -> None:
    assert "share one bit pattern" in str(shared_pattern({"k.0": torch.zeros(8, 2)}))
    assert shared_pattern({"k.0": torch.arange(16.0)}) is None


def test_the_tally_counts_bytes_and_finds_the_first() -> None:
    a = torch.arange(12, dtype=torch.float32).view(4, 3)
    b = a.clone()
    b[2, 1] = torch.nextafter(b[2, 1], torch.tensor(100.0))
    tally = Tally()
    tally.bytes(a, b, "k.7", document=3, begin=10)
    assert (tally.compared, tally.compared_bytes, tally.differing) == (12, 48, 1)
    assert tally.spot is not None
    assert (tally.spot.document, tally.spot.position, tally.spot.elements, tally.spot.ulp) == (3, 12, 1, 1)
    assert tally.heat == {("7", 12): 1}
    same = Tally()
    same.bytes(a, a.clone(), "k.7")
    assert same.differing == 0 and same.row(3, "x").ok and not Tally().row(3, "x").ok
    signed = Tally()  # +0 and -0 are equal numbers and different bytes
    signed.bytes(torch.zeros(1), -torch.zeros(1), "k.0")
    assert signed.differing == 1


def test_k3_sees_one_ulp() -> None:
    """(exp(d) - d) - 1 in FP32 would say 0 here."""
    a = torch.tensor([-5.0])
    b = torch.nextafter(a, torch.tensor([0.0]))
    d = float(a.double() - b.double())
    assert k3_of(a, b) == pytest.approx(d * d / 2, rel=1e-3) and k3_of(a, b) > 0
    assert k3_of(a, a) == 0.0 and k3_of(torch.tensor([-torch.inf]), torch.tensor([-torch.inf])) == 0.0


def test_a_record_that_was_touched_is_caught() -> None:
    subject = built()
    subject.draw((20, 30))
    completions = live.sample(subject, SMALL, Embedded(subject))
    with live.Scorer(subject) as scorer:
        scores = scorer.score(completions)
        rows = [tally.row(4, what, empty) for what, tally, empty in compare(completions, scores, subject.vocabulary)]
        assert len(rows) == 3 and all(row.ok for row in rows)
        first = completions[0]
        other = replace(first, output_ids=(*first.output_ids[:-1], (first.output_ids[-1] + 1) % subject.vocabulary))
        changed = scorer.score([other, *completions[1:]])
        verdicts = [not tally.differing for _, tally, _ in compare(completions, changed, subject.vocabulary)]
        assert verdicts == [False, True, True]
        foreign = replace(first, fingerprint=replace(first.fingerprint, weights="0" * 32))
        with pytest.raises(ValueError, match="the trainer refuses the records: the last row is of .*, the fingerprint of 0000"):
            scorer.score([foreign])
        foreign = replace(foreign, versions=("0" * 32,) * len(first.versions))
        with pytest.raises(ValueError, match="the trainer refuses the records: .*weights"):
            scorer.score([foreign])
        mixed = replace(first, versions=("0" * 32, *first.versions[1:]))
        with pytest.raises(ValueError, match="mixes weights"):
            scorer.score([mixed])
        warm = next(c for c in completions if c.sampling.temperature > 0)
        reseeded = replace(warm, sampling=replace(warm.sampling, seed=warm.sampling.seed + 1))
        with pytest.raises(ValueError, match="drawn again it is"):
            scorer.score([reseeded])


def test_what_one_side_lacks_is_an_error() -> None:
    """Entropies or states that only one side has would pass without a comparison."""
    log_prob = torch.tensor([-1.0, -2.0])
    plain = ways.Seen(0, 0, log_prob, {})
    whole = replace(plain, entropy_T=log_prob, slot=lambda length: {"delta_k.0": torch.full((3,), float(length))})
    tally = Tally()
    tally.seen(whole, whole, entropy=True)
    assert tally.compared == 2 + 2 + 3
    with pytest.raises(ValueError, match="document 0: the other side has no entropies"):
        Tally().seen(whole, replace(whole, entropy_T=None), entropy=True)
    with pytest.raises(ValueError, match="document 0: the reference has no entropies"):
        Tally().seen(plain, whole, entropy=True)
    with pytest.raises(ValueError, match="the other side has no states"):
        Tally().seen(whole, plain, entropy=False)
    with pytest.raises(ValueError, match="the reference has no states"):
        Tally().seen(plain, whole, entropy=False)


def test_bad_subjects() -> None:
    for call, sentence in (
        (lambda: build("llama", checkpoint=None, device="cpu"), "unknown architecture 'llama'"),
        (lambda: config_of("qwen3", "9b", None), "qwen3 has no size '9b'"),
        (lambda: config_of("qwen3", "tiny", 9), "--layers 9: qwen3 tiny has 1 to 3"),
        (lambda: build("qwen3", checkpoint="somewhere", device="cpu", layers=1), "a checkpoint has all its layers"),
        (lambda: settings_for(built(), (0,)), "--lengths 0: a sequence has 1 to 4096 tokens"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
