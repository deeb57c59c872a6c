"""Numbers made outside the ops: a scan of the model and driver files for arithmetic on activations."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zoo

# files that may only choose rows, move bytes and call ops
FILES = ("*/model.py", "*/modeling_train.py", "*/modeling_serve.py")
COMMON = ("layers.py", "*memory.py", "rows.py", "serving.py", "training.py", "engine/*.py", "generate.py")
MATH = frozenset({
    "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "dot", "mv", "outer", "tensordot", "softmax", "log_softmax", "logsumexp",
    "sigmoid", "silu", "gelu", "relu", "softplus", "tanh", "exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt", "pow",
    "mean", "norm", "rms_norm", "layer_norm", "scaled_dot_product_attention", "cross_entropy", "nll_loss", "linear", "embedding",
    "conv1d", "topk", "multinomial", "lerp", "addcmul", "addcdiv",
})  # fmt: skip
OWNERS = frozenset({"ops", "layers", "math", "optimizer"})
MODULES = frozenset({"norm", "linear", "embedding", "conv1d", "rms_norm", "layer_norm"})  # also names of submodules: self.norm(x)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult)
# activations by their shape suffix (a constant has no small letter); positions, counts, ids and page tables are integers that choose rows
_INTEGERS = "position|length|start|ids|page|slot|sequence|row|target|wanted|index|count|before"
_ACTIVATION = re.compile(rf"^(?!.*({_INTEGERS}))(?=.*[a-z]).*_[A-Z][A-Z0-9]*$")


@dataclass(frozen=True)
class Finding:
    file: str
    line: int
    what: str


def findings_in(source: str, name: str = "<source>") -> Iterator[Finding]:
    """Calls of mathematical functions that are no op of ours, and operators on activations."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MATH:
            owner = _dotted(node.func.value).split(".")[0]
            if owner not in OWNERS and not (owner == "self" and node.func.attr in MODULES):
                yield Finding(name, node.lineno, f"{_dotted(node.func)}(...)")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            names = [_dotted(side).rsplit(".", 1)[-1] for side in (node.left, node.right)]
            found = [n for n in names if _ACTIVATION.match(n)]
            if found or isinstance(node.op, ast.MatMult):
                yield Finding(name, node.lineno, f"arithmetic on {', '.join(found) or 'a matrix product'}: {ast.unparse(node)}")


def audit(root: Path | None = None) -> tuple[int, list[Finding]]:
    """(files scanned, findings) of the installed package, or of another source tree of the same layout."""
    folder = root or Path(zoo.__file__).parent
    files = sorted({path for pattern in FILES for path in folder.glob(pattern)} | _common(folder))
    found = [f for path in files for f in findings_in(path.read_text(), str(path.relative_to(folder.parent)))]
    return len(files), found


def _common(folder: Path) -> set[Path]:
    return {path for pattern in COMMON for path in (folder / "common").glob(pattern)}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""
