"""Curves for TensorBoard: one record a line of the log, appended with one write.

torch's SummaryWriter, which Trainer's callback uses, makes a record a number, and tensorboard's
writer opens and closes the file for each: 20 times a line, which a network file system answers 20
times.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from itertools import count
from pathlib import Path
from typing import Any

from finetune.storage.append_file import AppendFile

_numbers = count()  # of the files of this process: two of one second have the same time


class CurveFile:
    """A new file of events in a folder, which is made where it is not there.

    Raises:
        ImportError: tensorboard is not installed.
        OSError: the file cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event = Event
        self._summary = Summary
        folder.mkdir(parents=True, exist_ok=True)
        # The form of the name is what tensorboard looks for, and it reads files in the order of
        # their names.
        name = (
            f"events.out.tfevents.{int(time.time()):010d}"
            f".{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        )
        self._file = AppendFile(folder / name)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, step: int, values: dict[str, Any]) -> None:
        """The numbers among the values, named as Trainer's callback does: `eval_x` is `eval/x`,
        others `train/...`.
        """
        numbers = [
            self._summary.Value(tag=_tag(name), simple_value=value)
            for name, value in values.items()
            if isinstance(value, (int, float))
        ]
        self._write(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=numbers))
        )

    def _write(self, event: Any) -> None:
        from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        # TFRecord: length, its checksum, data, its checksum
        # (tensorboard/summary/writer/record_writer.py).
        checks = [struct.pack("<I", masked_crc32c(part)) for part in (length, data)]
        self._file.append_bytes(length + checks[0] + data + checks[1])

    def close(self) -> None:
        """Close the file; twice does no harm."""
        self._file.close()


def _tag(name: str) -> str:
    return f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
