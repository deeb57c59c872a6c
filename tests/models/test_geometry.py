"""A field of a config is written once: what is read is what is written, and what ranks of a layout share divides or is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest

from zoo.common.geometry import published_fields
from zoo.common.layout import WHOLE, Layout
from zoo.common.registry import architectures

SIZES = {f"{name}/{size}": config for name, (_, one) in architectures().items() for size, config in one.sizes.items()}
TINY = {name: config for name, config in SIZES.items() if name.endswith("/tiny")}


@pytest.mark.parametrize("name", SIZES)
def test_what_is_written_is_read_again(name: str) -> None:
    config = SIZES[name]
    fields = config.to_hf()
    again = type(config).from_hf(fields)
    assert again == config and again.to_hf() == fields
    assert replace(again, published={}).to_hf() == fields
    kept = {**fields, "use_cache": True}
    assert type(config).from_hf(kept).to_hf() == kept  # as read while it says the same
    assert "use_cache" not in replace(type(config).from_hf(kept), positions=77).to_hf()


@pytest.mark.parametrize("name", TINY)
def test_every_field_of_ours_is_published_and_comes_back_changed(name: str) -> None:
    """The control: with one number changed, the published fields and what is read of them change with it."""
    config = TINY[name]
    known = published_fields(type(config))
    names = {field.name for field in dataclasses.fields(config)}
    assert names - set(known) <= {"published", "wrapped"}
    for field, one in known.items():
        value = getattr(config, field)
        if one.only and config.model_type not in one.only:
            assert value == one.otherwise and field not in config.to_hf()
            continue
        if field in ("experts", "layers", "full", "sparse", "choice", "experts_per_token") or value is None:
            continue  # bound to one another, or counted by others, or absent
        if isinstance(value, tuple) and field != "eos":
            continue  # several published fields, or one for each layer
        changed: Any = not value if isinstance(value, bool) else (1,) if field == "eos" else 2 * value or 1
        other = replace(config, **{field: changed})
        assert other.to_hf() != config.to_hf(), field
        if field not in ("heads", "kv_heads", "key_heads", "rope_dim", "head_dim", "expert_intermediate"):
            assert type(config).from_hf(other.to_hf()) == other, field


@pytest.mark.parametrize("name", TINY)
def test_ranks_of_a_layout_hold_their_share(name: str) -> None:
    config = TINY[name]
    assert config.local(WHOLE) == replace(config, eos=())
    local = config.local(Layout(tp=2, ep=2))
    for field, one in published_fields(type(config)).items():
        whole = getattr(config, field)
        mine = getattr(local, field)
        if field != "eos":
            assert mine * 2 == whole if one.divided else mine == whole, field
    assert config.local(Layout(cp=4, pp=2, dp=8)) == config.local(WHOLE)
    with pytest.raises(ValueError, match=r"^layout: vocab_size 512 do not divide among tp 3$"):
        config.local(Layout(tp=3))
    if config.experts:
        with pytest.raises(ValueError, match=r"experts 8 do not divide among ep 3$"):
            config.local(Layout(ep=3))


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "2", None])
def test_a_layout_of_no_ranks_is_refused(ranks: Any) -> None:
    with pytest.raises(ValueError, match="layout: tp must be an integer of at least 1, it is "):
        Layout(tp=ranks)
