"""What sentence-transformers reads beside an exported model, so that the folder is one of its models: mean pooling."""

from __future__ import annotations

import json
import re
from pathlib import Path

# The names of sentence-transformers 2 to 5, which newer versions take as well.
_POOLING = "1_Pooling"
_MODULES = ("Transformer", ""), ("Pooling", _POOLING)


_USE = """
## Sentence embeddings

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{place}", trust_remote_code=True)  # the mean of the hidden states
```

They are those of pretraining, which nothing has made similar where meanings are: train them first.
"""


def write_sentence_files(folder: Path, place: str) -> None:
    """modules.json and what it names: the hidden states of all tokens but padding, `<s>` included, are averaged.

    The model card calls the folder `place` and gets a tag by which the Hub knows such models. Texts are cut where the
    folder's tokenizer says, not at max_position_embeddings, beyond which these models go on.
    """
    width = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    longest = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["model_max_length"]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (name, path) in enumerate(_MODULES)
    ]
    contents = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": longest, "do_lower_case": False},
        f"{_POOLING}/config.json": {"word_embedding_dimension": width, "pooling_mode_mean_tokens": True},
        "config_sentence_transformers.json": {
            "prompts": {},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    }
    card = (folder / "README.md").read_text(encoding="utf-8")
    card = re.sub(r"(?<=\ntags:\n)(\s*- )", r'\1"sentence-transformers"\n\1', card, count=1) + _USE.format(place=place)
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / _POOLING).mkdir()
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
