"""DeepSpeed: operators built at first use, batch arithmetic, sharded states."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Symptom
from finetune.runtime.language import N_

SYMPTOMS = (
    Symptom(
        "deepspeed_cpu_adam_build",
        (
            r"Error building extension '(?P<operator>[\w.]+)'",
            r"Unable to JIT load the (?P<operator>\w+) op",
            r"'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'|CUDAMismatchException",
            r"MissingCUDAException|CUDA_HOME (?:does not exist|environment variable is not set)|^FAILED: \S+\.o\b"
            r"|ninja: build stopped",
            r"detected CUDA version \((?P<cuda>[\d.]+)\) mismatches the version that was used to compile",
            r"Ninja is required to load C\+\+ extensions|fatal error: Python\.h: No such file",
            r"No such file or directory: '(?P<compiler>c\+\+|g\+\+|gcc|clang\+\+|ninja)'",
            r"Command '\['(?P<compiler>[^']+)', '(?:-v|--version)'\]' returned non-zero",
            r"Command '\['which', '(?P<compiler>[cg]\+\+|gcc|ninja)'\]' returned non-zero",
            r"Installed CUDA version (?P<cuda>\S+) does not match the version torch was compiled with(?!.*APIs are"
            r" compatible)",
        ),
        N_(
            "DeepSpeed could not build an operator[[ ({operator})]] on first use[[: {compiler} does not work]]."
        ),
        N_(
            "Install a C++17 compiler, ninja and Python's headers (`apt-get install g++ ninja-build python3-dev`), "
            "make sure that CXX names a working compiler, and remove the half-built folder under $TORCH_EXTENSIONS_DIR "
            "(~/.cache/torch_extensions). With a CUDA mismatch install the CUDA toolkit that torch was built for, or "
            "DS_SKIP_CUDA_CHECK=1. `python -m finetune doctor` builds it and runs a step. The CPU Adam can be avoided: "
            "zero_force_ds_cpu_optimizer: false."
        ),
        confidence=0.93,
        source="DeepSpeed's op builder, torch.utils.cpp_extension",
    ),
    Symptom(
        "invalid_settings",
        (
            r"batch size (?P<batch>\([^)]*\)|\d+)? ?must be (?:evenly )?(?:divisible by|a multiple of) the number of "
            r"generations per prompt \((?P<generations>\d+)\)",
            r"(?:batch.{0,60})?must be (?:evenly )?(?:divisible by|a multiple of) .{0,10}num_generations",
        ),
        N_(
            "The batch[[ {batch}]] does not hold whole groups of answers[[: {generations} are made for each prompt]]."
        ),
        N_(
            "Choose per_device_train_batch_size x processes x gradient_accumulation_steps (or generation_batch_size) "
            "as a multiple of num_generations, or num_generations so that it divides it: the message lists which do."
        ),
        confidence=0.95,
        source="trl",
    ),
    Symptom(
        "deepspeed_batch_assert",
        (
            r"Check batch related parameters\. train_batch_size is not equal to micro_batch_per_gpu \* "
            r"gradient_acc_step \* world_size(?: (?P<total>\d+) != (?P<micro>\d+) \* (?P<accumulation>\d+) \* "
            r"(?P<world>\d+))?",
            r"Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
            r"(?:[Tt]rain|[Mm]icro) batch size\b.{0,10}: -?\d+ has to be greater"
            r"|Gradient accumulation steps: -?\d+ has to",
            r"\b[Bb]atch[_ ]size\b.{0,40} not (?:evenly )?divisible by"
            r"|\b[Bb]atch[_ ]size\b.{0,60} must be (?:evenly )?(?:divisible by|a multiple of)",
            r"^\[ERROR\] .*micro_batch_size (?P<micro>\d+) x .* is \d+, not global_batch_size (?P<total>\d+)",
            r"^\[ERROR\] .*batch_size \d+ is not a (?:whole|multiple of)",
            r"^\[ERROR\] .*device_batch_size \d+ x .* is \d+, not total_batch_size",
        ),
        N_(
            "The batch sizes contradict each other[[: {total} is not micro-batch {micro} x accumulation {accumulation} "
            "x {world} processes]]."
        ),
        N_(
            'Give two of global batch, micro-batch and accumulation and leave the third out or set it to "auto": '
            "global = micro x accumulation x processes. If `world_size` is 1 though several were started, the process "
            "group was created after the model: start with torchrun or accelerate launch."
        ),
        confidence=0.94,
        source="DeepSpeed, this package",
    ),
    Symptom(
        "deepspeed_batch_assert",
        (
            r"^- ds (?P<key>\S+)=(?P<theirs>\S+) vs hf (?P<name>\S+)=(?P<ours>\S+)",
            r"DeepSpeed config values that mismatch TrainingArguments",
        ),
        N_(
            "The DeepSpeed file and the trainer's arguments contradict each other[[: {key} is {theirs} there, {name} "
            "{ours} here]]."
        ),
        N_(
            'Set the keys that the evidence names to "auto" in the DeepSpeed file, so that the trainer fills them in: '
            "batch sizes, accumulation, learning rate, warm-up, precision."
        ),
        confidence=0.94,
        source="transformers",
    ),
    Symptom(
        "deepspeed_batch_assert",
        (r"When using DeepSpeed, `?accelerate\.prepare.{0,200}train_micro_batch_size_per_gpu",),
        N_(
            "DeepSpeed is not told the micro-batch size: its file has none, and no data loader was prepared that shows "
            "it."
        ),
        N_(
            'Write train_micro_batch_size_per_gpu as a number into DeepSpeed\'s file ("auto" is filled in by a '
            "trainer only), or pass the data loader to accelerator.prepare together with model and optimizer."
        ),
        confidence=0.95,
        source="accelerate",
    ),
    Symptom(
        "zero3_world_size_changed",
        (
            r"used a DP world size of (?P<saved>\d+) but the current world size is (?P<now>\d+)",
            r"checkpoint being loaded used a DP world size",
            r"world size of (?P<saved>\d+) but the current world size is (?P<now>\d+)",
            r"[Dd]ifferent world sizes?\b.*[Cc]heckpoint|[Cc]heckpoint.*different world sizes?\b",
        ),
        N_(
            "A ZeRO checkpoint of DeepSpeed's own[[, written on {saved} devices,]] was loaded on another number of "
            "devices[[ ({now})]]."
        ),
        N_(
            "Start with as many processes as wrote it[[ ({saved})]], or convert it with DeepSpeed's "
            "ds_to_universal.py. Checkpoints of this package do not depend on the number of devices: they resume on "
            "any."
        ),
        confidence=0.94,
        source="DeepSpeed engine",
    ),
    Symptom(
        "zero3_empty_or_size_mismatch",
        (
            r"(?:^\s+|Error.*\W)(?:Missing|Unexpected) key\(s\) in state_dict: \"(?P<parameter>[\w.]+)",
            r"loaded state dict contains a parameter group that doesn't match",
        ),
        N_(
            "The weights or optimizer state that are loaded belong to a model with other parameters[[ ({parameter})]]."
        ),
        N_(
            "Compare the names: `module.` or `base_model.` before them comes from DDP or PEFT (save the inner model), "
            "others from another architecture, LoRA target or freezing. Build the model as it was when it was saved, "
            "or load the weights without the optimizer."
        ),
        confidence=0.8,
        source="torch",
    ),
    Symptom(
        "zero3_empty_or_size_mismatch",
        (
            r"size mismatch for (?P<parameter>[\w.]+): copying a param with shape "
            r"(?P<saved>torch\.Size\(\[[\d, ]*\]\)) from checkpoint, the shape in current model is "
            r"(?P<now>torch\.Size\(\[[\d, ]*\]\))",
            r"Error: Trying to set a tensor of shape (?P<saved>torch\.Size\(\[[\d, ]*\]\)) in "
            r"\"(?P<parameter>[\w.]+)\" \(which has shape (?P<now>torch\.Size\(\[[\d, ]*\]\))",
            r"the saved adapter has an empty tensor: (?P<parameter>\S+)",
            r"the saved adapter has (?P<parameter>\S+) as",
            r"'weight' must be 2-D|\d+ parameters are not partitioned",
            r"the checkpoint's trainable parameters are not this model's",
            # A layer of its own: where only embeddings differ it is the vocabulary.
            r"^(?P<parameter>[\w.{}]*layers\.[\w.{}]+)\s*\|\s*MISMATCH\b.*"
            r"ckpt: (?P<saved>torch\.Size\(\[[\d, ]*\]\)) vs model: ?(?P<now>torch\.Size\(\[[\d, ]*\]\))",
            r"thus raising an error.*mismatch|You set `ignore_mismatched_sizes`"
            r"|size mismatch for (?P<parameter>[\w.]+):",
            r"shape '\[[\d, -]+\]' is invalid for input of size 0|[Tt]he size of tensor [ab] \(0\) must match"
            r"|the size of tensor b \(0\) at|shapes cannot be multiplied \((?:\S+ and )?(?:0x|\d+x0)\d*",
        ),
        N_(
            "A weight[[ ({parameter})]] has a different shape than the model expects[[: {saved} where the model has "
            "{now}]]. A shape [0] is what a ZeRO-3 shard looks like when it was saved or used without gathering it."
        ),
        N_(
            "Empty shapes: save through the engine (stage3_gather_16bit_weights_on_model_save, or this package, which "
            "gathers and re-opens what it saved), and access parameters outside forward only inside "
            "deepspeed.zero.GatheredParameters. Other shapes: the adapter or checkpoint belongs to another model or "
            "LoRA rank."
        ),
        confidence=0.85,
        source="torch, transformers, DeepSpeed, this package",
    ),
    Symptom(
        "zero3_module_order",
        (
            r"still have inflight params",
            r"tracing error at step \d+|expected the next \d+ parameters in the parameter fetch queue",
        ),
        N_(
            "ZeRO-3 expects the same modules in the same order in every step, and this model runs others (experts of a "
            "mixture, branches)."
        ),
        N_(
            "deepspeed.utils.set_z3_leaf_modules(model, [the mixture's class]) makes ZeRO-3 fetch it as one; or let "
            "every step run every module, or use ZeRO-2."
        ),
        confidence=0.93,
        source="DeepSpeed ZeRO-3",
    ),
)
