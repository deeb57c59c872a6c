"""Matrix products of our kernels: which launches there are, that each is held against float64, and that a wrong one is seen."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from zoo.common.ops.cases import Product, products_of
from zoo.common.ops.contract import CONTRACTS, Provider
from zoo.common.program import resolve
from zoo.common.terminal import Terminal
from zoo.testing import Args
from zoo.verify import products, run

ROOT = Path(zoo.__file__).parent
HERE = resolve("aligned", "cpu", torch.bfloat16)
SMALL = (
    "linear, 32 rows, 200 columns, K 200",
    "head_linear, 16 rows, K 100",
    "experts, forward, 4 rows, 160 by 72",
    "select, 5 heads of 40",
)
Launches = set[tuple[str, tuple[tuple[str, Any], ...]]]


def named(product: Product) -> str:
    return f"{product.op}, {product.name}"


def calls_of(node: ast.AST) -> Iterator[str]:
    """What a function calls: bare names, and `tl.dot` as such."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            yield ast.unparse(inner.func).rpartition("kernels.")[2]


def kernels_with_products() -> dict[str, set[str]]:
    """function -> what it calls, of every file of the package in which a `tl.dot` stands."""
    found: dict[str, set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        if "tl.dot" in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef):
                    assert node.name not in found or "tl.dot" not in {*calls_of(node), *found[node.name]}, f"two functions {node.name}"
                    found[node.name] = set(calls_of(node)) | found.get(node.name, set())
    return found


def reached(launched: set[str], calls: dict[str, set[str]]) -> set[str]:
    """The functions that run in some launch, helpers of kernels included."""
    done: set[str] = set()
    left = set(launched)
    while left:
        name = left.pop()
        done.add(name)
        left |= (calls.get(name, set()) & calls.keys()) - done
    return done


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Kernels are noted with their constants, not run."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and run by the gpu tests of this file")
    noted: Launches = set()

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **names: Any) -> None:
        noted.add((self.fn.__name__, tuple(sorted((name, x) for name, x in names.items() if isinstance(x, int | float)))))

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run)
    return noted


def provider_on_a_gpu(op: str) -> Provider:
    return products.defining(op, replace(HERE, device="cuda"))


def run_all(op: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Without kernels, whose results are whatever memory held."""
    with torch.no_grad():
        for product in products_of(op):
            product.run(provider_on_a_gpu(op), product.make(0, "cpu", dtype))


def test_every_kernel_that_multiplies_matrices_is_held(launches: Launches) -> None:
    """A kernel with a new `tl.dot` needs a product in its op's cases."""
    calls = kernels_with_products()
    wanted = {name for name, inside in calls.items() if "tl.dot" in inside}
    assert len(wanted) > 15
    for op in CONTRACTS:
        run_all(op)
    assert wanted <= reached({name for name, _ in launches}, calls)
    # control: a product that is forgotten is missed
    some = {name for name, _ in launches if name != "_head_linear"}
    assert wanted - reached(some, calls) == {"_head_linear"}


def tiles(launches: Launches, kernel: str, *names: str) -> set[tuple[Any, ...]]:
    return {tuple(dict(given)[name] for name in names) for launched, given in launches if launched == kernel}


def test_every_tile_is_held(launches: Launches) -> None:
    """Of the tables that choose a launch by the number of rows, all entries."""
    from zoo.common.ops.experts import kernels as experts
    from zoo.common.ops.gated_delta import kernels as gated_delta
    from zoo.common.ops.head_linear import kernels as head_linear
    from zoo.common.ops.linear import kernels as linear

    for op in ("linear", "head_linear", "experts", "gated_delta"):
        run_all(op)
    block = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    rows = range(1, 2000)
    chosen = [linear._tile(r, n) for r in rows for n in (1, 2049, 4097, 8193, 16385)]
    assert tiles(launches, "_linear", *block) == {tuple(tile[name] for name in block) for tile in chosen}
    assert tiles(launches, "_head_linear", *block) == {tuple(head_linear._tile(r)[name] for name in block) for r in rows}
    found = tiles(launches, "_product_kernel", "BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps", "num_stages")
    table = {(t.rows, t.columns, t.depth, t.warps, t.stages) for t in (experts._tile(pairs, 8) for pairs in rows)}
    assert found - table == {(64, 128, 64, 4, 3)}, "the backward's own for few rows"
    assert table <= found
    for width in (16, 32, 64, 128):
        scans = {given for name, given in launches if name == "scan_states" and dict(given)["K"] == width}
        wanted = {(min(block, width), warps, stages) for _, block, warps, stages in gated_delta.SCAN_SHAPES}
        assert {tuple(dict(given)[name] for name in ("BLOCK", "num_warps", "num_stages")) for given in scans} == wanted
        steps = {given for name, given in launches if name == "decode_row" and dict(given)["K"] == width}
        wanted = {(min(block, width), warps, stages) for _, block, warps, stages, _ in gated_delta.STEP_SHAPES}
        assert {tuple(dict(given)[name] for name in ("BLOCK", "num_warps", "STAGES")) for given in steps} == wanted


@pytest.mark.parametrize("product", [p for p in products.all_products() if named(p) in SMALL], ids=named)
def test_a_wrong_product_is_seen(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our reference in BF16 is within the bound; one step of K read twice, one fragment of NaN, a kernel that does not compile are not."""
    assert products.hold([product], HERE)[0].right

    def spoilt(change: Callable[[Args], Any]) -> products.Held:
        def run(provider: Provider, args: Args) -> Any:
            return product.run(provider, args) if next(iter(args.values())).dtype == torch.float64 else change(args)

        return products.hold([replace(product, run=run)], HERE)[0]

    provider = products.defining(product.op, HERE)

    def first_step_twice(args: Args) -> Any:
        """What a descriptor that does not advance gives: 16 of K for the next 16."""
        name, x = next(iter(args.items()))
        turned = x.clone()
        turned[..., 16:32] = x[..., :16]
        return product.run(provider, {**args, name: turned})

    def a_fragment(args: Args) -> Any:
        out = product.run(provider, args)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        first.view(-1)[:1] = torch.nan if first.is_floating_point() else 0
        return out

    def none(args: Args) -> Any:
        raise RuntimeError("PassManager::run failed")

    assert not spoilt(first_step_twice).right
    assert spoilt(a_fragment).right == (product.op == "select")  # of lists the share that differs
    assert "PassManager::run failed" in str(spoilt(none))


def test_qualify_says_which_products_are_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right, other = (p for p in products.all_products("head_linear") if p.name in ("16 rows, K 100", "16 rows, K 192"))

    def half(provider: Provider, args: Args) -> Any:
        return tuple(out / 2 if out.dtype == torch.bfloat16 else out for out in other.run(provider, args))

    monkeypatch.setattr(run, "all_products", lambda op: [right, replace(other, run=half)] if op == "head_linear" else [])
    wrong = run.hold_products(Terminal(), HERE, "head_linear")
    assert [held.product.name for held in wrong] == [other.name]
    said = capsys.readouterr().out
    assert f"wrong product: {named(other)}: error 0.5, at most" in said
    assert "2 products of our kernels against float64, 1 wrong" in said
    assert run.hold_products(Terminal(), HERE, "rms_norm") == []
    # and the command's status is of them
    monkeypatch.setattr(run, "device_of", lambda device: "cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(run.verdicts, "path_for_this_machine", lambda: Path("here"))
    for name, stub in (("default_targets", list), ("qualify", lambda *args, **names: []), ("running", lambda *args: [])):
        monkeypatch.setattr(run.admission, name, stub)
    for held, status in ((wrong, False), ([], True)):
        monkeypatch.setattr(run, "hold_products", lambda console, program, op, held=held: held)
        assert run.qualify(Terminal(), None, None, None, None, None, False, None) is status


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("product", products.all_products(), ids=named)
def test_products_against_float64(product: Product, dtype: torch.dtype) -> None:
    program = replace(resolve("aligned", "cuda", torch.bfloat16), dtype=str(dtype).removeprefix("torch."))
    [held] = products.hold([product], program)
    assert held.right, str(held)


@pytest.mark.gpu
def test_a_kernel_that_reads_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the states of a chunk in the other half's place: what a wrong descriptor does to the outputs."""
    from zoo.common.ops.gated_delta import kernels

    made = kernels.states

    def shuffled(*args: Any) -> tuple[Tensor, ...]:
        *others, rounded, final = made(*args)
        return *others, rounded.roll(rounded.shape[-1] // 2, -1), final

    [product] = [p for p in products_of("gated_delta") if p.name == "forward, 6 documents, width 32"]
    program = resolve("aligned", "cuda", torch.bfloat16)
    assert products.hold([product], program)[0].right
    monkeypatch.setattr(kernels, "states", shuffled)
    assert not products.hold([product], program)[0].right
