"""What surrounds the run: disk, files, permissions, packages, logins."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom

SYMPTOMS = (
    Symptom(
        "wandb_login",
        (
            r"wandb\S*Error: .*(?:api_key|API key|login|logged in)",
            r"api_key not configured \(no-tty\)",
            r"No API key configured\. Use `wandb login`",
            r"API key must (?:be \d+ characters|have \d+)",
            r"wandb: ERROR .*(?:API key|user is not logged in|permission denied|401)",
            r"wandb\.errors\.\S*AuthenticationError",
        ),
        {
            "en": "wandb was asked for and has no login here[[ (rank {rank})]].",
            "zh": "要求使用 wandb,但此处没有登录[[(rank {rank})]]。",
        },
        {
            "en": "`wandb login`, or WANDB_API_KEY in the environment; without a network WANDB_MODE=offline (and "
            "`wandb sync` later); without wandb WANDB_MODE=disabled or --report-to none.",
            "zh": "执行 `wandb login` 或设置环境变量 WANDB_API_KEY;没有网络用 WANDB_MODE=offline(之后 `wandb sync`);"
            "不用 wandb 则 WANDB_MODE=disabled 或 --report-to none。",
        },
        confidence=0.94,
        source="wandb",
    ),
    Symptom(
        "disk_full",
        (
            r"No space left on device(?:.*?'(?P<path>[^']+)')?",
            r"\[Errno 28\]|\[Errno 122\]|Disk quota exceeded",
            r"the run folder's disk is full",
            r"PytorchStreamWriter failed writing file|inline_container\.cc.*unexpected pos",
            r"[Ii]/[Oo] error: No space left",
            r"checkpoint-(?P<step>\d+) could not be written: .*needed (?P<needed>[^,]+), free (?P<free>[^;\n]+)",
        ),
        {
            "en": "The disk (or its quota, or its inodes) is full[[: {path}]][[: checkpoint-{step} needed {needed}, "
            "{free} were free]].",
            "zh": "磁盘(或配额、inode)已满[[:{path}]][[:checkpoint-{step} 需要 {needed},只剩 {free}]]。",
        },
        {
            "en": "`df -h`, `df -i` and `du -sh *` in the output folder and in ~/.cache; lower --save-total-limit, "
            "take old checkpoints away, or move --output-dir, TMPDIR and HF_HOME to a larger disk. Then start the "
            "same command again: it goes on from the last whole checkpoint.",
            "zh": "在输出目录与 ~/.cache 执行 `df -h`、`df -i`、`du -sh *`;减小 --save-total-limit,删除旧检查点,或把 "
            "--output-dir、TMPDIR、HF_HOME 移到更大的磁盘。然后再次执行同一命令:会从最近的完好检查点继续。",
        },
        confidence=0.95,
        source="Linux, torch, safetensors, this package",
        explains=("checkpoint_corrupt",),
    ),
    Symptom(
        "too_many_open_files",
        (r"Too many open files", r"\[Errno 24\]", r"received 0 items of ancdata"),
        {
            "en": "A process[[ of rank {rank}]] reached the limit of open files.",
            "zh": "进程[[(rank {rank})]]达到打开文件数上限。",
        },
        {
            "en": "`ulimit -n 65536` in the shell that starts the run (in a container its nofile limit), fewer "
            "--dataloader-num-workers[[ (now {dataloader_num_workers})]], or "
            "torch.multiprocessing.set_sharing_strategy('file_system').",
            "zh": "在启动训练的 shell 中执行 `ulimit -n 65536`(容器则是容器的 nofile 限制),减少 "
            "--dataloader-num-workers[[(当前 {dataloader_num_workers})]],或 "
            "torch.multiprocessing.set_sharing_strategy('file_system')。",
        },
        confidence=0.94,
        source="Linux, torch.multiprocessing",
    ),
    Symptom(
        "permission_denied",
        (
            r"PermissionError: \[Errno \d+\] [^:]*: '(?P<path>[^']+)'",
            r"\[Errno 13\]|PermissionError\b",
            r"Permission denied(?! \(publickey)",
            r"\[Errno 30\]|Read-only file system",
            r"\bERR0[0-4]012\b",
        ),
        {
            "en": "The user that runs this may not read or write[[ {path}]].",
            "zh": "运行用户无权读写[[ {path}]]。",
        },
        {
            "en": "`ls -ld`[[ {path}]] and `id`: own the folder, mount it writable, or choose another --output-dir, "
            "HF_HOME or TMPDIR. For NPUs the user must be in the group of /dev/davinci* (HwHiAiUser).",
            "zh": "查看 `ls -ld`[[ {path}]] 与 `id`:取得目录所有权、以可写方式挂载,或更换 --output-dir、HF_HOME、"
            "TMPDIR。NPU 需要用户属于 /dev/davinci* 的组(HwHiAiUser)。",
        },
        confidence=0.88,
        source="Linux, Python",
    ),
    Symptom(
        "missing_package",
        (
            r"ModuleNotFoundError: No module named '(?P<package>[\w.]+)'",
            r"^\[ERROR\] (?:rank \d+: )?(?P<package>[\w.-]+) is not installed",
            r"ImportError: (?P<package>[\w-]+) is required|ImportError: .*requires the (?P<package_>[\w-]+) library",
            r"python: can't open file '(?P<file>[^']+)'|^\S+: No module named (?P<package__>\S+)$",
        ),
        {
            "en": "Python does not find[[ the package {package}]][[ the file {file}]] in the environment that runs.",
            "zh": "当前 Python 环境中找不到[[软件包 {package}]][[文件 {file}]]。",
        },
        {
            "en": "See that the right environment is active on every node (`which python`), then `pip install[[ "
            "{package}]]`.",
            "zh": "确认每个节点都激活了正确的环境(`which python`),然后 `pip install[[ {package}]]`。",
        },
        confidence=0.8,
        source="Python",
    ),
    Symptom(
        "native_crash",
        (
            r"Fatal Python error: (?P<signal>Segmentation fault|Illegal instruction|Bus error)",
            r"^Segmentation fault|Segmentation fault \(core dumped\)",
            r"exitcode +: -(?:11|4) \(pid: (?P<pid>\d+)\)",
            r"Signal (?:11 \(SIGSEGV\)|4 \(SIGILL\)) received by PID (?P<pid>\d+)",
            r"exits with return code = -(?:11|4)\b",
            r"[Cc]aught signal 11 \(",
        ),
        {
            "en": "A process[[ ({pid})]][[ of rank {rank}]] crashed inside native code: libraries that do not fit "
            "together, or a fault of one.",
            "zh": "进程[[({pid})]][[(rank {rank})]]在本地代码中崩溃:库之间不兼容,或某个库有缺陷。",
        },
        {
            "en": "Run with `python -X faulthandler` (PYTHONFAULTHANDLER=1): it names the Python line. Then suspect "
            "packages that were built for another torch or CPU (flash-attn, bitsandbytes, apex, a copied "
            "~/.cache/torch_extensions): reinstall them or remove the cache.",
            "zh": "用 `python -X faulthandler`(PYTHONFAULTHANDLER=1)运行以得到 Python 行号。再检查为其他 torch 或 CPU "
            "编译的包(flash-attn、bitsandbytes、apex、拷贝来的 ~/.cache/torch_extensions):重装或删除缓存。",
        },
        kind=Kind.UNEXPLAINED,
        confidence=0.6,
        source="Linux, Python, torch elastic",
        explains=("unknown",),
    ),
)
