"""The exported model's attention: implementations against the eager reference, and functions that others register."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.tiny_exports import FORMS, library, load, make_exported
from torch.utils._python_dispatch import TorchDispatchMode

from model import LTGBert

LENGTH = 300  # three blocks of FlexAttention's masks, the last one not full


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, tuple[LTGBert, Path]]:
    library()
    place = tmp_path_factory.mktemp("exported")
    return {form: make_exported(place, form) for form in FORMS}


@pytest.fixture(autouse=True)
def _foreign_warnings():
    """FlexAttention on a CPU, which is there for these tests, says that it is slow."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def cases(length: int) -> dict[str, dict[str, Any]]:
    """What two rows can be told about who attends whom."""
    mask = torch.ones(2, length, dtype=torch.int64)
    mask[0, 140:] = 0
    mask[1, :20] = mask[1, 60:65] = 0  # on the left, and inside
    texts = torch.cat([torch.arange(130), torch.arange(length - 130)])[None]
    pairs = torch.ones(2, length, length, dtype=torch.int64).tril(3)
    pairs[1, 7] = 0  # attends nothing
    return {
        "whole": {}, "padded": {"attention_mask": mask}, "packed": {"position_ids": texts},
        "packed and padded": {"attention_mask": mask.flip(0)[:1], "position_ids": texts},
        "pairs": {"attention_mask": pairs},
    }  # fmt: skip


FLEX = (("whole", True), ("padded", False), ("packed and padded", True), ("pairs", False))  # each is compiled anew


@pytest.mark.slow
@pytest.mark.parametrize("form", ["gpt-bert", "ltg-bert-rope"])
@torch.no_grad()
def test_implementations_are_the_eager_reference(folders, form):
    models = {
        name: load("AutoModel", folders[form][1], attn_implementation=name)
        for name in ("eager", "sdpa", "flex_attention")
    }
    ids = torch.randint(16, 300, (2, 144), generator=torch.Generator().manual_seed(1))
    for case, given in cases(144).items():
        rows = ids[: given["attention_mask"].size(0)] if "attention_mask" in given else ids
        for causal in (False, True):
            expected = models["eager"](rows, is_causal=causal, **given).last_hidden_state
            assert expected.isfinite().all()
            for name in ("sdpa", *["flex_attention"] * ((case, causal) in FLEX)):
                with torch.compiler.set_stance("force_eager"):  # FlexAttention would compile for each case and layer
                    found = models[name](rows, is_causal=causal, **given).last_hidden_state
                assert (found - expected).abs().max() <= 1e-5 * expected.abs().max(), (name, case, causal)


def test_blocks_of_masks_are_those_that_hold_pairs():
    """Every allowed pair is in a block; a block taken for full has no other; what no query attends is skipped."""
    library()
    from export.attention_gpt_bert import make_mask, packed_texts

    skipped, full = set(), set()
    for case, given in cases(LENGTH).items():
        mask, positions = given.get("attention_mask"), given.get("position_ids")
        texts = None if positions is None else packed_texts(positions, mask, 0)
        for causal in (False, True):
            who = make_mask(mask, texts, 1 if mask is None else mask.size(0), 0, LENGTH, causal, torch.device("cpu"))
            blocks, dense = who.blocks(1 if mask is None else mask.size(0)), who.dense()
            if blocks is None:
                assert (case, causal) == ("whole", False)
                assert dense.all()
                continue
            padded = torch.nn.functional.pad(dense, (0, -LENGTH % 128, 0, -LENGTH % 128))
            held = padded.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).sum((3, 5))[:, 0]  # [B, 3, 3]
            listed = torch.zeros(2, *held.shape, dtype=torch.bool)
            kinds = ((blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices))
            for kind, (counts, order) in enumerate(kinds):
                for row, query in torch.cartesian_prod(torch.arange(held.size(0)), torch.arange(3)).tolist():
                    listed[kind, row, query, order[row, 0, query, : counts[row, 0, query]].long()] = True
            assert not (listed[0] & listed[1]).any()
            assert (listed.any(0) >= (held > 0)).all(), case
            assert (held[listed[1]] == 128 * 128).all(), case
            skipped |= {case} if not listed.any(0).all() else set()
            full |= {case} if listed[1].any() else set()
    assert skipped == {"whole", "padded", "packed", "packed and padded"}  # causal rows skip the future
    assert full == {"whole", "padded", "packed"}


class Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that anything returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return found


@pytest.mark.parametrize("form", ["gpt-bert", "ltg-bert-rope"])
@torch.no_grad()
def test_no_tensor_grows_with_the_square_of_the_length(folders, form, monkeypatch):
    """FlexAttention (its own tensors, on a CPU, are left out), and rotary rows under SDPA; eager ones do."""
    model = load("AutoModel", folders[form][1], attn_implementation="flex_attention")
    code = module_of(model, "attention_gpt_bert")
    monkeypatch.setattr(code, "_flex_attention", lambda: lambda query, *_, **__: torch.zeros_like(query))
    ids = torch.randint(16, 300, (1, 512))
    mask = torch.ones_like(ids)
    mask[:, 500:] = 0

    def largest(causal: bool) -> int:
        with Largest() as found:
            model(ids, attention_mask=mask, is_causal=causal)
        return found.numel

    assert max(largest(True), largest(False)) < 512 * 512 // 4
    model.set_attn_implementation("sdpa")
    assert (largest(False) < 512 * 512 // 4) == ("rope" in form)
    model.set_attn_implementation("eager")
    assert largest(False) >= 512 * 512


def module_of(model: Any, name: str) -> ModuleType:
    """A file of the exported folder, as transformers has imported it."""
    return sys.modules[f"{type(model).__module__.rpartition('.')[0]}.{name}"]


def test_flex_attention_drops_no_probabilities_in_silence(folders):
    model = load("AutoModel", folders["gpt-bert"][1], attn_implementation="flex_attention").train()
    with pytest.raises(ValueError, match="attn_implementation='sdpa', or with attention_probs_dropout_prob=0"):
        model(torch.tensor([[1, 20, 30]]))


# What others register, as vLLM's Transformers backend does: all sequences of a batch in one row, its own cache


class Paged:
    """An attention function with a cache of its own, which is told of sequences by its own keyword argument."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.causal: set[bool] = set()

    def __call__(self, module, query, key, value, attention_mask, scaling=None, sequences=None, **kwargs):
        assert attention_mask is None
        assert "sequence_name" in kwargs  # whatever the model is called with comes through
        self.causal.add(module.is_causal)
        parts, begin = [], 0
        for number, length in sequences:
            new = [x[0, :, begin : begin + length] for x in (query, key, value)]  # [H, length, d]
            old = self.kept.get((module.layer_idx, number)) if module.is_causal else None
            keys, values = new[1:] if old is None else (torch.cat(pair, 1) for pair in zip(old, new[1:], strict=True))
            self.kept[module.layer_idx, number] = keys, values
            scores = scaling * new[0] @ keys.transpose(1, 2)
            if module.is_causal:
                seen = torch.ones_like(scores[0], dtype=torch.bool).tril(keys.size(1) - length)
                scores = scores.masked_fill(~seen, -torch.inf)
            parts.append((scores.softmax(-1) @ values).transpose(0, 1))
            begin += length
        return torch.cat(parts).flatten(1), None  # [tokens, H d]


@pytest.mark.parametrize("form", ["gpt-bert-rope", "ltg-bert-rope"])
@torch.no_grad()
def test_a_registered_function_serves_several_sequences_in_one_row(folders, form):
    model, folder = folders[form]
    interface, name = library().modeling_utils.ALL_ATTENTION_FUNCTIONS, "paged_for_test"
    ids = torch.randint(16, 300, (12,), generator=torch.Generator().manual_seed(2))
    rows = {7: ids[:6], 9: ids[6:]}  # sequences, of which the last token of each comes in a second step
    steps = [[(7, 5), (9, 5)], [(9, 1), (7, 1)]]
    for causal in (True, False):
        paged = Paged()
        interface[name] = paged
        base = load("AutoModel", folder, attn_implementation=name, is_decoder=causal)
        assert base._supports_attention_backend
        done, found = dict.fromkeys(rows, 0), {number: [] for number in rows}
        for step in steps if causal else [[(7, 6), (9, 6)]]:
            tokens, places = [], []
            for number, length in step:
                places.append(torch.arange(done[number], done[number] + length))
                tokens.append(rows[number][places[-1]])
                done[number] += length
            hidden = base(
                torch.cat(tokens)[None], position_ids=torch.cat(places)[None], use_cache=False, return_dict=False,
                sequences=step, sequence_name="",
            )[0]  # fmt: skip
            for (number, _), part in zip(step, hidden[0].split([length for _, length in step]), strict=True):
                found[number].append(part)
        for number, row in rows.items():
            close(torch.cat(found[number]), model.encode(row[None], torch.zeros(1, 6).long(), causal)[0])
        assert paged.causal == {causal}
    assert {layer.is_causal for layer in load("AutoModelForCausalLM", folder).transformer.attention_layers} == {True}


def test_a_function_without_relative_positions_is_refused(folders):
    library().modeling_utils.ALL_ATTENTION_FUNCTIONS["paged_for_test"] = Paged()
    base = load("AutoModel", folders["gpt-bert"][1], attn_implementation="paged_for_test")
    with pytest.raises(ValueError, match="'paged_for_test' knows no relative positions"):
        base(torch.tensor([[1, 20, 30]]))


# Our kernels, where the repository is


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@torch.no_grad()
def test_the_kernels_serve_exported_models(folders, device):
    """On a CPU the reference in their place, in float32; on a GPU the kernels in bf16, whose heads are larger."""
    from export.attention_kernels import accelerate, register

    register()
    folder, options, tolerance = folders["gpt-bert"][1], dict[str, Any](), 1e-5
    if device == "cuda":
        options, tolerance = {"dtype": torch.bfloat16, "num_attention_heads": 1}, 3e-2
    eager, ours = (
        load("AutoModel", folder, attn_implementation=name, **options).to(device) for name in ("eager", "hybrid")
    )
    layers = accelerate(load("AutoModel", folder, attn_implementation="hybrid", **options).to(device))
    ids = torch.randint(16, 300, (2, 144), generator=torch.Generator().manual_seed(1)).to(device)
    mask = torch.ones_like(ids)
    mask[0, 140:] = mask[1, :20] = 0
    texts = torch.cat([torch.arange(100), torch.arange(44)])[None].to(device)
    for given in ({}, {"attention_mask": mask}, {"attention_mask": mask, "position_ids": texts}):
        for causal in (False, True):
            expected = eager(ids, is_causal=causal, **given).last_hidden_state
            for model in (ours, layers):
                found = model(ids, is_causal=causal, **given).last_hidden_state
                assert (found - expected).abs().max() <= tolerance * expected.abs().max(), (list(given), causal)
    every = [model(ids, output_hidden_states=True).hidden_states for model in (ours, layers)]
    assert all(torch.equal(*pair) for pair in zip(*every, strict=True))  # these are not for our layers
    if device == "cuda":
        compiled = torch.compile(ours, fullgraph=True)(ids, is_causal=True, **given).last_hidden_state
        assert (compiled - expected).abs().max() <= tolerance * expected.abs().max()
    mask[0, 60:65] = 0
    with pytest.raises(ValueError, match="'hybrid' knows no padding inside a text: load the model with 'sdpa'"):
        ours(ids, attention_mask=mask)
    with pytest.raises(ValueError, match=r"accelerate\(\) takes relative positions and models with"):
        accelerate(eager)
    with pytest.raises(ValueError, match="'hybrid' has no rotary positions"):
        load("AutoModel", folders["ltg-bert-rope"][1], attn_implementation="hybrid")(ids.cpu())


@torch.no_grad()
def test_a_compiled_model_is_one_graph_with_the_kernels_in_it(folders, monkeypatch):
    """On a CPU, where nothing runs them: the reference reads what the graph made for them."""
    from export import attention_kernels
    from ops.attention import attend
    from ops.attention_metadata import relative_metadata

    def kernels(*_: Any) -> bool:
        return True

    def reference(query_key, value, positions, metadata):
        spans = metadata.spans  # [B, T, 2], nothing for padding
        ids = torch.where(spans[..., 1] == 0, -1, spans[..., 0]).long()
        return attend(query_key, value, positions, relative_metadata(ids, metadata.causal, 8, 24))

    kernels._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess] - as the real one
    monkeypatch.setattr(attention_kernels, "_traced_kernels", kernels)
    monkeypatch.setattr(attention_kernels, "attend", reference)
    attention_kernels.register()
    eager, ours = (load("AutoModel", folders["gpt-bert"][1], attn_implementation=name) for name in ("eager", "hybrid"))
    ids, mask = torch.randint(16, 300, (2, 40)), torch.ones(2, 40, dtype=torch.int64)
    mask[0, 30:] = mask[1, :5] = 0
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=False)
    expected = eager(ids, attention_mask=mask, is_causal=True).last_hidden_state
    close(compiled(ids, attention_mask=mask, is_causal=True).last_hidden_state, expected)


@pytest.mark.slow
def test_the_benchmark_times_ours_and_the_exported_model(tmp_path):
    library()
    from benchmarks.exported import main

    sizes = {
        "model_type": "gpt-bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 48, "vocab_size": 1024, "max_position_embeddings": 32, "position_bucket_size": 8,
    }  # fmt: skip
    (tmp_path / "tiny.json").write_text(json.dumps(sizes))
    flags = {"config": tmp_path / "tiny.json", "seq_length": 12, "rows": 2, "samples": 2, "prompt": 3, "new_tokens": 4}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    out = tmp_path / "out.json"
    assert main([*words, "--device=cpu", "--compile", "--padded", "--repetitions=1", f"--output={out}"]) == 0
    found = json.loads(out.read_text())
    for name in ("ours", "sdpa", "flex_attention", "hybrid", "hybrid:layers"):
        assert all(found["reading"][0][name][kind] > 0 for kind in ("bidirectional_ms", "causal_ms"))
    assert all(found["writing"][name] > 0 for name in ("ours", "generate()"))
