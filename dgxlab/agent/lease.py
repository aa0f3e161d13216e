"""The devices that a job measures on, and all that may be using them: other jobs, people who sign a file, processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgxlab.agent.environment import settings
from dgxlab.agent.facts import user
from dgxlab.agent.gpus import ComputeProcess, compute_processes, foreign, phrase
from dgxlab.agent.lock import BenchLock, OwnerFile
from dgxlab.errors import AGAIN, HostBusy, RemoteError
from dgxlab.model import CheckStep, GateStep, Plan, gpu_backends
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.units import duration

CPU = "cpu"
Gpu = Mapping[str, Any]

FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0
"""Between looks while waiting: soon at first, then seldom, because every look disturbs measurements."""


def uses_cuda(plan: Plan) -> bool:
    """Return whether any arm is built for CUDA."""
    return any("CUDA" in gpu_backends(arm.cmake) for arm in plan.arms)


def devices(plan: Plan, gpus: Sequence[Gpu]) -> tuple[str, ...]:
    """Return what to lock, in the one order that keeps two jobs from waiting for each other.

    All GPUs, unless every gate and run names its own in a CUDA_VISIBLE_DEVICES that can be read with certainty. None
    for a plan that needs a GPU where none has a uuid to lock.
    """
    if not uses_cuda(plan):
        return (CPU,)
    every = [gpu for gpu in gpus if gpu["uuid"]]
    envs = [step.env for step in plan.steps if isinstance(step, GateStep)] + [run.env for run in plan.runs]
    envs += [command.env for step in plan.steps if isinstance(step, CheckStep) for command in step.commands]
    seen = [_visible({**settings().env, **env}, every) for env in envs]
    return tuple(sorted({gpu["uuid"] for gpus in seen for gpu in gpus} or {gpu["uuid"] for gpu in every}))


def _visible(env: Mapping[str, str], gpus: Sequence[Gpu]) -> Sequence[Gpu]:
    """Return the GPUs that a program sees in this environment, all of them when that is not certain."""
    named = env.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return gpus
    by_bus = env.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu["name"] for gpu in gpus}) == 1
    visible = [_named(word.strip(), gpus, by_bus) for word in named.split(",")]
    certain = [gpu for gpu in visible if gpu is not None]
    return certain if len(certain) == len(visible) else gpus


def _named(word: str, gpus: Sequence[Gpu], by_bus: bool) -> Gpu | None:
    """Return the GPU of a uuid's beginning, or of an index where CUDA counts as nvidia-smi does; None if in doubt."""
    if word.startswith("GPU-"):
        matching = [gpu for gpu in gpus if gpu["uuid"].startswith(word)]
    else:
        matching = [gpu for gpu in gpus if by_bus and gpu["index"] == word]
    return matching[0] if len(matching) == 1 else None


@dataclass(frozen=True)
class Holder:
    """The holder of what a job waits for.

    Attributes:
        what: The file or the GPU.
        key: Tells one holder from the next.
        who: In words.
    """

    what: str
    key: object
    who: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.what} is held by {self.who}"


class DeviceLease:
    """The devices of one job. Nothing is taken before `hold`, and nothing is kept after `release`.

    Args:
        own: Pids that the job started.
        on_change: Called with state (unwatched, waiting, held, released), path and owner of the `lock` events.
    """

    def __init__(
        self,
        plan: Plan,
        gpus: Sequence[Gpu],
        own: Collection[int],
        on_change: Callable[[str, str, str], None],
    ) -> None:
        taken = devices(plan, gpus)
        self._plan = plan
        self._owner = {"job": plan.job_id, "user": user()}
        self._locks = [BenchLock(device) for device in taken]
        self._others = {gpu["uuid"] for gpu in gpus} - set(taken) if uses_cuda(plan) else None
        path = settings().lock
        self._file = OwnerFile(path, plan.job_id, user()) if path else None
        self._unwatched_told = False
        self._own = own
        self._on_change = on_change
        self._left_s = plan.wait_s

    @property
    def fds(self) -> list[int]:
        """Descriptors of the locks that are held, for children to inherit."""
        return [fd for lock in self._locks for fd in lock.fds]

    def hold(self) -> float:
        """Have the devices to itself, before every launch that counts; waits at most plan.wait_s in a whole job.

        Returns:
            The seconds that it took.

        Raises:
            HostBusy: if others have them for longer.
            RemoteError: if the plan needs a GPU and there is none that can be locked.
        """
        if not self._locks:
            raise RemoteError(
                "nvidia-smi lists no GPU on this host, and the plan needs one", next=f"dgxlab doctor {settings().name}"
            )
        if self._file and not self._file.watched and not self._unwatched_told:
            self._on_change("unwatched", str(self._file.path), "its folder is not there")
            self._unwatched_told = True
        begin, before = time.monotonic(), [lock.since for lock in self._locks]
        self._wait()
        if [lock.since for lock in self._locks] != before:
            for lock in self._locks:
                self._on_change("held", str(lock.path), self._plan.job_id)
        return time.monotonic() - begin

    def strangers(self, processes: Iterable[ComputeProcess]) -> list[ComputeProcess]:
        """Return the processes that disturb this job's GPUs, [] for a job on the processor."""
        if self._others is None:
            return []
        return foreign([p for p in processes if p.gpu_uuid not in self._others], self._own)

    def disturbance(self, looks: Sequence[list[ComputeProcess] | None]) -> Reason | None:
        """Return who may have disturbed a run, None where it was alone.

        Args:
            looks: The processes before and after it, None where nvidia-smi did not say, which does not mean none.
        """
        if self._others is None:
            return None
        if None in looks:
            return reason(Code.UNWATCHED)
        seen = self.strangers(process for look in looks for process in look or ())
        return reason(Code.STRANGER, processes=phrase(seen)) if seen else None

    def release(self) -> None:
        """Let go of everything; harmless to repeat."""
        if self._file:
            self._file.free()
        held = [lock for lock in self._locks if lock.since]
        for lock in self._locks:
            lock.release()
        for lock in held:
            self._on_change("released", str(lock.path), "")

    def _wait(self) -> None:
        begin, pause, told = time.monotonic(), FIRST_PAUSE_S, None
        try:
            while holder := self._holder():
                left = self._left_s - (time.monotonic() - begin)
                if left <= 0:
                    wait_s = self._plan.wait_s
                    how = f"stayed busy for {duration(wait_s)}" if wait_s else "is busy"
                    longer = f"--wait {max(60.0, wait_s / 30):g} waits longer"  # minutes: twice as long
                    raise HostBusy(f"the device {how}: {holder}; {longer}", next=AGAIN)
                if holder != told:
                    self._on_change("waiting", holder.what, holder.who)
                    told = holder
                time.sleep(min(pause, left))
                pause = min(2 * pause, LAST_PAUSE_S)
        finally:
            self._left_s -= time.monotonic() - begin

    def _holder(self) -> Holder | None:
        """Return the first who is in the way; the locks come first, so that no two jobs judge the rest at once."""
        for number, lock in enumerate(self._locks):
            if not lock.take(self._owner):
                for later in self._locks[number:]:  # what is kept while waiting comes first in the common order
                    later.release()
                return Holder(str(lock.path), lock.owner(), lock.owner())
        if self._file:
            if who := self._file.claim():
                return Holder(str(self._file.path), who, who)
            self._file.sign()  # before a process is waited for, so that no other job begins meanwhile
        if self._others is None:
            return None
        processes = compute_processes()
        if processes is None:
            return Holder("the GPU", "unknown", "an unknown user (nvidia-smi does not say who computes)")
        strangers = self.strangers(processes)
        if not strangers:
            return None
        return Holder(strangers[0].gpu_uuid, [process.pid for process in strangers], phrase(strangers))
