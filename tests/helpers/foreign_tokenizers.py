"""Tokenizers in the layouts of well-known models, trained on a small text: what their files say, with other words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from helpers.tiny_runs import make_texts, train_on

_BYTES = pre_tokenizers.ByteLevel.alphabet()
_VOCABULARY = 320


def _learn(tokenizer: Tokenizer, kind: type, special: list[str], size: int = _VOCABULARY, **options: Any) -> Tokenizer:
    trainer = kind(vocab_size=size, special_tokens=special, show_progress=False, **options)
    tokenizer.train_from_iterator(make_texts(300, seed=1), trainer)
    return tokenizer


def _byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _learn(tokenizer, trainers.BpeTrainer, special, initial_alphabet=_BYTES)


def _ids(tokenizer: Tokenizer, *tokens: str) -> list[tuple[str, int]]:
    return [(token, tokenizer.token_to_id(token)) for token in tokens]


def _bert() -> tuple[Tokenizer, dict[str, Any]]:
    unused = [f"[unused{number}]" for number in range(20)]  # ordinary entries: BERT's file does not mark them
    words = ["[PAD]", *unused, "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    _learn(tokenizer, trainers.WordPieceTrainer, words, initial_alphabet=list("abcdefghijklmnopqrstuvwxyz.,"))
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if "unused" not in token["content"]]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    (cls, sep) = _ids(tokenizer, "[CLS]", "[SEP]")
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    tokenizer.enable_truncation(8)  # as many published files have it
    tokenizer.enable_padding(length=8, pad_token="[PAD]")
    return tokenizer, {}


def _roberta() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(["<s>", "<pad>", "</s>", "<unk>"])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])  # the last id
    (bos, eos) = _ids(tokenizer, "<s>", "</s>")
    tokenizer.post_processor = processors.RobertaProcessing(eos, bos)
    return tokenizer, {}


def _gpt2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level([])
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    end = "<|endoftext|>"
    return tokenizer, {"special_tokens_map.json": {"bos_token": end, "eos_token": end, "unk_token": end}}


def _llama2() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    _learn(tokenizer, trainers.BpeTrainer, ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", _ids(tokenizer, "<s>"))
    marked = {"content": "</s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return tokenizer, {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": marked, "pad_token": None}}


def _llama3() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level([])
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(30)]
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", *reserved])
    begin = "<|begin_of_text|>"
    template = processors.TemplateProcessing(f"{begin} $A", f"{begin} $A {begin} $B", _ids(tokenizer, begin))
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    return tokenizer, {}


def _t5() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    _learn(tokenizer, trainers.UnigramTrainer, ["<pad>", "</s>", "<unk>"], size=80, unk_token="<unk>")
    tokenizer.add_special_tokens([f"<extra_id_{number}>" for number in reversed(range(20))])
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", "$A </s> $B </s>", _ids(tokenizer, "</s>"))
    return tokenizer, {"tokenizer_config.json": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}}


def _modernbert() -> tuple[Tokenizer, dict[str, Any]]:
    tokenizer = _byte_level(["|||IP_ADDRESS|||", "<|padding|>"])
    tokenizer.add_tokens([AddedToken(" " * 8, normalized=True, special=False)])
    names = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
    tokenizer.add_special_tokens(["<|endoftext|>", *names, *(f"[unused{number}]" for number in range(5))])
    ends = _ids(tokenizer, "[CLS]", "[SEP]")
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, ends)
    keys = ("unk", "cls", "sep", "pad", "mask")
    roles = {f"{key}_token": name for key, name in zip(keys, names, strict=True)}
    return tokenizer, {"special_tokens_map.json": roles}


def _ours() -> tuple[Tokenizer, dict[str, Any]]:
    return train_on(" ".join(make_texts(300, seed=1)), _VOCABULARY), {}


LAYOUTS: dict[str, Callable[[], tuple[Tokenizer, dict[str, Any]]]] = {
    "bert": _bert,
    "roberta": _roberta,
    "gpt2": _gpt2,
    "llama2": _llama2,
    "llama3": _llama3,
    "t5": _t5,
    "modernbert": _modernbert,
    "ours": _ours,
}


def write_tokenizer(name: str, folder: Path) -> Path:
    """A folder as transformers has it, with a tokenizer in the layout `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, files = LAYOUTS[name]()
    tokenizer.save(str(folder / "tokenizer.json"))
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content))
    return folder
