"""Exclusive use of a job's devices, against other jobs, people who sign the owner file, and other compute processes."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from dgxlab.agent.environment import base_env, settings
from dgxlab.agent.facts import user
from dgxlab.agent.gpus import ComputeProcess, compute_processes, foreign, phrase
from dgxlab.agent.lock import BenchLock, OwnerFile, Signature
from dgxlab.errors import HostBusy, RemoteError, longer
from dgxlab.model import GateStep, Plan, digest, gpu_backends
from dgxlab.model.events import LockEvent
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.units import busy, held

CPU = "cpu"
_Gpu = Mapping[str, Any]

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 2.0
"""First and longest pause between looks while waiting; they grow, because every look disturbs measurements."""


def devices(plan: Plan, gpus: Sequence[_Gpu]) -> tuple[str, ...]:
    """Return the devices that a plan must lock: (CPU,), or uuids of GPUs, sorted, so that two jobs cannot deadlock.

    These are all GPUs of the host, `gpus`, unless every gate and run has an unambiguous CUDA_VISIBLE_DEVICES, which
    only CUDA reads; () if CUDA is built and no GPU has a uuid. Other backends may use a GPU that nvidia-smi does not
    list: without one that it lists, they lock the processor.
    """
    built = {name for arm in plan.arms for name in gpu_backends(arm.cmake)}
    every = [gpu for gpu in gpus if gpu["uuid"]]
    if not built or ("CUDA" not in built and not every):
        return (CPU,)
    envs = [command.env for step in plan.steps if isinstance(step, GateStep) for command in step.commands]
    envs += [run.env for run in plan.runs]
    seen = [_visible({**base_env(), **env}, every) for env in envs if built == {"CUDA"}]
    return tuple(sorted({gpu["uuid"] for gpus in seen for gpu in gpus} or {gpu["uuid"] for gpu in every}))


def _visible(env: Mapping[str, str], gpus: Sequence[_Gpu]) -> Sequence[_Gpu]:
    """Return the GPUs that a program sees in this environment; all GPUs if ambiguous.

    A uuid prefix is unambiguous; an index is only where CUDA counts as nvidia-smi does.
    """
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    by_bus = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu["name"] for gpu in gpus}) == 1
    visible: list[_Gpu] = []
    for word in map(str.strip, named.split(",")):
        if word.startswith("GPU-"):
            matching = [gpu for gpu in gpus if gpu["uuid"].startswith(word)]
        else:
            matching = [gpu for gpu in gpus if by_bus and gpu["index"] == word]
        if len(matching) != 1:
            return gpus
        visible += matching
    return visible


class Holder(NamedTuple):
    """Who holds the file, folder or GPU `what` that a job waits for; `who` is in words, `key` is for comparison."""

    what: str
    key: object
    who: str


class DeviceLease:
    """The devices of one job, locked between `hold` and `release`; a build shares the locks with other builds.

    `gpus` are those of the host's facts. `own` has the pids that the job started; the caller adds to them. `tell` is
    called with each change.
    """

    def __init__(
        self, plan: Plan, gpus: Sequence[_Gpu], own: Collection[int], tell: Callable[[LockEvent], None]
    ) -> None:
        self.devices = devices(plan, gpus)
        self._plan, self._own, self._tell = plan, own, tell
        self._owner = Signature(plan.job_id, user())
        # builds of entries with other processors are taken to disturb nothing here
        processors = settings().processors
        names = [f"{device}-{digest(processors, 8)}" if processors else device for device in self.devices]
        self._locks = [BenchLock(name) for name in dict.fromkeys((*self.devices, *names))]
        self._builds = [BenchLock(name, kind=fcntl.LOCK_SH) for name in names]
        self._on_gpus = self.devices != (CPU,)
        path = settings().lock
        self._file = OwnerFile(path, self._owner) if path else None
        self._unwatched_noted = False
        self._left_s = plan.wait_s

    @property
    def fds(self) -> list[int]:
        """Descriptors of the locks that are held, which measured programs inherit."""
        return [fd for lock in (*self._locks, *self._builds) for fd in lock.fds]

    def hold(self) -> float:
        """Wait for exclusive use of the devices, and return the seconds waited; safe to repeat.

        Raises:
            HostBusy: if all waits of the job together take longer than plan.wait_s.
            RemoteError: if the plan needs a GPU and the host has none that can be locked.
        """
        if not self._locks:
            message = "nvidia-smi lists no GPU on this host, and the plan needs one"
            raise RemoteError(message, next=f"dgxlab doctor {settings().name}")
        if self._file and not self._file.watched and not self._unwatched_noted:
            self._tell(LockEvent(state="unwatched", path=str(self._file.path), owner="its folder is not there"))
            self._unwatched_noted = True
        before = [lock.since for lock in self._locks]
        waited = self.wait(self._holder)
        if [lock.since for lock in self._locks] != before:
            for lock in self._locks:
                self._tell(LockEvent(state="held", path=str(lock.path), owner=self._plan.job_id))
        return waited

    @contextmanager
    def building(self) -> Iterator[float]:
        """Wait until no job measures that a build would disturb, and let none begin; yield the seconds waited.

        Raises HostBusy as `hold` does.
        """
        try:
            yield self.wait(lambda: self._held_by_another(self._builds))
        finally:
            for lock in self._builds:
                lock.release()

    def wait(self, find_holder: Callable[[], Holder | None], state: str = "waiting") -> float:
        """Wait until `find_holder` finds none, and return the seconds waited; `state` is that of a LockEvent.

        Raises HostBusy as `hold` does.
        """
        begin, pause, reported = time.monotonic(), _FIRST_PAUSE_S, ("", object())
        try:
            while holder := find_holder():
                left = self._left_s - (time.monotonic() - begin)
                if left <= 0:
                    wait_s = self._plan.wait_s
                    what = "the build folder" if state == "building" else "the device"
                    message = f"{what} {busy(wait_s)}: {held(holder.what, holder.who)}"
                    raise HostBusy(message, next=longer(wait_s))
                if holder[:2] != reported:
                    self._tell(LockEvent(state=state, path=holder.what, owner=holder.who, left_s=left))
                    reported = holder[:2]
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LAST_PAUSE_S)
        finally:
            waited = time.monotonic() - begin
            self._left_s -= waited
        return waited

    def strangers(self, processes: Iterable[ComputeProcess]) -> list[ComputeProcess]:
        """Return those compute processes of other sessions that use this job's GPUs; [] for a job on the processor.

        A process of which nvidia-smi does not name the GPU may be on one of them.
        """
        if not self._on_gpus:
            return []
        ours = (p for p in processes if p.gpu_uuid in self.devices or not p.gpu_uuid.startswith("GPU-"))
        return foreign(ours, self._own)

    def disturbance(self, looks: Sequence[list[ComputeProcess] | None]) -> Reason | None:
        """Return a reason if other processes may have used the devices during a run, None if it was alone.

        `looks` are the compute processes before and after the run, None if nvidia-smi failed.
        """
        if not self._on_gpus:
            return None
        if None in looks:
            return reason(Code.UNWATCHED)
        seen = self.strangers(process for look in looks for process in look or ())
        return reason(Code.STRANGER, processes=phrase(seen)) if seen else None

    def release(self) -> None:
        """Release all locks and free the owner file; safe to repeat."""
        if self._file:
            self._file.free()
        held = [lock for lock in self._locks if lock.since]
        for lock in self._locks:
            lock.release()
        for lock in held:
            self._tell(LockEvent(state="released", path=str(lock.path), owner=""))

    def _holder(self) -> Holder | None:
        """Return the first holder to wait for. Locks come first, so that only one job at a time checks the rest."""
        if holder := self._held_by_another(self._locks):
            return holder
        if self._file:
            if who := self._file.claimed_by():
                return Holder(str(self._file.path), who, who)
            self._file.sign()  # before waiting for a process, so that no other job begins meanwhile
        if not self._on_gpus:
            return None
        processes = compute_processes()
        if processes is None:
            return Holder("the GPU", "unknown", "an unknown user (nvidia-smi does not say who computes)")
        strangers = self.strangers(processes)
        if not strangers:
            return None
        return Holder(strangers[0].gpu_uuid, [process.pid for process in strangers], phrase(strangers))

    def _held_by_another(self, locks: Sequence[BenchLock]) -> Holder | None:
        """Take locks; return who holds the first that cannot be taken."""
        for number, lock in enumerate(locks):
            if not lock.take(self._owner):
                for later in locks[number + 1 :]:  # keep only locks that come earlier in the common order
                    later.release()
                return Holder(str(lock.path), lock.owner(), lock.owner())
        return None
