"""What surrounds the run: disk, files, permissions, packages, logins."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

_NO_LOGIN = N_("The launcher cannot log in to a node by ssh without a password.")
_LOGIN_FIX = N_(
    "From the node that starts the run `ssh NODE true` must work for every node: install the key "
    "(ssh-copy-id), accept host keys once (ssh-keyscan), and in containers run sshd at the port that the host "
    "file names. torchrun and `python -m finetune launch`, started on every node, need no ssh."
)

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
        "wandb_login",
        (
            r"^(?:swanlab|comet_ml|neptune|clearml|mlflow|aim)\.\S*(?:Error|Exception): (?P<reason>.*)",
        ),
        N_("The experiment tracker cannot be used here[[: {reason}]]."),
        N_(
            "Log in to it or give its key in the environment, see whether its server can be reached, or train without "
            "it (--report-to none)."
        ),
        confidence=0.85,
        source="swanlab, comet, neptune, clearml, mlflow",
        passing=True,
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
        N_(
            "A file system failed[[ at {path}]]: a network file system lost its connection, or a disk is faulty."
        ),
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
        (
            r"Too many open files",
            r"\[Errno 24\]|\bEMFILE\b|os error 24\b",
            r"received 0 items of ancdata",
        ),
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
            r"cgroup: fork rejected by pids controller",
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
            r"Kernel panic - not syncing|soft lockup - CPU|[Hh]ard LOCKUP|NMI watchdog: .*LOCKUP",
        ),
        N_(
            "The machine itself failed: its memory or processor reports errors that cannot be corrected, or its kernel "
            "hung."
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
        "device_throttled",
        (
            # Power caps of software are everyday.
            r"(?i:(?:hw[ _](?:thermal[ _]|power[ _]brake[ _])?|(?:sw[ _])?thermal[ _]|power[ _]brake[ _])slowdown)"
            r"['\"]?\s*[:=]\s*Active\b",
            r"\((?:[\w ]+ \| )*(?:HW|SW Thermal|HW Thermal|HW Power Brake) Slowdown(?: \| [\w ]+)*\)",
            r"(?i:\b(?:[gn]pu|device|chip|card|accelerator)\b.{0,60}\b(?:(?:is|was|are|being) throttl(?:ed|ing)\b"
            r"|(?:thermal(?:ly)?|power[ _]brake)[ _]throttl(?!\w*['\"]?\s*[:=]\s*(?:not?|none|0|false|inactive)\b)))",
            r"(?i:\b(?:sm|core|ai ?core|graphics|[gn]pu)[ _]?(?:clocks?|freq(?:uency)?) .{0,30}\b(?:lowered|reduced"
            r"|dropped|throttled) (?:to|from|by|because|due))",
        ),
        N_(
            "A device lowered its clocks because it was too hot or got too little power[[ (rank {rank})]]: every step "
            "waits for the slowest device. This may have been why the run was not done in its time."
        ),
        N_(
            "`nvidia-smi -q -d PERFORMANCE,TEMPERATURE,CLOCK` (on an NPU `npu-smi info -t temp -i N`) on the node that "
            "the evidence names: have its cooling, fans and power supply checked, and start the same command again on "
            "another one: the run resumes from its last checkpoint."
        ),
        confidence=0.86,
        in_warnings=True,
        lasting=True,
        in_training=True,
        needs=("TIME LIMIT", "TIMEOUT", "DEADLINE", "DeadlineExceeded", "RUNLIMIT"),
        explains=("preempted",),
        source="NVIDIA driver",
        restart_cures=True,
    ),
    Symptom(
        "storage_error",
        (
            r"task \S+:\d+ blocked for more than \d+ seconds|hung_task_timeout_secs",
            r"FailedMount|MountVolume\.\w+ failed|[Uu]nable to attach or mount volumes",
        ),
        N_(
            "A process waits for a file system that does not answer, or a volume could not be mounted."
        ),
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
            r"\[Errno 13\]|PermissionError\b|[Pp]ermission denied(?! \(publickey|, please try)",
            r"\bERR0[0-4]012\b|\b(?:EACCES|EPERM)\b|\[Errno 1\] Operation not permitted|os error 13\b",
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
        "permission_denied",
        (
            r"Read-only file system(?:\W{1,4}(?P<path>/[^\s'\"]+))?",
            r"\[Errno 30\]|\bEROFS\b|os error 30\b",
        ),
        N_(
            "The file system[[ of {path}]] is mounted read-only: nobody can write there, whatever the permissions."
        ),
        N_(
            "`findmnt -T`[[ {path}]] shows how it is mounted. Write elsewhere (--output-dir, TMPDIR; HF_HOME and "
            "HF_DATASETS_CACHE for caches), or mount it writable (in containers without `:ro`, readOnly: false). A "
            "disk that became read-only while it was used has errors: `dmesg -T | grep -i -E 'remount|i/o error'`."
        ),
        confidence=0.89,
        source="Linux, Python",
    ),
    Symptom(
        "permission_denied",
        (
            r"Permission denied \(publickey|Permission denied, please try again|Host key verification failed",
        ),
        _NO_LOGIN,
        _LOGIN_FIX,
        confidence=0.92,
        source="OpenSSH, pdsh",
        explains=("rendezvous_timeout",),
    ),
    Symptom(  # also of a node that is asked again and again until it is up
        "permission_denied",
        (r"ssh: connect to host \S+ port \d+: Connection refused",),
        _NO_LOGIN,
        _LOGIN_FIX,
        kind=Kind.PEER_LOST,
        confidence=0.85,
        source="OpenSSH, pdsh",
        explains=("rendezvous_timeout",),
        passing=True,
    ),
)
