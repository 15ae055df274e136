#!/usr/bin/env python3
"""Python for jobs of tests (PYTHON=...): runs a script like python itself, slowly, and breaks it where a test says so.

TEST_STEP_SECONDS: pause in each training step. TEST_RAISE, TEST_KILL: RANK:STEP at which that rank raises an error or
kills itself. TEST_CRASH, TEST_DEVICE: RANK:STEP at which, at the job's first start it kills itself, or at its first two
meets an error of its GPU. TEST_LAYOUT: a folder to which each rank writes its environment. Other scripts run unchanged.
"""

import dataclasses
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def sabotage() -> None:
    """Change the training step as the variables say."""
    import train_single_gpu
    from training.environment import read_environment

    environment, pause = read_environment(os.environ), float(os.environ.get("TEST_STEP_SECONDS", "0"))
    if "TEST_LAYOUT" in os.environ:
        layout = {**dataclasses.asdict(environment), "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
        (Path(os.environ["TEST_LAYOUT"]) / f"{environment.rank}.json").write_text(json.dumps(layout))
    train_step = train_single_gpu.train_step

    def step(state, *arguments):
        time.sleep(pause)
        here = f"{environment.rank}:{state.step + 1}"
        if os.environ.get("TEST_RAISE") == here:
            raise ZeroDivisionError("an error of rank 1's own")
        if os.environ.get("TEST_DEVICE") == here and environment.restart_count < 2:
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        crashes = os.environ.get("TEST_CRASH") == here and environment.restart_count == 0
        if crashes or os.environ.get("TEST_KILL") == here:
            os.kill(os.getpid(), signal.SIGKILL)
        return train_step(state, *arguments)

    train_single_gpu.train_step = step


if __name__ == "__main__":
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    if Path(script).name == "train_multi_gpu.py":
        from training.preemption import early_signals

        early_signals()  # as the script itself does first
        sabotage()
    runpy.run_path(script, run_name="__main__")
