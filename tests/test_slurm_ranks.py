"""slurm/train.sbatch on a real SLURM: layouts of ranks on nodes, and resuming on other numbers of ranks.

Both tests use one run of four ranks: this file stays whole on one worker of pytest-xdist (see conftest.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from helpers.slurm_jobs import Jobs
from helpers.slurm_reference import STEPS

from training.metric_logger import keep_until
from training.status import folder_name, list_checkpoints, read_status

pytestmark = pytest.mark.slurm


def submit_layout(jobs: Jobs, name: str, *options: str, **flag) -> tuple[str, Path]:
    """The job, and the folder in which each of its ranks leaves what it found."""
    folder = jobs.runs.parent / f"layout_{name}"
    folder.mkdir()
    return jobs.submit(name, *options, env={"TEST_LAYOUT": str(folder)}, **flag), folder


@pytest.fixture(scope="module")
def own_gpu(cluster, jobs) -> tuple[str, Path]:
    """A run of four ranks on one node, each of which sees one GPU; it saves at steps 10, 20 and 30."""
    output, cluster.folder = cluster.folder, jobs.runs.parent
    options = ("--nodes=1", "--ntasks=4", "--gpus-per-task=1", "-wnode3")
    submitted = submit_layout(jobs, "own_gpu", *options, save_every=10)
    cluster.folder = output
    return submitted


def test_rank_layouts_and_two_jobs_on_one_node(jobs, own_gpu):
    options = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "-wnode3,node4")
    layouts = {"own_gpu": own_gpu, "all_gpus": submit_layout(jobs, "all_gpus", *options)}
    ports = set()
    for name, (job_id, folder) in layouts.items():
        jobs.check(name, job_id, launches=1)
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
        assert [rank["rank"] for rank in ranks] == [0, 1, 2, 3]
        assert {rank["world_size"] for rank in ranks} == {4}
        assert {(rank["master_addr"], rank["job_id"]) for rank in ranks} == {("node3", job_id)}
        assert {rank["master_port"] for rank in ranks} == {20000 + int(job_id) % 12000}
        assert len({rank["end_time"] for rank in ranks}) == 1
        assert ranks[0]["end_time"] is not None
        ports.add(ranks[0]["master_port"])
        per_node = 4 if name == "own_gpu" else 2
        assert [rank["local_rank"] for rank in ranks] == [0, 1, 2, 3] if per_node == 4 else [0, 1, 0, 1]
        assert {rank["local_world_size"] for rank in ranks} == {per_node}
        assert {len(rank["visible"].split(",")) for rank in ranks} == ({1} if name == "own_gpu" else {2})
    assert len(ports) == 2  # both were on node3 at a time


def test_other_numbers_of_ranks(jobs, own_gpu, cluster):
    """From a checkpoint of 4 ranks on with 2, ended by SIGINT (saved, not requeued), and from there with 4 again."""
    jobs.check("own_gpu", own_gpu[0])
    resized = jobs.runs / "resized"
    shutil.copytree(jobs.runs / "own_gpu", resized)
    for path in list_checkpoints(resized / "checkpoints"):
        if path.name != folder_name(10):
            shutil.rmtree(path)
    keep_until(resized / "metrics.jsonl", 10)

    job_id = jobs.submit("resized", "--ntasks=2", "-wnode3", env={"TEST_STEP_SECONDS": "1"})
    jobs.wait_for_step(job_id, "resized", 15)
    cluster.scancel("--signal=INT", job_id)
    cluster.wait(job_id, "COMPLETED")
    assert "stopped by SIGINT" in cluster.output(job_id)
    assert read_status(resized).state == "stopped"
    jobs.check("resized", jobs.submit("resized", "--ntasks=4", "-wnode3"), launches=3)
    launches = jobs.launches("resized")
    assert [launch["world_size"] for launch in launches] == [4, 2, 4]
    assert [launch["start_step"] for launch in launches[:2]] == [0, 10]
    assert 15 <= launches[2]["start_step"] < STEPS
