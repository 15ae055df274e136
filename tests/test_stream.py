"""Token streams: every token once per epoch, in a keyed order, whatever the range that is read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import resource
import shutil
import tempfile
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.corpus import Corpus, CorpusError
from data.counter_rng import Permutation, fold, fold_numpy, fold_torch, signed
from data.documents import OCCURRENCE_SHIFT
from data.shards import ShardError, write_manifest, write_shard
from data.stream import TokenStream

HASH = "ab" * 32
BOS, EOS = 1, 2


def write_documents(folder: Path, lengths: list[list[int]]) -> list[np.ndarray]:
    """One shard per list of lengths; tokens count up from 16 so that each is known by its value."""
    documents, value = [], 16
    for number, shard_lengths in enumerate(lengths):
        shard = []
        for length in shard_lengths:
            shard.append(np.arange(value, value + length))
            value += length
        write_shard(folder / f"part_{number}.shard", shard, tokenizer_hash=HASH, vocab_size=1 << 20)
        documents += shard
    return documents


def open_corpus(path, eos: int | None = EOS) -> Corpus:
    return Corpus(path, tokenizer_hash=HASH, bos_id=BOS, eos_id=eos)


def epoch_tokens(stream: TokenStream, epoch: int) -> np.ndarray:
    corpus = stream.corpus
    begin, end = corpus.tokens_before_epoch(epoch), corpus.tokens_before_epoch(epoch + 1)
    return stream.read(begin, end - begin)[0]


def split_documents(tokens: np.ndarray) -> list[tuple[int, ...]]:
    """The documents of an epoch, checked for their opening and closing tokens."""
    starts = np.flatnonzero(tokens == BOS)
    assert starts[0] == 0
    parts = np.split(tokens, starts[1:])
    assert all(part[-1] == EOS for part in parts)
    return [tuple(part[1:-1].tolist()) for part in parts]


@given(st.integers(1, 400), st.integers(0, 2**64 - 1))
def test_permutation_is_a_bijection(size, key):
    permutation = Permutation(key, size)
    images = permutation(np.arange(size))
    assert sorted(images.tolist()) == list(range(size))
    assert permutation.inverse(images).tolist() == list(range(size))


@pytest.mark.slow
def test_permutation_spreads_every_element_evenly():
    size, keys = 10, 4000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), Permutation(fold(7, key), size)(np.arange(size))] += 1
    expected = keys / size
    assert ((counts - expected) ** 2 / expected).sum() < 81 + 5 * (
        2 * 81
    ) ** 0.5  # chi-squared with 81 degrees of freedom


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=5))
def test_hash_is_the_same_in_python_numpy_and_torch(key, counters):
    import torch

    expected = [fold(key, counter) for counter in counters]
    assert fold_numpy(key, np.array(counters)).tolist() == expected
    assert fold_torch(key, torch.tensor(counters)).tolist() == [signed(value) for value in expected]


@pytest.mark.parametrize("lengths", [[[5, 1, 9, 3]], [[4, 4], [1], [7, 2, 2]], [[1] * 300, [2] * 200]])
def test_every_epoch_holds_every_document_once_in_a_new_order(tmp_path, lengths):
    documents = sorted(tuple(d.tolist()) for d in write_documents(tmp_path, lengths))
    stream = TokenStream(open_corpus(str(tmp_path / "*.shard")), key=5)
    orders = [split_documents(epoch_tokens(stream, epoch)) for epoch in range(3)]
    assert all(sorted(order) == documents for order in orders)
    if len(documents) > 6:
        assert orders[0] != orders[1] != orders[2]
    other = TokenStream(stream.corpus, key=6)
    assert len(documents) < 6 or split_documents(epoch_tokens(other, 0)) != orders[0]


def draw_stream(folder: Path, data: st.DataObject) -> TokenStream:
    """A stream of any documents in one to three shards, in stored or keyed order."""
    lengths = data.draw(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=90), min_size=1, max_size=3))
    write_documents(folder, lengths)
    eos = data.draw(st.sampled_from([EOS, None]))
    return TokenStream(open_corpus(str(folder / "*.shard"), eos), key=data.draw(st.none() | st.integers(0, 99)))


@pytest.mark.slow
@settings(max_examples=60)
@given(data=st.data())
def test_read_of_any_range_equals_the_slice_of_the_stream(tmp_path_factory, data):
    stream = draw_stream(tmp_path_factory.mktemp("shards"), data)
    total = stream.corpus.tokens_before_epoch(3)
    whole, origins = stream.read(0, total, origins=True)
    begin = data.draw(st.integers(0, total - 1))
    count = data.draw(st.integers(1, total - begin))
    part, part_origins = TokenStream(stream.corpus, stream._key).read(begin, count, origins=True)
    np.testing.assert_array_equal(part, whole[begin : begin + count])
    np.testing.assert_array_equal(part_origins, origins[begin : begin + count])


@settings(max_examples=60)
@given(data=st.data())
def test_read_rows_equals_slices_of_the_stream(tmp_path_factory, data):
    stream = draw_stream(tmp_path_factory.mktemp("shards"), data)
    total = stream.corpus.tokens_before_epoch(3)
    whole, origins = stream.read(0, total, origins=True)
    count = data.draw(st.integers(1, total))
    begins = np.array(data.draw(st.lists(st.integers(0, total - count), min_size=1, max_size=12)))
    rows, row_origins = TokenStream(stream.corpus, stream._key).read_rows(begins, count, origins=True)
    for begin, row, places in zip(begins, rows, row_origins, strict=True):
        np.testing.assert_array_equal(row, whole[begin : begin + count])
        np.testing.assert_array_equal(places, origins[begin : begin + count])


def test_origins_name_the_token_and_its_earlier_uses(tmp_path):
    documents = np.concatenate(write_documents(tmp_path, [[5, 3, 8], [2, 6]]))
    corpus = open_corpus(str(tmp_path / "*.shard"))
    tokens, origins = TokenStream(corpus, 3).read(0, corpus.tokens_before_epoch(3), origins=True)
    stored = tokens >= 16
    position, uses = origins & ((1 << OCCURRENCE_SHIFT) - 1), origins >> OCCURRENCE_SHIFT
    np.testing.assert_array_equal(documents[position[stored]], tokens[stored])
    ends = [corpus.tokens_before_epoch(epoch) for epoch in (1, 2)]
    np.testing.assert_array_equal(uses[stored], np.searchsorted(ends, np.flatnonzero(stored), side="right"))


def test_origins_have_room_for_trillions_of_tokens(tmp_path):
    write_documents(tmp_path, [[5, 3, 8], [2, 6]])
    corpus, large = (open_corpus(str(tmp_path / "*.shard")) for _ in range(2))
    large.shard_tokens = large.shard_tokens + 60 * 10**12  # as if so many tokens were in front
    large.num_tokens += 60 * 10**12
    total = corpus.tokens_before_epoch(3)
    tokens, origins = TokenStream(corpus, 3).read(0, total, origins=True)
    same, places = TokenStream(large, 3).read(0, total, origins=True)
    np.testing.assert_array_equal(same, tokens)
    stored = tokens >= 16
    np.testing.assert_array_equal(places[stored] - origins[stored], 60 * 10**12)
    assert (places[stored] >> OCCURRENCE_SHIFT == origins[stored] >> OCCURRENCE_SHIFT).all()


def test_without_document_end_only_the_beginning_is_marked(tmp_path):
    write_documents(tmp_path, [[3, 4]])
    corpus = open_corpus(str(tmp_path / "part_0.shard"), eos=None)
    tokens = TokenStream(corpus, None).read(0, 9)[0]
    assert tokens.tolist() == [BOS, 16, 17, 18, BOS, 19, 20, 21, 22]


@pytest.mark.parametrize("repeats", [(1, 3), (0.4, 1), (2.5, 0.25)])
def test_mix_uses_each_source_in_proportion_and_all_documents_equally(tmp_path, repeats):
    sources = []
    for name, repeat in zip("ab", repeats, strict=True):
        (tmp_path / name).mkdir()
        write_documents(tmp_path / name, [[4] * 20])
        sources.append({"path": f"{name}/*.shard", "repeat": repeat})
    # Make the sources distinguishable by length instead of by value.
    write_shard(tmp_path / "b/part_0.shard", [np.arange(500 + 6 * i, 506 + 6 * i) for i in range(20)], HASH, 1 << 20)
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    stream = TokenStream(open_corpus(tmp_path / "mix.json"), key=1)
    epochs = 8
    uses: Counter = Counter()
    for epoch in range(epochs):
        found = split_documents(epoch_tokens(stream, epoch))
        assert sum(len(d) == 4 for d in found) == round(20 * repeats[0])
        assert sum(len(d) == 6 for d in found) == round(20 * repeats[1])
        uses.update(found)
    for length, repeat in zip((4, 6), repeats, strict=True):
        counts = [count for document, count in uses.items() if len(document) == length]
        assert len(counts) == min(20, 20 * repeat * epochs)
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("documents", [1, 3, 40])
@pytest.mark.parametrize("repeat", [0.1, 0.15, 0.4, 1.4, 2.5])
def test_fractional_repeat_is_exact_over_the_epochs(tmp_path, documents, repeat):
    write_shard(tmp_path / "a.shard", [np.arange(20 * i, 20 * i + 20) for i in range(1, documents + 1)], HASH, 1 << 20)
    write_shard(tmp_path / "b.shard", [np.arange(9000, 9010)] * 3, HASH, 1 << 20)
    sources = [{"path": "a.shard", "repeat": repeat}, {"path": "b.shard"}]
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    stream, uses, exact = TokenStream(open_corpus(tmp_path / "mix.json"), key=1), Counter(), Fraction(str(repeat))
    for epoch in range(12):
        found = [document for document in split_documents(epoch_tokens(stream, epoch)) if document[0] < 9000]
        uses.update(found)
        assert uses.total() == math.floor((epoch + 1) * exact * documents + Fraction(1, 2))
        counts = [*uses.values(), *([0] * (documents - len(uses)))]
        assert max(counts) - min(counts) <= 1


def test_fractional_repeat_takes_a_sample(tmp_path):
    write_shard(tmp_path / "a.shard", [np.full(5 + i // 900 * 100, 16 + i) for i in range(1000)], HASH, 1 << 20)
    write_shard(tmp_path / "b.shard", [np.arange(9000, 9010)] * 3, HASH, 1 << 20)
    (tmp_path / "mix.json").write_text(
        json.dumps({"sources": [{"path": "a.shard", "repeat": 0.1}, {"path": "b.shard"}]})
    )
    samples = {}
    for seed, key in ((1, 5), (1, 6), (2, 5)):
        corpus = Corpus(tmp_path / "mix.json", tokenizer_hash=HASH, bos_id=BOS, eos_id=EOS, seed=seed)
        tokens = epoch_tokens(TokenStream(corpus, key), 0)
        samples[seed, key] = sorted(set(tokens[(tokens >= 16) & (tokens < 9000)].tolist()))
    assert samples[1, 5] == samples[1, 6] != samples[2, 5]  # both objectives share it
    assert [len(sample) for sample in samples.values()] == [100] * 3
    for sample in samples.values():
        tenths = np.bincount((np.array(sample) - 16) // 100, minlength=10)
        assert tenths.min() >= 2
        assert tenths.max() <= 22  # of 100 documents drawn evenly, hardly ever missed: 10 +- 3 each


def draw_mix(folder: Path, data: st.DataObject) -> Corpus:
    """One to four sources of one shard each, used any number of times; tokens count up from 16, as in the corpus."""
    sources, value = [], 16
    for number in range(data.draw(st.integers(1, 4))):
        lengths = data.draw(st.lists(st.sampled_from([0, 1, 2, 9]), min_size=1, max_size=40).filter(any))
        ends = value + np.cumsum([0, *lengths])
        documents = [np.arange(a, b) for a, b in pairwise(ends)]
        value = int(ends[-1])
        write_shard(folder / f"{number}.shard", documents, HASH, 1 << 20)
        repeat = data.draw(st.sampled_from([0.1, 0.33, 0.5, 1, 1.5, 2.7, 3]))
        sources.append({"path": f"{number}.shard", "repeat": repeat})
    (folder / "mix.json").write_text(json.dumps({"sources": sources}))
    return open_corpus(folder / "mix.json", data.draw(st.sampled_from([EOS, None])))


# Ten minutes: FUZZ_EXAMPLES=1000000 timeout 600 pytest -n 0 tests/test_stream.py -k often_as_asked (124: none failed).
@pytest.mark.slow
@settings(max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")), deadline=None)
@given(data=st.data())
def test_mix_uses_every_token_as_often_as_asked(tmp_path_factory, data):
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
        corpus = draw_mix(Path(folder), data)
        key = data.draw(st.none() | st.integers(0, 99))
        total = corpus.tokens_before_epoch(4)
        whole, origins = TokenStream(corpus, key).read(0, total, origins=True)
        stored = whole >= 16
        position, uses = origins[stored] & ((1 << OCCURRENCE_SHIFT) - 1), origins[stored] >> OCCURRENCE_SHIFT
        np.testing.assert_array_equal(position + 16, whole[stored])
        order = np.lexsort((uses, position))
        firsts = np.flatnonzero(np.diff(position[order], prepend=-1))
        counts = np.diff(firsts, append=len(order))
        np.testing.assert_array_equal(uses[order], np.arange(len(order)) - np.repeat(firsts, counts))
        count = data.draw(st.integers(1, min(60, total)))
        begins = np.array(data.draw(st.lists(st.integers(0, total - count), min_size=1, max_size=8)))
        rows, row_origins = TokenStream(open_again(corpus), key).read_rows(begins, count, origins=True)
        for begin, row, places in zip(begins, rows, row_origins, strict=True):
            np.testing.assert_array_equal(row, whole[begin : begin + count])
            np.testing.assert_array_equal(places, origins[begin : begin + count])


def open_again(corpus: Corpus) -> Corpus:
    """The same mix, nothing of it known yet."""
    return open_corpus(corpus.shards[0].path.parent / "mix.json", corpus.eos_id)


def test_a_mix_of_less_than_half_a_document_an_epoch_begins_with_one(tmp_path):
    write_documents(tmp_path, [[4]])
    (tmp_path / "mix.json").write_text('{"sources": [{"path": "part_0.shard", "repeat": 0.1}]}')
    corpus = open_corpus(tmp_path / "mix.json")
    assert [corpus.tokens_before_epoch(epoch) for epoch in (0, 1, 10, 11, 20, 21)] == [0, 6, 6, 12, 12, 18]
    assert len(TokenStream(corpus, 1).read(0, 18)[0]) == 18


def test_documents_without_tokens_are_refused(tmp_path):
    write_documents(tmp_path, [[0, 0]])
    with pytest.raises(CorpusError, match=r"part_0\.shard: holds no tokens, its documents are empty"):
        open_corpus(tmp_path / "part_0.shard")


def test_shards_taken_twice_are_refused(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    written = [write_shard(tmp_path / "a" / f"{i}.shard", [np.arange(20, 30 + i)], HASH, 1 << 20) for i in (0, 1)]
    write_manifest(tmp_path / "a", written, HASH, 1 << 20, {})
    shutil.copy(tmp_path / "a" / "1.shard", tmp_path / "b" / "copy.shard")
    (tmp_path / "link.shard").symlink_to(tmp_path / "a" / "0.shard")

    def mix(*paths: str) -> Path:
        (tmp_path / "mix.json").write_text(json.dumps({"sources": [{"path": path} for path in paths]}))
        return tmp_path / "mix.json"

    assert open_corpus(mix("a/*.shard")).num_documents == open_corpus(mix("a/0.shard", "a/1*")).num_documents == 2
    wrong = [str(tmp_path / "a" / "**"), mix("a", "a/1.shard"), mix("a", "a"), mix("a", "link.shard"), mix("a", "b/*")]
    for path in wrong:
        with pytest.raises(CorpusError, match=r'takes .*shard.*; name it once .*"repeat"'):
            open_corpus(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "mix file"),
        ("[]", "sources"),
        ('{"sources": [{"repeat": 1}]}', "path"),
        ('{"sources": [{"path": "x", "repeat": 0}]}', "repeat"),
        ('{"sources": [{"path": "x", "weight": -2}]}', "weight"),
    ],
)
def test_a_bad_mix_file_is_one_sentence(tmp_path, content, says):
    path = tmp_path / "mix.json"
    path.write_text(content)
    with pytest.raises(CorpusError, match=says) as error:
        open_corpus(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("copies", [1, 100])  # small shards are hashed whole, large ones in places
@pytest.mark.parametrize("listed", [False, True])
def test_identity_changes_with_the_data(tmp_path, listed, copies):
    path = tmp_path / "x.shard"
    documents = [np.arange(start, start + 1000) for start in range(16, 20016, 1000)] * copies
    flat = np.concatenate(documents)

    def identity(parts, eos: int | None = EOS) -> str:
        entry = write_shard(path, parts, HASH, 1 << 20)
        if listed:
            write_manifest(tmp_path, [entry], HASH, 1 << 20, {})
        return open_corpus(path, eos).identity()

    first = identity(documents)
    assert identity(documents) == first
    others = [
        identity(documents, eos=None),
        identity([documents[0], *(document + 1 for document in documents[1:-1]), documents[-1]]),
        identity([documents[0], *documents[-2:0:-1], documents[-1]]),  # another order
        identity(np.split(flat, [1001, *range(2000, len(flat), 1000)])),  # the same tokens, another document end
    ]
    assert len({first, *others}) == 5


def test_identity_in_first_checkpoints_is_recognised(tmp_path):
    for number, lengths in enumerate(([5, 3], [4, 400])):
        documents = np.split(np.arange(16, 16 + sum(lengths)) + 100 * number, lengths[:1])
        write_shard(tmp_path / f"part_{number}.shard", documents, HASH, 1 << 20)
    sources = [{"path": "part_0.shard", "repeat": 3}, {"path": "part_1.shard"}]
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    # As df7372a computes it.
    known = "761cb920181bd525aa592f868fb5f66ffcc35ea7a1e80e0a2db10634e93f3c3c"
    assert open_corpus(tmp_path / "mix.json").first_identity() == known


def test_whole_repeats_come_in_the_order_they_always_had(tmp_path):
    generator, value = np.random.default_rng(0), 16
    for number, count in enumerate((70, 1, 40)):
        ends = value + np.cumsum([0, *generator.integers(0, 60, count)])
        write_shard(tmp_path / f"{number}.shard", [np.arange(a, b) for a, b in pairwise(ends)], HASH, 1 << 20)
        value = int(ends[-1])
    sources = [{"path": "[01].shard", "repeat": 2}, {"path": "2.shard"}]
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    stream = TokenStream(open_corpus(tmp_path / "mix.json"), key=7)
    tokens, origins = stream.read(0, stream.corpus.tokens_before_epoch(3), origins=True)
    # As df7372a reads it: runs go on in what was theirs.
    known = "73d93d490e7b749481d5970b5ab6907fc80418dafc9102427a09526c977ef82b"
    assert origins is not None
    origins = (origins >> OCCURRENCE_SHIFT << 40) + (origins & ((1 << OCCURRENCE_SHIFT) - 1))  # as it wrote them
    assert hashlib.sha256(tokens.tobytes() + origins.tobytes()).hexdigest() == known


def test_open_file_limit_is_raised_for_many_shards(tmp_path, monkeypatch):
    write_documents(tmp_path, [[2]] * 60)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))
    try:
        corpus = open_corpus(str(tmp_path / "*.shard"))
        assert len(TokenStream(corpus, 1).read(0, corpus.tokens_before_epoch(1))[0]) == 60 * 4
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (120, 120))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    few, total = open_corpus(str(tmp_path / "*.shard")), corpus.tokens_before_epoch(1)
    before = len(os.listdir("/proc/self/fd"))
    np.testing.assert_array_equal(TokenStream(few, 1).read(0, total)[0], TokenStream(corpus, 1).read(0, total)[0])
    assert len(os.listdir("/proc/self/fd")) == before + few._most_open < before + 60  # files are opened as needed


@pytest.mark.parametrize("size", [4000, 300])  # within the tokens, within the header
def test_shrinking_shard_is_named(tmp_path, size):
    write_documents(tmp_path, [[5], [3000] * 4])
    corpus = open_corpus(str(tmp_path / "*.shard"))
    stream = TokenStream(corpus, 1)
    stream.read(0, 20)
    os.truncate(tmp_path / "part_1.shard", size)
    corpus.drop_cache()
    with pytest.raises(
        ShardError, match=rf"part_1\.shard has shrunk from [\d,]+ to {size:,} bytes while it was in use"
    ):
        stream.read(0, corpus.tokens_before_epoch(1))


def test_tokens_are_read_without_readahead(tmp_path):
    write_shard(tmp_path / "x.shard", [np.full(500_000, 9, np.uint16)] * 4, HASH, 1000)
    corpus = open_corpus(tmp_path / "x.shard")
    TokenStream(corpus, 1).read(0, 20)
    smaps = Path("/proc/self/smaps").read_text().split(str(tmp_path / "x.shard"))[1:]
    flags = [re.findall(r"VmFlags:(.*)", part)[0].split() for part in smaps]
    assert ["rr" in found for found in flags] == [True, False]  # random reads, but of the offsets


def test_identity_changes_with_order_and_repeats(tmp_path):
    write_documents(tmp_path, [[5, 3], [4, 4]])
    found = set()
    for names, repeat in (("01", 1), ("10", 1), ("01", 2), ("01", 1.5)):
        sources = [{"path": f"part_{name}.shard", "repeat": repeat} for name in names]
        (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
        found.add(open_corpus(tmp_path / "mix.json").identity())
    assert len(found) == 4


def test_shard_of_another_tokenizer_is_refused(tmp_path):
    write_documents(tmp_path, [[5]])
    with pytest.raises(ShardError, match="tokenizer"):
        Corpus(tmp_path / "part_0.shard", tokenizer_hash="cd" * 32, bos_id=BOS, eos_id=EOS)
