"""Volumes of a pod as folders. Those with data are swapped whole, by one symbolic link, when the data change.

Not as on a real node: memory-backed volumes are plain folders, a claim is a folder that all nodes share, and
tokens are not renewed (they outlive the tests by far).
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.cluster.client import Client

from .errors import WaitingError
from .facts import Facts
from .follow import Json
from .images import Images

DEFAULT_MODE: Final = 0o644
MOUNT_ERROR: Final = "ContainerCreating"


@dataclass(frozen=True)
class File:
    """One file of a volume."""

    data: bytes
    mode: int = DEFAULT_MODE


Payload = Mapping[str, File]
"""By path within the volume."""


class Volumes:
    """All of one pod."""

    def __init__(self, folder: Path, claims: Path, facts: Facts, client: Client, images: Images) -> None:
        """``folder`` is this pod's own; ``claims`` has a folder for each claim."""
        self._folder = folder
        self._claims = claims
        self._facts = facts
        self._client = client
        self._images = images
        self._written: dict[str, Payload] = {}
        self._tokens: dict[str, bytes] = {}
        self.sources: dict[str, Path] = {}
        """Folder of each volume by its name."""

    async def prepare(self) -> None:
        """All of them, there. Raises WaitingError for the first that cannot be had yet."""
        for volume in self._facts.pod["spec"].get("volumes", []):
            self.sources[volume["name"]] = await self._prepared(volume)

    async def refresh(self) -> None:
        """Write volumes with data again if the data have changed."""
        for volume in self._facts.pod["spec"].get("volumes", []):
            if volume["name"] in self._written:
                await self._prepared(volume)

    async def _prepared(self, volume: Json) -> Path:
        home = self._folder / str(volume["name"])
        if "image" in volume:
            return self._images.content(volume["image"]["reference"])
        if "persistentVolumeClaim" in volume:
            claim = str(volume["persistentVolumeClaim"]["claimName"])
            home = self._claims / self._facts.namespace / claim
        home.mkdir(parents=True, exist_ok=True)
        if "emptyDir" in volume or "persistentVolumeClaim" in volume:
            home.chmod(0o2777)
            os.chown(home, -1, self._group)
            return home
        payload = await self._payload(volume)
        if payload != self._written.get(volume["name"]):
            swap(home, payload, group=self._group)
            self._written[volume["name"]] = payload
        return home

    @property
    def _group(self) -> int:
        return int(self._facts.pod["spec"].get("securityContext", {}).get("fsGroup", 0))

    async def _payload(self, volume: Json) -> Payload:
        """Return the current files of a volume."""
        try:
            if "projected" in volume:
                return await self._projected(volume["projected"])
            return await self._source({key: value for key, value in volume.items() if key != "name"}, None)
        except WaitingError as error:
            about = f'MountVolume.SetUp failed for volume "{volume["name"]}": {error.message}'
            raise WaitingError(MOUNT_ERROR, about) from None

    async def _projected(self, projected: Json) -> Payload:
        found: dict[str, File] = {}
        for source in projected["sources"]:
            found |= await self._source(source, projected.get("defaultMode"))
        return found

    async def _source(self, source: Json, mode: int | None) -> Payload:
        if "configMap" in source:
            return self._keys("configmaps", source["configMap"], source["configMap"].get("name"), mode)
        if "secret" in source:
            secret = source["secret"]
            return self._keys("secrets", secret, secret.get("secretName") or secret.get("name"), mode)
        if "downwardAPI" in source:
            return self._downward(source["downwardAPI"])
        if "serviceAccountToken" in source:
            asked = source["serviceAccountToken"]
            return {asked["path"]: File(await self._token(asked))}
        raise WaitingError(MOUNT_ERROR, f"unsupported volume source: {', '.join(source)}")

    def _keys(self, kind: str, source: Json, name: str | None, mode: int | None) -> Payload:
        optional = source.get("optional", False)
        data = self._facts.data(kind, str(name), optional=optional)
        usual = mode or source.get("defaultMode", DEFAULT_MODE)
        if not source.get("items"):
            return {key: File(value, usual) for key, value in data.items()}
        missing = {item["key"] for item in source["items"]} - data.keys()
        if missing and not optional:
            raise WaitingError(MOUNT_ERROR, f"{kind[:-1]} {name} has no key {', '.join(sorted(missing))}")
        items = [item for item in source["items"] if item["key"] in data]
        return {item["path"]: File(data[item["key"]], item.get("mode", usual)) for item in items}

    def _downward(self, source: Json) -> Payload:
        found = {}
        for item in source.get("items", []):
            found[item["path"]] = File(self._facts.field(item["fieldRef"]["fieldPath"]).encode())
        return found

    async def _token(self, asked: Json) -> bytes:
        """A token of the pod's account, bound to the pod; asked for once."""
        if asked["path"] not in self._tokens:
            self._tokens[asked["path"]] = await self._new_token(asked)
        return self._tokens[asked["path"]]

    async def _new_token(self, asked: Json) -> bytes:
        meta = self._facts.pod["metadata"]
        reference = {"kind": "Pod", "apiVersion": "v1", "name": meta["name"], "uid": meta["uid"]}
        spec = {
            "audiences": [asked["audience"]] if asked.get("audience") else [],
            "expirationSeconds": asked.get("expirationSeconds", 3607),
            "boundObjectRef": reference,
        }
        account = self._facts.field("spec.serviceAccountName")
        path = f"/api/v1/namespaces/{meta['namespace']}/serviceaccounts/{account}/token"
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        answer = await self._client.ask("POST", path, body, expect=(201, 403, 404, 409))
        if "status" not in answer or "token" not in answer["status"]:
            raise WaitingError(MOUNT_ERROR, f"no token for {account}: {answer.get('message')}")
        return str(answer["status"]["token"]).encode()


def swap(home: Path, payload: Payload, *, group: int = 0) -> None:
    """Replace all files at once, as the kubelet does: ``..data`` points to a folder of one generation, and
    every name to what is in ``..data``. Who watches the folder sees one rename."""
    link = home / "..data"
    old = link.readlink() if link.is_symlink() else None
    number = int(str(old).rpartition("_")[2]) + 1 if old else 0
    new = home / f"..generation_{number}"
    for name, file in payload.items():
        _write(new / name, file, group)
    new.mkdir(exist_ok=True)
    _point(link, Path(new.name))
    _name(home, {name.partition("/")[0] for name in payload})
    if old:
        shutil.rmtree(home / old)


def _write(path: Path, file: File, group: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.data)
    path.chmod(file.mode | (0o440 if group else 0))
    os.chown(path, -1, group)


def _point(link: Path, target: Path) -> None:
    beside = link.with_name("..data_tmp")
    beside.symlink_to(target)
    beside.rename(link)


def _name(home: Path, names: set[str]) -> None:
    for entry in home.iterdir():
        if entry.is_symlink() and not entry.name.startswith("..") and entry.name not in names:
            entry.unlink()
    for name in names:
        if not (home / name).is_symlink():
            (home / name).symlink_to(Path("..data") / name)
