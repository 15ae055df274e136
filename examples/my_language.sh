#!/usr/bin/env bash
# My language: from 1 to 50 million words of text to a published model with its ledger, on one GPU with 24 GB, in an evening.
#
#   examples/my_language.sh TEXTS CODE OUTPUT [flags of train_single_gpu.py, which win over those below]
#   examples/my_language.sh texts/ eu out                        # a folder of .txt, .jsonl, .parquet, ...
#   examples/my_language.sh hf://datasets/NAME/data/*.parquet eu out
#   PAIRS=pairs/ examples/my_language.sh texts/ eu out           # and its grammar, by minimal pairs of that language
#
# TEXTS is whatever tokenize_corpus.py reads (preprocessing/README.md), CODE the language's ISO 639 code. In the
# environment: VOCABULARY (8192; for less than 5 million words rather 4096, for more than 30 million 16384), EPOCHS (10),
# MODEL (configs/small_no_dropout.json, 30 million parameters), LICENSE of the card, PAIRS, PYTHON. The same command
# again continues.
#
# What to expect, by what was measured on 10 million words of English (benchmarks/README.md): ten epochs are 162 million
# tokens, of which an H200 takes about 1 million a second; by its arithmetic a consumer card of a fifth of that speed needs
# a quarter of an hour, and for 50 million words a little over an hour. Held-out loss ends near 2.6 masked and 3.1 causal,
# grammar (BLiMP) near 70 % where guessing has 50 %. More epochs help masked rows long after causal ones have had enough.
set -euo pipefail
suite=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -ge 3 ] || { echo "usage: $0 TEXTS CODE OUTPUT [flags of train_single_gpu.py]" >&2; exit 2; }
texts=$1 code=$2 out=$3
shift 3
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$suite/.venv/bin/python" ] || PYTHON=$suite/.venv/bin/python
fi
export PYTHON MODEL="${MODEL:-$suite/configs/small_no_dropout.json}"

# 1. Vocabulary, with a table of tokens a word (above 2 the vocabulary is small for the language), token shards and a model
#    of that vocabulary.
"$suite/examples/prepare.sh" "$texts" "$out" --report "$out/vocabulary.json"

# 2. Training: masked and causal rows one to one, so many epochs, a checkpoint for good after each.
"$PYTHON" "$suite/train_single_gpu.py" --recipe "$suite/configs/recipes/ten_epochs.json" --max_epochs "${EPOCHS:-10}" \
    --train_path "$out/shards/train" --valid_path "$out/shards/validation" --config_file "$out/model.json" \
    --tokenizer_path "$out/tokenizer.json" --output_dir "$out/runs" --name "$code" \
    --save_epochs "1..${EPOCHS:-10}/1" --save_weights_only "$@"

# 3. What it has learnt, by the averaged weights, and the folder to publish: each epoch is a revision.
run=$out/runs/$code
"$PYTHON" "$suite/evaluation/perplexity.py" "$run" --ema --data "$out/shards/validation" --output "$out/perplexity.json"
[ -z "${PAIRS:-}" ] || "$PYTHON" "$suite/evaluation/minimal_pairs.py" "$run" --ema --data "$PAIRS" --output "$out/pairs.json"
[ -e "$out/published" ] || "$PYTHON" "$suite/export/to_huggingface.py" "$run" "$out/published" --ema --all_checkpoints \
    --results "$out/perplexity.json" ${PAIRS:+"$out/pairs.json"} --language "$code" ${LICENSE:+--license "$LICENSE"}
echo "Look at $run/report.html and $out/published/README.md, the model card; --push publishes it (export/README.md)"
