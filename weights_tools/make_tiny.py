"""Small random checkpoints in published format, as a hub repository would hold them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from weights_tools.forms import PLAIN, in_form
from zoo.common.files import check_space, fresh_folder
from zoo.common.hashing import key64, normal_
from zoo.common.pretrained import draw_piece
from zoo.common.registry import architectures, find
from zoo.common.shards import write_shards

SHARDS = 3
# beyond these nothing is tiny: some gigabytes, and minutes until the disk is full
MOST_HIDDEN = 8192
MOST_LAYERS = 256
SPECIAL = ("<unk>", "<|bos|>", "<|eos|>", "<|pad|>", "<|user|>", "<|assistant|>")
_CORPUS = (
    "The trainer and the sampler read the same weights and must score every token with the same bytes.",
    "Guess the word: five letters, green for the right place, yellow for the wrong place, grey for absent.",
    "One row is one token; a chunk of rows, a page of keys and values, a step of the optimizer, a new version.",
    "0 1 2 3 4 5 6 7 8 9 10 100 1000; def add(a, b): return a + b",
)
_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tiny(
    arch: str,
    out: str | Path,
    *,
    hidden: int | None = None,
    layers: int | None = None,
    tied: bool = False,
    vision: bool = False,
    form: str = "bf16",
    seed: int = 0,
) -> Path:
    """Writes the folder and returns it; equal arguments, equal bytes. `vision`: as the text part of a vision-language checkpoint.

    ValueError for an unknown arch, a non-empty `out`, a vision-language model that there isn't, sizes that are not tiny, or more
    bytes than are free.
    """
    family, architecture = find(arch)
    for option, asked, most in (("--hidden", hidden, MOST_HIDDEN), ("--layers", layers, MOST_LAYERS)):
        if asked is not None and asked > most:
            raise ValueError(f"{option} {asked}: a tiny checkpoint has at most {most}")
    fields = {**architecture.tiny, "tie_word_embeddings": tied}
    fields |= {"hidden_size": hidden} if hidden is not None else {}
    if layers is not None:
        fields["num_hidden_layers"] = layers
        if "max_window_layers" in fields:
            fields["max_window_layers"] = layers
        if "layer_types" in fields:  # every fourth, and the last
            full = [i % 4 == 3 or i == layers - 1 for i in range(layers)]
            fields["layer_types"] = ["full_attention" if f else "linear_attention" for f in full]
    if form != PLAIN:
        fields.update(architecture.tiny_codes)
    fields = in_form(family, fields, form)
    vocabulary = fields["vocab_size"]
    if vision:
        if family.with_vision is None:
            having = [name for name, (other, _) in architectures().items() if other.with_vision is not None]
            raise ValueError(f"{arch!r} has no vision-language model; {' and '.join(having)} have")
        fields = family.with_vision(fields)
    table = family.table(family.config.from_hf(fields))
    places = {piece.published: (entry, piece) for entry, piece in table.pieces()}
    specs = [(name, entry.stored(torch.bfloat16), piece.shape) for name, (entry, piece) in places.items()]
    unused = family.unused_tensors(fields)
    specs += [(name, torch.bfloat16, shape) for name, shape in unused.items()]

    def draw(name: str) -> Tensor:
        if name not in places:
            return normal_(torch.empty(unused[name], dtype=torch.bfloat16), key64(seed, name), 1.0, 0.0)
        entry, piece = places[name]
        tensor = torch.empty(piece.shape, dtype=dtypes[name])
        return draw_piece(piece, tensor, seed, table, entry, family.recipe)

    dtypes = {name: dtype for name, dtype, _ in specs}
    total = sum(torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape in specs)
    check_space(out, total)
    with fresh_folder(out) as folder:
        (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        generation = {
            "bos_token_id": 1,
            "eos_token_id": [2],
            "pad_token_id": 3,
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
        }
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        write_tokenizer(folder, vocabulary)
        write_shards(folder, specs, draw, -(-total // SHARDS))
    return Path(out)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer of at most `vocab_size` tokens that AutoTokenizer loads."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() <= vocab_size, f"{tokenizer.get_vocab_size()} tokens for a vocabulary of {vocab_size}"
    tokenizer.save(str(folder / "tokenizer.json"))
    unknown, bos, eos, pad, *_ = SPECIAL
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": False,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
