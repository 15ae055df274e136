"""slurm/launch.py --finetune without a cluster: the array of a grid, what runs in a job, what is refused."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_exports import make_checkpoint, random_model
from helpers.tiny_runs import ROOT, refusal

from evaluation import finetune, finetune_progress
from evaluation.finetune_training import Finetuner
from slurm.grid import FinetuneFailed, FinetuneJob
from slurm.jobs import Job
from slurm.launch import main, read_run

SWEEP = ["--sweep", "only=cola,rte", "--sweep", "learning_rates=3e-5,1e-4", "--sweep", "seed=0,1,2"]
GIVEN = ["runs/a", "--ema", "--tasks", "glue", "--output", "grid"]


@pytest.fixture
def glue(tmp_path, monkeypatch) -> Path:
    """A folder of two tasks, in the present folder."""
    monkeypatch.chdir(tmp_path)
    lines = "".join(json.dumps({"sentence": f"text {n}", "label": n % 2}) + "\n" for n in range(20))
    for task in ("cola", "rte"):
        (tmp_path / "glue" / task).mkdir(parents=True)
        for part in ("train", "valid"):
            (tmp_path / "glue" / task / f"{part}.jsonl").write_text(lines)
    return tmp_path


def test_a_grid_is_one_array_with_a_file_of_results_each(glue, fake_slurm, capsys):
    fake_slurm("sbatch", "Submitted batch job 77\n")
    assert main(["--finetune", "--gpus_per_node", "1", "--time", "60", *SWEEP, "--", *GIVEN]) == 0
    shown = capsys.readouterr().out
    assert "a job array of 12 runs, each of 1 rank" in shown
    assert re.search(r"\n5 +finetune-only=cola-learning_rates=1e-4-seed=2 +cola +1e-4 +2\n", shown)
    assert f"join    python evaluation/finetune_grid.py {glue}/grid/finetune*.json --output {glue}/grid.json" in shown
    script = (fake_slurm.folder / "script").read_text()
    assert "#SBATCH --array=0-11%12\n" in script
    assert "#SBATCH --gpus-per-node=1\n" in script
    assert "requeue.py" not in script  # which resumes training
    [folder] = (glue / "grid" / ".jobs").iterdir()
    job = Job.load(folder, read_run)
    assert len({task.name for task in job.tasks}) == 12
    called = pickle.loads((folder / "77_5_submitted.pkl").read_bytes()).function
    target = f"{glue}/grid/finetune-only=cola-learning_rates=1e-4-seed=2.json"
    assert (type(called), called.folder, called.progress) == (FinetuneJob, str(glue), target.removesuffix(".json"))
    assert called.arguments == [
        *GIVEN, "--num_seeds=1", "--only=cola", "--learning_rates=1e-4", "--seed=2", f"--output={target}",
        f"--progress={target.removesuffix('.json')}",
    ]  # fmt: skip
    options = finetune.parse_arguments(called.arguments)
    settings = finetune.make_settings(options)
    assert (options.only, str(options.output), settings.num_seeds, settings.seed) == (["cola"], target, 1, 2)
    assert settings.learning_rates == (1e-4,)
    (folder / "77_3_0_result.pkl").write_bytes(pickle.dumps(("success", "finished")))
    (folder / "77_4_0_result.pkl").write_bytes(pickle.dumps(("error", "x\nslurm.grid.FinetuneFailed: it ended\n")))
    states = {report.task.index: (report.state, report.reason) for report in job.reports()}
    assert (states[3][0], states[4]) == ("finished", ("failed", "it ended"))


def test_in_a_job_the_command_runs_where_it_was_submitted(tmp_path, monkeypatch):
    calls = []
    monkeypatch.chdir(ROOT)  # put back in the end
    monkeypatch.setattr(finetune, "main", lambda arguments: calls.append((arguments, Path.cwd())) or len(calls) - 1)
    job = FinetuneJob(["runs/a"], str(tmp_path / "done"), str(tmp_path))
    assert job() == "finished"
    with pytest.raises(FinetuneFailed, match="exit code 1; the log says why"):
        job()
    assert calls == [(["runs/a"], tmp_path)] * 2


def test_what_was_stopped_goes_on_to_the_same_results(glue, monkeypatch, capsys):
    """Stopped after every epoch, of the search and of the last training, each time in a new process."""
    make_checkpoint(glue / "run", random_model("gpt-bert"))
    rates = ["--learning_rates", "1e-3", "3e-3", "--epochs", "2", "--num_seeds", "1", "--device", "cpu"]
    command = ["run", "--tasks", "glue", *rates, "--output"]
    epochs, left = [], [99]

    def counted(self, *given, real=Finetuner.predict):
        if left[0] == 0:
            raise KeyboardInterrupt  # upon which a command ends
        left[0] -= 1
        epochs.append(1)
        return real(self, *given)

    def results(file: str) -> dict[str, Any]:
        found = json.loads(Path(file).read_text())
        return {**found, "tasks": {name: {**of, "seconds": 0} for name, of in found["tasks"].items()}}

    monkeypatch.setattr(Finetuner, "predict", counted)
    monkeypatch.setattr(finetune_progress, "SECONDS_BETWEEN", 0.0)
    assert finetune.main([*command, "whole.json"]) == 0
    whole, stops = len(epochs), 0
    while (left := [1]) and finetune.main([*command, "parts.json", "--progress", "done"]) != 0:
        stops += 1
    assert (len(epochs) - whole, stops) == (whole, whole - 1)
    assert results("parts.json") == results("whole.json")
    assert not Path("done").exists()
    left = [1]
    finetune.main([*command, "parts.json", "--progress", "done"])
    assert finetune.main([*command, "parts.json", "--progress", "done", "--seed", "3"]) == 2
    assert "it is of other settings, tasks or models; delete it" in capsys.readouterr().err


def test_a_job_at_its_time_limit_goes_on_unless_starts_bring_nothing(tmp_path, monkeypatch):
    """What submitit does with it: pickle what `checkpoint` gives, and call that in the next start."""
    monkeypatch.chdir(ROOT)
    done = tmp_path / "done" / "done.json"
    done.parent.mkdir()
    kept = iter([10, 0, 20, 0, 0])  # when, in nanoseconds, each start keeps something

    def main(_: list[str]) -> int:
        if at := next(kept):
            done.touch()
            os.utime(done, ns=(at, at))
        return 0

    monkeypatch.setattr(finetune, "main", main)
    job = FinetuneJob([], str(done.parent), str(tmp_path))
    for fruitless in (0, 1, 0, 1):
        job()
        job = pickle.loads(pickle.dumps(job.checkpoint().function))
        assert job.fruitless == fruitless
    job()
    with pytest.raises(FinetuneFailed, match="2 starts did not get through an epoch: give a longer --time"):
        job.checkpoint()


def test_the_same_without_a_cluster(glue, capsys):
    assert main(["--finetune", "--local", "--dry_run", *SWEEP[:2], "--", *GIVEN, "--num_seeds=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith(
        f"{ROOT}/evaluation/finetune.py {' '.join(GIVEN)} --num_seeds=2 --only=rte "
        f"--output={glue}/grid/finetune-only=rte.json --progress={glue}/grid/finetune-only=rte"
    )
    assert not (glue / "grid").exists()


@pytest.mark.parametrize(
    ("job", "given", "words"),
    [
        (SWEEP, [*GIVEN[:-2]], "--output is missing: with --finetune give a folder"),
        (SWEEP, [*GIVEN[:-1], "x.json"], "--output is x.json: with --finetune give a folder"),
        (["--sweep", "only=cola,mnli"], GIVEN, "--only names mnli: the tasks in glue are cola, rte"),
        (["--sweep", "learning_rates=3e-5,7"], GIVEN, "--learning_rates has 7"),
        (["--sweep", "output=a,b"], GIVEN, "--sweep output: files of results are named by the swept values"),
        (["--gpus_per_node", "4", *SWEEP], GIVEN, "--finetune runs on one device, and --nodes is 1 with 4 tasks"),
        (SWEEP, [*GIVEN, "--predictions", "p"], "--predictions goes with one model for each task"),
    ],
)
def test_a_grid_is_refused_before_it_waits_in_a_queue(glue, capsys, job, given, words):
    assert words in refusal(capsys, main, ["--finetune", "--dry_run", *job, "--", *given])
