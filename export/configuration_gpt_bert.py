"""Configuration of GPT-BERT and LTG-BERT for the transformers library; an exported folder holds a copy of this file."""

from typing import Any

from transformers import PretrainedConfig


class GPTBertConfig(PretrainedConfig):
    """GPT-BERT (Charpentier and Samuel, 2024): attention gate and depth-weighted averaging.

    position_bucket_size b: relative positions have 2b - 1 buckets; distances from max_position_embeddings - 1 on share
    the last one, so that texts may be longer. position_embedding: "relative", or "rope" (base rope_theta).
    attention_probs_dropout_prob is the probability of all of attention's dropouts.
    is_decoder: whether the model without a head attends causally unless its `is_causal` argument says otherwise.
    classifier_dropout: None takes hidden_dropout_prob.
    """

    model_type = "gpt-bert"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012 - a list: Trainer adds one to it

    def __init__(
        self,
        vocab_size: int = 16384,
        hidden_size: int = 768,
        intermediate_size: int = 2560,
        num_attention_heads: int = 12,
        num_hidden_layers: int = 12,
        max_position_embeddings: int = 512,
        position_bucket_size: int = 32,
        attention_probs_dropout_prob: float = 0.1,
        hidden_dropout_prob: float = 0.1,
        layer_norm_eps: float = 1e-5,
        position_embedding: str = "relative",
        rope_theta: float = 10000.0,
        classifier_dropout: float | None = None,
        is_decoder: bool = False,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        bos_token_id: int | None = 1,
        eos_token_id: int | None = 2,
        pad_token_id: int | None = 3,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_attention_heads = num_attention_heads
        self.num_hidden_layers = num_hidden_layers
        self.max_position_embeddings = max_position_embeddings
        self.position_bucket_size = position_bucket_size
        self.attention_probs_dropout_prob = attention_probs_dropout_prob
        self.hidden_dropout_prob = hidden_dropout_prob
        self.layer_norm_eps = layer_norm_eps
        self.position_embedding = position_embedding
        self.rope_theta = rope_theta
        self.classifier_dropout = classifier_dropout
        self.use_cache = use_cache
        super().__init__(**kwargs)
        # transformers 4 gives these its own defaults where it is not told of them.
        self.is_decoder, self.tie_word_embeddings = is_decoder, tie_word_embeddings
        self.bos_token_id, self.eos_token_id, self.pad_token_id = bos_token_id, eos_token_id, pad_token_id

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.hidden_size // self.num_attention_heads


class LTGBertConfig(GPTBertConfig):
    """LTG-BERT (Samuel et al., 2023): the same without the gate and without the averaging."""

    model_type = "ltg-bert"

    def __init__(self, **kwargs: Any) -> None:  # transformers takes a class without its own __init__ for a dataclass
        super().__init__(**kwargs)
