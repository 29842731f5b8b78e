"""The data: records, files, tokens."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Symptom
from finetune.runtime.language import N_

_RECORDS_FIX = N_(
    "Correct the records named in the evidence; `python -m finetune inspect` shows records as they are trained. They "
    "may be alpaca (instruction, input, output), sharegpt (conversations) or messages; other field names are not "
    "guessed. --on-bad-row drop drops bad records and counts them."
)
# "rows" in the messages of earlier versions.
_BAD_RECORDS = (
    r"^\[ERROR\] .*(?P<bad_records>\d+) of (?P<records>\d+) (?:rows|records) cannot be trained on "
)

# Parameters whose first dimension is the vocabulary, as model families name them.
_EMBEDDING = (
    r"(?:embed_tokens|lm_head|wte|word_embeddings?|tok_embeddings|embed_in|embed_out|output_layer|token_embedding\w*"
    r"|embeddings?\.weight|shared\.weight|embedding\.weight)"
)

_TOO_LONG_TEXT = N_(
    "A sample has more tokens[[ ({tokens})]] than the model has positions[[ ({limit})]], and was not truncated."
)
_TOO_LONG_FIX = N_(
    "Tokenize with truncation=True[[ and max_length={limit} (--cutoff-len {limit})]], split long texts before, or take "
    "a model made for longer ones."
)
# Sizes that do not fit, where the log tells that they are those of a sample and of the model's
# positions.
SAMPLE_TOO_LONG = Symptom(
    "sequence_too_long",
    (),
    _TOO_LONG_TEXT,
    _TOO_LONG_FIX,
    confidence=0.88,
    source="torch, transformers",
)

SYMPTOMS = (
    Symptom(
        "dataset_missing_field",
        (
            rf"{_BAD_RECORDS}\((?!.*(?:broken JSON|not UTF-8))(?P<kinds>[^)]*)\)",
            r"KeyError: ['\"](?P<field>instruction|input|output|messages|conversations?|prompt|response|text|question|"
            r"answer|content|role|value|from|difficulty|input_ids|labels)['\"]",
            r"(?P<records>[\d,]+) samples have no '(?P<field>\w+)': either every r(?:ow|ecord)",
            r"^\[ERROR\] has no column (?P<field>\S+)",
            r"^\[ERROR\] (?:rank \d+: )?no r(?:ow|ecord) is left to train on",
            r"not in the dataset\. Current columns|method that includes input_ids, but you provided"
            r"|No columns in the dataset match",
            r"KeyError: ['\"](?P<field>chosen|rejected|completion|context|target|label|image|images)['\"]",
            r"'dict object' has no attribute '(?P<field>role|content|from|value)'"
            r"|Field \"?(?P<field_>\w+)\"? does not exist in",
            r"(?:[Mm]issing|required) (?:column|field|key)s?\b.{0,40}(?:dataset|example|sample|record|row)",
            r"[Cc]olumn (?:name )?\[?'?(?P<field>[\w', ]+)'?\]? not in the dataset",
            r"(?:level|difficulty) '(?P<field>\w+)' has weight in the curriculum but the data has no sample of it",
        ),
        N_(
            "Records lack a field that training needs[[ ('{field}')]][[: {bad_records} of {records} records "
            "({kinds})]]."
        ),
        _RECORDS_FIX,
        source="this package, datasets, Python",
    ),
    Symptom(
        "dataset_missing_field",
        (
            r"must have the same columns, but|because column names don't match|Couldn't cast array of type",
        ),
        N_("The data files do not have the same columns, or not the same types in them."),
        N_(
            "The evidence names the column: give every record of every file the same fields and types (an empty text "
            "or [] instead of null), drop what is not needed, or load the files one by one. `python -m finetune "
            "inspect` shows records as they are trained."
        ),
        confidence=0.91,
        source="datasets",
    ),
    Symptom(
        "sequence_too_long",
        (
            r"expanded size of the tensor \((?P<tokens>\d+)\) must match the existing size \((?P<limit>512|514|1024"
            r"|1026|2048|4096|8192)\) at non-singleton dimension 1\.\s+Target sizes: \[\d+, (?P=tokens)\]\.\s+"
            r"Tensor sizes: \[1, (?P=limit)\]",
        ),
        _TOO_LONG_TEXT,
        _TOO_LONG_FIX,
        confidence=0.88,
        source="torch, transformers",
    ),
    Symptom(
        "chat_template_mismatch",
        (
            r"Could not find (?:response|instruction) key (?P<key>.{1,80}?) in the following instance",
        ),
        N_(
            "The text that is to begin every response[[ ({key})]] is not in the samples as they are formatted, so that "
            "they were left out of the loss: where none is left, the loss is 0 and the gradients are NaN."
        ),
        N_(
            "Print one formatted sample, and give the template (or the token ids of it) that stands in it: the "
            "response_template must be that of the model's chat format, like '[/INST]' or '<|im_start|>assistant\\n'. "
            "Where a response was only cut off, raise the length limit."
        ),
        confidence=0.86,
        in_warnings=True,
        lasting=True,
        needs=("nan_loss",),
        explains=("nan_loss",),
        source="trl",
    ),
    Symptom(
        "chat_template_mismatch",
        (
            r"(?:Error|Exception): (?P<reason>.*\broles must alternate\b.*)",
            r"TemplateError: (?P<reason>.*\b(?:roles?|messages?|conversations?)\b.*)",
        ),
        N_("A conversation in the data does not fit the chat template[[: {reason}]]."),
        N_(
            "Give conversations the order that the template wants: an optional system message, then user and assistant "
            "in turn, each with text. `python -m finetune inspect` shows a record as it is trained."
        ),
        confidence=0.86,
        source="chat templates of model families",
    ),
    Symptom(
        "dataset_bad_json",
        (r"UnicodeDecodeError: '(?P<codec>\S+)' codec can't decode",),
        N_("A text file is in another encoding than it is read in[[ ({codec})]]."),
        N_(
            "`file -i FILE` guesses the encoding; convert it once (`iconv -f GB18030 -t UTF-8 FILE`), or read it with "
            "encoding='gb18030' (Chinese), 'cp1252' and the like."
        ),
        confidence=0.89,
        source="Python",
    ),
    Symptom(
        "dataset_empty",
        (
            r"num_samples should be a positive integer value, but got num_samples=0",
            r"(?:Error|Exception): .*(?:[Dd]ataset|[Dd]ataloader|data loader) (?:is empty|has (?:no|0"
            r"|zero) (?:samples|length))",
            r"(?:Error|Exception): .*[Nn]o (?:samples|examples|records) (?:were |are )?(?:left|found|remain)",
            r"(?:Error|Exception): Cannot find valid samples, check",
        ),
        N_("No record is left to train on: the data are empty, or all were filtered out."),
        N_(
            "`wc -l` the data files, and print the number of records after each step of preparation: the filter by "
            "length (--cutoff-len), the split and the mapping of columns (LLaMA-Factory: formatting, columns and tags "
            "in data/dataset_info.json) are the usual places."
        ),
        confidence=0.86,
        source="torch.utils.data, LLaMA-Factory",
    ),
    Symptom(
        "dataset_empty",
        (r"Dropped lengthy example with length (?P<tokens>\d+) > (?P<limit>\d+)",),
        N_(
            "Every record was left out as too long[[: the limit is {limit} tokens, and one has {tokens}]]."
        ),
        N_(
            "Raise the limit (LLaMA-Factory: cutoff_len, here --cutoff-len), or split long records: the median of "
            "their lengths in tokens shows what is needed."
        ),
        confidence=0.9,
        in_warnings=True,
        at_least=2,
        needs=("dataset_empty",),
        explains=("dataset_empty",),
        source="LLaMA-Factory",
    ),
    Symptom(
        "dataset_bad_json",
        (
            rf"{_BAD_RECORDS}\((?=.*(?:broken JSON|not UTF-8))(?P<kinds>[^)]*)\)",
            r"^\[ERROR\] (?:rank \d+: )?broken JSON: (?P<reason>.*)",
            r"^\[ERROR\] (?:rank \d+: )?is not UTF-8 at byte (?P<byte>\d+)",
            r"is one JSON object over several lines",
            r"JSONDecodeError: (?P<reason>.*)",
            r"ArrowInvalid: JSON parse error: (?P<reason>.*)",
            r"ArrowInvalid: .*(?:changed from \S+ to|CSV parse error|in row \d)|Error tokenizing data"
            r"|ValueError: (?:Expected object or value|Trailing data|Unmatched"
            r"|Unexpected character found when decoding)",
            r"Failed to (?:load|read) JSON (?:from )?file",
        ),
        N_(
            "A data file is not valid JSON[[: {reason}]][[: {bad_records} of {records} records ({kinds})]]."
        ),
        N_(
            "A .jsonl file has one JSON object per line, a .json file one array of records, both in UTF-8. `python -c "
            "\"import json,sys; [json.loads(line) for line in open(sys.argv[1], encoding='utf-8')]\" FILE` names the "
            "line."
        ),
        more_fix=_RECORDS_FIX,
        confidence=0.88,
        source="this package, json, pyarrow",
    ),
    Symptom(
        "tokenizer_vocab_mismatch",
        (
            r"the (?:tokenizer|data) has (?:token )?ids up to (?P<highest>\d+), "
            r"but the model has only (?P<embeddings>\d+) embeddings",
            r"index out of range in self|Assertion `?srcIndex < srcSelectDimSize`? failed",
            rf"size mismatch for \S*{_EMBEDDING}\S*: copying a param with shape "
            r"torch\.Size\(\[(?P<saved>[1-9]\d*)[^\]]*\]\)(?: from checkpoint, the shape in current model is "
            r"torch\.Size\(\[(?P<embeddings>[1-9]\d*))?",
            rf"size mismatch for \S*{_EMBEDDING}\S*: (?!copying a param with shape torch\.Size\(\[0\])",
            r"size mismatch for (?!\S*(?:proj|mlp|attn|fc|lora|norm"
            r"|layers\.))\S*: copying a param with shape torch\.Size\(\["
            r"(?P<saved>\d{4,}), (?P<width>\d+)\]\).*torch\.Size\(\[(?P<embeddings>\d{4,}), (?P=width)\]\)",
            # Not where the vocabulary is the same and the width is another.
            rf"{_EMBEDDING}(?!.*\[(?P<rows>\d+), \d+\]\).*\[(?P=rows), \d+\])"
            r"\S*\W.{0,40}(?:size mismatch|MISMATCH|shape mismatch|found shape|ckpt: torch\.Size)",
            r"vocab(?:ulary)?[_ ]?size\W.{0,60}(?:mismatch|differ|not (?:match|equal))"
            r"|IndexKernel.*index out of bounds",
            r"the file has ids up to (?P<highest>\d+), and the model a vocabulary of (?P<embeddings>\d+)",
            r"token \d+ is (?P<highest>\d+), and the vocabulary has (?P<embeddings>\d+) ids",
            r"the file was made with another tokenizer",
        ),
        N_(
            "The tokenizer and the model do not match: there is a token id[[ {highest}]] that the model has no "
            "embedding for[[ (it has {embeddings})]][[; the weights were saved for {saved} tokens]]."
        ),
        N_(
            "Use the tokenizer that came with these weights (and convert weights for the same parallel sizes). If "
            "tokens were added, the embeddings must be enlarged and trained (resize_token_embeddings and save) before "
            "this run. For prepared token files, run `python -m finetune prepare` again with the model's tokenizer."
        ),
        source="torch, transformers, this package",
        explains=("illegal_memory_or_ecc", "zero3_empty_or_size_mismatch"),
    ),
    Symptom(
        "data_corrupt",
        (
            r"(?:Error|Exception): .*(?:bad header, cannot read|Index doesn't match expected format)"
            r"|(?:cannot mmap|mmap\w*) an empty file",
            r"Tried reading schema message, was null or length 0|Parquet magic bytes not found"
            r"|Not an Arrow file|Invalid flatbuffers",
            r"Arrow(?:Invalid|IOError): .*(?:[Ff]ile is too small|[Ee]xpected to (?:be able to )?read|truncated"
            r"|[Cc]orrupt)",
            r"BadGzipFile|Compressed file ended before|zlib\.error|zstd\S*Error|tarfile\.\w*ReadError"
            r"|unexpected end of (?:stream|archive)|Corrupt snappy",
            r"IndexError: index \d{7,} is out of bounds for axis 0 with size \d{7,}",
        ),
        N_("A prepared data file is cut short, empty, or not what its index says."),
        N_(
            "Compare its size with the source, remove it together with its index and cache, and prepare it again "
            "(`python -m finetune prepare`, preprocess_data.py, save_to_disk), by one process and with room on the "
            "disk; then start again."
        ),
        confidence=0.88,
        source="Megatron-LM, pyarrow, Python",
    ),
    Symptom(
        "data_corrupt",
        (
            r"UnidentifiedImageError: cannot identify image file ['\"]?(?P<file>[^'\"<>]+)",
            r"UnidentifiedImageError|image file is truncated",
        ),
        N_(
            "An image of the data[[ ({file})]] cannot be read: it is broken, cut short, or no image."
        ),
        N_(
            "Open it (`file PATH` says what it is), and copy it again or take its record out. To find others: read "
            "all images once before training (PIL's Image.open(PATH).load()), and leave out what fails, counted."
        ),
        confidence=0.89,
        source="Pillow",
    ),
    Symptom(
        "tokenizer_vocab_mismatch",
        (
            r"Assertion `?t >= 0 && t < n_classes`? failed|Target (?P<highest>-?\d+) is out of bounds",
        ),
        N_(
            "A label[[ ({highest})]] is outside of what the model's output can be: 0 to the number of classes (or the "
            "vocabulary) less one."
        ),
        N_(
            "Print the labels' minimum and maximum: number classes from 0, set num_labels to their count, and mark "
            "what is to be ignored with -100. In a language model the tokenizer has more tokens than the output layer: "
            "use the model's own, or resize_token_embeddings."
        ),
        confidence=0.91,
        source="torch",
        explains=("illegal_memory_or_ecc",),
    ),
)
