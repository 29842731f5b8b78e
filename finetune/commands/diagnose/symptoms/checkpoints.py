"""Files of weights and checkpoints: there, whole, and of this model."""

from __future__ import annotations

from finetune.commands.diagnose.symptoms.base import Symptom
from finetune.runtime.language import N_

SYMPTOMS = (
    Symptom(
        "checkpoint_corrupt",
        (
            r"Error while deserializing header",
            r"SafetensorError: (?P<reason>.*)",
            r"[Ii]ncompleteMetadata|MetadataIncompleteBuffer|InvalidHeader|HeaderTooLarge|HeaderTooSmall|file not "
            r"fully covered|git-lfs\.github\.com/spec",
            r"unexpected EOF, expected|file might be corrupted|truncated file: eof|CheckpointReadError"
            r"|Corrupt\w* checkpoint",
            r"Unable to load weights from (?:pytorch )?checkpoint file|[Cc]hecksum (?:mismatch|does not match)"
            r"|(?<!\d: )unexpected end of (?:data|file)|BadZipFile",
            r"PytorchStreamReader failed (?P<reason>.*)",
            r"UnpicklingError: (?P<reason>.*)|EOFError: Ran out of input",
            r"^\[ERROR\] .*the checkpoint is not valid: (?P<reason>.*)",
            r"was written but does not verify: (?P<reason>.*)",
            r"the index of the model's weights is broken",
            r"^\[ERROR\] (?:rank \d+: )?the saved adapter cannot be read",
            r"^\[ERROR\] (?:rank \d+: )?the model's weights cannot be read: (?P<reason>.*)",
        ),
        N_(
            "A weights or checkpoint file is truncated or corrupt[[: {reason}]]. Usual reasons: killed while saving or "
            "copying, a full disk, an unfinished download (a Git LFS pointer of 130 bytes)."
        ),
        N_(
            "`python -m finetune checkpoints RUN` shows which checkpoints are valid; `--resume auto` takes the newest "
            "valid one. A model's file: compare its size with the hub's and download it again. Make sure that the disk "
            "has room."
        ),
        source="safetensors, torch.load, this package",
    ),
    Symptom(
        "checkpoint_corrupt",
        (
            r"Can't find a valid checkpoint at (?P<path>\S+)",
            r"(?:Error|Exception): .*[Nn]o (?:valid )?checkpoints? (?:was |were )?found"
            r"(?: (?:in|at) (?:output directory )?\(?(?P<path>[^\s)]+))?",
            r"(?:Error|Exception): .*checkpoint.{0,40}(?:does not exist|(?:was )?not found)",
        ),
        N_(
            "There is no checkpoint to resume from[[ at {path}]]: the folder is empty or another one, or what it holds "
            "is not whole."
        ),
        N_(
            "`ls[[ {path}]]` on every node: give the folder of one checkpoint (.../checkpoint-N, with DeepSpeed also "
            "its `latest` file), or leave resuming out to start anew. `python -m finetune checkpoints RUN` shows which "
            "are valid; `--resume auto` takes the newest valid one."
        ),
        confidence=0.91,
        source="transformers, DeepSpeed",
    ),
    Symptom(
        "checkpoint_corrupt",
        (
            r"No such file or directory: '(?P<path>[^']*(?:\.distcp|/\.metadata|_optim_states\.pt"
            r"|_model_states\.pt|/model_optim_rng\.pt|rng_state\w*\.pth|optimizer\.pt|scheduler\.pt"
            r"|trainer_state\.json))'",
        ),
        N_(
            "A file of the checkpoint is missing[[: {path}]]: saving or copying it was cut off, or it was written by "
            "another number of processes."
        ),
        N_(
            "Resume from an earlier checkpoint that has all its files (`ls` in both; `python -m finetune checkpoints "
            "RUN` shows which are valid). Leave a checkpoint alone until it is written, and copy whole folders."
        ),
        confidence=0.91,
        source="torch.distributed.checkpoint, DeepSpeed, Megatron-LM, transformers",
    ),
)
