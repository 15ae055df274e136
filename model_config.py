"""Sizes and shape of a model: the presets of families, checks, and JSON files."""

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
    "llama": "model_extra.GPTBert",
    "qwen3": "model_extra.GPTBert",
    "eurobert": "model_extra.GPTBert",
    "modernbert": "model_extra.GPTBert",
    "neobert": "model_extra.GPTBert",
    "ltg-bert": "model.LTGBert",
}

# What a key is that a configuration leaves out: LTG-BERT's, and by model_type what differs from it.
_LTG_BERT: dict[str, Any] = {
    "position_embedding": "relative",
    "attention_probs_dropout_prob": 0.1,
    "hidden_dropout_prob": 0.1,
    "norm": "layer_norm",
    "norm_weight": False,
    "norm_bias": False,
    "norm_position": "pre",
    "embedding_norm": True,
    "first_norm": True,
    "context_norm": True,
    "mlp_norm": True,
    "qk_norm": False,
    "attention_gate": False,
    "depth_weighted_averaging": False,
    "hidden_act": "gelu_pytorch_tanh",
    "gated_mlp": True,
    "attention_bias": True,
    "mlp_bias": False,
    "head_transform": True,
    "classifier_bias": True,
    "decoder_bias": True,
    "tie_word_embeddings": True,
    "initializer": "ltg",
}
_LLAMA: dict[str, Any] = {
    "position_embedding": "rope",
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
    "norm": "rms_norm",
    "norm_weight": True,
    "embedding_norm": False,
    "context_norm": False,
    "mlp_norm": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "head_transform": False,
    "decoder_bias": False,
    "tie_word_embeddings": False,
    "initializer": "normal",
}
PRESETS: dict[str, dict[str, Any]] = {
    "gpt-bert": {"attention_gate": True, "depth_weighted_averaging": True},
    "llama": _LLAMA,
    "qwen3": {**_LLAMA, "qk_norm": True},
    "eurobert": _LLAMA,
    "neobert": {**_LLAMA, "decoder_bias": True},
    "modernbert": {
        **_LLAMA, "norm": "layer_norm", "embedding_norm": True, "first_norm": False, "hidden_act": "gelu",
        "head_transform": True, "classifier_bias": False, "decoder_bias": True, "tie_word_embeddings": True,
    },
}  # fmt: skip
_CHOICES = {
    "position_embedding": ("relative", "rope"),
    "norm": ("layer_norm", "rms_norm"),
    "norm_position": ("pre", "post", "sandwich"),
    "hidden_act": ("gelu", "gelu_pytorch_tanh", "silu", "relu2"),
    "initializer": ("ltg", "normal"),
    "predict_masked_from": ("previous", "own"),
}
_AT_LEAST_ONE = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
    "num_key_value_heads", "head_dim", "embedding_size", "pad_vocab_to_multiple_of",
)  # fmt: skip
_FROM_SIZES = ("num_key_value_heads", "head_dim", "embedding_size")
# What configurations of published GPT-BERT and LTG-BERT decide on.
PUBLISHED_KEYS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
    "max_position_embeddings", "position_bucket_size", "attention_probs_dropout_prob", "hidden_dropout_prob",
    "layer_norm_eps", "position_embedding", "rope_theta", "model_type",
)  # fmt: skip
_PRESET: Any = None  # the default of a key that the preset of model_type decides, or other sizes do


class ModelConfigError(ValueError):
    """A model configuration cannot be used; the message names the file, the key, its value and what would be right."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and shape of a model, by the names of Hugging Face's configurations where they have one.

    Raises ModelConfigError on impossible values. configs/README.md says what each key means. A key that is left out has
    its default here, or what PRESETS has for the model_type, or follows from the other sizes.

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
    attention_probs_dropout_prob: float = _PRESET
    hidden_dropout_prob: float = _PRESET
    layer_norm_eps: float = 1e-5
    position_embedding: str = _PRESET
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    sliding_window: int = 0
    global_attn_every_n_layers: int = 1
    local_rope_theta: float = 0.0
    predict_masked_from: str = "previous"
    model_type: str = "gpt-bert"
    num_key_value_heads: int = _PRESET
    head_dim: int = _PRESET
    embedding_size: int = _PRESET
    pad_vocab_to_multiple_of: int = 1
    norm: str = _PRESET
    norm_weight: bool = _PRESET
    norm_bias: bool = _PRESET
    norm_position: str = _PRESET
    embedding_norm: bool = _PRESET
    first_norm: bool = _PRESET
    context_norm: bool = _PRESET
    mlp_norm: bool = _PRESET
    qk_norm: bool = _PRESET
    attention_gate: bool = _PRESET
    depth_weighted_averaging: bool = _PRESET
    hidden_act: str = _PRESET
    gated_mlp: bool = _PRESET
    attention_bias: bool = _PRESET
    mlp_bias: bool = _PRESET
    head_transform: bool = _PRESET
    classifier_bias: bool = _PRESET
    decoder_bias: bool = _PRESET
    tie_word_embeddings: bool = _PRESET
    initializer: str = _PRESET
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        for name, value in (_LTG_BERT | PRESETS.get(str(self.model_type), {})).items():
            self._fill(name, value)
        for field in dataclasses.fields(self):
            if field.name not in _FROM_SIZES or getattr(self, field.name) is not None:
                _check_type(field.name, getattr(self, field.name), field.type)
        for name in _AT_LEAST_ONE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ModelConfigError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}; "
                "change one, or give head_dim"
            )
        self._fill("head_dim", self.hidden_size // self.num_attention_heads)
        self._fill("num_key_value_heads", self.num_attention_heads)
        self._fill("embedding_size", self.hidden_size)
        self._check_numbers()
        self._check_shape()

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        for name in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
            if not 0 <= getattr(self, name) < 1:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be at least 0 and below 1")
        for name in ("layer_norm_eps", "rope_theta", "initializer_range"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelConfigError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.position_bucket_size < 2:
            raise ModelConfigError(f"position_bucket_size is {self.position_bucket_size}; it must be at least 2")
        if self.max_position_embeddings < self.position_bucket_size // 2 + 2:
            raise ModelConfigError(
                f"max_position_embeddings is {self.max_position_embeddings}; with position_bucket_size "
                f"{self.position_bucket_size} it must be at least {self.position_bucket_size // 2 + 2}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ModelConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.position_embedding == "rope" and self.head_dim % 2:
            raise ModelConfigError(
                f"hidden_size {self.hidden_size} over num_attention_heads {self.num_attention_heads}, or head_dim, "
                f'gives heads of {self.head_dim} features; position_embedding "rope" needs an even number'
            )

    def _check_shape(self) -> None:
        for name, choices in {**_CHOICES, "model_type": tuple(MODEL_CLASSES)}.items():
            if (value := getattr(self, name)) not in choices:
                named = " or ".join(f'"{choice}"' for choice in choices)
                raise ModelConfigError(f'{name} is "{value}"; choose {named}')
        if self.norm == "rms_norm" and self.norm_bias:
            raise ModelConfigError('norm_bias is true but norm "rms_norm" has no bias; choose "layer_norm"')
        if self.depth_weighted_averaging and self.norm_position == "post":
            raise ModelConfigError(
                'depth_weighted_averaging is true but norm_position is "post", which normalises the sums it averages; '
                'choose "pre" or "sandwich"'
            )
        if not self.first_norm and self.norm_position == "post":
            raise ModelConfigError('first_norm is false but norm_position "post" has no norm before the first layer')
        for name in ("attention_gate", "depth_weighted_averaging"):
            if getattr(self, name) and self.model_type == "ltg-bert":
                raise ModelConfigError(
                    f'{name} is true but model_type is "ltg-bert", which has none; choose "gpt-bert"'
                )
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
    def matrices_of_a_layer(self) -> tuple[int, int]:
        """Numbers in the matrices of a layer's attention, and of its feed-forward."""
        queries, keys = (count * self.head_dim for count in (self.num_attention_heads, self.num_key_value_heads))
        attention = self.hidden_size * ((2 + self.attention_gate) * queries + 2 * keys)
        return attention, (2 + self.gated_mlp) * self.hidden_size * self.intermediate_size

    @property
    def bare_norm(self) -> bool:
        """Whether norms are LTG-BERT's, layer norms without weights, for which there are kernels."""
        return self.norm == "layer_norm" and not (self.norm_weight or self.norm_bias)

    @property
    def stream_normalises(self) -> bool:
        """Whether the residual stream gives its sublayers a layer norm, of which they do the weights alone."""
        return self.norm == "layer_norm" and self.norm_position != "post"

    @property
    def has_gated_norm(self) -> bool:
        """Whether feed-forward sublayers have LTG-BERT's norm of GEGLU (ops/gated_norm.py)."""
        return self.bare_norm and self.mlp_norm and self.gated_mlp and self.hidden_act.startswith("gelu")

    @property
    def other_norms(self) -> str:
        """In words, norms and activation that are not LTG-BERT's: why a kernel made for those is not used."""
        weights = " with weights" if self.norm_weight or self.norm_bias else ""
        return f"norms are {self.norm}{weights}, {self.norm_position}, and hidden_act {self.hidden_act}"

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the word table: vocab_size, rounded up to a multiple of pad_vocab_to_multiple_of."""
        return -(-self.vocab_size // self.pad_vocab_to_multiple_of) * self.pad_vocab_to_multiple_of

    def unpublished_keys(self) -> list[str]:
        """Keys by which this is neither GPT-BERT nor LTG-BERT as published, whatever its sizes and positions."""
        if self.model_type not in ("gpt-bert", "ltg-bert"):
            return ["model_type"]
        published = ModelConfig(**{name: getattr(self, name) for name in PUBLISHED_KEYS}).to_dict()
        free = ("initializer", "initializer_range")
        return [key for key, value in self.to_dict().items() if key not in free and published[key] != value]

    def as_type(self, model_type: str) -> ModelConfig:
        """The same of another model_type, whose preset decides on gate and averaging."""
        return dataclasses.replace(
            self, model_type=model_type, attention_gate=_PRESET, depth_weighted_averaging=_PRESET
        )

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
    kinds = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    words = {"int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false"}
    expected, kind = kinds.get(annotation, (dict, type(None))), words.get(annotation, "an object")
    if not isinstance(value, expected) or isinstance(value, bool) != (annotation == "bool"):
        raise ModelConfigError(f"{name} is {value!r}; it must be {kind}")
