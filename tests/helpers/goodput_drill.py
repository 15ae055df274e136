"""What a fault costs on a real SLURM: drills with two ranks on two nodes, and useful time with one every 15 minutes.

    python tests/helpers/goodput_drill.py [--cases crash hang node left] [--output FILE]

Each case breaks a run of slurm/train.sbatch that saves every few seconds: a rank is killed, stopped, or its node dies,
and SLURM starts the job again, or (left) the other node goes on alone at once.
Seconds from the fault: until the ranks have ended, until they start again, until the first new step; and the work that
was lost with what was not saved. As root: it starts a SLURM of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:1] = [str(ROOT), str(ROOT / "tests")]

from helpers.slurm_cluster_fixture import Cluster  # noqa: E402 - after the path
from helpers.slurm_jobs import Jobs  # noqa: E402 - after the path
from helpers.slurm_reference import Reference  # noqa: E402 - after the path
from helpers.tiny_runs import training_lines  # noqa: E402 - after the path

EVERY = 900.0  # seconds between faults
STEP_SECONDS = 0.3
_CASES = ["crash", "hang", "left", "node"]


def drill(case: str, cluster: Cluster, jobs: Jobs) -> dict[str, float]:
    """The parts of one fault, in seconds."""
    flags = {"max_steps": 100000, "validate_every": 0, "save_minutes": 0.1, "heartbeat_timeout": 10.0}
    dies = case in ("node", "left")
    options = ("--nodes=2", "--ntasks-per-node=1", "--exclude=node1" if dies else "-wnode1,node2")
    variables, retry = {"TEST_STEP_SECONDS": str(STEP_SECONDS)}, ("--requeue_on_crash",)
    if case == "left":
        options, retry = (*options, "--no-kill"), (*retry, "--least_nodes=1")
    job_id = jobs.submit(case, *options, script=retry, env=variables, batch_reduction=1, length_milestones="", **flags)
    jobs.wait_for_step(job_id, case, 40)
    lines, pids = training_lines(jobs.runs / case), cluster.pids(job_id)
    fault, done = time.time(), lines[-1]["step"]
    if dies:
        cluster.kill_node(cluster.hosts(job_id)[1], tasks=True)
    else:
        os.kill(pids[1], signal.SIGKILL if case == "crash" else signal.SIGSTOP)

    def has_ended() -> float:
        restarted = cluster.job(job_id)["Restarts"] != "0"  # by SLURM itself, or by our job script, which says so
        return time.time() if restarted or "starts" in cluster.output(job_id) else 0.0

    ended = cluster.wait_for(has_ended, 600, "the end", job_id)
    launches = cluster.wait_for(lambda: len(jobs.launches(case)) > 1 and jobs.launches(case), 600, "a start", job_id)
    started = launches[-1]["start_step"]

    def goes_on() -> float:
        lines = training_lines(jobs.runs / case)
        return time.time() if lines and lines[-1]["step"] > started else 0.0

    first = cluster.wait_for(goes_on, 600, "a new step", job_id)
    output, inside = cluster.output(job_id), cluster.job(job_id)["Restarts"] == "0"
    cluster.scancel("--signal=KILL", "--full", job_id)
    lost = max(0, done - started) * STEP_SECONDS
    parts = {"detected_and_ended": ended - fault, "to_first_step": first - ended, "work_lost": lost}
    total = sum(parts.values())
    reason = next((line for line in output.splitlines() if "starts" in line), "")
    return {**parts, "total": total, "useful": 1 - total / EVERY, "in_allocation": inside, "reason": reason}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=_CASES, choices=_CASES)
    parser.add_argument("--output", default="", metavar="FILE", help="write the results here as JSON")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="goodput-", dir="/tmp") as name:
        folder = Path(name)
        cluster = Cluster(folder / "slurm")
        cluster.prefix.mkdir()
        cluster.start()
        try:
            cluster.folder = folder
            jobs = Jobs(cluster, folder, Reference(folder / "reference"))
            for case in options.cases:
                results[case] = drill(case, cluster, jobs) | {"load": os.getloadavg()[0]}
                print(case, json.dumps(results[case], indent=1), flush=True)
                cluster.drain()
        finally:
            cluster.stop()
    if options.output:
        Path(options.output).write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
