"""What surrounds the run: disk, files, permissions, packages, logins."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

SYMPTOMS = (
    Symptom(
        "wandb_login",
        (
            r"wandb\S*Error: .*(?:api_key|API key|login|logged in)|api_key not configured \(no-tty\)",
            r"No API key configured\. Use `wandb login`|API key must (?:be \d+ characters|have \d+)",
            r"wandb: ERROR .*(?:API key|user is not logged in|permission denied|401)",
            r"wandb\.errors\.\S*(?:AuthenticationError|CommError: .*(?:permission|401|403))",
        ),
        N_("wandb was requested but is not logged in here[[ (rank {rank})]]."),
        N_(
            "`wandb login`, or WANDB_API_KEY in the environment; without a network WANDB_MODE=offline (and `wandb "
            "sync` later); without wandb WANDB_MODE=disabled or --report-to none."
        ),
        confidence=0.94,
        source="wandb",
    ),
    Symptom(
        "wandb_login",
        (r"wandb\S*(?:Error|ERROR)\b.*(?:timed out|[Nn]etwork|[Cc]onnection)",),
        N_("wandb's server cannot be reached from here[[ (rank {rank})]]."),
        N_(
            "WANDB_MODE=offline (and `wandb sync` later where there is a network), or --report-to none; WANDB_BASE_URL "
            "for a server of your own, HTTPS_PROXY behind a proxy."
        ),
        confidence=0.93,
        source="wandb",
    ),
    Symptom(
        "disk_full",
        (
            r"No space left on device(?:.*?'(?P<path>[^']+)')?",
            r"\[Errno 28\]|\[Errno 122\]|Disk quota exceeded|the run folder's disk is full|\b(?:ENOSPC|EDQUOT)\b",
            r"low on resource: ephemeral-storage|ephemeral.{0,20}storage .{0,30}exceed|os error 28\b|errno:? 28\b"
            r"|os error 122\b",
            r"PytorchStreamWriter failed writing file|inline_container\.cc.*unexpected pos",
            r"[Ii]/[Oo] error: No space left|write error: disk full|Not enough disk space|not enough free disk",
            r"checkpoint-(?P<step>\d+) could not be written: .*needed (?P<needed>[^,]+), free (?P<free>[^;\n]+)",
        ),
        N_(
            "The disk (or its quota, or its inodes) is full[[: {path}]][[: checkpoint-{step} needed {needed}, {free} "
            "were free]]."
        ),
        N_(
            "Check `df -h`, `df -i` and `du -sh *` in the output folder and in ~/.cache; lower --save-total-limit, "
            "delete old checkpoints, or move --output-dir, TMPDIR and HF_HOME to a larger disk. Then start the same "
            "command again: it resumes from the last valid checkpoint."
        ),
        confidence=0.95,
        source="Linux, torch, safetensors, this package",
        explains=("checkpoint_corrupt",),
    ),
    Symptom(
        "storage_error",
        (
            r"[Ss]tale (?:NFS )?file handle|\bESTALE\b|\[Errno 116\]|Transport endpoint is not connected"
            r"|\[Errno 107\].*(?:/|mount)",
            r"Input/output error(?::? '?(?P<path>/[^']+))?|\[Errno 5\]|os error 5\b|Remote I/O error|\[Errno 121\]",
            r"LustreError: |mmfs\w*: .*(?:[Ee]rror|unmount)|libceph: \S+ .*(?:down|lost|timeout)"
            r"|BeeGFS\S* .*(?:rror|timed out)",
            r"nfs: server (?P<path>\S+) not responding|(?:Lustre|ceph|gpfs|EXT4-fs|XFS)\S*.{0,60}(?:error|evict"
            r"|timed out|shutdown)",
            r"Buffer I/O error on dev|nvme\w*: .*(?:timeout, (?:aborting|reset)|controller is down|I/O Error)",
            r"blk_update_request: I/O error|I/O error, dev (?P<path>\w+)|[Uu]nable to (?:lock"
            r"|mmap) file.{0,40}(?:No locks|I/O)|\[Errno 37\]",
        ),
        N_("A file system failed[[ at {path}]]: a network file system lost its connection, or a disk is faulty."),
        N_(
            "`df -h` and `ls` on that path, and `dmesg -T | tail`, on the machine that reports it: have it mounted "
            "again or the "
            "disk replaced. Until then write to a local disk (--output-dir, HF_HOME, TMPDIR), and start the same "
            "command "
            "again: the run resumes from the last valid checkpoint."
        ),
        confidence=0.91,  # surer than what a broken read makes of a weights file
        source="Linux, NFS, Lustre, FUSE",
        explains=("checkpoint_corrupt", "dataloader_worker_killed_shm", "permission_denied"),
        restart_cures=False,
    ),
    Symptom(
        "too_many_open_files",
        (r"Too many open files", r"\[Errno 24\]|\bEMFILE\b|os error 24\b", r"received 0 items of ancdata"),
        N_("A process[[ of rank {rank}]] reached the limit of open files."),
        N_(
            "`ulimit -n 65536` in the shell that starts the run (in a container its nofile limit), fewer "
            "--dataloader-num-workers[[ (now {dataloader_num_workers})]], or "
            "torch.multiprocessing.set_sharing_strategy('file_system')."
        ),
        confidence=0.97,  # surer than the shared memory that could not be opened for it
        source="Linux, torch.multiprocessing",
    ),
    Symptom(
        "process_limit",
        (
            r"can't start new thread|pthread_create.{0,50}(?:failed|Resource temporarily unavailable)",
            r"fork: (?:retry: )?Resource temporarily unavailable|\[Errno 11\] Resource temporarily unavailable$",
            r"cgroup: fork rejected by pids controller|pids\.max",
        ),
        N_(
            "No more processes or threads may be started here[[ (rank {rank})]]: a limit of the user or container is "
            "reached."
        ),
        N_(
            "Compare `ulimit -u`, the container's --pids-limit and `cat /sys/fs/cgroup/pids.max` with `ps -eLf | wc "
            "-l`; raise the limit, end left-over processes, set OMP_NUM_THREADS=1 (each process starts as many threads "
            "as cores otherwise), and lower --dataloader-num-workers[[ (now {dataloader_num_workers})]]."
        ),
        confidence=0.92,
        source="Linux, Python, OpenBLAS",
    ),
    Symptom(
        "host_hardware_fault",
        (
            r"Memory failure: .*(?:Sending SIGBUS|Killing|hardware memory corruption)|EDAC \S+: \d+ UE\b",
            r"(?:mce|MCE|Hardware Error)\b.*(?:[Uu]ncorrect|[Ff]atal|context corrupt)|Machine [Cc]heck Exception",
            r"Kernel panic|soft lockup - CPU|[Hh]ard LOCKUP|NMI watchdog: .*LOCKUP",
        ),
        N_(
            "The machine itself failed: its memory or processor reports errors that cannot be corrected, or its kernel "
            "stood."
        ),
        N_(
            "Take the machine out of service: `dmesg -T | grep -i -E 'mce|edac|memory failure|lockup|panic'` and its "
            "management controller's log (`ipmitool sel list`) are for its administrator. Start the same command again "
            "on another: the run resumes from its last checkpoint."
        ),
        kind=Kind.MACHINE,
        confidence=0.92,
        in_warnings=True,
        reported_late=True,
        source="Linux kernel",
        explains=("dataloader_worker_killed_shm",),
    ),
    Symptom(
        "storage_error",
        (
            r"task \S+:\d+ blocked for more than \d+ seconds|hung_task_timeout_secs",
            r"FailedMount|MountVolume\.\w+ failed|[Uu]nable to attach or mount volumes",
        ),
        N_("A process waits for a file system that does not answer, or a volume could not be mounted."),
        N_(
            "`dmesg -T | grep -i -E 'blocked for|nfs|lustre|nvme'`, `ls` on data, checkpoint and cache folders (which "
            "one hangs?), and in Kubernetes `kubectl describe pod` and `kubectl get pvc`: have that file system "
            "mended, then start the same command again."
        ),
        kind=Kind.VAGUE,
        confidence=0.85,
        in_warnings=True,
        needs=(
            "collective_timeout",
            "hccl_connect_timeout",
            "rendezvous_timeout",
            "peer_died",
            "unknown",
            "file_not_found",
        ),
        explains=("collective_timeout", "file_not_found"),
        source="Linux kernel, Kubernetes",
    ),
    Symptom(
        "permission_denied",
        (
            r"NoCredentialsError|Unable to locate credentials|DefaultCredentialsError|InvalidAccessKeyId"
            r"|SignatureDoesNotMatch",
            r"\(AccessDenied\)|\b(?:Access ?Denied|Forbidden)\b.{0,60}(?:Operation|operation|bucket|object|s3)"
            r"|stat:403",
        ),
        N_("The object store refuses: no credentials here, wrong ones, or none for this bucket."),
        N_(
            "List the path with the store's own command in the same shell or container (`aws s3 ls`, `obsutil ls`, "
            "`gsutil ls`); give the run's processes the credentials (environment variables, a mounted file, the "
            "service account's role), and check the endpoint and region."
        ),
        confidence=0.87,
        source="boto3, obs, google-cloud",
    ),
    Symptom(
        "permission_denied",
        (
            r"PermissionError: \[Errno \d+\] [^:]*: '(?P<path>[^']+)'",
            r"\[Errno 13\]|PermissionError\b|[Pp]ermission denied(?! \(publickey)",
            r"\[Errno 30\]|Read-only file system|\bERR0[0-4]012\b|\b(?:EACCES|EROFS|EPERM)\b"
            r"|\[Errno 1\] Operation not permitted",
            r"os error (?:13|30)\b",
        ),
        N_("The user running this may not read or write[[ {path}]]."),
        N_(
            "`ls -ld`[[ {path}]] and `id`: take ownership of the folder, mount it writable, or choose another "
            "--output-dir, HF_HOME or TMPDIR. For NPUs the user must be in the group of /dev/davinci* (HwHiAiUser)."
        ),
        confidence=0.88,
        source="Linux, Python",
    ),
    Symptom(
        "missing_package",
        (
            r"ModuleNotFoundError: No module named '(?P<package>[\w.]+)'",
            r"^\[ERROR\] (?:rank \d+: )?(?P<package>[\w.-]+) is not installed",
            r"ImportError: (?P<package>[\w-]+) is required|ImportError: .*requires the (?P<package_>[\w-]+) library",
            r"[Pp]lease install (?:the )?[`'\"]?(?P<package>[\w-]+)"
            r"|need to have (?P<package_>[\w-]+)(?: or \w+)? installed",
            r"python\S*: can't open file '(?P<file>[^']+)'|^\S+: No module named (?P<package__>\S+)$",
            r"(?P<package>\w+): command not found|requires? (?:the )?[`'\"]?(?P<package_>[\w-]+)[`'\"]? (?:package"
            r"|library)? ?(?:to be|but it was not|which is not) ?(?:installed|found)?",
            r"(?:pip|conda) install (?:-\S+ )*[`'\"]?(?P<package>\w[\w\[\]-]*).{0,40}$"
            r"|PackageNotFoundError: (?:No package metadata was found for )?(?P<package_>\S+)",
        ),
        N_("Python cannot find[[ the package {package}]][[ the file {file}]] in the active environment."),
        N_(
            "Make sure that the right environment is active on every node (`which python`), then `pip install[[ "
            "{package}]]`."
        ),
        confidence=0.8,
        source="Python",
        explains=("npu_driver_cann_mismatch", "npu_op_exception"),  # CANN compiles operators with Python packages
    ),
    Symptom(
        "missing_package",
        (r"requires? the latest version of [`'\"]?(?P<package>\w[\w-]*)",),
        N_("A package[[ ({package})]] is not installed here, or is older than what uses it needs."),
        N_("`pip install -U[[ {package}]]` in the environment of the run, on every node; `pip check` afterwards."),
        confidence=0.82,
        source="transformers",
    ),
    Symptom(
        "package_mismatch",
        (
            r"model type [`'\"]?(?P<model>[\w.-]+)[`'\"]? but Transformers does not recognize",
            r"does not recognize this architecture|Transformers does not recognize|Unrecognized configuration class",
            r"KeyError: '(?P<model>(?:qwen|llama|mistral|mixtral|gemma|phi|deepseek|internlm|chatglm|glm"
            r"|baichuan|cohere|olmo"
            r"|granite|minicpm|exaone|falcon|gpt_oss)\w*)'$",
        ),
        N_("The installed transformers does not know this model's architecture[[ ({model})]]: it is too old for it."),
        N_(
            "`pip install -U transformers` to the version that config.json names (`transformers_version`) or a newer "
            "one; a model with code of its own (*.py in its folder) needs trust_remote_code=True instead."
        ),
        confidence=0.85,
        source="transformers",
        explains=("missing_package",),
    ),
    Symptom(
        "package_mismatch",
        (
            r"Weights only load failed|weights_only=True.{0,60}(?:unsupported|fail)"
            r"|was not an allowed global by default",
        ),
        N_(
            "This torch (2.6 or newer) loads only weights from pickled files, and the file holds other objects: it was "
            "written by an older program."
        ),
        N_(
            "If the file is your own: torch.serialization.add_safe_globals([...]) for the classes that the message "
            "names, or weights_only=False where the program loads it (this runs code of the file). Best save it again "
            "as safetensors. The versions that wrote it read it too."
        ),
        confidence=0.91,
        source="torch.load",
    ),
    Symptom(
        "package_mismatch",
        (
            r"numpy\.(?:dtype|ndarray) size changed|compiled using NumPy 1\.x cannot be run in|_ARRAY_API not found"
            r"|multiarray failed to import",
        ),
        N_("A compiled package here was built for another NumPy than the one that is installed."),
        N_(
            "`pip install 'numpy<2'`, or newer builds of the packages that the traceback names (pandas, scipy, "
            "pyarrow)."
        ),
        kind=Kind.VAGUE,
        confidence=0.78,
        source="NumPy 2.0 migration guide",
    ),
    Symptom(
        "package_mismatch",
        (r"was removed in the NumPy (?P<version>\d[\d.]*) release",),
        N_("A package here is older than NumPy[[ {version}]], which no longer has what it uses."),
        N_("pip install 'numpy<2', or a newer version of the package whose file the traceback names last."),
        confidence=0.9,
        source="NumPy 2.0 migration guide",
        explains=("npu_driver_cann_mismatch", "npu_op_exception"),
    ),
    Symptom(
        "package_mismatch",
        (
            r"version [`'](?P<library>(?:GLIBCXX|GLIBC|CXXABI|GCC)_[\d.]+)' not found",
            r"(?P<library>[\w.+-]+\.so\S*): undefined symbol|symbol lookup error|undefined symbol: \w+",
            r"(?P<library>lib\S+\.so\S*): cannot open shared object file",
            r"cannot import name '(?P<name>\w+)' from '(?P<library>[\w.]+)'"
            r"|AttributeError: module '(?P<library_>[\w.]+)' has no attribute",
            r"(?P<library>[\w.-]+)(?:>=|==|<=|<|>|!=|~=)[\w.*,<>=!~ ]+ is required for a normal functioning"
            r"|VersionConflict",
            r"ImportError: (?P<library>[\w.-]+) ?[><=!~]=? ?[\d.]+\S* is required",
            r"(?P<library>\w+)(?: version)? [\d.]+\S* (?:is required|or newer|or later|or higher).{0,60}(?:but|found"
            r"|installed|got)",
            r"AttributeError: '(?P<name>\w*(?:Cache|AdamW|Accelerator|AcceleratorState|Trainer|TrainingArguments"
            r"|TokenizerFast|Tokenizer))' object has no attribute",
            r"[Nn]um[Pp]y is not available|did not match any variant of untagged enum"
            r"|is required,? but found|is incompatible with (?P<library>[\w-]+)[<>=]",
            r"Tokenizer class \w+ does not exist or is not currently imported",
            r"requires? [`'\"]?(?P<library>[\w-]+)(?:\[\w+\])? ?[><=~!]=? ?\d|[Uu]pgrad(?:e"
            r"|ing) (?:your )?[`'\"]?(?P<library_>\w[\w-]+)[`'\"]? (?:version|package|to\b|>=)",
            r"[Ff]ound an incompatible version of (?P<library>\w+)|requires (?:a different"
            r"|newer) (?:version of )?(?P<library_>\w+)",
            r"TypeError: .*got an unexpected keyword argument '(?P<name>\w+)'"
            r"|Detected that PyTorch and (?P<library>\w+) were compiled with different CUDA",
            r"RuntimeError: operator torchvision::nms does not exist|ImportError: .*(?:partially initialized"
            r"|incompatible|DLL load)",
        ),
        N_(
            "Installed packages do not fit one another, or the system's libraries are too old for them[[: "
            "{library}]][[ "
            "({name})]]."
        ),
        N_(
            "`pip check` and `pip list | grep -i -E 'torch|transformers|accelerate|deepspeed|peft|numpy'` show what is "
            "installed. Install again in a fresh environment what the evidence names, in the versions that belong "
            "together "
            "(`python -m finetune doctor` shows them); packages with compiled code (flash-attn, torchvision, "
            "bitsandbytes) "
            "have to be built for this torch. For GLIBCXX: `conda install -c conda-forge libstdcxx-ng`, or unset an "
            "LD_LIBRARY_PATH that puts older libraries first."
        ),
        kind=Kind.VAGUE,
        confidence=0.75,
        source="Python, dynamic linker, transformers",
    ),
)
