"""Sizes of a model: their checks, and their JSON files."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.cli import closest
from ops.rope_scaling import Rotary, scaling_problem

# MODULE.CLASS of each model_type, a subclass of model_protocol.PretrainingModel; model_extra.build_model imports it.
MODEL_CLASSES = {
    "gpt-bert": "model_extra.GPTBert",
    "ltg-bert": "model.LTGBert",
}


class ModelConfigError(ValueError):
    """A model configuration cannot be used; the message names the file, the key, its value and what would be right."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a model, by the names of Hugging Face's configurations. Raises ModelConfigError on impossible values.

    position_bucket_size b: the relative position tables have 2b - 1 slots; distances of max_position_embeddings - 1
    and beyond share the last one (rows may be longer). attention_probs_dropout_prob is the probability of all of
    attention's dropouts: relative embeddings, probabilities and output.
    position_embedding "rope" has no position tables: queries and keys are rotated (base rope_theta), which runs on
    plain fused attention kernels. These cannot drop probabilities by counter-based keys, so with "rope" attention
    probabilities are never dropped; all other dropouts apply.
    sliding_window w, with "rope" alone: layers 0, n, 2n, ... (n is global_attn_every_n_layers; with 0 none) attend
    their whole document, and the others tokens at most w away, on either side: transformers' ModernBertConfig.
    sliding_window, half of its local_attention; what Mistral's or Qwen's configurations call sliding_window is w + 1.
    Their base is local_rope_theta (0: rope_theta), and rope_scaling (ops/rope_scaling.py) is not for them, since
    their distances never grow.
    predict_masked_from: the state that predicts a token under bidirectional attention, "previous" (GPT-BERT, as under
    causal attention) or its "own" (BERT; a row's last target, which is no input, has none and takes the one before).
    model_type: a key of MODEL_CLASSES.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int = 512
    position_bucket_size: int = 32
    attention_probs_dropout_prob: float = 0.1
    hidden_dropout_prob: float = 0.1
    layer_norm_eps: float = 1e-5
    position_embedding: str = "relative"
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int = 0
    global_attn_every_n_layers: int = 1
    local_rope_theta: float = 0.0
    predict_masked_from: str = "previous"
    model_type: str = "gpt-bert"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_type(field.name, getattr(self, field.name), field.type)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size"):
            if getattr(self, name) < 1:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        for name in ("layer_norm_eps", "rope_theta"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.hidden_size % self.num_attention_heads:
            raise ModelConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.position_embedding not in ("relative", "rope"):
            raise ModelConfigError(f'position_embedding is "{self.position_embedding}"; choose "relative" or "rope"')
        if self.position_embedding == "rope" and self.head_dim % 2:
            raise ModelConfigError(
                f"hidden_size {self.hidden_size} over num_attention_heads {self.num_attention_heads} gives heads of "
                f'{self.head_dim} features; position_embedding "rope" needs an even number'
            )
        if self.position_bucket_size < 2:
            raise ModelConfigError(f"position_bucket_size is {self.position_bucket_size}; it must be at least 2")
        if self.max_position_embeddings < self.position_bucket_size // 2 + 2:
            raise ModelConfigError(
                f"max_position_embeddings is {self.max_position_embeddings}; with position_bucket_size "
                f"{self.position_bucket_size} it must be at least {self.position_bucket_size // 2 + 2}"
            )
        if self.predict_masked_from not in ("previous", "own"):
            raise ModelConfigError(f'predict_masked_from is "{self.predict_masked_from}"; choose "previous" or "own"')
        if self.model_type not in MODEL_CLASSES:
            choices = " or ".join(f'"{name}"' for name in MODEL_CLASSES)
            raise ModelConfigError(f'model_type is "{self.model_type}"; choose {choices}')
        self._check_rotary()

    def _check_rotary(self) -> None:
        """Raise ModelConfigError on windows and scaled positions that cannot be."""
        for name in ("sliding_window", "global_attn_every_n_layers", "local_rope_theta"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.position_embedding != "rope":
            for name, nothing in (("sliding_window", 0), ("local_rope_theta", 0), ("rope_scaling", None)):
                if getattr(self, name) != nothing:
                    raise ModelConfigError(
                        f'{name} is {getattr(self, name)!r}, which position_embedding "rope" alone knows; with '
                        f'"{self.position_embedding}" leave it out'
                    )
        if self.rope_scaling is not None and (problem := scaling_problem(self.rope_scaling)):
            raise ModelConfigError(problem)
        every, windows = self.global_attn_every_n_layers, self.sliding_window > 0
        if windows and (every == 1 or (every == 0 and self.rope_scaling is not None)):
            raise ModelConfigError(
                f"sliding_window is {self.sliding_window} and global_attn_every_n_layers {every}, "
                + ("by which every layer is global" if every == 1 else "so that rope_scaling has no layer to scale")
                + "; ModernBERT has 3, and 0 gives all layers windows"
            )
        if not windows and (every != 1 or self.local_rope_theta):
            raise ModelConfigError(
                f"global_attn_every_n_layers is {every} and local_rope_theta {self.local_rope_theta}, but "
                "sliding_window is 0, so that no layer has a window; set it, or leave them out"
            )

    @property
    def head_dim(self) -> int:
        """Features of one attention head."""
        return self.hidden_size // self.num_attention_heads

    def rotary(self, layer: int) -> Rotary:
        """Rotary positions and window of a layer, counted from 0."""
        every = self.global_attn_every_n_layers
        if self.sliding_window == 0 or (every and layer % every == 0):
            return Rotary(self.head_dim, self.rope_theta, self.rope_scaling)
        return Rotary(self.head_dim, self.local_rope_theta or self.rope_theta, None, self.sliding_window)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Configuration from its JSON object. Raises ModelConfigError on unknown, missing or impossible values."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                close = closest(key, known)
                hint = f'did you mean "{close}"?' if close else f"the keys are {', '.join(known)}"
                raise ModelConfigError(f'unknown key "{key}"; {hint}')
        for field in dataclasses.fields(cls):
            if field.default is dataclasses.MISSING and field.name not in values:
                raise ModelConfigError(f'key "{field.name}" is missing')
        return cls(**values)

    @classmethod
    def from_json(cls, path: str | Path) -> ModelConfig:
        """Configuration from a JSON file. Raises ModelConfigError, naming the file."""
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelConfigError(f"{path}: there is no such model configuration") from None
        except OSError as error:
            raise ModelConfigError(f"{path}: cannot be read ({error.strerror})") from error
        except ValueError as error:  # not JSON, or not UTF-8
            raise ModelConfigError(f"{path}: is not a JSON file ({error})") from error
        if not isinstance(values, dict):
            raise ModelConfigError(f"{path}: holds no JSON object of model sizes")
        try:
            return cls.from_dict(values)
        except ModelConfigError as error:
            raise ModelConfigError(f"{path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """All fields, as `from_dict` takes them."""
        return dataclasses.asdict(self)


def _check_type(name: str, value: Any, annotation: Any) -> None:
    expected = {"int": (int,), "float": (int, float), "str": (str,)}.get(annotation, (dict, type(None)))
    if not isinstance(value, expected) or isinstance(value, bool):
        kind = {"int": "a whole number", "float": "a number", "str": "a string"}.get(annotation, "an object")
        raise ModelConfigError(f"{name} is {value!r}; it must be {kind}")
