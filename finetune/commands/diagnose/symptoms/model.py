"""The model: where it comes from, its weights, its arithmetic, how gradients come about."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Symptom
from finetune.runtime.language import Text

_NAN_TEXT: Text = {
    "en": "The loss or the gradients became NaN or infinite[[ at step {step}]].",
    "zh": "loss 或梯度变成 NaN 或无穷[[(第 {step} 步)]]。",
}
_NAN_FIX: Text = {
    "en": "Lower --learning-rate[[ (now {learning_rate})]] or lengthen the warm-up, use bfloat16 or float32 instead "
    "of float16, clip gradients (--max-grad-norm 1), and look at the rows of the first bad step[[ "
    "({nonfinite_rows})]]: events.jsonl names them, `python -m finetune inspect --row N` shows them. Go on from the "
    "last checkpoint before it.",
    "zh": "降低 --learning-rate[[(当前 {learning_rate})]] 或延长 warmup,用 bfloat16 或 float32 代替 float16,"
    "裁剪梯度(--max-grad-norm 1),并查看第一个坏步的数据行[[({nonfinite_rows})]]:events.jsonl 记录了它们,`python -m "
    "finetune inspect --row N` 可显示。从之前最近的检查点继续。",
}

SYMPTOMS = (
    Symptom(
        "model_not_found",
        (
            r"(?P<model>\S+) is not a local folder and is not a valid model identifier",
            r"(?P<model>\S+) is not a local folder or a valid repository name",
            r"(?P<model>\S+) does not appear to have a(?:ny)? files? named",
            r"RepositoryNotFoundError|Repository Not Found for url|Incorrect path_or_model_id",
            r"GatedRepoError|trying to access a gated repo|is a gated repository",
            r"HFValidationError: Repo id must",
            r"^\[ERROR\] (?:rank \d+: )?(?:the model folder (?P<model>\S+) does not exist|no such model folder|model "
            r"\S+ is a file, not)",
            r"^\[ERROR\] (?:rank \d+: )?the model's (?:weights are not there|configuration cannot be read)",
            r"^\[ERROR\] (?:rank \d+: )?the model folder has no tokenizer",
            r"Can't load (?:the )?(?:tokenizer|model|configuration|image processor) (?:for|of) '(?P<model>[^']+)'",
        ),
        {
            "en": "The model[[ {model}]] was not found: neither as a folder with its files nor on the hub (or not "
            "with this access).",
            "zh": "找不到模型[[ {model}]]:既不是含有所需文件的文件夹,hub 上也没有(或无权访问)。",
        },
        {
            "en": "Check the spelling and that the folder holds config.json, tokenizer files and model*.safetensors. "
            "Relative paths count from where the run is started, and must exist on every node. For gated models: `hf "
            "auth login` or HF_TOKEN; behind a mirror: HF_ENDPOINT; ModelScope models: download them first and give "
            "the folder.",
            "zh": "检查拼写,并确认文件夹内有 config.json、分词器文件与 model*.safetensors。相对路径以启动目录为准,"
            "且每个节点都要有。受限模型:`hf auth login` 或 HF_TOKEN;使用镜像:HF_ENDPOINT;ModelScope "
            "的模型请先下载再给出文件夹。",
        },
        confidence=0.88,
        source="transformers, huggingface_hub, this package",
    ),
    Symptom(
        "hub_offline",
        (
            r"[Cc]ouldn't connect to '?(?P<hub>https?://[^\s']+)",
            r"\bLocalEntryNotFoundError\b",
            r"offline mode is enabled|OfflineModeIsEnabled",
            r"outgoing traffic has been disabled",
            r"Failed to resolve '(?P<hub>[\w.-]*(?:huggingface|hf-mirror|modelscope|\bhf)\.\w+)'",
            r"host='(?P<hub>[\w.-]*(?:huggingface|hf-mirror|modelscope|\bhf)\.\w+)'.*Max retries exceeded",
            r"(?:Connect|Proxy)(?:ion)?(?:Error|Timeout)\b.*huggingface",
        ),
        {
            "en": "The model hub[[ {hub}]] cannot be reached or is switched off here, and the files are not in the "
            "local cache.",
            "zh": "无法访问模型 hub[[ {hub}]] 或已设为离线,且本地缓存没有所需文件。",
        },
        {
            "en": "Download the model where there is a network (`hf download NAME --local-dir DIR`), copy the folder "
            "to every node and give --model DIR. Or set HF_ENDPOINT to a mirror that is reached (https:"
            "//hf-mirror.com), and unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE where there is a network. Proxies: "
            "HTTPS_PROXY.",
            "zh": "在有网络的机器上下载(`hf download NAME --local-dir DIR`),复制到每个节点并用 --model DIR。或把 "
            "HF_ENDPOINT 设为可访问的镜像(https://hf-mirror.com);有网络时取消 HF_HUB_OFFLINE 与 "
            "TRANSFORMERS_OFFLINE。代理:HTTPS_PROXY。",
        },
        confidence=0.92,
        source="huggingface_hub, transformers",
        explains=("model_not_found",),
    ),
    Symptom(
        "checkpoint_corrupt",
        (
            r"Error while deserializing header",
            r"SafetensorError: (?P<reason>.*)",
            r"[Ii]ncompleteMetadata|MetadataIncompleteBuffer|InvalidHeader|HeaderTooLarge|HeaderTooSmall|file not "
            r"fully covered",
            r"PytorchStreamReader failed (?P<reason>.*)",
            r"UnpicklingError: (?P<reason>.*)|EOFError: Ran out of input",
            r"^\[ERROR\] .*the checkpoint is not valid: (?P<reason>.*)",
            r"was written but does not verify: (?P<reason>.*)",
            r"the index of the model's weights is broken",
            r"^\[ERROR\] (?:rank \d+: )?the saved adapter cannot be read",
            r"^\[ERROR\] (?:rank \d+: )?the model's weights cannot be read: (?P<reason>.*)",
        ),
        {
            "en": "A file of weights or of a checkpoint is cut short or broken[[: {reason}]]. A kill during saving or "
            "copying, a full disk, or an unfinished download (a Git LFS pointer of 130 bytes) does that.",
            "zh": "权重或检查点文件被截断或损坏[[:{reason}]]。常见原因:保存或复制时被杀、磁盘满、下载未完成(130 "
            "字节的 Git LFS 指针文件)。",
        },
        {
            "en": "`python -m finetune checkpoints RUN` says which checkpoints are whole; `--resume auto` takes the "
            "newest whole one. A model's file: compare its size with the hub's and fetch it again. See that the disk "
            "has room.",
            "zh": "`python -m finetune checkpoints RUN` 列出完好的检查点;`--resume auto` 会使用最新的完好检查点。"
            "模型文件:与 hub 上的大小比较并重新下载。确认磁盘有空间。",
        },
        confidence=0.9,
        source="safetensors, torch.load, this package",
    ),
    Symptom(
        "nan_loss",
        (
            r"loss or gradients were NaN or inf in (?P<steps>\d+) steps in a row, up to step (?P<step>\d+)",
            r"[Ll]oss is (?:nan|inf)\b(?i:.{0,30}(?:stop|abort|terminat))",
            r"Current loss scale already at minimum",
            r"FloatingPointError.*(?:NaN|nan|[Ii]nf)|Function '\w+' returned nan values in its \d+th output",
        ),
        _NAN_TEXT,
        _NAN_FIX,
        confidence=0.95,
        lasting=True,
        in_warnings=True,
        source="this package, DeepSpeed, torch anomaly mode",
    ),
    Symptom(
        "nan_loss",
        (
            r"\bloss['\"]?\s*[:= ]\s*['\"]?-?(?i:nan|inf)\b",
            r"['\"]grad_norm['\"]?\s*[:=]\s*['\"]?(?i:nan)\b(?=.*\bloss\b)|"
            r"\bloss['\"]?\s*[:=]\s*['\"]?0\.0\b.*grad_norm['\"]?\s*[:=]\s*['\"]?(?i:nan)",
        ),
        _NAN_TEXT,
        _NAN_FIX,
        confidence=0.8,
        at_least=2,
        lasting=True,
        in_warnings=True,
        source="transformers' and others' training logs",
    ),
    Symptom(
        "dtype_mismatch",
        (
            r"to have the same dtype, but got",
            r"must have the same dtype",
            r"expected scalar type (?P<wanted>\w+) but found (?P<found>\w+)",
            r"Input type \((?P<found>[\w.]+)\) and (?:weight|bias) type \((?P<wanted>[\w.]+)\) should be the same",
            r"source and destination dtypes match",
            r"Found dtype (?P<found>\w+) but expected (?P<wanted>\w+)",
            r"tensors? must (?:be|have) the same (?:data ?type|dtype)",
        ),
        {
            "en": "Two tensors of different number types met[[: {found} where {wanted} is wanted]][[ on rank {rank}]].",
            "zh": "两个张量的数据类型不同[[:需要 {wanted},实际 {found}]][[(rank {rank})]]。",
        },
        {
            "en": "Use one type throughout: --dtype bfloat16 with a model loaded in bfloat16. Own modules or adapters "
            "kept in float32 inside a bfloat16 model need autocast or .to(dtype); under ZeRO-3 with LoRA load the "
            "adapter in the model's type (autocast_adapter_dtype=False).",
            "zh": "全程使用同一类型:--dtype bfloat16 且模型以 bfloat16 加载。bfloat16 模型中保留 float32 "
            "的自定义模块或 adapter 需要 autocast 或 .to(dtype);ZeRO-3 + LoRA 时 adapter "
            "用模型的类型加载(autocast_adapter_dtype=False)。",
        },
        confidence=0.88,
        source="torch",
    ),
    Symptom(
        "bf16_unsupported",
        (
            r"[Yy]our setup doesn't support bf16",
            r"device has no bfloat16",
            r"[Tt]ype bf16 is not supported on your device",
            r"bf16 mixed precision requires",
            r"not implemented for 'BFloat16'",
            r"[Bb][Ff](?:loat)?16 is (?:not supported|only supported)",
            r"does not support (?:bf16|bfloat16)|DT_BF(?:LOAT)?16 .{0,20}not support",
        ),
        {
            "en": "This device or operator has no bfloat16 (GPUs before Ampere, Ascend 910A, some CPU operators).",
            "zh": "该设备或算子不支持 bfloat16(Ampere 之前的 GPU、昇腾 910A、部分 CPU 算子)。",
        },
        {
            "en": '--dtype float16, or --dtype float32 where there is no gradient scaler; take "bf16": {{"enabled": '
            "true}} out of the DeepSpeed file. Check with `python -m finetune doctor`.",
            "zh": '使用 --dtype float16,没有梯度缩放时用 --dtype float32;DeepSpeed 文件里去掉 "bf16": {{"enabled":'
            " true}}。可用 `python -m finetune doctor` 检查。",
        },
        confidence=0.9,
        source="transformers, accelerate, DeepSpeed, torch, this package",
    ),
    Symptom(
        "flash_attn_missing",
        (
            r"FlashAttention\d? has been toggled on, but it cannot be used",
            r"No module named 'flash_attn\w*'",
            r"flash_attn seems to be not installed|flash[_-]attn is not installed|requires the flash[_-]attn package",
            r"FlashAttention only supports (?P<wanted>[\w ]+) GPUs",
            r"flash_attn\w*\.so: undefined symbol",
        ),
        {
            "en": "Flash Attention was asked for, and its package is missing, does not fit this torch, or does not "
            "run on this device.",
            "zh": "要求使用 Flash Attention,但其软件包缺失、与 torch 不配套,或当前设备不支持。",
        },
        {
            "en": "Ask for no attention implementation (attn_implementation): SDPA is used, which is nearly as fast. "
            "Else `pip install flash-attn --no-build-isolation` for this torch and CUDA (Ampere GPUs or newer; on "
            "NPUs torch_npu brings its own).",
            "zh": "不要指定注意力实现(attn_implementation):会用 SDPA,速度相近。否则为当前 torch 与 CUDA 执行 `pip "
            "install flash-attn --no-build-isolation`(需 Ampere 或更新的 GPU;NPU 由 torch_npu 自带)。",
        },
        confidence=0.94,
        source="transformers, flash-attn",
        explains=("missing_package",),
    ),
    Symptom(
        "grad_checkpoint_mismatch",
        (
            r"Recomputed values for the following tensors have different metadata",
            r"A different number of tensors was saved during the original forward and recomputation",
            r"Expected to mark a variable ready only once",
            r"torch\.utils\.checkpoint: (?:Recomputed|A different|Trying to)",
        ),
        {
            "en": "Activation recomputation did not give what the first forward gave[[ on rank {rank}]]: gradient "
            "checkpointing and the way the model is wrapped (DDP, ZeRO-3, LoRA) do not fit.",
            "zh": "激活重计算的结果与首次前向不一致[[(rank {rank})]]:梯度检查点与模型包装方式(DDP、ZeRO-3、"
            "LoRA)不相容。",
        },
        {
            "en": "ZeRO-3 with LoRA needs use_reentrant=True, DDP needs use_reentrant=False; this package sets it, so "
            "own code is where to look. No random or data-dependent branches and no autocast change inside a "
            "checkpointed layer. To make sure: --gradient-checkpointing false.",
            "zh": "ZeRO-3 + LoRA 需要 use_reentrant=True,DDP 需要 use_reentrant=False;本软件会自动设置,"
            "请检查自定义代码。检查点层内不能有随机或依赖数据的分支,也不能改变 autocast。可用 "
            "--gradient-checkpointing false 验证。",
        },
        confidence=0.92,
        source="torch.utils.checkpoint, DDP",
        explains=("unused_parameters_ddp",),
    ),
    Symptom(
        "grad_checkpoint_mismatch",
        (r"element 0 of tensors does not require grad and does not have a grad_fn",),
        {
            "en": "No trainable parameter had a part in the loss: most often LoRA with gradient checkpointing and "
            "inputs without gradient.",
            "zh": "没有可训练参数参与 loss:最常见的是 LoRA 加梯度检查点而输入没有梯度。",
        },
        {
            "en": "Call model.enable_input_require_grads() or use use_reentrant=False, and see that the LoRA targets "
            "exist (--lora-target-modules).",
            "zh": "调用 model.enable_input_require_grads() 或使用 use_reentrant=False,并确认 LoRA "
            "目标模块存在(--lora-target-modules)。",
        },
        confidence=0.7,
        source="torch autograd",
    ),
    Symptom(
        "unused_parameters_ddp",
        (
            r"Expected to have finished reduction in the prior iteration",
            r"parameters that were not used in producing loss",
            r"Parameter indices which did not receive grad for rank (?P<rank>\d+): (?P<indices>[\d ]+)",
        ),
        {
            "en": "DDP waits for gradients of parameters that took no part in the loss[[ (indices {indices})]][[ on "
            "rank {rank}]].",
            "zh": "DDP 在等待没有参与 loss 的参数的梯度[[(序号 {indices})]][[(rank {rank})]]。",
        },
        {
            "en": "Freeze what is not trained (requires_grad=False), or see why the ranks take different paths; "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL names the parameters. Only as a last resort find_unused_parameters=True, "
            "which is slower.",
            "zh": "冻结不训练的参数(requires_grad=False),或查明各 rank 走了不同分支的原因;"
            "TORCH_DISTRIBUTED_DEBUG=DETAIL 会列出参数名。最后的办法才是 find_unused_parameters=True(更慢)。",
        },
        confidence=0.94,
        source="torch DDP",
    ),
)
