"""The model card: results with intervals by checkpoint, footprint, citation, metadata as huggingface_hub reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.report_pages import babylm_results
from helpers.tiny_exports import make_run
from helpers.tiny_runs import refusal

from data.results import read_results
from export import to_huggingface
from export.footprint import footprint

LAUNCH = {"world_size": 8, "device": "NVIDIA H200", "start_step": 0}
SPREAD = {"mean": 0.625, "deviation": 0.02, "values": [0.6, 0.625, 0.65]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("runs") / "mine")
    flags = {"name": "mine", "hybrid_numerator": 1, "hybrid_denominator": 2, "max_steps": 12, "learning_rate": 0.01}
    launches = [LAUNCH, {**LAUNCH, "world_size": 4, "start_step": 6}]
    (folder / "config.json").write_text(json.dumps({"flags": flags, "launches": launches}))
    lines = [{"step": n, "stats/tokens": 3600 * 1000 * n, "stats/tokens_per_second": 1000} for n in range(1, 13)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tasks = {"rte": {"measures": {"accuracy": SPREAD}, "valid_examples": 277, "form": "texts"},
             "ner": {"measures": {"f1": SPREAD}, "valid_examples": 9, "form": "tags"}}  # fmt: skip
    texts = {"/data/dev.txt": {"tokens": 99, "causal": {"perplexity": 21.5}}}
    files = {
        "evaluation/mine/main/zero_shot/results.json": babylm_results(folder, 0.5),
        "evaluation/mine/chck_1M/zero_shot/results.json": babylm_results(folder / "checkpoints" / "chck_1M", 0.375),
        "evaluation/mine/main/zero_shot/causal/blimp/blimp_filtered/predictions.json": {"datasets": {}},
        "glue.json": {"model": str(folder), "ema": True, "tasks": tasks, "average": 0.6},
        "trained.json": {**babylm_results(folder, 0.125), "weights": "trained"},
        "other.json": {"tasks": {"a": 1}, "texts": "x"},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    elsewhere = {"model": str(folder), "weights": "ema", "texts": texts}
    (folder.parent / "perplexity.json").write_text(json.dumps(elsewhere))
    return folder


def card_of(run: Path, model: Path, out: Path, *flags: str) -> Path:
    more = ["--results", str(run.parent / "perplexity.json"), "--author", "Å. Ås", "B. Lie", "--language", "no", "se"]
    assert to_huggingface.main([str(model), str(out), "--ema", "--license", "cc-by-4.0", *more, *flags]) == 0
    return out / "README.md"


def test_the_hub_reads_the_metadata(run, tmp_path):
    hub = pytest.importorskip("huggingface_hub", reason="needs huggingface_hub (requirements.lock has it)")
    card = hub.ModelCard.load(card_of(run, run, tmp_path / "out", "--grams_per_kwh", "20"))
    data = card.data.to_dict()
    assert (data["license"], data["language"], data["library_name"]) == ("cc-by-4.0", ["no", "se"], "transformers")
    emissions = 1000 * (6 * 8 + 6 * 4) * 0.7 * 1.56 * 20 / 1000  # hours x kW x overhead x intensity
    assert data["co2_eq_emissions"]["emissions"] == pytest.approx(emissions, rel=5e-3)
    found = {(each.dataset_name, each.metric_name): each for each in card.data.eval_results}
    assert len(found) == len(card.data.eval_results) == 6
    blimp = found["blimp_filtered (BabyLM)", "accuracy, causal"]
    assert (blimp.task_type, blimp.metric_type, blimp.metric_value) == ("text-generation", "accuracy", 0.5)
    assert blimp.metric_args == {"mode": "causal", "low": 0.375, "high": 0.625}
    rho = found["wug_past (BabyLM)", "Spearman's rho, causal"]
    assert (rho.metric_type, rho.metric_value, rho.metric_args["high"]) == ("spearmanr", -0.5, 1e-5)
    ner = found["ner (fine-tuning)", "f1, fine-tuned"]
    assert (ner.task_type, ner.metric_args) == ("token-classification", {"standard_deviation": 0.02})
    assert found["dev.txt (perplexity)", "perplexity, causal"].metric_value == 21.5
    index = hub.repocard_data.eval_results_to_model_index(card.data.model_name, card.data.eval_results)
    hub.repocard_data.model_index_to_eval_results(index)  # and back again
    assert card.data.model_name == "mine"


def test_a_reviewer_finds_results_footprint_and_citation(run, tmp_path):
    text = card_of(run, run, tmp_path / "out").read_text()
    for part in (
        "- Made by: Å. Ås, B. Lie.", "- Language: `no`, `se`.", "- License: `cc-by-4.0`.",
        "| BabyLM | blimp_filtered | causal | accuracy | 50.0 | [37.5, 62.5] | 1,000 |",
        "| BabyLM | wug_past | causal | Spearman's rho | -50.0 | [-75.0, 0.0] | 50 |",
        "| fine-tuning | rte | fine-tuned | accuracy | 62.5 | ± 2.0 over 3 seeds | 277 |",
        "| perplexity | dev.txt | causal | perplexity | 21.50 | not computed | 99 |",
        "<details><summary>4 parts of these</summary>", "| BabyLM | blimp_filtered/binding | causal | accuracy | 25.0",
        "took 12 hours on 8 x NVIDIA H200 and 4 x NVIDIA H200, 72 device-hours", "79 kWh and 38 kg of CO2-equivalent",
        "700 W a device all the time", "author = {Å. Ås and B. Lie}", "@inproceedings{charpentier2024gptbert",
    ):  # fmt: skip
        assert part in text, part
    plain = tmp_path / "plain"
    assert to_huggingface.main([str(run), str(plain)]) == 0  # the trained weights have other results
    text = (plain / "README.md").read_text()
    assert "accuracy | 12.5 |" in text
    assert "accuracy | 50.0 |" not in text
    assert "License: none is stated, so ask" in text


def test_results_are_those_of_the_checkpoint(run, tmp_path):
    first = card_of(run, run / "checkpoints" / "chck_1M", tmp_path / "first").read_text()
    assert "| BabyLM | blimp_filtered | causal | accuracy | 37.5 |" in first
    assert "accuracy | 50.0 |" not in first
    assert "| rte |" not in first  # of the whole run, which its newest checkpoint stands for
    assert "took 5 hours on" in first
    middle = card_of(run, run / "checkpoints" / "chck_2M", tmp_path / "middle").read_text()
    assert "## Results" not in middle


def test_what_cannot_be_stated_is_refused(run, tmp_path, capsys):
    (tmp_path / "other.json").write_text(json.dumps(babylm_results("runs/else", 0.5)))
    (tmp_path / "none.json").write_text("{}")
    for flags, words in (
        (["--results", tmp_path / "other.json"], "is of model runs/else, and MODEL is"),
        (["--results", tmp_path / "none.json"], "holds no results of the scripts in evaluation/"),
        (["--author", "A {B}"], "--author 'A {B}'"),
        (["--watts", "-1"], "--watts is -1"),
    ):
        assert words in refusal(capsys, to_huggingface.main, [str(run), str(tmp_path / "out"), *map(str, flags)])
    assert not (tmp_path / "out").exists()


def test_energy_is_of_known_devices_alone():
    lines = [{"step": 1, "stats/tokens": 7200, "stats/tokens_per_second": 2}]
    of = {name: footprint(lines, [{**LAUNCH, "device": name}]) for name in ("NVIDIA H100 PCIe", "x86_64")}
    assert (of["NVIDIA H100 PCIe"].watts, of["NVIDIA H100 PCIe"].device_hours) == (350, 8)
    assert of["x86_64"].metadata() == {}
    assert "energy and emissions are not estimated" in of["x86_64"].section()
    given = footprint(lines, [{**LAUNCH, "device": "x86_64"}], watts=100)
    assert given.energy == pytest.approx(0.8 * 1.56)
    assert footprint(lines, []) is footprint([], [LAUNCH]) is None


def test_files_of_other_programs_are_no_results(tmp_path):
    wrong = '{"sets": {"a": {"modes": {"m": {"mean": {"accuracy": 7}}}}}}'
    others = ("[]", "{", '{"sets": ["a"]}', '{"tasks": {"a": {}}}', '{"suites": {}}', '{"texts": 3}', wrong)
    for content in (*others, '{"datasets": {"a": {"modes": {"m": 1}}}}'):
        (tmp_path / "x.json").write_text(content)
        assert read_results(tmp_path / "x.json") is None, content
