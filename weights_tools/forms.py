"""The forms in which a family's checkpoints are published: BF16 values, or codes with scales."""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

from zoo.common.family import Family
from zoo.common.quantisation import FIELD, in_codes, write_quantisation

PLAIN = "bf16"
FP8 = "fp8"


def forms_of(family: Family) -> tuple[str, ...]:
    """Their names, BF16 first."""
    reads_codes = FP8 not in family.forms and "quantised" in {field.name for field in fields_of(family.config)}
    return (PLAIN, *((FP8,) if reads_codes else ()), *family.forms)


def in_form(family: Family, fields: dict[str, Any], form: str) -> dict[str, Any]:
    """The config.json of the same model in a form, from that of its BF16 checkpoint. ValueError for a form that the family has not."""
    known = forms_of(family)
    if form not in known:
        raise ValueError(f"--form {form!r} must be {' or '.join(known)}: checkpoints of this family have no other form")
    if form == PLAIN:
        return fields
    if form in family.forms:
        return family.forms[form](fields)
    return {**fields, **write_quantisation(in_codes(family.config.from_hf(fields)))}


def is_plain(fields: dict[str, Any]) -> bool:
    """Whether a config.json says nothing of codes."""
    return fields.get(FIELD) is None
