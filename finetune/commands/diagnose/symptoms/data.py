"""The data: rows, files, tokens."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Symptom
from finetune.runtime.language import Text

_ROWS_FIX: Text = {
    "en": "Correct the rows named in the evidence; `python -m finetune inspect` shows rows as they are trained. Rows "
    "may be alpaca (instruction, input, output), sharegpt (conversations) or messages; names of other columns are "
    "not guessed. --on-bad-row drop trains without bad rows and counts them.",
    "zh": "修正证据中指出的行;`python -m finetune inspect` 显示实际训练的内容。支持 alpaca(instruction、input、"
    "output)、sharegpt(conversations)与 messages 格式,其他列名不会猜测。--on-bad-row drop 会丢弃坏行并计数。",
}

SYMPTOMS = (
    Symptom(
        "dataset_missing_field",
        (
            r"^\[ERROR\] .*(?P<bad_rows>\d+) of (?P<rows>\d+) rows cannot be trained on \((?!.*(?:broken JSON|not "
            r"UTF-8))(?P<kinds>[^)]*)\)",
            r"KeyError: ['\"](?P<field>instruction|input|output|messages|conversations?|prompt|response|text|question|"
            r"answer|content|role|value|from|difficulty|input_ids|labels)['\"]",
            r"(?P<rows>[\d,]+) samples have no '(?P<field>\w+)': either every row",
            r"^\[ERROR\] has no column (?P<field>\S+)",
            r"^\[ERROR\] (?:rank \d+: )?no row is left to train on",
            r"[Cc]olumn (?:name )?\[?'?(?P<field>[\w', ]+)'?\]? not in the dataset",
            r"level '(?P<field>\w+)' has weight in the curriculum but the data has no sample of it",
        ),
        {
            "en": "Rows of the data lack a field that training needs[[ ('{field}')]][[: {bad_rows} of {rows} rows "
            "({kinds})]].",
            "zh": "数据行缺少训练所需的字段[[('{field}')]][[:{rows} 行中有 {bad_rows} 行({kinds})]]。",
        },
        _ROWS_FIX,
        confidence=0.9,
        source="this package, datasets, Python",
    ),
    Symptom(
        "dataset_bad_json",
        (
            r"^\[ERROR\] .*(?P<bad_rows>\d+) of (?P<rows>\d+) rows cannot be trained on \((?=.*(?:broken JSON|not "
            r"UTF-8))(?P<kinds>[^)]*)\)",
            r"^\[ERROR\] (?:rank \d+: )?broken JSON: (?P<reason>.*)",
            r"^\[ERROR\] (?:rank \d+: )?is not UTF-8 at byte (?P<byte>\d+)",
            r"is one JSON object over several lines",
            r"JSONDecodeError: (?P<reason>.*)",
            r"ArrowInvalid: JSON parse error: (?P<reason>.*)",
            r"Failed to (?:load|read) JSON (?:from )?file",
            r"UnicodeDecodeError: 'utf-8' codec can't decode",
        ),
        {
            "en": "A data file is not valid JSON[[: {reason}]][[: {bad_rows} of {rows} rows ({kinds})]].",
            "zh": "数据文件不是合法的 JSON[[:{reason}]][[:{rows} 行中有 {bad_rows} 行({kinds})]]。",
        },
        {
            "en": "A .jsonl file has one JSON object per line, a .json file one array of rows, both in UTF-8. `python "
            '-c "import json,sys; [json.loads(line) for line in open(sys.argv[1], '
            "encoding='utf-8')]\" FILE` names the line. " + _ROWS_FIX["en"],
            "zh": '.jsonl 每行一个 JSON 对象,.json 是一个由行组成的数组,均为 UTF-8。`python -c "import json,sys; '
            "[json.loads(line) for line in open(sys.argv[1], encoding='utf-8')]\" FILE` "
            "可找出出错的行。" + _ROWS_FIX["zh"],
        },
        confidence=0.88,
        source="this package, json, pyarrow",
    ),
    Symptom(
        "tokenizer_vocab_mismatch",
        (
            r"the tokenizer has ids up to (?P<highest>\d+), but the model has only (?P<embeddings>\d+) embeddings",
            r"index out of range in self",
            r"Assertion `?srcIndex < srcSelectDimSize`? failed",
            r"size mismatch for \S*(?:embed_tokens|lm_head|wte|word_embeddings)\S*: copying a param with shape "
            r"torch\.Size\(\[(?P<saved>[1-9]\d*)[^\]]*\]\)(?: from checkpoint, the shape in current model is "
            r"torch\.Size\(\[(?P<embeddings>[1-9]\d*))?",
            r"Assertion `?t >= 0 && t < n_classes`? failed|Target (?P<highest>\d+) is out of bounds",
            r"the file has ids up to (?P<highest>\d+), and the model a vocabulary of (?P<embeddings>\d+)",
            r"token \d+ is (?P<highest>\d+), and the vocabulary has (?P<embeddings>\d+) ids",
            r"the file was made with another tokenizer",
        ),
        {
            "en": "The tokenizer and the model do not belong together: there is a token id[[ {highest}]] that the "
            "model has no embedding for[[ (it has {embeddings})]][[; the weights were saved for {saved} tokens]].",
            "zh": "分词器与模型不匹配:存在模型没有 embedding 的 token id[[ {highest}]][[(模型只有 {embeddings} "
            "个)]][[;权重按 {saved} 个 token 保存]]。",
        },
        {
            "en": "Use the tokenizer that came with these weights. If tokens were added, the embeddings must be made "
            "larger and trained (resize_token_embeddings and save) before this run. For prepared token files run "
            "`python -m finetune prepare` again with the model's tokenizer.",
            "zh": "使用与权重配套的分词器。若新增过 token,须先扩大并训练 embedding(resize_token_embeddings 并保存)。"
            "已准备的 token 文件请用模型的分词器重新执行 `python -m finetune prepare`。",
        },
        confidence=0.9,
        source="torch, transformers, this package",
        explains=("illegal_memory_or_ecc", "zero3_empty_or_size_mismatch"),
    ),
)
