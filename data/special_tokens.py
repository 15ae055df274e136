"""Special tokens of any tokenizer: which one begins a text, ends it, pads, hides a word or stands for an unknown one.

These five roles are read from the tokenizer's own files, in this order: what the user names; what a shard folder's
manifest, special_tokens_map.json and tokenizer_config.json beside tokenizer.json say ([CLS] begins and [SEP] ends where
there is no bos and eos of its own: BERT); the post-processor and the model's unknown token; names in use. One token may
begin and end texts (GPT-2's <|endoftext|>).

"Special" is a set of ids, which are never masked, drawn or written: the roles' tokens, those that the tokenizer marks
as special, and ids that no token has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from data.shards import MANIFEST_NAME, ShardError, tokenizer_hash

ROLES = ("bos", "eos", "pad", "mask", "unk")
OURS = "bos=<s>,eos=</s>,pad=<pad>,mask=<mask>,unk=<unk>"  # of preprocessing/train_tokenizer.py
_NAMES = {  # the first that the vocabulary has
    "bos": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|endoftext|>"),
    "eos": ("</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|finetune_right_pad_id|>", "<|padding|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
    "unk": ("<unk>", "[UNK]"),
}
_KEYS = {"bos": ("bos_token", "cls_token"), "eos": ("eos_token", "sep_token")}  # in Hugging Face's files; or ROLE_token
_MEANING = {"bos": "begins a text", "eos": "ends a text", "pad": "pads", "mask": "hides a word", "unk": "is unknown"}
FLAG_HELP = (
    "tokens by role, such as bos=[CLS],eos=[SEP],pad=[PAD],mask=[MASK],unk=[UNK], where the tokenizer's own files do "
    "not tell, or tell otherwise; see preprocessing/special_tokens.py"
)
MANIFEST_KEY = "special_token_roles"  # in what a manifest says its shards were created by
_GIVEN = re.compile(rf"(?:^|,)\s*({'|'.join(ROLES)})=")


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer's special tokens. tokens, ids: by role, as far as there are any. special_ids: the set, ascending.
    vocab_size: largest id plus one. added: how many tokens the tokenizer has beyond those of its model."""

    tokens: Mapping[str, str]
    ids: Mapping[str, int]
    special_ids: tuple[int, ...]
    vocab_size: int
    added: int = 0

    def __str__(self) -> str:
        """As --special_tokens takes them."""
        return written(self.tokens)

    @property
    def ends(self) -> set[int]:
        """Ids of what stands around texts: begin, end and padding."""
        return {number for role, number in self.ids.items() if role in ("bos", "eos", "pad")}

    @property
    def one_boundary(self) -> bool:
        """Whether one token begins and ends texts: the end of a document is then the beginning of the next."""
        return "bos" in self.ids and self.ids["bos"] == self.ids.get("eos")

    def require(self, roles: Iterable[str], where: str) -> None:
        """Raises ShardError, one sentence, where there is no token for one of `roles`. where: names the tokenizer."""
        missing = [role for role in ROLES if role in roles and role not in self.ids]
        if missing:
            wanted = ", ".join(f"{role} ({_MEANING[role]})" for role in missing)
            named = ",".join(f"{role}=TOKEN" for role in missing)
            raise ShardError(
                f"{where} has no token for {wanted}; name tokens of its vocabulary with --special_tokens {named} (bos "
                "and eos may be the same), or append new ones: python preprocessing/special_tokens.py TOKENIZER "
                f"--output FOLDER --add {' '.join(missing)}"
            )


def plain(tokenizer: Tokenizer) -> Tokenizer:
    """`tokenizer`, from now on as in training: special tokens in a text are text, nothing is padded, nothing is cut."""
    tokenizer.encode_special_tokens = True
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenizer_file(path: str | Path) -> Path:
    """tokenizer.json itself, of a path that may name the folder it lies in."""
    return Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)


def read_special_tokens(path: str | Path, given: str = "", below: int = 0) -> SpecialTokens:
    """`special_tokens` of a tokenizer.json and the files beside it. Raises ShardError, one sentence."""
    file = tokenizer_file(path)
    tokenizer_hash(file)  # its errors are the clear ones
    text = file.read_text(encoding="utf-8")
    return special_tokens(text, given, below, beside=roles_beside(file.parent), where=f"the tokenizer {path}")


def special_tokens(
    text: str, given: str = "", below: int = 0, *, beside: Mapping[str, str] | None = None, where: str = "the tokenizer"
) -> SpecialTokens:
    """The special tokens of a tokenizer.json.

    text: its content. given: as --special_tokens has it, such as "bos=[CLS],mask=[MASK]". below: where above 0, the set
    is that of the ids below it, whatever the tokenizer marks. beside: roles from the files around it; those that the
    vocabulary lacks do not count. where: names the tokenizer in errors. Raises ShardError, one sentence, where `given`
    cannot be read or names a token that there is not."""
    content = json.loads(text)
    found = content["model"].get("vocab") or {}  # of Unigram a list of tokens with their scores
    vocabulary = dict(found) if isinstance(found, dict) else {token: n for n, (token, _) in enumerate(found)}
    own = len(vocabulary)
    vocabulary |= {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    named = parse_roles(given)
    for role, token in named.items():
        if token not in vocabulary:
            raise ShardError(f"--special_tokens {role}={token}: {where} has no such token; give one of its vocabulary")
    known = (named, beside or {}, _of_processor(content), _of_model(content))
    tokens = {}
    for role in ROLES:
        found = [source[role] for source in known if source.get(role) in vocabulary]
        found += [name for name in _NAMES[role] if name in vocabulary]
        if found:
            tokens[role] = found[0]
    ids = {role: vocabulary[token] for role, token in tokens.items()}
    _check_mask(tokens, ids, where)
    size = max(vocabulary.values(), default=-1) + 1
    nothing = set(range(size)).difference(vocabulary.values()) if size > len(vocabulary) else set()
    marked = {token["id"] for token in content.get("added_tokens") or [] if token["special"]}
    special = set(range(below)) if below else marked | set(ids.values())
    for role, number in ids.items():
        if number not in special and role != "unk":
            raise ShardError(
                f"--n_special_tokens is {below} but {tokens[role]} has id {number} in {where}; give at least "
                f"{number + 1}, or leave the flag out: the set is then that of the tokens it marks as special"
            )
    return SpecialTokens(tokens, ids, tuple(sorted(special | nothing)), size, len(vocabulary) - own)


def parse_roles(text: str) -> dict[str, str]:
    """Tokens by role of "bos=[CLS],eos=[SEP]"; tokens may hold commas. Raises ShardError, one sentence."""
    pieces = _GIVEN.split(text)
    roles = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    if pieces[0].strip() or not all(roles.values()) or len(roles) < len(pieces) // 2:
        raise ShardError(
            f"--special_tokens {text!r} is not of the form ROLE=TOKEN,ROLE=TOKEN; the roles are {', '.join(ROLES)}, "
            "each at most once"
        )
    return roles


def written(tokens: Mapping[str, str]) -> str:
    """Tokens by role as `parse_roles` reads them."""
    return ",".join(f"{role}={token}" for role, token in tokens.items())


def _check_mask(tokens: Mapping[str, str], ids: Mapping[str, int], where: str) -> None:
    """A mask that means something else, too, would be read as that."""
    shared = next((role for role, number in ids.items() if role != "mask" and number == ids.get("mask")), None)
    if shared:
        raise ShardError(
            f"{where}: {tokens['mask']} is both mask and {shared}; give each its own with --special_tokens mask=TOKEN"
        )


def _of_model(content: Mapping[str, Any]) -> dict[str, str]:
    """The token for what is unknown."""
    model = content["model"]
    token, number = model.get("unk_token"), model.get("unk_id")
    if token is None and number is not None:
        token = model["vocab"][number][0]
    return {} if token is None else {"unk": token}


def _of_processor(content: Mapping[str, Any]) -> dict[str, str]:
    """Begin and end that the post-processor puts around a single text."""
    found: dict[str, str] = {}
    steps = [content.get("post_processor") or {}]
    while steps:
        step = steps.pop()
        steps += step.get("processors") or []
        if "cls" in step and "sep" in step:  # BertProcessing, RobertaProcessing
            found |= {"bos": step["cls"][0], "eos": step["sep"][0]}
        single = step.get("single") or []
        texts = [number for number, part in enumerate(single) if "Sequence" in part]
        if texts:
            names = [part["SpecialToken"]["id"] if "SpecialToken" in part else "" for part in single]
            before, after = names[: texts[0]], names[texts[-1] + 1 :]
            found |= ({"bos": before[0]} if before else {}) | ({"eos": after[-1]} if after else {})
    return found


def roles_beside(folder: Path) -> dict[str, str]:
    """Roles by the files around a tokenizer.json."""
    found: dict[str, str] = {}
    for name in ("tokenizer_config.json", "special_tokens_map.json", MANIFEST_NAME):  # the later ones win
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
            if name == MANIFEST_NAME:
                found |= parse_roles(content["created_by"].get(MANIFEST_KEY, ""))
                continue
        except (OSError, ValueError, KeyError, AttributeError):
            continue
        for role in ROLES:
            for key in reversed(_KEYS.get(role, (f"{role}_token",))):
                token = content.get(key)
                token = token.get("content") if isinstance(token, dict) else token
                if isinstance(token, str):
                    found[role] = token
    return found
