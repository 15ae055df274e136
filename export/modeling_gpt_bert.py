"""GPT-BERT and LTG-BERT for the transformers library; an exported folder holds a copy of this file.

One set of weights for masked and causal use. Output i of the network scores token i + 1 under both objectives; the
masked model's logits are shifted by one, so that there, as everywhere in transformers, logits i are those of token i.
Tensors are batch first: B rows of T tokens, D features.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from .configuration_gpt_bert import GPTBertConfig, LTGBertConfig
from .layers_gpt_bert import Embedding, Encoder, Head, Layout, attention_allowed


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
    _no_split_modules = ["Encoder"]  # noqa: RUF012 - transformers' own declaration
    _supports_sdpa = True
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
        """As in pretraining: truncated normal matrices, smaller ones in deeper feed-forwards, biases 0.

        transformers calls this for the modules that hold parameters themselves.
        """
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
    ) -> Encoded:
        """Hidden states of the new tokens [B, T] (or of their rows of the word table [B, T, D])."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds.")
        words = self.embedding.word_embedding(input_ids) if inputs_embeds is None else inputs_embeds
        if past_key_values is not None and not is_causal:
            raise ValueError("A cache needs causal attention: what a token attends may not change later.")
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        x, table = self.embedding(words)
        allowed = attention_allowed(attention_mask, x.size(0), past, x.size(1), is_causal, x.device)
        need_weights = self.config.output_attentions if output_attentions is None else output_attentions
        layout = Layout(self.config, allowed, past, past_key_values, bool(need_weights))
        hidden, weights = self.transformer(x, table, layout)
        keep_hidden = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        return Encoded(
            hidden[-1],
            past_key_values,
            tuple(hidden) if keep_hidden else None,
            tuple(weights) if need_weights else None,  # pyright: ignore[reportArgumentType]
        )


class GPTBertModel(GPTBertPreTrainedModel):
    """Hidden states. Bidirectional, unless `is_causal` or the configuration's is_decoder says otherwise."""

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_causal: bool | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        causal = self.config.is_decoder if is_causal is None else is_causal
        flags = (past_key_values, use_cache, output_attentions, output_hidden_states)
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, causal, *flags)
        return BaseModelOutputWithPast(**outputs._asdict())


class GPTBertLanguageModel(GPTBertPreTrainedModel):
    """What the masked and the causal model share: the head, tied to the word table."""

    _tied_weights_keys = {"classifier.nonlinearity.5.weight": "embedding.word_embedding.weight"}  # noqa: RUF012 - transformers' own declaration
    _keys_to_ignore_on_load_unexpected = [r"\.position_indices$"]  # noqa: RUF012 - transformers' own declaration

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        self.classifier = Head(config, config.vocab_size, config.hidden_dropout_prob)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.classifier.nonlinearity[5]

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.classifier.nonlinearity[5] = new_embeddings


class GPTBertForMaskedLM(GPTBertLanguageModel):
    """Masked language model: logits i are those of token i, computed from the hidden state before it.

    Nothing stands before the first token of a row, so its logits are 0: begin texts with <s>, as the tokenizer does.
    """

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        flags: dict[str, Any] = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, False, **flags)
        predicted = self.classifier(outputs.last_hidden_state[:, :-1])
        if attention_mask is not None and attention_mask.ndim == 2:
            predicted = predicted.masked_fill(attention_mask[:, :-1, None] == 0, 0.0)
        logits = F.pad(predicted, (0, 0, 1, 0))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class GPTBertForCausalLM(GPTBertLanguageModel, GenerationMixin):
    """Causal language model: logits i are those of token i + 1."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        caching = bool(self.config.use_cache and not self.training if use_cache is None else use_cache)
        flags = (past_key_values, caching, output_attentions, output_hidden_states)
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, True, *flags)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.classifier(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class GPTBertForSequenceClassification(GPTBertPreTrainedModel):
    """Classification or regression of texts from the (bidirectional) hidden state of their first token, `<s>`."""

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        dropout = config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout
        self.head = Head(config, self.num_labels, dropout)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        flags: dict[str, Any] = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, False, **flags)
        hidden = outputs.last_hidden_state
        first = hidden[:, 0]
        if attention_mask is not None and attention_mask.ndim == 2:  # with padding on the left it is further right
            rows = torch.arange(hidden.size(0), device=hidden.device)
            first = hidden[rows, attention_mask.to(hidden.device).ne(0).int().argmax(dim=1)]
        logits = self.head(first)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class LTGBertModel(GPTBertModel):
    """LTG-BERT's hidden states."""

    config_class = LTGBertConfig


class LTGBertForMaskedLM(GPTBertForMaskedLM):
    """LTG-BERT as a masked language model."""

    config_class = LTGBertConfig


class LTGBertForCausalLM(GPTBertForCausalLM):
    """LTG-BERT as a causal language model."""

    config_class = LTGBertConfig


class LTGBertForSequenceClassification(GPTBertForSequenceClassification):
    """LTG-BERT as a classifier of texts."""

    config_class = LTGBertConfig
