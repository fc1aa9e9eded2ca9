"""Small real tokenizers, saved as model folders."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

VOCABULARY = {"<s>": 0, "</s>": 1, "[U]": 2, "[A]": 3, "Compute": 4, "1": 5, "2": 6, "+": 7}
CHAT_TEMPLATE = (
    "{% for m in messages %}[U] {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}[A]{% endif %}"
)


def make_tokenizer(*, chat: bool, bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single=("<s> " if bos else "") + "$A" + (" </s>" if eos else ""),
        special_tokens=[("<s>", 0), ("</s>", 1)],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture
def model_dir(tmp_path):
    """A model folder with a chat tokenizer and empty configurations."""
    folder = tmp_path / "model"
    make_tokenizer(chat=True).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({}))
    return folder
