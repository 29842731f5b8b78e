"""What starts a run: shell scripts, containers, ssh, pip and compilers."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

SYMPTOMS = (
    Symptom(
        "program_error",
        (
            r"^(?!python)\S+: (?:line )?\d+: (?P<reason>.*(?:unbound variable|[Ss]yntax error.*|unexpected end of file"
            r"|unexpected EOF.*|conditional .*expected))$",
            r"^\S+: (?:line )?\d+: (?P<reason>--?\w[\w-]*: (?:command )?not found)",
            r"(?P<reason>\S+: bad interpreter: .*)|(?P<reason_>cannot execute(?: binary file)?: .*"
            r"|.*[Ee]xec format error.*)",
        ),
        N_(
            "The shell script that starts the run has an error, or is for another system[[: {reason}]]."
        ),
        N_(
            "Look at that line of the script: a variable that is not set, a quote or `fi` that is missing, or a line "
            "before it that does not end in a backslash alone (then an option is taken for a command). ^M: `sed -i "
            "'s/\\r$//' FILE`. Exec format error: an image or a program for another processor (arm64, x86_64)."
        ),
        confidence=0.93,
        source="bash",
        passing=True,
    ),
    Symptom(
        "scheduler_refused",
        (
            r"docker: Error response from daemon: (?!No such container|Conflict\. The container name)(?P<reason>.*)"
            r"|(?P<reason_>OCI runtime (?:create|exec) failed.*)",
            r"\b(?P<reason>CreateContainer(?:Config)?Error|InvalidImageName|RunContainerError|ImageInspectError)\b",
            r"[Ff]ailed to pull image (?P<reason>.*)|error: pyxis: (?P<reason_>.*)"
            r"|FATAL: +(?P<reason__>.*(?:\.sif|image)\b.*)",
        ),
        N_("The container of the run was not started[[: {reason}]]."),
        N_(
            "Start it by hand with the same image and options on the same node: name and access of the image, the "
            "command in it, mounts that exist on the host, secrets and config maps that the pod refers to, and the "
            "runtime for the devices (nvidia-container-toolkit, ascend-docker-runtime)."
        ),
        confidence=0.87,
        source="Docker, Kubernetes, Slurm",
        passing=True,
    ),
    Symptom(
        "cuda_driver_mismatch",
        (
            r"could not select device driver .*gpu|nvidia-container-cli: .*(?:initialization|driver|nvml|libcuda)",
            r"[Uu]nknown or invalid runtime name: nvidia|unresolvable CDI devices nvidia",
        ),
        N_(
            "The container was not given the GPUs: the NVIDIA container toolkit is not installed on this machine, is "
            "not configured for docker, or (nvidia-container-cli) does not find the driver."
        ),
        N_(
            "`nvidia-smi` must work on the machine itself; else install its driver first. Then install "
            "nvidia-container-toolkit, `sudo nvidia-ctk runtime configure --runtime=docker`, `sudo systemctl restart "
            "docker`, and try `docker run --rm --gpus all ubuntu nvidia-smi`."
        ),
        confidence=0.93,
        source="Docker, NVIDIA container toolkit",
    ),
    Symptom(
        "rendezvous_timeout",
        (
            r"ssh: connect to host (?P<node>\S+) port \d+: (?!Connection refused)(?P<reason>.*)",
            r"ssh: (?P<reason>Could not resolve hostname .*)",
        ),
        N_(
            "A node cannot be reached by ssh[[ ({node})]][[: {reason}]]. Its processes were not started."
        ),
        N_(
            "`ssh NODE true` from the node that starts the run: correct the name or address in the host file, and see "
            "whether the node is up and its port of ssh open. torchrun and `python -m finetune launch`, started on "
            "every node, need no ssh."
        ),
        kind=Kind.PEER_LOST,
        confidence=0.88,
        source="OpenSSH, pdsh",
        explains=("rendezvous_timeout",),
        passing=True,
        restart_cures=True,
    ),
    Symptom(
        "missing_package",
        (
            r"^ *(?:ERROR|error): (?:Could not find a version that satisfies the requirement"
            r"|No matching distribution found for) "
            r"(?P<package>[\w.-]+)",
            r"^ *(?:ERROR|error): (?:Failed (?:building wheel for|to build) |Could not build wheels for "
            r"|Cannot install )"
            r"(?P<package>[\w.-]+)|^ *(?:ERROR|error): ResolutionImpossible",
            r"env: .{0,3}(?P<package>python\d?|torchrun|bash)\W{0,3}: No such file or directory",
        ),
        N_("Installing failed, or a program is not there[[: {package}]]."),
        N_(
            "Install what is missing before the run, where there is a network, in versions for this Python, CUDA and "
            "processor (a prebuilt wheel, or with the compiler and CUDA toolkit that it needs), and use that "
            "environment or image on every node."
        ),
        kind=Kind.VAGUE,
        confidence=0.6,
        source="pip, env",
        passing=True,
    ),
    Symptom(
        "invalid_settings",
        (
            r"^(?:[\w/.-]+\.py|jsonargparse|axolotl|accelerate|torchrun|deepspeed|llamafactory-cli|swift|vllm"
            r"|trl|ray): error: "
            r"(?P<reason>.*)",
        ),
        N_("The program refused its command line[[: {reason}]]."),
        N_(
            "`--help` of the program lists the names and values of this version. Nothing was trained yet."
        ),
        kind=Kind.VAGUE,
        confidence=0.7,
        source="argparse",
    ),
    Symptom(
        "scheduler_refused",
        (r"^(?:sbatch|salloc): error: (?P<reason>.*)",),
        N_("The scheduler did not take the job[[: {reason}]]."),
        N_(
            "Correct what it names in the job file: memory, time, GPUs, account and partition within what `sinfo` and "
            "`sacctmgr show assoc user=$USER` list; a limit of running jobs passes by itself."
        ),
        kind=Kind.VAGUE,
        confidence=0.7,
        source="Slurm",
        passing=True,
    ),
    Symptom(
        "compile_failed",
        (
            r"cannot find (?P<reason>-l(?:cuda|cudart|python[\d.]*))\b",
            r"collect2: error|nvcc fatal|ninja: build stopped|error: command '\S*(?:gcc|g\+\+|nvcc|cc|ninja"
            r"|x86_64\S*)' failed",
            r"Command '\['\S*(?:gcc|g\+\+|cc|nvcc|ninja|clang)'.* returned non-zero|[Uu]nsupported GNU version",
        ),
        N_("Compiling failed here[[: {reason} is missing]]."),
        N_(
            "Look at the first error of the compiler. Install Python's headers (python3-dev) and the CUDA toolkit of "
            "the version that torch was built with, set CUDA_HOME, put libcuda's folder into LIBRARY_PATH, and use a "
            "compiler that this CUDA takes; without torch.compile TORCHDYNAMO_DISABLE=1."
        ),
        kind=Kind.VAGUE,
        confidence=0.79,
        source="gcc, nvcc, ninja",
    ),
)
