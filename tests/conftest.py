"""Settings for every test: two cores, no network, and the machine's hardware decides what can run."""

import os

# Before torch is imported, here and in every process that a test starts: with several workers and several ranks on a
# few cores, more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Hundreds of processes import this code: they compile it once, whatever the shell of the tests says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["WANDB_MODE"] = "offline"
os.environ["HF_HUB_OFFLINE"] = "1"

import shlex
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch
from helpers.slurm_cluster_fixture import CannotRun, Cluster, obstacle

if TYPE_CHECKING:
    from helpers.slurm_jobs import Jobs
    from helpers.slurm_reference import Reference

# No deadline: how long an example takes says more about what else the machine does than about the code.
# The same examples in every run, so that CI is no lottery; with FUZZ_EXAMPLES (of some tests their number) others.
hypothesis.settings.register_profile("tests", deadline=None, derandomize="FUZZ_EXAMPLES" not in os.environ)
hypothesis.settings.load_profile("tests")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# A shell's background jobs ignore Ctrl-C, and so do the programs they start: those that tests start shall not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # nohup's, which is inherited likewise
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# Continuous integration sets it: there, a SLURM that cannot be started is a failure.
REQUIRE_SLURM = os.environ.get("REQUIRE_SLURM") == "1"
SHARED_FILES = ("test_slurm_ranks.py", "test_slurm_restarts.py")  # whose tests use the same jobs on SLURM
# Fixtures that train; what takes them is marked slow.
SLOW_FIXTURES = {
    ("test_world_size.py", "folder"),
    ("test_gradients.py", "folder"),
    ("test_metric_logger.py", "wandb_run"),
    ("test_samples.py", "real_run"),
    ("test_resume.py", "whole"),
    ("test_rank_checks.py", "outcomes"),
    ("test_export_import.py", "trained"),
}
LONGEST_PREFIX = 60  # of slurm_cluster.sh, which makes unix sockets in that folder


@pytest.hookimpl(tryfirst=True)  # before -m chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what this machine cannot run; `make test-gpu` refuses to start without a CUDA device."""
    lacking = {}
    if not torch.cuda.is_available():
        lacking["gpu"] = "needs a CUDA device"
    if (reason := obstacle()) and not REQUIRE_SLURM:
        lacking["slurm"] = reason
    for item in items:
        if any((item.path.name, name) in SLOW_FIXTURES for name in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
        for mark, reason in lacking.items():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile: whole files for the workers where tests share jobs, single tests elsewhere.

    Some tests on SLURM take a minute and others a second: the workers shall end together.
    """
    from xdist.scheduler import LoadFileScheduling

    class FilesAndTests(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return file if file.endswith(SHARED_FILES) else nodeid

    return FilesAndTests(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say why tests on SLURM were skipped: whoever asks for them wants to know without -rs."""
    skipped = [report for report in terminalreporter.stats.get("skipped", ()) if "slurm" in report.keywords]
    for reason in sorted({report.longrepr[2] for report in skipped}):
        terminalreporter.write_line(f"tests on SLURM: {reason}")


# For the tests of tokenize_corpus. tokenizing.py is imported in them: it needs packages that a GPU machine may lack.


@pytest.fixture
def cheap_tokenizing(tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For some hundred runs of tokenize_corpus: the tokenizer is loaded once, and nothing waits for the disk."""
    import data.shards
    from preprocessing import resumable_output, tokenize_pool
    from preprocessing.tokenizer import load_tokenizer

    tokenizer, digest = load_tokenizer(tokenizer_path), data.shards.tokenizer_hash(tokenizer_path)
    for module in (resumable_output, tokenize_pool):
        monkeypatch.setattr(module, "load_tokenizer", lambda path: tokenizer)
    monkeypatch.setattr(resumable_output, "tokenizer_hash", lambda path: digest)
    monkeypatch.setattr(data.shards.os, "fsync", lambda descriptor: None)  # slow, and nothing here loses its power


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.tiny_corpora import make_tokenizer

    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers.tiny_corpora import make_corpus

    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a few documents, pieces of documents of a few lines, small slices."""
    from preprocessing import readers, slices

    monkeypatch.setattr(readers, "CHUNK_BYTES", 3000)
    monkeypatch.setattr(readers, "DOCUMENT_BYTES", 4000)
    monkeypatch.setattr(slices, "SLICE_TOKENS", 2000)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, tokenizer_path: Path) -> Path:
    """9 MB in three files (enough to be caught in the middle) and what becomes of them."""
    from helpers.tiny_corpora import make_texts, tokenize

    folder = tmp_path_factory.mktemp("large")
    (folder / "in").mkdir()
    text = "\n\n".join(make_texts(7000, seed=3))
    for number in range(3):
        (folder / "in" / f"{number}.txt").write_text((text + f"\n\n{number}\n\n") * 3)
    tokenize(folder / "in", folder / "whole", tokenizer_path, 0.1, shard_size=200_000)
    return folder


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch):
    """Commands of SLURM that print what a test says; sbatch also keeps its script and its environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def command(name: str, output: str = "", error: str = "", code: int = 0) -> None:
        lines = ["#!/bin/sh", f"printf %s {shlex.quote(output)}", f"printf %s {shlex.quote(error)} >&2"]
        if name == "sbatch":
            lines.append(f'cp "$1" {folder}/script; env > {folder}/environment')
        (folder / name).write_text("\n".join([*lines, f"exit {code}\n"]))
        (folder / name).chmod(0o755)

    for name in ("squeue", "scontrol"):
        command(name, error="slurm_load_jobs error: Invalid job id specified\n", code=1)
    command("srun")
    command.folder = folder
    return command


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A running SLURM of four nodes with four pretended GPUs each, idle when a test begins (slurm_cluster_fixture.py).

    Every test starts with its own `cluster.folder`; jobs that it leaves are cancelled, and nodes repaired.
    """
    prefix = tmp_path_factory.mktemp("slurm")
    if len(str(prefix)) > LONGEST_PREFIX:
        prefix = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    running = Cluster(prefix)
    reason = obstacle()
    if reason is None:
        try:
            running.start()
        except CannotRun as error:
            reason = str(error)
    if reason is not None and REQUIRE_SLURM:
        pytest.fail(f"REQUIRE_SLURM=1, but {reason}", pytrace=False)
    if reason is not None:
        pytest.skip(reason)  # found only by trying: apt without a network, a container without namespaces
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> "Reference":
    """Inputs of a short run, and the run of one process; workers of pytest-xdist share them."""
    from helpers.slurm_reference import Reference

    base = tmp_path_factory.getbasetemp()
    return Reference((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "reference")


@pytest.fixture(scope="module")
def jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory, reference: "Reference") -> "Jobs":
    """Training jobs that the tests of a file share."""
    from helpers.slurm_jobs import Jobs

    return Jobs(cluster, tmp_path_factory.mktemp("slurm"), reference)


@pytest.fixture(autouse=True)
def _use_of_the_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Around every test that uses `cluster`."""
    if "cluster" not in request.fixturenames:
        yield
        return
    running: Cluster = request.getfixturevalue("cluster")
    running.folder = request.getfixturevalue("tmp_path")
    yield
    running.drain()
