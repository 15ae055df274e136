"""examples/slurm_cluster.sh on a real SLURM: shards by an array, training on two ranks, scores."""

from __future__ import annotations

import json
import re
import sys

import pytest
from helpers.slurm_cluster_fixture import Cluster
from helpers.tiny_runs import ROOT
from test_examples import SHORT, TINY, write_texts


@pytest.mark.slurm
def test_a_cluster_tokenises_trains_and_measures(cluster: Cluster, tmp_path):
    write_texts(tmp_path / "texts.txt")
    (tmp_path / "tiny.json").write_text(json.dumps(TINY | {"vocab_size": 290}))
    sizes = {"NODES": 1, "GPUS": 2, "CPUS": 1, "TIME": "10", "TASKS": 2, "MODEL": tmp_path / "tiny.json"}
    surroundings = {**cluster.environment, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "VOCABULARY": "290"}
    surroundings |= {name: str(value) for name, value in sizes.items()}
    command = ("bash", ROOT / "examples" / "slurm_cluster.sh", "texts.txt", "out", *SHORT)
    done = cluster.command(*command, cwd=tmp_path, env=surroundings)
    submitted = re.search(r"^jobs: shards (\d+), training (\d+), scores (\d+)$", done.stdout, re.MULTILINE)
    shards, training, scores = submitted.groups()
    for job in (shards, training, scores):
        cluster.wait(job, "COMPLETED")
    out = tmp_path / "out"
    config = json.loads((out / "runs" / "cluster" / "config.json").read_text())
    assert [launch["world_size"] for launch in config["launches"]] == [2]
    assert json.loads((out / "runs" / "cluster" / "status.json").read_text())["state"] == "finished"
    assert json.loads((out / "perplexity.json").read_text())["texts"]
    assert " 0 FAIL\n" in (out / f"training-{training}.log").read_text()  # the doctor's
