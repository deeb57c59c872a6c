"""The trace names the first op that differs, however a run cut its batches; the reproduction shows the same bytes again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.models import planted
from zoo.common.serving import ForServing
from zoo.verify import ways
from zoo.verify.calls import Call, outputs_of
from zoo.verify.shrink import reproduction
from zoo.verify.subject import Subject, build
from zoo.verify.trace import Divergence, Key, Tap, Tracer, first_divergence, row_checksums

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("training, packed", "decode")


@pytest.fixture
def subject() -> Subject:
    made = build("qwen3", checkpoint=None, device="cpu")
    made.draw((33, 1, 260))
    return made


@pytest.fixture(scope="module")
def recurrent() -> Subject:
    made = build("qwen3_5", checkpoint=None, device="cpu")
    made.draw((1, 140))
    return made


def traced(subject: Subject, *, tail: int = 12) -> Divergence | None:
    """Training's packed batch against serving: a prefill, and the last tokens row by row."""
    documents = list(range(len(subject.documents)))

    def training(tap: Tap) -> None:
        ways.exhaust(ways.train(subject, tap, documents))

    def decode(tap: Tap) -> None:
        ways.exhaust(ways.decode(subject, tap, documents, tail=tail))

    return first_divergence((subject.trainer, training), (subject.server, decode))


def rerun(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script)], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@contextmanager
def narrow_group(server: ForServing) -> Iterator[None]:
    planted.narrow_vocabulary_group(server)
    yield


@pytest.mark.parametrize(
    ("fault", "op", "layer"),
    [(narrow_group, "log_prob", "head"), (planted.four_warps, "rms_norm", "model.layers.")],
    ids=["narrow_group", "four_warps"],
)
def test_planted_fault_is_named_and_reproduced(subject: Subject, tmp_path: Path, fault: object, op: str, layer: str) -> None:
    assert callable(fault)
    with fault(subject.server):
        found = traced(subject)
        assert found is not None
        assert found.key.op == op and found.key.layer.startswith(layer) and found.elements >= 1 and found.ulp >= 1
        script = reproduction(found, tmp_path / "found", NAMES)
    done = rerun(script)
    assert done.returncode == 1, done.stderr
    assert f"{found.elements} of " in done.stdout and "inputs that differ: none" in done.stdout
    text = script.read_text()
    assert all(name in text for name in NAMES) and len(text.splitlines()) < 90
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        reproduction(found, tmp_path / "found", NAMES)


def test_reproduction_of_a_cure_shows_no_difference(subject: Subject, tmp_path: Path) -> None:
    """Control: the same two files with one program made equal to the other exit with status 0."""
    planted.narrow_vocabulary_group(subject.server)
    found = traced(subject)
    assert found is not None
    script = reproduction(found, tmp_path, NAMES)
    script.write_text(script.read_text().replace("vocab_group=128", "vocab_group=256"))
    assert rerun(script).returncode == 0


def test_attention_reproduction_takes_the_row_and_its_history_along(subject: Subject, tmp_path: Path) -> None:
    planted.stale_page(subject.server)  # type: ignore[arg-type]
    found = traced(subject)
    assert found is not None and found.key == Key("model.layers.1.attention", "attention", 0, "out[0]")
    assert (found.sequence, found.position) == (2, planted.STALE[1])
    packed, paged = (call.arguments["history"] for call in found.calls)
    assert packed.k.shape[0] == planted.STALE[1] + 1 and paged.k.shape[0] == 1 and paged.page_table_NB.shape == (1, 1)
    done = rerun(reproduction(found, tmp_path, NAMES))
    assert done.returncode == 1 and f"{found.elements} of " in done.stdout


def test_equal_runs_have_no_divergence(subject: Subject) -> None:
    assert traced(subject, tail=9) is None


def test_the_fault_is_named_whatever_the_cut(subject: Subject) -> None:
    """The same fault seen through chunks and through single rows is one place."""
    documents = list(range(len(subject.documents)))
    planted.other_k_parts(subject.server)  # type: ignore[arg-type]

    def training(tap: Tap) -> None:
        ways.exhaust(ways.train(subject, tap, documents))

    def chunks(tap: Tap) -> None:
        ways.exhaust(ways.prefill(subject, tap, documents, page_size=16, chunked=True))

    found = [traced(subject), first_divergence((subject.trainer, training), (subject.server, chunks))]
    places = [(f.key, f.sequence, f.position, f.elements) for f in found if f is not None]
    assert len(places) == 2 and places[0] == places[1]


def test_hooks_are_gone_and_bytes_unchanged(subject: Subject) -> None:
    plain = [s.log_prob_T for s in ways.train(subject, Tap(), [0])]
    with Tracer(subject.trainer) as tracer:
        seen = [s.log_prob_T for s in ways.train(subject, tracer, [0])]
    assert torch.equal(plain[0], seen[0]) and len(tracer.seen) > 20
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.trainer.modules())


def test_of_a_row_that_is_pushed_twice_the_first_counts() -> None:
    """A chunk that is pushed again after a preemption, or a sequence that stands twice in a batch: both runs take the same one."""
    tracer = Tracer(torch.nn.Module())
    key = Key("layer", "op", 0, "out")
    tracer.seen[key] = [(torch.tensor([7, 3]), torch.tensor([70, 30])), (torch.tensor([3, 9, 7]), torch.tensor([31, 90, 71]))]
    codes, checksums = tracer.rows_of(key)
    assert codes.tolist() == [3, 7, 9] and checksums.tolist() == [30, 70, 90]


def test_row_checksums_see_one_bit_and_one_swap() -> None:
    x = torch.randn(5, 3, 4).to(torch.bfloat16)
    y = x.clone()
    y.view(torch.int16)[2, 1, 1] ^= 1
    z = x[:, :, [1, 0, 2, 3]]
    assert (row_checksums(x) != row_checksums(y)).tolist() == [False, False, True, False, False]
    assert (row_checksums(x) != row_checksums(z)).all()
    assert torch.equal(row_checksums(x), row_checksums(x.clone()))


def test_a_call_cut_to_one_row_gives_that_rows_bytes(subject: Subject) -> None:
    """What the reproduction relies on: each op on one row and its history equals the row of the batch."""
    calls: dict[str, Call] = {}

    class Keep(Tracer):
        def _observe(self, contract: object, seen: dict[str, object], result: object) -> None:
            call = Call.of(contract, seen, result)  # type: ignore[arg-type]
            calls.setdefault(call.name, call)

    with Keep(subject.trainer) as keep:
        ways.exhaust(ways.train(subject, keep, [0, 2]))
    assert {"embed", "linear", "rms_norm", "add_rms_norm", "norm_rope", "attention", "swiglu", "log_prob"} <= set(calls)
    for call in calls.values():
        small = call.at_row(57, 293)
        again = Call(small.contract, small.function, small.arguments, small.function(**small.arguments))
        for (name, a), (_, b) in zip(again.outputs(), call.outputs(), strict=True):
            assert torch.equal(a[-1], b[57]), f"{call.name} {name}"
        other = call.at_row(58, 293)  # the control: the next row's operands
        pairs = zip(outputs_of(other.function(**other.arguments)), call.outputs(), strict=True)
        assert any(not torch.equal(a[-1], b[57]) for (_, a), (_, b) in pairs), call.name


class TestRecurrent:
    """Ops that change their slots: the reproduction has the state before the call."""

    @pytest.mark.parametrize(
        ("op", "module", "position"),
        # a prefill of 100 rows, then single rows: the first of them reads the carry, and row 128 a rounded state
        # that came of the rounded one
        [("causal_conv", "tests.models.planted_conv", 100), ("gated_delta", "tests.models.planted_delta", 128)],
        ids=["carry off by one row", "rounded state"],
    )
    def test_a_planted_fault_is_reproduced(self, recurrent: Subject, tmp_path: Path, op: str, module: str, position: int) -> None:
        assert traced(recurrent, tail=40) is None
        with planted.recurrent(recurrent.server, op, module):
            found = traced(recurrent, tail=40)
            assert found is not None
            assert (found.key.op, found.key.layer) == (op, "model.layers.0.mixer")
            assert (found.sequence, found.position) == (1, position)
            trained, decoded = found.calls
            assert trained.arguments["rows"].count == position + 1 and decoded.arguments["rows"].count == 1
            assert [t.shape[0] for t in vars(decoded.arguments["history"]).values()] == [1] * len(vars(decoded.arguments["history"]))
            script = reproduction(found, tmp_path, NAMES)
        done = rerun(script)
        assert done.returncode == 1, done.stderr
        assert f"{found.elements} of " in done.stdout and len(script.read_text().splitlines()) < 120

    @pytest.mark.parametrize(
        ("op", "position", "moves"),
        # a row again after itself: another carry; the same row of the live chunk, unless it closed the chunk; the rows of a
        # prefill are their own carry
        [("causal_conv", 101, True), ("causal_conv", 99, False), ("gated_delta", 101, False), ("gated_delta", 127, True)],
    )
    def test_the_state_is_the_one_before_the_call(self, recurrent: Subject, op: str, position: int, moves: bool) -> None:
        """Without a fault one row after the captured state is the row of the run, and what training says."""
        key = Key("model.layers.1.mixer", op, 0, "out[0]")
        with Tracer(recurrent.trainer, capture=(key, 1, position)) as train:
            ways.exhaust(ways.train(recurrent, train, [0, 1]))
        with Tracer(recurrent.server, capture=(key, 1, position)) as decode:
            ways.exhaust(ways.decode(recurrent, decode, [0, 1], tail=40))
        assert train.call is not None and decode.call is not None
        first = 0 if position < 100 else position
        assert decode.call.arguments["rows"].positions_R.tolist() == list(range(first, position + 1))
        calls = [Call(c.contract, c.function, c.arguments, c.function(**c.arguments)) for c in (train.call, decode.call)]
        assert torch.equal(calls[0].result[-1], calls[1].result[-1]) and torch.equal(calls[1].result[-1], decode.call.result[-1])
        after = decode.call.function(**decode.call.arguments)  # the control: the state after the call
        assert torch.equal(after[-1], calls[1].result[-1]) != moves

    def test_equal_calls_show_no_difference(self, recurrent: Subject, tmp_path: Path) -> None:
        """Control: the script of a row that does not differ exits with status 0, and leaves its own state as it was."""
        key = Key("model.layers.0.mixer", "gated_delta", 0, "out[0]")
        tracers = []
        for model, way in ((recurrent.trainer, ways.train), (recurrent.server, ways.decode)):
            with Tracer(model, capture=(key, 1, 120)) as tracer:
                ways.exhaust(way(recurrent, tracer, [1], **({"tail": 40} if way is ways.decode else {})))  # type: ignore[operator]
            tracers.append(tracer)
        calls = tracers[0].call, tracers[1].call
        assert calls[0] is not None and calls[1] is not None
        script = reproduction(Divergence(key, 1, 120, 0, 0, (calls[0], calls[1])), tmp_path, NAMES)
        done = rerun(script)
        assert done.returncode == 0 and done.stdout.startswith("inputs that differ: ") and "0 of " in done.stdout, done.stderr
