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
            r"wandb\.errors\.\S*AuthenticationError",
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
        "disk_full",
        (
            r"No space left on device(?:.*?'(?P<path>[^']+)')?",
            r"\[Errno 28\]|\[Errno 122\]|Disk quota exceeded|the run folder's disk is full",
            r"PytorchStreamWriter failed writing file|inline_container\.cc.*unexpected pos",
            r"[Ii]/[Oo] error: No space left",
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
        "too_many_open_files",
        (r"Too many open files", r"\[Errno 24\]", r"received 0 items of ancdata"),
        N_("A process[[ of rank {rank}]] reached the limit of open files."),
        N_(
            "`ulimit -n 65536` in the shell that starts the run (in a container its nofile limit), fewer "
            "--dataloader-num-workers[[ (now {dataloader_num_workers})]], or "
            "torch.multiprocessing.set_sharing_strategy('file_system')."
        ),
        confidence=0.94,
        source="Linux, torch.multiprocessing",
    ),
    Symptom(
        "permission_denied",
        (
            r"PermissionError: \[Errno \d+\] [^:]*: '(?P<path>[^']+)'",
            r"\[Errno 13\]|PermissionError\b|Permission denied(?! \(publickey)",
            r"\[Errno 30\]|Read-only file system|\bERR0[0-4]012\b",
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
            r"python: can't open file '(?P<file>[^']+)'|^\S+: No module named (?P<package__>\S+)$",
        ),
        N_("Python cannot find[[ the package {package}]][[ the file {file}]] in the active environment."),
        N_(
            "Make sure that the right environment is active on every node (`which python`), then `pip install[[ "
            "{package}]]`."
        ),
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
            r"exits with return code = -(?:11|4)\b|[Cc]aught signal 11 \(",
        ),
        N_(
            "A process[[ ({pid})]][[ of rank {rank}]] crashed inside native code: incompatible libraries, or a bug in "
            "one."
        ),
        N_(
            "Run with `python -X faulthandler` (PYTHONFAULTHANDLER=1): it names the Python line. Then suspect packages "
            "that were built for another torch or CPU (flash-attn, bitsandbytes, apex, a copied "
            "~/.cache/torch_extensions): reinstall them or remove the cache."
        ),
        kind=Kind.UNEXPLAINED,
        confidence=0.6,
        source="Linux, Python, torch elastic",
        explains=("unknown",),
    ),
)
