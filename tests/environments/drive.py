"""Drives exported folders through transformers, whichever version the running environment has.

    python drive.py FOLDER

Prints the versions and a line for each check, and ends with 1 where one failed. FOLDER holds exported models and, in
each, expected.safetensors: what our own code computes from the same weights (tests/helpers/tiny_exports.py writes it).
Nothing of the repository is imported, so that this file can be copied anywhere; tests/test_export_environments.py runs
the same checks in the environment of the lock.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

HEADS = {  # class of transformers: PEFT's task
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
    "AutoModelForMultipleChoice": "SEQ_CLS",
    "AutoModelForMaskedLM": None,
    "AutoModelForCausalLM": "CAUSAL_LM",
}
SENTENCES = ["The function returns the length of the list.", "The list", "returns naïve words"]
CACHES = ("dynamic", "static", "sliding_window", "hybrid", "offloaded", "offloaded_static")
GREEDY = {"max_new_tokens": 12, "do_sample": False}


class Absent(Exception):
    """A check that needs a package which this environment does not have, or a machine that this is not."""


def need(package: str) -> Any:
    """The package; raises Absent."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise Absent(f"needs {package}") from None


def load(auto: str, folder: Path, **options: Any) -> Any:
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True, **options)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)


def rows(side: str, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs padded on a side, and what our code makes of them."""
    known = load_file(folder / "expected.safetensors")
    return {"input_ids": known[f"{side}/ids"], "attention_mask": known[f"{side}/mask"]}, known


def labels_for(auto: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Targets of any head for a batch: [B] classes, [B, T] classes or tokens, places, or choices of two."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    if "Sequence" in auto:
        return {"labels": torch.arange(len(ids)) % 2}
    if "Answering" in auto:
        last = mask.shape[1] - 1 - mask.flip(1).argmax(dim=1)
        return {"start_positions": mask.argmax(dim=1), "end_positions": last}
    if "Choice" in auto:
        return {"labels": torch.zeros(1, dtype=torch.int64)}
    labels = (ids % 2 if "Token" in auto else ids).masked_fill(mask == 0, -100)
    return {
        "labels": labels.scatter(1, mask.argmax(dim=1, keepdim=True), -100)
    }  # nothing predicts a text's first token


def batch_for(auto: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inputs as a head takes them: for multiple choice one example whose choices are all rows."""
    return {key: value[None] for key, value in inputs.items()} if "Choice" in auto else inputs


# Outputs, padding, precision


@torch.no_grad()
def check_outputs_are_ours(folder: Path) -> None:
    for side in ("left", "right"):
        inputs, known = rows(side, folder)
        real = inputs["attention_mask"].bool()
        base = load("AutoModel", folder)
        for causal in (False, True):
            hidden = base(**inputs, is_causal=causal).last_hidden_state
            close(hidden[real], known[f"{side}/{'causal' if causal else 'hidden'}"][real])
        close(load("AutoModelForCausalLM", folder)(**inputs).logits[real], known[f"{side}/causal_logits"][real])
        masked = load("AutoModelForMaskedLM", folder)(**inputs).logits
        preceded = real[:, 1:] & real[:, :-1]
        close(masked[:, 1:][preceded], known[f"{side}/masked_logits"][:, :-1][preceded])


@torch.no_grad()
def check_heads_ignore_padding(folder: Path) -> None:
    for auto in HEADS:
        torch.manual_seed(0)  # of a new head
        model = load(auto, folder).eval()
        found = []
        for side in ("left", "right"):
            inputs, _ = rows(side, folder)
            outputs = model(**batch_for(auto, inputs), **labels_for(auto, inputs))
            whole = ("Sequence" in auto) or ("Choice" in auto)
            logits = outputs.start_logits if "Answering" in auto else outputs.logits
            found.append(logits if whole else logits[inputs["attention_mask"].bool()])
            if "Answering" not in auto:  # its places are those of each side
                found.append(outputs.loss)
        half = len(found) // 2
        for left, right in zip(found[:half], found[half:], strict=True):
            close(left, right)


@torch.no_grad()
def check_half_precision(folder: Path) -> None:
    inputs, known = rows("right", folder)
    real = inputs["attention_mask"].bool()
    for dtype in (torch.bfloat16, torch.float16):
        hidden = load("AutoModel", folder, dtype=dtype)(**inputs).last_hidden_state
        assert hidden.dtype == dtype
        cosine = torch.cosine_similarity(hidden[real].float(), known["right/hidden"][real], dim=-1)
        assert cosine.min() > 0.995, cosine.min()


# Generation


def check_every_cache_generates_the_same(folder: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    causal = load("AutoModelForCausalLM", folder).to(device)
    tokenizer = load("AutoTokenizer", folder)
    inputs = tokenizer(SENTENCES, return_tensors="pt", padding=True, padding_side="left").to(device)
    alone = tokenizer(SENTENCES[0], return_tensors="pt").to(device)
    expected = causal.generate(**inputs, **GREEDY, use_cache=False)
    known = load_file(folder / "expected.safetensors")["greedy"]
    assert expected[0, -12:].tolist() == known.tolist()
    for kind in CACHES:
        if "offloaded" in kind and device == "cpu":
            continue  # transformers moves them by CUDA's streams
        compiled = {} if kind in ("dynamic", "offloaded") else {"disable_compile": True}
        found = causal.generate(**inputs, **GREEDY, cache_implementation=kind, **compiled)
        assert torch.equal(found, expected), kind
    assert torch.equal(causal.generate(**inputs, **GREEDY), expected)
    causal.config.sliding_window = 64  # longer than the texts
    assert torch.equal(causal.generate(**inputs, **GREEDY), expected)
    causal.config.sliding_window = 8
    refused = ""
    try:
        causal.generate(**inputs, **GREEDY)
    except ValueError as error:
        refused = str(error)
    assert "take sliding_window out of the configuration" in refused
    del causal.config.sliding_window
    beams = {"max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    assert torch.equal(causal.generate(**inputs, **beams), causal.generate(**inputs, **beams, use_cache=False))
    single = causal.generate(**alone, **GREEDY)
    other = load("AutoModelForCausalLM", folder)
    with torch.no_grad():  # an assistant that is right at times only
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    for assistant in (causal, other.to(device)):
        assert torch.equal(causal.generate(**alone, **GREEDY, assistant_model=assistant), single)
    assert torch.equal(causal.generate(**alone, **GREEDY, prompt_lookup_num_tokens=3), single)
    sampled = causal.generate(**inputs, max_new_tokens=8, do_sample=True, num_return_sequences=2)
    assert len(sampled) == 2 * len(SENTENCES)


# Rows of several texts


@torch.no_grad()
def check_packed_rows_are_as_unpacked(folder: Path) -> None:
    """transformers' own collator packs: one row, positions from 0 in each text, the first of each without a label."""
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(16, 300, (length,), generator=generator).tolist() for length in (5, 12, 3)]
    packed = transformers.DataCollatorWithFlattening()([{"input_ids": text} for text in texts])
    autos = ("AutoModel", *(auto for auto in HEADS if "Sequence" not in auto and "Choice" not in auto))
    for auto in autos:
        torch.manual_seed(0)
        model = load(auto, folder).eval()
        parts = [model(torch.tensor([text]))[0] for text in texts]
        found = model(packed["input_ids"], position_ids=packed["position_ids"])[0]
        close(found, torch.cat(parts, dim=1))
        if auto == "AutoModelForCausalLM":
            targets = torch.tensor([token for text in texts for token in text[1:]])
            logits = torch.cat([part[0, :-1] for part in parts])
            close(model(**packed).loss, torch.nn.functional.cross_entropy(logits, targets))


# Pipelines


def check_pipelines(folder: Path) -> None:
    pairs = {"question": "Who?", "context": "The list holds words."}
    tasks: dict[str, tuple[str, Any, dict[str, Any]]] = {
        "fill-mask": ("AutoModelForMaskedLM", ["The <mask> list", "A <mask>"], {"top_k": 3}),
        "text-generation": ("AutoModelForCausalLM", SENTENCES, GREEDY),
        "feature-extraction": ("AutoModel", SENTENCES, {}),
        "text-classification": ("AutoModelForSequenceClassification", SENTENCES, {}),
        "token-classification": ("AutoModelForTokenClassification", SENTENCES, {"aggregation_strategy": "simple"}),
        "zero-shot-classification": ("AutoModelForSequenceClassification", SENTENCES, {"candidate_labels": ["a", "b"]}),
        "question-answering": ("AutoModelForQuestionAnswering", [pairs, pairs], {}),
    }
    names = {"label2id": {"contradiction": 0, "neutral": 1, "entailment": 2}, "num_labels": 3}
    for task, (auto, texts, options) in tasks.items():
        if task == "question-answering" and int(transformers.__version__.split(".")[0]) >= 5:
            continue  # transformers 5 has no such pipeline for any model
        torch.manual_seed(0)
        model = load(auto, folder, **(names if task.startswith("zero") else {}))
        tokenizer = load("AutoTokenizer", folder)
        if task == "text-generation":  # as transformers 5 does by itself
            tokenizer.padding_side = "left"
        pipe = transformers.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")
        together = pipe(texts, batch_size=2, **options)
        alone = [pipe([text] * 2, **options)[0] for text in texts]  # one by one; a list of one is unpacked at times
        if task == "feature-extraction":  # a batch keeps the states of padding
            together = [[one[0][: len(other[0])]] for one, other in zip(together, alone, strict=True)]
        same(together, alone, task)


def same(found: Any, expected: Any, where: str) -> None:
    """Equal answers of pipelines: texts exactly, numbers to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            same(found[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for one, other in zip(found, expected, strict=True):
            same(one, other, where)
    elif isinstance(expected, str | int) or expected is None:
        assert found == expected, (where, found, expected)
    else:
        assert abs(float(found) - float(expected)) < 1e-4, (where, found, expected)


# Training


def check_checkpointed_gradients_are_the_same(folder: Path) -> None:
    for auto in ("AutoModelForCausalLM", "AutoModelForSequenceClassification"):
        inputs, _ = rows("right", folder)
        gradients = []
        for checkpointed in (None, False, True):  # none, without and with PyTorch's reentrant form
            torch.manual_seed(0)  # of a new head
            model = load(auto, folder).train()
            if checkpointed is not None:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointed})
            torch.manual_seed(1)  # of dropout
            cache = {"use_cache": True} if "Causal" in auto else {}
            model(**inputs, **cache, **labels_for(auto, inputs)).loss.backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        for found in gradients[1:]:
            for name, gradient in gradients[0].items():
                assert gradient is None or torch.allclose(found[name], gradient, atol=1e-6), (auto, name)


def train(model: Any, auto: str, folder: Path, out: str, **options: Any) -> Any:
    """Two steps of Trainer, and what it then predicts; checked."""
    inputs, _ = rows("right", folder)
    inputs, count = batch_for(auto, inputs), 1 if "Choice" in auto else len(inputs["input_ids"])
    targets = labels_for(auto, rows("right", folder)[0])
    data = [{key: value[number] for key, value in (inputs | targets).items()} for number in range(count)] * 2
    arguments = transformers.TrainingArguments(
        out, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=2,
        per_device_train_batch_size=2, learning_rate=1e-3, **options,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.remove_callback(transformers.PrinterCallback)
    loss = trainer.train().training_loss
    assert 0 < loss < 20, loss
    found = trainer.predict(data)
    assert 0 < found.metrics["test_loss"] < 20
    logits = found.predictions[0] if "Answering" in auto else found.predictions  # a tuple: begin and end
    assert len(logits) == len(data)  # logits alone, no cache beside them
    return trainer


def check_trainer_with_checkpointing_and_bf16(folder: Path) -> None:
    need("accelerate")
    for auto in HEADS:
        with tempfile.TemporaryDirectory() as out:
            trainer = train(load(auto, folder), auto, folder, out, gradient_checkpointing=True, bf16=True)
            model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
            model.save_pretrained(out)
            inputs = batch_for(auto, rows("right", folder)[0])
            again = load(auto, Path(out)).eval()
            with torch.no_grad():
                close(again(**inputs)[0], model(**inputs)[0])
            load("AutoModel", Path(out))  # every other class still loads from what was saved


# Where weights lie, and in what form


@torch.no_grad()
def check_device_maps(folder: Path) -> None:
    need("accelerate")
    inputs, _ = rows("right", folder)
    for auto in ("AutoModelForMaskedLM", "AutoModelForCausalLM"):
        expected = load(auto, folder)(**inputs).logits
        with tempfile.TemporaryDirectory() as out:
            spread = {"embedding": "cpu", "classifier": "cpu", "transformer": "cpu"}
            offloaded = spread | {"transformer.mlp_layers.1": "disk"}
            del offloaded["transformer"]
            offloaded |= {name: "cpu" for name in parts(load(auto, folder)) if name not in offloaded}
            for device_map in ("auto", {"": "cpu"}, spread, offloaded):
                model = load(auto, folder, device_map=device_map, offload_folder=out)
                place = model.get_input_embeddings().weight.device
                given = {key: value if place.type == "meta" else value.to(place) for key, value in inputs.items()}
                close(model(**given).logits.cpu(), expected)


def parts(model: Any) -> Iterator[str]:
    """Names of modules that a device map may place one by one."""
    for name, module in model.transformer.named_children():
        children = [key for key, _ in module.named_children()] if name != "dwa_modules" else []
        yield from (f"transformer.{name}.{key}" for key in children)
        if not children:
            yield f"transformer.{name}"


@torch.no_grad()
def quantised(folder: Path, config: Any) -> None:
    inputs, known = rows("right", folder)
    real = inputs["attention_mask"].bool()
    model = load("AutoModelForCausalLM", folder, quantization_config=config, device_map="cpu")
    logits = model(**inputs).logits[real].float()
    cosine = torch.cosine_similarity(logits, known["right/causal_logits"][real], dim=-1)
    assert cosine.mean() > 0.8, cosine.mean()  # weights are random, so that 4 bits lose much
    matrix = model.transformer.attention_layers[0].in_proj_qk
    assert type(matrix) is not torch.nn.Linear or type(matrix.weight) is not torch.nn.Parameter, "nothing is quantised"
    assert model.generate(**inputs_alone(folder), **GREEDY).shape[1] > 12


def inputs_alone(folder: Path) -> Any:
    return load("AutoTokenizer", folder)(SENTENCES[0], return_tensors="pt")


def check_quantised_by_bitsandbytes(folder: Path) -> None:
    need("bitsandbytes")
    need("accelerate")
    for options in ({"load_in_8bit": True}, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}):
        quantised(folder, transformers.BitsAndBytesConfig(**options))


def check_quantised_by_torchao(folder: Path) -> None:
    quantisation = need("torchao.quantization")
    need("accelerate")
    quantised(folder, transformers.TorchAoConfig(quantisation.Int8WeightOnlyConfig()))


def check_quantised_by_quanto(folder: Path) -> None:
    need("optimum.quanto")
    need("accelerate")
    quantised(folder, transformers.QuantoConfig(weights="int8"))


CHECKS: dict[str, Callable[[Path], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}


def versions() -> str:
    names = ("torch", "transformers", "tokenizers", "accelerate", "peft", "sentence-transformers", "mteb")
    names += ("bitsandbytes", "torchao", "optimum-quanto")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return f"Python {sys.version.split()[0]}, {', '.join(found)}"


def main(checks: dict[str, Callable[[Path], None]], folder: Path) -> int:
    """Every check on every exported folder in `folder`; 1 where one failed."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    print(versions(), flush=True)
    failed = 0
    for model in sorted(path.parent for path in folder.glob("*/expected.safetensors")):
        for name, check in checks.items():
            begun, outcome = time.monotonic(), "passed"
            try:
                check(model)
            except Absent as reason:
                outcome = f"left out: {reason}"
            except Exception:  # of any library: the other checks shall run, too
                outcome, failed = f"FAILED\n{traceback.format_exc()}", failed + 1
            print(f"{model.name:14} {name:38} {time.monotonic() - begun:5.1f} s  {outcome}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(CHECKS, Path(sys.argv[1])))
