"""Exceptions that no rule knows by their words: what the frames of the traceback tell of the work
that failed.

The place says which part refused, and the message, which is quoted, why. So these are surer than
`unknown`, and less sure than any rule that knows the message.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

_SOURCE = "Python tracebacks"


def _place(cause: str, explanation: str, fix: str) -> Symptom:
    return Symptom(cause, (), explanation, fix, kind=Kind.VAGUE, confidence=0.6, source=_SOURCE)


_PACKAGES = _place(
    "missing_package",
    N_(
        "A package cannot be used here: it is missing, too old, or does not fit the others: {error}[[ ({frame})]]."
    ),
    N_(
        "Install or update what the message names in the environment of the run, on every node (`which python`, `pip "
        "check`); the releases of transformers, trl, peft, accelerate and torch of about the same time belong together."
    ),
)
_FILE = _place(
    "file_not_found",
    N_(
        "A file or folder that the run needs is not there, or not what it should be: {error}[[ ({frame})]]."
    ),
    N_(
        "`ls -l` the path in the shell (and container) of the run, on every node: relative paths start where the run "
        "is started."
    ),
)
_BUILD = _place(
    "compile_failed",
    N_("Compiling a kernel failed: {error}[[ ({frame})]]."),
    N_(
        "Look at the first error of the compiler above. A compiler, its headers and the CUDA toolkit must be there in "
        "the versions that torch was built with; without torch.compile (TORCHDYNAMO_DISABLE=1) and without custom "
        "operators the rest can be tried."
    ),
)
_HUB = _place(
    "hub_offline",
    N_("A request to the hub or another server failed: {error}[[ ({frame})]]."),
    N_(
        "Try the same address from this machine (`curl -I`): a wrong name, no access (HF_TOKEN), a proxy, or a server "
        "that is down. Otherwise download where there is a network, and give the folder (--model DIR, "
        "HF_HUB_OFFLINE=1)."
    ),
)
_DATA = _place(
    "data_refused",
    N_(
        "The data, or how they are prepared, were refused[[ on rank {rank}]]: {error}[[ ({frame})]]."
    ),
    N_(
        "Print the record, the columns and the settings of the data set that this function gets, and compare them with "
        "what the message asks for; `python -m finetune inspect` shows records as they are trained. With map and "
        "workers try one process first (num_proc=1, --dataloader-num-workers 0): the message is then the real one."
    ),
)
_SAVING = _place(
    "saving_failed",
    N_("Saving failed[[ on rank {rank}]]: {error}[[ ({frame})]]."),
    N_(
        "Correct what the message names (format, shared weights, an invalid generation config, the folder), and try it "
        "with one early save. The last checkpoint before it is the one to resume from; do not trust one that was cut "
        "off here."
    ),
)
_LOADING = _place(
    "loading_failed",
    N_(
        "Loading the model, its tokenizer or a checkpoint failed[[ on rank {rank}]]: {error}[[ ({frame})]]."
    ),
    N_(
        "Compare what the message names with the folder that is loaded: config.json (model_type, "
        "transformers_version, quantization), the tokenizer's files, all weights, and for a checkpoint the settings it "
        "was written with. A model newer than the installed transformers needs `pip install -U transformers`."
    ),
)
_SETTINGS = _place(
    "invalid_settings",
    N_("A setting was refused: {error}[[ ({frame})]]."),
    N_(
        "Correct the argument that the message names, where the configuration, the trainer or the launcher gets it; "
        "names and values differ between versions of the package."
    ),
)
_ARGUMENTS = _place(
    "invalid_settings",
    N_("A library refused what it was called with[[ on rank {rank}]]: {error}[[ ({frame})]]."),
    N_(
        "The message says what it wants: find the setting or the line of your own that gives it (the last frame of "
        "yours in the traceback). Where nothing of yours is wrong, the versions of the packages do not belong together."
    ),
)
_VERSIONS = _place(
    "package_mismatch",
    N_(
        "A library got something that it does not support[[ on rank {rank}]]: {error}[[ ({frame})]]."
    ),
    N_(
        "Most often packages whose versions do not belong together, or a value that is None or of another type than "
        "documented: look at the last frame of yours in the traceback, then compare the installed versions with those "
        "that the program or the model asks for (`pip check`, config.json's transformers_version)."
    ),
)
_PROGRAM = _place(
    "program_error",
    N_("The program itself stopped[[ on rank {rank}]]: {error}[[ in {frame}]]."),
    N_(
        "Read that line and those that call it: a name, an attribute or an argument that is not there, or a check of "
        "the program's own whose message says what it wants. Try it with one process and a few records."
    ),
)
PLACES = (
    _PACKAGES,
    _FILE,
    _BUILD,
    _HUB,
    _DATA,
    _SAVING,
    _LOADING,
    _SETTINGS,
    _ARGUMENTS,
    _VERSIONS,
    _PROGRAM,
)

# From the innermost frame outwards, in each the first that matches: `PATH, in FUNCTION`.
_BY_FRAME: tuple[tuple[re.Pattern[str], Symptom], ...] = tuple(
    (re.compile(pattern), symptom)
    for pattern, symptom in (
        (
            r"import_utils\.py|importlib|, in requires?_\w*(?:backend|version|package)|versions\.py",
            _PACKAGES,
        ),
        (r"/(?:torch/_inductor|torch/_dynamo|triton|op_builder)/|cpp_extension\.py", _BUILD),
        (
            r"/(?:requests|urllib3|httpx|httpcore|aiohttp|modelscope/hub)/"
            r"|huggingface_hub/(?:file_download|_snapshot|hf_|_commit|lfs|utils/_(?:http|headers|auth))",
            _HUB,
        ),
        (
            r", in (?:_?save|export|consolidat|merge_and_unload|to_json|push_to|_?upload)\w*",
            _SAVING,
        ),
        (
            r"(?:tokeniz|processing|extract)\w*\.py\b.*, in (?:__init__|_?from_|_?load|get_\w*dict|get_spm|convert)\w*",
            _LOADING,
        ),
        (
            r"/(?:PIL|torchvision/io|torchcodec|decord|av|soundfile|librosa|datasets|torch/utils/data|dataset|prompt_strategies|jinja2|template)/|/(?:data|dataset)/\w+\.py"
            r"|/(?:\w*data_?(?:set|loader|collator|utils)\w*|\w*tokeniz\w*|\w*prompter\w*|\w*chat_template\w*|mm_plugin"
            r"|processing_\w+|image_processing\w*|feature_extraction\w*)\.py",
            _DATA,
        ),
        (
            r", in (?:\w*collat|\w*tokeni[sz]e|apply_chat|\w*preprocess|\w*_?dataset|\w*dataloader|read_json|read_data"
            r"|load_data|__getitem__|encode|format_)\w*",
            _DATA,
        ),
        (
            r", in (?:\w*from_pretrained|_?load_\w+|_?load|resume\w*|\w*load_(?:state_dict|checkpoint|model)\w*"
            r"|get_checkpoint\w*|build_model|get_model\w*|setup_model\w*)\b"
            r"|configuration_utils\.py\b.*, in (?:_?get_config|_dict_from|from_)\w*|/(?:quantizers|safetensors"
            r"|sentencepiece|auto|models/\w+/configuration_\w+)\b|core_model_loading|dynamic_module|/dist(?:ributed/|_)checkpoint\w*/|_cache_manager",
            _LOADING,
        ),
        (
            r"/(?:\w*training_args\w*|\w*config\w*|\w*arguments|\w*_args|args|parser|\w*argparser?|hparams|schemas"
            r"|validation|yaml|pydantic)(?:/\w+)*\.py"
            r"|, in (?:__post_init__|_?_?(?:validat|verify|check|sanity|parse|do_\w*check|configure)\w*)",
            _SETTINGS,
        ),
    )
)
# What a call was refused with; others tell less, and count where the code raised them by itself.
_REFUSED = re.compile(
    r"(?:Value|Type|NotImplemented|Assertion|Config\w*|Argument|Validation)Error$"
)
_RAISED = re.compile(r"(?:Runtime|Index|Key|Attribute)Error$|^Exception$")
_BROKEN = re.compile(r"(?:Attribute|Name|UnboundLocal|Type|Syntax|Indentation)Error$")
_BY_NAME = (
    (re.compile(r"(?:Import|ModuleNotFound|PackageNotFound)Error$"), _PACKAGES),
    (re.compile(r"^(?:FileNotFound|FileExists|NotADirectory|IsADirectory)Error$"), _FILE),
)
# Raised by no check: Python's own words for a value of another form.
_SLIPPED = re.compile(
    r"values to unpack|object (?:is not|has no|does not)|positional argument|required keyword|unexpected keyword"
    r"|unsupported operand|argument of type|indices must be|could not convert|invalid literal"
)
_WANTS = re.compile(
    r"\b(?:must|should|cannot|can't|requires?|invalid|unsupported|unknown|unrecogni[sz]ed|not (?:supported"
    r"|allowed|valid)"
    r"|need to|please|does(?: not|n't) support"
    r"|at least|at most|(?:greater|less|larger|smaller) than|only (?:support|one)\w*|instead of|conflicts?"
    r"|incompatible)\b",
    re.IGNORECASE,
)
# Of the device, the network or other processes, wherever they are raised.
_ELSEWHERE = re.compile(
    r"CUDA (?:error|out)|CUBLAS|CUDNN|NCCL|HCCL|NPU (?:error|out)|\bACL\b|aclnn|[Gg]loo|\bc10d|Dist\w*Error"
    r"|Time(?:d )?out|timed? out"
    r"|Connection|Memory|Interrupt|SystemError|Exit\b|Abort\b|Rendezvous"
)
# Installed, or started from its source.
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/src/(?:trl|peft|transformers|accelerate|datasets)/"
    r"|/(?:llamafactory|llmtuner|swift|axolotl|megatron|mindspeed\w*|modellink|verl|openrlhf)/"
)
_STANDARD = re.compile(r"/lib/python3|<frozen |<string>")


def symptom_of_place(
    frames: Sequence[str], text: str, *, raised: bool
) -> tuple[Symptom, dict[str, str]] | None:
    """What the place of an exception tells of it, with values for the texts; None where it tells
    nothing.

    Args:
        frames: of the traceback, outermost first: `File "PATH", line N, in FUNCTION`.
        text: how the traceback ends: `NAME: MESSAGE`.
        raised: the innermost frame raised it by `raise` or `assert`.
    """
    name = text.partition(":")[0].rpartition(".")[2].strip()
    refused = _REFUSED.search(name)
    if not name.isidentifier():
        return None
    if not frames:
        told = refused and name != "AssertionError" and _WANTS.search(text)
        return (_ARGUMENTS, {"error": text.strip()}) if told else None
    values = {"error": text.strip(), "frame": _readable(frames[-1])}
    for form, symptom in _BY_NAME:
        if form.search(name):
            return symptom, values
    if _ELSEWHERE.search(name if refused else text):
        return None
    for frame in reversed(frames):
        # A folder of one's own tells nothing.
        place = frame if _LIBRARY.search(frame) else "/" + frame.rpartition("/")[2]
        for form, symptom in _BY_FRAME:
            if form.search(place):
                return symptom, values | {"frame": _readable(frame)}
    if _LIBRARY.search(frames[-1]):
        if _SLIPPED.search(text) and not raised:
            return _VERSIONS, values
        # its message is in other lines
        if (refused or (_RAISED.search(name) and raised)) and text.strip()[-1] != ":":
            return _ARGUMENTS, values
    elif not _STANDARD.search(frames[-1]) and not (name == "RuntimeError" and not raised):
        return _PROGRAM, values
    return (_VERSIONS, values) if _BROKEN.search(name) else None


def frame_parts(frame: str) -> tuple[str, str, str]:
    """File, `line N` and function of a frame: `File "PATH", line N, in FUNCTION`."""
    file, _, rest = frame.removeprefix('File "').partition('", ')
    place, _, function = rest.partition(", in ")
    return file, place, function


def _readable(frame: str) -> str:
    """`collate (train.py, line 41)` of a frame."""
    file, place, function = frame_parts(frame)
    return f"{function or '<module>'} ({file.rpartition('-packages/')[2]}, {place})"
