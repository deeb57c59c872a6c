"""Numbers made outside the ops: arithmetic on activations anywhere but in `zoo/common/ops`.

Models, drivers, the engine, the plugin and the benchmarks only choose which rows run and which memory stands behind them. Where
numbers are made on purpose is listed in `zoo.lint.check`, with a reason each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from zoo.lint.source import Finding, Source, dotted

# what is always arithmetic, whatever it is called on
PRODUCTS = frozenset(
    {"matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "dot", "mv", "outer", "tensordot", "linear", "embedding", "conv1d"}
)
CURVES = frozenset({"sigmoid", "silu", "gelu", "relu", "softplus", "tanh", "exp", "exp2", "expm1", "log", "log1p", "log2", "sqrt", "rsqrt"})
WHOLES = frozenset({"softmax", "log_softmax", "logsumexp", "mean", "norm", "rms_norm", "layer_norm", "scaled_dot_product_attention"})
OTHERS = frozenset({"cross_entropy", "nll_loss", "topk", "multinomial", "pow", "lerp", "addcmul", "addcdiv"})
MATH = PRODUCTS | CURVES | WHOLES | OTHERS
# what is arithmetic where an activation takes part: integers that choose rows are added and compared too
STEPS = frozenset({"abs", "add", "sub", "mul", "div", "neg", "reciprocal", "square", "true_divide", "add_", "sub_", "mul_", "div_"})
FOLDS = frozenset({"sum", "cumsum", "prod", "std", "var", "amax", "amin", "max", "min"})
BOUNDS = frozenset({"maximum", "minimum", "clamp", "clamp_", "clamp_min", "clamp_max"})
OF_ACTIVATIONS = STEPS | FOLDS | BOUNDS
OWNERS = frozenset({"ops", "layers", "math", "optimizer"})
MODULES = frozenset({"norm", "linear", "embedding", "conv1d", "rms_norm", "layer_norm"})  # also names of submodules: self.norm(x)
OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult)
# activations by their shape suffix (a constant has no small letter); positions, counts, ids and page tables are integers
INTEGERS = (
    "position|length|start|begin|first|last|ids|page|slot|sequence|row|piece|block|target|wanted|index|count|taken|before|prefix|new_R"
)
ACTIVATION = re.compile(rf"^(?!.*({INTEGERS}))(?=.*[a-z]).*_[A-Z][A-Z0-9]*$")


def arithmetic_findings(source: Source) -> Iterator[Finding]:
    """Calls of mathematical functions that are no op of ours, and operators on activations."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = node.func
            owner = dotted(called.value).split(".")[0]
            ours = owner in OWNERS or (owner == "self" and called.attr in MODULES)
            if called.attr in MATH and not ours:
                yield source.finding(node, f"{dotted(called) or called.attr}(...) outside an op")
            elif called.attr in OF_ACTIVATIONS and not ours:
                found = activations(called.value, *node.args)
                if found:
                    yield source.finding(node, f"{called.attr} of {', '.join(found)} outside an op")
        elif isinstance(node, ast.BinOp) and isinstance(node.op, OPERATORS):
            found = activations(node.left, node.right)
            if found or isinstance(node.op, ast.MatMult):
                yield source.finding(node, f"arithmetic on {', '.join(found) or 'a matrix product'} outside an op: {ast.unparse(node)}")


def activations(*nodes: ast.expr) -> list[str]:
    """The names of activations among operands, seen through indexing."""
    found = []
    for node in nodes:
        while isinstance(node, ast.Subscript):
            node = node.value
        name = dotted(node).rpartition(".")[2]
        if ACTIVATION.match(name):
            found.append(name)
    return found
