"""What the run was asked for and what its program does: settings, files, shapes, how it is launched
and compiled.
"""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

_TOKENIZER = N_("The tokenizer lacks what this run needs of it[[: {lacks}]].")

SYMPTOMS = (
    Symptom(
        "invalid_settings",
        (
            r"^\S+: error: (?P<reason>(?:unrecognized arguments|the following arguments are required"
            r"|ambiguous option|one of the arguments|argument [\w/-]+)\b.*)",
            r"Error: (?P<reason>(?:No such (?:option|command)|Missing (?:option|argument)|Got unexpected extra)\b.*)",
            r"(?P<reason>Some (?:specified arguments|keys) are not used by the HfArgumentParser.*)",
            r"(?:omegaconf|hydra)\.errors\.\w+: (?P<reason>.*)",
            r"yaml\.(?:scanner|parser|composer|constructor)\.(?P<reason>\w+)",
            r"TOMLDecodeError: (?P<reason>.*)|configparser\.(?P<reason_>\w+Error)",
            r"(?P<reason>\d+ validation errors? for \w+)|DeepSpeedConfigError: (?P<reason_>.*)",
            r"^(?:\w+\.)*\w*(?:Error|Exception): (?P<reason>[`'\"]?--\w[\w-]* (?:requires|must|can ?not|is not"
            r"|and)\b.*)",
            r"(?P<reason>CPUAdam param is on .*)|(?P<reason_>Input length of input_ids is .*)",
            r"(?P<reason>Output directory .* already exists and is not empty.*)",
            r"(?P<reason>Could not find the transformer layer class .*)|Could not override '(?P<reason_>[^']+)",
            r"(?P<reason>Key '\S+' is not in struct)|(?P<reason_>Could not find a version of the config .*)",
            r"^(?:\w+\.)*\w*Error: (?P<reason>.*\bis not a valid \w+, please select one of\b.*)",
        ),
        N_("The settings are not what the program takes[[: {reason}]]."),
        N_(
            "Correct the option or the key that the evidence names: `--help` of the program lists the names and values "
            "of this version, which differ between versions. Nothing was trained yet."
        ),
        confidence=0.87,
        source="argparse, click, hydra, YAML, pydantic, transformers, peft, Megatron-LM",
    ),
    Symptom(
        "invalid_settings",
        (
            r"^(?:\w+\.)*\w*(?:Error|Exception): (?P<reason>.*\b(?:not|be) (?:an? )?(?:evenly |exactly )?(?:divisible"
            r"|dividable|divided) (?:by|among|into|across)\b.*)",
            r"^(?:\w+\.)*\w*(?:Error|Exception): (?P<reason>.*\b(?:not|be) an? (?:integer )?multiple of\b.*)",
            r"^(?:\w+\.)*\w*(?:Error|Exception): (?P<reason>.*\b(?:must|should|does not|can ?not) (?:evenly )?divide"
            r"\b.*)",
        ),
        N_("Sizes that have to divide one another do not[[: {reason}]]."),
        N_(
            "Change the size that you are free to choose: the tensor parallel size to one that divides the attention "
            "heads and the key/value heads, the pipeline stages to one that divides the layers, the expert parallel "
            "size to one that divides the experts; their product has to divide the number of processes. The heads have "
            "to divide the hidden size. Nothing was trained yet."
        ),
        confidence=0.87,
        source="Megatron-LM, vLLM, transformers, DeepSpeed",
    ),
    Symptom(
        "invalid_settings",
        (
            r"TypeError: '(?:[<>]=?)' not supported between instances of '(?:float|int|str)' and '(?:float|int|str)'",
            r"TypeError: unsupported operand type\(s\) for \S+ '(?:str' and '(?:int|float)|(?:int|float)' and 'str)'",
            r"TypeError: can't multiply sequence by non-int of type 'float'|TypeError: must be real number, not str",
        ),
        N_(
            "A number and a text were put together: a setting that should be a number was read as text. YAML reads "
            "`2e-5` as text."
        ),
        N_(
            "Write numbers with a point (`2.0e-5`) and without quotes in YAML and JSON, or convert the value with "
            "float() or int() where the last own line of the traceback uses it."
        ),
        kind=Kind.VAGUE,
        confidence=0.8,
        source="Python, PyYAML",
    ),
    Symptom(
        "tokenizer_incomplete",
        (
            r"(?:Error|Exception): .*(?:the tokenizer does not have a|no) (?P<lacks>padding token)\b",
            r"(?:Error|Exception): .*(?P<lacks>pad_token)(?:_id)?\b.{0,20} (?:is None|must be|is not set)",
        ),
        _TOKENIZER,
        N_(
            "Set one before the data are tokenized: `tokenizer.pad_token = tokenizer.eos_token` (and model.config."
            "pad_token_id), or a padding token of its own with resize_token_embeddings. This package does so by itself."
        ),
        confidence=0.9,
        source="transformers",
    ),
    Symptom(
        "tokenizer_incomplete",
        (
            r"(?:Error|Exception): .*(?P<lacks>chat_template) is not set",
            r"(?:Error|Exception): .*(?:does not have a|[Nn]o) (?P<lacks>chat[ _]template)\b",
        ),
        _TOKENIZER,
        N_(
            "Use the tokenizer of the chat or instruct version of the model, or set tokenizer.chat_template (or the "
            "program's template option) to the form the model is to learn."
        ),
        confidence=0.9,
        source="transformers",
    ),
    Symptom(
        "remote_code_refused",
        (
            r"Error: .*contains custom code which must be executed"
            r"|(?:pass|set|with|requires?) (?:the (?:argument|option) )?"
            r"[`'\"]?trust_remote_code[`'\"]?\s*=\s*True[`'\"]? to allow",
            r"Error: [Ll]oading (?P<model>\S+) requires (?:you )?to execute the (?:configuration|model|tokenizer|code)",
        ),
        N_(
            "The model[[ {model}]] brings Python code of its own, which is run only where that was allowed."
        ),
        N_(
            "Read that code (*.py in the model's folder), then allow it: trust_remote_code=True in every "
            "from_pretrained (model, tokenizer and configuration), or the program's option for it. A newer "
            "transformers may know the architecture without."
        ),
        confidence=0.93,
        source="transformers",
        explains=("package_mismatch",),
    ),
    Symptom(
        "shape_mismatch",
        (
            r"shapes cannot be multiplied \((?P<shapes>[1-9]\d*x[1-9]\d* and [1-9]\d*x\d+)\)",
            r"size of tensor a \((?P<shapes>[1-9]\d*\) must match the size of tensor b \([1-9]\d*)\) at",
            r"(?P<shapes>Sizes of tensors must match except in dimension \d+.*)",
            r"Expected input batch_size \((?P<shapes>\d+\) to match target batch_size \(\d+)\)",
            r"(?P<shapes>shape '\[[\d, -]+\]' is invalid for input of size [1-9]\d*)",
            r"(?P<shapes>stack expects each tensor to be equal size.*)|shape mismatch: (?P<shapes_>.*)",
            r"(?P<shapes>The expanded size of the tensor \(\d+\) must match the existing size.*)",
        ),
        N_("Two tensors have shapes that do not fit one another[[: {shapes}]][[ on rank {rank}]]."),
        N_(
            "Look at the last line of your own in the traceback and print both shapes: the model's configuration "
            "(hidden size, heads, vocabulary) against its weights, examples of different lengths that the collator "
            "does not pad, or a mask and positions of another length than the tokens."
        ),
        confidence=0.84,
        source="torch",
    ),
    Symptom(
        "shape_mismatch",
        (r"Unable to create tensor, you should probably activate truncation and/or padding",),
        N_("The examples of a batch have different lengths, and the collator does not pad them."),
        N_(
            "Use a collator that pads (DataCollatorForSeq2Seq, or DataCollatorWithPadding and labels padded with "
            "-100), truncate to one length, and remove columns that are no numbers."
        ),
        confidence=0.88,
        source="transformers",
    ),
    Symptom(
        "file_not_found",
        (
            r"FileNotFoundError: \[Errno 2\] No such file or directory: '(?P<path>(?!/tmp/|\w[\w+.-]*'$)[^']+)'",
            r"FileNotFoundError: (?:Unable to find|Couldn't find (?:a dataset script"
            r"|any data file) at) '?(?P<path>[^\s']+)",
            r"DataFilesNotFoundError|unable to open file <(?P<path>[^>]+)> in read-only",
            r"DatasetNotFoundError: (?P<path>.*)|Unknown split \"(?P<path_>\w+)\"",
            r"FileNotFoundError: (?:The |Data |Dataset )?(?:[Dd]irectory|[Ff]ile|[Ff]older|[Pp]ath|[Dd]ataset)\b:? ?"
            r"['\"`]?(?P<path>[^\s'\"`]+)['\"`]? (?:was |is |could )?(?:not |does ?n.t |neither )",
            r"^FileNotFoundError: '?(?P<path>\.{0,2}/[^\s':]+)'?(?: is not a .*)?\.?$",
            r"^\w*Error: (?:[\w -]{0,30} )?['\"`]?(?P<path>\.{0,2}/[^\s'\"`:]+)['\"`]? (?:does not exist|not found)\b",
            r"Directory (?P<path>\S+) is neither a `?Dataset`? directory|(?:One or both of the )?\.idx and \.bin files "
            r"cannot be found for the path prefix (?P<path_>\S+)",
            r"(?:Error|Exception): .*No (?:\(supported\) )?data files? (?:were |was )?found"
            r"|NotADirectoryError: .*'(?P<path>[^']+)'",
        ),
        N_("A file or data set[[ {path}]] that the run needs is not there."),
        N_(
            "`ls -l[[ {path}]]` in the shell (and container) of the run, on every node: correct the path (relative "
            "ones start where the run is started), mount or copy what is missing, and let one rank make shared files "
            "before the others read them."
        ),
        kind=Kind.VAGUE,
        confidence=0.72,
        source="Python, datasets",
    ),
    Symptom(
        "not_launched",
        (
            r"(?P<variable>RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR"
            r"|MASTER_PORT) expected, but not set",
            r"KeyError: '(?P<variable>LOCAL_RANK|RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT)'",
            r"(?:Error|Exception): .*Default process group has not been initialized",
        ),
        N_(
            "The program expects the processes that a launcher makes, and there is no process group[[ ({variable})]]."
        ),
        N_(
            "Start it with torchrun, accelerate launch or `python -m finetune launch`, which set RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT; call init_process_group before anything that communicates."
        ),
        kind=Kind.VAGUE,
        confidence=0.8,
        source="torch.distributed",
    ),
    Symptom(
        "device_after_fork",
        (
            r"Cannot re-initialize (?P<device>\w+) in forked subprocess",
            r"attempt has been made to start a new process before",
        ),
        N_(
            "A child process was started in a way that it cannot take[[: it was forked after {device} had been used]]."
        ),
        N_(
            "Do not touch the device before data loader workers start (no .cuda() or .npu() in the dataset), or use "
            "multiprocessing_context='spawn' with a dataset and collate function at the top level of a module; "
            "--dataloader-num-workers 0 avoids it."
        ),
        confidence=0.86,
        source="torch, multiprocessing",
    ),
    Symptom(
        "device_after_fork",
        (
            r"[Cc]an't (?:get|pickle) local object '(?P<name>[^']+)'",
            r"[Cc]an(?:'|no)t pickle (?:<function )?'?(?P<name>[\w.<>]+)'?(?: object|.*not found as|.*not the same)",
        ),
        N_(
            "Something that a process is to give to a new one cannot be pickled[[: {name}]]. Where processes are "
            "spawned (macOS, Windows, after CUDA was used) the data set and the collate function are."
        ),
        N_(
            "Move it to the top level of a module (def in place of a lambda, functools.partial in place of a function "
            "within a function), keep open files, locks and clients out of the data set (open them in the worker), or "
            "load in the process itself: num_workers=0 (--dataloader-num-workers 0)."
        ),
        confidence=0.87,
        source="Python, multiprocessing",
        explains=("checkpoint_corrupt",),
    ),
    Symptom(
        "autograd_misuse",
        (
            r"One of the differentiated Tensors does not require grad|modified by an inplace operation"
            r"|a leaf Variable that requires grad is being used in an in-place",
            r"Trying to backward through the graph a second time"
            r"|grad can be implicitly created only for scalar outputs",
        ),
        N_(
            "The program uses the graph of gradients in a way that autograd refuses[[ on rank {rank}]]."
        ),
        N_(
            "Replace the in-place operation (x += y, relu_()) by one that makes a new tensor, detach what is carried "
            "from step to step, and call backward once per forward; torch.autograd.set_detect_anomaly(True) names the "
            "line."
        ),
        confidence=0.86,
        source="torch autograd",
    ),
    Symptom(
        "compile_failed",
        (
            r"torch\._(?:inductor|dynamo)\.exc\.\w+|Failed to find C compiler",
            r"^(?:\w[\w.]*: .*)?(?:\w+\.)*OutOfResources: out of resource",
            r"triton\.\w[\w.]*(?:Error|Failed)|Triton Error \[\w+\]",
            r"PassManager::run failed|ptxas (?:fatal|error)",
        ),
        N_("torch.compile or Triton could not build a kernel[[ on rank {rank}]]."),
        N_(
            "Leave torch.compile out (TORCHDYNAMO_DISABLE=1) to see whether the rest works. A missing compiler: "
            "install g++ and python3-dev. Out of resource: smaller blocks or fewer stages in the kernel. Otherwise "
            "install the triton that belongs to this torch, and remove ~/.triton and the inductor's cache "
            "(TORCHINDUCTOR_CACHE_DIR)."
        ),
        kind=Kind.VAGUE,
        confidence=0.78,
        source="torch.compile, Triton",
    ),
    Symptom(
        "scheduler_refused",
        (
            r"(?:srun|sbatch|salloc): error: .*(?P<reason>(?:[Uu]nable to (?:create step|allocate)"
            r"|submission failed).*)",
            r"(?:srun|sbatch|salloc): error: .*(?P<reason>(?:Invalid|Requested) .*)",
            r"slurmstepd: error: execve\(\): (?P<reason>.*)",
            r"(?P<reason>\d+/\d+ nodes are available: (?!.*[Tt]riggered ?[Ss]cale-?[Uu]p).*Insufficient.*)"
            r"|(?P<reason_>ErrImagePull|ImagePullBackOff)\b",
        ),
        N_("The scheduler did not start the job[[: {reason}]]."),
        N_(
            "Ask for what the partition or cluster has (`sinfo -o '%P %c %m %G'`, `kubectl describe node`): nodes, "
            "memory, GPUs, account and time limit in the job file; give programs and images by a name that exists on "
            "the node."
        ),
        confidence=0.86,
        source="Slurm, Kubernetes",
        passing=True,
    ),
    Symptom(
        "invalid_settings",
        (
            r"(?P<reason>\w+ value from checkpoint \(.*?\) is not equal to the input argument value \(.*?\))",
            r"(?P<reason>(?:checkpoint|saved)\b.{0,60}\b(?:hidden_size|num_layers|num_attention_heads"
            r"|tensor_model_parallel\w*)\b.{0,60}(?:differ|mismatch|not equal).*)",
        ),
        N_("The settings are not those that the checkpoint was written with[[: {reason}]]."),
        N_(
            "Give the run the checkpoint's own settings (layers, hidden size, heads, vocabulary, parallel sizes), let "
            "it read them (Megatron-LM: --use-checkpoint-args), or take the checkpoint of this model."
        ),
        confidence=0.9,
        source="Megatron-LM",
    ),
    Symptom(
        "invalid_settings",
        (
            r"(?P<reason>Target modules .* not found in the base model|No modules were targeted for adaptation.*)"
            r"|(?P<reason_>Please specify `target_modules`)",
        ),
        N_("LoRA's target modules are not in this model[[: {reason}]]."),
        N_(
            "`[name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)]` lists the names: "
            "families differ (q_proj, query_key_value, c_attn, W_pack); target_modules='all-linear' takes all."
        ),
        confidence=0.9,
        source="peft",
    ),
)
