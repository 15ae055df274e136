"""Ranks that do not answer: who waits, and in what, is named, and the run ends."""

from __future__ import annotations

import re
import subprocess

from runs import ROOT, command, environment, flags, make_inputs

from training.status import read_status


def test_a_rank_that_hangs(tmp_path):
    """Rank 1 stops at step 3; rank 0 gives up after --collective_timeout and says in which operation it waited."""
    inputs = make_inputs(tmp_path / "inputs")
    plain = command(flags(inputs, tmp_path / "runs", collective_timeout=0.15, validate_every=0), ranks=2)
    place = plain.index(str(ROOT / "train_multi_gpu.py"))
    words = [*plain[:place], str(ROOT / "tests" / "slurm_python.py"), *plain[place:]]
    variables = {**environment(), "TEST_HANG": "1:3"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=variables, check=False)
    assert done.returncode != 0
    expected = r"error: rank 0 waited in vain for the others in the (agreement before a step|sum of \w+): "
    assert re.search(expected, done.stderr), done.stderr
    assert "Traceback" not in done.stderr.split("torch/distributed/elastic")[0]
    status = read_status(tmp_path / "runs" / "run")
    assert (status.state, status.step) == ("failed", 0)
    assert "rank 0 waited in vain" in status.reason
