"""Experts on disk: one safetensors file each, replaced as a whole or not at all."""

import os
from pathlib import Path

from fmoe_ext.remote.discovery import check_uid
from fmoe_ext.remote.wire import WHOLE, Message, WireError, decode, encode

SUFFIX = ".safetensors"


class Checkpoints:
    """The folder of a server's checkpoints."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        for left_over in self.folder.glob(f"*{SUFFIX}.tmp-*"):  # of a process that was killed while it wrote
            left_over.unlink(missing_ok=True)

    def save(self, state: Message) -> None:
        """Writes, syncs, then takes the place of the file before: a crash leaves the old one or the new one."""
        path = self.path(state.meta["uid"])
        temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
        with open(temporary, "wb") as file:
            file.write(encode(state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def load(self, uid: str) -> Message | None:
        """The state that was saved last, None without one; WireError, with the file's name, if it cannot be read."""
        path = self.path(uid)
        if not path.exists():
            return None
        try:
            return decode(path.read_bytes(), WHOLE)
        except WireError as error:
            raise WireError(
                f"the checkpoint {path} is broken ({error}): restore it, or move it away"
            ) from None

    def uids(self) -> list[str]:
        return sorted(path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))

    def path(self, uid: str) -> Path:
        return self.folder / f"{check_uid(uid)}{SUFFIX}"
