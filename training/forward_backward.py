"""Forward and backward pass of one micro-batch, compiled and, on CUDA, captured once and replayed as a CUDA graph.

A micro-step is more than a thousand kernels, many of them shorter than the time the host needs to launch them. A graph
launches all of them at once. What changes from one replay to the next lies in tensors that are copied into the graph's
own: tokens, keys, weights of targets. What decides the kernels is the key by which graphs are kept: the shape of the
batch, whether masks are drawn, the slots for targets in the head, and with rotary positions, whose kernels are launched
by document, the causal rows and the room for documents. Of each there are a few sizes: a batch that has fewer rows is
filled up with padding, which has no targets, so that a growing batch meets a new shape now and then only.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from data.loader import TENSORS, RowBatch
from data.masking import PADDING, MaskingOptions, ModelInputs
from model_config import ModelConfig
from model_protocol import PretrainingModel
from ops.attention_metadata import LONGEST_WHOLE
from ops.cross_entropy import compiled_scores
from ops.nvrtc import cache_folder
from ops.reference import reference_chosen
from ops.rope import VarlenSizes
from training.config import TrainingConfig
from training.gradients import GradientBuckets
from training.loss import COLUMNS, hybrid_loss, varlen_sizes

_SIZES = 64  # of the head's slots for targets, between none and all positions
_ROW_SIZES = 32  # of a batch, between a power of two and the next: on average 1 % of rows are padding
_DOCUMENT_SIZES = 8  # of the room for documents, likewise
# A graph with too much room is used until that has cost as much as to capture a smaller one would: some micro-steps, of
# which the head of a whole batch is about a tenth. So the sum of both is at most twice the least possible, whenever and
# how fast the number of targets falls (ski rental: Karlin et al. 1988, "Competitive Snoopy Caching").
_PATIENCE = 32.0
_DOCUMENT_COST = 0.1  # of as much room again as there are documents, likewise
_GRAPHS = 16  # kept; the one unused for longest goes first


def graph_obstacle(config: TrainingConfig, device: torch.device) -> str:
    """Why a run's micro-steps are not captured as CUDA graphs; "" where they are: compiled ones on CUDA devices."""
    if device.type != "cuda":
        return "they need a CUDA device"
    if chosen := reference_chosen("graphs"):
        return chosen
    if not config.compile:
        return "nothing is compiled (--no-compile)"
    if config.data_fingerprint:
        return "--data_fingerprint reads each batch's inputs, which a replay does not give"
    if config.sharding == "full":
        return "--sharding full frees memory that a graph would read"
    return ""


def padded_targets(count: int, positions: int) -> int:
    """Places in the head of a new graph for `count` of `positions` targets."""
    unit = -(-positions // _SIZES)
    return min(positions, (count // unit + 2) * unit)


def choose_rows(rows: int, known: Iterable[int]) -> int:
    """Rows of the CUDA graph that runs a batch of `rows`: of the `known` sizes, if one is little too large."""
    unit = _unit(rows, _ROW_SIZES)
    enough = [size for size in known if rows <= size < rows + unit]
    return min(enough) if enough else -(-rows // unit) * unit


def room_for_documents(count: int) -> int:
    """For how many documents a new graph has room that runs a batch of `count`. Each that is not there costs a few idle
    blocks of a kernel."""
    unit = _unit(count, _DOCUMENT_SIZES)
    return (-(-count // unit) + 1) * unit if count else 0


def _unit(count: int, sizes: int) -> int:
    """Between sizes of `count`, where there are so many between a power of two and the next."""
    return max(1, (1 << max(1, count).bit_length() - 1) // sizes)


def activation_bytes(
    config: TrainingConfig,
    model: ModelConfig,
    size: int,
    missing: Collection[str],
    tokens: int,
    row_length: int,
    targets: float,
) -> float:
    """Bytes that forward and backward pass of a micro-batch take at most, with `size` bytes a number."""
    width, inner, averages = model.hidden_size, model.intermediate_size, model.depth_weighted_averaging
    queries, keys = (count * model.head_dim for count in (model.num_attention_heads, model.num_key_value_heads))
    wide = 4 // size  # the residual stream is float32
    gate = model.attention_gate
    # Of a layer, in numbers a token: what its sublayers read and give to norms, and with averages a state for each.
    read = (2 + 2 * averages + 2 * (model.norm_position != "pre")) * width
    if "residual" in missing or "residual without averages" in missing:
        read += 2 * (wide + averages * (wide - 1)) * width  # its value before each sublayer; states as wide as it
    # Queries and keys, before their norm too, values, gate, context and its norm; the feed-forward's inner values.
    attention = (1 + model.qk_norm) * (queries + keys) + keys + (1 + gate + (gate or model.context_norm)) * queries
    feed_forward, scores = (2 + model.gated_mlp) * inner, 0.0
    if model.position_embedding == "rope":
        attention += queries + keys  # copies in the order of causal and other rows
    elif "attention" in missing:
        # Probabilities and what they are made of, of long rows not kept; scores of queries and of keys with each
        # position bucket, and copies.
        whole = row_length if row_length <= LONGEST_WHOLE else 0
        scores = model.num_attention_heads * (whole * (2.5 * size + 1) + 4 * size * model.position_bucket_size)
        attention += 2 * width
    if "feed-forward norm" in missing and not config.compile:
        feed_forward += 3 * width + 3 * inner  # each operation keeps what it was given
    kept = {"attention": attention * size + scores, "mlp": feed_forward * size}
    anew = {"none": [], "mlp": ["mlp"], "layer": list(kept)}[config.activation_checkpointing]
    once = max((kept.pop(part) for part in anew), default=0.0)  # of the one that is being computed anew
    layers = model.num_hidden_layers * (read * size + sum(kept.values())) + once
    logits = 2 * size if "loss" not in missing else 20 if size == 2 else 16
    outside = 6 * 4 * width  # embeddings and their norm, the stream, its gradient and sums over depth
    return tokens * (layers + outside) + targets * model.padded_vocab_size * logits


def compile_layers(model: PretrainingModel, recomputed: Collection[nn.Module] = ()) -> None:
    """Let the `compiled_parts` of `model` run compiled, in place: of ours every sublayer, and the head. So do the
    scores of targets.

    Sublayers of a kind share their code, so the compiler works once per kind and shape instead of once per layer; row
    lengths and numbers of rows that turn up later are compiled as variables. recomputed: see `recompute_activations`,
    which then calls the compiled code twice.
    """
    # Compiled code outlives the run beside our own kernels, unless the user has chosen another place.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
    import torch._dynamo  # half of all import time, and of use here alone

    # A layer's number reaches its dropout as a plain integer; unspecialised, all layers share one compilation.
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    # Layers of three kinds (the first, with a window, without), in training and validation, of fixed and of varying
    # shape; beyond the limit, 8 where nobody says so, all would run uncompiled.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    # Inductor's advice to its own developers, of no use to ours.
    warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
    for part in model.compiled_parts():
        if part in recomputed:
            part.forward = torch.compile(part.forward)
        else:
            part.compile()
    model.score = compiled_scores(next(model.parameters()).device)


def recompute_activations(parts: Iterable[nn.Module]) -> None:
    """Let modules keep their inputs alone for the backward pass, which computes the rest anew (Chen et al. 2016,
    "Training Deep Nets with Sublinear Memory Cost", section 3), in place.

    Dropout is keyed, so that no generator's state has to be put back, which a CUDA graph's capture would not allow.
    """
    for part in parts:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False, preserve_rng_state=False)


class ForwardBackward:
    """Runs micro-batches: adds their gradients to `gradients` and their sums to `sums` (see `sums_by_objective`)."""

    def __init__(
        self,
        model: PretrainingModel,
        gradients: GradientBuckets,
        options: MaskingOptions,
        z_loss_weight: float,
        device: torch.device,
        mixed_precision: bool,
        captures: bool,
        keeps_copies: bool = True,
    ) -> None:
        """captures: with CUDA graphs; `gradients` must then keep their addresses. keeps_copies: autocast's of weights,
        until a forward pass ends."""
        self._model, self._gradients, self._options, self._z_loss_weight = model, gradients, options, z_loss_weight
        self._device, self.mixed_precision, self.captures = device, mixed_precision, captures
        self._keeps_copies = keeps_copies
        self._by_document = model.config.position_embedding == "rope"
        self.sources = options.sources if len(options.sources) > 1 else ()
        lines = len(options.objectives) * (1 + len(self.sources))
        self.sums = torch.zeros(lines, COLUMNS, dtype=torch.float64, device=device)
        self._weights = torch.zeros(len(options.objectives), device=device)
        self._step_key = torch.zeros((), dtype=torch.int64, device=device)
        self.lacks_memory = False  # for graphs
        self._graphs: dict[_Key, _Graph] = {}
        self._compiled: set[int] = set()  # row lengths for which all should be compiled, so that they can be captured
        self._pool: Any = None  # memory that all graphs share, and the stream on which they are captured
        self._stream: torch.cuda.Stream | None = None

    def begin(self, step_key: int, per_target: Sequence[float]) -> None:
        """Begin a step: its dropout key (int64), and what a target of each objective weighs."""
        self.sums.zero_()
        self._step_key.fill_(step_key)  # filled there: a copy from the host would wait
        for weight, value in zip(self._weights, per_target, strict=True):
            weight.fill_(value)

    def __call__(self, batch: RowBatch, last: bool, counts: bool = True) -> ModelInputs | None:
        """One micro-step; returns the inputs it was computed on, or None where it was a replay.

        last: of a step; gradients are then summed over ranks. counts: without, it is done for the other ranks alone.
        """
        graph = self._graph_of(batch) if self.captures and batch.targets.any() else None
        if graph is not None:
            graph.replay(batch, self._sizes(batch).rows[0])
            if last:
                self._gradients.sum_replayed(graph.marks)
            return None
        sums = self.sums.clone() if not counts else None
        loss, inputs = self._forward(batch)
        if sums is not None:
            self.sums.copy_(sums)
        with self._gradients.sync(last):
            (loss if counts else 0 * loss).backward()
        return inputs

    def warm_up(self, batches: Iterable[RowBatch]) -> None:
        """Compile what such micro-batches need, without a trace in gradients; ranks exchange nothing.

        Compilers make of a size that has changed once a variable. So the first batch is taken with a row less, too, as
        the last of a step may be, which also changes the number of targets. Where graphs are captured, so are those of
        the largest batches, which first take all the memory that smaller ones then share.
        """
        largest = list(batches)
        with self._gradients.layers.alone():
            for number, batch in enumerate(largest):
                for part in (batch, batch.slice(0, len(batch) - 1)) if number == 0 and len(batch) > 2 else (batch,):
                    if part.targets.any():
                        self._forward(part)[0].backward()
            self._gradients.zero()
        if not self.captures:
            return
        torch.cuda.empty_cache()  # graphs have memory of their own
        self._compiled.update(batch.tokens.shape[1] for batch in largest)
        for batch in sorted(largest, key=lambda batch: batch.tokens.numel(), reverse=True):
            if batch.targets.any():
                self._graph_of(batch)

    def forget(self, captures: bool) -> None:
        """Begin anew, with CUDA graphs or not, after a `warm_up` that did not fit into memory."""
        self._graphs.clear()
        self._pool, self.captures, self.lacks_memory = None, captures, False
        self._gradients.zero()
        gc.collect()  # cycles of an exception and its frames hold what did not fit
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _sizes(self, batch: RowBatch) -> VarlenSizes:
        """Rows and documents of a batch that kernels tell apart: without rotary positions all rows are one group."""
        if self._by_document:
            return varlen_sizes(batch, self._options.objectives)
        return VarlenSizes((len(batch), 0), (0, 0))

    def _key(self, batch: RowBatch) -> _Key:
        """What decides the kernels of a batch."""
        optional = (batch.origins, batch.target_weights, batch.scored, batch.ends)
        kind = (batch.tokens.shape[1], *(tensor is None for tensor in optional), batch.has_masks(self._options))
        sizes, known = self._sizes(batch), [key for key in self._graphs if key.kind == kind]
        first, second = (choose_rows(size, {key.rows[n] for key in known}) for n, size in enumerate(sizes.rows))
        rows, positions = first + second, (first + second) * (batch.tokens.shape[1] - 1)
        # As many documents and targets as full rows would have, so that batches of a few rows less have the same graph.
        count = -(-int(batch.targets.sum()) * rows // len(batch))
        full = [-(-sizes.documents[n] * size // max(1, sizes.rows[n])) for n, size in enumerate((first, second))]
        wanted = _Key(kind, (first, second), (full[0], full[1]), count)
        documents = (room_for_documents(full[0]), room_for_documents(full[1]))
        new = wanted._replace(documents=documents, slots=padded_targets(count, positions))
        enough = min(filter(wanted.fits_into, known), key=lambda key: (key.slots, key.documents), default=new)
        if enough.fits_into(new):
            return enough
        graph, room = self._graphs[enough], (sum(enough.documents) - sum(full)) / max(1, sum(full))
        graph.idle += (enough.slots - count) / positions + _DOCUMENT_COST * room
        if graph.idle < _PATIENCE:
            return enough
        graph.idle = 0.0
        return new

    def _graph_of(self, batch: RowBatch) -> _Graph | None:
        """The CUDA graph that runs a batch, None where it runs kernel by kernel."""
        key = self._key(batch)
        graph = self._graphs.pop(key, None) or self._try_capture(key, batch)
        if graph is not None:
            self._graphs[key] = graph  # now the newest
            if len(self._graphs) > _GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        return graph

    def _try_capture(self, key: _Key, batch: RowBatch) -> _Graph | None:
        """The graph of `key`; None where it cannot be captured, which ends captures for good.

        Compilers and libraries do what cannot be captured. So where something may have to be compiled (a row length
        that `warm_up` has not seen, or a first capture that has failed, of which nothing has run) the micro-batch runs
        first as padding only, which adds zeros to gradients and sums.
        """
        own = dataclasses.replace(batch, **{name: _room(getattr(batch, name), sum(key.rows)) for name in TENSORS})
        own.tokens.fill_(PADDING)
        reason, out_of_memory = "", False
        for _ in range(2):
            if reason or key.kind[0] not in self._compiled:
                self._forward(own, key)[0].backward()
                self._compiled.add(key.kind[0])
            try:
                return self._capture(own, key)
            except RuntimeError as error:  # not kept: its traceback holds all of the capture's memory
                reason, out_of_memory = str(error).splitlines()[0], _lacks_memory(error)
            if out_of_memory:  # and a pool without a graph is no more
                break
        warnings.warn(f"micro-steps run without CUDA graphs, slower for short rows: {reason}", stacklevel=2)
        self.captures = False
        self.lacks_memory = out_of_memory
        self._graphs.clear()
        return None

    def _forward(self, batch: RowBatch, key: _Key | None = None) -> tuple[torch.Tensor, ModelInputs]:
        """Loss and inputs, with the sizes of `key` or of the batch itself."""
        room = (None, None) if key is None else (key.slots, VarlenSizes(key.rows, key.documents))
        with torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=self.mixed_precision, cache_enabled=self._keeps_copies
        ):
            loss, part, inputs = hybrid_loss(
                self._model, batch, self._options, self._weights.unbind(), self._z_loss_weight, self._step_key, *room
            )
        self.sums += part
        return loss, inputs

    def _capture(self, own: RowBatch, key: _Key) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        # A compiler times and loads kernels, which invalidates a capture and leaves the allocator in it.
        with self._capturing(graph), torch.compiler.set_stance("fail_on_recompile"):
            loss, _ = self._forward(own, key)
            with self._gradients.marked() as marks:
                loss.backward()
        return _Graph(graph, own, key.rows[0], marks)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """torch.cuda.graph, but it neither waits for the device, which goes on with the steps before, nor empties the
        allocator's cache. Other threads, such as the loader's, may do as they like meanwhile."""
        self._stream = self._stream or torch.cuda.Stream(self._device)
        if self._pool is None or not self._graphs:  # a pool goes with the last of its graphs
            self._pool = torch.cuda.graph_pool_handle()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)


class _Key(NamedTuple):
    """kind: row length, optional inputs, whether masks are drawn. rows, documents: as VarlenSizes has them; without
    rotary positions all rows are the first group, and no documents are counted. slots: for targets in the head."""

    kind: tuple
    rows: tuple[int, int]
    documents: tuple[int, int]
    slots: int

    def fits_into(self, other: _Key) -> bool:
        """Whether the graph of `other` has room for a batch with just so much."""
        rooms = zip((*other.documents, other.slots), (*self.documents, self.slots), strict=True)
        return other[:2] == self[:2] and all(room >= count for room, count in rooms)


@dataclasses.dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    batch: RowBatch  # what the graph reads; rows that a replay's batch does not have are padding
    first: int  # rows of the first group, behind which the second one begins
    marks: list[torch.cuda.Event]  # see GradientBuckets.marked
    idle: float = 0.0  # what replays have computed for room that was empty, in heads of whole batches

    def replay(self, batch: RowBatch, first: int) -> None:
        """Run a batch whose first group has `first` rows."""
        ends = (first, self.first + len(batch) - first)
        for name in TENSORS:
            if (tensor := getattr(self.batch, name)) is not None:
                new = getattr(batch, name)
                tensor[:first].copy_(new[:first])
                if len(batch) > first:
                    tensor[self.first : ends[1]].copy_(new[first:])
        for padding in (slice(ends[0], self.first), slice(ends[1], len(self.batch))):
            if padding.start < padding.stop:
                self.batch.tokens[padding].fill_(PADDING)
                self.batch.mask_counts[padding].zero_()
        self.graph.replay()


def _lacks_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of (the end of a capture fails too), says that memory was short."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or _lacks_memory(error.__context__))


def _room(tensor: torch.Tensor | None, rows: int) -> torch.Tensor | None:
    return None if tensor is None else tensor.new_zeros(rows, *tensor.shape[1:])
