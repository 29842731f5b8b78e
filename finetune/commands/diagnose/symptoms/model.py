"""The model: where it comes from, its weights, its arithmetic, how gradients come about."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

_NAN_TEXT = N_("The loss or the gradients became NaN or infinite[[ at step {step}]].")
_NAN_FIX = N_(
    "Lower --learning-rate[[ (now {learning_rate})]] or lengthen the warm-up, use bfloat16 or float32 instead of "
    "float16, clip gradients (--max-grad-norm 1), and look at the records of the first bad step[[ "
    "({nonfinite_records})]]: events.jsonl names them, `python -m finetune inspect --row N` shows them. Resume from "
    "the last checkpoint before it."
)

SYMPTOMS = (
    Symptom(
        "model_not_found",
        (
            r"(?P<model>\S+) is not a local folder and is not a valid model identifier",
            r"(?P<model>\S+) is not a local folder or a valid repository name",
            r"(?P<model>\S+) does not appear to have a(?:ny)? files? named",
            r"[Nn]o file named .{0,160}found in (?:directory )?(?P<model>\S+?)\.?$|[Nn]o (?:safetensors|weights?"
            r"|model weights|checkpoint) (?:files? )?(?:were |was )?found (?:in|at) (?P<model_>\S+)",
            r"Can't find '(?:adapter_config|config)\.json' at '?(?P<model>[^']+)|NotExistError: The (?:model"
            r"|dataset|file)"
            r"|[Nn]o such (?:model|repo|repository)\b|modelscope\S*: .*(?:not exist|not found)",
            r"[Uu]nrecognized model in (?P<model>\S+?)\. Should have a `model_type`|EntryNotFoundError"
            r"|RevisionNotFoundError",
            r"HfHubHTTPError: 40[134]\b|(?:401|403|404) Client Error.*huggingface|Cannot access gated repo"
            r"|Access to model (?P<model>\S+) is restricted",
            r"No such file or directory: '(?P<model>[^']*(?:config\.json|model\S*\.safetensors|pytorch_model\S*\.bin"
            r"|tokenizer\S*|\.safetensors\.index\.json))'",
            r"RepositoryNotFoundError|Repository Not Found for url|Incorrect path_or_model_id",
            r"GatedRepoError|trying to access a gated repo|is a gated repository",
            r"HFValidationError: Repo id must",
            r"^\[ERROR\] (?:rank \d+: )?(?:the model folder (?P<model>\S+) does not exist|no such model folder|model "
            r"\S+ is a file, not)",
            r"^\[ERROR\] (?:rank \d+: )?the model's (?:weights are not there|configuration cannot be read)",
            r"^\[ERROR\] (?:rank \d+: )?the model folder has no tokenizer",
            r"Can't load (?:the )?(?:tokenizer|model|configuration|image processor) (?:for|of) '(?P<model>[^']+)'",
        ),
        N_(
            "The model[[ {model}]] was not found: neither as a folder with its files nor on the hub (or not with these "
            "credentials)."
        ),
        N_(
            "Check the spelling and that the folder holds config.json, tokenizer files and model*.safetensors. "
            "Relative paths start where the run is started, and must exist on every node. For gated models: `hf auth "
            "login` or HF_TOKEN; behind a mirror: HF_ENDPOINT; ModelScope models: download them first and give the "
            "folder."
        ),
        confidence=0.88,
        source="transformers, huggingface_hub, this package",
    ),
    Symptom(
        "hub_offline",
        (
            r"[Cc]ouldn't connect to '?(?P<hub>https?://[^\s']+)",
            r"\bLocalEntryNotFoundError\b|offline mode is enabled|OfflineModeIsEnabled",
            r"outgoing traffic has been disabled|MaxRetryError|NewConnectionError|NameResolutionError",
            r"Failed to resolve '(?P<hub>[\w.-]*(?:huggingface|hf-mirror|modelscope|\bhf)\.\w+)'",
            r"SSLError|SSLCertVerificationError|CERTIFICATE_VERIFY_FAILED|SSL: \w+\]|ProxyError"
            r"|Tunnel connection failed|(?:407|50[234]) (?:Client|Server) Error(?!.*for url: /)",
            r"429 Client Error(?!.*for url: /)|(?<!Client Error: )Too Many Requests"
            r"|Consistency check failed: file should be of size|ReadTimeoutError"
            r"|IncompleteRead|ChunkedEncodingError",
            r"[Tt]emporary failure in name resolution|Name or service not known.*(?:http|hub|url|host)|gaierror",
            r"host='(?P<hub>[\w.-]*(?:huggingface|hf-mirror|modelscope|\bhf)\.\w+)'.*Max retries exceeded",
            r"(?:Connect|Proxy)(?:ion)?(?:Error|Timeout)\b.*huggingface|Couldn't reach .{0,120}(?:Hub|https?:)",
            r"httpx\.\w*(?:Connect|Read|Proxy|Timeout|Protocol|Network)\w*|requests\.exceptions\.\w*(?:Timeout"
            r"|ConnectionError)",
            r"CAS service error|ReqwestMiddleware|Cannot connect to host \S*(?:huggingface|modelscope|\bhf)\b",
        ),
        N_(
            "The model hub[[ {hub}]] cannot be reached from here (no network, a proxy or its certificate, too many "
            "requests, "
            "or offline mode), and the files are not in the local cache."
        ),
        N_(
            "Download the model where there is a network (`hf download NAME --local-dir DIR`), copy the folder to "
            "every node and give --model DIR. Or set HF_ENDPOINT to a reachable mirror (https://hf-mirror.com), and "
            "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE where there is a network. Proxies: HTTPS_PROXY, and "
            "REQUESTS_CA_BUNDLE for the certificate of one that inspects traffic. After 429: wait, and log in "
            "(HF_TOKEN)."
        ),
        confidence=0.92,
        source="huggingface_hub, transformers",
        explains=("model_not_found",),
    ),
    Symptom(
        "nan_loss",
        (
            r"loss or gradients were NaN or inf in (?P<steps>\d+) steps in a row, up to step (?P<step>\d+)",
            r"[Ll]oss is (?:nan|inf)\b(?i:.{0,30}(?:stop|abort|terminat))",
            r"[Ll]oss scale (?:is )?(?:already )?(?:at|reached|below|hit)\W{1,3}(?:the |its )?min(?:imum)?"
            r"|[Mm]inimum loss scale reached",
            r"cannot decrease (?:loss )?scale anymore",
            r"Unexpected result -?(?:nan|inf)|is non-finite, so it cannot be clipped|found invalid values:.*\bnan\b",
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
            r"(?:[Nn]on-?finite|NaN|\bnan|Inf) (?:values? |loss|grad\w*).{0,60}(?:detected|found|encountered|abort"
            r"|stop)",
            r"(?:[Ll]oss|[Gg]rad\w*)(?: norm)? (?:is|became|are|was) (?:nan|NaN|NAN|inf|not finite|non-?finite)\b",
            r"probability tensor contains either `inf`|(?:[Ff]ound|[Dd]etected|[Ee]ncountered|contains?) "
            r"(?:an? |some |invalid |values? )?(?:NaN|nan|NAN|[Ii]nf)s?\b(?!:? 0)",
        ),
        _NAN_TEXT,
        _NAN_FIX,
        kind=Kind.VAGUE,
        confidence=0.85,
        lasting=True,
        source="training programs",
    ),
    Symptom(
        "nan_loss",
        (
            r"^(?!.*(?:\b0 samples|\bempty|ignored|pruned))(?:.*\W)?loss['\"]?\s*[:= ]\s*['\"]?-?(?i:nan|inf)\b",
            r"(?i:\bgrad[_ ]?norm)['\"]?\s*[:= ]\s*['\"]?(?i:nan)\b",
        ),
        _NAN_TEXT,
        _NAN_FIX,
        confidence=0.8,
        lasting=True,
        in_warnings=True,
        source="transformers' and others' training logs",
    ),
    Symptom(
        "dtype_mismatch",
        (
            r"to have the same dtype, but got|must have the same dtype",
            r"expected scalar type (?P<wanted>\w+) but found (?P<found>\w+)",
            r"Input type \((?P<found>[\w.:]+)\) and (?:weight|bias) type \((?P<wanted>[\w.:]+)\) should be the same",
            r"source and destination dtypes match",
            r"Found dtype (?P<found>\w+) but expected (?P<wanted>\w+)",
            r"tensors? must (?:be|have) the same (?:data ?type|dtype|type)\b|with uniform dtype but got",
            r"only supports? fp16 and bf16|mixed dtype \(CPU\)",
            r"to have the same (?:data ?type|scalar type|type)\b|expected (?:dtype|type) \S+ but got \S+",
            r"result type \w+ can't be cast to|dtypes? (?:do not|don't|does not) match|must match dtype",
        ),
        N_(
            "Two tensors have different data types[[: {found} where {wanted} is expected]][[ on rank {rank}]]."
        ),
        N_(
            "Use one type throughout: --dtype bfloat16 with a model loaded in bfloat16. Custom modules or adapters "
            "kept in float32 inside a bfloat16 model need autocast or .to(dtype); under ZeRO-3 with LoRA load the "
            "adapter in the model's type (autocast_adapter_dtype=False)."
        ),
        confidence=0.88,
        source="torch",
    ),
    Symptom(
        "dtype_mismatch",
        (r"\"?\w+\"? not implemented for '(?P<found>(?!BFloat16)[A-Z]\w+)'",),
        N_(
            "An operator is not made for tensors of this type[[ ({found})]] on this device[[ (rank {rank})]]."
        ),
        N_(
            "Half precision on a CPU: --dtype float32 (or bfloat16). Labels and ids must be int64 (.long()). Otherwise "
            "convert the tensor before the operator that the evidence names."
        ),
        confidence=0.86,
        source="torch",
    ),
    Symptom(
        "bf16_unsupported",
        (
            r"[Yy]our setup doesn't support bf16|device has no bfloat16",
            r"[Tt]ype bf16 is not supported on your device|bf16 mixed precision requires",
            r"not implemented for 'BFloat16'|[Bb][Ff](?:loat)?16 is (?:not supported|only supported)",
            r"(?:does not|doesn't|do not|don't) support (?:bf16|bfloat16|BF16|BFloat16)(?!.*float16 is used)"
            r"|DT_BF(?:LOAT)?16 .{0,20}not support",
            r"not (?:implemented|support(?:ed)?) for .{0,12}DT_BF(?:LOAT)?16",
            r"bf16\S* requires? (?:\.target|Ampere|GPU|PyTorch|CUDA)|BFloat16 (?:is )?not (?:supported|implemented)",
            r"[Uu]nsupported (?:ScalarType|scalar type|dtype|data ?type|type)\W{1,3}(?:torch\.)?[Bb][Ff](?:loat)?16",
        ),
        N_(
            "This device or operator does not support bfloat16 (GPUs before Ampere, Ascend 910A, some CPU operators)."
        ),
        N_(
            '--dtype float16, or --dtype float32 where there is no gradient scaler; take "bf16": {{"enabled": true}} '
            "out of the DeepSpeed file. Check with `python -m finetune doctor`."
        ),
        source="transformers, accelerate, DeepSpeed, torch, this package",
    ),
    Symptom(
        "flash_attn_missing",
        (
            r"FlashAttention\d? has been toggled on, but it cannot be used",
            r"No module named 'flash_attn\w*'",
            r"flash_attn seems to be not installed|flash[_-]attn is not installed|requires the flash[_-]attn package",
            r"FlashAttention only supports (?P<wanted>[\w ]+) GPUs",
            r"flash_attn\S*\.so\S*: (?:undefined symbol|cannot open)|while importing flash_attn"
            r"|cannot import name '\w+' from 'flash_attn[\w.]*'",
            r"^(?:\w+\.)*\w*(?:Error|Exception): .*[Ff]lash[ _-]?[Aa]tt(?:ention|n)\S* .{0,60}(?:not (?:available"
            r"|installed|supported)|[Uu]navailable|only supports|requires)",
        ),
        N_(
            "Flash Attention was requested, but its package is missing, does not match this torch, or does not support "
            "this device."
        ),
        N_(
            "Leave out attn_implementation: SDPA is then used, which is nearly as fast. Otherwise `pip install "
            "flash-attn --no-build-isolation` for this torch and CUDA (Ampere GPUs or newer; on NPUs torch_npu brings "
            "its own)."
        ),
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
        N_(
            "Activation recomputation did not reproduce the first forward[[ on rank {rank}]]: gradient checkpointing "
            "is incompatible with the way the model is wrapped (DDP, ZeRO-3, LoRA)."
        ),
        N_(
            "This package sets use_reentrant=False, which DDP and ZeRO take, so look at custom code: no random or "
            "data-dependent branches and no autocast change inside a checkpointed layer. Shapes [0] in the evidence "
            "are ZeRO-3's partitioned weights: there use_reentrant=True, or a newer DeepSpeed. To verify: "
            "--gradient-checkpointing false."
        ),
        confidence=0.92,
        source="torch.utils.checkpoint, DDP",
        explains=("unused_parameters_ddp",),
    ),
    Symptom(
        "grad_checkpoint_mismatch",
        (r"element 0 of tensors does not require grad and does not have a grad_fn",),
        N_(
            "No trainable parameter contributed to the loss: most often LoRA with gradient checkpointing and inputs "
            "without gradient."
        ),
        N_(
            "Call model.enable_input_require_grads() or use use_reentrant=False, and make sure that the LoRA targets "
            "exist (--lora-target-modules)."
        ),
        confidence=0.7,
        source="torch autograd",
    ),
    Symptom(
        "unused_parameters_ddp",
        (
            r"Expected to have finished reduction in the prior iteration",
            r"parameters that were not used in producing (?:the )?loss",
            r"Parameter indices which did not receive grad for rank (?P<rank>\d+): (?P<indices>[\d ]+)",
        ),
        N_(
            "DDP waits for gradients of parameters that did not contribute to the loss[[ (indices {indices})]][[ on "
            "rank {rank}]]."
        ),
        N_(
            "Freeze what is not trained (requires_grad=False), or find out why the ranks take different paths; "
            "TORCH_DISTRIBUTED_DEBUG=DETAIL names the parameters. Only as a last resort find_unused_parameters=True, "
            "which is slower."
        ),
        confidence=0.94,
        source="torch DDP",
    ),
    Symptom(
        "fp8_unsupported",
        (
            r"required for FP8 execution|fp8\w* (?:data ?type )?(?:is )?not supported (?:in|on|for)",
            r"(?:Error|Exception): .*(?:FP8|fp8|[Ff]loat8)\b.{0,80}(?:only supported|not supported (?:on|by|in) "
            r"|requires? (?:an? )?(?:\w+ )?(?:GPU|Hopper|Ada|compute)|compute capability)",
            r"(?:Error|Exception): .*(?:does not|doesn't) support (?:FP8|fp8|float8)",
        ),
        N_(
            "This device has no 8-bit floating point numbers (FP8): NVIDIA GPUs have them from Ada and Hopper on "
            "(compute capability 8.9)."
        ),
        N_(
            "Use bfloat16: take fp8 out of the settings (and of the quantization of the checkpoint, or convert that to "
            "bfloat16), or use a device that has FP8."
        ),
        confidence=0.9,
        source="Transformer Engine, transformers, Triton",
    ),
)
