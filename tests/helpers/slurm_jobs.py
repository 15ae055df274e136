"""Training jobs of tests: `Jobs` submits slurm/train.sbatch and compares runs with the reference."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from helpers.slurm_cluster_fixture import Cluster
from helpers.slurm_reference import COMMON, STEPS, Reference
from helpers.tiny_runs import ROOT, flags, training_lines
from training.metric_logger import read_metrics
from training.status import read_status

SCRIPT = ROOT / "slurm" / "train.sbatch"


class Jobs:
    """Submits training jobs with the flags of the reference run."""

    def __init__(self, cluster: Cluster, folder: Path, reference: Reference):
        self.cluster, self.reference, self.runs = cluster, reference, folder / "runs"

    def submit(self, name: str, *options: str, script: tuple[str, ...] = (), env: dict | None = None, **flag) -> str:
        """Job id of train.sbatch with sbatch's `options`, its own `script` options, variables and further flags."""
        settings = {**COMMON, "time_limit_margin": 10, "wandb_mode": "offline", **flag}
        arguments = flags(self.reference.inputs, flag.get("output_dir", self.runs), name, **settings)
        variables = {"PYTHON": ROOT / "tests" / "helpers" / "slurm_python.py", "OMP_NUM_THREADS": "1", **(env or {})}
        variables["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        job_options = ["--cpus-per-task=1", "--time=10", *options]
        return self.cluster.sbatch(SCRIPT, *script, *arguments, options=job_options, env=variables)

    def wait_for_step(self, job_id: str, name: str, step: int, timeout: float = 300) -> None:
        """Until a run has done `step` steps."""

        def done() -> bool:
            lines = training_lines(self.runs / name)
            return bool(lines) and lines[-1]["step"] >= step

        self.cluster.wait_for(done, timeout, f"step {step} of {name}", job_id)

    def check(self, name: str, job_id: str, launches: int | None = None) -> str:
        """The job has completed, and its run is the reference's: every step once, same batches, same losses."""
        self.cluster.wait(job_id, "COMPLETED", timeout=600)
        expected, found = training_lines(self.reference.run), training_lines(self.runs / name)
        output = self.cluster.output(job_id)
        assert [line["step"] for line in found] == list(range(1, STEPS + 1)), output
        for a, b in zip(expected, found, strict=True):
            assert a["data/fingerprint"] == b["data/fingerprint"]
            for key in ("train/loss", "train/masked_loss", "train/causal_loss"):
                assert b[key] == pytest.approx(a[key], rel=1e-5), (a["step"], key)
        last = read_metrics(self.runs / name / "metrics.jsonl")[-1]
        assert last["valid/masked_loss"] == pytest.approx(
            read_metrics(self.reference.run / "metrics.jsonl")[-1]["valid/masked_loss"], rel=1e-4
        )
        status = read_status(self.runs / name)
        assert (status.state, status.step) == ("finished", STEPS)
        if launches is not None:
            assert len(self.launches(name)) == launches, output
        return output

    def launches(self, name: str) -> list[dict]:
        """The launches in config.json, one for each start."""
        return json.loads((self.runs / name / "config.json").read_text())["launches"]
