#!/usr/bin/env bash
# From a trained model to scores on tasks, and to a folder that anybody loads with transformers.
#
#   examples/finetune_and_publish.sh MODEL TASKS OUTPUT [flags of evaluation/finetune.py]
#   examples/finetune_and_publish.sh out/runs/own glue/ published
#   PUSH=you/your-model examples/finetune_and_publish.sh out/runs/own glue/ published     # and upload it
#
# MODEL is a run folder or a checkpoint; TASKS a folder of NAME/train.jsonl and NAME/valid.jsonl (evaluation/README.md). In
# the environment: PUSH, LICENSE (apache-2.0) and LANGUAGE (en) for the model card, PYTHON.
set -euo pipefail
suite=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ $# -ge 3 ] || { echo "usage: $0 MODEL TASKS OUTPUT [flags of evaluation/finetune.py]" >&2; exit 2; }
model=$1 tasks=$2 out=$3
shift 3
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x "$suite/.venv/bin/python" ] || PYTHON=$suite/.venv/bin/python
fi
mkdir -p "$out"

# 1. Each task fine-tuned with several learning rates and seeds; settings are chosen on a part of train alone.
"$PYTHON" "$suite/evaluation/finetune.py" "$model" --ema --tasks "$tasks" --output "$out/tasks.json" "$@"

# 2. The averaged weights as a folder of transformers: code, weights, tokenizer, model card with these scores.
"$PYTHON" "$suite/export/to_huggingface.py" "$model" "$out/model" --ema \
    --results "$out/tasks.json" --license "${LICENSE:-apache-2.0}" --language "${LANGUAGE:-en}" ${PUSH:+--push "$PUSH"}

# 3. What a stranger does with it, without this repository.
"$PYTHON" - "$out/model" <<'END'
import sys
from transformers import AutoModelForMaskedLM, AutoTokenizer, pipeline
folder = sys.argv[1]
model = AutoModelForMaskedLM.from_pretrained(folder, trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
for guess in pipeline("fill-mask", model=model, tokenizer=tokenizer)("The <mask> was not there.", top_k=3):
    print(f"{guess['score']:.3f}  {guess['sequence']}")
END
echo "Scores: $out/tasks.json. Model and its card: $out/model"
