"""Conversations: their layout as text, marks of what the assistant says, and what becomes of them in training."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from helpers.tiny_corpora import contents, decoded, make_texts, run
from helpers.tiny_runs import flags as training_flags
from helpers.tiny_runs import make_inputs, training_lines
from helpers.tiny_runs import run as train
from hypothesis import given, settings
from hypothesis import strategies as st
from test_preprocessing_refused import refused

from data.corpus import Corpus
from data.loader import BatchBuilder, ValidationSet
from data.masking import IGNORE_INDEX, MaskingOptions, fingerprint
from data.objectives import CAUSAL, MASKED
from data.plan import DataPlan, resolve_split
from data.shard_paths import resolve_shards
from data.shards import ShardError, ShardWriter, open_shard, read_manifest
from preprocessing import inspect_shards
from preprocessing.fields import conversation, join_texts
from preprocessing.tokenizer import load_tokenizer

HASH = "ab" * 32
CPU = torch.device("cpu")
ROLES = ("system", "user", "assistant", "user", "assistant")


def messages(texts: list[str], number: int) -> list[dict[str, str]]:
    """A conversation of two to five messages."""
    return [
        {"role": role, "content": text}
        for role, text in zip(ROLES, texts[number : number + 2 + number % 4], strict=False)
    ]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """120 conversations as JSON lines, as Parquet and as a Hugging Face dataset, and plain text beside the first."""
    folder, texts = tmp_path_factory.mktemp("conversations"), make_texts(130)
    records = [{"messages": messages(texts, number), "id": number} for number in range(120)]
    for name in ("json", "parquet", "mixed"):
        (folder / name).mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "json" / "a.jsonl").write_text(lines)
    (folder / "mixed" / "a.jsonl").write_text(lines)
    (folder / "mixed" / "b.txt").write_text("plain text\n\nmore of it")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / "parquet" / "a.parquet", row_group_size=50)
    return folder


@pytest.fixture
def flags(source, tokenizer_path):
    found = ["--text_field", "messages", "--targets", "assistant", "--tokenizer_path", tokenizer_path]
    return [*found, "--shard_size", 3000, "--input"]


# Text and marks


def test_layout():
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello.\nYes?"}]
    found = join_texts(turns)
    assert found == "<|user|>\nHi\n<|assistant|>\nHello.\nYes?\n"
    assert [text for text, is_target in found.segments if is_target] == ["Hello.\nYes?\n"]
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    assert conversation([{"role": "user", "content": parts}, {"role": "tool", "content": None}]) == (
        "<|user|>\nab\n<|tool|>\n\n"
    )
    for wrong in ([{"role": 1, "content": ""}], [{"role": "user", "content": 1}], [{"role": "user"}]):
        with pytest.raises(TypeError):
            join_texts(wrong)


def test_what_the_assistant_says_is_marked(source, flags, tokenizer_path, tmp_path, monkeypatch, capsys):
    """In all formats the same; without --targets the same tokens in shards of the first version."""
    import datasets  # GPU machines, which run this module's other tests, need not have it

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    assert run(*flags, source / "json", "--output", tmp_path / "out") == 0
    texts, tokenizer = make_texts(130), load_tokenizer(tokenizer_path)
    expected = [conversation(messages(texts, number)) for number in range(120)]
    assert decoded(tmp_path / "out") == expected
    shards, documents = [open_shard(path) for path in resolve_shards(tmp_path / "out")], iter(expected)
    assert len(shards) > 3
    for shard in shards:
        marks = shard.scored(np.arange(shard.num_tokens))
        for number in range(shard.num_documents):
            begin, end = (int(each) for each in shard.offsets[number : number + 2])
            targets = [text for text, is_target in next(documents).segments if is_target]
            chosen = shard.tokens[begin:end][marks[begin:end]]
            assert tokenizer.decode(chosen.tolist(), skip_special_tokens=False) == "".join(targets)
    made = [path.read_bytes() for path in resolve_shards(tmp_path / "out")]
    for place in (source / "parquet", f"dataset://{source}/parquet"):
        assert run(*flags, place, "--output", tmp_path / "same", "--overwrite") == 0
        assert [path.read_bytes() for path in resolve_shards(tmp_path / "same")] == made
    assert run(*flags, source / "json", "--output", tmp_path / "all", "--targets", "all") == 0
    whole = [open_shard(path) for path in resolve_shards(tmp_path / "all")]
    assert not any(shard.has_marks for shard in whole)
    assert all((a.tokens == b.tokens).all() for a, b in zip(whole, shards, strict=True))
    assert read_manifest(tmp_path / "all")["created_by"]["targets"] is None
    assert "differs in --targets" in refused(capsys, *flags, source / "json", "--output", tmp_path / "all")
    assert inspect_shards.main([str(tmp_path / "out"), "--verify"]) == 0
    number = sum(int(shard.scored(np.arange(shard.num_tokens)).sum()) for shard in shards)
    assert f"  {number:,} tokens (" in capsys.readouterr().out


def test_parts_and_splits_keep_the_marks(source, flags, tmp_path, small_chunks):
    flags += [source / "mixed", "--validation_fraction", 0.3, "--keep_fields", "id", "--output"]
    assert run(*flags, tmp_path / "whole") == 0
    for part in (1, 0):
        assert run(*flags, tmp_path / "parts", "--part", part, "--parts", 2) == 0
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")
    for split in ("train", "validation"):
        for shard in (open_shard(path) for path in resolve_shards(tmp_path / "whole" / split)):
            marks = shard.scored(np.arange(shard.num_tokens))
            for number in range(shard.num_documents):
                begin, end = (int(each) for each in shard.offsets[number : number + 2])
                is_plain = end - begin < 20  # plain text has targets alone
                assert is_plain or not marks[begin:end].all()


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=9), seed=st.integers(0, 9))
def test_marks_come_back(tmp_path_factory, lengths, seed):
    path = tmp_path_factory.mktemp("marks") / "x.shard"
    total = sum(lengths) + 1
    tokens, marks = np.arange(total), np.random.default_rng(seed).random(total) < 0.5
    writer = ShardWriter(path, HASH, 1 << 17, marked=True)
    writer.append(tokens[:-1], np.cumsum(lengths), marks[:-1])
    writer.append(tokens[-1:], [1], marks[-1:])
    writer.finish()
    shard = open_shard(path)
    assert (shard.tokens == tokens).all()
    assert (shard.scored(tokens) == marks).all()
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ShardError, match="is truncated"):
        open_shard(path)


# In training


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The same documents with and without marks, and of each token number whether it is a target."""
    folder, generator = tmp_path_factory.mktemp("corpora"), np.random.default_rng(0)
    first, scored = 16, {}
    for shard in range(2):
        writers = [ShardWriter(folder / f"{name}_{shard}.shard", HASH, 1 << 14, name == "marked") for name in NAMES]
        for length in generator.integers(1, 60, 50):
            tokens, marks = np.arange(first, first + length), generator.random(length) < 0.4
            scored |= dict(zip(tokens.tolist(), marks.tolist(), strict=True))
            for writer in writers:
                writer.append(tokens, [length], marks)
            first += length
        for writer in writers:
            writer.finish()
    found = [Corpus(str(folder / f"{name}_*.shard"), tokenizer_hash=HASH, bos_id=1, eos_id=2) for name in NAMES]
    return *found, scored


NAMES = ("marked", "plain")


@settings(max_examples=10, deadline=None)
@given(step=st.integers(0, 5), world=st.integers(1, 4), even=st.booleans(), local=st.integers(1, 30))
def test_causal_targets_are_the_marked_ones_and_masks_are_everywhere(corpora, step, world, even, local):
    """The same on any number of ranks and in any micro-batches; the host's counts are those of the labels."""
    marked, plain, scored = corpora
    plan = DataPlan(6, 16, 32, batch_reduction=2.0, hybrid_numerator=1, hybrid_denominator=2)
    builders = [BatchBuilder(corpus, plan, MaskingOptions(vocab_size=1 << 14, even=even)) for corpus in (marked, plain)]
    ours, theirs = (builder.step(step, 0, 1, "rows", 1000).batch for builder in builders)
    assert theirs.scored is None
    found, expected = (batch.inputs(builders[0].options) for batch in (ours, theirs))
    assert torch.equal(found.input_ids, expected.input_ids)
    kept = torch.tensor([[scored.get(token, True) for token in row] for row in theirs.tokens[:, 1:].tolist()])
    causal = (ours.objective == CAUSAL)[:, None]
    labels = expected.labels.masked_fill(causal & ~kept, IGNORE_INDEX)
    assert torch.equal(found.labels, labels)
    assert not torch.equal(found.labels, expected.labels)
    np.testing.assert_array_equal(ours.targets.sum(0), (labels != IGNORE_INDEX).sum(1).numpy())
    total = 0
    for rank in range(world):
        split = resolve_split("auto", world, [Fraction(1, 2)])
        for part in builders[0].step(step, rank, world, split, local).micro_batches(CPU):
            total += int(fingerprint(part.inputs(builders[0].options), part.row_keys))
    assert total % 2**64 == int(fingerprint(found, ours.row_keys)) % 2**64
    like = builders[0].like(ours, step, 0, 1, "rows", 1000).batch
    assert like.scored.shape == ours.scored.shape
    assert int((like.inputs(builders[0].options).labels != IGNORE_INDEX).sum()) == like.targets.sum()


def test_validation_scores_marked_targets_once(corpora):
    marked, _, scored = corpora
    held_out = ValidationSet(marked, MaskingOptions(vocab_size=1 << 14), seq_length=16)
    for objective in (MASKED, CAUSAL):
        batches = [batch for rank in range(2) for batch in held_out.batches(objective, rank, 2, 7)]
        labels = torch.cat([batch.inputs(held_out.options).labels.flatten() for batch in batches])
        labels = labels[labels != IGNORE_INDEX].tolist()
        assert sum(int(batch.targets.sum()) for batch in batches) == len(labels)
        if objective == CAUSAL:
            stored = sorted(label for label in labels if label >= 16)
            assert stored == sorted(token for token, is_target in scored.items() if is_target)
        else:
            assert any(not scored.get(label, True) for label in labels)


@pytest.mark.slow
def test_a_run_on_conversations_is_the_same_in_any_micro_batch(tmp_path):
    """From messages to a model, with validation."""
    inputs = make_inputs(tmp_path / "inputs")
    texts = make_texts(500)
    lines = [json.dumps({"messages": messages(texts, number)}) + "\n" for number in range(450)]
    (tmp_path / "chat.jsonl").write_text("".join(lines))
    flags = ["--input", tmp_path / "chat.jsonl", "--text_field", "messages", "--targets", "assistant"]
    flags += ["--tokenizer_path", inputs / "tokenizer.json", "--validation_fraction", 0.1, "--output"]
    assert run(*flags, tmp_path / "shards") == 0
    data = {"train_path": tmp_path / "shards" / "train", "valid_path": tmp_path / "shards" / "validation"}
    for name, options in (("a", {}), ("b", {"local_batch_size": 5})):
        train(training_flags(inputs, tmp_path, name, max_steps=16, validate_every=8, **data, **options))
    # A step whose causal rows hold no target has no causal loss.
    ours, theirs = ([line.get("train/causal_loss") for line in training_lines(tmp_path / name)] for name in "ab")
    assert [loss is None for loss in ours] == [loss is None for loss in theirs]
    np.testing.assert_allclose(*([loss for loss in found if loss] for found in (ours, theirs)), rtol=2e-3)
    assert sum(loss is not None for loss in ours) > 10
    ours, theirs = ([line["train/loss"] for line in training_lines(tmp_path / name)] for name in "ab")
    np.testing.assert_allclose(ours, theirs, rtol=2e-3)
