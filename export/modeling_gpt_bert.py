"""GPT-BERT and LTG-BERT for the transformers library; an exported folder holds a copy of this file.

One set of weights for masked and causal use. Output i of the network scores token i + 1 under both objectives; the
masked model's logits are shifted by one, so that there, as everywhere in transformers, logits i are those of token i.
Tensors are batch first: B rows of T tokens, D features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import Cache
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .attention_gpt_bert import given_pairs, packed_texts
from .base_gpt_bert import GPTBertPreTrainedModel
from .configuration_gpt_bert import GPTBertConfig, LTGBertConfig
from .layers_gpt_bert import Head, new_head

logger = logging.get_logger(__name__)


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
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, causal, *flags, **kwargs)
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


def without_first(labels: Tensor, first: Tensor) -> Tensor:
    """Labels [B, T] without those of tokens that nothing precedes (bool [B, T]), which have no prediction; says so."""
    if not torch.compiler.is_compiling() and bool((first.to(labels.device) & (labels >= 0)).any()):
        logger.warning_once(
            "A label stands on the first token of a text, which nothing precedes and this model cannot predict: it is "
            "left out of the loss. Begin every row with <s>."
        )
    return labels.masked_fill(first.to(labels.device), -100)


class GPTBertForMaskedLM(GPTBertLanguageModel):
    """Masked language model: logits i are those of token i, computed from the hidden state before it.

    Nothing stands before the first token of a text, so its logits are 0, and a label there is left out of the loss:
    begin texts with <s>, as the tokenizer does.
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
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, False, **flags, **kwargs)
        position_ids = kwargs.get("position_ids")
        predicted = self.classifier(outputs.last_hidden_state[:, :-1])
        first = torch.zeros(predicted.shape[:2], dtype=torch.bool, device=predicted.device)
        if attention_mask is not None and attention_mask.ndim == 2:
            first = attention_mask[:, :-1].to(first.device) == 0
        if position_ids is not None:
            first = first | (packed_texts(position_ids, attention_mask, 0).diff() != 0)
        logits = F.pad(predicted.masked_fill(first[..., None], 0.0), (0, 0, 1, 0))
        loss = None
        if labels is not None:
            labels = without_first(labels, F.pad(first, (1, 0), value=True))
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class GPTBertForCausalLM(GPTBertLanguageModel, GenerationMixin):
    """Causal language model: logits i are those of token i + 1."""

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        for layer in self.transformer.attention_layers:
            layer.is_causal = True  # pyright: ignore[reportArgumentType]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, which only warns of prompts that end in padding, and then continues the padding."""
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim == 2 and bool((mask[:, -1] == 0).any()):
            raise ValueError('prompts end in padding: tokenise them with padding_side="left" for generate().')
        return super().generate(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

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
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, True, *flags, **kwargs)
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


def real_tokens(hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Bool [B, T]: what is no padding."""
    rows, length = hidden.shape[:2]
    if attention_mask is None:
        return torch.ones(rows, length, dtype=torch.bool, device=hidden.device)
    if attention_mask.ndim > 2:  # padding is what nothing attends
        attention_mask = given_pairs(attention_mask, rows, length, length)[:, 0].any(dim=1)
    return (attention_mask != 0).to(hidden.device)


def text_starts(hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Tensor:
    """Bool [B, T]: the first token of each text, of several in packed rows."""
    texts = 1 + packed_texts(position_ids, attention_mask, 0).to(hidden.device)
    texts = texts * real_tokens(hidden, attention_mask)
    return texts > F.pad(texts.cummax(dim=1).values, (1, -1))


def first_states(hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> Tensor:
    """The states of the first tokens of texts, `<s>`: [B, D], or with position_ids [N, D] of all N texts in their
    order. With padding on the left these tokens are further right."""
    if position_ids is not None:
        return hidden[text_starts(hidden, attention_mask, position_ids)]
    if attention_mask is None:
        return hidden[:, 0]
    first = real_tokens(hidden, attention_mask).int().argmax(dim=1)
    return hidden[torch.arange(hidden.size(0), device=hidden.device), first]


def refuse_packed(what: str, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
    """Raise ValueError where a row holds several texts."""
    if position_ids is not None and bool((text_starts(hidden, attention_mask, position_ids).sum(dim=1) > 1).any()):
        raise ValueError(f"{what} takes one text a row, and position_ids begin again within one, which packs several.")


class GPTBertForSequenceClassification(GPTBertPreTrainedModel):
    """Classification or regression of texts from the (bidirectional) hidden state of their first token, `<s>`.

    Each text of a packed row, where position_ids begin again, has logits and a label of its own, in their order.
    """

    accepts_loss_kwargs = False  # so that Trainer itself divides the loss where it accumulates gradients

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.score = new_head(config, self.num_labels)  # the name by which PEFT knows what to train and save
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
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, False, **flags, **kwargs)
        logits = self.score(first_states(outputs.last_hidden_state, attention_mask, kwargs.get("position_ids")))
        loss = None
        if labels is not None:
            if len(labels) != len(logits):
                raise ValueError(f"labels has {len(labels)} entries for {len(logits)} texts: give each text its own.")
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class GPTBertForTokenClassification(GPTBertPreTrainedModel):
    """Classification of tokens, such as tagging, from their (bidirectional) hidden states."""

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels or 2
        self.score = new_head(config, self.num_labels)
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
    ) -> TokenClassifierOutput:
        flags: dict[str, Any] = {"output_attentions": output_attentions, "output_hidden_states": output_hidden_states}
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, False, **flags, **kwargs)
        logits = self.score(outputs.last_hidden_state)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, config=self.config, **kwargs)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class GPTBertForQuestionAnswering(GPTBertPreTrainedModel):
    """Begin and end of the answer to a question in a text, as in SQuAD, from (bidirectional) hidden states."""

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        self.qa_outputs = new_head(config, 2)  # the name by which PEFT knows what to train and save
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        outputs = self.encode(input_ids, attention_mask, inputs_embeds, False, **kwargs)
        start, end = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            refuse_packed("A loss of answers", outputs.last_hidden_state, attention_mask, kwargs.get("position_ids"))
            loss = self.loss_function(start, end, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start,
            end_logits=end,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class GPTBertForMultipleChoice(GPTBertPreTrainedModel):
    """The choice among C texts [B, C, T] by a score of each from the hidden state of its first token, `<s>`."""

    accepts_loss_kwargs = False  # as of sequences

    def __init__(self, config: GPTBertConfig) -> None:
        super().__init__(config)
        self.score = new_head(config, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MultipleChoiceModelOutput:
        given = (input_ids, attention_mask, inputs_embeds, kwargs.get("position_ids"))
        choices = next(tensor.size(1) for tensor in (input_ids, inputs_embeds) if tensor is not None)
        ids, mask, embeds, positions = (None if tensor is None else tensor.flatten(0, 1) for tensor in given)
        outputs = self.encode(ids, mask, embeds, False, **{**kwargs, "position_ids": positions})
        refuse_packed("Multiple choice", outputs.last_hidden_state, mask, positions)
        logits = self.score(first_states(outputs.last_hidden_state, mask, None)).view(-1, choices)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return MultipleChoiceModelOutput(
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


class LTGBertForTokenClassification(GPTBertForTokenClassification):
    """LTG-BERT as a classifier of tokens."""

    config_class = LTGBertConfig


class LTGBertForQuestionAnswering(GPTBertForQuestionAnswering):
    """LTG-BERT finding answers in texts."""

    config_class = LTGBertConfig


class LTGBertForMultipleChoice(GPTBertForMultipleChoice):
    """LTG-BERT choosing among texts."""

    config_class = LTGBertConfig
