"""The SLURM that tests run on, tested itself: jobs, GPUs, failures, arrays, process ids and broken nodes."""

import os
import subprocess
import sys
import textwrap

import pytest
from helpers.slurm_cluster_fixture import Cluster, free_ports, parse_jobs


def test_job_records_are_parsed_whatever_they_contain():
    text = textwrap.dedent("""\
        JobId=7 ArrayJobId=6 ArrayTaskId=1 JobName=two words
           UserId=root(0) GroupId=root(0) MCS_label=N/A
           JobState=COMPLETED Reason=None Dependency=(null)
           NumNodes=2 NumCPUs=4 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
           TRES=cpu=4,node=2,billing=4
           Command=/a b/c.sh --set JobState=FAILED x
           WorkDir=/a b
           Power=

        JobId=8 JobName=next
           JobState=PENDING Reason=None
        """)
    first, second = parse_jobs(text)
    assert first["JobName"] == "two words"
    assert first["JobState"] == "COMPLETED"
    assert first["Command"] == "/a b/c.sh --set JobState=FAILED x"
    assert first["WorkDir"] == "/a b"
    assert first["TRES"] == "cpu=4,node=2,billing=4"
    assert first["ReqB:S:C:T"] == "0:0:*:*"
    assert first["Power"] == ""
    assert second == {"JobId": "8", "JobName": "next", "JobState": "PENDING", "Reason": "None"}


def test_free_ports_are_below_those_that_jobs_choose():
    assert 10_000 <= free_ports(4) < 19_000


@pytest.mark.slurm
def test_one_job_on_two_nodes_with_one_gpu_each_task(cluster: Cluster, tmp_path):
    """Host names, GPUs, arguments and variables of a job that fails after three tasks on two nodes."""
    (tmp_path / "a folder").mkdir()
    script = tmp_path / "a folder" / "job.sh"
    script.write_text(
        "#!/bin/bash\n"
        "#SBATCH --nodes=2 --ntasks=3 --gpus-per-task=1\n"
        "srun bash -c 'echo \"$(hostname):$SLURM_PROCID:$CUDA_VISIBLE_DEVICES:$SLURM_NTASKS:$WORD\"'\n"
        'echo "arguments $# $2"; echo "to stderr" >&2; scontrol show hostnames; exit 3\n'
    )
    before = os.environ.get("SLURM_CONF")
    job_id = cluster.sbatch(script, "one", "JobState=two words", options=["-J", "a name"], env={"WORD": 5})
    job = cluster.wait(job_id, "FAILED")
    assert os.environ.get("SLURM_CONF") == before
    assert (job["JobId"], job["ExitCode"], job["NumNodes"]) == (job_id, "3:0", "2")
    assert job["JobName"] == "a name"
    assert job["Command"].startswith(str(script))
    assert job["WorkDir"] == str(tmp_path)
    assert cluster.output_files(job_id) == [tmp_path / f"slurm-{job_id}.out"]
    output = cluster.output(job_id)
    rows = sorted(line.split(":") for line in output.splitlines() if line.count(":") == 4)
    assert [(host, gpu) for host, _, gpu, _, _ in rows] == [("node1", "0"), ("node1", "1"), ("node2", "0")]
    assert sorted((rank, tasks, word) for _, rank, _, tasks, word in rows) == [(str(r), "3", "5") for r in range(3)]
    assert "arguments 2 JobState=two words\n" in output
    assert "to stderr" in output
    assert output.endswith("node1\nnode2\n")
    with pytest.raises(AssertionError, match=r"the job is FAILED(.|\n)*ExitCode=3:0(.|\n)*arguments 2"):
        cluster.wait(job_id, "COMPLETED")
    with pytest.raises(AssertionError, match="ended without printing it"):
        cluster.wait_until_output(job_id, "never printed")


@pytest.mark.slurm
def test_array_and_a_job_left_for_the_next_test(cluster: Cluster):
    """The worst of an array counts; the pids of a running step are those of its tasks; drain() leaves nothing."""
    array = cluster.sbatch("#!/bin/bash\necho task $SLURM_ARRAY_TASK_ID; exit $SLURM_ARRAY_TASK_ID", options=["-a0-1"])
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
    job_id = cluster.sbatch(f'#!/bin/bash\nsrun -n2 {sys.executable} -c "{code}"', options=["-N2", "-n2"])
    job = cluster.wait(array)
    assert (job["JobState"], job["ArrayTaskId"]) == ("FAILED", "1")
    assert len(cluster.tasks(array)) == 2
    assert sorted(cluster.output(array).splitlines()) == ["task 0", "task 1"]
    cluster.wait_for(lambda: cluster.output(job_id).count("up") == 2, 30, "two tasks", job_id)
    pids = cluster.pids(job_id)
    assert list(pids) == [0, 1]
    for pid in pids.values():
        command = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=True)
        assert command.stdout.startswith(sys.executable)
    with pytest.raises(AssertionError, match=r"not within 0.3 s(.|\n)*JobState=RUNNING(.|\n)*up\nup"):
        cluster.wait(job_id, timeout=0.3)
    cluster.drain()
    assert cluster.job(job_id)["JobState"] in ("CANCELLED", "FAILED")
    assert cluster.pids(job_id) == {}
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids.values())


@pytest.mark.slurm
def test_node_is_killed_started_and_declared_down(cluster: Cluster):
    """A killed slurmd leaves its tasks alive, and comes back; a node that is declared DOWN has its job requeued."""
    job_id = cluster.sbatch("#!/bin/bash\nsrun bash -c 'echo up; sleep 99'")
    cluster.wait_until_output(job_id, "up")
    (task,) = cluster.pids(job_id).values()
    node = cluster.job(job_id)["BatchHost"]
    cluster.kill_node(node)
    assert os.path.exists(f"/proc/{task}")
    cluster.start_node(node)
    assert cluster.job(job_id)["JobState"] == "RUNNING"
    cluster.down(node)
    assert cluster.node_states()[node].startswith("down")
    assert cluster.wait(job_id, "PENDING", "COMPLETING")["Restarts"] == "1"
    cluster.resume(node)
    cluster.wait_for(lambda: cluster.node_states()[node] == "idle", 20, f"{node} idle", job_id)
    cluster.kill_node(int(node.removeprefix("node")), tasks=True)
    assert not os.path.exists(f"/proc/{task}")
