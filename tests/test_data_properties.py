"""Odd configurations: every row once, the exact ratio, the same on any number of ranks, masks exact, tokens once.

FUZZ_EXAMPLES=10000 pytest tests/test_data_properties.py looks at so many instead of a few (about 3,000 in ten minutes).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data.blocks import BlockOrder
from data.corpus import Corpus, CorpusError
from data.loader import BatchBuilder, RowBatch, ValidationSet
from data.masking import IGNORE_INDEX, PADDING, MaskingOptions
from data.mix_plan import MixPlan
from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan, StepPlan, resolve_split
from data.positions import parse_amount
from data.shards import write_manifest, write_shard
from training.config import TrainingConfig
from training.inputs import _named_checkpoints, _with_steps, make_plan

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "12"))
FIRST = 16  # the first stored token; each is one more than the last
BOS = 1

fuzz = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@dataclass(frozen=True)
class Case:
    """A corpus whose tokens are all different, and how it is to be trained on."""

    lengths: list[int]
    first_shard: int  # documents in it
    eos: int | None
    wide: bool  # whether tokens take four bytes
    plan: DataPlan
    even: bool
    row_start: bool
    mix: dict[str, Any] | None  # of a mix file
    order: BlockOrder | None

    @property
    def options(self) -> MaskingOptions:
        words = FIRST + sum(self.lengths) + 10
        size, special = (max(words, 70_000), (*range(16), *range(19, words, 5))) if self.wide else (words, range(16))
        bos_ends = self.wide and self.eos is None  # GPT-2's way
        return MaskingOptions(
            size, special_ids=tuple(special), bos_ends=bos_ends, even=self.even, row_start=self.row_start
        )

    def open(self, folder: Path) -> Corpus:
        documents = np.split(np.arange(sum(self.lengths)) + FIRST, np.cumsum(self.lengths)[:-1])
        size, files = self.options.vocab_size, []
        for name, part in (("a", documents[: self.first_shard]), ("b", documents[self.first_shard :])):
            words = 1 + sum(map(len, part)) // (2 + len(files))
            files.append(write_shard(folder / f"{name}.shard", part, "ab" * 32, size, words=words))
        write_manifest(folder, files, "ab" * 32, size, {})
        path = folder / "*.shard"
        if self.mix is not None:
            path = folder / "mix.json"
            path.write_text(json.dumps(self.mix))
        return Corpus(str(path), tokenizer_hash=None, bos_id=BOS, eos_id=self.eos, order=self.order)


def draw_mix(draw: st.DrawFn, max_steps: int) -> dict[str, Any]:
    """A mix of both shards, by weight or temperature, perhaps in stages, perhaps with a limit that is never reached."""

    def stage() -> dict[str, Any]:
        paths = draw(st.sampled_from([["a"], ["b"], ["a", "b"]]))
        sources: list[dict[str, Any]] = [{"path": f"{name}.shard"} for name in paths]
        key = draw(st.sampled_from(["weight", "repeat", "temperature"]))
        if key == "temperature":
            return {"sources": sources, key: draw(st.sampled_from([1, 3.5]))}
        return {"sources": [{**source, key: draw(st.sampled_from([0.3, 1, 7]))} for source in sources]}

    begins = sorted(draw(st.sets(st.integers(1, max_steps - 1), max_size=2))) if max_steps > 1 else []
    stages = [{"from": begin, **stage()} for begin in (0, *begins)]
    return {"stages": stages, "max_repeats": draw(st.sampled_from([1e8, None]))}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = st.sampled_from([0, 1, 1, 2, 3, 5, 17]) | st.integers(1, 400)
    lengths = draw(st.lists(length, min_size=1, max_size=30).filter(any))
    denominator = draw(st.sampled_from([1, 2, 3, 7, 16]))
    share = st.integers(0, denominator)
    plan = DataPlan(
        max_steps=draw(st.integers(1, 14)),
        seq_length=draw(st.sampled_from([2, 3, 5, 16, 31])),
        global_batch_size=draw(st.integers(8, 40)),
        batch_reduction=draw(st.sampled_from([1, 1.7, 4, 7.3])),
        hybrid_numerator=draw(share),
        hybrid_denominator=denominator,
        hybrid_numerator_end=draw(st.none() | share),
        mask_p_start=draw(st.sampled_from([0.0, 0.15, 1.0])),
        mask_p_end=draw(st.sampled_from([0.0, 0.3, 1.0])),
        milestones=tuple(sorted(draw(st.sets(st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9, 1.0]), max_size=3)))),
        seed=draw(st.integers(0, 9)),
    )
    assume(plan.smallest_batch >= 1)
    first_shard, mix = draw(st.integers(0, len(lengths))), None
    if any(lengths[:first_shard]) and any(lengths[first_shard:]) and draw(st.booleans()):
        mix = draw_mix(draw, plan.max_steps)
    return Case(
        lengths,
        first_shard,
        draw(st.sampled_from([2, None])),
        draw(st.booleans()),
        plan,
        draw(st.booleans()),
        draw(st.booleans()),
        mix,
        draw(st.none() | st.builds(BlockOrder, st.sampled_from([1, 3, 40, 1000]), st.sampled_from([9, 100, 5000]))),
    )


def rows_of(*batches: RowBatch) -> Counter:
    return Counter(
        (key, objective, tuple(tokens))
        for batch in batches
        for key, objective, tokens in zip(
            batch.row_keys.tolist(), batch.objective.tolist(), batch.tokens.tolist(), strict=True
        )
    )


def check_ranks(builder: BatchBuilder, step: StepPlan, whole: RowBatch, world_size: int, choice: str) -> None:
    """All ranks together have the rows of one."""
    plan = builder.plan
    try:
        split = resolve_split(choice, world_size, plan.ratios.phases())
    except ValueError:
        return
    parts = [builder.step(step.step, rank, world_size, split, 4).batch for rank in range(world_size)]
    assert rows_of(*parts) == rows_of(whole)
    if split == "rows":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def check_masks(batch: RowBatch, mask_p: float, options: MaskingOptions) -> None:
    """Targets are those counted beforehand, as many as asked for, none in a masked row that was not masked."""
    labels = batch.inputs(options).labels
    scored = (labels != IGNORE_INDEX).numpy()
    assert (scored.sum(1) == batch.targets.sum(0)).all()
    masked = (batch.objective == MASKED).numpy()
    owned = batch.tokens[:, 1:].numpy()
    assert (labels.numpy()[scored] == owned[scored]).all()
    assert not np.isin(owned[masked][scored[masked]], options.special_ids).any()
    able = (~np.isin(owned[masked], (PADDING, *options.special_ids))).sum(1)
    assert (abs(scored[masked].sum(1) - mask_p * able) < 1).all()


@fuzz
@given(cases())
@pytest.mark.slow
def test_batches_are_the_plan_s_on_any_number_of_ranks(tmp_path_factory, case):
    folder, plan = tmp_path_factory.mktemp("batches"), case.plan
    corpus = case.open(folder)
    builder = BatchBuilder(corpus, plan, case.options)
    masked = 0
    for number in range(plan.max_steps):
        step = plan.step(number)
        batch = builder.step(number, 0, 1, "rows", 4).batch
        assert len(batch) == step.rows
        assert int((batch.objective == MASKED).sum()) == step.objective_rows[MASKED]
        assert case.row_start <= bool((batch.tokens[:, 0] == BOS).all())
        masked += step.objective_rows[MASKED]
        assert masked == (step.ratio_carry + step.rows * step.ratio) // step.denominator
        check_masks(batch, step.mask_p, case.options)
        if number == plan.max_steps // 2:  # as a run that resumes there
            again = BatchBuilder(case.open(folder), plan, case.options).step(number, 0, 1, "rows", 4).batch
            assert (again.tokens == batch.tokens).all()
        for world_size in (2, 3, 5):
            for choice in ("rows", "ranks") if plan.smallest_batch >= world_size else ():
                check_ranks(builder, step, batch, world_size, choice)


@fuzz
@given(cases())
def test_rows_cover_the_streams_and_epochs_the_corpus(tmp_path_factory, case):
    corpus, plan = case.open(tmp_path_factory.mktemp("streams")), case.plan
    builder = BatchBuilder(corpus, plan, case.options)
    for objective in (MASKED, CAUSAL):
        seen: list[tuple[int, int]] = []
        for step in map(plan.step, range(plan.max_steps)):
            positions = builder._orders[objective].positions(step.position[objective], step.objective_rows[objective])
            seen += [(int(position), step.seq_length) for position in positions]
        epochs = [builder.mix.epochs[objective].epoch_of(position) for position, _ in seen]
        assert epochs == sorted(epochs)
        end = 0
        for position, length in sorted(seen):  # without gaps, without overlaps
            assert position == end
            end = position + length
        if case.mix is not None:
            continue
        for epoch in range(2):
            begin, end = (corpus.tokens_before_epoch(epoch + i) for i in (0, 1))
            tokens = builder._streams[objective].read(begin, end - begin)[0]
            stored = np.sort(tokens[tokens >= FIRST])
            np.testing.assert_array_equal(stored, np.arange(sum(case.lengths)) + FIRST)


@fuzz
@given(cases().filter(lambda case: case.mix is not None))
def test_mix_uses_no_document_ahead_of_others_and_stages_their_sources(tmp_path_factory, case):
    corpus, plan = case.open(tmp_path_factory.mktemp("mixes")), case.plan
    names = [source.name for source in corpus.sources]
    builder = BatchBuilder(corpus, plan, replace(case.options, sources=tuple(names)))
    uses, split = np.zeros(sum(case.lengths) + FIRST, np.int64), sum(case.lengths[: case.first_shard])
    batch = builder.step(plan.max_steps - 1, 0, 1, "rows", 4).batch
    if batch.sources is not None:
        for tokens, source in zip(batch.tokens[:, 1:].tolist(), batch.sources.tolist(), strict=True):
            stored = [token - FIRST for token in tokens if token >= FIRST]
            assert not stored or names[source] == "ab"[stored[0] >= split]
    for (begin, end), repeats in zip(pairwise(builder.mix.steps), corpus.stage_repeats, strict=True):
        for objective, epochs in enumerate(builder.mix.epochs):
            first, last = (plan.objective_tokens_before(step)[objective] for step in (begin, end))
            tokens = builder._streams[objective].read(first, last - first)[0] if last > first else np.empty(0, int)
            np.add.at(uses, tokens[tokens >= FIRST], 1)
            assert epochs.source_tokens(last).sum() == pytest.approx(last)
            used = {"ab"[int(token - FIRST >= split)] for token in tokens if token >= FIRST}
            assert used <= {corpus.sources[n].name for n, repeat in enumerate(repeats) if repeat}
    walked = zip(corpus.sources, builder.mix.epochs[-1].uses_at_end(), corpus.units.counts.tolist(), strict=True)
    for source, used, count in walked:
        part = uses[FIRST:][:split] if source.name == "a" else uses[FIRST:][split:]
        assert part.max() <= -(-used // count)


@fuzz
@given(cases(), st.sampled_from(["tokens", "words", "epochs"]), st.fractions(0.001, 1))
def test_budgets_are_spent_in_the_fewest_steps_and_amounts_met_at_the_first(tmp_path_factory, case, unit, part):
    corpus, plan = case.open(tmp_path_factory.mktemp("budgets")), case.plan
    same = {name: getattr(plan, name) for name in ("seq_length", "global_batch_size", "batch_reduction")}
    ratio = {"hybrid_numerator": plan.hybrid_numerator, "hybrid_denominator": plan.hybrid_denominator}
    end = {"hybrid_numerator_end": -1 if plan.hybrid_numerator_end is None else plan.hybrid_numerator_end}
    files = dict.fromkeys(("name", "train_path", "config_file", "tokenizer_path", "output_dir"), "none is opened")
    config = TrainingConfig(**files, **same, **ratio, **end, length_milestones=plan.milestones, seed=plan.seed)

    def used(steps: int, length: int) -> Fraction:
        """What the first `steps` steps of a run of `length` use, counted step by step."""
        plan = make_plan(replace(config, max_steps=length), corpus.exposure)
        if unit == "words":
            return Fraction(MixPlan(corpus, plan).words(steps)[0])
        tokens = sum(plan.step(step).tokens for step in range(steps))
        return Fraction(tokens, corpus.tokens_before_epoch(1) if unit == "epochs" else 1)

    wanted = int(part * used(plan.max_steps, plan.max_steps) * (10**9 if unit == "epochs" else 1))
    assume(wanted > 0)
    text = f"{wanted // 10**9}.{wanted % 10**9:09}" if unit == "epochs" else str(wanted)
    amount = parse_amount(text, unit)
    with suppress(CorpusError):  # a stage would begin behind the end
        steps = _with_steps(replace(config, **{f"max_{unit}": text}), corpus).max_steps
        assert used(steps, steps) >= amount.value
        assert not any(used(fewer, fewer) >= amount.value for fewer in range(max(1, steps - 3), steps))
    plan = make_plan(replace(config, max_steps=plan.max_steps), corpus.exposure)
    named = _named_checkpoints(replace(config, **{f"save_{unit}": text}), MixPlan(corpus, plan), plan, corpus)
    [(step, _)] = named.items()
    assert used(step - 1, plan.max_steps) < amount.value <= used(step, plan.max_steps)


@fuzz
@given(cases(), st.sampled_from([2, 5, 64]), st.sampled_from([None, 1, 7]), st.integers(1, 5))
def test_validation_is_the_same_on_any_number_of_ranks(tmp_path_factory, case, length, rows, batch_rows):
    corpus = case.open(tmp_path_factory.mktemp("validation"))
    held_out = ValidationSet(corpus, case.options, length, rows=rows)
    assume(held_out.total_rows > 0)
    for objective in (MASKED, CAUSAL):
        expected = None
        for world_size in (1, 2, 4):
            parts = [b for rank in range(world_size) for b in held_out.batches(objective, rank, world_size, batch_rows)]
            found = rows_of(*parts)
            assert expected in (None, found)
            expected = found
            assert len(found) == sum(found.values()) == held_out.used_rows
            for part in parts:
                assert not case.row_start or (part.tokens[:, 0] == BOS).all()
