"""Packages of Python and libraries of the system: there, and of versions that belong together."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Kind, Symptom
from finetune.runtime.language import N_

SYMPTOMS = (
    Symptom(
        "missing_package",
        (r"No module named 'mpi4py'",),
        N_(
            "DeepSpeed was started without a launcher, took it that MPI had started it, and found no mpi4py to ask."
        ),
        N_(
            "Start the program with a launcher, for one device too: torchrun, accelerate launch or deepspeed set RANK, "
            "WORLD_SIZE, LOCAL_RANK and MASTER_ADDR. Where mpirun is meant to start it: `pip install mpi4py`."
        ),
        confidence=0.88,
        source="DeepSpeed",
    ),
    Symptom(
        "missing_package",
        (
            r"ModuleNotFoundError: No module named '(?P<package>\w+)[\w.]*'",
            r"^\[ERROR\] (?:rank \d+: )?(?P<package>[\w.-]+) is not installed",
            r"requires (?P<package>sentencepiece|tiktoken|protobuf)\b|Couldn't instantiate the backend tokenizer",
            r"ImportError: (?P<package>[\w-]+) is required|ImportError: .*requires the (?P<package_>[\w-]+) library",
            r"[Pp]lease install (?:the )?[`'\"]?(?P<package>(?!(?:it|an?|them|this|all|recent|backend)\b)[\w-]+)"
            r"|need to have (?P<package_>[\w-]+)(?: or \w+)? installed",
            r"python\S*: can't open file '(?P<file>[^']+)'|^\S+: No module named (?P<package__>\S+)$",
            r"(?<![\w-])(?P<package>(?!n\w+-smi)\w[\w-]*): command not found"
            r"|requires? (?:the )?[`'\"]?(?P<package_>[\w-]+)[`'\"]? (?:package"
            r"|library)? ?(?:to be|but it was not|which is not) ?(?:installed|found)",
            r"(?:[Ee]rror|[Pp]lease|requir|not (?:found|installed)|need|missing|Run)\b.{0,200}(?:pip"
            r"|conda) install (?:-\S+ )*[`'\"]?(?P<package>\w[\w\[\]-]*).{0,40}$"
            r"|PackageNotFoundError: (?:No package metadata was found for )?(?P<package_>\S+)",
        ),
        N_(
            "Python cannot find[[ the package {package}]][[ the file {file}]] in the active environment."
        ),
        N_(
            "Make sure that the right environment is active on every node (`which python`), then `pip install[[ "
            "{package}]]`."
        ),
        confidence=0.8,
        source="Python",
        # CANN compiles operators with Python packages
        explains=("npu_driver_cann_mismatch", "npu_op_exception"),
    ),
    Symptom(
        "missing_package",
        (r"(?:Error|Exception): .*requires? the latest version of [`'\"]?(?P<package>\w[\w-]*)",),
        N_("A package[[ ({package})]] is not installed here, or is older than what uses it needs."),
        N_(
            "`pip install -U[[ {package}]]` in the environment of the run, on every node; `pip check` afterwards."
        ),
        confidence=0.82,
        source="transformers",
    ),
    Symptom(
        "package_mismatch",
        (
            r"model type [`'\"]?(?P<model>[\w.-]+)[`'\"]? but Transformers does not recognize",
            r"Model architectures \['?(?P<model>\w+).* (?:are not supported|failed to be inspected)",
            r"does not recognize this architecture|Transformers does not recognize|Unrecognized configuration class",
            r"KeyError: '(?P<model>(?:qwen|llama|mistral|mixtral|gemma|phi|deepseek|internlm|chatglm|glm"
            r"|baichuan|cohere|olmo"
            r"|granite|minicpm|exaone|falcon|gpt_oss)\w*)'$",
        ),
        N_(
            "The installed transformers does not know this model's architecture[[ ({model})]]: it is too old for it."
        ),
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
        N_(
            "pip install 'numpy<2', or a newer version of the package whose file the traceback names last."
        ),
        confidence=0.9,
        source="NumPy 2.0 migration guide",
        explains=("npu_driver_cann_mismatch", "npu_op_exception"),
    ),
    Symptom(
        "package_mismatch",
        (
            r"version [`'](?P<library>(?:GLIBCXX|CXXABI|GCC)_[\d.]+)' not found",
            r"(?P<library>[\w.+-]+\.so\S*): undefined symbol|symbol lookup error|undefined symbol: \w+",
            r"(?P<library>lib\S+\.so\S*): cannot open shared object file",
            r"cannot import name '(?P<name>\w+)' from '(?P<library>[\w.]+)'"
            r"|AttributeError: module '(?P<library_>[\w.]+)' has no attribute",
            r"(?P<library>[\w.-]+)(?:>=|==|<=|<|>|!=|~=)[\w.*,<>=!~ ]+ is required for a normal functioning"
            r"|VersionConflict",
            r"ImportError: (?P<library>[\w.-]+) ?[><=!~]=? ?[\d.]+\S* is required",
            r"(?P<library>\w+)(?: version)? [\d.]+\S* (?:is required|or newer|or later|or higher).{0,60}(?:but|found"
            r"|installed|got)",
            r"AttributeError: '(?P<name>\w*(?:Config|Cache|AdamW|Accelerator|AcceleratorState|Trainer|TrainingArguments"
            r"|TokenizerFast|Tokenizer))' object has no attribute",
            r"[Nn]um[Pp]y is not available|did not match any variant of untagged enum"
            r"|is required,? but found|is incompatible with (?P<library>[\w-]+)[<>=]",
            r"Tokenizer class \w+ does not exist or is not currently imported",
            r"requires? [`'\"]?(?P<library>[\w-]+)(?:\[\w+\])? ?(?:[><~!]=?|==) ?(?:\d+\.\d|(?<=<)\d)|[Uu]pgrad(?:e"
            r"|ing) (?:your )?[`'\"]?(?P<library_>\w[\w-]+)[`'\"]? (?:version|package|to\b|>=)",
            r"[Ff]ound an incompatible version of (?P<library>\w+)|requires (?:a different"
            r"|newer) (?:version of )?(?P<library_>\w+)",
            r"got an unexpected keyword argument '(?P<name>\w+)'"
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
    Symptom(
        "package_mismatch",
        (r"ModuleNotFoundError: No module named '(?P<library>\w+)\.(?P<name>[\w.]+)'",),
        N_(
            "A package[[, {library},]] is there, but lacks a module[[ ({name})]]: it is of another version than "
            "the program was "
            "written for."
        ),
        N_(
            "`pip show`[[ {library}]] and the program's own requirements tell the two versions: install the one "
            "that has "
            "it (a newer one for new models), on every node. A file or folder of your own of the same name "
            "hides it too."
        ),
        kind=Kind.VAGUE,
        confidence=0.81,
        source="Python",
    ),
    Symptom(
        "package_mismatch",
        (
            r"Descriptors can(?:not|\'t) (?:not )?be created directly|google\.protobuf.{0,60}(?:cannot import"
            r"|has no attribute)",
        ),
        N_("protobuf is newer than the generated code of a package here takes."),
        N_(
            "`pip install 'protobuf<=3.20.3'`, or a newer version of the package that the traceback names "
            "(sentencepiece, onnx, tensorboard); PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python works too, slowly."
        ),
        confidence=0.88,
        source="protobuf",
    ),
    Symptom(
        "package_mismatch",
        (
            r"(?P<library>lib(?!cud|cublas|cufft|curand|cusparse|cusolver|nv|hccl|ascend|torch"
            r"|c10)[\w.+-]+\.so[\d.]*): cannot open shared object file",
        ),
        N_("A library of the system is not installed here[[: {library}]]."),
        N_(
            "Install the system's package that holds it on every node or in the image (`apt-file search[[ "
            "{library}]]`, `dnf provides`; libxml2 is in libxml2, libGL.so.1 in libgl1, libgomp.so.1 in libgomp1); if "
            "it is there, LD_LIBRARY_PATH has to name its folder."
        ),
        confidence=0.78,
        source="dynamic linker",
        kind=Kind.VAGUE,
    ),
    Symptom(
        "missing_package",
        (
            r"(?P<file>/\S*/(?:python[\d.]*|torchrun|accelerate|deepspeed)): (?:No such file or directory"
            r"|not found|command not found)",
        ),
        N_("The environment of Python is not there on this machine[[: {file}]]."),
        N_(
            "Install the same environment under the same path on every node (or put it on a shared file system or into "
            "the image); `ls -l[[ {file}]]` on each node shows which lacks it."
        ),
        confidence=0.92,
        source="bash",
        explains=("rendezvous_timeout",),
    ),
    Symptom(
        "package_mismatch",
        (r"version [`'](?P<library>GLIBC_[\d.]+)' not found",),
        N_("The system's C library is older than a compiled package here needs[[: {library}]]."),
        N_(
            "Use a newer base image or system (`ldd --version` shows its C library), build the package here (`pip "
            "install --no-binary :all: NAME`), or take a wheel that was built for older systems (manylinux2014)."
        ),
        confidence=0.78,
        source="dynamic linker",
        kind=Kind.VAGUE,
    ),
    Symptom(
        "program_error",
        (
            r"TypeError: (?P<function>\w*(?:reward|collat|callback|preprocess|compute_)\w*)\(\) got an unexpected "
            r"keyword argument '(?P<name>\w+)'",
        ),
        N_(
            "A function that the trainer calls[[, {function},]] does not take the argument[[ {name}]] that it gets."
        ),
        N_(
            "Give it that argument, or **kwargs for all that it does not use: reward functions get the prompts, the "
            "completions and every column of the data by name, and newer versions of the trainer give more."
        ),
        confidence=0.85,
        source="Python, trl",
    ),
    Symptom(
        "package_mismatch",
        (
            r"TypeError: (?P<function>[\w.]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'",
        ),
        N_(
            "A function[[, {function},]] does not take the argument[[ {name}]] in the version that is installed here: "
            "the program was written for another one."
        ),
        N_(
            "Look the argument up in the release notes of its package and rename it (tokenizer is processing_class "
            "now, evaluation_strategy eval_strategy, use_flash_attention_2 attn_implementation, torch_dtype dtype), or "
            "install the version that the program names."
        ),
        confidence=0.79,
        source="Python, transformers, trl",
        kind=Kind.VAGUE,
    ),
)
