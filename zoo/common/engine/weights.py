"""The weights that an engine serves: whether somebody wrote them behind it, and a checkpoint's tensors for an update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common.checkpoint import Checkpoint, check_dtypes
from zoo.common.config import differences
from zoo.common.fingerprint import Fingerprint
from zoo.common.serving import ForServing


class WeightsWatch:
    """The version that an engine took over last, and where its parameters lay and how often torch had written them then."""

    def __init__(self, model: ForServing) -> None:
        self._model = model
        self.take(model.weights_version, model.fingerprint())

    def take(self, version: str, fingerprint: Fingerprint) -> None:
        """Takes the weights of now over as `version`."""
        self.version = version
        self.fingerprint = fingerprint
        # `model.parameters()` takes milliseconds in a deep model, this walk once
        self._places: list[tuple[dict[str, Any], str, Any]] = [
            (owner, name, value)
            for module in self._model.modules()
            for owner in (module._parameters, module._modules)
            for name, value in owner.items()
        ]
        self._parameters = list(self._model.parameters())
        self._seen = _seen(self._parameters)

    @property
    def written(self) -> bool:
        """Whether a parameter, or a module that has some, was replaced, or a parameter moved or written since."""
        if any(owner.get(name) is not value for owner, name, value in self._places):
            return True
        return _seen(self._parameters) != self._seen

    @property
    def moved(self) -> bool:
        """Whether the parameters of now lie elsewhere: captured graphs read the addresses of old."""
        return [address for address, _ in _seen(list(self._model.parameters()))] != [address for address, _ in self._seen]


def _seen(parameters: list[nn.Parameter]) -> list[tuple[int, int]]:
    return [(parameter.data_ptr(), parameter._version) for parameter in parameters]


def check_model(model: ForServing) -> None:
    """ValueError for a model that can't be served, or whose weights may be written without torch's counting it."""
    if not isinstance(model, ForServing):
        raise ValueError(f"an engine takes a ForServing model, not {type(model).__name__}")
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ValueError(f"{name} was made under torch.inference_mode(), where torch does not count writes; make the model outside")
        if parameter.requires_grad:
            raise ValueError(f"{name} wants gradients, and its optimizer may write uncounted; call requires_grad_(False) on the model")


def read_weights(model: ForServing, path: str | Path, dtype: torch.dtype | None) -> list[tuple[str, Tensor]]:
    """A checkpoint's tensors on the CPU in the parameters' dtypes; geometry and dtypes are checked as at a load."""
    program = model.program
    if dtype is not None and dtype != program.torch_dtype:
        raise ValueError(f"dtype={dtype} for a model whose weights are {program.torch_dtype}")
    source = Checkpoint.open(path)
    config = model.family.config.from_hf(source.config)
    if other := differences(config, model.config):
        raise ValueError(f"{path} is of another geometry: {', '.join(other)}")
    table = model.table_of()
    match = source.match(table)
    check_dtypes(source, match, model, convert=dtype is not None)
    kinds = {name: parameter.dtype for name, parameter in model.named_parameters()}
    stored = source.tensors
    return [(name, stored[name].read().to(entry.stored(kinds[entry.ours]))) for name, (entry, _) in match.places.items()]
