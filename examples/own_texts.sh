#!/usr/bin/env bash
# One GPU and texts of your own: a tokenizer, shards, a hybrid model, and what it has learnt.
#
#   examples/own_texts.sh TEXTS OUTPUT [flags of train_single_gpu.py, which win over those below]
#   examples/own_texts.sh texts/ out                                      # the recipe that benchmarks/README.md measured
#   examples/own_texts.sh texts/ out --local_batch_size 64                # the same run on a GPU with less memory
#   MODEL=configs/tiny.json examples/own_texts.sh texts/ out --device cpu --global_batch_size 32 --max_steps 200
#
# TEXTS is a file, folder or glob of .txt, .jsonl, .parquet, ... (preprocessing/README.md). In the environment: MODEL, a
# model configuration; VOCABULARY, entries of the tokenizer; PYTHON. The same command again continues where it stopped.
set -euo pipefail
suite=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -ge 2 ] || { echo "usage: $0 TEXTS OUTPUT [flags of train_single_gpu.py]" >&2; exit 2; }
texts=$1 out=$2
shift 2
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$suite/.venv/bin/python" ] || PYTHON=$suite/.venv/bin/python
fi
export PYTHON

# 1. Vocabulary, token shards and a model of that vocabulary.
"$suite/examples/prepare.sh" "$texts" "$out"

# 2. Training: fifteen rows in sixteen masked, one causal.
"$PYTHON" "$suite/train_single_gpu.py" --recipe "$suite/configs/recipes/h200_8_minutes.json" \
    --train_path "$out/shards/train" --valid_path "$out/shards/validation" \
    --config_file "$out/model.json" --tokenizer_path "$out/tokenizer.json" --output_dir "$out/runs" --name own "$@"

# 3. What it has learnt, by the averaged weights.
run=$out/runs/own
"$PYTHON" "$suite/evaluation/perplexity.py" "$run" --ema --data "$out/shards/validation" --output "$out/perplexity.json"
"$PYTHON" "$suite/evaluation/fill_mask.py" "$run" --ema --text "The <mask> was not there."
"$PYTHON" "$suite/evaluation/generate.py" "$run" --ema --prompt "The" --max_new_tokens 40
echo "Look at $run/report.html"
