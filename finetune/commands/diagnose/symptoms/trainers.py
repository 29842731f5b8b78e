"""What trainers and their libraries refuse: names of data sets, devices of a model, types,
settings.
"""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

# A record that code which reads records cannot deal with: recognised by the frames of a traceback,
# not by a line.
BAD_RECORD = Symptom(
    "dataset_missing_field",
    (),
    N_(
        "A record is not as the code that reads it expects[[ on rank {rank}]]: {error} in {frame}. It may lack a "
        "key, or have an empty list, an empty text or null in it."
    ),
    N_(
        "Print the record in that function, or look for empty and missing fields with `python -m finetune inspect`; "
        "mend or drop such records before training, or let the function deal with them. What other ranks report after "
        "it (connections closed, time-outs) follows from it."
    ),
    kind=Kind.VAGUE,
    confidence=0.72,
    source="torch.utils.data, datasets",
    explains=("peer_died", "collective_timeout"),
)

_REASON = r"^(?:\w+\.)*\w*(?:Error|Exception): (?P<reason>"

SYMPTOMS = (
    Symptom(
        "file_not_found",
        (
            r"Undefined dataset (?P<name>\S+) in \S+|unhandled dataset load: (?P<name_>\S+)",
            r"Cannot open \S*dataset_info\.json",
            r"Error: \W?[Dd]ataset(?:_name|_id)?\W{1,3}(?P<name>[\w./-]+)\W{1,2}(?:is |was )?not (?:found"
            r"|registered|supported|defined)\b",
            r"Error: .*\b(?P<name>[\w./-]+) (?:is )?not (?:in|found in|registered in) (?:the )?(?:dataset_info"
            r"|DATASET_MAPPING|dataset registry)\b",
        ),
        N_(
            "The data set[[ {name}]] is not among those that the trainer knows, or its entry leads to no usable "
            "records."
        ),
        N_(
            "Register it under exactly this name (LLaMA-Factory: data/dataset_info.json in dataset_dir, with "
            "file_name, "
            "formatting and columns; ms-swift: --custom_dataset_info or the path of the file; Axolotl: path and type "
            "under datasets), or correct the name. Here --data takes the file itself."
        ),
        confidence=0.9,
        source="LLaMA-Factory, ms-swift, Axolotl",
    ),
    Symptom(
        "invalid_settings",
        (
            rf"{_REASON}DeepSpeed Zero-3 is not compatible with .*)",
            rf"{_REASON}You can't train a model that has been loaded (?:in 8-bit|with `device_map).*)",
            rf"{_REASON}You can't move a model that has some modules offloaded.*)",
        ),
        N_(
            "The model was placed on devices in a way that cannot be trained like this[[: {reason}]]."
        ),
        N_(
            "With a launcher every process holds the model on its own device: leave out device_map and "
            "low_cpu_mem_usage under DeepSpeed ZeRO-3 and FSDP; with 8-bit or 4-bit weights load with "
            "device_map={{'': LOCAL_RANK}} (accelerate's PartialState().process_index). device_map='auto' spreads one "
            "model over all devices and needs a single process, started without a launcher."
        ),
        confidence=0.92,
        source="transformers, accelerate",
    ),
    Symptom(
        "device_oom",
        (
            r"The current `device_map` had weights offloaded to the disk"
            r"|Some modules are dispatched on the CPU or the disk",
        ),
        N_(
            "The device's memory does not hold the model: part of its weights was put on the CPU or the disk."
        ),
        N_(
            "See with `nvidia-smi` or `npu-smi info` who else uses the device; take a smaller or a quantized model, or "
            "more devices (ZeRO-3, FSDP) instead of device_map='auto'."
        ),
        confidence=0.86,
        source="transformers, accelerate",
    ),
    Symptom(
        "device_not_visible",
        (
            r"\b(?:FP|BF)16 Mixed precision training with AMP\b.{0,120}can only be used on",
            r"Accelerator is not detected, cannot perform low precision training",
        ),
        N_("Training in half precision needs a GPU or NPU, and torch sees none in this process."),
        N_(
            "`python -c 'import torch; print(torch.__version__, torch.cuda.is_available())'` in the environment of the "
            "run: a version with +cpu is torch without CUDA (install the one for your CUDA, on NPUs torch_npu); "
            "otherwise make the device visible (driver, CUDA_VISIBLE_DEVICES, docker run --gpus all). To train on the "
            "CPU leave fp16 and bf16 out (--dtype float32)."
        ),
        confidence=0.9,
        source="transformers, DeepSpeed",
    ),
    Symptom(
        "package_mismatch",
        (r"`rope_scaling`.{0,20} must be .*'(?:rope_type|high_freq_factor|long_factor)'",),
        N_(
            "The installed transformers is older than the model: it does not know the form of rope_scaling in its "
            "config.json."
        ),
        N_(
            "`pip install -U transformers` to the version that config.json names (`transformers_version`) or a newer "
            "one. Do not shorten rope_scaling by hand: the positions would be wrong."
        ),
        confidence=0.86,
        source="transformers",
    ),
    Symptom(
        "dtype_mismatch",
        (r"Attempting to unscale (?P<found>FP16|BFloat16) gradients",),
        N_(
            "The trained parameters themselves are in half precision[[ ({found})]], and a gradient scaler (fp16 mixed "
            "precision) needs them in float32."
        ),
        N_(
            "Load the model in float32 (no torch_dtype=float16) and keep fp16=True, or train in bfloat16 (bf16=True, "
            "--dtype bfloat16), which needs no scaler. With LoRA on a half precision model convert only what is "
            "trained: for p in model.parameters(): if p.requires_grad: p.data = p.data.float()."
        ),
        confidence=0.92,
        source="torch.amp",
    ),
    Symptom(
        "invalid_settings",
        (
            rf"{_REASON}You cannot perform fine-tuning on purely quantized models.*)",
            rf"{_REASON}The model you are trying to fine-tune is quantized with .*)",
            rf"{_REASON}optimizer got an empty parameter list.*)",
        ),
        N_("Nothing in the model can be trained[[: {reason}]]."),
        N_(
            "Quantized weights are not trained themselves: put a LoRA adapter on the model before the trainer is made "
            "(peft's get_peft_model, --lora-rank here). Otherwise see which parameters have requires_grad: "
            "freezing, or names in a filter that match nothing."
        ),
        confidence=0.9,
        source="transformers, torch.optim",
    ),
    Symptom(
        "invalid_settings",
        (
            rf"{_REASON}Trainer: (?:training|evaluation) requires an? \w+_dataset.*)",
            rf"{_REASON}You have set `args\.eval\w*_strategy` to .*)",
            rf"{_REASON}.*`?metric_for_best_model`?.*)|EarlyStoppingCallback requires (?P<reason_>.*)",
            rf"{_REASON}You can't use both `?fp16.*)|Error: (?P<reason_>At most one of fp16 and bf16 .*)",
            rf"{_REASON}.*train_dataset does not implement __len__.*)|Error: (?P<reason_>object of type "
            r"'IterableDataset' has no len\(\))",
            rf"{_REASON}unhandled prompt tokenization strategy.*)|Error: (?P<reason_>Template \S+ does not exist\.?)",
            rf"{_REASON}BuilderConfig \S+ not found\. Available.*)|Error: (?P<reason_>Config name is missing\. .*)",
            rf"{_REASON}Instruction \".*\" corresponds to no data.*)",
            rf"{_REASON}num_proc must be an integer.*)|Error: (?P<reason_>`mixed_precision` must be one of.*)",
            rf"{_REASON}`rope_scaling` must be a dictionary with .*)",
            rf"{_REASON}The generation config instance is invalid.*)",
            rf"{_REASON}`model` and `ref_model` cannot be the same object.*)",
            rf"{_REASON}You passed `?(?:a )?`?(?:peft_config|packing=True)`.*)",
            rf"{_REASON}Target module .* is not supported\. Currently.*)",
            rf"{_REASON}trying to initialize the default process group twice.*)",
            rf"{_REASON}You can't use same `Accelerator\(\)` instance with multiple models.*)",
            rf"{_REASON}When using DeepSpeed,? `accelerate\.prepare\(\)` requires .*)",
            rf"{_REASON}Must flatten tensors with uniform `?requires_grad`?.*)",
            r"(?P<reason>You are using ZeRO-Offload with a client provided optimizer) ",
            rf"{_REASON}.*no_sync context manager.*)",
            rf"{_REASON}unscale_\(\) has already been called on this optimizer.*)",
            r"(?P<reason>Some tensors share memory.*)"
            r"|Error: (?P<reason_>The weights trying to be saved contained shared .*)",
            rf"{_REASON}No inf checks were recorded for this optimizer.*)",
            rf"{_REASON}(?:Calling )?`\.?to(?:\(\))?` is not supported for `?[48]-bit.*)",
        ),
        N_(
            "The settings of the trainer or of its libraries exclude each other, or one is missing[[: {reason}]]."
        ),
        N_(
            "The message names the argument: correct it where the trainer, the accelerator or the data set is made "
            "(or in the DeepSpeed and FSDP files that the launcher reads), and start again."
        ),
        confidence=0.84,
        source="transformers, trl, peft, accelerate, datasets, DeepSpeed",
    ),
    Symptom(
        "dataset_missing_field",
        (
            r"The model did not return a loss from the inputs|You have to specify either input_ids or inputs_embeds",
            r"text input must be of type `?str`?|TextEncodeInput must be Union",
            r"ArrowInvalid: Column \d+ named (?P<field>\w+) expected length \d+ but got length \d+",
            r"Could not find response key|(?:Image|Video|Audio) features and (?:image|video|audio) tokens do not match",
            r"Mismatch in `\w+` token count between text and `input_ids`",
        ),
        N_(
            "What the data give is not what the model or the tokenizer takes[[ (column {field})]]: {line}"
        ),
        N_(
            "Look at one batch as the model gets it: input_ids, attention_mask and labels must be there and equally "
            "long; "
            "texts must be texts (no null, no nested lists); a function of a batched map returns columns of one length "
            "(remove_columns drops the old ones); placeholders of images must not be cut by the length limit."
        ),
        confidence=0.84,
        source="transformers, datasets, trl",
    ),
    Symptom(
        "unknown",
        (
            r"Cannot copy out of meta tensor; no data|is on the meta device, we need a `value`"
            r"|(?P<name>\S+) doesn't have any device set",
        ),
        N_(
            "Weights of the model were never filled[[ ({name})]]: it was made empty (meta device), and no file had "
            "them."
        ),
        N_(
            "Load with from_pretrained from a folder with all its weights (tied weights too); leave out device_map and "
            "low_cpu_mem_usage, or call to_empty() and load the weights before the model is moved."
        ),
        kind=Kind.VAGUE,
        confidence=0.55,
        source="torch, accelerate",
    ),
    Symptom(
        "unknown",
        (
            r"Expected all tensors to be on the same device, but (?:found at least two devices, |got )(?P<devices>.*)",
            r"Input, output and indices must be on the current device",
        ),
        N_("Tensors of one computation lie on different devices[[: {devices}]]."),
        N_(
            "Move the batch to the model's device, and give each process one device (set_device(LOCAL_RANK), no "
            "device_map='auto' with a launcher); tensors made inside the model's code need device=input.device."
        ),
        kind=Kind.VAGUE,
        confidence=0.55,
        source="torch",
    ),
    Symptom(
        "remote_code_refused",
        (
            r"Error: Dataset scripts are no longer supported, but found (?P<name>\S+)",
            r"Error: [Ll]oading (?P<name>\S+) requires you to execute the dataset script",
        ),
        N_(
            "The data set[[ {name}]] is loaded by a script of its own, which this version of datasets does not run."
        ),
        N_(
            "Take the data as files (Parquet or JSON Lines; the hub keeps converted ones in the branch "
            "refs/convert/parquet), or convert it once with a version of datasets before 4 and trust_remote_code=True, "
            "after reading the script."
        ),
        confidence=0.92,
        source="datasets",
    ),
    Symptom(
        "package_mismatch",
        (r"Invalid pattern: '\*\*' can only be an entire path component",),
        N_("The installed versions of datasets and fsspec do not belong together."),
        N_(
            "`pip install -U datasets` (2.16 or later), or take fsspec back to the version that this datasets asks for."
        ),
        confidence=0.93,
        source="datasets, fsspec",
    ),
    Symptom(
        "unknown",
        (r"loaded state dict has a different number of parameter groups",),
        N_("The checkpoint is of other parameters than the run has: {line}"),
        N_(
            "Resume with the settings it was written with (LoRA rank and target modules, what is frozen, the "
            "optimizer), or start from the weights alone, without the optimizer's state."
        ),
        kind=Kind.VAGUE,
        confidence=0.55,
        source="torch, peft",
    ),
)
