"""slurm/train.sbatch on a real SLURM: preemption, time limits, lost nodes, crashes; the run stays the same run.

Slow jobs run in the background (fixture `background`) while the first tests do their work, and are looked at last. So
this file stays whole on one worker of pytest-xdist (see conftest.py).
"""

from __future__ import annotations

import os
import signal

import pytest

from training.status import read_status

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def background(cluster, jobs) -> dict[str, str]:
    """Jobs that mostly wait, by name of the run."""
    output, cluster.folder = cluster.folder, jobs.runs.parent
    slow, slower = {"TEST_STEP_SECONDS": "2.5"}, {"TEST_STEP_SECONDS": "4"}
    # It starts again on node2: tests break the others, or want them for themselves.
    silent = jobs.submit("silent_node", "--exclude=node[3-4]", env=slow, save_every=5)
    node = cluster.wait(silent, "RUNNING")["NodeList"]
    assert node == "node1", "the first job gets the first node: the tests keep away from it"
    submitted = {
        "silent_node": silent,
        # A start takes up to 40 s where many processes share two cores, and either job has to be stopped once with
        # its steps of 120 s. SLURM sends the signal up to a minute early: 60 to 120 s after the start.
        "limit_signal": jobs.submit("limit_signal", "--time=3", "--signal=USR1@60", "-wnode2", env=slower),
        "limit_silent": jobs.submit("limit_silent", "--time=2", "--signal=CONT@10", "-wnode2", env=slower),
        "crash_loop": jobs.submit(
            "crash_loop", "-wnode2", script=("--requeue_on_crash",), env={"TEST_KILL": "0:4"}, save_every=2
        ),
    }
    jobs.wait_for_step(silent, "silent_node", 2)
    cluster.kill_node(node)
    cluster.folder = output
    cluster.kept |= set(submitted.values())
    return submitted


def test_preempted_signalled_and_requeued_by_hand(jobs, background, cluster):
    """Five jobs: preempted with and without grace; signalled on rank 1; requeued by hand; a GPU breaks, and again."""
    slow = {"TEST_STEP_SECONDS": "0.5"}
    names = ("preempted", "no_grace", "signalled", "by_hand", "broken")
    preempted = jobs.submit("preempted", "-wnode4", "--signal=USR1@60", env=slow)
    no_grace = jobs.submit("no_grace", "--partition=nograce", "-wnode4", env=slow)
    signalled = jobs.submit("signalled", "--ntasks=2", "-wnode3", env=slow)
    by_hand = jobs.submit("by_hand", "-wnode3", env=slow)
    once, retry = {**slow, "TEST_DEVICE": "0:6"}, ("--requeue_on_crash",)
    broken = jobs.submit("broken", "--exclude=node[1,4]", script=retry, env=once, save_every=5)
    was_on = cluster.wait(broken, "RUNNING")["NodeList"]
    jobs.wait_for_step(preempted, "preempted", 5)
    jobs.wait_for_step(no_grace, "no_grace", 5)
    high = cluster.sbatch("#!/bin/sh\nsleep 1\n", options=("--partition=high", "-wnode4", "--exclusive"))
    jobs.wait_for_step(by_hand, "by_hand", 5)
    cluster.scontrol("requeue", by_hand)
    jobs.wait_for_step(signalled, "signalled", 5)
    os.kill(cluster.pids(signalled)[1], signal.SIGUSR2)
    cluster.wait(high, "COMPLETED")
    outputs = {}
    for name, job_id in zip(names, (preempted, no_grace, signalled, by_hand, broken), strict=True):
        outputs[name] = jobs.check(name, job_id, launches=3 if name == "broken" else 2)
        assert jobs.launches(name)[1]["start_step"] >= 5
        assert cluster.job(job_id)["Restarts"] == "1"  # exactly one requeue
    assert "stopped by SIGUSR1" in outputs["preempted"]
    assert "stopped by SIGUSR2" in outputs["signalled"]
    assert outputs["signalled"].count("SLURM starts job") == 1
    assert f"SLURM starts job {broken} again without {was_on}\n" in outputs["broken"]
    assert {*cluster.hosts(broken), was_on} == {"node2", "node3"}  # it went on on the other node
    assert set(cluster.job(broken)["ExcNodeList"].split(",")) == {"node1", "node4", was_on}


def test_node_dies_and_the_other_goes_on(jobs, background, cluster):
    """A node's daemon and rank are gone: the run goes on without, in the allocation, whether SLURM knows it or not."""
    options = ("--nodes=2", "--ntasks-per-node=1", "-wnode3,node4", "--no-kill")
    script, slow = ("--requeue_on_crash", "--least_nodes", "1"), {"TEST_STEP_SECONDS": "0.4"}
    job_id = jobs.submit("left", *options, script=script, env=slow, save_every=4)
    jobs.wait_for_step(job_id, "left", 6)
    cluster.kill_node("node4", tasks=True)
    output = jobs.check("left", job_id, launches=2)
    assert f"job {job_id} starts again in its allocation without node4\n" in output
    assert [launch["world_size"] for launch in jobs.launches("left")] == [2, 1]
    assert cluster.job(job_id)["Restarts"] == "0"


def test_time_limits(jobs, background, cluster):
    for name in ("limit_signal", "limit_silent"):
        output = jobs.check(name, background[name])
        restarts = int(cluster.job(background[name])["Restarts"])
        launches = jobs.launches(name)
        assert restarts >= 1
        assert len(launches) == restarts + 1
        assert launches[1]["start_step"] > 0
        assert ("stopped by SIGUSR1" if name == "limit_signal" else "stopped by the job's time limit") in output


def test_crash_loop_ends_by_itself(jobs, background, cluster):
    job_id = background["crash_loop"]
    cluster.wait(job_id, "FAILED")
    output = cluster.output(job_id)
    # Its first start saved step 2; the second and third, from there, were killed at step 4 like it; the fourth refuses.
    assert "its last 2 starts left no new checkpoint behind (the newest is of step 2)" in output
    assert cluster.job(job_id)["Restarts"] == "0"  # all of them in one allocation
    assert read_status(jobs.runs / "crash_loop").state == "failed"


def test_node_falls_silent(jobs, background, cluster):
    """slurmd is killed and its ranks go on: the restart waits until they have noticed, and nothing is done twice."""
    job_id = background["silent_node"]
    jobs.check("silent_node", job_id, launches=2)
    cluster.kept.clear()
    assert jobs.launches("silent_node")[1]["start_step"] > 5
