"""The five rungs. Each row compares one way of running the model with the trainer's packed batch, byte by byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zoo.common.rollouts import Completion
from zoo.verify import live, ways
from zoo.verify.asked import RUNGS
from zoo.verify.samplers import Sampler, sampler
from zoo.verify.scored import compare
from zoo.verify.subject import Settings, Subject
from zoo.verify.tally import Row, Spot, Tally, emptiness, shared_pattern
from zoo.verify.trace import Divergence, Run, Tap, first_divergence
from zoo.verify.ways import Seen

REFERENCE = "the packed batch of training"
SILENT = Tap()
# AdamW's step: few smaller ones would move a BF16 weight, or what is rounded of a master; but every input of a row moves its sum, so
# that one which suits a tiny model's width makes nearly every token of a wide one certain, and comparisons empty
RATE = 1e-3
SMALL_WIDTH = 128
Way = Callable[[Tap], Iterator[Seen]]


@dataclass
class Result:
    """What a climb found; `to_dict` is the JSON file of `zoo verify --json`.

    about  date, version, command, and what was climbed with: by name
    """

    arch: str
    device: str
    fingerprint: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    not_run: list[dict[str, Any]] = field(default_factory=list)
    unfinished: list[dict[str, Any]] = field(default_factory=list)
    first_divergence: dict[str, Any] | None = None
    divergence: Divergence | None = None
    names: tuple[str, str] = ("", "")
    heat: dict[tuple[str, int], int] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def totals(self) -> dict[str, int]:
        """Values and bytes that were compared, and bytes that differ, in all rows."""
        return {
            "values_compared": sum(row.compared for row in self.rows),
            "bytes_compared": sum(row.compared_bytes for row in self.rows),
            "bytes_differing": sum(row.differing for row in self.rows),
        }

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "arch": self.arch,
            "device": self.device,
            "about": self.about,
            **self.totals,
            "fingerprint": self.fingerprint,
            "rungs": [row.to_dict() for row in self.rows],
            "not_run": [*self.not_run, *self.unfinished],
            "first_divergence": self.first_divergence,
        }


class Ladder:
    """Climbs with one subject. `say` is told what is going on; `wrote` gets each finished row and the seconds it took."""

    def __init__(
        self,
        subject: Subject,
        settings: Settings,
        say: Callable[[str], None] = lambda text: None,
        wrote: Callable[[Row, float], None] = lambda row, seconds: None,
        engine: str = "embedded",
    ) -> None:
        self.subject = subject
        self.settings = settings
        self.say = say
        self.wrote = wrote
        self.engine = engine
        subject.draw(settings.lengths)
        fingerprint = subject.trainer.fingerprint()
        fingerprint.check(subject.server.fingerprint())
        self.result = Result(subject.arch, str(subject.device), fingerprint.to_dict())
        self._begin = time.monotonic()

    def climb(self, rungs: tuple[int, ...]) -> Result:
        """Until the climb's end, `result.unfinished` lists the rungs that are not done."""
        reason = "the run has not come to its end"
        self.result.unfinished = [{"rung": r, "what": RUNGS[r], "reason": reason} for r in sorted(rungs)]
        if 1 in rungs:
            self._repeat()
            self._finished(1)
        if 2 in rungs:
            self._launches()
            self._finished(2)
        if 3 in rungs:
            self._engines(3, self.settings, "")
            self._finished(3)
        if {4, 5} & set(rungs):
            with live.Scorer(self.subject) as scorer, closing(sampler(self.engine, self.subject)) as source:
                if 4 in rungs:
                    self._live(4, self.settings, source, scorer, "")
                    self._finished(4)
                if 5 in rungs:
                    self._steps(source, scorer)
                    self._finished(5)
        return self.result

    def _finished(self, rung: int) -> None:
        self.result.unfinished = [line for line in self.result.unfinished if line["rung"] != rung]

    @property
    def documents(self) -> list[int]:
        return list(range(len(self.subject.documents)))

    def short(self) -> list[int]:
        """The documents that take a backward pass: the shortest ones that fit the settings' rows, at least one."""
        chosen: list[int] = []
        rows = 0
        for d in sorted(self.documents, key=self.subject.length):
            rows += self.subject.length(d)
            if chosen and rows > self.settings.backward_rows:
                break
            chosen.append(d)
        return sorted(chosen)

    def _reference(self) -> tuple[dict[int, Seen], str | None]:
        """The trainer's packed batch, and why it would prove nothing."""
        seen = {s.document: s for s in ways.train(self.subject, SILENT, self.documents)}
        entropy = torch.cat([s.entropy_T for s in seen.values() if s.entropy_T is not None])
        empty = emptiness(torch.cat([s.log_prob_T for s in seen.values()]), entropy, self.subject.vocabulary)
        return seen, empty or shared_pattern(max(seen.values(), key=lambda s: s.log_prob_T.shape[0]).state)

    def _add(self, row: Row, tally: Tally) -> None:
        self.result.rows.append(row)
        for place, count in tally.heat.items():
            self.result.heat[place] = self.result.heat.get(place, 0) + count
        now = time.monotonic()  # the row's counts came from the device: its work is done
        self.wrote(row, now - self._begin)
        self._begin = now

    def _compare(
        self, rung: int, what: str, reference: dict[int, Seen], empty: str | None, way: Way, model: nn.Module, name: str = ""
    ) -> None:
        """One row: everything that a way shows, against the reference. name: the way's own, where the row's words name both sides."""
        self.say(what)
        tally = Tally()
        for seen in way(SILENT):
            tally.seen(reference[seen.document], seen, entropy=rung < 3)
        self._add(tally.row(rung, what, empty), tally)
        if tally.spot is not None and self.result.first_divergence is None:
            self.result.names = (REFERENCE, name or what)
            self._name(tally.spot, way, model)

    def _name(self, spot: Spot, way: Way, model: nn.Module) -> None:
        """Traces both runs to the first op that differs."""
        self.say("tracing the first divergence")
        documents = self.documents

        def training(tap: Tap) -> None:
            ways.exhaust(ways.train(self.subject, tap, documents))

        def other(tap: Tap) -> None:
            ways.exhaust(way(tap))

        runs: tuple[tuple[nn.Module, Run], tuple[nn.Module, Run]] = ((self.subject.trainer, training), (model, other))
        found = first_divergence(*runs, sequence=spot.document)
        self.result.divergence = found
        if found is not None:
            self.result.first_divergence = found.to_dict()
        else:  # no op call that both runs show differs: the bytes changed in memory, or inside a graph's replay
            layer = "head" if spot.name in ("log_prob", "entropy") else spot.name
            self._place(layer, "none seen by the trace", spot)

    def _place(self, layer: str, op: str, spot: Spot) -> None:
        if self.result.first_divergence is None:
            self.result.first_divergence = {
                "layer": layer,
                "op": op,
                "sequence": spot.document,
                "position": spot.position,
                "elements": spot.elements,
                "ulp": spot.ulp,
            }

    def _repeat(self) -> None:
        """Rung 1: forward and backward twice."""
        reference, empty = self._reference()

        def again(tap: Tap) -> Iterator[Seen]:
            return ways.train(self.subject, tap, self.documents)

        self._compare(1, "training forward, twice", reference, empty, again, self.subject.trainer, "the same batch again")
        self._same_gradients(1, "every parameter's gradient, twice", checkpointed=False)

    def _same_gradients(self, rung: int, what: str, *, checkpointed: bool) -> None:
        self.say(what)
        first = {name: gradient.cpu() for name, gradient in self._gradients(False).items()}  # a GPU may not hold both
        tally = Tally()
        unusable = []
        for name, other in self._gradients(checkpointed).items():
            gradient = first[name].to(other.device)
            tally.bytes(gradient.flatten(), other.flatten(), name)
            if tally.spot is not None:
                self._place(name, "gradient", tally.spot)
            if not gradient.any() or not gradient.isfinite().all():
                unusable.append(name)
        tally.heat.clear()
        why = f"the gradients of {', '.join(unusable[:3])} are zero or not finite" if unusable else None
        self._add(tally.row(rung, what, why), tally)

    def _gradients(self, checkpointed: bool) -> dict[str, Tensor]:
        """Gradients of a weighted sum of log-probabilities, moved out of the parameters; of all that the architecture does not freeze."""
        subject = self.subject
        trainer = self.subject.trainer
        documents = self.short()
        ids, targets = (torch.cat([of(d) for d in documents]) for of in (subject.ids, subject.targets))
        cu_seqlens = ways.offsets([subject.length(d) for d in documents], subject.device)
        trainer.zero_grad(set_to_none=True)
        weight = torch.linspace(0.5, 1.5, ids.shape[0], device=subject.device)
        before = trainer.gradient_checkpointing
        trainer.gradient_checkpointing = checkpointed
        trainer.train()
        scores = trainer.score(ids, cu_seqlens, targets)
        assert isinstance(scores, Tensor)
        (scores * weight).sum().backward()
        trainer.gradient_checkpointing = before
        out = {}
        table = trainer.table_of()
        for name, parameter in trainer.named_parameters():
            if not table.parameters[name].trainable:
                continue
            assert parameter.grad is not None, f"{name} has no gradient"
            out[name] = parameter.grad
            parameter.grad = None
        return out

    def _launches(self) -> None:
        """Rung 2: batch shapes and autograd modes of the trainer."""
        subject = self.subject
        everything = self.documents
        short = self.short()
        reference, empty = self._reference()

        def alone(tap: Tap) -> Iterator[Seen]:
            for d in everything:
                yield from ways.train(subject, tap, [d])

        def trainer(documents: list[int], **mode: bool) -> Way:
            return lambda tap: ways.train(subject, tap, documents, **mode)

        middle = everything[len(everything) // 2 :] + everything[: len(everything) // 2]
        plans: list[tuple[str, Way]] = [
            ("each document alone against packed", alone),
            ("packed in reverse order", trainer(everything[::-1])),
            ("packed in another order, twice the documents", trainer(middle + everything[::-1])),
            ("with autograd against without", trainer(short, grad=True)),
            ("gradient checkpointing", trainer(short, checkpointed=True)),
            ("eval mode", trainer(everything, evaluate=True)),
            ("after a backward pass", trainer(short, backward_first=True)),
            ("fresh memory full of NaN", trainer(everything, poisoned=True)),
        ]
        for what, way in plans:
            name = what.removesuffix(" against packed").removesuffix(" against without")
            self._compare(2, what, reference, empty, way, subject.trainer, f"training, {name}")
        self._same_gradients(2, "gradients with checkpointing against without", checkpointed=True)

    def _engines(self, rung: int, settings: Settings, prefix: str) -> None:
        """Rung 3: serving against training, log-probabilities and every cached byte after every push."""
        subject = self.subject
        documents = self.documents
        reference, empty = self._reference()
        own = subject.server.make_memory(2, slots=1).page_size

        def prefill(page_size: int | None, chunked: bool, seed: int) -> Way:
            return lambda tap: ways.prefill(subject, tap, documents, page_size=page_size, chunked=chunked, seed=seed)

        def decode(tap: Tap) -> Iterator[Seen]:
            return ways.decode(subject, tap, documents, tail=settings.tail)

        plans: list[tuple[str, Way]] = [(f"training against prefill, pages of {own}", prefill(None, False, 1))]
        for i, page_size in enumerate((own, *settings.page_sizes)):
            what = f"prefill in odd chunks, shuffled pages of {page_size}, NaN in dead pages"
            plans.append((what, prefill(page_size, True, 2 + i)))
        last = "every token" if settings.tail is None else f"the last {settings.tail} tokens"
        plans.append((f"eager decode of {last}", decode))
        after = f" ({prefix.removesuffix(': ')})" if prefix else ""
        for what, way in plans:
            name = what.removeprefix("training against ") + after
            self._compare(rung, prefix + what, reference, empty, way, subject.server, name)
        if subject.device.type != "cuda":
            batches = ", ".join(map(str, settings.graph_batches))
            self.not_run(rung, f"decode by CUDA graph at batch {batches}", "CUDA graphs need a GPU")
            return
        for batch in settings.graph_batches:
            what = f"decode by CUDA graph at batch {batch}"
            way = self._graph(batch, settings.graph_steps)
            self._compare(rung, prefix + what, reference, empty, way, subject.server, what + after)

    def _graph(self, batch: int, steps: int) -> Way:
        return lambda tap: ways.graph(self.subject, tap, self.documents, batch=batch, steps=steps)

    def not_run(self, rung: int, what: str, reason: str) -> None:
        line = {"rung": rung, "what": what, "reason": reason}
        if line not in self.result.not_run:
            self.result.not_run.append(line)

    def _live(self, rung: int, settings: Settings, source: Sampler, scorer: live.Scorer, prefix: str) -> None:
        """Rung 4: an engine samples, another process scores what it wrote down."""
        self.say(f"{prefix}live sampling")
        completions = live.sample(self.subject, settings, source)
        self.say(f"{prefix}scoring in another process")
        scored = scorer.score(completions)
        for what, tally, empty in compare(completions, scored, self.subject.vocabulary):
            self._add(tally.row(rung, prefix + source.prefix + what, empty), tally)
            if tally.spot is not None and self.result.first_divergence is None:
                self._name_live(completions, tally.spot)

    def _name_live(self, completions: list[Completion], spot: Spot) -> None:
        """Pushes the sampled tokens through training and decode once more, under the trace."""
        documents = self.subject.documents
        sequences = [[*c.prompt_ids, *c.output_ids] for c in completions]
        self.subject.documents = [torch.tensor(tokens, device=self.subject.device) for tokens in sequences]
        self.result.names = (REFERENCE, "decode of the sampled tokens")
        try:
            self._name(spot, lambda tap: ways.decode(self.subject, tap, self.documents, tail=None), self.subject.server)
        finally:
            self.subject.documents = documents

    def _steps(self, source: Sampler, scorer: live.Scorer) -> None:
        """Rung 5: optimizer steps on fixed data, the weights pushed into the server, rungs 3 and 4 again."""
        subject = self.subject
        settings = self.settings.again()
        trainer = subject.trainer
        rate = min(RATE, RATE * SMALL_WIDTH / trainer.config.hidden)
        optimizers: list[tuple[str, torch.optim.Optimizer]] = [
            ("AdamW", torch.optim.AdamW(trainer.parameters(), lr=rate, foreach=False)),
            ("SGD", torch.optim.SGD(trainer.parameters(), lr=1e-2, foreach=False)),
        ]
        documents = self.short()
        # backwards: the tokens that are compared would soon be certain
        ids = torch.cat([subject.ids(d).flip(0) for d in documents])
        cu_seqlens = ways.offsets([subject.length(d) for d in documents], subject.device)
        for step in range(settings.steps):
            name, optimizer = optimizers[step % 2]
            prefix = f"step {step + 1}, {name}: "
            self.say(f"{prefix}backward, update, push")
            before = trainer.weights_version
            loss = trainer(ids, cu_seqlens=cu_seqlens, labels=ids).loss
            loss.backward()
            optimizer.step()
            trainer.zero_grad(set_to_none=True)
            tally = self._push(f"step {step + 1}")
            stuck = "the step changed no weight" if trainer.weights_version == before else None
            self._add(tally.row(5, f"{prefix}the server's weights", stuck), tally)
            subject.trainer.fingerprint().check(subject.server.fingerprint())
            source.update()
            self._engines(5, settings, prefix)
            self._live(5, settings, source, scorer, prefix)

    def _push(self, label: str) -> Tally:
        """Published tensors of the trainer into the server, and a comparison of every byte of them."""
        mine = self.subject.trainer
        theirs = self.subject.server
        theirs.load_weights(mine.published_tensors(), label)
        tally = Tally()
        for (name, a), (_, b) in zip(mine.published_tensors(), theirs.published_tensors(), strict=True):
            tally.bytes(a.flatten(), b.flatten(), name)
            if tally.spot is not None:
                self._place(name, "load_weights", tally.spot)
        tally.heat.clear()
        return tally
