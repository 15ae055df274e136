"""What all models of GPT-BERT and LTG-BERT for the transformers library share; an exported folder holds a copy.

Tensors are batch first: B rows of T tokens, D features.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.utils import logging

from .attention_gpt_bert import Layout, knows_layout, make_mask, packed_texts
from .configuration_gpt_bert import GPTBertConfig
from .layers_gpt_bert import Embedding, Encoder

logger = logging.get_logger(__name__)


class Encoded(NamedTuple):
    """Hidden states [B, T, D]; the cache, all layers' states and all layers' attention probabilities, or None."""

    last_hidden_state: Tensor
    past_key_values: Cache | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None


class GPTBertPreTrainedModel(PreTrainedModel):
    """Embedding and encoder, which all models here share under the same parameter names."""

    config_class = GPTBertConfig
    base_model_prefix = ""
    _no_split_modules = ["Embedding", "Attention", "FeedForward", "DepthWeightedAveraging", "Head"]  # noqa: RUF012 - transformers' own declaration
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [r"^classifier\.", r"\.position_indices$"]  # noqa: RUF012 - transformers' own declaration

    config: GPTBertConfig

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        self.embedding = Embedding(config)
        self.transformer = Encoder(config)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.word_embedding

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embedding.word_embedding = value

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in pretraining: truncated normal matrices, smaller ones in deeper feed-forwards, biases 0. transformers
        calls this for the modules that hold parameters themselves."""
        std = math.sqrt(2 / (5 * self.config.hidden_size)) * getattr(module, "init_scale", 1.0)
        matrix = None
        if isinstance(module, nn.ParameterList):
            for average in module:
                if not getattr(average, "_is_hf_initialized", False):  # transformers guards torch.nn.init alone
                    average.zero_()[-1] = 1.0
        elif isinstance(module, Embedding):
            matrix = module.relative_embedding
        elif isinstance(module, nn.Embedding | nn.Linear):
            matrix = module.weight
        elif isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            nn.init.ones_(module.weight)
        if matrix is not None:
            nn.init.trunc_normal_(matrix, std=std, a=-2 * std, b=2 * std)
        if isinstance(module, nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        is_causal: bool,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> Encoded:
        """Hidden states of the new tokens [B, T] (or of their rows of the word table [B, T, D]).

        position_ids [B or 1, T] that begin again at 0 tell several texts in a row apart. The models take them among
        their other keyword arguments: generate() makes some for every model whose signature names them. options: other
        ones, for functions of the attention interface.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds.")
        words = self.embedding.word_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is not None and not is_causal:
            raise ValueError("A cache needs causal attention: what a token attends may not change later.")
        if self.training and self.transformer.attention_layers[0].gradient_checkpointing:
            if past_key_values is not None:
                raise ValueError("No cache goes with gradient checkpointing: the backward pass would write it again.")
            if use_cache:
                logger.warning_once("use_cache is taken as False while gradient checkpointing trains.")
            use_cache = False
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        x, table = self.embedding(words)
        need_weights = self.config.output_attentions if output_attentions is None else output_attentions
        implementation = "eager" if need_weights else self.config._attn_implementation or "eager"
        texts = None
        if position_ids is not None and knows_layout(implementation):
            texts = packed_texts(position_ids, attention_mask, past)
            texts = texts if past == 0 else None  # with cached tokens all of a row is one text
        mask = make_mask(attention_mask, texts, x.size(0), past, x.size(1), is_causal, x.device)
        layout = Layout(self.config, implementation, mask, past, past_key_values, attention_mask, position_ids, options)
        keep_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        layout.all_states = bool(keep_hidden)
        hidden, weights = self.transformer(x, table, layout)
        return Encoded(
            hidden[-1],
            past_key_values,
            tuple(hidden) if keep_hidden else None,
            tuple(weights) if need_weights else None,  # pyright: ignore[reportArgumentType]
        )
