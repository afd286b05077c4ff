"""Peers of a run between machines in threads of one process: whole ``Member``s with folders, and no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from phalanx.core.codec import decode_message, encode
from phalanx.core.crypto import Identity
from phalanx.core.messages import Message
from phalanx.network.traffic import Traffic
from phalanx.node import run_init
from phalanx.training import member as member_module
from phalanx.training.founding import prepare
from phalanx.training.manifest import NetworkManifest, format_manifest
from phalanx.training.member import Member, Outcome, Settings
from phalanx.training.tasks import load_task

SMALL = f"{Path(__file__).with_name('small.py')}:task"
SETTINGS = {"threads": 1, "delta": 1.0, "gradient_time": 1.0, "transfer_time": 1.0}


class Lane:
    """In the place of ``Transport``: what is sent is there at once."""

    def __init__(
        self, town: dict[bytes, Lane], key_file: Path, run: bytes, put: Callable[..., bool], **_: object
    ) -> None:
        self._key, self._peers, self.put = Identity.load(key_file).key, town, put
        self.addresses, self.traffic = ("/ip4/127.0.0.1/tcp/1",), Traffic()

    def answer(self, what: str, answerer: object) -> None: ...

    def start(self) -> None:
        self._peers[self._key] = self

    def close(self) -> None:
        self._peers.pop(self._key, None)

    def send(self, to: Iterable[bytes], message: Message) -> None:
        data = encode(message)
        for other in [self._peers[key] for key in to if key in self._peers]:
            other.put(self._key, decode_message(data), len(data))

    def set_circle(
        self, members: frozenset[bytes], banned: frozenset[bytes], former: frozenset[bytes] = frozenset()
    ) -> None: ...

    def resume(self) -> None: ...


class Village:
    """Founders with keys, a manifest, and a folder each."""

    def __init__(self, folder: Path, count: int = 3, steps: int = 4, **settings: Any) -> None:
        self.folder = folder
        self.keys = [folder / f"{place}.key" for place in range(count)]
        for file in self.keys:
            Identity.generate().save(file)
        self.manifest_file = folder / "run.toml"
        founders = [Identity.load(file).peer_id for file in self.keys]
        self.manifest = run_init(self.manifest_file, SMALL, founders, SETTINGS | {"steps": steps} | settings)

    def get_folder(self, place: int) -> Path:
        return self.folder / f"peer{place}"

    def make_member(self, place: int, **settings: Any) -> Member:
        return make_member(self.manifest, self.keys[place], self.get_folder(place), **settings)

    def run(self, places: Sequence[int] | None = None, **settings: Any) -> list[Outcome | BaseException]:
        """Let the founders train to the end, each in its thread."""
        peers: dict[bytes, Lane] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(member_module, "Transport", lambda *words, **more: Lane(peers, *words, **more))
            patch.setattr(member_module, "_LINGER", 0.5)
            members = [self.make_member(place, **settings) for place in places or range(len(self.keys))]
            found: list[Outcome | BaseException] = [RuntimeError("it never ended")] * len(members)

            def live(place: int) -> None:
                try:
                    found[place] = members[place].run()
                except BaseException as error:
                    found[place] = error

            threads = [Thread(target=live, args=(place,)) for place in range(len(members))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found


def make_member(manifest: NetworkManifest, key: Path, folder: Path, **settings: Any) -> Member:
    prepared = prepare(manifest, load_task(SMALL), lambda text: None)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.toml").write_text(format_manifest(manifest))
    chosen = Settings(out=folder, **({"checkpoint_every": 2} | settings))
    return Member(manifest, prepared.config, key, prepared.solo, chosen, prepared.gradients)
