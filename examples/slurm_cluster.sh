#!/usr/bin/env bash
# A SLURM cluster, from a login shell: tokenising as a job array, training on many GPUs, and the scores, each job after the
# one before. Walk away: training that is preempted, loses a node or reaches its time limit saves and requeues itself.
#
#   cp slurm/site.env.example slurm/site.env        # once: what your site needs (slurm/README.md)
#   NODES=2 GPUS=4 TIME=24:00:00 examples/slurm_cluster.sh TEXTS OUTPUT [flags of train_multi_gpu.py]
#
# TEXTS and OUTPUT lie where all nodes see them. In the environment: NODES, GPUS (of a node), CPUS (of a GPU), TIME; MODEL and
# VOCABULARY (configs/base.json, 16384); TASKS of the array; PYTHON; and SBATCH_ACCOUNT and SBATCH_PARTITION, which sbatch
# reads. The same command again continues where it stopped.
set -euo pipefail
suite=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -ge 2 ] || { echo "usage: $0 TEXTS OUTPUT [flags of train_multi_gpu.py]" >&2; exit 2; }
mkdir -p "$2"
texts=$(realpath "$1") out=$(realpath "$2")
shift 2
NODES=${NODES:-1} GPUS=${GPUS:-4} CPUS=${CPUS:-8} TIME=${TIME:-24:00:00} TASKS=${TASKS:-8}
MODEL=${MODEL:-$suite/configs/base.json} VOCABULARY=${VOCABULARY:-16384}
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$suite/.venv/bin/python" ] || PYTHON=$suite/.venv/bin/python
fi
export PYTHON SUITE=$suite

submit() { # prints the id of the job that sbatch makes of its arguments
    local id
    id=$(sbatch --parsable --time="$TIME" "$@")
    echo "${id%%;*}" # "id;cluster" in a federation
}

# 1. A tokenizer, here and now: a sample of the texts is enough, and it takes minutes.
[ -f "$out/tokenizer.json" ] || "$PYTHON" "$suite/preprocessing/train_tokenizer.py" \
    --input "$texts" --output "$out/tokenizer.json" --vocab_size "$VOCABULARY"

# 2. Shards by a job array; the same bytes as from one process.
shards=$(submit --array="0-$((TASKS - 1))" --cpus-per-task="$CPUS" --output="$out/shards-%A_%a.log" \
    "$suite/slurm/preprocess.sbatch" --input "$texts" --output "$out/shards" \
    --tokenizer_path "$out/tokenizer.json" --validation_fraction 0.02)

# 3. Training, one task a GPU. The doctor looks at nodes, GPUs, network, disk and data first, and a FAIL ends the job.
training=$(submit --dependency="afterok:$shards" --nodes="$NODES" --gpus-per-node="$GPUS" \
    --ntasks-per-node="$GPUS" --cpus-per-task="$CPUS" --output="$out/training-%j.log" \
    "$suite/slurm/train.sbatch" --doctor \
    --train_path "$out/shards/train" --valid_path "$out/shards/validation" --config_file "$MODEL" \
    --tokenizer_path "$out/tokenizer.json" --output_dir "$out/runs" --name cluster "$@")

# 4. When it has finished: held-out perplexity by the averaged weights. report.html is in the run folder by then.
scores=$(submit --dependency="afterok:$training" --cpus-per-task="$CPUS" --output="$out/scores-%j.log" \
    --wrap "'$PYTHON' '$suite/evaluation/perplexity.py' '$out/runs/cluster' --ema \
        --data '$out/shards/validation' --output '$out/perplexity.json'")

echo "jobs: shards $shards, training $training, scores $scores"
echo "watch: squeue --job $shards,$training,$scores; tail -F $out/training-$training.log"
echo "stop and save: scancel --signal=INT $training; then this command again continues"
