"""A divergence as a folder of two files: the one op call on the one row, from both runs, that anybody can run again."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from zoo.common.files import check_fresh, fresh_folder
from zoo.common.history import History
from zoo.common.program import Program
from zoo.verify.calls import Call
from zoo.verify.trace import Divergence

SCRIPT = "reproduce.py"
TENSORS = "tensors.safetensors"

_HEAD = '''\
"""{title}

Run it: `python {script}`. It exits with status 1 and the differing elements as long as the two calls differ.
"""

from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from safetensors.torch import load_file

from zoo.common import ops
from zoo.common.ops.contract import Provider, choices_changed
from zoo.common.program import Program
from zoo.testing import as_integers, tensors
{records}

stored = load_file(Path(__file__).with_name("{file}"), device="{device}")


def only(provider):
    """Lets one provider alone run the op (a contract registers itself)."""
    replace(ops.CONTRACTS["{op}"], providers=(provider,))
    choices_changed()

'''
_TAIL = """

def differ(x, y):
    return x.shape != y.shape or not torch.equal(as_integers(x), as_integers(y))


a, b = (tensors(call())[{part}][1][row] for call, row in ({names}))
bad = (as_integers(a) != as_integers(b)).nonzero()
both = [name[2:] for name in stored if name.startswith("a.") and "b." + name[2:] in stored]
print("inputs that differ:", ", ".join(name for name in both if differ(stored["a." + name], stored["b." + name])) or "none")
print(f"{{len(bad)}} of {{a.numel()}} output elements differ")
for where in bad[:8].tolist():
    print(f"  at {{where}}: {{a[tuple(where)].item()!r}} against {{b[tuple(where)].item()!r}}")
raise SystemExit(1 if len(bad) else 0)
"""


def reproduction(divergence: Divergence, folder: Path, names: tuple[str, str]) -> Path:
    """Writes the folder and returns the script's path. ValueError unless it is absent or empty, and if it can't be written.

    `names` say which run each call is from. The row's own inputs, its history and the op's weights go along, nothing else.
    """
    check_fresh(folder)
    key = divergence.key
    first = divergence.calls[0]
    device = next(t for _, t in first.outputs()).device.type
    stored: dict[str, Tensor] = {}
    place = f"{key.op} in {key.layer}, sequence {divergence.sequence}, position {divergence.position}"
    title = f"{place}: {names[0]} against {names[1]}."
    records: set[type] = set()
    both = zip("ab", names, divergence.calls, strict=True)
    functions = [_function(f"call_{side}", name, call, side, stored, records) for side, name, call in both]
    imports = "\n".join(sorted(f"from {record.__module__} import {record.__name__}" for record in records))
    text = _HEAD.format(title=title, script=SCRIPT, file=TENSORS, device=device, op=first.contract.name, records=imports)
    text += "".join(functions)
    names_and_rows = ", ".join(f"(call_{side}, {call.row})" for side, call in zip("ab", divergence.calls, strict=True))
    text += _TAIL.format(part=int(key.part[4:-1]), names=names_and_rows)
    with fresh_folder(folder) as unfinished:
        (unfinished / TENSORS).write_bytes(save({name: tensor.contiguous() for name, tensor in stored.items()}))
        (unfinished / SCRIPT).write_text(text)
    return folder / SCRIPT


def _function(python_name: str, run: str, call: Call, side: str, stored: dict[str, Tensor], records: set[type]) -> str:
    # a planted or outside class goes by the program's own name for it, so that a plain Program finds it
    plain = Program(**{f.name: getattr(call.program, f.name) for f in fields(Program)})
    lines = [f"    only({_provider(call, plain.byte_class(call.contract.name, call.shape))})"]
    arguments = []
    for name, value in call.arguments.items():
        arguments.append(f"{name}={plain!r}" if name == "program" else f"{name}={_code(value, f'{side}.{name}', stored, records)}")
    body = ",\n        ".join(arguments)
    lines.append(f"    return ops.{call.name}(\n        {body},\n    )")
    return "\n".join(["", f"def {python_name}():", f'    """{run}"""', *lines, ""])


def _provider(call: Call, byte_class: str) -> str:
    """The call's provider as a Python expression, its functions imported by their modules and names."""
    p = call.provider
    brought = ", ".join(f"{name}={_imported(function)}" for name, function in p.functions._asdict().items())
    functions = f"{_imported(type(p.functions))}({brought})"
    return f"Provider({p.name!r}, {byte_class!r}, {p.device!r}, lambda: {functions}, needs={p.needs!r}, defining=True)"


def _imported(named: Any) -> str:
    return f"import_module({named.__module__!r}).{named.__qualname__}"


def _code(value: Any, name: str, stored: dict[str, Tensor], records: set[type]) -> str:
    """A Python expression for a value; its tensors go to `stored`, the classes of its records to `records`."""
    if isinstance(value, Tensor):
        stored[name] = value.detach()
        return f"stored[{name!r}]"
    if isinstance(value, torch.dtype):
        return str(value)
    if is_dataclass(value):
        records.add(type(value))
        parts = {f.name: getattr(value, f.name) for f in fields(value) if f.compare}
        code = {part: _code(item, f"{name}.{part}", stored, records) for part, item in parts.items()}
        text = f"{type(value).__name__}({', '.join(f'{part}={text}' for part, text in code.items())})"
        return f"{text}.copied()" if isinstance(value, History) else text  # slots move on in the call
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        records.add(type(value))
    assert value is None or isinstance(value, bool | int | float | str | tuple), f"{name} is a {type(value).__name__}"
    return repr(value)
