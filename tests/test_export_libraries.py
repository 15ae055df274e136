"""An exported model under libraries that train or embed with models of others: what is usual there works."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_exports import BOS, PAD, ROOT, library, load, make_exported
from torch.utils.data import Dataset

from model import LTGBert


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[LTGBert, Path]:
    library()
    return make_exported(tmp_path_factory.mktemp("exported"), "gpt-bert")


@pytest.fixture(autouse=True)
def _foreign_warnings():
    """Deprecations inside other libraries are not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Texts(Dataset):
    """Six rows of tokens of several lengths, and a label for each text, or each token, or none."""

    def __init__(self, auto: str) -> None:
        generator = torch.Generator().manual_seed(2)
        self.rows: list[dict[str, Any]] = []
        for number in range(6):
            row = [BOS, *torch.randint(16, 300, (3 + number % 4,), generator=generator).tolist()]
            labels: dict[str, Any] = {}
            if auto == "AutoModelForSequenceClassification":
                labels = {"labels": number % 2}
            if auto == "AutoModelForTokenClassification":
                labels = {"labels": [-100, *(token % 2 for token in row[1:])]}
            self.rows.append({"input_ids": row, **labels})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(self.rows[index])


AUTOS = {
    "AutoModelForSequenceClassification": "DataCollatorWithPadding",
    "AutoModelForTokenClassification": "DataCollatorForTokenClassification",
    "AutoModelForMaskedLM": "DataCollatorForLanguageModeling",
    "AutoModelForCausalLM": "DataCollatorForLanguageModeling",
}


def make_trainer(folder: Path, out: Path, auto: str, **options: Any) -> Any:
    of_language = auto in ("AutoModelForMaskedLM", "AutoModelForCausalLM")
    masks = {"mlm": auto == "AutoModelForMaskedLM", "seed": 3} if of_language else {}
    collator = getattr(library(), AUTOS[auto])(load("AutoTokenizer", folder), **masks)
    texts = Texts(auto)
    arguments = library().TrainingArguments(
        str(out), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", seed=0, **options
    )
    torch.manual_seed(0)  # of a new head
    model = load(auto, folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return library().Trainer(model, arguments, train_dataset=texts, eval_dataset=texts, data_collator=collator)


@pytest.mark.slow
@pytest.mark.parametrize("auto", [auto for auto in AUTOS if auto != "AutoModelForMaskedLM"])  # draws its masks by batch
def test_trainer_accumulates_the_gradient_of_the_whole_batch(exported, tmp_path, auto):
    options = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    whole = make_trainer(exported[1], tmp_path, auto, per_device_train_batch_size=6, **options)
    halves = make_trainer(
        exported[1], tmp_path, auto, per_device_train_batch_size=3, gradient_accumulation_steps=2, **options
    )
    assert halves.train().training_loss == pytest.approx(whole.train().training_loss, rel=1e-5)
    expected = dict(whole.model.named_parameters())
    for name, parameter in halves.model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-6, msg=name)


# Heads for answers and choices


def test_answers_and_choices_are_scored_by_their_definition(exported):
    """Begin and end from every token; of each choice a score from `<s>`, wherever padding stands."""
    torch.manual_seed(0)
    rows = torch.tensor([[BOS, 20, 30, 40, 50, 60], [BOS, 21, 31, 41, PAD, PAD]])
    mask = (rows != PAD).long()
    answers, choices = (
        load(f"AutoModelFor{name}", exported[1]).eval() for name in ("QuestionAnswering", "MultipleChoice")
    )
    with torch.no_grad():
        found = answers(
            rows, attention_mask=mask, start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([3, 3])
        )
        alone = answers(rows[1:, :4])
        torch.testing.assert_close(found.start_logits[1:, :4], alone.start_logits)
        parts = ((found.start_logits, [1, 2]), (found.end_logits, [3, 3]))
        losses = [torch.nn.functional.cross_entropy(logits, torch.tensor(places)) for logits, places in parts]
        torch.testing.assert_close(found.loss, sum(losses) / 2)
        found = choices(rows[None], attention_mask=mask[None], labels=torch.tensor([1]))
        each = [choices(rows[None, :1]).logits[0, 0], choices(rows[None, 1:, :4]).logits[0, 0]]
        torch.testing.assert_close(found.logits, torch.stack(each)[None])
        torch.testing.assert_close(found.loss, -torch.stack(each).log_softmax(0)[1])
        left = torch.tensor([[PAD, PAD, BOS, 21, 31, 41]])
        logits = choices(left[None], attention_mask=(left != PAD).long()[None]).logits
        torch.testing.assert_close(logits[0, 0], each[1])


@pytest.mark.slow
def test_examples_of_the_page_run(exported, tmp_path, monkeypatch):
    """The blocks of examples/README.md, one after the other, in a folder where the model is called my_model."""
    pytest.importorskip("peft", reason="needs peft (requirements.lock has it)")
    (tmp_path / "my_model").symlink_to(exported[1])
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert (tmp_path / "my_adapter" / "adapter_model.safetensors").is_file()
    assert names["tokenizer"].decode(names["answered"]).strip() == "The cat"
