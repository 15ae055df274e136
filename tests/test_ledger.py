"""The ledger: what a run has used of each source, in its folder, its checkpoints, the report and the model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from helpers.tiny_runs import flags, make_inputs, training_lines

import train_single_gpu
from data.corpus import Corpus
from data.ledger import ledger_rows, make_ledger
from data.shards import describe_shard, tokenizer_hash, write_manifest, write_shard
from data.stream import TokenStream
from export.to_huggingface import export
from report.page import page
from report.runs import read_runs
from training.checkpoint import locate
from training.config import parse_config
from training.inputs import read_inputs


def test_tokens_of_each_source_are_those_that_the_streams_deliver(tmp_path):
    lengths, words = {"a": [5, 9, 4, 12], "b": [7, 3, 8, 6, 10, 2]}, {"a": 20, "b": 18}
    for number, (name, of_documents) in enumerate(lengths.items()):
        (tmp_path / name).mkdir()
        tokens = [np.full(length, 20 + number) for length in of_documents]
        shard = write_shard(tmp_path / name / "s.shard", tokens, "ab" * 32, 300, words=words[name])
        write_manifest(tmp_path / name, [shard], "ab" * 32, 300, {})
    sources = [{"path": "a", "repeat": 3}, {"path": "b", "repeat": 0.5}]
    (tmp_path / "mix.json").write_text(json.dumps({"sources": sources}))
    corpus = Corpus(tmp_path / "mix.json", tokenizer_hash=None, bos_id=1, eos_id=2)
    positions = (corpus.tokens_before_epoch(2), corpus.tokens_before_epoch(4))
    found = make_ledger(corpus, [corpus.epochs] * 2, positions, 7)
    for number, (name, of_documents) in enumerate(lengths.items()):
        entry, total = found["sources"][number], 0
        for objective, position in zip(("masked", "causal"), positions, strict=True):
            stored, _ = TokenStream(corpus, key=number).read(0, position)
            documents = entry["objectives"][objective]["documents"]
            assert entry["objectives"][objective]["tokens"] == (stored == 20 + number).sum() + 2 * documents
            assert documents == {"a": 3, "b": 0.5}[name] * len(of_documents) * {"masked": 2, "causal": 4}[objective]
            total += documents
        assert entry["documents"] == total
        assert entry["repetitions"] == pytest.approx(total / len(of_documents))
        assert entry["words"] == words[name] * total // len(of_documents)
        assert (entry["tokens_held"], entry["words_held"]) == (sum(of_documents) + 2 * len(of_documents), words[name])
    assert found["tokens"] == sum(positions)
    assert found["words"] == 20 * 18 + 18 * 3
    inside = make_ledger(corpus, [corpus.epochs] * 2, (positions[0] + 20, 0), 8)
    assert sum(source["tokens"] for source in inside["sources"]) == pytest.approx(positions[0] + 20, abs=1)
    assert inside["objectives"]["causal"]["repetitions"] == 0
    head, rows = ledger_rows(found)
    assert [row[0] for row in rows] == ["a", "b", "in all"]
    assert {len(row) for row in rows} == {len(head)}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_inputs(tmp_path_factory.mktemp("inputs"), dropout=0.0)
    shards = [describe_shard(folder / "train" / f"part_{n}.shard", 8000) for n in range(2)]
    write_manifest(folder / "train", shards, tokenizer_hash(folder / "tokenizer.json"), 320, {})
    given = {"train_path": folder / "train", "max_steps": 12, "save_every": 5, "validate_every": 0}
    arguments = flags(folder, folder / "runs", **given)
    assert train_single_gpu.main(arguments) == 0
    (folder / "arguments.json").write_text(json.dumps(arguments))
    return folder / "runs" / "run"


def test_a_run_writes_its_ledger_with_each_checkpoint(run_folder, capsys):
    arguments = json.loads((run_folder.parent.parent / "arguments.json").read_text())
    inputs = read_inputs(parse_config(arguments, ""))
    written = json.loads((run_folder / "ledger.json").read_text())
    assert written == inputs.ledger(12)
    for step in (5, 10, 12):
        record = locate(run_folder / "checkpoints" / f"step_{step:08d}").record
        assert record["ledger"] == inputs.ledger(step)
        line = training_lines(run_folder)[step - 1]
        assert record["ledger"]["tokens"] == line["stats/tokens"] == record["tokens"]
        assert record["ledger"]["words"] == line["stats/words"]
    shutil.rmtree(run_folder / "checkpoints" / "step_00000012")
    (run_folder / "ledger.json").unlink()
    assert train_single_gpu.main(arguments) == 0
    assert json.loads((run_folder / "ledger.json").read_text()) == written


def test_report_and_model_card_show_the_ledger(run_folder, tmp_path):
    cells = ledger_rows(json.loads((run_folder / "ledger.json").read_text()))[1][0]
    shown = page(read_runs([str(run_folder)]))
    assert "Data used</h2>" in shown
    assert all(cell in shown for cell in cells)
    for step in (5, 12):
        checkpoint = locate(run_folder / "checkpoints" / f"step_{step:08d}")
        export(checkpoint.path, out := tmp_path / str(step))
        card = (out / "README.md").read_text()
        assert f"| {' | '.join(ledger_rows(checkpoint.record['ledger'])[1][0])} |" in card
