"""How processes end from outside: signals, schedulers, peers that are gone."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom, ended_by
from finetune.runtime.language import N_

_KILLED_FIX = N_(
    "First the host's memory: `dmesg -T | grep -i -E 'oom|killed process'`, in containers `kubectl describe pod` or "
    "`docker inspect` (OOMKilled), in Slurm `sacct -j JOB --format=JobID,State,MaxRSS`; if it ran out, lower "
    "--dataloader-num-workers, offload less to the CPU, start fewer processes on the machine, or give the job more "
    "memory. "
    "If memory sufficed, find who killed it: the scheduler's log, a watchdog, another user. Then start the same "
    "command "
    "again: the run resumes from its last checkpoint."
)
_PEER_FIX = N_(
    "The reason is in the log of the process that died, or nowhere if it was killed: look there, and at `dmesg -T | "
    "grep -i -E 'oom|killed|xid'` on its machine. If it was a one-off, start the same command again: the run resumes "
    "from its last checkpoint."
)
_AGAIN_FIX = N_(
    "Start the same command again: it resumes from the last checkpoint. For jobs with a time limit, have the "
    "scheduler send SIGTERM a few minutes earlier (Slurm: --signal=B:TERM@300), so that a checkpoint is saved."
)
_STOPPED = N_(
    "The run was stopped from outside[[ ({reason})]]: preempted, out of time, its node gone, or cancelled."
)

# Ctrl-C is no failure, and what follows from it is none either: this is told beside the findings,
# not as one.
INTERRUPTED = Symptom(
    "interrupted",
    (
        r"^KeyboardInterrupt\b|got signal: 2\b|[Rr]eceived (?:SIGINT|2 death)",
        *ended_by(2, "SIGINT"),
    ),
    N_(
        "A person stopped the run (Ctrl-C, SIGINT). What its processes and the launcher reported then follows from it."
    ),
    N_(
        "To go on, start the same command again: it resumes from its last checkpoint (other trainers must be asked to: "
        "transformers' resume_from_checkpoint). If nobody pressed Ctrl-C, a program sent SIGINT: the scheduler or a "
        "script around the run. If it was stopped because it hung, `py-spy dump --pid PID` of every process shows next "
        "time where."
    ),
    kind=Kind.KILLED,
    confidence=0.29,
    in_warnings=True,
    by_order=True,
    source="Python, torch elastic",
)

SYMPTOMS = (
    Symptom(
        "peer_died",
        (
            *ended_by(9, "SIGKILL"),
            r"the run's process (?P<pid>\S+) disappeared",
            r"A worker (?:process )?(?:died|ended|was killed).{0,60}(?:unexpected|signal|SIGKILL)"
            r"|The actor is dead because|\b(?:RayActorError|ActorDiedError|WorkerCrashedError|NodeDiedError)\b",
        ),
        N_(
            "A process[[ ({pid})]][[ of rank {rank}]] was killed from outside (SIGKILL): nearly always by the kernel "
            "or a container that ran out of host memory, otherwise by a scheduler or a person. It could not report "
            "this itself."
        ),
        _KILLED_FIX,
        kind=Kind.KILLED,
        confidence=0.8,
        in_warnings=True,
        source="torch elastic, DeepSpeed launcher, MPI, Slurm, containers, Ray, this package",
        restart_cures=True,
    ),
    Symptom(
        "peer_died",
        (
            r"Connection closed by (?:remote )?peer(?: \[?(?P<peer>[\w.:]+)\]?(?::\d+)?)?",
            r"Connection reset by (?:remote )?peer|\bncclRemoteError\b|\[Errno 104\]|ConnectionResetError",
            r"remote process exited or there was a network error|NCCL WARN .*remote process exit",
            r"Worker proc (?P<peer>[\w.-]+) died unexpectedly",
            r"socketProgress.*(?:closed|reset)|Broken pipe.*(?:rank|peer)|writev \[\S+\]: Broken pipe|readv \[\S+\]:",
            r"recv fail|[Ss]ocket (?:was )?[Cc]losed by (?:the )?(?:peer|remote)"
            r"|peer (?:process )?(?:has )?(?:exited|gone"
            r"|died)",
        ),
        N_(
            "The connection to another process broke[[ ({peer})]]: that process died or its machine or link went "
            "down.[[ Rank {rank} only noticed it.]]"
        ),
        _PEER_FIX,
        kind=Kind.PEER_LOST,
        confidence=0.75,
        source="gloo, NCCL, HCCL",
    ),
    Symptom(
        "peer_died",
        (
            r"sendBytes failed on SocketImpl|maybe TCPStore server has shut down too early",
            r"recvValue failed on SocketImpl|Failed to recv, got 0 bytes",
        ),
        N_(
            "The store shared by the processes is gone: the process that hosted it (rank 0 or the launcher) ended."
        ),
        _PEER_FIX,
        kind=Kind.CASCADE,
        confidence=0.5,
        in_warnings=True,
        source="torch TCPStore",
    ),
    Symptom(
        "preempted",
        (
            r"DUE TO (?P<reason>TIME LIMIT|PREEMPTION|JOB REQUEUE|DEADLINE)\b|[Jj]ob requeued",
            r"(?:State|state|status)[=:] ?(?P<reason>PREEMPTED|TIMEOUT|DEADLINE|BOOT_FAIL)\b",
            r"The node was low on resource: (?!memory|ephemeral)(?P<reason>\S+)|[Pp]od was evicted"
            r"|[Ss]pot instance interruption",
            r"[Rr]eason: (?P<reason>Evicted|Preempting|NodeLost|NodeShutdown|Terminated)\b|TERM_(?P<reason_>RUNLIMIT"
            r"|PREEMPT|OWNER)\b",
            r"\b(?P<reason>Preempted) (?: *pod/\S+ +)?(?:Preempted )?by\b|walltime \S+ exceeded limit|PBS: job killed"
            r"|[Ww]all ?(?:time|clock)\b.{0,20}exceeded|exceeded (?:hard )?wall ?(?:time|clock)",
            r"[Rr]eason: (?P<reason>DeadlineExceeded)\b|was active longer than specified deadline"
            r"|failed (?P<reason_>liveness probe)",
            r"node .{0,60}(?P<reason>NotReady|unreachable|shutdown|preempted)\b.*(?:pod|taint|evict|terminat)",
        ),
        _STOPPED,
        _AGAIN_FIX,
        kind=Kind.MACHINE,
        confidence=0.88,
        in_warnings=True,
        source="Slurm, LSF, Kubernetes",
        restart_cures=True,
    ),
    Symptom(
        "preempted",
        (
            r"DUE TO (?:TO )?(?P<reason>NODE[ _]FAIL(?:URE)?)|error: (?P<reason_>Node failure) on",
            r"(?:State|state|status)[=:] ?(?P<reason>NODE_FAIL)\b",
        ),
        _STOPPED,
        _AGAIN_FIX,
        kind=Kind.MACHINE,
        confidence=0.88,
        in_warnings=True,
        reported_late=True,
        source="Slurm",
        restart_cures=True,
    ),
    Symptom(
        "preempted",
        (
            r"slurmstepd: error: \*\*\* (?:JOB|STEP) \S+ ON .*CANCELLED AT (?!.*DUE TO)|srun: Force Terminated",
            r"(?:State|state|status)[=:] ?(?P<reason>CANCELLED)\b",
        ),
        _STOPPED,
        _AGAIN_FIX,
        kind=Kind.KILLED,
        confidence=0.8,
        in_warnings=True,
        by_order=True,
        source="Slurm",
        restart_cures=True,
    ),
    Symptom(
        "preempted",
        (r"Process \d+ got signal: 1\b|[Rr]eceived (?:signal )?(?:Signals\.)?SIGHUP\b",),
        N_(
            "The run was told to stop by a hang-up (SIGHUP): the terminal or SSH session that it was started in closed."
        ),
        N_(
            "Start it where it outlives the session: in tmux or screen, with `setsid`, `systemd-run --user` or as a "
            "job of the scheduler. `nohup` is not enough for torchrun, which handles the hang-up itself. The same "
            "command again resumes from the last checkpoint."
        ),
        kind=Kind.VAGUE,
        confidence=0.86,
        in_warnings=True,
        source="torch elastic",
        restart_cures=True,
    ),
    Symptom(
        "preempted",
        (
            r"Process \d+ got signal: (?P<signal>15|10|12)\b|[Rr]eceived (?:signal )?(?P<signal_>SIGTERM|SIGUSR1"
            r"|SIGUSR2|15)\b",
            r"got signal (?P<signal>SIGTERM|15)\b|caught (?P<signal_>SIGTERM)|srun: forcing job termination",
        ),
        N_(
            "The run was told to stop from outside[[ (signal {signal})]]: by the scheduler, a person, or the "
            "launcher of "
            "another node that failed."
        ),
        _AGAIN_FIX,
        kind=Kind.VAGUE,
        confidence=0.8,
        in_warnings=True,
        source="torch elastic, Slurm",
        restart_cures=True,
    ),
    Symptom(
        "preempted",
        (r"stopped by (?P<signal>SIG\w+|a signal) at step (?P<step>\d+)",),
        N_("The run was stopped by {signal} at step {step} and saved a checkpoint."),
        N_("Start the same command again: it resumes from step {step}."),
        kind=Kind.CASCADE,
        in_warnings=True,
        source="this package",
    ),
    Symptom(
        "preempted",
        ended_by(15, "SIGTERM"),
        N_(
            "A process[[ ({pid})]] was ended by SIGTERM: the launcher's, the scheduler's or a person's."
        ),
        _AGAIN_FIX,
        kind=Kind.CASCADE,
        confidence=0.5,
        source="torch elastic, DeepSpeed launcher, MPI, containers",
    ),
    Symptom(
        "native_crash",
        (
            r"Fatal Python error: (?P<signal>Segmentation fault|Bus error)",
            r"^Segmentation fault|Segmentation fault \(core dumped\)|segfault at [0-9a-f]+ ip",
            r"(?:free|malloc|realloc|munmap_chunk|malloc_consolidate)\(\): (?:invalid|corrupted|unaligned|mismatching"
            r"|double free|memory corruption|unsorted)|double free or corruption|corrupted (?:size vs\. prev_size"
            r"|double-linked list)|\*\*\* (?:stack smashing|buffer overflow) detected|pure virtual method called",
            r"is killed by signal: (?P<signal>Segmentation fault|Aborted)",
            r"Segfault encountered|unaligned tcache chunk|malloc\.c:\d+: |Fatal glibc error|SIGSEGV received at",
            r"^Floating point exception\b|traps: \S+ (?:general protection|trap)",
            *ended_by(11, "SIGSEGV"),
            r"[Cc]aught signal 11 \(|Signal: (?P<signal>Segmentation fault) \(\d+\)",
        ),
        N_(
            "A process[[ ({pid})]][[ of rank {rank}]] crashed inside native code[[ that was called from {library}]]: "
            "incompatible libraries, or a bug in one."
        ),
        N_(
            "[[Suspect {library} first: install another version of it, and try what it read or computed alone. ]]"
            "Run with `python -X faulthandler` (PYTHONFAULTHANDLER=1): it names the Python line. Then suspect packages "
            "that were built for another torch or CPU (flash-attn, bitsandbytes, apex, a copied "
            "~/.cache/torch_extensions): reinstall them or remove the cache."
        ),
        kind=Kind.VAGUE,
        confidence=0.6,
        source="Linux, Python, torch elastic",
        explains=("unknown",),
    ),
    Symptom(
        "native_crash",
        (
            r"(?:Fatal Python error|killed by signal): Illegal instruction|^Illegal instruction\b|trap invalid opcode",
            r"[Cc]aught signal 4 \(|Signal: Illegal instruction \(\d+\)",
            *ended_by(4, "SIGILL"),
        ),
        N_(
            "A process[[ ({pid})]][[ of rank {rank}]] met an instruction that this processor does not have (SIGILL): a "
            "compiled package was built for a newer one (AVX2, AVX-512) or for another architecture."
        ),
        N_(
            "`lscpu | grep -i -E 'model name|flags'` shows what the processor has. `python -X faulthandler` names the "
            "package: install a build of it for this processor (or build it here), remove kernels that were compiled "
            "elsewhere (~/.cache/torch_extensions), or use a newer machine."
        ),
        kind=Kind.VAGUE,
        confidence=0.7,
        source="Linux, Python, torch elastic",
        explains=("unknown",),
    ),
    Symptom(
        "unknown",
        (
            r"client_loop: send disconnect|error reading from error stream|^Connection to \S+ closed by remote host",
        ),
        N_(
            "The connection through which this log was shown broke off: what became of the run is not in it."
        ),
        N_(
            "Look at the run itself: its own log, `ps` or `squeue` on the node, `kubectl get pod` and `kubectl logs`. "
            "A run started in a session of ssh ends with it (SIGHUP): start it with nohup, tmux, or as a job."
        ),
        confidence=0.3,
        source="OpenSSH, kubectl",
        kind=Kind.CASCADE,
        passing=True,
    ),
)
