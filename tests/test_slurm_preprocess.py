"""slurm/preprocess.sbatch through a real SLURM."""

import pytest
from helpers.slurm_cluster_fixture import Cluster
from helpers.tiny_corpora import ROOT, contents, make_corpus, make_tokenizer, tokenize


@pytest.mark.slurm
def test_array_makes_the_shards_of_one_process(cluster: Cluster, tmp_path):
    """Three tasks whose numbers neither begin at 0 nor follow each other, submitted from a folder with a space in its
    name, which the paths are relative to; then the same array again."""
    folder = tmp_path / "my corpora"
    (folder / "in").mkdir(parents=True)
    make_corpus(folder / "in")
    tokenizer_path = make_tokenizer(folder)
    tokenize(folder / "in", tmp_path / "whole", tokenizer_path, 0.1, shard_size=5000)
    flags = ["--input", "in", "--output", "out", "--tokenizer_path", tokenizer_path.name]
    flags += ["--validation_fraction", "0.1", "--shard_size", "5000"]
    options = ("--array=4-8:2", "--cpus-per-task=2")
    for attempt in range(2):
        job = cluster.sbatch(ROOT / "slurm" / "preprocess.sbatch", *flags, options=options, cwd=folder)
        cluster.wait(job, "COMPLETED")
        output = cluster.output(job)
        assert contents(folder / "out") == contents(tmp_path / "whole")
        assert output.count("is complete already, from the same inputs and options") == 3 * attempt
        if attempt == 0:
            assert output.count("train: ") == 1, output
            assert output.count("whoever completes the last merges them") == 2, output
