#!/usr/bin/env bash
# Preparation: texts to a vocabulary, token shards and a model of that vocabulary, as the stories on one GPU begin.
#
#   examples/prepare.sh TEXTS OUTPUT [flags of train_tokenizer.py]
#
# TEXTS is whatever tokenize_corpus.py reads (preprocessing/README.md). In the environment: MODEL, a model configuration
# (configs/small.json); VOCABULARY, entries of the tokenizer (8192); PYTHON. What is there already is kept.
set -euo pipefail
suite=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -ge 2 ] || { echo "usage: $0 TEXTS OUTPUT [flags of train_tokenizer.py]" >&2; exit 2; }
texts=$1 out=$2 PYTHON=${PYTHON:-python3}
shift 2
mkdir -p "$out"

# 1. The vocabulary, and shards of which one document in fifty is held out.
[ -f "$out/tokenizer.json" ] || "$PYTHON" "$suite/preprocessing/train_tokenizer.py" \
    --input "$texts" --output "$out/tokenizer.json" --vocab_size "${VOCABULARY:-8192}" "$@"
"$PYTHON" "$suite/preprocessing/tokenize_corpus.py" --input "$texts" --output "$out/shards" \
    --tokenizer_path "$out/tokenizer.json" --validation_fraction 0.02

# 2. The model's vocabulary is the tokenizer's, which is smaller than asked for where the texts are short.
"$PYTHON" - "${MODEL:-$suite/configs/small.json}" "$out/tokenizer.json" >"$out/model.json" <<'END'
import json, sys
from tokenizers import Tokenizer
config = json.load(open(sys.argv[1]))
print(json.dumps({**config, "vocab_size": Tokenizer.from_file(sys.argv[2]).get_vocab_size()}, indent=2))
END
