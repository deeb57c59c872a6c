"""Programs as data: what each line changes, and the FP32 operands of the vocabulary product."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from zoo.common import ops
from zoo.common.engine import Engine
from zoo.common.ops.contract import CONTRACTS, program_lines
from zoo.common.ops.linear import head_product
from zoo.common.program import HEAD, PROGRAMS, Program, resolve, split_k
from zoo.common.rollouts import SamplingParams
from zoo.qwen3 import SIZES, Qwen3ForRL, Qwen3ForServing
from zoo.testing import as_integers

ALIGNED = resolve("aligned", "cpu", torch.bfloat16)
WIDE = resolve("fp32_head", "cpu", torch.bfloat16)


def test_every_op_has_a_class_wherever_a_program_runs() -> None:
    for name, found in PROGRAMS.items():
        for device in found.devices:
            program = resolve(name, device, torch.float32 if "float32" in found.dtypes else torch.bfloat16)
            for op, contract in CONTRACTS.items():
                members = {p.byte_class for p in contract.providers if p.device == device}
                assert program.byte_class(op) in members, f"{name} on {device}: {op} has no provider of class {program.byte_class(op)}"
                for begins, byte_class in found.geometries(device, op):
                    serving = [p for p in contract.providers if (p.device, p.byte_class) == (device, byte_class)]
                    heads_too = () if op == "fp8_select" else (64,)  # whose geometries are whole shapes
                    assert any(p.serves(*begins, *heads_too) for p in serving), f"{name} on {device}: {op} at {begins}"
            heads = {p.byte_class for p in CONTRACTS["linear"].providers if p.device == device}
            assert program.byte_class(HEAD) in heads


def test_a_derived_program_differs_where_it_says_so() -> None:
    aligned, unaligned, wide = (PROGRAMS[name].classes["cuda"] for name in ("aligned", "unaligned", "fp32_head"))
    assert {op for op in aligned if aligned[op] != unaligned[op]} == {"linear", "attention", "experts", "gated_delta"}
    assert {op for op in wide if wide[op] != aligned.get(op)} == {HEAD}


def test_a_class_of_a_geometry_is_the_same_at_every_row_and_head_count() -> None:
    program = replace(ALIGNED, device="cuda")
    for heads in (1, 8, 63, 64, 128, 256):
        assert program.byte_class("sparse_attention", (576, 512, heads)) == "flash_mla"
    for other in ((), (576,), (575, 512, 64), (576, 511, 64), (512, 512, 64), (40, 32, 64)):
        assert program.byte_class("sparse_attention", other) == "list_tiles"
    assert ALIGNED.byte_class("sparse_attention", (576, 512, 64)) == "reference"
    lines = program_lines(program, ("sparse_attention",))
    assert lines["op.sparse_attention"] == "sparse_attention/2 list_tiles, flash_mla at 576x512"
    assert program_lines(ALIGNED, ("sparse_attention",))["op.sparse_attention"] == "sparse_attention/2 reference"


def test_a_geometry_whose_library_is_absent_is_refused() -> None:
    program = replace(ALIGNED, device="cuda")
    contract = CONTRACTS["sparse_attention"]
    [member] = [p for p in contract.providers if p.byte_class == "flash_mla"]
    if member.installed():
        pytest.skip("FlashMLA is installed")
    with pytest.raises(ValueError, match=r"sparse_attention at shape \(576, 512, 64\).*flash_mla \(needs sgl_kernel"):
        contract.provider(program, (576, 512, 64))
    assert contract.provider(program, (40, 32, 4)).name == "triton"


def test_fingerprints_tell_the_head_apart() -> None:
    used = ("linear", "log_prob")
    mine = program_lines(ALIGNED, used)
    theirs = program_lines(WIDE, used)
    assert {name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)} == {"program", "op.head"}
    trainer = Qwen3ForRL.from_config(SIZES["tiny"], seed=1, device="cpu", program="fp32_head")
    with pytest.raises(ValueError, match=r"program: fp32_head/1 against aligned/1.*op\.head"):
        trainer.fingerprint().check(Qwen3ForRL.from_config(SIZES["tiny"], seed=1, device="cpu").fingerprint())


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("transformers", "cpu", torch.bfloat16, "'transformers' is float32 on cpu, not torch.bfloat16 on cpu: give dtype=torch.float32"),
        ("aligned", "cpu", torch.float32, "'aligned' is bfloat16 on cpu or cuda, not torch.float32 on cpu: give dtype=torch.bfloat16"),
        ("unaligned", "cpu", torch.bfloat16, "'unaligned' is bfloat16 on cuda, not torch.bfloat16 on cpu: it is the rival"),
        ("marlin", "cpu", torch.bfloat16, "unknown program 'marlin'; there are aligned, transformers, unaligned, .*fp32_head"),
    ],
)
def test_what_a_program_does_not_have_is_refused(name: str, device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(name, device, dtype)


def test_trainer_and_server_agree_under_the_wide_head() -> None:
    trainer = Qwen3ForRL.from_config(SIZES["tiny"], seed=1, device="cpu", program="fp32_head")
    server = Qwen3ForServing.from_config(SIZES["tiny"], seed=1, device="cpu", program="fp32_head")
    [record] = Engine(server).generate([[5, 6, 7]], SamplingParams(seed=3, max_new_tokens=12, ignore_eos=True))
    record.fingerprint.check(trainer.fingerprint())
    ids = torch.tensor(record.prompt_ids + record.output_ids)
    scored = trainer.score(ids, torch.tensor([0, len(ids)]), sampling=record.sampling)
    assert scored[2:-1].tolist() == list(record.filtered_log_probs)
    scored[2:-1].sum().backward()
    assert trainer.model.head.weight.grad is not None


@pytest.mark.gpu
def test_wide_heads_on_a_gpu_depend_on_no_other_row() -> None:
    program = resolve("fp32_head", "cuda", torch.bfloat16)
    draw = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 1024, device="cuda", generator=draw).bfloat16()
    weight = (torch.randn(4099, 1024, device="cuda", generator=draw) * 0.1).bfloat16()
    whole = head_product(hidden, weight, program)
    for rows in (1, 2, 7, 16, 17, 64, 65, 128):
        assert torch.equal(as_integers(head_product(hidden[:rows], weight, program)), as_integers(whole[:rows]))
    columns = head_product(hidden, weight[:1000].contiguous(), program)
    assert torch.equal(as_integers(columns), as_integers(whole[:, :1000].contiguous()))
    exact = hidden.double() @ weight.double().T
    assert float((whole.double() - exact).norm() / exact.norm()) < 2.0**-20
    # the control: the aligned head rounds elsewhere, inside the tensor core
    assert not torch.equal(whole, ops.logits(hidden, weight, program=_aligned()))


def _aligned() -> Program:
    return resolve("aligned", "cuda", torch.bfloat16)


PARTS = [
    # wide products have one part, whatever their depth
    (257, 16384, 1),
    (4096, 4096, 1),
    # routers and mHC: one up to 4096, 8 up to 8192, 16 beyond
    (256, 2048, 1),
    (256, 4096, 1),
    (128, 4096 + 16, 8),
    (256, 6144, 8),
    (16, 8192, 8),
    (24, 8192 + 16, 16),
    (24, 16384, 16),
    # single gates: 8 from 1024 on
    (1, 2048, 8),
    (15, 1024, 8),
    (1, 1008, 1),
    # the next smaller power of two that divides K
    (1, 1028, 4),
    (1, 1025, 1),
    (128, 5000, 8),
    (24, 8200, 8),
]


@pytest.mark.parametrize(("outputs", "inputs", "parts"), PARTS)
def test_parts_of_a_narrow_product(outputs: int, inputs: int, parts: int) -> None:
    """Constants of the shape, frozen with the first program: another number of parts is another order of additions."""
    assert split_k(outputs, inputs) == parts and inputs % parts == 0
