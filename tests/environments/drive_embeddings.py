"""Drives exported folders through sentence-transformers and mteb, as drive.py does through transformers.

    python drive_embeddings.py FOLDER

The folders were exported with --sentence_transformers.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from drive import SENTENCES, close, load, main, need, rows

PAIRS = [("The list holds words", "The list"), ("The function", "returns the length"), ("naïve", "The words")] * 2


def encoder(folder: Path, **options: Any) -> Any:
    package = need("sentence_transformers")
    return package.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu", **options)


def encode(model: Any, texts: list[str], **options: Any) -> torch.Tensor:
    return model.encode(texts, convert_to_tensor=True, show_progress_bar=False, **options)


@torch.no_grad()
def check_folder_is_a_model_with_mean_pooling(folder: Path) -> None:
    model = encoder(folder)
    assert [type(module).__name__ for module in model] == ["Transformer", "Pooling"]
    base, tokenizer = load("AutoModel", folder), load("AutoTokenizer", folder)
    expected = torch.cat([base(**tokenizer(text, return_tensors="pt"))[0].mean(dim=1) for text in SENTENCES])
    for side in ("right", "left"):
        model.tokenizer.padding_side = side
        close(encode(model, SENTENCES), expected)
    assert model.max_seq_length == tokenizer.model_max_length
    long = "The list holds words. " * 50  # is cut
    kept = torch.tensor([tokenizer(long).input_ids[: model.max_seq_length]])
    close(encode(model, [long]), base(kept)[0].mean(dim=1))
    with tempfile.TemporaryDirectory() as out:  # without modules.json that is the default
        shutil.copytree(folder, Path(out, "plain"), ignore=shutil.ignore_patterns("modules.json"))
        close(encode(encoder(Path(out, "plain")), SENTENCES), expected)
    known = rows("right", folder)[1]  # as our own code has it
    means = known["right/hidden"][1][known["right/mask"][1].bool()].mean(dim=0)
    features = {"input_ids": known["right/ids"], "attention_mask": known["right/mask"]}
    close(model(features)["sentence_embedding"][1], means)


def check_embeddings_in_bf16(folder: Path) -> None:
    expected = encode(encoder(folder), SENTENCES)
    model = encoder(folder, model_kwargs={"dtype": torch.bfloat16})
    found = encode(model, SENTENCES)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert torch.cosine_similarity(found.float(), expected, dim=-1).min() > 0.995
    assert encode(model, SENTENCES, precision="int8").dtype == torch.int8


def check_training_of_embeddings(folder: Path) -> None:
    package, data = need("sentence_transformers"), need("datasets")
    need("accelerate")
    columns = list(zip(*PAIRS, strict=True))
    texts = data.Dataset.from_dict({"anchor": list(columns[0]), "positive": list(columns[1])})
    model = encoder(folder)
    before = encode(model, SENTENCES)
    with tempfile.TemporaryDirectory() as out:
        arguments = package.SentenceTransformerTrainingArguments(
            out, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=8, logging_steps=1,
            per_device_train_batch_size=6, learning_rate=3e-3, gradient_checkpointing=True, bf16=True,
        )  # fmt: skip
        loss = need("sentence_transformers.losses").MultipleNegativesRankingLoss(model)
        trainer = package.SentenceTransformerTrainer(model, arguments, train_dataset=texts, loss=loss)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
        losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        assert float(losses[-1]) < float(losses[0]), losses
        trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
        after = encode(trained, SENTENCES)
        assert (after - before).abs().max() > 1e-3
        trained.save_pretrained(out)
        close(encode(encoder(Path(out)), SENTENCES), after, 1e-4)


def check_cross_encoder(folder: Path) -> None:
    package, data = need("sentence_transformers"), need("datasets")
    need("accelerate")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as out:
        cross = package.CrossEncoder(str(folder), num_labels=1, trust_remote_code=True, device="cpu")
        assert type(cross.model).__name__.endswith("ForSequenceClassification"), type(cross.model)
        columns = list(zip(*PAIRS, strict=True))
        texts = data.Dataset.from_dict(
            {"query": list(columns[0]), "answer": list(columns[1]), "label": [1.0, 0.0, 1.0] * 2}
        )
        cross_encoder = need("sentence_transformers.cross_encoder")
        arguments = cross_encoder.CrossEncoderTrainingArguments(
            out, use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=3
        )
        loss = need("sentence_transformers.cross_encoder.losses").BinaryCrossEntropyLoss(cross)
        trainer = cross_encoder.CrossEncoderTrainer(cross, arguments, train_dataset=texts, loss=loss)
        trainer.remove_callback(transformers.PrinterCallback)
        assert trainer.train().training_loss > 0
        found = cross.predict(PAIRS[:3], show_progress_bar=False)
        assert len(set(found.tolist())) == 3
        cross.save_pretrained(out)
        again = package.CrossEncoder(out, trust_remote_code=True, device="cpu")
        close(torch.tensor(again.predict(PAIRS[:3], show_progress_bar=False)), torch.tensor(found))


def check_mteb_on_a_local_task(folder: Path) -> None:
    mteb, data, stats = need("mteb"), need("datasets"), need("scipy.stats")
    scores = [0.5, 3.0, 4.5, 1.0, 2.0, 5.0]
    firsts, seconds = zip(*PAIRS[:3], *((first[::-1], second) for first, second in PAIRS[:3]), strict=True)

    class LocalSimilarity(mteb.abstasks.AbsTaskSTS):
        metadata = mteb.TaskMetadata(
            name="LocalSimilarity", description="Pairs of a local file.", reference=None, type="STS", category="t2t",
            dataset={"path": "local", "revision": "1"}, modalities=["text"], eval_splits=["test"],
            eval_langs=["eng-Latn"], main_score="cosine_spearman", date=None, domains=None, task_subtypes=None,
            license=None, annotations_creators=None, dialect=None, sample_creation=None, bibtex_citation="",
        )  # fmt: skip

        def load_data(self, **_: Any) -> None:
            columns = {"sentence1": list(firsts), "sentence2": list(seconds), "score": scores}
            self.dataset = data.DatasetDict({"test": data.Dataset.from_dict(columns)})
            self.data_loaded = True

    model = encoder(folder)
    result = mteb.evaluate(model, LocalSimilarity(), cache=None, co2_tracker=False, show_progress_bar=False)
    found = result.task_results[0].get_score()
    cosines = torch.cosine_similarity(encode(model, list(firsts)), encode(model, list(seconds)), dim=-1)
    expected = stats.spearmanr(cosines.numpy(), scores).statistic
    assert abs(found - expected) < 1e-4, (found, expected)


CHECKS: dict[str, Callable[[Path], None]] = {
    name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")
}


if __name__ == "__main__":
    sys.exit(main(CHECKS, Path(sys.argv[1])))
