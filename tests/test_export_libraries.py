"""An exported model under libraries that train or embed with models of others: what is usual there works."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import BOS, library, load, make_exported
from torch.utils.data import Dataset

from model import LTGBert


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[LTGBert, Path]:
    library()
    return make_exported(tmp_path_factory.mktemp("exported"), "gpt-bert")


@pytest.fixture(autouse=True)
def _foreign_warnings():
    """Deprecations inside other libraries are not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Texts(Dataset):
    """Rows of tokens of several lengths, and a label each."""

    def __init__(self, count: int, labels: bool) -> None:
        generator = torch.Generator().manual_seed(2)
        rows = [torch.randint(16, 300, (3 + number % 4,), generator=generator).tolist() for number in range(count)]
        self.rows: list[dict[str, Any]] = [{"input_ids": [BOS, *row]} for row in rows]
        for number, row in enumerate(self.rows):
            row |= {"labels": number % 2} if labels else {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


@pytest.mark.parametrize("auto", ["AutoModelForSequenceClassification", "AutoModelForMaskedLM", "AutoModelForCausalLM"])
def test_trainer_trains_evaluates_and_predicts(exported, tmp_path, auto):
    folder, of_texts = exported[1], auto == "AutoModelForSequenceClassification"
    tokenizer = load("AutoTokenizer", folder)
    masks = {"mlm": auto == "AutoModelForMaskedLM", "seed": 3}
    collator = (
        library().DataCollatorWithPadding(tokenizer)
        if of_texts
        else library().DataCollatorForLanguageModeling(tokenizer, **masks)
    )
    arguments = library().TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=3, use_cpu=True, report_to=[], disable_tqdm=True,
        save_strategy="no", seed=0,
    )  # fmt: skip
    texts = Texts(6, of_texts)
    trainer = library().Trainer(
        load(auto, folder), arguments, train_dataset=texts, eval_dataset=texts, data_collator=collator
    )
    assert trainer.train().training_loss > 0
    assert trainer.evaluate()["eval_loss"] > 0
    found = trainer.predict(texts)
    assert found.predictions.shape == ((6, 2) if of_texts else (6, 7, 320))  # logits alone, no cache beside them
    assert found.label_ids.shape == ((6,) if of_texts else (6, 7))
