"""The race's figures: means, their test, and a whole race in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.tiny_runs import ROOT

from benchmarks.speedrun.race import COLUMNS, prepare, read_results, table

TEXT = "A pair of words can be told apart . \n" * 6


def race(*arguments: object) -> str:
    words = [sys.executable, "benchmarks/speedrun/race.py", *map(str, arguments)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_race_in_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("a.train", "b.dev"):
        (tmp_path / name).write_text("\n\n".join(f"Document {name} {i} . {TEXT}" for i in range(40)))
    data, output = tmp_path / "data", tmp_path / "runs"
    prepare(data, [tmp_path / "a.train"], [tmp_path / "b.dev"])
    words = ["--data", data, "--output", output]
    words += ["--pairs", tmp_path, "--seeds", 1, 2]
    vocabulary = len(json.loads((data / "tokenizer.json").read_text())["model"]["vocab"])
    model = json.loads((ROOT / "configs/tiny.json").read_text()) | {"vocab_size": vocabulary}
    (tmp_path / "model.json").write_text(json.dumps(model))
    pair = {"sentence_good": "A pair of words .", "sentence_bad": "A words pair of ."}
    for name in ("blimp_fast", "supplement_fast"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    flags = {
        "config_file": str(tmp_path / "model.json"), "hybrid_numerator": 1, "hybrid_denominator": 2, "seq_length": 16,
        "global_batch_size": 8, "batch_reduction": 1, "local_batch_size": 8, "max_steps": 3, "validation_steps": 1,
    }  # fmt: skip
    recipe = tmp_path / "slow.json"
    recipe.write_text(json.dumps(flags | {"learning_rate": 1e-4}))
    planned = race(recipe, *words, "--dry_run")
    assert planned.count("train_single_gpu.py") == planned.count("minimal_pairs.py") == 2
    assert not output.exists()
    race(recipe, *words)
    files = {path: path.stat().st_mtime_ns for path in output.glob("*.log")}
    assert "slow" in race(recipe, *words)  # nothing is trained twice
    assert files == {path: path.stat().st_mtime_ns for path in output.glob("*.log")}
    for path in sorted(output.glob("*.result.json")):  # of a second recipe, a little better
        result = json.loads(path.read_text())
        loss = "valid/ema_masked_loss_64"  # in the last rows, by which runs are judged
        better = {"recipe": "fast", loss: result[loss] - 0.1}
        (output / f"fast_{path.name}").write_text(json.dumps(result | better))
    drawn = race("--output", output, "--baseline", "slow", "--plot", tmp_path / "race.png").splitlines()
    assert (tmp_path / "race.png").stat().st_size > 5000
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in (line.split("|") for line in drawn)}
    assert rows["recipe"][1:] == list(COLUMNS)
    assert rows["slow"][0] == rows["fast"][0] == "2"
    assert "(p " in rows["fast"][1]
    assert "(p " not in rows["slow"][1]


def test_committed_results_give_the_table_again():
    """What benchmarks/speedrun/README.md says of the record, with nothing to run."""
    names = ("2026-11-22_h200_race_ten_epochs.json", "2026-11-22_h200_race_long_rows.json")
    found = read_results(None, [ROOT / "benchmarks/results" / name for name in names])
    lines = table(found, "lamb_no_dropout").splitlines()
    rows = {cells[1]: cells[2:] for cells in ([cell.strip() for cell in line.split("|")] for line in lines)}
    assert rows["lamb_no_dropout"][:4] == ["3", "2.400 ± 0.002", "2.844 ± 0.002", "70.0 ± 0.6"]
    record = ["3", "2.335 ± 0.005 (p 0.0043)", "2.816 ± 0.001 (p 0.00062)", "68.9 ± 0.2 (p 0.21)"]
    assert rows["normuon_long_rows"][:4] == record  # of one seed without minimal pairs
