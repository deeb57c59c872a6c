"""The FP8 selector written down once more, in plain torch and Python numbers, from its contract alone: it imports nothing of the zoo.

One row and one key at a time; FP32 roundings are made of float64 numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

LARGEST = 448.0


def rounded(number: float) -> float:
    """To FP32."""
    return float(torch.tensor(number, dtype=torch.float64).float())


def code_of(value: float) -> float:
    """The E4M3 number nearest to a value within +-448, ties to the even mantissa: steps of 2^(exponent - 3), 2^-9 below 2^-6."""
    if math.isnan(value) or value == 0.0:
        return value
    size = min(abs(value), LARGEST)
    step = 2.0 ** (max(math.frexp(size)[1] - 1, -6) - 3)
    return math.copysign(round(size / step) * step, value)  # Python rounds halves to even


def query_codes(head_E: list[float]) -> tuple[list[float], float]:
    """Codes of one head and their scale, the power of two that is not below amax / 448."""
    scale = rounded(max(1e-4, *(abs(x) for x in head_E)) / LARGEST)
    mantissa, exponent = math.frexp(scale)
    power = 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)
    return [code_of(max(-LARGEST, min(LARGEST, rounded(x / power)))) for x in head_E], power


def key_codes(key_E: list[float]) -> tuple[list[float], float]:
    """Codes of a key and their FP32 scale, amax / 448."""
    scale = rounded(max(rounded(1e-10), *(abs(x) for x in key_E)) / LARGEST)
    return [code_of(max(-LARGEST, min(LARGEST, rounded(x / scale)))) for x in key_E], scale


def score(heads_HE: list[list[float]], weights_H: list[float], key_E: list[float], key_scale: float) -> float:
    """One key's score for one row: codes, head weights with the queries' scales in them, and the key's codes and scale."""
    lanes = [0.0] * 8
    for h, (head_E, weight) in enumerate(zip(heads_HE, weights_H, strict=True)):
        dot = sum(q * k for q, k in zip(head_E, key_E, strict=True))  # exact in float64, and by the caller's codes in FP32 too
        lanes[h % 8] = rounded(max(dot, 0.0) * weight + lanes[h % 8])
    pairs = [rounded(rounded(lanes[2 * t] + lanes[2 * t + 1]) * key_scale) for t in range(4)]
    return rounded(rounded(pairs[0] + pairs[1]) + rounded(pairs[2] + pairs[3]))


def chosen(scores_T: list[float], top_k: int) -> list[int]:
    """The places of the best, ascending: all of them where there are no more than that; the lower place first among equals."""
    order = sorted(range(len(scores_T)), key=lambda place: (-(scores_T[place] + 0.0), place))
    return sorted(order[:top_k])


def selected(q_RHE: Tensor, gates_RH: Tensor, key_TE: Tensor, position: int, row: int, top_k: int, least: float = 1e-10) -> list[int]:
    """The places that row `row`, at `position`, reads, from queries, gates and keys before they are codes.

    `least`: what a key's largest value counts for at least.
    """
    heads, width = q_RHE.shape[1:]
    coded = [query_codes(head) for head in q_RHE[row].double().tolist()]
    first = rounded(heads**-0.5)
    second = rounded(width**-0.5)
    weights = [
        rounded(rounded(rounded(gate * first) * scale) * second)
        for gate, (_, scale) in zip(gates_RH[row].double().tolist(), coded, strict=True)
    ]
    scores = []
    for key in key_TE[: position + 1].double().tolist():
        codes, scale = key_codes([*key, least] if least > 1.0 else key)
        scores.append(score([codes_E for codes_E, _ in coded], weights, codes[:width], scale))
    return chosen(scores, top_k)
